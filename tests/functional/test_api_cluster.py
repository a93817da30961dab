"""The API of a real replica with many shards, and the routes of the cluster."""

from typing import Any

import httpx
import msgspec
import pytest

from metaservice.api.app import build_app
from metaservice.api.peers import Peers
from metaservice.api.settings import ApiSettings
from metaservice.clock import monotonic_s
from metaservice.core.model import Limits
from metaservice.core.replies import Errands
from metaservice.telemetry.metrics import Metrics
from metaservice.telemetry.tracing import open_tracer
from metaservice.wire.schemas_cluster import ClusterReply
from tests.functional.api_fleet import furnish
from tests.functional.api_house import (
    FINGERPRINT,
    JSON,
    LIMITS,
    MSGPACK,
    OWNER,
    WORKER,
    Speech,
    key,
    keys,
    lone_replica,
    numbers,
    open_house,
)
from tests.unit.replica_house import leave_the_heap_alone


@pytest.fixture(autouse=True)
def heap(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_the_heap_alone(monkeypatch)


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


async def test_a_replica_that_has_not_loaded_anything_yet_says_so() -> None:
    """A replicated one listens before the journal could be reached."""
    settings, metrics = ApiSettings(leader_wait_ms=50), Metrics(monotonic_s)
    peers = Peers("r1", settings)
    replica = lone_replica(LIMITS, metrics, peers, 2)
    app = build_app(replica, metrics, open_tracer(False), settings, peers)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        told = msgspec.convert((await client.get("/v1/cluster")).json(), ClusterReply)
        assert (told.ready, told.cluster, [shard.seq for shard in told.shards]) == (False, "", [0, 0])
        assert (await client.get("/v1/status")).json()["ready"] is False
        assert (await client.get("/livez")).status_code == (await client.get("/metrics")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        for method, path, body in (
            ("GET", "/v1/tenants", None),
            ("GET", "/v1/tenants?stale=true", None),
            ("PUT", "/v1/tenants/acme", {}),
            ("POST", "/v1/instances/m1/lookup", {"keys": [], "staleness_ms_max": 1_000}),
            ("POST", "/v1/engines/e1/heartbeat", {"incarnation": "i1"}),
            ("POST", "/v1/workers/w1/tasks", {"incarnation": "j1"}),
            ("POST", "/v1/cluster/shards/0/handover", {}),
        ):
            reply = await client.request(method, path, json=body)
            assert (reply.status_code, reply.json()["code"]) == (503, "not_ready"), path
            assert "retry-after" in reply.headers
    await replica.stop()
    await peers.close()


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
