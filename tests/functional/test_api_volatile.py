"""Volatile storages over the wire: every reply that names one says in whose memory the places are."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from metaservice.core.model import Limits
from tests.functional.api_house import JSON, MSGPACK, House, key, keys, open_house, until

LIMITS = Limits(reclaim_delay_ms=0, late_write_ms=0, lease_ms_min=50, lease_ms_max=300)


@pytest_asyncio.fixture(params=[(JSON, 1), (MSGPACK, 1), (MSGPACK, 2)], ids=["json", "msgpack", "2-shards"])
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    """Blocks of `mem` go to memory that worker `m` holds, in the last shard."""
    speech, shards = request.param
    async with open_house(limits=LIMITS, shards=shards) as house:
        await house.furnish()
        await house.put("/v1/storages/mem", {"kind": "shm", "options": {"dir": "/dev/shm"}})
        await house.put("/v1/groups/near", {"tenant": "acme", "storages": ["mem"]})
        shown = await house.ask("GET", "/v1/instances/m1")
        body = {"group": "near", "fingerprint": shown["fingerprint"], "shard": shards - 1}
        await house.put("/v1/instances/mem", body)
        house.speech = speech
        yield house


def ref(pool: str) -> dict[str, Any]:
    """The storage as replies show it."""
    return {"name": "mem", "kind": "shm", "options": {"dir": "/dev/shm", "pool": pool}}


async def register(house: House, incarnation: str, worker: str = "m") -> Any:
    return await house.ask("PUT", f"/v1/workers/{worker}", {"incarnation": incarnation, "storages": ["mem"]})


async def known(house: House, pool: str) -> None:
    """Return once the instance's shard has heard whose the pool is."""
    shard = house.replica.shard(house.replica.shards - 1)
    await until(lambda: getattr(shard.describe_one("storages", "mem"), "pool", None) == pool)


async def test_every_reply_that_names_a_volatile_storage_says_whose_memory_it_is(house: House) -> None:
    engine = await house.ask("PUT", "/v1/engines/e2", {"incarnation": "x", "instance": "mem"})
    assert engine["storage_table"] == [ref("")], "nobody holds it yet"
    assert (await register(house, "life1"))["storage_table"] == [ref("life1")]
    await known(house, "life1")
    engine = await house.ask("PUT", "/v1/engines/e2", {"incarnation": "x", "instance": "mem"})
    assert engine["storage_table"] == [ref("life1")]
    started = await house.start(keys(2), "mem", request_id="q")
    assert started["storage_table"] == [ref("life1")]
    await house.finish(started)
    assert (await house.lookup(keys(2), "mem"))["storage_table"] == [ref("life1")]
    assert (await house.lookup(keys(2), "mem", staleness_ms_max=5_000))["storage_table"] == [ref("life1")]
    await house.ask("POST", "/v1/instances/mem/remove", {"keys": house.speech.keys([key(1)])})
    body = {"incarnation": "life1", "wait_ms": 5_000}
    (task,) = (await house.ask("POST", "/v1/workers/m/tasks", body))["tasks"]
    assert task["storage"] == ref("life1")


async def test_d11_when_its_worker_starts_anew_what_it_held_is_gone_at_once(house: House) -> None:
    await register(house, "life1")
    await known(house, "life1")
    await house.fill(2, instance="mem")
    await house.fill(2, instance="m1")
    started = await house.start([key(9)], "mem", request_id="q", parent=house.speech.key(key(8)))
    lease = (await house.lookup(keys(2), "mem", lease_ms=300))["lease"]
    assert (await register(house, "life2"))["storage_table"] == [ref("life2")]
    await known(house, "life2")
    assert (await house.lookup(keys(2), "mem"))["hits"] == 0
    assert (await house.lookup(keys(2), "m1"))["hits"] == 2
    again = await house.start([key(9)], "mem", request_id="q", parent=house.speech.key(key(8)))
    assert again["storage_table"] == [ref("")], "a retry is not sent to the new memory"
    finished = await house.finish(again)
    status = finished["status"] if house.speech.is_json else [*finished["status"]]
    assert status == (["removed"] if house.speech.is_json else [3])
    released = await house.ask("POST", f"/v1/leases/{lease}/release", {})
    changed = released["changed"] if house.speech.is_json else [*released["changed"]][:1]
    assert changed == [2] and started["session"] == again["session"]
    assert (await house.start(keys(2), "mem"))["storage_table"] == [ref("life2")]


async def test_c4_who_else_wants_it_is_told_who_has_it(house: House) -> None:
    await register(house, "life1")
    body = {"incarnation": "y", "storages": ["mem"]}
    reply = await house.send("PUT", "/v1/workers/other", body)
    problem = house.speech.decode(reply.content)
    assert (reply.status_code, problem["code"], problem["field"]) == (409, "storage_owned", "storages[0]")
    assert problem["facts"] == {"worker": "m"}
    await house.ask("DELETE", "/v1/workers/m?incarnation=life1")
    await house.ask("PUT", "/v1/workers/other", body)
    await known(house, "y")
    status, code, _ = await house.problem(
        "PUT", "/v1/workers/m", {"incarnation": "life2", "storages": ["mem"]}
    )
    assert (status, code) == (409, "storage_owned")


async def test_while_nobody_holds_it_nothing_is_written_there(house: House) -> None:
    refused = await house.start(keys(1), "mem")
    assert refused["session"] is None
    reason = refused["reasons"][0]
    assert reason == ("no_storage" if house.speech.is_json else 8)


async def test_what_is_registered_is_shown_as_it_was_put_beside_who_holds_it(house: House) -> None:
    await register(house, "life1")
    shown = await house.ask("GET", "/v1/storages/mem")
    assert (shown["volatile"], shown["worker"], shown["pool"]) == (True, "m", "life1")
    assert shown["options"] == {"dir": "/dev/shm"}
    assert (await house.ask("GET", "/v1/storages/s1"))["volatile"] is False
    status, code, field = await house.problem(
        "PUT", "/v1/storages/other", {"kind": "shm", "options": {"pool": "mine"}}
    )
    assert (status, code, field) == (422, "invalid_field", "options.pool")
    assert (await house.problem("DELETE", "/v1/storages/mem"))[:2] == (409, "in_use")
