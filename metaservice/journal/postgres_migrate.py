"""The database before anything is served from it: its tables, its one cluster, whether it keeps promises."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

import metaservice
from metaservice.journal.errors import JournalFailed
from metaservice.journal.postgres_errors import DRIVER_ERRORS, failed_statement, refused_connection
from metaservice.journal.postgres_schema import schema_of
from metaservice.journal.postgres_settings import Connection as DriverConnection
from metaservice.journal.postgres_settings import PostgresSettings, begin, connect

MIGRATE_MS = 60_000
"""A migration may wait for another starter's, and for locks that long transactions hold."""
_LOCK = 0x55434D4A  # "UCMJ": starters of one database migrate one after the other
_NOT_DURABLE = ("off", "local")

R = TypeVar("R")


def migrate(settings: PostgresSettings) -> None:
    """Brings the schema to this release, making it when it is missing. Several starters may do so at once.

    A schema of a newer release is left as it is: each migration works with the release before it. Raises
    JournalUnavailable or JournalFailed; nothing is then changed.
    """
    _run(settings, "migrating", MIGRATE_MS, lambda connection: _migrate(connection, settings.schema))


def check_cluster(settings: PostgresSettings, shards: int) -> str:
    """The id of the cluster that this schema belongs to; made, with `shards` shards, when there is none.

    JournalFailed when it was made with another count: instances would be looked for in shards that do not
    have them.
    """

    def check(connection: Connection) -> tuple[str, int]:
        cluster = schema_of(settings.schema).cluster
        new = insert(cluster).values(id=func.replace(text("gen_random_uuid()::text"), "-", ""), shards=shards)
        connection.execute(new.on_conflict_do_nothing())
        row = connection.execute(select(cluster.c.id, cluster.c.shards)).one()
        return row.id, row.shards

    found, count = _run(settings, "checking the cluster", settings.timeout_ms, check)
    if count != shards:
        raise JournalFailed(
            f"cluster {found} in {settings.place}",
            "checking the number of shards",
            f"it was made with {count} shards, and this replica is configured for {shards}",
            f"the number is fixed: configure {count}, or another schema for a new cluster",
        )
    return found


def count_shards(settings: PostgresSettings) -> int:
    """The number of shards that the cluster in this schema was made with; 0 when there is none yet."""
    cluster = schema_of(settings.schema).cluster

    def count(connection: Connection) -> int:
        return connection.execute(select(cluster.c.shards)).scalar() or 0

    return _run(settings, "asking for the cluster", settings.timeout_ms, count)


def durability_warning(settings: PostgresSettings) -> str:
    """Why what is acknowledged may be lost with the database's primary; '' when it may not.

    What this connection's settings say is asked, for a role or a database may have its own.
    """

    def ask(connection: Connection) -> dict[str, str]:
        names = ("synchronous_commit", "synchronous_standby_names", "fsync", "full_page_writes")
        asked = select(*(func.current_setting(name).label(name) for name in names))
        return dict(connection.execute(asked).mappings().one())

    found = _run(settings, "asking how durable commits are", settings.timeout_ms, ask)
    wrong = [f"{name} is off" for name in ("fsync", "full_page_writes") if found[name] == "off"]
    if found["synchronous_commit"] in _NOT_DURABLE:
        wrong.append(f"synchronous_commit is {found['synchronous_commit']}")
    if not found["synchronous_standby_names"].strip():
        wrong.append("no synchronous standby is configured (synchronous_standby_names is empty)")
    if not wrong:
        return ""
    return (
        f"{settings.place}: {'; '.join(wrong)}: acknowledged writes may be lost when PostgreSQL fails over "
        "or crashes; the no-loss promise needs a synchronous standby and synchronous_commit = on"
    )


def migrations() -> Path:
    """The folder of the migrations: inside the installed package, beside it in a checkout."""
    package = Path(metaservice.__file__).parent
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def alembic_config() -> Config:
    """Alembic's configuration for our migrations, without any file."""
    config = Config()
    config.set_main_option("script_location", str(migrations()).replace("%", "%%"))
    return config


def _migrate(connection: Connection, schema: str) -> None:
    config = alembic_config()
    scripts = ScriptDirectory.from_config(config)
    connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    known = text("SELECT count(*) FROM pg_namespace WHERE nspname = :schema")
    if not connection.execute(known, {"schema": schema}).scalar():
        connection.execute(text(f'CREATE SCHEMA "{schema}"'))
    context = MigrationContext.configure(connection, opts={"version_table_schema": schema})
    current = context.get_current_revision()
    if current is not None:
        try:
            scripts.get_revision(current)
        except CommandError:
            return  # of a newer release
        if current == scripts.get_current_head():
            return
    config.attributes.update(connection=connection, schema=schema)
    command.upgrade(config, "head")


def _run(settings: PostgresSettings, doing: str, timeout_ms: int, what: Callable[[Connection], R]) -> R:
    """`what` in one transaction, on a loop of its own, within `timeout_ms` and a connect."""
    where = f"journal {settings.place}"
    try:
        with asyncio.Runner() as runner:
            return runner.run(_connected(settings, timeout_ms, what))
    except DBAPIError as error:
        cause = error.orig.__cause__ if error.orig is not None else None
        raise failed_statement(cause or error, where, doing, timeout_ms) from error
    except _Refused as error:
        assert error.__cause__ is not None
        raise refused_connection(error.__cause__, where, doing) from error
    except DRIVER_ERRORS as error:
        raise failed_statement(error, where, doing, timeout_ms) from error


class _Refused(Exception):
    """No connection could be made; its cause says why."""


async def _connected(settings: PostgresSettings, timeout_ms: int, what: Callable[[Connection], R]) -> R:
    try:
        driver = await connect(settings)
    except (*DRIVER_ERRORS, ValueError) as error:
        raise _Refused from error
    expiry = asyncio.get_running_loop().call_later(timeout_ms / 1000, driver.terminate)
    try:
        return await _transaction(driver, timeout_ms, what)
    finally:
        expiry.cancel()
        driver.terminate()


async def _transaction(driver: DriverConnection, timeout_ms: int, what: Callable[[Connection], R]) -> R:
    """The transaction is begun and committed here: SQLAlchemy asks for the types of the database as soon as
    it has a connection, which a pooler might answer from two servers outside of one."""

    async def connection_made() -> DriverConnection:
        return driver

    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=connection_made,
        isolation_level="AUTOCOMMIT",
        poolclass=NullPool,
        connect_args={"prepared_statement_cache_size": 0, "prepared_statement_name_func": str},
    )
    await driver.execute(begin(timeout_ms))
    async with engine.connect() as connection:
        result = await connection.run_sync(what)
        await driver.execute("COMMIT")
    return result
