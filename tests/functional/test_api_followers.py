"""What a replica answers about shards that it only follows: within a bound, and saying how old it is."""

from typing import Any

import msgspec
import pytest

from metaservice.api.settings import ApiSettings
from metaservice.core import commands
from tests.functional.fake_fleet import LOOKUP, OWNER, open_fleet, problem
from tests.security.fake_shard import KEY

HEX = KEY.hex()


# ---------------------------------------------------------------- followers' answers


async def test_a_follower_answers_lookups_within_the_staleness_that_is_allowed() -> None:
    settings = ApiSettings(staleness_ms_max=2_000)
    async with open_fleet("r1", "r2", settings=settings) as fleet:
        fleet.cluster.leaders[1] = "r2"
        shard = fleet["r1"].replica.shard(1)
        shard.epoch, shard.durable_seq, shard.behind_ms = 4, 77, 150
        path = "/v1/instances/m1/lookup"
        reply = await fleet.send("r1", "POST", path, {**LOOKUP, "staleness_ms_max": 150, **OWNER})
        told = msgspec.json.decode(reply.content)
        assert (told["hits"], told["applied_seq"], told["staleness_ms"], told["seq"]) == (1, 77, 150, 77)
        assert (reply.headers["x-ucm-seq"], reply.headers["x-ucm-staleness-ms"]) == ("1/4/77", "150")
        assert len(shard.looked) == 1 and not fleet.asked("r2", 1)
        (looked,) = shard.looked
        assert isinstance(looked, commands.Lookup) and not looked.engine and not looked.lease_ms
        for bound in (149, 0):
            reply = await fleet.send("r1", "POST", path, {**LOOKUP, "staleness_ms_max": bound})
            told = msgspec.json.decode(reply.content)
            assert "applied_seq" not in told and "staleness_ms" not in told
            assert "x-ucm-staleness-ms" not in reply.headers and reply.headers["x-ucm-seq"] == "1/1/1"
        assert fleet.asked("r2", 1) == ["Lookup"] * 2 and len(shard.looked) == 1
        # The service has a bound of its own: bytes that an older state names may be deleted already.
        shard.behind_ms = 2_001
        reply = await fleet.send("r1", "POST", path, {**LOOKUP, "staleness_ms_max": 2**53 - 1})
        assert reply.headers["x-ucm-leader"].startswith("1 ")
        reply = await fleet.send(
            "r1", "POST", path, {**LOOKUP, "staleness_ms_max": 2**53 - 1}, x_ucm_direct="1"
        )
        assert problem(reply) == (421, "not_leader")
        # The leader's answer is as ever.
        reply = await fleet.send("r2", "POST", path, {**LOOKUP, "staleness_ms_max": 9})
        assert "x-ucm-staleness-ms" not in reply.headers


async def test_a_follower_without_a_leader_to_ask_still_answers_what_it_may() -> None:
    async with open_fleet("r1", settings=ApiSettings(leader_wait_ms=50)) as fleet:
        fleet.cluster.leaders = {0: "", 1: ""}
        fleet["r1"].replica.shard(1).behind_ms = 900
        path = "/v1/instances/m1/lookup"
        reply = await fleet.send("r1", "POST", path, {**LOOKUP, "staleness_ms_max": 1_000})
        assert reply.status_code == 200
        assert problem(await fleet.send("r1", "POST", path, LOOKUP)) == (503, "not_ready")


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({"staleness_ms_max": 5, "lease_ms": 100}, "invalid_field", "staleness_ms_max"),
        ({"staleness_ms_max": -1}, "invalid_field", "staleness_ms_max"),
        ({"staleness_ms_max": 2**53}, "invalid_field", "staleness_ms_max"),
        ({"staleness_ms_max": 1.5}, "invalid_field", "staleness_ms_max"),
        ({"staleness_ms_max": "5"}, "invalid_field", "staleness_ms_max"),
    ],
)
async def test_what_staleness_cannot_be(body: Any, code: str, field: str) -> None:
    async with open_fleet("r1") as fleet:
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/lookup", {**LOOKUP, **body})
        told = msgspec.json.decode(reply.content)
        assert (told["code"], told["field"]) == (code, field)


@pytest.mark.parametrize(
    "path", ["/v1/tenants", "/v1/engines", "/v1/switches", "/v1/switches/cluster", "/v1/switches/tenant/a"]
)
async def test_admin_reads_are_local_when_the_caller_takes_them_stale(path: str) -> None:
    async with open_fleet("r1", "r2", settings=ApiSettings(staleness_ms_max=1_000)) as fleet:
        fleet.cluster.leaders[0] = "r2"
        shard = fleet["r1"].replica.shard(0)
        shard.epoch, shard.durable_seq, shard.behind_ms = 2, 9, 1_000
        reply = await fleet.send("r1", "GET", f"{path}?stale=true")
        assert reply.status_code == 200 and "x-ucm-leader" not in reply.headers
        assert (reply.headers["x-ucm-seq"], reply.headers["x-ucm-staleness-ms"]) == ("0/2/9", "1000")
        reply = await fleet.send("r1", "GET", path)
        assert "x-ucm-leader" in reply.headers and "x-ucm-staleness-ms" not in reply.headers
        shard.behind_ms = 1_001
        reply = await fleet.send("r1", "GET", f"{path}?stale=true")
        assert "x-ucm-leader" in reply.headers, "too old for anybody"
        reply = await fleet.send("r1", "GET", f"{path}?stale=maybe")
        assert problem(reply)[0] == 422
