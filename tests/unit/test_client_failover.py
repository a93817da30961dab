"""Replicas that are gone, stopped, astray or without a leader: every call ends in time, and finds the way
round."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import pytest

from metaservice.client import (
    AsyncClient,
    Client,
    ClientConfig,
    endpoints,
)
from metaservice.client.endpoints import ENDPOINTS_MAX, PATIENCE_MS
from tests.unit.client_cluster import KEYS, FakeCluster, Look, both, cluster, writer
from tests.unit.client_peers import Request, peer, problem

HALF_S = 0.5
"""What a stopped replica may cost: half of the deadline."""
SLACK_S = 0.3


# -- replicas that are gone


@both
def test_d2_dead_leader_is_gone_round_within_the_same_call(look: Look) -> None:
    with cluster() as house:
        assert look(house.config(), 1)[0].hits == 8
        house.kill(1)
        house.leads[1] = 2
        began = time.monotonic()
        assert [result.failure for result in look(house.config(), 5)] == [None] * 5
        assert time.monotonic() - began < SLACK_S


def test_a7_write_without_an_answer_is_asked_for_elsewhere_with_the_same_id() -> None:
    """The first leader may have done it: only the same request id finds the first allocation again."""
    with cluster() as house, writer(house) as client:
        assert client.lookup("i1", KEYS).hits == 8
        house.resets.add(1)
        house.leads[1] = 2
        started = client.start_write("i1", KEYS)
        assert (started.failure, len(started.writable)) == (None, 8)
        bodies = {request.body for _, request in house.got("writes")}
        assert len(bodies) == 1, "one call, whoever answers it"
        assert house.asked("writes")[-1] == 2


def test_a7_a_leader_that_steps_down_is_not_taken_for_nothing_happened() -> None:
    """421 after the space was allocated: the retry on the new leader carries the same id."""
    with cluster() as house, writer(house) as client:
        client.lookup("i1", KEYS)
        house.leads[1] = 0
        started = client.start_write("i1", KEYS)
        assert started.failure is None
        assert house.asked("writes") == [1, 0]
        (_, first), (_, second) = house.got("writes")
        assert first.fields["request_id"] == second.fields["request_id"] == started.request_id


def test_what_must_not_be_repeated_is_not_but_finds_its_leader() -> None:
    with cluster() as house, Client(house.config()) as client:
        client.register_worker("w", ["s"], keepalive=None)
        assert client.take_tasks(shard=1).failure is None
        house.resets.add(1)
        house.leads[1] = 2
        before = len(house.got("tasks"))
        assert client.take_tasks(shard=1).failure == "connection_lost"
        assert len(house.got("tasks")) == before + 1, "nobody else was asked"
        house.kill(1)
        assert client.take_tasks(shard=1).failure is None, "refused: it was never sent"
        assert house.asked("tasks")[-1] == 2


@both
def test_d4_stopped_leader_costs_a_part_of_the_deadline_once_or_twice(look: Look) -> None:
    """SIGSTOP: the connection stays open, nothing comes. Its successor is found within the same call."""
    with cluster() as house:
        house.stopped.add(1)
        house.leads[1] = 2
        config = house.config(url=house.urls[1])
        with_all = house.config()
        assert look(config, 1)[0].failure == "timeout", "there was nobody else to ask"
        began = time.monotonic()
        results = look(with_all, 30)
        took_s = time.monotonic() - began
    assert [result.failure for result in results] == [None] * 30
    assert took_s < HALF_S + SLACK_S


def test_d4_stopped_leader_is_remembered_while_the_others_still_name_it() -> None:
    """Until its lease is over nobody can serve the shard. Calls then fail at once, and those about other
    shards go on."""
    with cluster() as house, Client(house.config(breaker_failures=1_000)) as client:
        assert client.lookup("i1", KEYS).hits == 8
        house.stopped.add(1)
        times_s = []
        for _ in range(40):
            began = time.monotonic()
            assert client.lookup("i1", KEYS).failure is not None
            times_s.append(time.monotonic() - began)
            assert client.lookup("i2", KEYS).hits == 8
        slow = [took_s for took_s in times_s if took_s > 0.1]
        assert 2 <= len(slow) <= 5, f"the first two, and a try now and then: {times_s}"
        assert max(slow) < HALF_S + SLACK_S
        house.leads[1] = 0
        began = time.monotonic()
        assert client.lookup("i1", KEYS).hits == 8, "the successor is asked as soon as it is named"
        assert time.monotonic() - began < SLACK_S


def test_one_shard_without_a_leader_does_not_cut_off_the_others() -> None:
    with cluster() as house, Client(house.config(breaker_failures=2)) as client:
        house.kill(1)
        for _ in range(50):
            assert client.lookup("i1", KEYS).failure is not None
        assert client.lookup("i2", KEYS).hits == client.lookup("i0", KEYS).hits == 8


def test_replica_that_leads_again_after_its_restart_is_asked_at_once() -> None:
    with cluster() as house, Client(house.config()) as client:
        client.lookup("i1", KEYS)
        house.kill(1)
        house.leads[1] = 2
        for _ in range(5):
            assert client.lookup("i1", KEYS).hits == 8
        house.start(1)
        house.leads[1] = 1
        assert [client.lookup("i1", KEYS).failure for _ in range(5)] == [None] * 5
        assert house.asked("lookup")[-5:] == [1] * 5


# -- nobody leads


def test_shard_that_nobody_leads_is_a_miss_at_once_and_asked_again_soon() -> None:
    with cluster() as house, Client(house.config()) as client:
        house.leads[1] = None
        house.retry_after_ms = 60_000
        began = time.monotonic()
        assert client.lookup("i1", KEYS).failure == "rejected:not_ready"
        assert time.monotonic() - began < PATIENCE_MS / 1_000 + SLACK_S
        assert set(house.asked("lookup")) == {0, 1, 2}, "somebody may know more"
        began, before = time.monotonic(), len(house.asked("lookup"))
        assert {client.lookup("i1", KEYS).failure for _ in range(100)} == {"breaker_open"}
        assert time.monotonic() - began < 0.3
        assert len(house.asked("lookup")) == before < 40
        assert client.lookup("i0", KEYS).hits == 8, "only that shard is left alone"
        house.leads[1] = 0
        time.sleep(0.65)
        assert client.lookup("i1", KEYS).hits == 8


@both
def test_leadership_that_moves_is_waited_for_in_the_call(look: Look) -> None:
    """A planned handover: for a moment nobody leads, or the two name each other. No call fails of it."""

    def move() -> None:
        for leader in (None, 2, None, 1):
            time.sleep(0.15)
            house.leads[1] = leader
            house.astray = {0: 1} if leader == 2 else {}

    with cluster() as house:
        mover = Thread(target=move)
        mover.start()
        results = look(house.config(), 1_500)
        mover.join()
        assert {result.failure for result in results} == {None}


@both
def test_outage_is_waited_for_only_at_its_beginning(look: Look) -> None:
    with cluster() as house:
        house.leads[1] = None
        began = time.monotonic()
        results = look(house.config(), 300)
        assert time.monotonic() - began < PATIENCE_MS / 1_000 + SLACK_S
        assert None not in {result.failure for result in results}


def test_writes_that_retry_outlast_an_election() -> None:
    async def elected_later(house: FakeCluster) -> None:
        await asyncio.sleep(1.0)
        house.leads[1] = 2

    async def scenario(house: FakeCluster) -> tuple[Any, Any]:
        async with AsyncClient(house.config(retry_ms=10_000, timeout_ms=300)) as client:
            await client.register_engine("e", keepalive=None)
            house.kill(1)
            house.leads[1] = None
            election = asyncio.create_task(elected_later(house))
            looked = await client.lookup("i1", KEYS)
            started = await client.start_write("i1", KEYS)
            await election
            return looked, started

    with cluster() as house:
        looked, started = asyncio.run(scenario(house))
        assert looked.failure is not None, "lookups never wait"
        assert (started.failure, len(started.writable)) == (None, 8)
        assert len({request.body for _, request in house.got("writes")}) == 1
        assert len(house.got("writes")) < 40, "with pauses"


def test_retries_end_with_their_budget() -> None:
    with cluster() as house, writer(house, retry_ms=700, timeout_ms=300) as client:
        house.leads[1] = None
        began = time.monotonic()
        assert client.start_write("i1", KEYS).failure in ("rejected:not_ready", "breaker_open")
        assert 0.3 < time.monotonic() - began < 0.7 + SLACK_S
        house.leads[1] = 1
        with Client(house.config(retry_ms=5_000)) as other:
            began = time.monotonic()
            assert other.start_write("i1", KEYS).failure == "not_registered", "no retry mends that"
            assert time.monotonic() - began < 0.2


@both
def test_replicas_that_name_each_other_end_in_a_miss(look: Look) -> None:
    with cluster() as house:
        house.astray = {0: 1, 1: 2, 2: 0}
        began = time.monotonic()
        (result,) = look(house.config(), 1)
        assert result.failure == "rejected:not_leader"
        assert time.monotonic() - began < PATIENCE_MS / 1_000 + SLACK_S
        assert sum(house.count()) <= 40


@both
def test_leader_whose_address_is_not_for_us_is_asked_through_another(look: Look) -> None:
    """Behind address translation or a balancer a replica's own address may lead nowhere."""
    with cluster() as house:
        house.addresses[1] = "http://127.0.0.1:9"
        results = look(house.config(url=(house.urls[0], house.urls[2])), 10)
        assert [result.failure for result in results][2:] == [None] * 8
        passed_on = [request for _, request in house.got("lookup") if not request.direct]
        assert len(passed_on) >= 8


def test_leader_that_is_no_address_is_passed_over() -> None:
    with cluster() as house, Client(house.config()) as client:
        house.addresses[1] = "not a url"
        assert client.lookup("i1", KEYS).hits == 8, "found by asking round"


def test_addresses_that_were_learned_are_bounded() -> None:
    with cluster() as house, Client(house.config(breaker_failures=1)) as client:
        before = len(client._calling.endpoints.all)
        for port in range(1, 2 * ENDPOINTS_MAX):
            house.addresses[1] = f"http://127.0.0.1:{port}"
            house.leads[1] = 1
            house.astray = {0: 1, 2: 1}
            client.lookup("i1", KEYS)
        assert len(client._calling.endpoints.all) <= before + ENDPOINTS_MAX
        house.addresses.clear()
        house.astray = {}
        assert client.lookup("i0", KEYS).hits == 8


@both
@pytest.mark.parametrize(
    "facts",
    [
        None,
        [],
        {},
        {"shard": "1", "leader": 5},
        {"shard": -5, "leader": "http://127.0.0.1:9\r\nX: y"},
        {"shard": 1 << 70, "leader": "http://127.0.0.1:9"},
        {"shard": 1, "leader": "http://user@127.0.0.1:9"},
        {"shard": 1, "leader": "http://127.0.0.1:99999"},
        {"shard": 1, "leader": "http://" + "a" * 70_000},
        {"shard": 1, "leader": "ftp://127.0.0.1/"},
    ],
    ids=repr,
)
def test_nonsense_about_a_leader_is_a_miss(
    look: Look, facts: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever answers there: it costs a miss, in time, and leads nowhere that is no address."""
    monkeypatch.setattr(endpoints, "PATIENCE_MS", 50)

    def tell(request: Request) -> None:
        request.send(problem(421, "not_leader", facts=facts))

    with peer(tell) as one, peer(tell) as other:
        for url in (one.url, (one.url, other.url)):
            began = time.monotonic()
            results = look(ClientConfig(url=url, timeout_ms=1_000), 3)
            assert time.monotonic() - began < 3 + SLACK_S
            assert {result.hits for result in results} == {0}
            assert "internal" not in {result.failure for result in results}
            assert None not in {result.failure for result in results}


def test_many_threads_find_the_way_round_a_stopped_leader() -> None:
    with cluster() as house, Client(house.config(connections_max=32)) as client:
        assert client.lookup("i1", KEYS).hits == 8
        house.stopped.add(1)
        house.leads[1] = 2

        def ask(_: int) -> tuple[str | None, float]:
            began = time.monotonic()
            return client.lookup("i1", KEYS).failure, time.monotonic() - began

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(320)))
    assert {failure for failure, _ in answers} == {None}
    slow = [took_s for _, took_s in answers if took_s > HALF_S / 2]
    assert len(slow) <= 17, "each thread at most once"
    assert max(slow) < HALF_S + SLACK_S
