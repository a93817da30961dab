"""Fixtures of the contract suites: one store a parameter, and a pool on shared memory."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane import Backend, open_backend
from dataplane.backends import shm_pool
from metaservice.cli.local.postgres import LocalPostgres
from metaservice.journal.port import Journal
from metaservice.journal.postgres_migrate import migrate
from metaservice.journal.postgres_settings import PostgresSettings
from tests.contract.journal_benches import JournalBench, MemoryBench, SqliteBench
from tests.contract.pgbouncer import pgbouncer
from tests.contract.postgres_bench import SCHEMA, PostgresBench, Sql
from tests.contract.postgres_proxy import PostgresProxy
from tests.contract.shm_house import POOL, SLOT_BYTES


@pytest.fixture(scope="session")
def journal_database(postgres_server: LocalPostgres) -> Iterator[tuple[str, Sql]]:
    """A migrated database for all contract tests, and a connection to it."""
    dsn = postgres_server.create_database("journal_contract")
    migrate(PostgresSettings(dsn, SCHEMA))
    sql = Sql(dsn)
    yield dsn, sql
    sql.close()
    postgres_server.drop_database("journal_contract")


@pytest.fixture
def postgres_bench(journal_database: tuple[str, Sql]) -> Iterator[PostgresBench]:
    """PostgreSQL, empty, behind a proxy that can lose replies."""
    dsn, sql = journal_database
    sql.empty()
    with PostgresProxy(dsn) as proxy:
        bench = PostgresBench(sql, proxy)
        yield bench
        bench.close()


@pytest.fixture(scope="session")
def pooler_dsn(journal_database: tuple[str, Sql]) -> Iterator[str]:
    """The same database through a transaction-pooling PgBouncer."""
    with pgbouncer(journal_database[0]) as dsn:
        yield dsn


@pytest.fixture
def pooler_bench(journal_database: tuple[str, Sql], pooler_dsn: str) -> Iterator[PostgresBench]:
    """PostgreSQL, empty, behind a proxy and a PgBouncer."""
    _, sql = journal_database
    sql.empty()
    with PostgresProxy(pooler_dsn) as proxy:
        bench = PostgresBench(sql, proxy, pooler=True)
        yield bench
        bench.close()


@pytest.fixture(params=["memory", "sqlite", "postgres", pytest.param("pooler", marks=pytest.mark.slow)])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> JournalBench:
    """Every store that keeps the journal contract (case I2: PostgreSQL also through a pooler)."""
    if request.param in ("postgres", "pooler"):
        found: JournalBench = request.getfixturevalue(f"{request.param}_bench")
        return found
    return MemoryBench() if request.param == "memory" else SqliteBench(tmp_path)


@pytest.fixture(params=["memory", "sqlite"])
def embedded_bench(request: pytest.FixtureRequest, tmp_path: Path) -> JournalBench:
    """The stores of one process, which lock, verify and cut when they are opened."""
    return MemoryBench() if request.param == "memory" else SqliteBench(tmp_path)


@pytest.fixture
def journal(bench: JournalBench) -> Iterator[Journal]:
    """An open, empty journal."""
    journal = bench.journal()
    journal.open()
    yield journal
    journal.close()


@pytest.fixture
def shm_directory() -> Iterator[Path]:
    """On shared memory, where there is some."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ucm-test-", dir=base) as path:
        yield Path(path)


@pytest.fixture
def shm_options(shm_directory: Path) -> dict[str, str]:
    return {"dir": str(shm_directory), "slot_bytes": str(SLOT_BYTES), "pool": POOL}


@pytest.fixture
def shm(shm_options: dict[str, str]) -> Iterator[Backend]:
    shm_pool.make(shm_options, "c1", "s1")
    opened = open_backend("shm", shm_options)
    yield opened
    opened.close()
