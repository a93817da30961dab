"""What the SDK sends and believes about routers and cache events."""

import time
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from metaservice.client import AsyncClient, Client, ClientConfig, ClientError
from metaservice.wire.schemas_events import (
    EngineRoute,
    EventsReply,
    PoolRoute,
    RemovedItem,
    ReportReply,
    RouteReply,
    StoredItem,
    StreamView,
    TierBlocks,
)
from metaservice.wire.schemas_members import EngineEndpoints
from metaservice.wire.tokens import pack_tokens
from tests.unit.client_peers import Request, good, http, peer, problem

KEYS = [bytes([n]) * 16 for n in range(1, 5)]
ENGINE = EngineRoute(
    engine="e1", instance="i", rank=0, address="a:1", worker_id=7, node="", blocks=3, tokens=48,
    tiers=TierBlocks(gpu=1, cpu=1, storage=2, external=3), staleness_ms=5, visible=True,
)  # fmt: skip
ROUTED: dict[str, Any] = msgspec.to_builtins(
    RouteReply(
        asked=4,
        block_size_tokens=16,
        engines=[ENGINE],
        pool=PoolRoute(blocks=2, announced=1, applied_seq=9, staleness_ms=0),
    )
)
REPORTED: dict[str, Any] = msgspec.to_builtins(
    ReportReply(stored=["taken"], removed=[], want="", visible_ms=9_000, number=3)
)
STREAM = StreamView(
    channel=4, shard=1, kind="shared", instance="i", model="m", node="", rank=0, topic="kv@pool@m",
    endpoint="tcp://h:1", replay="tcp://h:2", live=True, number=2**20, block_size_tokens=16, announced=0,
)  # fmt: skip


def saying(**answers: Any) -> Callable[[Request], None]:
    """A peer that answers these verbs so, and everything else as a good service would."""

    def behave(request: Request) -> None:
        if request.verb == "events":
            request.send(http(msgspec.json.encode(answers["events"]), media="application/json"))
        elif request.verb in answers:
            request.send(http(msgspec.msgpack.encode(answers[request.verb])))
        else:
            good(request)

    return behave


def client_of(url: str, **changes: Any) -> Client:
    return Client(ClientConfig(**{"url": url, "timeout_ms": 2_000, "breaker_failures": 1_000, **changes}))


def test_routing_is_asked_for_keys_or_for_token_ids() -> None:
    with peer(saying(route=ROUTED)) as one, client_of(one.url) as client:
        told = client.route("i", KEYS, lora="sql", salt="s", top_k=3, staleness_ms_max=50)
        assert told.failure is None and told.engines == [ENGINE] and told.asked == 4
        assert told.pool is not None and told.pool.blocks == 2
        ids = [1, 2, 2**32 - 1] * 24
        assert client.route("i", token_ids=ids).failure is None
    by_key, by_token = one.requests
    assert by_key.line.startswith("POST /v1/instances/i/route ")
    assert by_key.fields == {"keys": KEYS, "lora": "sql", "salt": "s", "top_k": 3, "staleness_ms_max": 50}
    assert by_token.fields == {"token_ids": array("I", ids).tobytes()}


async def test_the_asyncio_client_asks_alike() -> None:
    answers = {
        "route": ROUTED,
        "cache": REPORTED,
        "restate": {"blocks": 5},
        "events": EventsReply(streams=[STREAM]),
    }
    with peer(saying(**answers)) as one:
        async with AsyncClient(ClientConfig(url=one.url)) as client:
            client.act_as("e1", "i1")
            assert (await client.route("i", KEYS)).engines == [ENGINE]
            item = StoredItem(tier="gpu", hashes=array("Q", [2**40]).tobytes())
            assert (await client.report_cache(3, None, stored=[item])).number == 3
            assert (await client.restate("i")).blocks == 5
            assert (await client.events("i")).streams == [STREAM]


def test_nothing_to_ask_is_not_sent() -> None:
    with peer(good) as one, client_of(one.url) as client:
        assert client.route("i", []).asked == client.route("i", token_ids=[]).asked == 0
        assert not one.requests
        assert client.route("../x", KEYS).failure == "invalid_request"
        assert client.route("i", token_ids=[2**32]).failure == "invalid_request"
        assert client.restate("a/b").failure == "invalid_request"
        assert client.events("a?b").failure == "invalid_request"
        assert client.report_cache(1, None).failure == "not_registered"
        assert not one.requests


def tiers(**changes: int) -> dict[str, Any]:
    """A reply whose only engine has other tiers."""
    engine = {**ROUTED["engines"][0], "tiers": {**ROUTED["engines"][0]["tiers"], **changes}}
    return {**ROUTED, "engines": [engine]}


LIES: list[dict[str, Any]] = [
    {**ROUTED, "asked": 5},
    {**ROUTED, "asked": -1},
    {**ROUTED, "block_size_tokens": 0},
    {**ROUTED, "pool": {**ROUTED["pool"], "blocks": 5}},
    {**ROUTED, "pool": {**ROUTED["pool"], "blocks": -2}},
    {**ROUTED, "pool": {**ROUTED["pool"], "announced": 5}},
    {**ROUTED, "pool": None},
    {**ROUTED, "engines": [{**ROUTED["engines"][0], "blocks": 5}]},
    {**ROUTED, "engines": [{**ROUTED["engines"][0], "visible": 1}]},
    {**ROUTED, "engines": None},
    tiers(gpu=-1),
    tiers(cpu=0),
    tiers(external=4),
]


def test_a_holding_that_cannot_be_is_not_believed() -> None:
    for lie in LIES:
        with peer(saying(route=lie)) as one, client_of(one.url) as client:
            told = client.route("i", KEYS)
            assert (told.failure, told.engines, told.pool) == ("protocol", [], None), lie


@pytest.mark.parametrize(
    "lie",
    [
        {**REPORTED, "stored": []},
        {**REPORTED, "removed": ["taken"]},
        {**REPORTED, "want": "money"},
        {**REPORTED, "want": "snapshot"},
        {**REPORTED, "visible_ms": 0},
        {**REPORTED, "number": -1},
    ],
)
def test_an_answer_to_another_report_is_not_believed(lie: dict[str, Any]) -> None:
    item = StoredItem(tier="gpu", hashes=array("Q", [2**40]).tobytes())
    with peer(saying(cache=lie)) as one, client_of(one.url) as client:
        client.act_as("e1", "i1")
        assert client.report_cache(3, 2, stored=[item]).failure == "protocol"


def test_a_report_says_what_it_is_told_to() -> None:
    answer = {**REPORTED, "removed": ["taken"]}
    with peer(saying(cache=answer)) as one, client_of(one.url) as client:
        client.act_as("e1", "i1")
        hashes = array("Q", [2**40]).tobytes()
        told = client.report_cache(
            3,
            2,
            stored=[StoredItem(tier="gpu", hashes=hashes, parent=2**41, token_ids=array("I", [1]).tobytes())],
            removed=[RemovedItem(tier="cpu", hashes=hashes)],
            cleared=True,
        )
        assert (told.failure, told.want, told.visible_ms) == (None, "", 9_000)
    (request,) = one.requests
    assert request.line.startswith("POST /v1/engines/e1/cache ")
    stored = {"tier": "gpu", "hashes": hashes, "parent": 2**41, "token_ids": array("I", [1]).tobytes()}
    assert request.fields == {
        "incarnation": "i1", "number": 3, "base": 2, "cleared": True,
        "stored": [stored], "removed": [{"tier": "cpu", "hashes": hashes}],
    }  # fmt: skip


def test_streams_are_asked_of_whoever_leads_the_instance_as_far_as_known() -> None:
    events = EventsReply(replica="r2", streams=[STREAM])

    def first(request: Request) -> None:
        if request.verb == "lookup":
            facts = {"shard": 1, "leader": two.url}
            request.send(problem(421, "not_leader", facts=facts))
        else:
            saying(events=EventsReply(replica="r1"))(request)

    with peer(saying(events=events)) as two, peer(first) as one, client_of(f"{one.url}") as client:
        assert client.events("i").replica == "r1"
        assert client.lookup("i", KEYS).hits == 4, "it was sent on to the leader"
        told = client.events("i")
        assert (told.replica, told.streams) == ("r2", [STREAM])
    assert two.requests[-1].line.startswith("GET /v1/events?instance=i ")


def test_writes_carry_token_ids() -> None:
    with peer(good) as one, client_of(one.url) as client:
        client.act_as("e1", "i1")
        rows: list[Any] = [pack_tokens(range(16)), [1] * 16, None, None]
        assert client.start_write("i", KEYS, tokens=rows, lora="l", salt="s").failure is None
        assert client.start_write("i", KEYS).failure is None
    told, silent = one.requests
    assert (told.fields["tokens"], told.fields["lora"], told.fields["salt"]) == (rows, "l", "s")
    assert not {"tokens", "lora", "salt"} & set(silent.fields), "who publishes nothing sends nothing more"


@pytest.mark.parametrize("given", [{"node": "n", "worker_id": 5}, EngineEndpoints(node="n", worker_id=5)])
def test_an_engine_says_where_it_is_also_when_it_is_registered_again(given: Any) -> None:
    lost: list[str] = []

    def behave(request: Request) -> None:
        if request.verb == "heartbeat" and not lost:
            lost.append("once")
            request.send(problem(409, "reregister"))
        else:
            good(request)

    with peer(behave) as one, client_of(one.url) as client:
        registration = client.register_engine("e1", instance="i", endpoints=given, canary="cafe")
        until = 200
        while len([1 for request in one.requests if request.verb == "e1"]) < 2 and until:
            registration.wait_active(20)
            until -= 1
            time.sleep(0.01)
    first, second = [request.fields for request in one.requests if request.verb == "e1"][:2]
    assert first["incarnation"] != second["incarnation"]
    for fields in (first, second):
        assert (fields["endpoints"], fields["canary"]) == ({"node": "n", "worker_id": 5}, "cafe")


def test_endpoints_that_are_none_are_a_failed_registration_and_no_exception() -> None:
    with peer(good) as one, client_of(one.url) as client:
        for given in ({"port": 5}, {"worker_id": "x"}, {"events": "tcp://a b"}):
            registration = client.register_engine("e1", endpoints=given)
            assert (registration.active, registration.failure) == (False, "invalid_request")
        assert not one.requests


def test_what_operators_say_about_routers() -> None:
    def behave(request: Request) -> None:
        request.send(http(request.body or b"{}", media="application/json"))

    with peer(behave) as one, client_of(one.url) as client:
        publication = {"model": "m", "base": "b"}
        assert client.put_instance("i", "g", {}, publication=publication)["publication"] == publication
        assert "publication" not in client.put_instance("i", "g", {})
        assert client.put_storage("s", "posix", {}, reach="node")["reach"] == "node"


def test_a_client_that_raises_says_the_code() -> None:
    def behave(request: Request) -> None:
        request.send(problem(409, "events_off"))

    with peer(behave) as one, client_of(one.url, raise_errors=True) as client:
        with pytest.raises(ClientError) as raised:
            client.route("i", KEYS)
        assert raised.value.code == "events_off"
