"""One connection to PostgreSQL behind blocking calls, each of which ends within a deadline whatever hangs.

asyncpg runs on a private event loop that turns only while somebody calls; no thread or task is left behind.
A statement that passes its deadline loses its connection, and is never cancelled: the server takes a cancel
request that arrives while a commit waits for its standby for leave to confirm what no standby has.
"""

import asyncio
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import asyncpg

from metaservice.journal.errors import JournalClosed, JournalUnavailable
from metaservice.journal.postgres_errors import (
    DRIVER_ERRORS,
    READ_ONLY,
    Unanswered,
    failed_statement,
    is_answer,
    is_callers,
    is_retried,
    refused_connection,
    sqlstate,
)
from metaservice.journal.postgres_settings import Connection, PostgresSettings, begin, connect
from metaservice.journal.postgres_statements import Statement

TRIES = 4
"""How often a statement is run that the server rolled back for another's sake."""
BYTES_PER_MS = 8 * 1024
"""A slow link: what a deadline grows by for the bytes that a statement moves."""
_CLOSE_MS = 500

Rows = list[asyncpg.Record]


class PostgresSession:
    """Calls may come from any thread; they run one after the other."""

    def __init__(self, settings: PostgresSettings, where: str) -> None:
        self._settings = settings
        self._where = where
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._resting = False
        self._expired = False
        self._warning = ""

    def fetch(
        self,
        doing: str,
        statement: Statement,
        values: Mapping[str, Any],
        size_bytes: int = 0,
        *,
        surely: bool = False,
    ) -> Rows:
        """The rows of one statement, in a transaction of its own. `surely`: a success that the server warned
        about is none. A commit that was let go before its standby had it says so by a warning, and nothing
        else.

        Raises JournalFull, JournalBusy, JournalUnavailable or JournalFailed when nothing was done, and
        `Unanswered` when nobody knows.
        """
        with self._lock:
            if self._closed:
                raise JournalClosed(self._where)
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            rows = self._loop.run_until_complete(
                self._fetch(doing, statement.sql, statement.arguments(values), size_bytes)
            )
            if surely and self._warning:
                raise Unanswered(self._where, doing, self._warning)
            return rows

    def drop(self) -> None:
        """Lets the connection go: the next call makes another one."""
        with self._lock:
            self._terminate()

    def rest(self, seconds: float) -> bool:
        """True when `seconds` have passed since it was True last. Counted on the private loop."""
        if self._resting or self._loop is None:
            return False
        self._resting = True
        self._loop.call_later(seconds, self._rested)
        return True

    def close(self) -> None:
        """Ends the connection. Waits for a call that is going on, which its deadline ends. May be called
        twice."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
            connection, self._connection = self._connection, None
            if loop is None:
                return
            try:
                if connection is not None:
                    with suppress(*DRIVER_ERRORS):
                        loop.run_until_complete(connection.close(timeout=_CLOSE_MS / 1000))
                loop.run_until_complete(asyncio.sleep(0))
            finally:
                loop.close()

    async def _fetch(self, doing: str, sql: str, arguments: list[Any], size_bytes: int) -> Rows:
        deadline_ms = self._settings.timeout_ms + size_bytes // BYTES_PER_MS
        for tries in range(1, TRIES + 1):
            connection = await self._connected(doing)
            self._warning, self._expired = "", False
            expiry = asyncio.get_running_loop().call_later(deadline_ms / 1000, self._expire, connection)
            try:
                return await self._run(connection, sql, arguments)
            except DRIVER_ERRORS as error:
                if not is_answer(error) or sqlstate(error) == READ_ONLY or self._settings.pooler:
                    self._terminate()
                if is_callers(error):
                    raise
                if self._expired:
                    raise Unanswered(self._where, doing, f"no answer within {deadline_ms} ms") from error
                if not is_retried(error) or tries == TRIES:
                    raise failed_statement(error, self._where, doing, deadline_ms) from error
            finally:
                expiry.cancel()
        raise AssertionError("the last try returns or raises")

    async def _run(self, connection: Connection, sql: str, arguments: list[Any]) -> Rows:
        if not self._settings.pooler:
            rows: Rows = await connection.fetch(sql, *arguments)
            return rows
        await connection.execute(begin(self._settings.timeout_ms))
        rows = await connection.fetch(sql, *arguments)
        await connection.execute("COMMIT")
        return rows

    async def _connected(self, doing: str) -> Connection:
        connection = self._connection
        if connection is not None:
            # The loop stood still since the last call. Let it hear what came meanwhile: a server that went
            # away is better found now than by a statement whose fate is then unknown.
            for _ in range(3):
                await asyncio.sleep(0)
            if not connection.is_closed():
                return connection
            self._connection = None
        try:
            connection = await connect(self._settings)
        except (*DRIVER_ERRORS, ValueError) as error:
            raise refused_connection(error, self._where, doing) from error
        connection.add_log_listener(self._heard)
        self._connection = connection
        return connection

    def _heard(self, _: object, message: Any) -> None:
        if message.severity_en == "WARNING":
            self._warning = message.message

    def _terminate(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    def _expire(self, connection: Connection) -> None:
        self._expired = True
        connection.terminate()

    def _rested(self) -> None:
        self._resting = False


def one_row(rows: Rows, where: str, doing: str) -> asyncpg.Record:
    """The one row that a statement has; JournalUnavailable when the server that gave it takes no writes, for
    it may be behind."""
    (row,) = rows
    if row.get("read_only"):
        raise JournalUnavailable(where, doing, "the server takes no writes: a standby, or demoted")
    return row
