"""Calls to a cluster that keep what the SDK does not show: from which shard, epoch and seq each answer is,
when it was asked and when it came, and from whom."""

import http.client
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from metaservice.wire.schemas import Request

TRY_S = 0.8
"""One replica gets so long; a frozen one costs no more."""
PAUSE_S = 0.03
MSGPACK = "application/msgpack"
PASSING = frozenset({421, 503})
"""Nobody did anything: ask another, or later."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one replica said. Times are of the wall clock of this machine, in seconds: the journal's are too.
    `shard` -1: the answer does not say where it is from."""

    status: int
    body: bytes
    url: str
    sent_s: float
    received_s: float
    shard: int = -1
    epoch: int = 0
    seq: int = 0
    staleness_ms: int = -1
    """-1: the leader's own."""

    @property
    def ok(self) -> bool:
        """Whether it did what was asked."""
        return self.status == 200

    @property
    def code(self) -> str:
        """The problem code of a refusal; "" when it is none."""
        try:
            return str(msgspec.msgpack.decode(self.body)["code"])
        except (msgspec.MsgspecError, LookupError, TypeError):
            return ""


class Unanswered(Exception):
    """Nobody gave an answer that counts in time. Whether anything was done is not known."""


class Routes:
    """Who leads which shard, as far as anybody was told; shared by all callers."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        self.leader: dict[int, str] = {}


class Caller:
    """One client, for one thread: a connection to each replica, kept as long as it works."""

    def __init__(self, routes: Routes, try_s: float = TRY_S) -> None:
        self._routes = routes
        self._try_s = try_s
        self._connections: dict[str, http.client.HTTPConnection] = {}
        self._turn = 0

    @property
    def urls(self) -> tuple[str, ...]:
        """Of all replicas."""
        return self._routes.urls

    def close(self) -> None:
        """Let go of all connections."""
        for url in list(self._connections):
            self._drop(url)

    def call(
        self, method: str, path: str, body: Request | None, shard: int, timeout_s: float, **headers: str
    ) -> Answer:
        """Ask the leader of `shard`, whoever that is, until the deadline: the same request again and again,
        which must be one that may be repeated. Raises Unanswered."""
        deadline_s = time.monotonic() + timeout_s
        last = "nobody was asked"
        named = ""
        while (left_s := deadline_s - time.monotonic()) > 0:
            url = named or self._routes.leader.get(shard) or self._next()
            named = ""
            try:
                answer = self.ask(url, method, path, body, min(self._try_s, left_s), **headers)
            except OSError as error:
                last = f"{url}: {error!r}"
            else:
                if answer.status not in PASSING:
                    self._routes.leader[shard] = url
                    return answer
                last = f"{url}: {answer.status} {answer.body[:200]!r}"
                named = _leader_in(answer)
                if named and named != url:
                    self._routes.leader[shard] = named
                    continue
            if self._routes.leader.get(shard) == url:
                self._routes.leader.pop(shard, None)
            time.sleep(PAUSE_S)
        raise Unanswered(f"{method} {path}: {last}")

    def ask(
        self, url: str, method: str, path: str, body: Request | None, timeout_s: float, **headers: str
    ) -> Answer:
        """Ask one replica once, which may also refuse. Raises OSError."""
        data = b"" if body is None else msgspec.msgpack.encode(body)
        sent = {"content-type": MSGPACK, "accept": MSGPACK, "x-ucm-direct": "1", **headers}
        fresh = url not in self._connections
        while True:
            connection = self._connections.get(url)
            if connection is None:
                connection = self._connections[url] = connect(url, timeout_s)
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
            sent_s = time.time()
            try:
                connection.request(method, path, data, sent)
                response = connection.getresponse()
                return read(response, response.read(), url, sent_s)
            except (OSError, http.client.HTTPException) as error:
                self._drop(url)
                if fresh or isinstance(error, TimeoutError):
                    raise OSError(repr(error)) from error
                fresh = True  # it had been kept for too long

    def _drop(self, url: str) -> None:
        connection = self._connections.pop(url, None)
        if connection is not None:
            connection.close()

    def _next(self) -> str:
        self._turn += 1
        return self._routes.urls[self._turn % len(self._routes.urls)]


def connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    """A connection that is there. Raises OSError."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read(response: http.client.HTTPResponse, body: bytes, url: str, sent_s: float) -> Answer:
    """A response with what its headers say."""
    shard, epoch, seq = -1, 0, 0
    position = response.getheader("x-ucm-seq")
    if position is not None:
        shard, epoch, seq = map(int, position.split("/"))
    staleness_ms = int(response.getheader("x-ucm-staleness-ms") or -1)
    return Answer(response.status, body, url, sent_s, time.time(), shard, epoch, seq, staleness_ms)


def _leader_in(answer: Answer) -> str:
    try:
        facts: dict[str, Any] = msgspec.msgpack.decode(answer.body).get("facts") or {}
    except (msgspec.MsgspecError, AttributeError):
        return ""
    return str(facts.get("leader") or "")
