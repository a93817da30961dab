"""What can go wrong in a call, as short words that connectors may log, count and compare.

A failure is one of the constants below or `rejected:<code>` with a problem code of the service. Every
failure means the same to an engine: a miss, or a write that was not taken.
"""

from metaservice.wire.problems import PROBLEMS

TIMEOUT = "timeout"
"""The whole call (name look-up, connect, send, receive, retry) did not end within its deadline."""
REFUSED_CONNECTION = "refused_connection"
"""Nobody listens there, or the network or name does not exist."""
CONNECTION_LOST = "connection_lost"
"""The peer closed or reset the connection in the middle of the call."""
PROTOCOL = "protocol"
"""The answer is not what this service would say: not HTTP, not msgpack, columns of wrong length, more
than was asked..."""
OVERLOADED = "overloaded"
"""The service said that it has too much to do."""
BREAKER_OPEN = "breaker_open"
"""Not sent: the calls before failed, and the pause after them is not over."""
NOT_REGISTERED = "not_registered"
"""Not sent: the call needs a current registration of an engine or worker, and there is none now."""
INVALID_REQUEST = "invalid_request"
"""Not sent: an argument has a type or value that no request can carry."""
CLOSED = "closed"
"""Not sent: this client was closed."""
INTERNAL = "internal"
"""A fault of this client; it was logged with its traceback."""

REJECTED = "rejected:"

NOT_LEADER = REJECTED + "not_leader"
NOT_READY = REJECTED + "not_ready"

UNHEALTHY = frozenset({TIMEOUT, REFUSED_CONNECTION, CONNECTION_LOST, PROTOCOL})
"""Failures that say that a replica is not well."""
PASSING = frozenset(
    {
        *UNHEALTHY,
        *(BREAKER_OPEN, OVERLOADED, NOT_LEADER),
        *(REJECTED + code for code, problem in PROBLEMS.items() if problem.retry),
    }
)
"""Failures of a call that may succeed later, without anybody changing anything."""


class CallFailed(Exception):
    """Inside the client: a call came to nothing. Never reaches an engine; `failure` does.

    `retry_after_ms`: how long the service asked us to stay away (0: it did not say). `shard`, `leader`: of
    a refusal by a replica that does not lead, whose call it was and the URL of who does (-1 and "" when
    not said).
    """

    def __init__(
        self,
        failure: str,
        detail: str = "",
        *,
        status: int = 0,
        field: str = "",
        retry_after_ms: int = 0,
        shard: int = -1,
        leader: str = "",
    ) -> None:
        super().__init__(failure, detail)
        self.failure = failure
        self.detail = detail
        self.status = status
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.shard = shard
        self.leader = leader


class Stale(Exception):
    """The connection turned out to be dead before a byte of an answer came."""


def late(doing: str) -> CallFailed:
    """The failure of a call whose deadline passed."""
    return CallFailed(TIMEOUT, f"deadline passed while {doing}")


class ClientError(Exception):
    """Raised by the calls of operators, and by every call of a client that was made with `raise_errors`.

    `code` is the service's problem code where it answered, else the failure word; `status` the HTTP
    status (0 without an answer); `field` the offending field, if one was named.
    """

    def __init__(self, code: str, detail: str = "", *, status: int = 0, field: str = "") -> None:
        where = f" ({field})" if field else ""
        super().__init__(f"{code}{where}: {detail}" if detail else code + where)
        self.code = code
        self.detail = detail
        self.status = status
        self.field = field


def client_error(failed: CallFailed) -> ClientError:
    """What a caller who asked for exceptions gets."""
    code = failed.failure.removeprefix(REJECTED)
    return ClientError(code, failed.detail, status=failed.status, field=failed.field)
