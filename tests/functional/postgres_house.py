"""A journal on a PostgreSQL of the test's own, and what tests do to it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import asyncpg

from metaservice.journal import frame
from metaservice.journal.errors import FateUnknown, JournalBusy, JournalUnavailable
from metaservice.journal.postgres import PostgresJournal
from metaservice.journal.postgres_migrate import migrate
from metaservice.journal.postgres_settings import PostgresSettings

TIMEOUT_MS = 400
"""For tests that wait for it to pass."""
CALL_MAX_S = 2 * TIMEOUT_MS / 1000 + 0.3
"""A connect and a statement, and what a busy machine adds."""
OURS = "application_name = 'ucm-meta' AND pid <> pg_backend_pid()"


def settings_of(dsn: str, *, timeout_ms: int = 5_000) -> PostgresSettings:
    """Settings for a migrated schema at `dsn`."""
    migrate(PostgresSettings(dsn, timeout_ms=10_000))
    return PostgresSettings(dsn, timeout_ms=timeout_ms)


@contextmanager
def opened(settings: PostgresSettings, shard: int = 0, holder: str = "r1") -> Iterator[PostgresJournal]:
    """An open journal; closed at the end."""
    journal = PostgresJournal(settings, shard, holder)
    journal.open()
    try:
        yield journal
    finally:
        journal.close()


def body(text: object) -> bytes:
    """A sealed payload that says `text`."""
    return frame.seal(f"{text} ".encode() * 50)


def get_in(journal: PostgresJournal, seq: int, epoch: int, payload: bytes, within_s: float = 20.0) -> None:
    """Appends exactly these bytes, as a leader does: tried again while they are known not to be in, looked
    for while nobody knows. What it raises else means that they are not in, except FateUnknown at the end."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            journal.append(seq, seq, epoch, payload)
            return
        except (JournalBusy, JournalUnavailable):
            pass
        except FateUnknown:
            try:
                if journal.resolve(seq, payload):
                    return
            except FateUnknown:
                if time.monotonic() > deadline:
                    raise
        assert time.monotonic() < deadline, "the journal does not recover"
        time.sleep(0.002)


@contextmanager
def killing(dsn: str, every_s: float) -> Iterator[list[int]]:
    """Meanwhile the servers of all journals are terminated again and again; yields how many, in a list."""
    kills, over = [0], threading.Event()

    async def kill() -> None:
        connection = await asyncpg.connect(dsn)
        while not over.is_set():
            question = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {OURS}"
            kills[0] += await connection.fetchval(question)
            await asyncio.sleep(every_s)
        await connection.close()

    thread = threading.Thread(target=lambda: asyncio.run(kill()), daemon=True)
    thread.start()
    try:
        yield kills
    finally:
        over.set()
        thread.join(10)


def until(true: Callable[[], bool], within_s: float = 10.0) -> None:
    """Waits for something that happens elsewhere."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)
