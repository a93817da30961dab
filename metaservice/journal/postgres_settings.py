"""How to reach the database that holds the journal, and one connection to it."""

import asyncio
import re
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

import asyncpg

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_SCHEMES = ("postgresql", "postgres", "postgresql+asyncpg")


@dataclass(frozen=True, slots=True)
class PostgresSettings:
    """`dsn` may name several hosts; the one that takes writes is used. It holds a password: never show it,
    show `place`.

    ValueError for a DSN or a schema name that cannot be one.
    """

    dsn: str = field(repr=False)
    schema: str = "ucm"
    timeout_ms: int = 2_000
    """Deadline of a connect, and of a statement (longer by what its bytes need). A call takes twice this at
    most."""
    pooler: bool = False
    """Whether a transaction-pooling PgBouncer is in between. Then nothing is prepared by name, and every
    statement is a transaction of its own with BEGIN and COMMIT: safe there, and two round trips slower."""
    notify: bool = True
    """Whether appends wake followers that listen (`PostgresHints`), at most once in 10 ms."""
    follower_ms_max: int = 60_000
    """A follower that has not reported for longer does not hold a trim up."""

    def __post_init__(self) -> None:
        if not SCHEMA_NAME.fullmatch(self.schema):
            raise ValueError(
                f"{self.schema!r} cannot be a schema: lower case letters, digits and _, 48 at most"
            )
        if self.timeout_ms < 1:
            raise ValueError(f"a deadline of {self.timeout_ms} ms is none")
        try:
            parts = urlsplit(self.dsn)
            known = parts.scheme in _SCHEMES and bool(_split_hosts(parts))
        except ValueError:
            known = False
        if not known:
            raise ValueError("a DSN reads postgresql://USER:PASSWORD@HOST[:PORT][,HOST...]/DATABASE")

    @property
    def place(self) -> str:
        """Hosts, database and schema, for messages: nothing secret."""
        parts = urlsplit(self.dsn)
        hosts = parts.netloc.rpartition("@")[2] or dict(parse_qsl(parts.query)).get("host", "localhost")
        return f"{hosts}{parts.path} schema {self.schema}"

    def host_dsns(self) -> tuple[str, ...]:
        """One DSN for each host, as asyncpg reads it."""
        parts = urlsplit(self.dsn)
        query = dict(parse_qsl(parts.query))
        query.setdefault("target_session_attrs", "read-write")
        found = []
        for netloc, host, port in _split_hosts(parts):
            one = query | ({"host": host} if host else {}) | ({"port": port} if port else {})
            found.append(f"postgresql://{netloc}{parts.path}?{urlencode(one)}")
        return tuple(found)


def _split_hosts(parts: SplitResult) -> list[tuple[str, str, str]]:
    """(netloc, host in the query, port in the query) of each host."""
    user, at, netloc = parts.netloc.rpartition("@")
    query = dict(parse_qsl(parts.query))
    if "host" not in query:
        return [(user + at + host, "", "") for host in netloc.split(",")]
    hosts, ports = query["host"].split(","), query.get("port", "").split(",")
    if len(ports) not in (1, len(hosts)):
        raise ValueError("as many ports as hosts")
    if len(ports) == 1:
        ports *= len(hosts)
    return [(user + at + netloc, host, port) for host, port in zip(hosts, ports, strict=True)]


async def connect(settings: PostgresSettings) -> Connection:
    """A connection to the first host that takes writes, within `timeout_ms` for all hosts together: one that
    is stopped keeps the others from being asked for its share only.

    Raises what asyncpg raises, of the last host tried.
    """
    dsns = settings.host_dsns()
    share_s = settings.timeout_ms / 1000 / len(dsns)
    last: Exception | None = None
    for dsn in dsns:
        try:
            async with asyncio.timeout(share_s):
                return await asyncpg.connect(
                    dsn=dsn,
                    timeout=share_s,
                    statement_cache_size=0 if settings.pooler else 100,
                    max_cached_statement_lifetime=0,
                    server_settings={"application_name": "ucm-meta"} | _session_settings(settings),
                )
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            last = error
    assert last is not None, "a DSN names one host at least"
    raise last


def _session_settings(settings: PostgresSettings) -> dict[str, str]:
    """Without a bound, a backend whose client has given up would wait on for a lock that a stopped one holds,
    and each try would leave one more of them. A pooler hands sessions round, so there it is set in each
    transaction instead."""
    return {} if settings.pooler else {"lock_timeout": f"{settings.timeout_ms}ms"}


def begin(lock_ms: int) -> str:
    """What begins a transaction of several round trips, in one: no lock is waited for longer than `lock_ms`,
    and a client that vanished does not leave its transaction open with rows locked."""
    return (
        f"BEGIN; SET LOCAL lock_timeout = '{lock_ms}ms'; "
        f"SET LOCAL idle_in_transaction_session_timeout = '{2 * lock_ms}ms'"
    )
