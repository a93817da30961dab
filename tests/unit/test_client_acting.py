"""What processes of one engine share: who they speak for, and the trace that their calls belong to."""

import asyncio
from typing import Any

import pytest

from metaservice.client import AsyncClient, Client, ClientConfig
from tests.unit.client_cluster import cluster
from tests.unit.client_peers import Peer, good, peer

KEYS = [bytes([n]) * 16 for n in range(1, 4)]
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def sent(one: Peer, verb: str) -> dict[str, Any]:
    """The fields of the last request of this kind."""
    return [request for request in one.requests if request.verb == verb][-1].fields


def test_a_worker_process_writes_as_the_engine_that_another_process_registered() -> None:
    with peer(good) as one, Client(ClientConfig(url=one.url)) as client:
        assert client.start_write("i", KEYS).failure == "not_registered"
        client.act_as("engine-1", "life-1")
        assert client.start_write("i", KEYS).failure is None
        assert (sent(one, "writes")["engine"], sent(one, "writes")["incarnation"]) == ("engine-1", "life-1")
        client.act_as("engine-1", "life-2")
        assert client.start_write("i", KEYS).failure is None
        assert sent(one, "writes")["incarnation"] == "life-2"
        client.act_as("engine-1", "")
        assert client.start_write("i", KEYS).failure == "not_registered"
        assert client.registration is None
        assert {request.verb for request in one.requests} == {"writes"}, "no registration and no heartbeat"


def test_acting_as_another_gives_up_what_was_registered() -> None:
    with peer(good) as one, Client(ClientConfig(url=one.url)) as client:
        registration = client.register_engine("mine", keepalive=None)
        client.act_as("other", "life-1")
        assert not registration.active
        assert client.start_write("i", KEYS).failure is None
        assert sent(one, "writes")["engine"] == "other"


def test_a_session_goes_on_under_the_incarnation_that_opened_it() -> None:
    with peer(good) as one, Client(ClientConfig(url=one.url)) as client:
        client.act_as("e", "life-1")
        write = client.start_write("i", KEYS)
        client.act_as("e", "life-2")
        assert client.finish(write, write.locations, write.generations, checksums=range(6)).failure is None
        assert sent(one, "finish")["incarnation"] == "life-1"


def test_the_async_client_acts_as_an_engine_too() -> None:
    async def scenario() -> None:
        async with AsyncClient(ClientConfig(url=one.url)) as client:
            client.act_as("e", "life-1")
            assert (await client.start_write("i", KEYS, traceparent=TRACE)).failure is None

    with peer(good) as one:
        asyncio.run(scenario())
        assert sent(one, "writes")["incarnation"] == "life-1"
        assert one.requests[-1].header("traceparent") == TRACE


def traces(client: Client, traceparent: str) -> None:
    """One call of each kind that carries a trace context."""
    client.act_as("e", "life-1")
    client.lookup("i1", KEYS, traceparent=traceparent)
    write = client.start_write("i1", KEYS, traceparent=traceparent)
    result = client.finish(
        write, write.locations, write.generations, checksums=range(6), traceparent=traceparent
    )
    assert result.failure is None


def test_calls_carry_the_trace_they_belong_to() -> None:
    with peer(good) as one, Client(ClientConfig(url=one.url)) as client:
        traces(client, TRACE)
        client.lookup("i1", KEYS)
        assert [(request.verb, request.header("traceparent")) for request in one.requests] == [
            ("lookup", TRACE),
            ("writes", TRACE),
            ("finish", TRACE),
            ("lookup", ""),
        ]


def test_the_trace_goes_along_to_the_leader() -> None:
    with cluster() as house, Client(house.config()) as client:
        traces(client, TRACE)
        for verb in ("lookup", "writes", "finish"):
            assert {request.header("traceparent") for _, request in house.got(verb)} == {TRACE}


@pytest.mark.parametrize(
    "text", ["x", TRACE.upper(), TRACE + "\r\nX-Evil: 1", TRACE[:-1], TRACE + "\n", "\r\n\r\nGET / HTTP/1.1"]
)
def test_a_trace_that_is_none_is_left_out_and_costs_no_call(text: str) -> None:
    with peer(good) as one, Client(ClientConfig(url=one.url)) as client:
        traces(client, text)
        assert len(one.requests) == 3
        assert all(request.header("traceparent") == "" for request in one.requests)
        assert all(request.header("x-evil") == "" for request in one.requests)
