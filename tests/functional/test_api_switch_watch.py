"""The switch of an instance, told to whoever waits for it as soon as it changes."""

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any

import httpx
import msgspec
import pytest

from metaservice.api.settings import ApiSettings
from metaservice.core.model import SwitchMode, SwitchScope
from metaservice.core.replies import Switched
from tests.functional import fake_fleet
from tests.functional.api_fleet import decoded, furnish, open_fleet
from tests.functional.api_house import MSGPACK, House, open_house, until
from tests.unit.replica_house import leave_the_heap_alone

FreePort = Callable[[], int]
PATH = "/v1/instances/m1/switch"
NORMAL = {"mode": "normal", "switch": None}
SOON_S = 0.1
"""A change is told within milliseconds; a machine that is busy with others needs some more."""


@pytest.fixture(autouse=True)
def heap(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_the_heap_alone(monkeypatch)


def polling(
    house: House, known: str, wait_ms: int = 20_000, path: str = PATH
) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(house.send("GET", f"{path}?known={known}&wait_ms={wait_ms}"))


async def put_switch(house: House, path: str, mode: str) -> float:
    """Set a switch; when that was asked for."""
    begun = perf_counter()
    await house.put(f"/v1/switches/{path}", {"mode": mode})
    return begun


async def waiting(house: House, count: int = 1) -> None:
    await until(lambda: house.server.gate.in_flight >= count)


async def test_it_is_told_at_once_when_it_is_not_what_is_known() -> None:
    async with open_house() as house:
        await house.furnish()
        assert await house.ask("GET", PATH) == NORMAL
        assert await house.ask("GET", f"{PATH}?known=bypass&wait_ms=20000") == NORMAL
        await put_switch(house, "group/chat", "read_only")
        told = await house.ask("GET", f"{PATH}?known=normal&wait_ms=20000")
        assert told == {"mode": "read_only", "switch": {"scope": "group", "id": "chat", "mode": "read_only"}}
        house.speech = MSGPACK
        assert await house.ask("GET", f"{PATH}?known=bypass") == told
        reply = await house.http.head(PATH)
        assert (reply.status_code, reply.content) == (200, b"")


@pytest.mark.parametrize("scope", ["cluster", "tenant/acme", "group/chat", "instance/m1"])
async def test_a_change_at_any_scope_is_told_within_milliseconds(scope: str) -> None:
    async with open_house() as house:
        await house.furnish()
        known, took = "normal", []
        for mode in ("bypass", "read_only", "bypass", "normal", "read_only", "normal"):
            poll = polling(house, known)
            await waiting(house)
            begun = await put_switch(house, scope, mode)
            told = decoded(await poll)
            took.append(perf_counter() - begun)
            assert told["mode"] == mode
            assert (told["switch"] or {}).get("scope", "") == (
                "" if mode == "normal" else scope.split("/", maxsplit=1)[0]
            )
            known = mode
        assert sorted(took)[len(took) // 2] < SOON_S, took


async def test_what_changes_nothing_for_the_instance_is_waited_out() -> None:
    """A switch elsewhere, one below the strictest, and the same one again tell nobody anything."""
    async with open_house() as house:
        await house.furnish()
        await put_switch(house, "cluster", "bypass")
        poll = polling(house, "bypass", wait_ms=600)
        await waiting(house)
        begun = perf_counter()
        await put_switch(house, "instance/m1", "read_only")
        await put_switch(house, "cluster", "bypass")
        assert decoded(await poll)["mode"] == "bypass"
        assert perf_counter() - begun > 0.4


async def test_everybody_who_waits_is_told() -> None:
    async with open_house() as house:
        await house.furnish()
        polls = [polling(house, "normal") for _ in range(40)]
        await waiting(house, 40)
        await put_switch(house, "cluster", "read_only")
        assert [decoded(await poll)["mode"] for poll in polls] == ["read_only"] * 40


async def test_polls_that_wait_are_bounded_and_one_more_is_answered_at_once() -> None:
    async with open_house(settings=ApiSettings(long_polls_max=2)) as house:
        await house.furnish()
        polls = [polling(house, "normal") for _ in range(2)]
        await waiting(house, 2)
        begun = perf_counter()
        assert decoded(await polling(house, "normal")) == NORMAL
        body = {"incarnation": "j1", "wait_ms": 20_000}
        assert (await house.ask("POST", "/v1/workers/w1/tasks", body))["tasks"] == [], "the bound is shared"
        assert perf_counter() - begun < 2
        await put_switch(house, "cluster", "bypass")
        await asyncio.gather(*polls)


async def test_a_stop_ends_the_wait_with_how_it_stands() -> None:
    async with open_house() as house:
        await house.furnish()
        poll = polling(house, "normal")
        await waiting(house)
        begun = perf_counter()
        house.server.request_stop()
        assert decoded(await poll) == NORMAL
        assert perf_counter() - begun < 2


async def test_a_caller_that_hangs_up_is_not_waited_for() -> None:
    async with open_house() as house:
        await house.furnish()
        _, writer = await asyncio.open_connection("127.0.0.1", house.port)
        writer.write(f"GET {PATH}?known=normal&wait_ms=50000 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await waiting(house)
        writer.close()
        await until(lambda: house.server.gate.in_flight == 0)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/instances/nobody/switch", (404, "instance_unknown", "instance")),
        ("/v1/instances/nobody/switch?known=normal&wait_ms=20000", (404, "instance_unknown", "instance")),
        (f"{PATH}?known=drain", (422, "invalid_field", "known")),
        (f"{PATH}?wait_ms=x", (422, "invalid_field", "wait_ms")),
        (f"{PATH}?wait_ms=60001", (422, "invalid_field", "wait_ms")),
        (f"{PATH}?wait_ms=-1", (422, "invalid_field", "wait_ms")),
        (f"{PATH}?since=1", (422, "unknown_field", "since")),
        (f"{PATH}?known=normal&known=normal", (422, "invalid_field", "known")),
        (f"{PATH}?known=%ff", (400, "bad_request", "")),
        (f"{PATH}?{'&'.join(f'a{n}=1' for n in range(40))}", (400, "bad_request", "")),
    ],
)
async def test_what_cannot_be_asked_is_told_so(path: str, expected: tuple[int, str, str]) -> None:
    async with open_house() as house:
        await house.furnish()
        assert await house.problem("GET", path) == expected
        assert (await house.send("POST", PATH, {})).status_code == 405


async def test_an_instance_that_goes_meanwhile_ends_the_wait() -> None:
    async with open_house() as house:
        await house.furnish()
        poll = polling(house, "normal")
        await waiting(house)
        assert (await house.send("DELETE", "/v1/instances/m1")).status_code in (200, 202)
        reply = await poll
        assert (reply.status_code, msgspec.json.decode(reply.content)["code"]) == (404, "instance_unknown")


async def test_the_document_describes_it() -> None:
    async with open_house() as house:
        document: dict[str, Any] = (await house.http.get("/openapi.json")).json()
        operation = document["paths"]["/v1/instances/{instance}/switch"]["get"]
        assert "requestBody" not in operation
        assert [(one["name"], one["in"], one["required"]) for one in operation["parameters"]] == [
            ("instance", "path", True),
            ("known", "query", False),
            ("wait_ms", "query", False),
        ]
        assert operation["parameters"][1]["schema"]["enum"] == ["", "bypass", "normal", "read_only"]
        tasks = document["components"]["schemas"]["TakeTasksRequest"]["properties"]
        assert tasks["wait_ms"]["type"] == "integer", "and a duration is no column"


# ---------------------------------------------------------------- several replicas


async def test_any_replica_waits_for_the_leader_of_the_instances_shard(free_port: FreePort) -> None:
    async with open_fleet(free_port, "r1", "r2", "r3", shards=2) as fleet:
        await furnish(fleet["r1"], 2)
        for instance in ("i0", "i1"):
            path = f"/v1/instances/{instance}/switch"
            polls = [polling(member, "normal", path=path) for member in fleet.members.values()]
            for member in fleet.members.values():
                await waiting(member)
            begun = await put_switch(fleet["r1"], f"instance/{instance}", "bypass")
            told = [decoded(await poll)["mode"] for poll in polls]
            assert told == ["bypass"] * 3
            assert perf_counter() - begun < 1.0


async def test_leadership_that_goes_ends_the_wait_at_once(free_port: FreePort) -> None:
    """Who asks straight is told who leads; who does not is passed on, and waits there."""
    async with open_fleet(free_port, "r1", "r2") as fleet:
        leader = fleet.leader()
        await leader.furnish()
        path = f"{PATH}?known=normal&wait_ms=20000"
        straight = asyncio.create_task(leader.send("GET", path, x_ucm_direct="1"))
        passed = asyncio.create_task(leader.send("GET", path))
        await waiting(leader, 2)
        begun = perf_counter()
        await leader.ask("POST", "/v1/cluster/shards/0/handover", {"to": ""})
        reply = await straight
        assert reply.status_code in (421, 503), reply.text
        assert perf_counter() - begun < 1.5, "not when the lease would have been over"
        assert not passed.done()
        await fleet.led()
        await put_switch(leader, "cluster", "bypass")
        assert decoded(await passed)["mode"] == "bypass"


async def test_it_is_answered_by_the_leader_alone() -> None:
    async with fake_fleet.open_fleet("r1", "r2", "r3") as fleet:
        fake_fleet.spread(fleet)
        shard = fleet["r2"].replica.shard(1)
        shard.switch = Switched(SwitchScope.cluster, "", SwitchMode.bypass)
        for to in ("r1", "r2", "r3"):
            reply = await fleet.send(to, "GET", "/v1/instances/m1/switch?known=normal&wait_ms=5000")
            assert decoded(reply)["mode"] == "bypass"
        reply = await fleet.send("r1", "GET", "/v1/instances/m1/switch", x_ucm_direct="1")
        assert fake_fleet.problem(reply) == (421, "not_leader")
