"""The cache reporter against replicas that forget, answer late, fail or are gone: in the end each knows
exactly what the engine holds."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from metaservice.client import AsyncClient, CacheReporter, Client, ClientConfig
from metaservice.core.model import Publication
from metaservice.publish.errors import PublisherUnavailable
from metaservice.publish.ingest.limits import IngestLimits
from tests.functional.api_house import until
from tests.functional.fake_fleet import Fleet
from tests.functional.report_fleet import BLOCK_SIZE, INSTANCE, Books, Held, reporting

FIRST = 2**40


def tokens(count: int, first: int = 0) -> list[int]:
    """Token ids of so many blocks."""
    return [*range(BLOCK_SIZE * first, BLOCK_SIZE * (first + count))]


def chain(count: int, first: int = 0) -> list[int]:
    """Event hashes of a chain of blocks."""
    return [*range(FIRST + first, FIRST + first + count)]


@asynccontextmanager
async def reporter_of(
    fleet: Fleet, *ids: str, config: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[CacheReporter]:
    """A running reporter that is configured with these replicas."""
    urls = tuple(fleet.cluster.urls[id] for id in ids)
    client = Client(ClientConfig(url=urls, timeout_ms=1_000, breaker_pause_ms_max=500, **(config or {})))
    client.act_as("e1", "i1")
    reporter = CacheReporter(client, **{"flush_ms": 5, "find_ms": 200, **options})
    reporter.start()
    try:
        yield reporter
    finally:
        await asyncio.to_thread(reporter.close)
        client.close()


def all_know(books: dict[str, Books], held: Held) -> Callable[[], bool]:
    return lambda: all(book.held == held for book in books.values())


async def test_every_replica_is_told_and_routes_by_it() -> None:
    async with reporting("r1", "r2") as (fleet, books), reporter_of(fleet, "r1") as reporter:
        for member in ("r1", "r2"):
            fleet[member].replica.shard(0).publication = Publication("m")
        reporter.stored("gpu", chain(3), tokens(3), lora="sql", salt="s")
        reporter.stored("cpu", chain(2, 3), tokens(2, 3), parent=FIRST + 2, lora="sql", salt="s")
        held = {"gpu": set(chain(3)), "cpu": set(chain(2, 3)), "storage": set()}
        await until(all_know(books, held))
        for id in ("r1", "r2"):
            client = AsyncClient(ClientConfig(url=fleet.cluster.urls[id]))
            told = await client.route(INSTANCE, token_ids=tokens(6), lora="sql", salt="s")
            (engine,) = told.engines
            assert (engine.tiers.gpu, engine.tiers.cpu, engine.blocks, told.asked) == (3, 5, 5, 6)
            assert engine.visible and 0 <= engine.staleness_ms < 5_000
            other = await client.route(INSTANCE, token_ids=tokens(6), lora="sql", salt="another tenant's")
            assert not any(row.blocks for row in other.engines)
            await client.close()
        reporter.removed("gpu", chain(1))
        held["gpu"].remove(FIRST)
        await until(all_know(books, held))
        reporter.cleared()
        await until(all_know(books, {"gpu": set(), "cpu": set(), "storage": set()}))
        assert reporter.stats.snapshots == 2 and not reporter.stats.refused


async def test_changes_of_one_moment_are_told_in_one_report() -> None:
    async with reporting("r1") as (fleet, books), reporter_of(fleet, "r1", flush_ms=100) as reporter:
        await until(lambda: reporter.stats.replicas == 1)
        asked = books["r1"].asked
        for at in range(200):
            reporter.stored("gpu", chain(1, at), tokens(1, at), parent=FIRST + at - 1 if at else None)
        await until(lambda: len(books["r1"].held["gpu"]) == 200)
        assert books["r1"].asked - asked <= 3


async def test_a_replica_that_begins_anew_is_told_all_again() -> None:
    limits = IngestLimits(visible_ms=400)
    async with reporting("r1", "r2", limits=limits) as (fleet, books), reporter_of(fleet, "r1") as reporter:
        reporter.stored("gpu", chain(10), tokens(10))
        held = {"gpu": set(chain(10)), "cpu": set(), "storage": set()}
        await until(all_know(books, held))
        before = books["r1"].ingest
        books["r1"].restart()
        await before.close()
        # Nothing changes in the engine: its heartbeat is what finds out.
        await until(all_know(books, held))


async def test_heartbeats_keep_a_quiet_engine_visible() -> None:
    limits = IngestLimits(visible_ms=300)
    async with reporting("r1", limits=limits) as (fleet, books):
        await books["r1"].ingest.start()
        async with reporter_of(fleet, "r1") as reporter:
            reporter.stored("gpu", chain(1), tokens(1))
            await until(lambda: books["r1"].held["gpu"] == set(chain(1)))
            await asyncio.sleep(0.2)
            told, reports = reporter.stats.blocks, reporter.stats.reports
            await asyncio.sleep(1.3)
            assert books["r1"].visible
            assert reporter.stats.blocks == told, "heartbeats told blocks again"
            assert reporter.stats.reports - reports >= 3
        await until(lambda: not books["r1"].visible)


async def test_answers_that_come_too_late_lose_nothing() -> None:
    async with reporting("r1") as (fleet, books):
        book = books["r1"]
        config = {"breaker_failures": 1_000}
        async with reporter_of(fleet, "r1", config=config) as reporter:
            reporter.stored("gpu", chain(4), tokens(4))
            await until(lambda: reporter.stats.replicas == 1)
            book.late_s = 1.3  # longer than the client waits
            reporter.stored("gpu", chain(4, 4), tokens(4, 4), parent=FIRST + 3)
            reporter.removed("gpu", chain(1))
            await until(lambda: len(book.held["gpu"]) == 7)
            book.late_s = 0.0
            reporter.stored("cpu", chain(1), tokens(1))
            held = {"gpu": set(chain(7, 1)), "cpu": {FIRST}, "storage": set()}
            await until(all_know(books, held))
            assert reporter.stats.snapshots == 1, "the very same report was sent again"


async def test_another_incarnation_is_told_everything_anew() -> None:
    async with reporting("r1") as (fleet, books):
        client = Client(ClientConfig(url=fleet.cluster.urls["r1"]))
        client.act_as("e1", "i1")
        with CacheReporter(client, flush_ms=5) as reporter:
            reporter.stored("gpu", chain(2), tokens(2))
            held = {"gpu": set(chain(2)), "cpu": set(), "storage": set()}
            await until(all_know(books, held))
            books["r1"].register("i2")
            assert books["r1"].held["gpu"] == set()
            client.act_as("e1", "i2")
            await until(all_know(books, held))
            client.act_as("e1", "")
            reporter.stored("gpu", chain(1, 9), tokens(1, 9))
            await asyncio.sleep(0.1)
            assert books["r1"].held["gpu"] == set(chain(2)), "it spoke for nobody"
            await asyncio.to_thread(reporter.close)
        client.close()


async def test_a_reporter_whose_clock_is_behind_its_predecessors_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with reporting("r1") as (fleet, books):
        async with reporter_of(fleet, "r1") as reporter:
            reporter.stored("gpu", chain(2), tokens(2))
            await until(lambda: books["r1"].held["gpu"] == set(chain(2)))
        monkeypatch.setattr(time, "time_ns", lambda: 1)
        async with reporter_of(fleet, "r1") as reporter:
            reporter.stored("gpu", chain(1, 7), tokens(1, 7))
            await until(lambda: books["r1"].held["gpu"] == set(chain(1, 7)))


async def test_it_speaks_for_an_asyncio_client_alike() -> None:
    async with (
        reporting("r1") as (fleet, books),
        AsyncClient(ClientConfig(url=fleet.cluster.urls["r1"])) as client,
    ):
        client.act_as("e1", "i1")
        reporter = CacheReporter(client, flush_ms=5)
        reporter.start()
        reporter.stored("gpu", chain(2), tokens(2))
        await until(lambda: books["r1"].held["gpu"] == set(chain(2)))
        await asyncio.to_thread(reporter.close)


async def test_a_replica_that_is_gone_or_publishes_nothing_holds_up_nobody() -> None:
    async with reporting("r1", "r2") as (fleet, books):
        books["r2"].failure = PublisherUnavailable("events_off", "not here")
        fleet.cluster.urls["r3"] = "http://127.0.0.1:9"
        async with reporter_of(fleet, "r1") as reporter:
            for at in range(10):
                began = time.monotonic()
                reporter.stored("gpu", chain(1, at), tokens(1, at), parent=FIRST + at - 1 if at else None)
                assert time.monotonic() - began < 0.1, "the engine waited"
                await asyncio.sleep(0.05)
            await until(lambda: books["r1"].held["gpu"] == set(chain(10)))
            assert books["r2"].asked <= 2


async def test_more_than_one_report_holds() -> None:
    async with reporting("r1") as (fleet, books), reporter_of(fleet, "r1") as reporter:
        for at in range(0, 10_000, 500):
            reporter.stored("gpu", chain(500, at), tokens(500, at), parent=FIRST + at - 1 if at else None)
        await until(lambda: len(books["r1"].held["gpu"]) == 10_000 and reporter.stats.replicas == 1, 10)
        assert reporter.stats.snapshots == 1 and reporter.stats.reports >= 3


async def test_whatever_goes_wrong_all_replicas_know_the_same_in_the_end(seed: int) -> None:
    """Random changes while replicas forget, refuse, answer late and lose the engine's registration."""
    chance = Random(seed)
    limits = IngestLimits(visible_ms=400)
    held: Held = {"gpu": set(), "cpu": set(), "storage": set()}
    async with reporting("r1", "r2", limits=limits) as (fleet, books):
        config = {"breaker_failures": 3, "breaker_pause_ms_min": 20}
        async with reporter_of(fleet, "r1", config={**config}) as reporter:
            for _ in range(150):
                change(chance, reporter, held)
                book = books[chance.choice(("r1", "r2"))]
                match chance.randrange(12):
                    case 0:
                        before = book.ingest
                        book.restart()
                        await before.close()
                    case 1:
                        book.failure = PublisherUnavailable("events_unavailable", "starting")
                    case 2:
                        book.failure = PublisherUnavailable("overloaded", "later")
                    case 3:
                        book.late_s = 0.02
                    case _:
                        book.failure, book.late_s = None, 0.0
                await asyncio.sleep(chance.choice((0.0, 0.002, 0.02)))
            for book in books.values():
                book.failure, book.late_s = None, 0.0
            try:
                await until(all_know(books, held), 15)
            except TimeoutError:
                raise AssertionError(f"seed {seed}: {reporter.stats}") from None


def change(chance: Random, reporter: CacheReporter, held: Held) -> None:
    """Something that happens in an engine, told and noted."""
    tier = chance.choice(("gpu", "cpu", "storage"))
    match chance.randrange(10):
        case 0 if chance.random() < 0.2:
            reporter.cleared()
            for some in held.values():
                some.clear()
        case 1 | 2 | 3 if held[tier]:
            gone = chance.sample(sorted(held[tier]), chance.randrange(1, len(held[tier]) + 1))
            reporter.removed(tier, gone)
            held[tier].difference_update(gone)
        case _:
            first, count = chance.randrange(200), chance.randrange(1, 20)
            parent = FIRST + first - 1 if first else None
            reporter.stored(tier, chain(count, first), tokens(count, first), parent=parent)
            held[tier].update(chain(count, first))
