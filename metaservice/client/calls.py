"""Every call once: how its request is built and how its answer is understood. Pure; both clients use these.

A call object keeps its arguments. `request` gives what to send, `answer` turns a good body into a result
(raises CallFailed(protocol) when the body is not what the service would say), `failed` gives the safe
result.
"""

from abc import ABC, abstractmethod
from itertools import count
from secrets import token_hex
from typing import Generic, Protocol, TypeVar

import msgspec

from metaservice.wire.schemas import Reply, Request

from . import checks
from .endpoints import CATALOGUE, Route
from .errors import INVALID_REQUEST, NOT_REGISTERED, CallFailed
from .http import MSGPACK

T = TypeVar("T")
R = TypeVar("R", bound=Reply)

_encoder = msgspec.msgpack.Encoder()
_LOCATION_BITS = 44
"""A location's lower bits are its number within its shard."""


class Who:
    """For whom a client speaks, and its names for its requests.

    A request id is a prefix that no other process has and a counter. The prefix must change after a
    fork: two processes with the same ids under one engine would be given each other's answers.
    """

    __slots__ = ("_count", "_prefix", "id", "incarnation", "kind")

    def __init__(self) -> None:
        self.kind = ""
        self.id = ""
        self.incarnation = ""
        self.renumber()

    def act_as(self, kind: str, id: str, incarnation: str) -> None:
        """Speak for this member from now on. No call of another thread ever names the one's id with the
        other's incarnation."""
        self.incarnation = ""
        self.kind, self.id = kind, id
        self.incarnation = incarnation

    def renumber(self) -> None:
        """Start a new series of request ids."""
        self._prefix = token_hex(8)
        self._count = count(1)

    def request_id(self) -> str:
        """A new request id."""
        return f"{self._prefix}-{next(self._count)}"

    def current(self, kind: str) -> tuple[str, str]:
        """Id and incarnation to act as a registered engine or worker. Raises CallFailed(not_registered)."""
        if self.kind != kind or not self.incarnation:
            raise CallFailed(NOT_REGISTERED, f"no current registration of this client as {kind}")
        return self.id, self.incarnation


class Keeps(Protocol):
    """Where a call leaves what is to be renewed in the background, or no longer. Must not wait for
    anything."""

    def keep_lease(self, lease: str, ttl_ms: int, deadline_ms: int) -> None: ...

    def drop_leases(self, leases: list[str]) -> None: ...

    def leases_renewed(self, leases: list[str], deadline_ms: int) -> None: ...

    def keep_session(
        self, session: str, engine: str, incarnation: str, ttl_ms: int, deadline_ms: int
    ) -> None: ...

    def drop_session(self, session: str) -> None: ...


class Sending(msgspec.Struct, frozen=True):
    """A request ready for the message layer. `straight`: a replica that does not lead is to say who does;
    otherwise it passes the request on. `traceparent`: the W3C trace context it belongs to, or ""."""

    method: str
    path: str
    body: bytes
    media: str = MSGPACK
    accept: str = MSGPACK
    straight: bool = True
    traceparent: str = ""


class Call(ABC, Generic[T]):
    """One call. `writes`: needs the journal. `repeatable`: may be sent again when a kept connection
    turns out dead, and to another replica."""

    __slots__ = ()

    writes = False
    repeatable = True
    media = MSGPACK
    """In which form the answer comes."""
    wait_ms = 0
    """How long the service may take on purpose (long poll), besides the deadline."""

    @property
    def route(self) -> Route:
        """What the call is about, so whose leader has to answer it."""
        return CATALOGUE

    @abstractmethod
    def request(self, who: Who) -> Sending:
        """What to send. Raises CallFailed when it cannot be sent; TypeError and the like for impossible
        arguments."""

    @abstractmethod
    def answer(self, body: bytes, sent_ms: int) -> T:
        """The result from the body of a good reply. `sent_ms`: the clock before the call was sent."""

    @abstractmethod
    def failed(self, failure: str, detail: str) -> T:
        """The safe result."""

    def nothing(self) -> T | None:
        """The result when there is nothing to ask, so that nothing is sent."""
        return None

    def after(self, result: T, keeps: Keeps) -> None:
        """What the result, good or not, means for background renewal."""


def name(value: str, field: str) -> str:
    """A name that goes into a path: anything else could name another route."""
    if type(value) is not str or not checks.is_name(value):
        raise CallFailed(INVALID_REQUEST, f"{field} is not a name", field=field)
    return value


def token(value: str, field: str) -> str:
    """An id of the service that goes into a path."""
    if type(value) is not str or not checks.TOKEN.match(value):
        raise CallFailed(INVALID_REQUEST, f"{field} is not an id", field=field)
    return value


def shard_of(id: str) -> int:
    """The shard that an id of the service (`w-<shard>-...`) carries; the catalogue's for any other text."""
    shard = id[2 : id.find("-", 2)]
    return int(shard) if len(shard) < 6 and shard.isdecimal() else CATALOGUE


def shard_of_location(location: int) -> int:
    """The shard of a location."""
    return location >> _LOCATION_BITS


def post(path: str, body: Request, traceparent: str = "") -> Sending:
    return Sending("POST", path, _encoder.encode(body), traceparent=traceparent)


def put(path: str, body: Request) -> Sending:
    return Sending("PUT", path, _encoder.encode(body))


def decoded(decoder: "msgspec.msgpack.Decoder[R] | msgspec.json.Decoder[R]", body: bytes) -> R:
    """The body as a reply struct. Unknown fields are ignored, wrong types are not."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise checks.lying(f"not a {decoder.type.__name__}: {error}") from None
