"""Who calls from where, with what: forks, event loops, closed clients, impossible arguments."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from metaservice.client import AsyncClient, Client, ClientConfig, ClientError
from tests.unit.client_peers import (
    Request,
    good,
    peer,
    problem,
)

KEYS = [bytes([n]) * 16 for n in range(1, 9)]
TIMEOUT_MS = 250


def config_for(url: str, **changes: Any) -> ClientConfig:
    return ClientConfig(**{"url": url, "timeout_ms": TIMEOUT_MS, **changes})


def test_forked_child_shares_no_socket_and_no_request_id() -> None:
    with peer(good) as one, Client(config_for(one.url, timeout_ms=5_000)) as client:
        client.register_engine("e", keepalive="thread")
        client.start_write("i", KEYS)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                result = client.start_write("i", KEYS)
                status = 0 if result.failure is None else 2
            finally:
                os._exit(status)
        mine = client.start_write("i", KEYS)
        assert os.waitpid(child, 0)[1] == 0
        assert mine.failure is None
        assert client.registration is not None and client.registration.active
    writes = [request for request in one.requests if request.verb == "writes"]
    assert len({request.fields["request_id"] for request in writes}) == 3
    childs = {request.connection for request in writes if request.fields["request_id"] != mine.request_id} - {
        writes[0].connection
    }
    assert len(childs) == 1, "the child has a connection of its own"


def test_async_client_in_a_forked_child_leaves_the_parents_connections_alone() -> None:
    async def scenario() -> None:
        async with AsyncClient(config_for(one.url, timeout_ms=5_000)) as client:
            assert (await client.lookup("i", KEYS)).hits == 8
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    transport = client._calling.endpoints.all[0].transport
                    transport.after_fork()  # again: it must be harmless
                    status = 0 if not list(transport._pools) else 2
                finally:
                    os._exit(status)
            assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
            assert (await client.lookup("i", KEYS)).hits == 8
        assert one.connections == 1

    with peer(good) as one:
        asyncio.run(scenario())


def test_one_async_client_in_two_event_loops() -> None:
    with peer(good) as one:
        client = AsyncClient(config_for(one.url))

        async def look() -> int:
            return (await client.lookup("i", KEYS)).hits

        assert [asyncio.run(look()) for _ in range(2)] == [8, 8]
        asyncio.run(client.close())
    assert one.connections == 2


def test_closed_client_answers_with_misses() -> None:
    with peer(good) as one:
        client = Client(config_for(one.url))
        client.lookup("i", KEYS)
        client.close()
        assert client.lookup("i", KEYS).failure == "closed"
    assert len(one.requests) == 1


def test_errors_are_raised_for_those_who_ask() -> None:
    def unknown(request: Request) -> None:
        request.send(problem(404, "instance_unknown", detail="no such instance", field="instance"))

    with peer(unknown) as one, Client(config_for(one.url, raise_errors=True)) as client:
        with pytest.raises(ClientError) as caught:
            client.lookup("i", KEYS)
        assert (caught.value.code, caught.value.status, caught.value.field) == (
            "instance_unknown",
            404,
            "instance",
        )
        with pytest.raises(ClientError, match="not_registered"):
            client.start_write("i", KEYS)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.lookup("../other", KEYS),
        lambda client: client.lookup("i\r\nX: y", KEYS),
        lambda client: client.lookup("i", [object()]),
        lambda client: client.lookup("i", KEYS, limit=object()),
        lambda client: client.release("r/../../x"),
        lambda client: client.finish("w-0-1", [-1], [1], checksums=[1]),
        lambda client: client.finish("w-0-1", [1], [2**32], checksums=[1]),
        lambda client: client.finish("w-0-1 HTTP/1.1\r\n", [1], [1], checksums=[1]),
        lambda client: client.finish("w-0-1", ["x"], [1], checksums=[1]),
    ],
)
def test_impossible_arguments_are_not_sent(call: Callable[[Client], Any]) -> None:
    with peer(good) as one, Client(config_for(one.url)) as client:
        client.register_engine("e", keepalive=None)
        assert call(client).failure == "invalid_request"
        assert [request.verb for request in one.requests] == ["e"]


def test_nothing_to_ask_is_not_asked() -> None:
    with peer(good) as one, Client(config_for(one.url)) as client:
        assert (client.lookup("i", []).failure, client.lookup("i", []).cut) == (None, "none")
        assert client.start_write("i", []).failure is None
        assert client.release([]).failure is None
    assert one.requests == []
