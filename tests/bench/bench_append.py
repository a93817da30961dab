"""What one append to PostgreSQL takes: by the journal, by asyncpg alone, and through SQLAlchemy's engine.

`python tests/bench/bench_append.py [APPENDS]`, on a PostgreSQL of its own that syncs every commit. The
journal's cost over asyncpg's is what the private loop, the checksum and the checks take.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from metaservice.cli.local.postgres import LocalPostgres
from metaservice.journal import frame
from metaservice.journal.postgres import PostgresJournal
from metaservice.journal.postgres_migrate import migrate
from metaservice.journal.postgres_settings import PostgresSettings
from metaservice.journal.postgres_statements import statements_of
from metaservice.journal.records import record_crc

SIZES = (4_096, 65_536, 262_144)
WARM_UP = 50

Append = Callable[[int], object]


def timed(name: str, size: int, appends: int, append: Append) -> None:
    """Percentiles of `append(seq)`. The fifth is what it takes when nobody else wants the machine."""
    took_s, cpu_s = [], time.process_time()
    for seq in range(1, appends + WARM_UP + 1):
        begun = time.perf_counter()
        append(seq)
        took_s.append(time.perf_counter() - begun)
    took_s = sorted(took_s[WARM_UP:])
    cpu_us = (time.process_time() - cpu_s) / (appends + WARM_UP) * 1e6
    percentiles = "  ".join(f"p{p} {took_s[len(took_s) * p // 100] * 1e3:7.3f} ms" for p in (5, 50, 99))
    print(f"{name:24} {size // 1024:4} KiB  {percentiles}  CPU here {cpu_us:4.0f} us", flush=True)


def journal_appends(settings: PostgresSettings, size: int, appends: int) -> None:
    journal = PostgresJournal(settings, 0, "bench")
    journal.open()
    epoch, payload = journal.claim(), frame.seal(os.urandom(size))
    name = f"journal, {'hints' if settings.notify else 'no hints'}{', pooler' if settings.pooler else ''}"
    timed(name, size, appends, lambda seq: journal.append(seq, seq, epoch, payload))
    journal.close()


def values_of(row: Any, seq: int, payload: bytes) -> dict[str, Any]:
    return {
        "shard": 0, "first_seq": seq, "last_seq": seq, "before_seq": seq - 1, "epoch": row["epoch"],
        "token": row["token"], "settlings": 0, "payload": payload, "payload_bytes": len(payload),
        "crc": record_crc(0, seq, seq, row["epoch"], payload),
    }  # fmt: skip


def asyncpg_appends(settings: PostgresSettings, size: int, appends: int) -> None:
    loop, payload = asyncio.new_event_loop(), frame.seal(os.urandom(size))
    append = statements_of(settings.schema).append
    connection = loop.run_until_complete(asyncpg.connect(settings.dsn))
    row = loop.run_until_complete(connection.fetchrow("SELECT epoch, token FROM ucm.shard WHERE id = 0"))

    def run(seq: int) -> None:
        arguments = append.arguments(values_of(row, seq, payload))
        loop.run_until_complete(connection.fetch(append.sql, *arguments))

    timed("asyncpg alone", size, appends, run)
    loop.run_until_complete(connection.close())
    loop.close()


def engine_appends(settings: PostgresSettings, size: int, appends: int) -> None:
    loop, payload = asyncio.new_event_loop(), frame.seal(os.urandom(size))
    append = statements_of(settings.schema).append
    engine = create_async_engine(
        settings.dsn.replace("postgresql:", "postgresql+asyncpg:"), isolation_level="AUTOCOMMIT"
    )
    connection = loop.run_until_complete(engine.connect())
    asked = text("SELECT epoch, token FROM ucm.shard WHERE id = 0")
    row = loop.run_until_complete(connection.execute(asked)).mappings().one()

    def run(seq: int) -> None:
        arguments = append.arguments(values_of(row, seq, payload))
        loop.run_until_complete(connection.exec_driver_sql(append.sql, tuple(arguments)))

    timed("SQLAlchemy's engine", size, appends, run)
    loop.run_until_complete(connection.close())
    loop.run_until_complete(engine.dispose())
    loop.close()


def main(appends: int) -> None:
    with LocalPostgres(fsync=True) as server:
        settings = PostgresSettings(server.dsn)
        quiet = PostgresSettings(server.dsn, notify=False)
        pooled = PostgresSettings(server.dsn, pooler=True)
        for size in SIZES:
            for measure, how in (
                (journal_appends, settings),
                (journal_appends, quiet),
                (asyncpg_appends, settings),
                (engine_appends, settings),
                (journal_appends, pooled),
            ):
                server.execute("DROP SCHEMA IF EXISTS ucm CASCADE")
                migrate(settings)
                journal = PostgresJournal(settings, 0, "bench")
                journal.open()
                journal.claim()
                journal.close()
                measure(how, size, appends)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000)
