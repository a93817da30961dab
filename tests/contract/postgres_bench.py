"""PostgreSQL under the journal contract: a proxy loses replies, triggers make the server fail, and damage is
done by SQL."""

import asyncio
import time
from dataclasses import replace
from typing import Any, TypeVar

import asyncpg

from metaservice.journal import postgres
from metaservice.journal.memory import AppendFault
from metaservice.journal.port import Journal
from metaservice.journal.postgres import PostgresJournal, PostgresReader
from metaservice.journal.postgres_settings import PostgresSettings
from tests.contract.journal_benches import JournalBench
from tests.contract.postgres_proxy import BIND, COMMAND_COMPLETE, PostgresProxy

SCHEMA = "ucm"
R = TypeVar("R", bound=PostgresReader)
_TABLES = ("shard", "journal", "snapshot", "snapshot_chunk", "follower", "cluster", "replica", "seat")
_FULL = f"""
    CREATE OR REPLACE FUNCTION {SCHEMA}.full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'no space left' USING ERRCODE = 'disk_full'; END $$;
    CREATE TRIGGER full_disk BEFORE INSERT ON {SCHEMA}.journal EXECUTE FUNCTION {SCHEMA}.full_disk()
"""


class Sql:
    """Statements beside the journal, over one connection of their own."""

    def __init__(self, dsn: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._connection = self._loop.run_until_complete(asyncpg.connect(dsn))

    def __call__(self, statement: str, *values: object) -> list[Any]:
        """The rows; several statements when there are no values."""
        run = self._connection.fetch if values or "SELECT" in statement else self._connection.execute
        rows = self._loop.run_until_complete(run(statement, *values))
        return rows if isinstance(rows, list) else []

    def close(self) -> None:
        self._loop.run_until_complete(self._connection.close())
        self._loop.close()

    def empty(self) -> None:
        """As after the migration."""
        self("TRUNCATE " + ", ".join(f"{SCHEMA}.{table}" for table in _TABLES))
        self(f"DROP TRIGGER IF EXISTS full_disk ON {SCHEMA}.journal")


class PostgresBench(JournalBench):
    scans_at_open = False
    reads_ahead = True

    def __init__(self, sql: Sql, proxy: PostgresProxy, *, pooler: bool = False) -> None:
        self.sql = sql
        self.proxy = proxy
        self.settings = PostgresSettings(proxy.dsn, SCHEMA, pooler=pooler)
        self._made: list[PostgresReader] = []

    def journal(self, shard: int = 0) -> PostgresJournal:
        return self._kept(PostgresJournal(self.settings, shard, "bench"))

    def impatient_journal(self) -> PostgresJournal:
        """One with a short deadline, for tests that wait for it to pass."""
        return self._kept(PostgresJournal(replace(self.settings, timeout_ms=300), 0, "bench"))

    def backends(self) -> list[int]:
        """Process ids of the servers that serve journals now."""
        rows = self.sql(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'ucm-meta'"
            " AND datname = current_database()"
        )
        return [row[0] for row in rows]

    def await_gone(self, pids: list[int]) -> None:
        """Until none of these servers is left."""
        deadline = time.monotonic() + 10
        while set(self.backends()) & set(pids):
            assert time.monotonic() < deadline, "a server does not end"
            time.sleep(0.01)

    def reader(self, shard: int = 0) -> PostgresReader:
        return self._kept(postgres.open_reader(self.settings, shard))

    def _kept(self, made: R) -> R:
        self._made.append(made)
        return made

    def close(self) -> None:
        for made in self._made:
            made.close()

    def change_record(self, first_seq: int, **values: object) -> None:
        for name, value in values.items():
            self.sql(
                f"UPDATE {SCHEMA}.journal SET {name} = $1 WHERE shard = 0 AND first_seq = $2",
                value,
                first_seq,
            )

    def drop_record(self, first_seq: int) -> None:
        self.sql(f"DELETE FROM {SCHEMA}.journal WHERE shard = 0 AND first_seq = $1", first_seq)

    def payload(self, first_seq: int) -> bytes:
        found: bytes = self.sql(
            f"SELECT payload FROM {SCHEMA}.journal WHERE shard = 0 AND first_seq = $1", first_seq
        )[0][0]
        return found

    def set_mark(self, name: str, value: int) -> None:
        self.sql(f"UPDATE {SCHEMA}.shard SET {name} = $1 WHERE id = 0", value)

    def damage_snapshot(self, seq: int) -> None:
        self.sql(
            f"""UPDATE {SCHEMA}.snapshot_chunk
            SET payload = set_byte(payload, length(payload) - 1, get_byte(payload, length(payload) - 1) # 1)
            WHERE snapshot = (SELECT id FROM {SCHEMA}.snapshot WHERE seq = $1)
            AND number = (SELECT chunks - 1 FROM {SCHEMA}.snapshot WHERE seq = $1)""",
            seq,
        )

    def lose_snapshot(self, seq: int) -> None:
        self.sql(f"DELETE FROM {SCHEMA}.snapshot WHERE seq = $1", seq)

    def fill(self, journal: Journal) -> None:
        self.sql(_FULL)

    def make_room(self, journal: Journal) -> None:
        self.sql(f"DROP TRIGGER full_disk ON {SCHEMA}.journal")

    def leave_fate_open(self, journal: Journal, fault: AppendFault) -> None:
        if fault is AppendFault.LOST:
            self.proxy.cut_before(BIND)
        else:
            # BEGIN and two SET LOCAL, the statement, COMMIT
            self.proxy.cut_after(COMMAND_COMPLETE, 5 if self.settings.pooler else 1)
