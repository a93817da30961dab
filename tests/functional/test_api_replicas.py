"""The API of several real replicas: each answers every call, and nobody sees shards move."""

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any

import httpx
import msgspec
import pytest

from metaservice.api.settings import ApiSettings
from metaservice.wire.schemas_cluster import ClusterReply
from tests.functional.api_fleet import QUICK, Fleet, decoded, furnish, open_fleet
from tests.functional.api_house import (
    FINGERPRINT,
    OWNER,
    WORKER,
    House,
    key,
    keys,
    until,
)
from tests.unit.replica_house import leave_the_heap_alone

FreePort = Callable[[], int]


@pytest.fixture(autouse=True)
def heap(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_the_heap_alone(monkeypatch)


async def test_every_replica_answers_every_call(free_port: FreePort) -> None:
    async with open_fleet(free_port, "r1", "r2", "r3", shards=2) as fleet:
        await furnish(fleet["r1"], 2)
        for turn, member in enumerate(fleet.members.values()):
            for shard in range(2):
                await member.fill(3, 3 * turn, f"i{shard}")
                assert (await member.lookup(keys(3 * turn + 3), f"i{shard}"))["hits"] == 3 * turn + 3
        shown = [await member.ask("GET", "/v1/instances/i1") for member in fleet.members.values()]
        assert shown[0] == shown[1] == shown[2]
        for member in fleet.members.values():
            engines = await member.ask("GET", "/v1/engines")
            assert engines["items"][0]["status"] == "active"


async def test_an_instance_can_be_used_as_soon_as_it_is_there(free_port: FreePort) -> None:
    """The catalogue's leader registers, the data shard's leader may be behind it: it catches up, and no
    refusal gets out.
    """
    async with open_fleet(free_port, "r1", "r2", shards=3) as fleet:
        await fleet["r1"].furnish()
        for turn in range(3):
            for to, other in (("r1", "r2"), ("r2", "r1")):
                name, engine = f"n{turn}{to}", f"e{turn}{to}"
                body = {"group": "chat", "fingerprint": FINGERPRINT, "shard": turn % 3}
                await fleet[to].put(f"/v1/instances/{name}", body)
                await fleet[to].ask("PUT", f"/v1/engines/{engine}", {"incarnation": "x", "instance": name})
                sent = {"engine": engine, "incarnation": "x", "keys": [key(1).hex()], "parents": [None]}
                started = await fleet[other].ask("POST", f"/v1/instances/{name}/writes", sent)
                assert started["outcomes"] == ["write"]


async def test_followers_look_up_what_is_durable_and_say_how_old_it_is(free_port: FreePort) -> None:
    async with open_fleet(free_port, "r1", "r2") as fleet:
        leader, follower = fleet.leader(), fleet.follower()
        await leader.furnish()
        await leader.fill(4)
        seq = leader.shard.durable_seq
        await until(lambda: follower.shard.durable_seq >= seq)
        body = {"keys": [one.hex() for one in keys(4)], "staleness_ms_max": 2_000}
        reply = await follower.send("POST", "/v1/instances/m1/lookup", body)
        told = decoded(reply)
        assert (told["hits"], told["applied_seq"] >= seq) == (4, True)
        assert 0 <= told["staleness_ms"] <= 2_000
        assert reply.headers["x-ucm-staleness-ms"] == str(told["staleness_ms"])
        assert "x-ucm-leader" not in reply.headers
        # What is being written is nobody's to read, there as here.
        await leader.start(keys(1, 4), parent=key(3).hex())
        await until(lambda: follower.shard.durable_seq >= leader.shard.durable_seq)
        body["keys"] = [one.hex() for one in keys(5)]
        assert decoded(await follower.send("POST", "/v1/instances/m1/lookup", body))["hits"] == 4
        stale = await follower.send("GET", "/v1/instances/m1?stale=true")
        fresh = await follower.send("GET", "/v1/instances/m1")
        assert "x-ucm-staleness-ms" in stale.headers and "x-ucm-leader" in fresh.headers
        assert decoded(stale)["id"] == decoded(fresh)["id"] == "m1"
        detail = await follower.send("GET", f"/v1/instances/m1/blocks/{key(0).hex()}?stale=true")
        assert decoded(detail)["state"] == "serving" and "x-ucm-staleness-ms" in detail.headers


async def test_a_handover_by_way_of_any_replica(free_port: FreePort) -> None:
    async with open_fleet(free_port, "r1", "r2", "r3", shards=2) as fleet:
        await furnish(fleet["r1"], 2)
        asked = fleet.follower(1)
        leader = fleet.leader(1)
        successor = next(id for id in fleet.members if id != leader.replica.id)
        path = "/v1/cluster/shards/1/handover"
        direct = await asked.send("POST", path, {"to": successor}, x_ucm_direct="1")
        assert decoded(direct, 421)["facts"] == {"shard": 1, "leader": leader.replica.url}
        begun = perf_counter()
        told = await asked.ask("POST", path, {"to": successor})
        assert told == {"shard": 1, "successor": successor}
        assert perf_counter() - begun < 1.0, "a planned handover takes a second at most"
        await fleet.led()
        assert fleet.leader(1).replica.id == successor
        told = msgspec.convert(await asked.ask("GET", "/v1/cluster"), ClusterReply)
        assert told.shards[1].leader == successor and len(told.members) == 3
        status, code, _ = await asked.problem("POST", path, {"to": "nobody"})
        assert (status, code) == (503, "not_ready")


async def test_nobody_sees_an_error_while_shards_move(free_port: FreePort) -> None:
    settings = ApiSettings(leader_wait_ms=5_000)  # for a machine that is busy with others
    async with open_fleet(free_port, "r1", "r2", "r3", shards=2, settings=settings) as fleet:
        await furnish(fleet["r1"], 2)
        done = asyncio.Event()
        writers = [
            asyncio.create_task(write_until(fleet, id, shard, done))
            for id in fleet.members
            for shard in range(2)
        ]
        for _ in range(3):
            for shard in range(2):
                await fleet["r1"].ask("POST", f"/v1/cluster/shards/{shard}/handover", {})
                await asyncio.sleep(0.1)
        done.set()
        for statuses in await asyncio.gather(*writers):
            assert len(statuses) > 10 and set(statuses) == {200}


async def write_until(fleet: Fleet, id: str, shard: int, done: asyncio.Event) -> list[int]:
    """Start and finish one block after another by way of one replica."""
    member, statuses = fleet[id], []
    first = 1_000_000 * (sorted(fleet.members).index(id) + 1)
    for number in range(first, first + 100_000):
        if done.is_set():
            break
        body: dict[str, Any] = {**OWNER, "keys": [key(number).hex()], "parents": [None]}
        reply = await member.send("POST", f"/v1/instances/i{shard}/writes", body)
        statuses.append(reply.status_code)
        if reply.status_code != 200:
            continue
        started = decoded(reply)
        finish = {
            **OWNER,
            "locations": started["locations"],
            "generations": started["generations"],
            "checksums": [1, 1],
        }
        finished = await member.send("POST", f"/v1/writes/{started['session']}/finish", finish)
        statuses.append(finished.status_code)
    return statuses


async def test_i10_a_replica_that_ends_hands_over_and_fails_nobody(free_port: FreePort) -> None:
    settings = ApiSettings(drain_delay_ms=200)
    async with open_fleet(free_port, "r1", "r2", settings=settings) as fleet:
        leader, other = fleet.leader(), fleet.follower()
        await leader.furnish()
        await leader.fill(4)
        poll = asyncio.create_task(leader.send("POST", "/v1/workers/w1/tasks", {**WORKER, "wait_ms": 20_000}))
        await until(lambda: leader.server.gate.in_flight == 1)
        done = asyncio.Event()
        load = [asyncio.create_task(look_until(one, done)) for one in (leader, other) for _ in range(2)]
        begun = perf_counter()
        ending = asyncio.create_task(leader.end())
        await asyncio.sleep(0)
        assert (await leader.send("GET", "/readyz")).status_code == 503
        assert (await leader.send("GET", "/livez")).status_code == 200
        await ending
        await until(lambda: other.replica.leads(0), 1)
        assert (await other.lookup(keys(4)))["hits"] == 4
        await until(lambda: not leader.server.gate.connections)
        assert perf_counter() - begun < 4
        done.set()
        for statuses in await asyncio.gather(*load):
            assert set(statuses) == {200}
        assert (await poll).status_code in (200, 503)


async def look_until(member: House, done: asyncio.Event) -> list[int]:
    """Look up until nobody listens any more; the statuses of all answers."""
    statuses = []
    body = {"keys": [one.hex() for one in keys(4)]}
    while not done.is_set():
        try:
            statuses.append((await member.send("POST", "/v1/instances/m1/lookup", body)).status_code)
        except httpx.TransportError:
            break
    return statuses


async def test_a_cluster_whose_leader_is_gone_is_led_again(free_port: FreePort) -> None:
    settings = ApiSettings(leader_wait_ms=200)
    async with open_fleet(free_port, "r1", "r2", settings=settings, pace=QUICK) as fleet:
        leader, other = fleet.leader(), fleet.follower()
        await leader.furnish()
        await leader.fill(2)
        # It falls silent: no renewal gets through, and its socket is closed.
        leader.replica._election._leadership.reachable = False  # type: ignore[attr-defined]
        leader.server.request_stop()
        asked = [
            await other.send("POST", "/v1/instances/m1/lookup", {"keys": [key(0).hex()]}) for _ in range(3)
        ]
        assert {reply.status_code for reply in asked} <= {200, 503}
        assert all("retry-after" in reply.headers for reply in asked if reply.status_code == 503)
        await until(lambda: other.replica.leads(0))
        assert (await other.lookup(keys(2)))["hits"] == 2
        started = await other.start(keys(1, 2), parent=key(1).hex())
        assert started["outcomes"] == ["write"]
