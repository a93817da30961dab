"""The API of a real cluster: many shards in one replica, and one cluster of several replicas."""

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any

import httpx
import msgspec
import pytest

from metaservice.api.settings import ApiSettings
from metaservice.core.model import Limits
from metaservice.core.replies import Errands
from metaservice.wire.schemas import ClusterReply
from tests.functional.api_fleet import QUICK, Fleet, decoded, open_fleet
from tests.functional.api_house import (
    FINGERPRINT,
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
from tests.unit.replica_house import leave_the_heap_alone

FreePort = Callable[[], int]


@pytest.fixture(autouse=True)
def heap(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_the_heap_alone(monkeypatch)


async def furnish(house: House, shards: int) -> None:
    """What `House.furnish` makes, and an instance `i<shard>` in each shard."""
    await house.furnish()
    for shard in range(shards):
        await house.put(
            f"/v1/instances/i{shard}", {"group": "chat", "fingerprint": FINGERPRINT, "shard": shard}
        )


# ---------------------------------------------------------------- many shards in one replica


@pytest.mark.parametrize("speech", [JSON, MSGPACK], ids=["json", "msgpack"])
async def test_ids_and_replies_carry_their_shard(speech: Speech) -> None:
    async with open_house(shards=3) as house:
        await furnish(house, 3)
        house.speech = speech
        leases = []
        for shard in range(3):
            assert (await house.ask("GET", f"/v1/instances/i{shard}"))["shard"] == shard
            started = await house.start(keys(2), f"i{shard}")
            assert started["session"].startswith(f"w-{shard}-")
            assert {location >> 44 for location in numbers(started["locations"], "Q")} == {shard}
            await house.finish(started)
            reply = await house.send(
                "POST",
                f"/v1/instances/i{shard}/lookup",
                {"keys": speech.keys(keys(2)), "lease_ms": 5_000, **OWNER},
            )
            looked = speech.decode(reply.content)
            assert looked["hits"] == 2 and looked["lease"].startswith(f"r-{shard}-")
            assert reply.headers["x-ucm-seq"] == f"{shard}/{looked['epoch']}/{looked['seq']}"
            leases.append(looked["lease"])
        first, *also = leases
        renewed = await house.ask("POST", f"/v1/leases/{first}/renew", {"also": [*also, "r-0-9-9"]})
        assert renewed["leases"] == [first, *also, "r-0-9-9"] and renewed["ttl_ms"] > 0
        assert list(renewed["outcomes"]) == coded(speech, ["renewed"] * 3 + ["unknown"])
        released = await house.ask("POST", f"/v1/leases/{first}/release", {"also": also})
        assert list(released["outcomes"]) == coded(speech, ["released"] * 3)
        again = await house.ask("POST", f"/v1/leases/{first}/renew", {"also": also})
        assert list(again["outcomes"]) == coded(speech, ["released"] * 3)


def coded(speech: Speech, outcomes: list[str]) -> list[Any]:
    codes = ["renewed", "released", "expired", "unknown"]
    return outcomes if speech.is_json else [codes.index(outcome) for outcome in outcomes]


async def test_a_write_moves_its_shards_seq_and_no_others() -> None:
    async with open_house(shards=2) as house:
        await furnish(house, 2)
        await house.start(keys(1), "i0")  # whatever the catalogue had to tell is told
        before = [house.replica.shard(number).durable_seq for number in range(2)]
        reply = await house.send("POST", "/v1/instances/i1/writes", {**OWNER, "keys": [key(0).hex()]})
        shard, epoch, seq = map(int, reply.headers["x-ucm-seq"].split("/"))
        assert (shard, epoch) == (1, house.replica.shard(1).epoch) and seq > before[1]
        beat = await house.send("POST", "/v1/engines/e1/heartbeat", {"incarnation": "i1"})
        assert beat.headers["x-ucm-seq"].startswith("0/")


async def test_another_server_tells_the_same_headers() -> None:
    """The application without our own connection in front, as ASGI."""
    async with open_house() as house:
        await house.furnish()
        body = {"keys": [key(0).hex()]}
        ours = await house.send("POST", "/v1/instances/m1/lookup", body)
        transport = httpx.ASGITransport(house.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            theirs = await client.post("/v1/instances/m1/lookup", json=body)
        assert theirs.content == ours.content
        assert theirs.headers["x-ucm-seq"] == ours.headers["x-ucm-seq"]


async def test_tasks_and_unknown_places_of_every_shard() -> None:
    limits = Limits(reclaim_delay_ms=0, late_write_ms=0, lease_ms_min=50, lease_ms_max=300)
    async with open_house(limits=limits, shards=3) as house:
        await furnish(house, 3)
        for shard in range(3):
            await house.fill(2, instance=f"i{shard}")
            body = {"keys": [key(1).hex()]}
            await house.ask("POST", f"/v1/instances/i{shard}/remove", body)
        only = await house.ask("POST", "/v1/workers/w1/tasks", {**WORKER, "wait_ms": 5_000, "shard": 2})
        assert [task["task"].split("-")[1] for task in only["tasks"]] == ["2"]
        found: list[Any] = []
        for _ in range(50):
            taken = await house.ask("POST", "/v1/workers/w1/tasks", {**WORKER, "wait_ms": 1_000})
            found += taken["tasks"]
            if len(found) == 2:
                break
        assert sorted(task["task"].split("-")[1] for task in found) == ["0", "1"]
        for task in (*only["tasks"], *found):
            path = f"/v1/workers/w1/tasks/{task['task']}/confirm"
            assert await house.ask("POST", path, WORKER) == {"gone": 1, "again": 0}
        assert (await house.problem("POST", "/v1/workers/w1/tasks", {**WORKER, "shard": 3}))[1:] == (
            "invalid_field",
            "shard",
        )
        status, code, _ = await house.problem("POST", "/v1/workers/nobody/tasks", WORKER)
        assert (status, code) == (409, "reregister")
        for shard in range(3):
            place = (shard << 44) + 70
            asked: dict[str, Any] = {
                **WORKER,
                "storage": "s1",
                "locations": [shard << 44, place],
                "generations": [1, 1],
            }
            unknown = (await house.ask("POST", "/v1/workers/w1/unknown", asked))["unknown"]
            assert unknown == [False, True]
        nobody: dict[str, Any] = {**WORKER, "storage": "s1", "locations": [200 << 44], "generations": [1]}
        told = await house.ask("POST", "/v1/workers/w1/unknown", nobody)
        assert told["unknown"] == [False], "a place of no shard here is nobody's to delete"


@pytest.mark.parametrize("shard", [-1, 256, 2.0, "1", True, [0]])
async def test_what_an_instances_shard_cannot_be(shard: Any) -> None:
    async with open_house(shards=2) as house:
        await house.furnish()
        body = {"group": "chat", "fingerprint": FINGERPRINT, "shard": shard}
        assert (await house.problem("PUT", "/v1/instances/x", body))[1:] == ("invalid_field", "shard")


async def test_an_instance_stays_in_its_shard() -> None:
    async with open_house(shards=2) as house:
        await furnish(house, 2)
        body = {"group": "chat", "fingerprint": FINGERPRINT}
        status, code, field = await house.problem("PUT", "/v1/instances/far", {**body, "shard": 2})
        assert (status, code, field) == (422, "invalid_field", "shard")
        assert (await house.put("/v1/instances/i1", body))["created"] is False
        assert (await house.ask("GET", "/v1/instances/i1"))["shard"] == 1
        status, _, field = await house.problem("PUT", "/v1/instances/i1", {**body, "shard": 0})
        assert status in (409, 422) and field == "shard"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/writes/w-2-1/abort",
        "/v1/writes/w-99999-1/abort",
        "/v1/writes/w-0/abort",
        "/v1/writes/r-0-1/abort",
    ],
)
async def test_sessions_of_no_shard_are_unknown(path: str) -> None:
    async with open_house(shards=2) as house:
        await house.furnish()
        assert (await house.problem("POST", path, OWNER))[:2] == (404, "session_unknown")


# ---------------------------------------------------------------- the cluster's routes


async def test_the_cluster_is_shown_in_every_state() -> None:
    async with open_house(shards=2) as house:
        for speech in (JSON, MSGPACK):
            house.speech = speech
            told = msgspec.convert(await house.ask("GET", "/v1/cluster"), ClusterReply)
            assert (told.replica, told.cluster, told.ready) == ("r1", "cluster1", True)
            assert [shard.shard for shard in told.shards] == [0, 1]
            assert {shard.role for shard in told.shards} == {"leader"}
            assert {shard.leader for shard in told.shards} == {"r1"}
            assert [shard.seq for shard in told.shards] == [
                house.replica.shard(number).durable_seq for number in range(2)
            ]
            (member,) = told.members
            assert member.replica == "r1" and set(member.applied) == {"0", "1"}
        house.speech = JSON
        house.app.begin_drain()
        assert (await house.ask("GET", "/v1/cluster"))["replica"] == "r1"
        await house.replica.stop()
        told = msgspec.convert(await house.ask("GET", "/v1/cluster"), ClusterReply)
        assert not told.ready and not any(shard.ready for shard in told.shards)
        status = await house.ask("GET", "/v1/status")
        assert (status["replica"], status["ready"]) == ("r1", False)


async def test_a_replica_that_is_alone_hands_nothing_over() -> None:
    async with open_house(shards=2) as house:
        assert (await house.problem("POST", "/v1/cluster/shards/1/handover", {}))[:2] == (503, "not_ready")
        for path, field in (
            ("/v1/cluster/shards/2/handover", "shard"),
            ("/v1/cluster/shards/-1/handover", "shard"),
            ("/v1/cluster/shards/x/handover", "shard"),
            ("/v1/cluster/shards/999/handover", "shard"),
        ):
            assert (await house.problem("POST", path, {}))[1:] == ("invalid_field", field), path
        for to in ("a\r\nb", "x" * 129, 5, None):
            reply = await house.problem("POST", "/v1/cluster/shards/1/handover", {"to": to})
            assert reply[1:] == ("invalid_field", "to")
        assert house.replica.leads(1)


async def test_errands_are_between_replicas_and_for_the_catalogues_leader() -> None:
    async with open_house(shards=2) as house:
        await furnish(house, 2)
        path = "/v1/cluster/errands"
        hop = {"x-ucm-hop": "r2"}
        media = {"content-type": "application/msgpack", "accept": "application/json"}

        async def post(content: bytes, headers: dict[str, str]) -> tuple[int, str]:
            reply = await house.http.post(path, content=content, headers=headers)
            told = {} if reply.status_code == 200 else reply.json()
            return reply.status_code, told.get("code", "")

        nothing = Errands(
            shard=1, epoch=1, number=1 << 30, version=0, base=0, returns=(), wants=(), drained=(), used=()
        )
        sent = msgspec.msgpack.encode(nothing)
        assert await post(sent, {**hop, **media}) == (200, "")
        assert await post(sent, media) == (400, "bad_request")
        assert (await post(b"{}", {**hop, "content-type": "application/json"}))[0] == 415
        for rubbish in (
            b"",
            b"\xc1",
            b"\x80",
            b"\x93\x01\x02\x03",
            b"\x91" * 5_000,
            b"x" * 1000,
            b"\xdd\xff\xff\xff\xff",
        ):
            status, _ = await post(rubbish, {**hop, **media})
            assert status in (200, 400, 422), rubbish[:10]
        assert (await house.http.get(path)).status_code == 405
        assert (await house.http.get("/openapi.json")).text.count("errands") == 0
        assert house.replica.ready


# ---------------------------------------------------------------- several replicas


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
