"""One deadline, one answer, one connection at a time: the client against peers that misbehave on the wire."""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from metaservice.client import AsyncClient, Client, ClientConfig, LookupResult
from tests.unit.client_peers import (
    Behaviour,
    Request,
    answer_to,
    cut_off,
    good,
    half_closed,
    html,
    http,
    looked,
    overloaded,
    peer,
    problem,
    resetting,
    silent,
    trickling,
)

KEYS = [bytes([n]) * 16 for n in range(1, 9)]
TIMEOUT_MS = 250
SLACK_S = 0.5
"""What a busy machine may add to a deadline before a test calls it missed."""

Look = Callable[..., LookupResult]


def _blocking(config: ClientConfig, **arguments: Any) -> LookupResult:
    with Client(config) as client:
        return client.lookup("i", KEYS, **arguments)


def _awaiting(config: ClientConfig, **arguments: Any) -> LookupResult:
    async def look() -> LookupResult:
        async with AsyncClient(config) as client:
            return await client.lookup("i", KEYS, **arguments)

    return asyncio.run(look())


both = pytest.mark.parametrize("look", [_blocking, _awaiting], ids=["sync", "async"])


def config_for(url: str, **changes: Any) -> ClientConfig:
    return ClientConfig(**{"url": url, "timeout_ms": TIMEOUT_MS, **changes})


@both
@pytest.mark.parametrize(
    ("behave", "failure"),
    [
        (silent, "timeout"),
        (trickling, "timeout"),
        (resetting, "connection_lost"),
        (cut_off, "connection_lost"),
        (half_closed, "connection_lost"),
        (overloaded, "overloaded"),
        (html, "protocol"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_h1_every_fault_is_a_miss_within_the_deadline(look: Look, behave: Behaviour, failure: str) -> None:
    with peer(behave) as one:
        began = time.monotonic()
        result = look(config_for(one.url), lease_ms=1_000)
        took_s = time.monotonic() - began
    assert (result.failure, result.hits, result.cut, result.lease) == (failure, 0, "miss", None)
    assert took_s < TIMEOUT_MS / 1_000 + SLACK_S
    assert len(one.requests) == 1, "a new connection is no reason to ask twice"


@both
def test_h1_nobody_listens(look: Look, free_port: Callable[[], int]) -> None:
    assert look(config_for(f"http://127.0.0.1:{free_port()}")).failure == "refused_connection"


@both
def test_h1_nobody_accepts(look: Look) -> None:
    """A full backlog swallows the first packet of a connection: not refused, only silent."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        waiting = []
        for _ in range(4):
            link = socket.socket()
            link.setblocking(False)
            link.connect_ex(listener.getsockname())
            waiting.append(link)
        began = time.monotonic()
        result = look(config_for(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        took_s = time.monotonic() - began
        for link in waiting:
            link.close()
    assert result.failure == "timeout"
    assert took_s < TIMEOUT_MS / 1_000 + SLACK_S


@both
def test_h1_name_server_does_not_answer(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    def much_later(*_: object, **__: object) -> None:
        time.sleep(2)
        raise socket.gaierror(socket.EAI_AGAIN, "overloaded")

    monkeypatch.setattr(socket, "getaddrinfo", much_later)
    began = time.monotonic()
    result = look(config_for("http://cache.example:8600"))
    assert result.failure == "timeout"
    assert time.monotonic() - began < TIMEOUT_MS / 1_000 + SLACK_S


@both
def test_name_that_does_not_exist(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert look(config_for("http://cache.example:8600")).failure == "refused_connection"


def test_c9_addresses_that_worked_are_used_while_the_name_server_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def once(*_: object, **__: object) -> list[tuple[Any, ...]]:
        asked.append(1)
        if len(asked) > 1:
            raise socket.gaierror(socket.EAI_AGAIN, "overloaded")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", one.port))]

    monkeypatch.setattr(socket, "getaddrinfo", once)
    with peer(good) as one, Client(config_for("http://cache.example:1", idle_ms_max=1)) as client:
        assert client.lookup("i", KEYS).hits == len(KEYS)
        client._calling.endpoints.all[0].resolver._renew_at_ms = 0
        time.sleep(0.01)  # the kept connection is too old now: the next call connects again
        assert client.lookup("i", KEYS).hits == len(KEYS)
        assert one.connections == 2
        assert len(asked) == 2


@both
def test_one_connection_is_kept_for_many_calls(look: Look) -> None:
    with peer(good) as one:
        if look is _blocking:
            with Client(config_for(one.url)) as client:
                assert all(client.lookup("i", KEYS).hits == 8 for _ in range(20))
        else:

            async def many() -> None:
                async with AsyncClient(config_for(one.url)) as client:
                    for _ in range(20):
                        assert (await client.lookup("i", KEYS)).hits == 8

            asyncio.run(many())
    assert one.connections == 1


def closing_after_each(request: Request) -> None:
    """A good answer that promises to keep the connection, which then closes all the same."""
    good(request)
    request.link.shutdown(socket.SHUT_RDWR)


def test_kept_connection_that_closed_meanwhile_is_replaced() -> None:
    with peer(closing_after_each) as one, Client(config_for(one.url)) as client:
        for _ in range(3):
            assert client.lookup("i", KEYS).failure is None
            time.sleep(0.02)
    assert [request.connection for request in one.requests] == [1, 2, 3]


def reading_then_closing(request: Request) -> None:
    """The second request of the first connection is read and never answered, as when the service is
    killed."""
    if request.connection == 1 and request.number == 2:
        request.reset()
    else:
        good(request)


@both
def test_call_on_a_connection_that_dies_is_repeated_once_with_the_same_request_id(look: Look) -> None:
    with peer(reading_then_closing) as one:
        if look is _blocking:
            with Client(config_for(one.url)) as client:
                client.register_engine("e", keepalive=None)
                result = client.start_write("i", KEYS)
        else:

            async def write() -> Any:
                async with AsyncClient(config_for(one.url)) as client:
                    await client.register_engine("e", keepalive=None)
                    return await client.start_write("i", KEYS)

            result = asyncio.run(write())
    assert result.failure is None
    first, second = [request for request in one.requests if request.verb == "writes"]
    assert (first.connection, second.connection) == (1, 2)
    assert first.body == second.body
    assert first.fields["request_id"] == second.fields["request_id"] == result.request_id != ""


def test_call_that_must_not_be_repeated_is_not() -> None:
    with peer(reading_then_closing) as one, Client(config_for(one.url)) as client:
        client.register_worker("w", ["s"], keepalive=None)
        assert client.take_tasks().failure == "connection_lost"
        assert client.take_tasks().failure is None
    assert [request.verb for request in one.requests] == ["w", "tasks", "tasks"]


@both
def test_repeated_call_has_one_deadline_in_all(look: Look) -> None:
    def late_then_dead_then_silent(request: Request) -> None:
        if request.connection == 1 and request.number == 1:
            good(request)
        elif request.connection == 1:
            time.sleep(0.2)
            request.reset()
        else:
            silent(request)

    with peer(late_then_dead_then_silent) as one:
        if look is _blocking:
            with Client(config_for(one.url)) as client:
                client.lookup("i", KEYS)
                began = time.monotonic()
                result = client.lookup("i", KEYS)
                took_s = time.monotonic() - began
        else:

            async def twice() -> tuple[LookupResult, float]:
                async with AsyncClient(config_for(one.url)) as client:
                    await client.lookup("i", KEYS)
                    began = time.monotonic()
                    return await client.lookup("i", KEYS), time.monotonic() - began

            result, took_s = asyncio.run(twice())
    assert result.failure == "timeout"
    assert len(one.requests) == 3
    assert TIMEOUT_MS / 1_000 - 0.01 < took_s < 0.2 + TIMEOUT_MS / 1_000, (
        "the retry got no deadline of its own"
    )


@both
def test_answer_larger_than_the_bound(look: Look) -> None:
    def endless(request: Request) -> None:
        request.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        while True:
            request.send(b"10000\r\n" + bytes(65_536) + b"\r\n")

    with peer(endless) as one:
        result = look(config_for(one.url, reply_size_max_bytes=100_000, timeout_ms=5_000))
    assert result.failure == "protocol"
    assert "100000 bytes" in result.detail


@both
def test_two_answers_to_one_request(look: Look) -> None:
    def twice(request: Request) -> None:
        request.send(2 * http(msgspec.msgpack.encode(answer_to(request))))

    with peer(twice) as one:
        assert look(config_for(one.url)).failure == "protocol"


@both
def test_answer_that_nobody_asked_for_is_never_an_answer(look: Look) -> None:
    """The peer answers, and later sends a second answer by itself. It must not be taken for the answer
    to the next call."""

    def again_later(request: Request) -> None:
        good(request)
        if request.connection == 1:
            time.sleep(0.05)
            request.send(http(msgspec.msgpack.encode(looked(2, hits=2))))

    with peer(again_later) as one:
        if look is _blocking:
            with Client(config_for(one.url)) as client:
                client.lookup("i", KEYS[:2])
                time.sleep(0.15)
                assert client.lookup("i", KEYS[:2]).hits == 2
        else:

            async def calls() -> None:
                async with AsyncClient(config_for(one.url)) as client:
                    await client.lookup("i", KEYS[:2])
                    await asyncio.sleep(0.15)
                    assert (await client.lookup("i", KEYS[:2])).hits == 2

            asyncio.run(calls())
    assert [request.connection for request in one.requests] == [1, 2]


@both
def test_body_refused_before_it_was_sent(look: Look) -> None:
    """A service that refuses a body for its size answers before reading it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        link, _ = listener.accept()
        with link:
            link.recv(1_000)
            link.sendall(problem(413, "body_too_large", {"Connection": "close"}, field="keys"))
            time.sleep(0.2)

    many = [os.urandom(64) for _ in range(200_000)]
    with ThreadPoolExecutor(1) as pool, listener:
        refused = pool.submit(refuse)
        config = config_for(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_ms=5_000)
        if look is _blocking:
            with Client(config) as client:
                result = client.lookup("i", many)
        else:

            async def calls() -> LookupResult:
                async with AsyncClient(config) as client:
                    return await client.lookup("i", many)

            result = asyncio.run(calls())
        assert result.failure == "rejected:body_too_large"
        refused.result()


def test_interim_answers_are_passed_over() -> None:
    def interim(request: Request) -> None:
        request.send(b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n")
        good(request)

    with peer(interim) as one, Client(config_for(one.url)) as client:
        assert client.lookup("i", KEYS).hits == 8


def test_connections_are_bounded_and_callers_wait_for_one() -> None:
    def slowly(request: Request) -> None:
        time.sleep(0.02)
        good(request)

    config = {"connections_max": 2, "timeout_ms": 5_000}
    with peer(slowly) as one, Client(config_for(one.url, **config)) as client, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: client.lookup("i", KEYS), range(32)))
    assert [result.failure for result in results] == [None] * 32
    assert one.open_max == 2


async def test_connections_of_a_loop_are_bounded_and_cancelled_callers_lose_nothing() -> None:
    def slowly(request: Request) -> None:
        time.sleep(0.02)
        good(request)

    with peer(slowly) as one:
        async with AsyncClient(config_for(one.url, connections_max=2, timeout_ms=5_000)) as client:
            calls = [asyncio.create_task(client.lookup("i", KEYS)) for _ in range(32)]
            await asyncio.sleep(0.03)
            for call in calls[::3]:
                call.cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert (await client.lookup("i", KEYS)).hits == 8
    answered = [result for result in results if isinstance(result, LookupResult)]
    assert len(answered) >= 32 - len(calls[::3])
    assert {result.failure for result in answered} == {None}
    assert one.open_max <= 4, "two at once, and at most two that a cancelled call had just given up"


def test_waiting_for_a_connection_ends_with_the_deadline() -> None:
    config = {"connections_max": 1}
    with peer(silent) as one, Client(config_for(one.url, **config)) as client, ThreadPoolExecutor(3) as pool:
        began = time.monotonic()
        results = list(pool.map(lambda _: client.lookup("i", KEYS), range(3)))
        took_s = time.monotonic() - began
    assert {result.failure for result in results} == {"timeout"}
    assert took_s < TIMEOUT_MS / 1_000 + SLACK_S


def test_threads_get_their_own_answers() -> None:
    with peer(good) as one, Client(config_for(one.url, timeout_ms=10_000)) as client:

        def ask(n: int) -> bool:
            return client.lookup("i", KEYS[:n]).hits == n

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(ask, [1 + n % 8 for n in range(400)]))
