"""The tables come from the migrations, whoever starts first; a cluster keeps its number of shards."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import pool
from sqlalchemy.ext.asyncio import create_async_engine

from metaservice.cli.local.postgres import LocalPostgres
from metaservice.journal.errors import JournalFailed, JournalMissing, JournalUnavailable
from metaservice.journal.postgres import PostgresJournal, open_reader
from metaservice.journal.postgres_migrate import (
    alembic_config,
    check_cluster,
    count_shards,
    durability_warning,
    migrate,
    migrations,
)
from metaservice.journal.postgres_schema import schema_of
from metaservice.journal.postgres_settings import PostgresSettings
from tests.functional.postgres_house import until

LEADERSHIP = {"replica", "seat"}


async def test_the_migrations_make_the_tables_that_the_statements_name(postgres: str) -> None:
    settings = PostgresSettings(postgres, "other")
    thread = threading.Thread(target=migrate, args=(settings,))
    thread.start()
    thread.join()
    engine = create_async_engine(
        postgres.replace("postgresql:", "postgresql+asyncpg:"), poolclass=pool.NullPool
    )
    options = {
        "version_table_schema": "other",
        "include_schemas": True,
        "include_name": lambda name, kind, _: kind != "schema" or name == "other",
        "include_object": lambda _object, name, kind, *_: kind != "table" or name not in LEADERSHIP,
        "compare_server_default": False,
    }
    async with engine.connect() as connection:
        differences = await connection.run_sync(
            lambda sync: compare_metadata(
                MigrationContext.configure(sync, opts=options), schema_of("other").metadata
            )
        )
    await engine.dispose()
    assert differences == []


def test_starters_at_once_migrate_once(postgres: str) -> None:
    settings = PostgresSettings(postgres)
    errors: list[BaseException] = []

    def start() -> None:
        try:
            migrate(settings)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert check_cluster(settings, 4) == check_cluster(settings, 4)


def test_a_database_of_a_newer_release_is_left_as_it_is(
    postgres: str, postgres_server: LocalPostgres
) -> None:
    settings = PostgresSettings(postgres)
    migrate(settings)
    database = postgres.rpartition("/")[2]
    postgres_server.execute("UPDATE ucm.alembic_version SET version_num = '9999'", database)
    migrate(settings)
    assert postgres_server.execute("SELECT version_num FROM ucm.alembic_version", database) == "9999"
    journal = PostgresJournal(settings, 0, "r1")
    assert journal.open().head_seq == 0
    journal.close()


def test_before_the_migration_there_is_nothing_to_open(postgres: str) -> None:
    settings = PostgresSettings(postgres)
    with pytest.raises(JournalMissing):
        open_reader(settings, 0)
    with pytest.raises(JournalFailed, match="start a replica"):
        PostgresJournal(settings, 0, "r1").open()
    with pytest.raises(JournalFailed):
        count_shards(settings)


def test_a_cluster_keeps_its_number_of_shards(postgres: str) -> None:
    settings = PostgresSettings(postgres)
    migrate(settings)
    assert count_shards(settings) == 0
    cluster = check_cluster(settings, 4)
    assert len(cluster) == 32
    assert count_shards(settings) == 4
    with pytest.raises(JournalFailed, match="made with 4 shards, and this replica is configured for 3"):
        check_cluster(settings, 3)
    elsewhere = PostgresSettings(postgres, "elsewhere")
    migrate(elsewhere)
    assert check_cluster(elsewhere, 3) != cluster


def test_a_wrong_password_stops_the_start_and_is_not_shown(postgres: str) -> None:
    user, _, rest = postgres.partition("@")
    wrong = user.rpartition(":")[0] + ":not-the-password@" + rest
    for call in (
        lambda: migrate(PostgresSettings(wrong)),
        lambda: PostgresJournal(PostgresSettings(wrong), 0, "r1").open(),
    ):
        with pytest.raises(JournalFailed, match="check the DSN") as caught:
            call()
        assert "not-the-password" not in str(caught.value)


def test_nobody_listening_is_unavailable(free_port: Callable[[], int]) -> None:
    settings = PostgresSettings(f"postgresql://u:p@127.0.0.1:{free_port()}/d", timeout_ms=500)
    for call in (lambda: migrate(settings), lambda: open_reader(settings, 0)):
        with pytest.raises(JournalUnavailable):
            call()


def test_a_database_without_a_synchronous_standby_is_warned_of() -> None:
    with LocalPostgres(fsync=True) as primary:
        settings = PostgresSettings(primary.dsn)
        migrate(settings)
        assert "no synchronous standby is configured" in durability_warning(settings)
        primary.execute("ALTER ROLE ucm SET synchronous_commit = 'local'")
        assert "synchronous_commit is local" in durability_warning(settings)
        primary.execute("ALTER ROLE ucm RESET synchronous_commit")
        with primary.standby():
            assert durability_warning(settings) == ""
            primary.configure(full_page_writes="off")
            until(lambda: "full_page_writes is off" in durability_warning(settings))


def test_each_migration_follows_the_one_before() -> None:
    scripts = ScriptDirectory.from_config(alembic_config())
    assert len(scripts.get_heads()) == 1
    numbers = [script.revision for script in scripts.walk_revisions()]
    assert numbers == sorted(numbers, reverse=True)


def test_a_wheel_brings_the_migrations(tmp_path: Path) -> None:
    project = migrations().parent
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", str(wheel)], check=True, capture_output=True, text=True
    ).stdout
    for file in sorted(migrations().rglob("*.py")):
        assert f"metaservice/migrations/{file.relative_to(migrations())}" in names


def test_the_statements_can_be_printed_for_whoever_makes_the_tables(
    postgres: str, postgres_server: LocalPostgres
) -> None:
    command = [
        sys.executable, "-m", "alembic", "-c", str(migrations() / "alembic.ini"), "-x", "schema=theirs",
        "upgrade", "head", "--sql",
    ]  # fmt: skip
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    postgres_server.execute(printed, postgres.rpartition("/")[2])
    settings = PostgresSettings(postgres, "theirs")
    migrate(settings)
    journal = PostgresJournal(settings, 0, "r1")
    assert journal.open().head_seq == 0
    journal.close()
