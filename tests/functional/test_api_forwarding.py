"""A request about a shard that another replica leads: passed on once, or answered with the leader's
address.
"""

import asyncio
from time import perf_counter
from typing import Any

import msgspec
import pytest

from metaservice.api.settings import ApiSettings
from metaservice.core.rejections import Rejection
from tests.functional.api_house import until
from tests.functional.fake_fleet import LOOKUP, OWNER, START, DeafLeader, open_fleet, problem, spread
from tests.security.fake_shard import KEY

HEX = KEY.hex()
FINISH: dict[str, Any] = {**OWNER, "locations": [1], "generations": [1], "checksums": [1]}


# ---------------------------------------------------------------- routes


@pytest.mark.parametrize(
    ("method", "path", "body", "shard", "kind"),
    [
        ("POST", "/v1/instances/m1/lookup", LOOKUP, 1, "Lookup"),
        ("POST", "/v1/instances/m2/writes", START, 2, "StartWrite"),
        ("POST", "/v1/writes/w-2-9/renew", OWNER, 2, "RenewWrite"),
        ("POST", "/v1/leases/r-1-4-9/renew", {}, 1, "RenewLeases"),
        ("POST", "/v1/leases/r-2-4-9/release", {}, 2, "ReleaseLeases"),
        ("POST", "/v1/workers/w1/tasks", {"incarnation": "j", "shard": 1}, 1, "TakeTasks"),
        ("POST", "/v1/workers/w1/tasks/t-2-1-5/confirm", {"incarnation": "j"}, 2, "ConfirmTask"),
        (
            "POST",
            "/v1/workers/w1/unknown",
            {"incarnation": "j", "storage": "s1", "locations": [1 << 44], "generations": [1]},
            1,
            "Unknown",
        ),
        ("POST", "/v1/engines/e1/heartbeat", {"incarnation": "i"}, 0, "Heartbeat"),
        ("PUT", "/v1/tenants/acme", {}, 0, "PutTenant"),
        ("DELETE", "/v1/groups/chat", None, 0, "DeleteGroup"),
        ("PUT", "/v1/switches/cluster", {"mode": "bypass"}, 0, "SetSwitch"),
    ],
)
async def test_every_call_reaches_its_shards_leader_from_any_replica(
    method: str, path: str, body: Any, shard: int, kind: str
) -> None:
    async with open_fleet("r1", "r2", "r3") as fleet:
        spread(fleet)
        leader = f"r{shard + 1}"
        for to in ("r1", "r2", "r3"):
            reply = await fleet.send(to, method, path, body)
            assert reply.status_code in (200, 201), reply.text
            told = reply.headers.get("x-ucm-leader")
            expected = None if to == leader else f"{shard} {fleet.cluster.urls[leader]}"
            assert told == expected, "who was asked by way of another is told where to go"
            assert fleet[to].forwarded("answered") == (to != leader)
        assert fleet.asked(leader, shard) == [kind] * 3
        for id in {"r1", "r2", "r3"} - {leader}:
            assert not any(fleet.asked(id, number) for number in range(3))


async def test_what_is_passed_on_and_back_is_the_same_in_both_encodings() -> None:
    async with open_fleet("r1", "r2") as fleet:
        fleet.cluster.leaders[1] = "r2"
        here, there = fleet.cluster.urls["r1"], fleet.cluster.urls["r2"]
        for media, body in (
            ("application/json", msgspec.json.encode(LOOKUP)),
            ("application/msgpack", msgspec.msgpack.encode({"keys": KEY})),
        ):
            answers = [
                await fleet.http.post(
                    f"{url}/v1/instances/m1/lookup", content=body, headers={"content-type": media}
                )
                for url in (here, there)
            ]
            assert answers[0].content == answers[1].content
            assert answers[0].headers["content-type"] == answers[1].headers["content-type"] == media
            assert answers[0].headers["x-ucm-seq"] == answers[1].headers["x-ucm-seq"] == "1/1/1"


async def test_problems_of_the_leader_come_back_as_they_are() -> None:
    async with open_fleet("r1", "r2") as fleet:
        fleet.cluster.leaders[1] = "r2"
        fleet["r2"].replica.shard(1).rejects = [Rejection("instance_retiring", "it goes", "instance")]
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/writes", START, x_request_id="mine")
        assert problem(reply) == (409, "instance_retiring")
        assert msgspec.json.decode(reply.content)["request_id"] == "mine"
        reply = await fleet.send("r1", "GET", "/v1/instances/m1/blocks/xyz")
        assert problem(reply) == (422, "key_length"), "queries and paths travel as they are"


async def test_admin_reads_are_the_leaders_with_their_query() -> None:
    async with open_fleet("r1", "r2") as fleet:
        fleet.cluster.leaders[0] = "r2"
        reply = await fleet.send("r1", "GET", "/v1/tenants?page_size=1&page_token=%21")
        assert problem(reply) == (422, "invalid_field")
        assert reply.headers["x-ucm-leader"] == f"0 {fleet.cluster.urls['r2']}"
        reply = await fleet.send("r1", "GET", "/v1/tenants/a%2Fb")
        assert problem(reply) == (422, "invalid_name")
        heads = [await fleet.send(to, "HEAD", "/v1/tenants") for to in ("r1", "r2")]
        assert heads[0].headers["content-length"] == heads[1].headers["content-length"] != "0"
        assert heads[0].content == b""


# ---------------------------------------------------------------- no loops


async def test_two_replicas_that_take_each_other_for_the_leader_do_not_loop() -> None:
    async with open_fleet("r1", "r2") as fleet:
        replicas = [fleet["r1"].replica, fleet["r2"].replica]
        urls = [fleet.cluster.urls["r2"], fleet.cluster.urls["r1"]]
        for replica, url in zip(replicas, urls, strict=True):
            replica.leads = lambda number: False  # type: ignore[method-assign]
            replica.leader_url = lambda number, url=url: url  # type: ignore[method-assign, misc]
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/writes", START)
        assert problem(reply) == (503, "not_ready")
        assert int(reply.headers["retry-after"]) >= 1
        moved = fleet["r1"].forwarded("moved")
        assert 1 <= moved < 20 and fleet["r2"].forwarded("told") == moved, "nothing travelled further"
        assert fleet["r2"].forwarded("moved") == fleet["r2"].forwarded("answered") == 0


async def test_a_request_that_was_passed_on_is_never_passed_on_again() -> None:
    async with open_fleet("r1", "r2") as fleet:
        fleet.cluster.leaders[1] = "r2"
        for path, body in (("/v1/instances/m1/lookup", LOOKUP), ("/v1/instances/m1/writes", START)):
            reply = await fleet.send("r1", "POST", path, body, x_ucm_hop="r3")
            assert problem(reply) == (421, "not_leader")
        assert not fleet.asked("r2", 1)
        fleet.cluster.leaders[1] = ""
        begun = perf_counter()
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/lookup", LOOKUP, x_ucm_hop="r3")
        assert problem(reply) == (421, "not_leader"), "nothing was done here, whoever leads"
        assert perf_counter() - begun < 0.15, "whoever passed it on waits, not we"


# ---------------------------------------------------------------- clients that go straight to leaders


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/instances/m1/lookup", LOOKUP),
        ("POST", "/v1/writes/w-1-9/finish", FINISH),
        ("GET", f"/v1/instances/m1/blocks/{HEX}", None),
    ],
)
async def test_a_direct_client_is_told_the_leaders_address(method: str, path: str, body: Any) -> None:
    async with open_fleet("r1", "r2") as fleet:
        fleet.cluster.leaders[1] = "r2"
        reply = await fleet.send("r1", method, path, body, x_ucm_direct="1")
        told = msgspec.json.decode(reply.content)
        assert (reply.status_code, told["code"]) == (421, "not_leader")
        assert told["facts"] == {"shard": 1, "leader": fleet.cluster.urls["r2"]}
        assert reply.headers["x-ucm-leader"] == f"1 {fleet.cluster.urls['r2']}"
        assert "retry-after" not in reply.headers, "it helps to go there, not to wait"
        assert not fleet.asked("r2", 1)
        reply = await fleet.send("r2", method, path, body, x_ucm_direct="1")
        assert reply.status_code == 200


async def test_a_direct_client_does_not_wait_for_a_leader_to_be_found() -> None:
    async with open_fleet("r1", settings=ApiSettings(leader_wait_ms=5_000)) as fleet:
        fleet.cluster.leaders[1] = ""
        begun = perf_counter()
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/lookup", LOOKUP, x_ucm_direct="1")
        assert problem(reply) == (503, "not_ready") and "retry-after" in reply.headers
        assert perf_counter() - begun < 1 and fleet["r1"].replica.waited_ms == []


# ---------------------------------------------------------------- nobody leads


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/v1/instances/m1/writes", START), ("PUT", "/v1/tenants/acme", {})],
)
async def test_an_unknown_leader_is_waited_for_then_come_again(method: str, path: str, body: Any) -> None:
    async with open_fleet("r1", "r2", settings=ApiSettings(leader_wait_ms=300)) as fleet:
        fleet.cluster.leaders = {0: "", 1: ""}
        begun = perf_counter()
        reply = await fleet.send("r1", method, path, body)
        assert 0.25 < perf_counter() - begun < 2
        assert problem(reply) == (503, "not_ready")
        assert int(reply.headers["retry-after"]) >= 1
        asking = asyncio.create_task(fleet.send("r1", method, path, body))
        await until(lambda: len(fleet["r1"].replica.waited_ms) == 2)
        fleet.cluster.leaders = {0: "r2", 1: "r2"}
        assert (await asking).status_code in (200, 201), "the leader that came meanwhile answered"


async def test_leadership_that_comes_here_meanwhile_is_used() -> None:
    async with open_fleet("r1") as fleet:
        fleet.cluster.leaders = {0: "", 1: ""}
        for method, path, body in (
            ("POST", "/v1/instances/m1/lookup", LOOKUP),
            ("PUT", "/v1/tenants/acme", {}),
        ):
            before = len(fleet["r1"].replica.waited_ms)
            asking = asyncio.create_task(fleet.send("r1", method, path, body))
            await until(lambda before=before: len(fleet["r1"].replica.waited_ms) > before)  # type: ignore[misc]
            fleet.cluster.leaders = {0: "r1", 1: "r1"}
            reply = await asking
            assert reply.status_code in (200, 201) and "x-ucm-leader" not in reply.headers
            fleet.cluster.leaders = {0: "", 1: ""}


# ---------------------------------------------------------------- leaders that fail


@pytest.mark.parametrize("manner", ["dies", "hangs"])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/instances/m1/writes", START), ("/v1/instances/m1/lookup", LOOKUP)]
)
async def test_a_leader_that_dies_meanwhile_was_asked_once(manner: str, path: str, body: Any) -> None:
    settings = ApiSettings(forward_timeout_ms=300)
    async with open_fleet("r1", settings=settings) as fleet, DeafLeader(manner) as leader:
        fleet.cluster.urls["dead"] = leader.url
        fleet.cluster.leaders[1] = "dead"
        begun = perf_counter()
        reply = await fleet.send("r1", "POST", path, body)
        assert perf_counter() - begun < 2
        assert problem(reply) == (503, "not_ready") and "retry-after" in reply.headers
        assert "not known" in msgspec.json.decode(reply.content)["detail"]
        assert len(leader.requests) == 1, "whether it was done is not known, so it is not done again"
        assert leader.requests[0].startswith(f"POST {path} HTTP/1.1\r\n".encode())
        assert b"x-ucm-hop: r1\r\n" in leader.requests[0].lower()
        assert fleet["r1"].forwarded("unanswered") == 1


async def test_a_leader_that_cannot_be_reached_has_done_nothing() -> None:
    async with open_fleet("r1") as fleet:
        async with DeafLeader("dies") as leader:
            fleet.cluster.urls["dead"] = leader.url
        fleet.cluster.leaders[1] = "dead"
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/writes", START)
        assert problem(reply) == (503, "not_ready")
        assert "nothing was carried out" in msgspec.json.decode(reply.content)["detail"]
        assert fleet["r1"].forwarded("unreachable") >= 1


@pytest.mark.parametrize("manner", ["unreachable", "not leading"])
async def test_a_new_leader_is_asked_when_the_old_one_certainly_did_nothing(manner: str) -> None:
    """A planned handover, or a leader that is gone: nobody sees it who can wait a moment."""
    async with open_fleet("r1", "r2", "r3", settings=ApiSettings(leader_wait_ms=3_000)) as fleet:
        old, new = fleet["r2"].replica, fleet["r3"].replica
        fleet.cluster.leaders[1] = "r2"
        if manner == "unreachable":
            async with DeafLeader("dies") as gone:
                fleet.cluster.urls["r2"] = gone.url
        else:
            old.leads = lambda number: False  # type: ignore[method-assign]
        asking = asyncio.create_task(fleet.send("r1", "POST", "/v1/instances/m1/writes", START))
        outcome = "unreachable" if manner == "unreachable" else "moved"
        await until(lambda: fleet["r1"].forwarded(outcome) > 0)
        fleet.cluster.leaders[1] = "r3"
        reply = await asking
        assert reply.status_code == 200 and reply.headers["x-ucm-leader"] == f"1 {new.url}"
        assert fleet.asked("r3", 1) == ["StartWrite"] and not fleet.asked("r2", 1)


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "file:///etc/passwd", "http://", "nonsense\r\nx: y"])
async def test_an_address_that_is_none_is_not_gone_to(url: str) -> None:
    async with open_fleet("r1") as fleet:
        fleet.cluster.urls["odd"] = url
        fleet.cluster.leaders[1] = "odd"
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/lookup", LOOKUP)
        assert problem(reply) == (503, "not_ready")
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/lookup", LOOKUP, x_ucm_direct="1")
        assert reply.status_code == 421 and "x" not in reply.headers


async def test_an_answer_that_is_too_large_is_not_passed_back() -> None:
    async with open_fleet("r1", "r2", settings=ApiSettings(forwarded_bytes_max=100)) as fleet:
        fleet.cluster.leaders[1] = "r2"
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/lookup", LOOKUP)
        assert problem(reply) == (503, "not_ready")


async def test_requests_that_are_passed_on_are_bounded() -> None:
    settings = ApiSettings(forwards_max=2, forward_timeout_ms=500)
    async with open_fleet("r1", settings=settings) as fleet, DeafLeader("hangs") as leader:
        fleet.cluster.urls["dead"] = leader.url
        fleet.cluster.leaders[1] = "dead"
        calls = [fleet.send("r1", "POST", "/v1/instances/m1/lookup", LOOKUP) for _ in range(5)]
        codes = sorted(problem(reply)[1] for reply in await asyncio.gather(*calls))
        assert codes == ["not_ready"] * 2 + ["overloaded"] * 3
        assert (await fleet.send("r1", "POST", "/v1/instances/m0/lookup", LOOKUP)).status_code == 200


async def test_i3_requests_that_wait_for_a_leader_keep_nobody_out() -> None:
    settings = ApiSettings(requests_max=32, leader_wait_ms=1_500)
    async with open_fleet("r1", settings=settings) as fleet:
        fleet.cluster.leaders[1] = ""
        calls = [
            asyncio.create_task(fleet.send("r1", "POST", "/v1/instances/m1/lookup", LOOKUP))
            for _ in range(40)
        ]
        await until(lambda: len(fleet["r1"].replica.waited_ms) == 16)
        for path in ("/livez", "/readyz"):
            assert (await fleet.send("r1", "GET", path)).status_code == 200
        assert (await fleet.send("r1", "POST", "/v1/instances/m0/lookup", LOOKUP)).status_code == 200
        codes = sorted(problem(reply)[1] for reply in await asyncio.gather(*calls))
        assert codes == ["not_ready"] * 16 + ["overloaded"] * 24


async def test_i3_requests_that_wait_elsewhere_hold_nobody_up_here() -> None:
    """Fifty long polls and slow requests at a leader that hangs: probes, metrics and local lookups are
    answered.
    """
    settings = ApiSettings(forward_timeout_ms=1_500)
    async with open_fleet("r1", settings=settings) as fleet, DeafLeader("hangs") as leader:
        fleet.cluster.urls["dead"] = leader.url
        fleet.cluster.leaders[1] = "dead"
        poll = {"incarnation": "j", "shard": 1, "wait_ms": 50_000}
        slow = [
            asyncio.create_task(
                fleet.send("r1", "POST", "/v1/workers/w1/tasks", poll)
                if number % 2
                else fleet.send("r1", "POST", "/v1/instances/m1/lookup", LOOKUP)
            )
            for number in range(50)
        ]
        await until(lambda: len(leader.requests) == 50)
        for path in ("/livez", "/readyz", "/metrics", "/v1/cluster", "/v1/status"):
            begun = perf_counter()
            assert (await fleet.send("r1", "GET", path)).status_code == 200
            assert perf_counter() - begun < 0.5, path
        begun = perf_counter()
        assert (await fleet.send("r1", "POST", "/v1/instances/m0/lookup", LOOKUP)).status_code == 200
        assert perf_counter() - begun < 0.5
        begun = perf_counter()
        fleet["r1"].server.request_stop()
        statuses = {reply.status_code for reply in await asyncio.gather(*slow)}
        assert statuses == {503} and perf_counter() - begun < 5, "polls elsewhere end with our own service"


async def test_a_worker_that_hangs_up_ends_its_poll_elsewhere() -> None:
    async with open_fleet("r1") as fleet, DeafLeader("hangs") as leader:
        fleet.cluster.urls["dead"] = leader.url
        fleet.cluster.leaders[1] = "dead"
        _, writer = await asyncio.open_connection("127.0.0.1", fleet["r1"].server.bound_port)
        body = b'{"incarnation":"j1","wait_ms":50000,"shard":1}'
        writer.write(
            b"POST /v1/workers/w1/tasks HTTP/1.1\r\nHost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        await until(lambda: len(leader.requests) == 1)
        writer.close()
        await until(lambda: fleet["r1"].server.gate.in_flight == 0)
