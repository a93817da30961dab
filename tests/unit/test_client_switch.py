"""Waiting for a switch to change, and ending calls that wait."""

import asyncio
import time
from threading import Thread
from typing import Any

import msgspec
import pytest

from metaservice.client import AsyncClient, Client, ClientConfig, LookupResult, SwitchResult
from tests.unit.client_cluster import cluster
from tests.unit.client_peers import Request, good, http, peer, problem, silent

KEYS = [bytes([n]) * 16 for n in range(1, 4)]
TIMEOUT_MS = 300


def config_for(url: str, **changes: Any) -> ClientConfig:
    return ClientConfig(**{"url": url, "timeout_ms": TIMEOUT_MS, **changes})


def says(fields: dict[str, Any]) -> bytes:
    return http(msgspec.msgpack.encode(fields))


def test_the_switch_is_told_with_where_it_is_set() -> None:
    def held(request: Request) -> None:
        request.send(
            says({"mode": "bypass", "switch": {"scope": "group", "id": "g", "mode": "bypass"}, "later": 1})
        )

    with peer(held) as one, Client(config_for(one.url)) as client:
        told = client.watch_switch("i", "normal", wait_ms=5_000)
        assert (told.failure, told.mode) == (None, "bypass")
        assert told.switch is not None and told.switch.scope == "group"
        assert one.requests[0].line == "GET /v1/instances/i/switch?known=normal&wait_ms=5000 HTTP/1.1"


def test_the_wait_comes_on_top_of_the_deadline_and_is_not_slowness() -> None:
    def late(request: Request) -> None:
        time.sleep(0.4)
        request.send(says({"mode": "normal", "switch": None}))

    config = {"timeout_ms": 200, "breaker_slow_ms": 100, "breaker_failures": 1}
    with peer(late) as one, Client(config_for(one.url, **config)) as client:
        for _ in range(3):
            assert client.watch_switch("i", "normal", wait_ms=600).mode == "normal"
        begun = time.monotonic()
        one.behave = silent
        assert client.watch_switch("i", "normal", wait_ms=200).failure == "timeout"
        assert 0.35 < time.monotonic() - begun < 2


async def test_the_async_client_waits_too() -> None:
    with peer(good) as one:
        async with AsyncClient(config_for(one.url)) as client:
            assert (await client.watch_switch("i", wait_ms=100)).mode == "normal"
            assert one.requests[0].line.startswith("GET /v1/instances/i/switch?known=&wait_ms=100 ")


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "drain", "switch": None},
        {"mode": "normal", "switch": {"scope": "group", "id": "g", "mode": "bypass"}},
        {"mode": "bypass", "switch": None},
        {"mode": 2},
        {},
    ],
)
def test_an_answer_that_contradicts_itself_is_none(fields: dict[str, Any]) -> None:
    with peer(lambda request: request.send(says(fields))) as one, Client(config_for(one.url)) as client:
        told = client.watch_switch("i")
        assert (told.failure, told.mode, told.switch) == ("protocol", "", None)


def test_what_cannot_be_known_is_not_asked() -> None:
    with peer(good) as one, Client(config_for(one.url)) as client:
        assert client.watch_switch("i", "x&y=1").failure == "invalid_request"
        assert client.watch_switch("i/../j").failure == "invalid_request"
        assert one.requests == []


def test_an_old_service_says_that_it_has_no_such_route() -> None:
    def old(request: Request) -> None:
        request.send(problem(404, "not_found", detail="no such route"))

    with peer(old) as one, Client(config_for(one.url)) as client:
        assert client.watch_switch("i", "normal", wait_ms=5_000).failure == "rejected:not_found"


def test_the_leader_is_waited_for_in_full_though_there_are_others_to_ask() -> None:
    """A call that may go elsewhere gets a part of its time only; one that waits on purpose must not."""
    with cluster() as house, Client(house.config(timeout_ms=200)) as client:
        client.lookup("i1", KEYS)
        answer = house.peers[1].behave

        def slowly(request: Request) -> None:
            time.sleep(0.6)
            answer(request)

        house.peers[1].behave = slowly
        assert client.watch_switch("i1", "normal", wait_ms=1_000).mode == "normal"
        assert house.asked("switch") == [1]


def test_closing_with_cut_ends_calls_that_wait_in_other_threads() -> None:
    results: list[SwitchResult | LookupResult] = []
    with peer(silent) as one:
        client = Client(config_for(one.url, timeout_ms=20_000))
        one.behave = good
        client.lookup("i", KEYS)
        one.behave = silent
        threads = [
            Thread(target=lambda: results.append(client.watch_switch("i", "normal", wait_ms=20_000))),
            Thread(target=lambda: results.append(client.lookup("i", KEYS))),
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 5
        while len(one.requests) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        begun = time.monotonic()
        client.close(cut=True)
        for thread in threads:
            thread.join(5)
        assert time.monotonic() - begun < 1
        assert len(results) == 2 and all(result.failure for result in results)
        assert len(one.requests) == 3, "nothing is asked again"


async def test_closing_with_cut_ends_calls_that_wait_in_other_tasks() -> None:
    with peer(good) as one:
        client = AsyncClient(config_for(one.url, timeout_ms=20_000))
        await client.lookup("i", KEYS)
        one.behave = silent
        tasks = [asyncio.create_task(client.lookup("i", KEYS)) for _ in range(2)]
        while len(one.requests) < 3:
            await asyncio.sleep(0.01)
        begun = time.monotonic()
        await client.close(cut=True)
        assert all(result.failure for result in await asyncio.gather(*tasks))
        assert time.monotonic() - begun < 1
        assert len(one.requests) == 3, "nothing is asked again"
