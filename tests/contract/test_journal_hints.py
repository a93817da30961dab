"""Hints (case I11): they wake a follower soon, and neither their loss nor a listener that reads no more
matters."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import asyncpg
import pytest

from metaservice.journal import postgres_hints
from metaservice.journal.port import Journal
from metaservice.journal.postgres import PostgresJournal
from metaservice.journal.postgres_hints import PostgresHints
from tests.contract.journal_benches import append_to, seqs
from tests.contract.postgres_bench import PostgresBench

T = TypeVar("T")

SHADOW = """
    CREATE SCHEMA shadow;
    CREATE FUNCTION shadow.pg_notify(text, text) RETURNS void LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'too many notifications in the NOTIFY queue'
           USING ERRCODE = 'program_limit_exceeded'; END $$
"""


async def off(call: Callable[..., T], *values: object) -> T:
    """A journal's blocking call, in a thread."""
    return await asyncio.to_thread(call, *values)


@asynccontextmanager
async def listening(bench: PostgresBench) -> AsyncIterator[tuple[PostgresHints, "asyncio.Queue[int]"]]:
    heard: asyncio.Queue[int] = asyncio.Queue()
    hints = PostgresHints(bench.settings, heard.put_nowait)
    hints.start()
    try:
        await told(lambda: hints.listening)
        yield hints, heard
    finally:
        await hints.close()
        await hints.close()
    assert not hints.listening


async def told(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.005)


@pytest.fixture
def leader(postgres_bench: PostgresBench) -> Iterator[Callable[[int], tuple[PostgresJournal, int]]]:
    def lead(shard: int) -> tuple[PostgresJournal, int]:
        journal = postgres_bench.journal(shard)
        journal.open()
        return journal, journal.claim()

    yield lead


async def test_an_append_wakes_who_listens(
    postgres_bench: PostgresBench, leader: Callable[[int], tuple[Journal, int]]
) -> None:
    async with listening(postgres_bench) as (_, heard):
        for shard in (3, 0):
            journal, epoch = await off(leader, shard)
            await off(append_to, journal, epoch, 1, 1)
            assert await asyncio.wait_for(heard.get(), 5) == shard


async def test_many_appends_at_once_tell_little(
    postgres_bench: PostgresBench, leader: Callable[[int], tuple[Journal, int]]
) -> None:
    async with listening(postgres_bench) as (_, heard):
        journal, epoch = await off(leader, 0)
        begun = asyncio.get_running_loop().time()
        await off(append_to, journal, epoch, 1, 100)
        took_s = asyncio.get_running_loop().time() - begun
        await asyncio.sleep(0.05)
        assert 1 <= heard.qsize() <= took_s / 0.01 + 1


async def test_it_listens_again_after_its_connection_was_cut(
    postgres_bench: PostgresBench,
    leader: Callable[[int], tuple[Journal, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres_hints, "RETRY_MS", 10)
    async with listening(postgres_bench) as (hints, heard):
        postgres_bench.proxy.refusing = True
        postgres_bench.proxy.cut()
        await told(lambda: not hints.listening)
        await asyncio.sleep(0.05)
        postgres_bench.proxy.refusing = False
        await told(lambda: hints.listening)
        journal, epoch = await off(leader, 2)
        await off(append_to, journal, epoch, 1, 1)
        assert await asyncio.wait_for(heard.get(), 5) == 2


async def test_a_half_open_connection_is_found_out(
    postgres_bench: PostgresBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_hints, "CHECK_MS", 20)
    monkeypatch.setattr(postgres_hints, "RETRY_MS", 10)
    bench = postgres_bench
    bench.settings = replace(bench.settings, timeout_ms=200)
    async with listening(bench) as (hints, _):
        before = bench.proxy.connections
        bench.proxy.hold()
        await told(lambda: bench.proxy.connections > before and hints.listening)
    bench.proxy.let_go()


async def test_foreign_payloads_are_ignored(
    postgres_bench: PostgresBench, leader: Callable[[int], tuple[Journal, int]]
) -> None:
    async with listening(postgres_bench) as (_, heard):
        for payload in ("", "x", "-1 2", "1.5", "٣"):
            await off(lambda text: postgres_bench.sql("SELECT pg_notify('ucm_journal', $1)", text), payload)
        journal, epoch = await off(leader, 1)
        await off(append_to, journal, epoch, 1, 1)
        assert await asyncio.wait_for(heard.get(), 5) == 1


async def test_through_a_pooler_nothing_is_listened_to(postgres_bench: PostgresBench) -> None:
    hints = PostgresHints(replace(postgres_bench.settings, pooler=True), lambda _: None)
    hints.start()
    await asyncio.sleep(0.05)
    assert postgres_bench.proxy.connections == 0
    await hints.close()


def test_i11_a_listener_that_reads_no_more_holds_nothing_up(
    postgres_bench: PostgresBench, leader: Callable[[int], tuple[Journal, int]]
) -> None:
    loop = asyncio.new_event_loop()
    stalled = loop.run_until_complete(asyncpg.connect(postgres_bench.proxy.dsn))
    # inside a transaction it takes nothing from the queue either
    loop.run_until_complete(stalled.execute("LISTEN ucm_journal"))
    loop.run_until_complete(stalled.execute("BEGIN; SELECT 1"))
    journal, epoch = leader(0)
    append_to(journal, epoch, 1, 300)
    assert seqs(journal.read(0)) == [*range(1, 301)]
    loop.run_until_complete(stalled.close())
    loop.close()


def test_i11_a_full_queue_stops_the_hints_and_not_the_appends(
    postgres_bench: PostgresBench, leader: Callable[[int], tuple[Journal, int]]
) -> None:
    sql = postgres_bench.sql
    database = sql("SELECT current_database()")[0][0]
    sql(SHADOW)
    sql(f"ALTER DATABASE {database} SET search_path = shadow, pg_catalog")
    try:
        journal, epoch = leader(0)
        append_to(journal, epoch, 1, 30)
        assert seqs(journal.read(0)) == [*range(1, 31)]
        assert isinstance(journal, PostgresJournal)
        assert not journal._notify  # it was tried
    finally:
        sql(f"ALTER DATABASE {database} RESET search_path")
        sql("DROP SCHEMA shadow CASCADE")


def test_i11_what_an_append_tells_is_short(
    postgres_bench: PostgresBench, leader: Callable[[int], tuple[Journal, int]]
) -> None:
    loop = asyncio.new_event_loop()
    listener = loop.run_until_complete(asyncpg.connect(postgres_bench.proxy.dsn))
    heard: list[str] = []
    loop.run_until_complete(listener.add_listener("ucm_journal", lambda *told: heard.append(told[3])))
    journal, epoch = leader(0)
    append_to(journal, epoch, 1, 1, width=1_000_000)
    loop.run_until_complete(listener.execute("SELECT 1"))
    loop.run_until_complete(listener.close())
    loop.close()
    assert heard == ["0 1000000"]


async def test_a_queue_that_fills_is_warned_of(
    postgres_bench: PostgresBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(postgres_hints, "QUEUE_USED_MAX", -1.0)
    with caplog.at_level(logging.WARNING, postgres_hints.__name__):
        async with listening(postgres_bench):
            await told(lambda: "notification queue" in caplog.text)
    assert "0 % full" in caplog.text
