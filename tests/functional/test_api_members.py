"""Engines and workers over the wire: registration, heartbeats, deletion tasks, places that nobody knows."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from metaservice.core.model import Limits
from tests.functional.api_house import (
    JSON,
    MSGPACK,
    OWNER,
    WORKER,
    House,
    Speech,
    key,
    keys,
    numbers,
    open_house,
    until,
)

STORAGES = [
    {"name": "s1", "kind": "posix", "options": {"root": "/s1"}},
    {"name": "s2", "kind": "posix", "options": {"root": "/s2"}},
]


@pytest_asyncio.fixture(params=[JSON, MSGPACK], ids=["json", "msgpack"])
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    async with open_house() as house:
        await house.furnish()
        house.speech = request.param
        yield house


async def test_registration_tells_the_rhythm_and_the_storages(house: House) -> None:
    limits = house.shard.limits
    engine = await house.ask("PUT", "/v1/engines/e2", {"incarnation": "a", "instance": "m1", "rank": 3})
    worker = await house.ask("PUT", "/v1/workers/w2", {"incarnation": "b", "storages": ["s2", "s1"]})
    assert (engine["id"], engine["incarnation"], engine["cluster"]) == ("e2", "a", "cluster1")
    rhythm = (limits.heartbeat_ms, limits.suspect_ms, limits.expire_ms)
    for reply in (engine, worker):
        assert (reply["heartbeat_ms"], reply["suspect_ms"], reply["expire_ms"]) == rhythm
        assert reply["epoch"] == house.shard.epoch
    assert engine["storage_table"] == STORAGES
    assert worker["storage_table"] == STORAGES[::-1]
    nowhere = await house.ask("PUT", "/v1/engines/e3", {"incarnation": "a"})
    assert nowhere["storage_table"] == []
    shown = await house.ask("GET", "/v1/engines/e2")
    assert (shown["incarnation"], shown["instance"], shown["rank"]) == ("a", "m1", 3)


async def test_heartbeats_tell_the_switch(house: House) -> None:
    beat = await house.ask("POST", "/v1/engines/e1/heartbeat", {"incarnation": "i1"})
    assert beat == {"status": "active", "heartbeat_ms": house.shard.limits.heartbeat_ms, "switch": None}
    await house.ask("PUT", "/v1/switches/group/chat", {"mode": "read_only"})
    beat = await house.ask("POST", "/v1/engines/e1/heartbeat", {"incarnation": "i1"})
    assert beat["switch"] == {"scope": "group", "id": "chat", "mode": "read_only"}
    assert (await house.ask("POST", "/v1/workers/w1/heartbeat", WORKER))["status"] == "active"


@pytest.mark.parametrize("path", ["/v1/engines/nobody/heartbeat", "/v1/workers/nobody/heartbeat"])
async def test_c3_a_heartbeat_of_somebody_unknown_is_never_taken(house: House, path: str) -> None:
    status, code, _ = await house.problem("POST", path, {"incarnation": "x"})
    assert (status, code) == (409, "reregister")
    status, code, field = await house.problem("POST", path, {})
    assert (status, code, field) == (422, "invalid_field", "incarnation")


async def test_c4_a_new_incarnation_fences_the_old(house: House) -> None:
    started = await house.start(keys(1))
    await house.ask("PUT", "/v1/engines/e1", {"incarnation": "i2", "instance": "m1"})
    assert (await house.problem("POST", "/v1/engines/e1/heartbeat", {"incarnation": "i1"}))[1] == "reregister"
    late = {**OWNER, "locations": started["locations"], "generations": started["generations"]}
    late["checksums"] = house.speech.column([1, 1], "Q")
    status, _, _ = await house.problem("POST", f"/v1/writes/{started['session']}/finish", late)
    assert status == 409
    status, code, _ = await house.problem("PUT", "/v1/engines/e1", {"incarnation": "i1", "instance": "m1"})
    assert (status, code) == (409, "incarnation_retired")


@pytest.mark.parametrize("speech", [JSON, MSGPACK], ids=["json", "msgpack"])
async def test_bytes_of_removed_blocks_become_tasks_that_are_confirmed(speech: Speech) -> None:
    # A new leader deletes nothing before the longest read lease of its predecessor has passed.
    limits = Limits(reclaim_delay_ms=0, late_write_ms=0, lease_ms_min=50, lease_ms_max=300)
    async with open_house(limits=limits) as house:
        await house.furnish()
        house.speech = speech
        await remove_and_confirm(house)


async def remove_and_confirm(house: House) -> None:
    await house.fill(3)
    wanted = house.speech.keys([key(1), key(2)])
    await house.ask("POST", "/v1/instances/m1/remove", {"keys": wanted})
    taken = await house.ask("POST", "/v1/workers/w1/tasks", {**WORKER, "wait_ms": 5000})
    assert taken["cluster"] == "cluster1"
    task = taken["tasks"][0]
    assert task["storage"] == STORAGES[0]
    assert task["parts"] == ["tp0", "tp1"]
    assert len(numbers(task["locations"], "Q")) == len(numbers(task["generations"], "I")) == 2
    assert task["ttl_ms"] > 0
    path = f"/v1/workers/w1/tasks/{task['task']}/confirm"
    ok = house.speech.flags([True, False])
    assert await house.ask("POST", path, {**WORKER, "ok": ok}) == {"gone": 1, "again": 1}
    assert (await house.problem("POST", "/v1/workers/w1/tasks/t-0-1-999/confirm", dict(WORKER)))[
        1
    ] == "task_unknown"


async def test_places_that_no_block_has_are_told(house: House) -> None:
    started = await house.start(keys(1))
    known = numbers(started["locations"], "Q")[0]
    body = {
        **WORKER,
        "storage": "s1",
        "locations": house.speech.column([known, known, 77], "Q"),
        "generations": house.speech.column([1, 2, 1], "I"),
    }
    unknown = (await house.ask("POST", "/v1/workers/w1/unknown", body))["unknown"]
    assert [bool(flag) for flag in unknown] == [False, True, True]


async def test_an_empty_poll_ends_after_its_wait(house: House) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    taken = await house.ask("POST", "/v1/workers/w1/tasks", {**WORKER, "wait_ms": 300})
    assert taken["tasks"] == []
    assert 0.25 < loop.time() - begun < 3


async def test_a_worker_that_hangs_up_frees_its_poll() -> None:
    async with open_house() as house:
        await house.furnish()
        gate = house.server.gate
        reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
        body = b'{"incarnation":"j1","wait_ms":50000}'
        head = (
            b"POST /v1/workers/w1/tasks HTTP/1.1\r\nHost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        writer.write(head + body)
        await until(lambda: gate.in_flight == 1)
        writer.close()
        await until(lambda: gate.in_flight == 0)
        assert await reader.read() == b""


async def test_members_leave_on_purpose(house: House) -> None:
    assert await house.ask("DELETE", "/v1/engines/e1?incarnation=i1") == {"id": "e1"}
    assert (await house.problem("POST", "/v1/engines/e1/heartbeat", {"incarnation": "i1"}))[1] == "reregister"
    assert await house.ask("DELETE", "/v1/workers/w1?incarnation=j1") == {"id": "w1"}
    assert (await house.problem("DELETE", "/v1/workers/nobody"))[:2] == (404, "worker_unknown")
