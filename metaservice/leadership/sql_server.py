"""One connection to the PostgreSQL that takes writes, for short transactions with a deadline."""

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import asyncpg

from metaservice.leadership.errors import LeadershipRefused
from metaservice.leadership.rota import PlaceFailed, Rota

T = TypeVar("T")
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

REFUSED = re.compile(r"28|3D|3F|42")
"""Classes of SQLSTATE that stay the same until somebody does something: wrong password, no such database, no
such schema, no such table or no right to it."""


@dataclass(frozen=True, slots=True)
class SqlLeaseSettings:
    """Where the tables are."""

    dsns: tuple[str, ...] = field(repr=False)
    """One DSN a server, `postgresql://user:password@host:port/database?...`. Of several, the one that takes
    writes is used. One DSN with several hosts would not do: one that hangs would use up the time of all."""
    schema: str = "ucm"

    def __post_init__(self) -> None:
        if not self.dsns:
            raise ValueError("the lease in PostgreSQL needs one DSN at least")
        if not re.fullmatch(r"[a-z_][a-z0-9_]*", self.schema):
            raise ValueError(f"the schema {self.schema!r} is not a plain lower-case name")


class SqlServer:
    """Keeps the connection, and makes it anew at the next server when anything is wrong with it.

    Works through a transaction-pooling PgBouncer: all is done inside transactions, nothing is prepared by
    name, and nothing of a session is relied on.
    """

    def __init__(
        self,
        settings: SqlLeaseSettings,
        timeout_ms: int,
        now_s: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        """Connects to nothing yet."""
        names = [f"server {number}" for number in range(1, len(settings.dsns) + 1)]
        self._where = f"PostgreSQL schema {settings.schema}"
        self._rota = Rota(self._where, names, timeout_ms, now_s, chance)
        self._dsns = settings.dsns
        self._timeout_s = timeout_ms / 1000
        self._open: tuple[int, Connection] | None = None
        bound = f"'{timeout_ms}ms'"
        self.begin = (
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; "
            f"SET LOCAL lock_timeout = {bound}; SET LOCAL statement_timeout = {bound}; "
            f"SET LOCAL idle_in_transaction_session_timeout = '{timeout_ms // 2}ms'"
        )
        """What every transaction starts with: one simple query. The bounds free the locks of a client that
        stopped in the middle, soon enough for somebody who waits for them to get them within one timeout."""

    async def transact(self, doing: str, unit: Callable[[Connection], Awaitable[T]]) -> T:
        """The result of `unit`, committed. It starts over at the next server when one fails, so it must be
        repeatable: what a failed try did may have been committed.

        Ends within two timeouts. Raises LeadershipUnavailable and LeadershipRefused.
        """

        async def attempt(index: int) -> T:
            try:
                connection = await self._connection(index)
                await connection.execute(self.begin)
                result = await unit(connection)
                await connection.execute("COMMIT")
            except asyncpg.PostgresError as error:
                self.drop()
                if REFUSED.match(error.sqlstate or ""):
                    raise LeadershipRefused(self._where, doing, str(error)) from error
                raise PlaceFailed(f"{error.sqlstate} {error}") from error
            except (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
                self.drop()
                raise PlaceFailed(f"{type(error).__name__} {error}".rstrip()) from error
            except BaseException:  # the deadline among others: a transaction may be open
                self.drop()
                raise
            return result

        return await self._rota.ask(doing, attempt)

    def drop(self) -> None:
        """Throws the connection away without a word; the server ends what was open in it."""
        if self._open is not None:
            self._open[1].terminate()
            self._open = None

    async def close(self) -> None:
        """Says goodbye, briefly."""
        if self._open is not None:
            with suppress(Exception):
                await self._open[1].close(timeout=self._timeout_s)
        self.drop()

    async def _connection(self, index: int) -> Connection:
        if self._open is not None:
            server, connection = self._open
            if server == index and not connection.is_closed():
                return connection
            self.drop()
        connection = await asyncpg.connect(
            self._dsns[index],
            timeout=self._timeout_s,
            statement_cache_size=0,
            target_session_attrs="read-write",
            server_settings={"application_name": "ucm-meta leadership"},
        )
        self._open = (index, connection)
        return connection
