"""Routes of cache events: what is asked of the publisher, what is joined to its answer, what is refused."""

import asyncio
from typing import Any

import msgspec
import pytest

from metaservice.api.settings import ApiSettings
from metaservice.core import commands
from metaservice.core.model import Publication
from metaservice.publish.errors import PublisherUnavailable
from metaservice.wire.schemas_events import (
    REPORT_BLOCKS_MAX,
    REPORT_ITEMS_MAX,
    AttachmentView,
    EngineRoute,
    EventsReply,
    EventsRequest,
    ReportReply,
    RouteAnswer,
    RouteAsk,
    StreamView,
    TierBlocks,
)
from tests.functional.api_house import FINGERPRINT, JSON, MSGPACK, House, Speech, keys, open_house
from tests.functional.fake_fleet import open_fleet, problem
from tests.functional.told_publisher import ToldPublisher

ROUTE = "/v1/instances/m1/route"
CACHE = "/v1/engines/e1/cache"
ENGINE = EngineRoute(
    engine="e1", instance="m1", rank=0, address="10.0.0.1:8000", worker_id=2**64 - 1, node="n1",
    tiers=TierBlocks(gpu=1, cpu=1, storage=1, external=3), blocks=3, tokens=48, staleness_ms=12, visible=True,
)  # fmt: skip


def answer(
    asked: int, announced: int = 0, found: list[bytes] | None = None, instance: str = "m1"
) -> RouteAnswer:
    """What the publisher says of a prompt of `asked` blocks."""
    return RouteAnswer(asked, 16, announced, [ENGINE], found or [], instance)


async def publish(house: House) -> None:
    """Everything registered, and the instance announced."""
    await house.furnish()
    speech, house.speech = house.speech, JSON
    body = {"group": "chat", "fingerprint": FINGERPRINT, "publication": {"model": "tiny"}}
    await house.put("/v1/instances/m1", body)
    house.speech = speech


# ---------------------------------------------------------------- route


@pytest.mark.parametrize("speech", [JSON, MSGPACK], ids=["json", "msgpack"])
async def test_keys_are_passed_on_and_the_pool_is_looked_up_here(speech: Speech) -> None:
    publisher = ToldPublisher(route=answer(5, announced=2))
    async with open_house(events=publisher) as house:
        await publish(house)
        house.speech = speech
        await house.fill(3)
        body = {"keys": speech.keys(keys(5)), "lora": "sql", "salt": "s", "top_k": 4}
        reply = await house.send("POST", ROUTE, body)
        told = speech.decode(reply.content)
        assert reply.status_code == 200, told
        assert publisher.asked == [RouteAsk("m1", keys(5), b"", "sql", "s", 4)]
        assert told["engines"] == [msgspec.to_builtins(ENGINE)]
        seq = house.shard.durable_seq
        assert told["pool"] == {"blocks": 3, "announced": 2, "applied_seq": seq, "staleness_ms": 0}
        assert (told["asked"], told["block_size_tokens"]) == (5, 16)
        assert reply.headers["x-ucm-seq"] == f"0/{house.shard.epoch}/{seq}"
        assert "x-ucm-staleness-ms" not in reply.headers


async def test_an_adapters_pool_is_looked_up_where_the_publisher_says() -> None:
    publisher = ToldPublisher(route=answer(2, instance="m1.sql"))
    async with open_house(events=publisher) as house:
        await publish(house)
        await house.fill(2)
        own = FINGERPRINT | {"extra": {"lora": "sql"}}
        body = {
            "group": "chat",
            "fingerprint": own,
            "publication": {"model": "tiny", "lora": "sql", "base": "m1"},
        }
        await house.put("/v1/instances/m1.sql", body)
        told = await house.ask("POST", ROUTE, {"keys": JSON.keys(keys(2)), "lora": "sql"})
        assert told["pool"]["blocks"] == 0, "the base model's blocks are not the adapter's"


@pytest.mark.parametrize("speech", [JSON, MSGPACK], ids=["json", "msgpack"])
async def test_token_ids_of_whole_blocks_are_passed_on(speech: Speech) -> None:
    publisher = ToldPublisher(route=answer(2, announced=1, found=keys(2)))
    async with open_house(events=publisher) as house:
        await publish(house)
        house.speech = speech
        await house.fill(1)
        ids = [*range(16), *range(2**32 - 16, 2**32), 1, 2, 3]
        told = await house.ask("POST", ROUTE, {"token_ids": speech.column(ids, "I")})
        assert publisher.asked == [RouteAsk("m1", [], MSGPACK.column(ids[:32], "I"), "", "", 0)]
        assert (told["pool"]["blocks"], told["pool"]["announced"]) == (1, 1)
        publisher.answers["route"] = answer(2)
        told = await house.ask("POST", ROUTE, {"token_ids": speech.column(ids, "I")})
        assert told["pool"]["blocks"] == -1, "the hash scheme is not known, so neither are the keys"


NO_ROUTES: list[tuple[Any, ...]] = [
    ({}, "invalid_field", "keys"),
    ({"keys": [keys(1)[0].hex()], "token_ids": [1] * 16}, "invalid_field", "keys"),
    ({"keys": []}, "empty_batch", "keys"),
    ({"token_ids": [1] * 15}, "empty_batch", "keys"),
    ({"keys": ["zz" * 16]}, "invalid_key", "keys[0]"),
    ({"keys": ["00"]}, "key_length", "keys[0]"),
    ({"keys": 5}, "invalid_key", "keys"),
    ({"token_ids": [1] * 15 + [2**32]}, "invalid_field", "token_ids[15]"),
    ({"token_ids": [1] * 15 + [True]}, "invalid_field", "token_ids[15]"),
    ({"token_ids": "abc"}, "invalid_field", "token_ids"),
    ({"keys": [keys(1)[0].hex()], "lora": "a\nb"}, "invalid_field", "lora"),
    ({"keys": [keys(1)[0].hex()], "salt": "x" * 513}, "invalid_field", "salt"),
    ({"keys": [keys(1)[0].hex()], "top_k": -1}, "invalid_field", "top_k"),
    ({"keys": [keys(1)[0].hex()], "tenant": "a"}, "unknown_field", "tenant"),
]


async def test_what_a_route_request_cannot_be() -> None:
    publisher = ToldPublisher()
    async with open_house(events=publisher) as house:
        await publish(house)
        for body, code, field in NO_ROUTES:
            assert await house.problem("POST", ROUTE, body) == (422, code, field), body
        assert not publisher.asked


async def test_who_cannot_be_routed_for() -> None:
    body = {"keys": [keys(1)[0].hex()]}
    async with open_house() as house:
        await house.furnish()
        found = await house.problem("POST", "/v1/instances/none/route", body)
        assert found == (404, "instance_unknown", "instance")
        assert await house.problem("POST", ROUTE, body) == (409, "not_published", "instance")
        found = await house.problem("POST", "/v1/instances/m1/restate", {})
        assert found == (409, "not_published", "instance")
        await publish(house)
        assert (await house.problem("POST", ROUTE, body))[:2] == (409, "events_off")
        report = {"incarnation": "i1", "number": 1}
        assert (await house.problem("POST", CACHE, report))[:2] == (409, "events_off")
        assert (await house.problem("GET", "/v1/events"))[:2] == (409, "events_off")


async def test_a_publisher_that_does_not_answer_is_told_as_what_it_is() -> None:
    publisher = ToldPublisher(route=PublisherUnavailable("events_unavailable", "it is starting"))
    async with open_house(events=publisher) as house:
        await publish(house)
        body = {"keys": [keys(1)[0].hex()]}
        reply = await house.send("POST", ROUTE, body)
        assert problem(reply) == (503, "events_unavailable") and int(reply.headers["retry-after"]) >= 1
        publisher.answers["route"] = PublisherUnavailable("no_such_code", "secret detail")
        reply = await house.send("POST", ROUTE, body)
        assert problem(reply) == (500, "internal") and "secret" not in reply.text


async def test_lookups_go_on_while_too_many_wait_for_the_publisher() -> None:
    publisher = ToldPublisher(route=answer(1))
    publisher.delay_s = 0.4
    async with open_house(events=publisher, settings=ApiSettings(events_asks_max=2)) as house:
        await publish(house)
        body = {"keys": [keys(1)[0].hex()]}
        waiting = [asyncio.ensure_future(house.send("POST", ROUTE, body)) for _ in range(5)]
        await asyncio.sleep(0.1)
        assert (await house.lookup(keys(1)))["hits"] == 0
        assert not all(one.done() for one in waiting), "the lookup waited for them"
        replies = await asyncio.gather(*waiting)
        assert sorted(reply.status_code for reply in replies) == [200, 200, 503, 503, 503]
        assert {problem(reply)[1] for reply in replies if reply.status_code == 503} == {"overloaded"}


async def test_a_follower_answers_router_queries_and_says_how_old_its_state_is() -> None:
    publishers = {"r1": ToldPublisher(route=answer(1)), "r2": ToldPublisher(route=answer(1))}
    settings = ApiSettings(staleness_ms_max=2_000)
    async with open_fleet("r1", "r2", settings=settings, events=dict(publishers)) as fleet:
        fleet.cluster.leaders[1] = "r2"
        for member in ("r1", "r2"):
            fleet[member].replica.shard(1).publication = Publication("m")
        shard = fleet["r1"].replica.shard(1)
        shard.epoch, shard.durable_seq, shard.behind_ms = 4, 77, 150
        body: dict[str, Any] = {"keys": [keys(1)[0].hex()]}
        reply = await fleet.send("r1", "POST", ROUTE, body)
        told = msgspec.json.decode(reply.content)
        assert told["pool"] == {"blocks": 1, "announced": 0, "applied_seq": 77, "staleness_ms": 150}
        assert (reply.headers["x-ucm-seq"], reply.headers["x-ucm-staleness-ms"]) == ("1/4/77", "150")
        (looked,) = shard.looked
        assert isinstance(looked, commands.Lookup) and not looked.lease_ms and looked.limit is None
        assert not publishers["r2"].asked, "each replica asks its own publisher"
        # Too old for the caller, or for the service: the leader answers.
        reply = await fleet.send("r1", "POST", ROUTE, {**body, "staleness_ms_max": 149})
        assert msgspec.json.decode(reply.content)["pool"]["staleness_ms"] == 0
        assert reply.headers["x-ucm-leader"].startswith("1 ") and len(publishers["r2"].asked) == 1
        shard.behind_ms = 2_001
        reply = await fleet.send("r1", "POST", ROUTE, body, x_ucm_direct="1")
        assert problem(reply) == (421, "not_leader")


# ---------------------------------------------------------------- reports

TAKEN = ReportReply(stored=["taken"], removed=[], want="", visible_ms=15_000, number=7)


@pytest.mark.parametrize("speech", [JSON, MSGPACK], ids=["json", "msgpack"])
async def test_a_report_goes_to_the_publisher_of_the_replica_that_was_told(speech: Speech) -> None:
    publisher = ToldPublisher(report=TAKEN)
    async with open_house(events=publisher) as house:
        house.speech = speech
        body = {
            "incarnation": "i1", "number": 7, "base": 6, "cleared": True,
            "stored": [{
                "tier": "gpu", "parent": 2**64 - 1, "hashes": speech.column([2**63, 2**40], "Q"),
                "token_ids": speech.column([1, 2, 3, 2**32 - 1], "I"), "lora": "l", "salt": "s",
            }],
            "removed": [{"tier": "cpu", "hashes": speech.column([5], "Q")}],
        }  # fmt: skip
        assert await house.ask("POST", CACHE, body) == msgspec.to_builtins(TAKEN)
        (ask,) = publisher.asked
        assert (ask.engine, ask.incarnation, ask.number, ask.base, ask.cleared) == ("e1", "i1", 7, 6, True)
        (stored,), (removed,) = ask.stored, ask.removed
        assert (stored.tier, stored.parent, stored.lora, stored.salt) == ("gpu", 2**64 - 1, "l", "s")
        assert stored.hashes == MSGPACK.column([2**63, 2**40], "Q")
        assert stored.token_ids == MSGPACK.column([1, 2, 3, 2**32 - 1], "I")
        assert (removed.tier, removed.hashes) == ("cpu", MSGPACK.column([5], "Q"))


async def test_heartbeats_and_snapshots_are_reports_too() -> None:
    publisher = ToldPublisher(report=msgspec.structs.replace(TAKEN, stored=[]))
    async with open_house(events=publisher) as house:
        for body in ({"number": 7, "base": 7}, {"number": 8}):
            await house.ask("POST", CACHE, {"incarnation": "i1", **body})
        assert [(ask.number, ask.base) for ask in publisher.asked] == [(7, 7), (8, None)]


def gpu(**more: Any) -> dict[str, Any]:
    """A stored item."""
    return {"tier": "gpu", "hashes": [2**40], "token_ids": [1], **more}


NO_REPORTS: list[tuple[Any, ...]] = [
    ({"base": 2}, "invalid_field", "base"),
    ({"base": 1, "stored": [gpu()]}, "invalid_field", "base"),
    ({"base": 1, "cleared": True}, "invalid_field", "base"),
    ({"number": -1}, "invalid_field", "number"),
    ({"stored": [gpu(), gpu(hashes=[-1])]}, "invalid_field", "stored[1].hashes[0]"),
    ({"stored": [gpu(hashes="abc")]}, "invalid_field", "stored[0].hashes"),
    ({"stored": [gpu(hashes=[2**64])]}, "invalid_field", "stored[0].hashes[0]"),
    ({"stored": [gpu(parent=2**64)]}, "invalid_field", "stored[0].parent"),
    ({"stored": [gpu(token_ids=[2**32])]}, "invalid_field", "stored[0].token_ids[0]"),
    ({"stored": [gpu(salt="a\0")]}, "invalid_field", "stored[0].salt"),
    ({"stored": [gpu(tier="t" * 17)]}, "invalid_field", "stored[0].tier"),
    ({"stored": [gpu(block="x")]}, "unknown_field", "stored[0].block"),
    ({"removed": [{"tier": "gpu", "hashes": [None]}]}, "invalid_field", "removed[0].hashes[0]"),
    ({"removed": [{"tier": "gpu", "hashes": []}] * (REPORT_ITEMS_MAX + 1)}, "too_many_keys", "stored"),
    ({"removed": [{"tier": "gpu", "hashes": [9] * 33_000}] * 2}, "too_many_keys", "stored"),
    (
        {"removed": [{"tier": "gpu", "hashes": [9] * (REPORT_BLOCKS_MAX + 1)}]},
        "column_length",
        "removed[0].hashes",
    ),
]


async def test_what_a_report_cannot_be() -> None:
    publisher = ToldPublisher()
    async with open_house(events=publisher) as house:
        for body, code, field in NO_REPORTS:
            found = await house.problem("POST", CACHE, {"incarnation": "i1", "number": 1, **body})
            assert found == (422, code, field), body
        assert not publisher.asked


async def test_what_the_publisher_refuses_a_report_for_is_told() -> None:
    publisher = ToldPublisher(report=PublisherUnavailable("reregister", "no such incarnation"))
    async with open_house(events=publisher) as house:
        found = await house.problem("POST", CACHE, {"incarnation": "i0", "number": 1})
        assert found[:2] == (409, "reregister")


# ---------------------------------------------------------------- streams


async def test_streams_are_told_by_the_replica_that_is_asked() -> None:
    stream = StreamView(
        channel=0, shard=0, kind="shared", instance="m1", model="tiny", node="", rank=0,
        topic="kv@pool@tiny", endpoint="tcp://127.0.0.1:9600", replay="tcp://127.0.0.1:9601", live=True,
        number=2**20 + 5, block_size_tokens=16, announced=3, subscribers=2, lag_ms=4,
    )  # fmt: skip
    attached = AttachmentView(name="a", kind="llm-d", target="tcp://epp:5557", ok=False, detail="no route")
    status = EventsReply(streams=[stream], attachments=[attached])
    publisher = ToldPublisher(status=status)
    async with open_fleet("r1", "r2", events={"r1": publisher}) as fleet:
        fleet.cluster.leaders = dict.fromkeys(fleet.cluster.leaders, "r2")
        reply = await fleet.send("r1", "GET", "/v1/events?instance=m1")
        assert msgspec.json.decode(reply.content) == {**msgspec.to_builtins(status), "replica": "r1"}
        assert publisher.asked == [EventsRequest(instance="m1")]
        await fleet.send("r1", "GET", "/v1/events")
        assert publisher.asked[-1] == EventsRequest()
        assert problem(await fleet.send("r1", "GET", "/v1/events?instance=../x")) == (422, "invalid_name")
        assert problem(await fleet.send("r2", "GET", "/v1/events")) == (409, "events_off")


async def test_only_the_leader_tells_routers_again() -> None:
    async with open_fleet("r1", "r2") as fleet:
        fleet.cluster.leaders[1] = "r2"
        for member in ("r1", "r2"):
            fleet[member].replica.shard(1).publication = Publication("m")
        reply = await fleet.send("r1", "POST", "/v1/instances/m1/restate", {})
        assert msgspec.json.decode(reply.content) == {"blocks": 7}
        assert fleet["r2"].replica.shard(1).asked == [commands.Restate(instance="m1")]
        assert not fleet["r1"].replica.shard(1).asked
