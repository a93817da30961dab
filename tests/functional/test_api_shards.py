"""Calls about several shards at once, and refusals by a copy of the catalogue that may be behind."""

import asyncio
from array import array
from time import perf_counter
from typing import Any

import httpx
import msgspec
import pytest

from metaservice.core import replies
from metaservice.core.rejections import Rejection
from metaservice.replica.errors import ShardUnavailable
from tests.functional.api_house import until
from tests.functional.fake_fleet import LOOKUP, START, open_fleet, problem, spread
from tests.security.fake_shard import KEY

HEX = KEY.hex()


# ---------------------------------------------------------------- many shards in one request


@pytest.mark.parametrize("headers", [{}, {"x_ucm_direct": "1"}], ids=["plain", "direct"])
@pytest.mark.parametrize("verb", ["renew", "release"])
async def test_leases_of_several_shards_are_asked_of_each_leader(verb: str, headers: dict[str, str]) -> None:
    async with open_fleet("r1", "r2", "r3") as fleet:
        spread(fleet)
        also = ["r-0-1-1", "r-1-1-2", "nonsense", "r-2-1-3", "r-99-1-1"]
        reply = await fleet.send("r1", "POST", f"/v1/leases/r-2-1-1/{verb}", {"also": also}, **headers)
        told = msgspec.json.decode(reply.content)
        assert told["leases"] == ["r-2-1-1", *also]
        assert told["outcomes"] == ["renewed" if verb == "renew" else "released"] * 6
        assert told["changed"] == [2, 0, 1, 0, 2, 0], "each row is its own shard's answer"
        assert told["ttl_ms"] == 1000
        for shard, named in ((0, 3), (1, 1), (2, 2)):
            (command,) = fleet[f"r{shard + 1}"].replica.shard(shard).asked
            assert len(command.leases) == named  # type: ignore[attr-defined]
        fleet["r3"].replica.shard(2).rejects = [Rejection("ttl_out_of_range", "no", "ttl_ms")]
        reply = await fleet.send("r1", "POST", f"/v1/leases/r-2-1-1/{verb}", {"also": also}, **headers)
        assert problem(reply) == (422, "ttl_out_of_range")
        fleet.cluster.leaders[2] = ""
        reply = await fleet.send("r1", "POST", f"/v1/leases/r-2-1-1/{verb}", {"also": also}, **headers)
        assert problem(reply) == (503, "not_ready")
        reply = await fleet.send(
            "r1", "POST", f"/v1/leases/r-1-1-1/{verb}", {"also": ["r-0-1-1"]}, x_ucm_hop="r3"
        )
        assert problem(reply) == (503, "not_ready"), "a part of a call is not split again"


def task(shard: int, count: int) -> replies.Task:
    locations = array("Q", [(shard << 44) + row for row in range(count)])
    return replies.Task(f"t-{shard}-1-1", "s1", ("tp0",), locations, array("I", [1]) * count, 1000)


async def test_tasks_are_of_all_shards_led_here_within_the_limit() -> None:
    async with open_fleet("r1", "r2") as fleet:
        fleet.cluster.leaders[2] = "r2"
        shards = [fleet["r1"].replica.shard(number) for number in range(3)]
        path, body = "/v1/workers/w1/tasks", {"incarnation": "j", "limit": 10}
        shards[0].tasks, shards[1].tasks, shards[2].tasks = [task(0, 4)], [task(1, 6)], [task(2, 1)]
        told = msgspec.json.decode((await fleet.send("r1", "POST", path, body)).content)
        assert sorted(one["task"] for one in told["tasks"]) == ["t-0-1-1", "t-1-1-1"]
        limits = [command.limit for shard in shards for command in shard.asked]  # type: ignore[attr-defined]
        assert sorted(limits) in ([4, 10], [6, 10])
        assert not shards[2].asked
        shards[0].tasks = [task(0, 10)]
        told = msgspec.json.decode((await fleet.send("r1", "POST", path, body)).content)
        assert len(told["tasks"]) == 1
        # What was handed out is not lost by a refusal of the next shard.
        shards[0].tasks, shards[1].tasks = [task(0, 1)], [task(1, 1)]
        shards[0].rejects = [Rejection("reregister", "who?")]
        codes = [problem_or_tasks(await fleet.send("r1", "POST", path, body)) for _ in range(3)]
        assert sorted(map(str, codes)) in (
            sorted(["['t-1-1-1']", "['t-0-1-1']", "[]"]),
            sorted(["reregister", "['t-1-1-1']", "['t-0-1-1']"]),
            sorted(["reregister", "['t-0-1-1', 't-1-1-1']", "[]"]),
            sorted(["reregister", "['t-1-1-1', 't-0-1-1']", "[]"]),
        )


def problem_or_tasks(reply: httpx.Response) -> Any:
    told = msgspec.json.decode(reply.content)
    return told.get("code") or [one["task"] for one in told["tasks"]]


async def test_a_poll_of_several_shards_waits_for_the_first_that_has_work() -> None:
    async with open_fleet("r1") as fleet:
        body = {"incarnation": "j", "wait_ms": 5_000}
        asking = asyncio.create_task(fleet.send("r1", "POST", "/v1/workers/w1/tasks", body))
        shard = fleet["r1"].replica.shard(1)
        await until(lambda: len(shard.asked) > 1)
        shard.tasks = [task(1, 1)]
        begun = perf_counter()
        assert problem_or_tasks(await asking) == ["t-1-1-1"]
        assert perf_counter() - begun < 1
        begun = perf_counter()
        reply = await fleet.send("r1", "POST", "/v1/workers/w1/tasks", {**body, "wait_ms": 200})
        assert problem_or_tasks(reply) == [] and 0.15 < perf_counter() - begun < 2


async def test_a_worker_at_a_replica_that_leads_nothing_is_sent_to_the_catalogues_leader() -> None:
    async with open_fleet("r1", "r2") as fleet:
        fleet.cluster.leaders = {0: "r2", 1: "r2", 2: "r2"}
        fleet["r2"].replica.shard(0).tasks = [task(0, 1)]
        reply = await fleet.send("r1", "POST", "/v1/workers/w1/tasks", {"incarnation": "j"})
        assert problem_or_tasks(reply) == ["t-0-1-1"]
        reply = await fleet.send("r1", "POST", "/v1/workers/w1/tasks", {"incarnation": "j"}, x_ucm_direct="1")
        assert problem(reply) == (421, "not_leader")


async def test_places_of_several_shards_are_asked_one_shard_at_a_time() -> None:
    async with open_fleet("r1") as fleet:
        path = "/v1/workers/w1/unknown"
        body = {"incarnation": "j", "storage": "s1", "locations": [5, 6, 1 << 44], "generations": [1, 1, 1]}
        reply = await fleet.send("r1", "POST", path, body)
        told = msgspec.json.decode(reply.content)
        assert (reply.status_code, told["code"], told["field"]) == (422, "invalid_field", "locations[2]")
        for locations in ([], [(1 << 44) + 1, (1 << 44) + 2], [200 << 44], [2**64 - 1]):
            same = {**body, "locations": locations, "generations": [1] * len(locations)}
            assert (await fleet.send("r1", "POST", path, same)).status_code == 200
        assert fleet.asked("r1", 1) == ["Unknown"]
        assert fleet.asked("r1", 0) == ["Unknown"] * 3, "no shard has it, and the catalogue's says so"


# ---------------------------------------------------------------- a copy of the catalogue that is behind


async def test_an_instance_that_is_not_known_yet_is_looked_for_once() -> None:
    async with open_fleet("r1", "r2") as fleet:
        fleet.cluster.leaders[1] = "r2"
        replica = fleet["r1"].replica
        replica.known = {"m0"}
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/lookup", LOOKUP)
        assert problem(reply) == (404, "instance_unknown") and replica.refreshed == 1
        replica.learns = {"m1"}
        assert (await fleet.send("r1", "POST", "/v1/instances/m1/lookup", LOOKUP)).status_code == 200
        assert replica.refreshed == 2 and fleet.asked("r2", 1) == ["Lookup"]
        replica.known = {"m0"}
        reply = await fleet.send("r1", "GET", f"/v1/instances/m1/blocks/{HEX}")
        assert reply.status_code == 200 and replica.refreshed == 3


@pytest.mark.parametrize("times", [1, 2])
async def test_a_refusal_by_a_data_shard_that_may_be_behind_is_asked_once_more(times: int) -> None:
    async with open_fleet("r1") as fleet:
        replica = fleet["r1"].replica
        replica.shard(1).rejects = [Rejection("reregister", "who?")] * times
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/writes", START)
        assert reply.status_code == (200 if times == 1 else 409) and replica.refreshed == 1
        replica.shard(0).rejects = [Rejection("reregister", "who?")]
        reply = await fleet.send("r1", "POST", "/v1/instances/m0/writes", START)
        assert problem(reply) == (409, "reregister") and replica.refreshed == 1, "the catalogue knows"


async def test_a_follower_refuses_nothing_that_its_leader_may_know_better() -> None:
    async with open_fleet("r1", "r2") as fleet:
        fleet.cluster.leaders[1] = "r2"
        fleet["r1"].replica.shard(1).instance = lambda name: None  # type: ignore[method-assign]
        assert (await fleet.send("r1", "POST", "/v1/instances/m1/lookup", LOOKUP)).status_code == 200
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/lookup", {"keys": ["00"]})
        assert problem(reply) == (422, "key_length") and fleet["r1"].forwarded("answered") == 2
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/lookup", {"kyes": []})
        assert problem(reply) == (422, "unknown_field") and fleet["r1"].forwarded("answered") == 2


async def test_a_replica_without_any_state_knows_of_no_instance_that_it_is_unknown() -> None:
    async with open_fleet("r1", "r2") as fleet:
        fleet.cluster.leaders[1] = "r2"
        replica = fleet["r1"].replica
        replica.shard(1).instance = stateless  # type: ignore[method-assign]
        assert (await fleet.send("r1", "POST", "/v1/instances/m1/lookup", LOOKUP)).status_code == 200
        stale = {**LOOKUP, "staleness_ms_max": 1_000}
        assert (await fleet.send("r1", "POST", "/v1/instances/m1/lookup", stale)).status_code == 200
        assert fleet["r1"].forwarded("answered") == 2
        replica.known, replica.shard(0).epoch = set(), 0
        for method, path, body in (
            ("POST", "/v1/instances/m1/lookup", LOOKUP),
            ("POST", "/v1/instances/m1/writes", START),
            ("GET", f"/v1/instances/m1/blocks/{HEX}", None),
        ):
            reply = await fleet.send("r1", method, path, body)
            assert problem(reply) == (503, "not_ready") and "retry-after" in reply.headers


def stateless(name: str) -> Any:
    raise ShardUnavailable("not_ready", "rebuilding")
