"""When the client stops asking and when it asks again."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest

from metaservice.client import AsyncClient, Client, ClientConfig
from metaservice.client.asking import RETRY_MS_MAX
from metaservice.client.breaker import Backoff, Breaker, new_random
from metaservice.core.model import Limits
from tests.unit.client_peers import Request, answer_to, good, http, peer, problem, resetting, silent

KEYS = [bytes([n]) * 16 for n in range(1, 9)]


def new_breaker(seed: int, *, failures_max: int = 3, min_ms: int = 100, max_ms: int = 1_000) -> Breaker:
    backoff = Backoff(min_ms, max_ms, Random(seed))
    return Breaker("test", failures_max=failures_max, slow_ms=500, probe_ms=1_000, backoff=backoff)


def open_at(breaker: Breaker, now_ms: int, times: int = 3) -> None:
    for _ in range(times):
        assert not breaker.blocked(now_ms)
        breaker.failed(now_ms, now_ms, "timeout")


def closes_at(breaker: Breaker, now_ms: int) -> int:
    """The first moment at which a call may go out; it is then the probe."""
    while breaker.blocked(now_ms):
        now_ms += 1
    return now_ms


def test_opens_after_failures_in_a_row_only(seed: int) -> None:
    breaker = new_breaker(seed)
    for _ in range(10):
        breaker.failed(0, 0, "timeout")
        breaker.failed(0, 0, "timeout")
        breaker.answered(0, 1)
    assert not breaker.blocked(1)
    open_at(breaker, 1)
    assert breaker.blocked(2)


def test_slow_answers_are_failures(seed: int) -> None:
    breaker = new_breaker(seed)
    for _ in range(3):
        breaker.answered(0, 500)
    assert not breaker.blocked(500)
    for _ in range(3):
        breaker.answered(0, 501)
    assert breaker.blocked(502)


def test_one_probe_at_a_time_decides_for_all(seed: int) -> None:
    breaker = new_breaker(seed)
    open_at(breaker, 1_000)
    probe_ms = closes_at(breaker, 1_000)
    assert all(breaker.blocked(probe_ms + n) for n in range(10)), "only one call is let through"
    breaker.answered(probe_ms, probe_ms + 10)
    assert not any(breaker.blocked(probe_ms + 10 + n) for n in range(10))


def test_pauses_grow_while_probes_fail_and_are_bounded(seed: int) -> None:
    breaker = new_breaker(seed)
    now = 1_000
    open_at(breaker, now)
    pauses = []
    for _ in range(8):
        probe_ms = closes_at(breaker, now)
        pauses.append(probe_ms - now)
        now = probe_ms + 5
        breaker.failed(probe_ms, now, "timeout")
    for pause, bound in zip(pauses, [100, 200, 400, 800, 1_000, 1_000, 1_000, 1_000], strict=True):
        assert bound / 2 <= pause <= bound, pauses
    breaker.answered(probe_ms := closes_at(breaker, now), probe_ms)
    open_at(breaker, probe_ms)
    assert closes_at(breaker, probe_ms) - probe_ms <= 100, "after a success the pauses are short again"


def test_probe_whose_caller_vanished_is_not_waited_for_for_ever(seed: int) -> None:
    breaker = new_breaker(seed)
    open_at(breaker, 0)
    probe_ms = closes_at(breaker, 0)
    assert closes_at(breaker, probe_ms) == probe_ms + 1_000


def test_cancelled_probe_makes_room_for_another(seed: int) -> None:
    breaker = new_breaker(seed)
    open_at(breaker, 0)
    probe_ms = closes_at(breaker, 0)
    breaker.abandoned()
    assert not breaker.blocked(probe_ms + 1)


def test_calls_sent_before_it_opened_neither_close_nor_prolong_it(seed: int) -> None:
    breaker = new_breaker(seed, min_ms=400)
    open_at(breaker, 1_000)
    breaker.answered(990, 1_010)
    assert breaker.blocked(1_011)
    for n in range(50):
        breaker.failed(999, 1_020 + n, "timeout")
    assert closes_at(breaker, 1_070) <= 1_400


def test_pause_the_service_asked_for_is_kept_and_spread(seed: int) -> None:
    ends = set()
    for n in range(40):
        breaker = new_breaker(seed + n)
        breaker.hold(0, 2_000)
        ends.add(closes_at(breaker, 0))
    assert min(ends) >= 2_000
    assert max(ends) <= 2_400
    assert len(ends) > 20, "clients that were sent away together do not come back together"


def client_for(url: str, **changes: int) -> Client:
    settings: dict[str, Any] = {
        "timeout_ms": 100,
        "breaker_failures": 3,
        "breaker_pause_ms_min": 150,
        **changes,
    }
    return Client(ClientConfig(url=url, **settings))


def test_open_breaker_costs_nothing_and_sends_nothing() -> None:
    with peer(silent) as one, client_for(one.url, breaker_pause_ms_min=5_000) as client:
        assert [client.lookup("i", KEYS).failure for _ in range(3)] == ["timeout"] * 3
        times_us = []
        for _ in range(50):
            began = time.perf_counter()
            for _ in range(20):
                result = client.lookup("i", KEYS)
            times_us.append((time.perf_counter() - began) / 20 * 1e6)
        assert (result.failure, result.hits) == ("breaker_open", 0)
        assert client.start_write("i", KEYS).failure == "breaker_open"
        assert len(one.requests) == 3
    assert min(times_us) < 20, "a tenth of a call that is answered at once"


def test_service_that_comes_back_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    sick = True

    def behave(request: Request) -> None:
        if sick:
            resetting(request)
        else:
            good(request)

    caplog.set_level(logging.INFO, "metaservice.client")
    with peer(behave) as one, client_for(one.url) as client:
        for _ in range(200):
            client.lookup("i", KEYS)
        assert 3 <= len(one.requests) < 10
        sick = False
        deadline = time.monotonic() + 5
        while client.lookup("i", KEYS).failure is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.lookup("i", KEYS).hits == 8
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3, "one line for the failure, one when it opens, one when it closes"
    assert "connection_lost" in lines[0]
    assert "3 calls in a row" in lines[1]
    assert "answers again" in lines[2]


def test_refusals_of_a_healthy_service_do_not_open_it() -> None:
    reply = problem(404, "instance_unknown")
    with peer(lambda request: request.send(reply)) as one, client_for(one.url) as client:
        assert {client.lookup("i", KEYS).failure for _ in range(20)} == {"rejected:instance_unknown"}
    assert len(one.requests) == 20


def test_calls_that_were_never_sent_do_not_open_it() -> None:
    with peer(good) as one, client_for(one.url) as client:
        for _ in range(20):
            assert client.start_write("i", KEYS).failure == "not_registered"
            assert client.lookup("no name", KEYS).failure == "invalid_request"
        assert client.lookup("i", KEYS).hits == 8


def test_retry_after_is_honoured_without_sleeping() -> None:
    reply = problem(503, "overloaded", {"Retry-After": "1"})
    with peer(lambda request: request.send(reply)) as one, client_for(one.url) as client:
        assert client.lookup("i", KEYS).failure == "overloaded"
        began = time.monotonic()
        assert {client.lookup("i", KEYS).failure for _ in range(100)} == {"breaker_open"}
        assert time.monotonic() - began < 0.5
        assert len(one.requests) == 1
        time.sleep(max(0.0, began + 1.25 - time.monotonic()))
        assert client.lookup("i", KEYS).failure == "overloaded"


def test_retry_after_of_a_day_is_cut() -> None:
    reply = problem(503, "not_ready", {"Retry-After": "86400"})
    with (
        peer(lambda request: request.send(reply)) as one,
        client_for(one.url, retry_after_ms_max=200) as client,
    ):
        assert client.lookup("i", KEYS).failure == "rejected:not_ready"
        assert client.lookup("i", KEYS).failure == "breaker_open"
        time.sleep(0.35)
        assert client.lookup("i", KEYS).failure == "rejected:not_ready"


def test_journal_trouble_stops_writes_and_not_lookups() -> None:
    def behave(request: Request) -> None:
        if request.verb == "writes":
            request.send(problem(503, "journal_unavailable", {"Retry-After": "5"}))
        else:
            good(request)

    with peer(behave) as one, client_for(one.url) as client:
        client.register_engine("e", keepalive=None)
        assert client.start_write("i", KEYS).failure == "rejected:journal_unavailable"
        assert client.start_write("i", KEYS).failure == "breaker_open"
        assert client.lookup("i", KEYS).hits == 8
    assert [request.verb for request in one.requests] == ["e", "writes", "lookup"]


def test_long_poll_is_not_slow() -> None:
    def behave(request: Request) -> None:
        if request.verb == "tasks":
            time.sleep(0.3)
        good(request)

    with peer(behave) as one, client_for(one.url, breaker_slow_ms=200, breaker_failures=1) as client:
        client.register_worker("w", ["s"], keepalive=None)
        assert client.take_tasks(wait_ms=300).failure is None
        assert client.take_tasks(wait_ms=300).failure is None


def test_slow_answers_are_used_and_then_no_longer_waited_for() -> None:
    def behave(request: Request) -> None:
        time.sleep(0.05)
        good(request)

    with peer(behave) as one, client_for(one.url, breaker_slow_ms=20, timeout_ms=1_000) as client:
        assert [client.lookup("i", KEYS).hits for _ in range(3)] == [8, 8, 8]
        assert client.lookup("i", KEYS).failure == "breaker_open"


async def test_c9_many_clients_come_back_spread() -> None:
    """100 clients of a service that refuses: after the first moment their tries spread, and every one
    finds the way back."""
    clients = 100
    attempts: list[float] = []
    sick = True

    def behave(request: Request) -> None:
        if sick:
            attempts.append(time.monotonic())
            request.reset()
        else:
            request.send(http(msgspec.msgpack.encode(answer_to(request))))

    stop_s = time.monotonic() + 60

    async def engine(client: AsyncClient) -> None:
        while (await client.lookup("i", KEYS)).failure is not None and time.monotonic() < stop_s:
            await asyncio.sleep(0.02)

    with peer(behave) as one:
        config = ClientConfig(
            url=one.url,
            timeout_ms=1_000,
            breaker_failures=2,
            breaker_pause_ms_min=200,
            breaker_pause_ms_max=1_000,
        )
        many = [AsyncClient(config) for _ in range(clients)]
        engines = [asyncio.create_task(engine(client)) for client in many]
        began = time.monotonic()
        await asyncio.sleep(2.5)
        sick = False
        healed = time.monotonic()
        await asyncio.gather(*engines)
        back_s = time.monotonic() - healed
        await asyncio.gather(*(client.close() for client in many))
    later = [at - began for at in attempts if 1 <= at - began < 2.5]
    assert len(later) >= clients, "they go on trying"
    per_slot = Counter(int(at / 0.1) for at in later)
    assert max(per_slot.values()) <= clients * 0.7, f"tries in step: {sorted(per_slot.items())}"
    assert len(later) / 1.5 < 1.5 * clients / 0.75, "and not more often than the pause allows"
    assert back_s < 5


def test_c9_a_registration_outlives_several_tries() -> None:
    """However unlucky the jitter, several heartbeats are tried before the registration expires."""
    assert Limits().expire_ms >= 5 * RETRY_MS_MAX


def test_backoffs_of_two_clients_differ() -> None:
    def pauses(make: Callable[[], Random]) -> list[int]:
        backoff = Backoff(1_000, 8_000, make())
        return [backoff.next_ms() for _ in range(6)]

    assert pauses(new_random) != pauses(new_random)
