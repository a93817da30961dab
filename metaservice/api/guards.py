"""What all connections share: how many there are, how much they hold, and the clock tick that ends slow ones.

Deadlines are counted in ticks of one sweep over all connections, not in readings of a clock: arming one costs
an addition, and a stall of the service itself ends nobody's connection.
"""

import asyncio
from http import HTTPStatus
from typing import Protocol

from metaservice.telemetry.metrics import Metrics

from .errors import ApiError
from .http import HttpResponse
from .settings import ApiSettings

NEVER = 1 << 62
TURNED_AWAY_MAX = 256


class Guarded(Protocol):
    """A connection as the gate sees it."""

    due: int

    def overdue(self) -> None:
        """Called by the sweep once `due` has come."""


class Gate:
    """Admits connections and requests up to the limits, and sweeps those that are late."""

    def __init__(self, settings: ApiSettings, metrics: Metrics) -> None:
        self.settings = settings
        self.tick = 0
        self.connections: set[Guarded] = set()
        self._turned_away: set[Guarded] = set()
        self.empty = asyncio.Event()
        """Whether there is no connection."""
        self.empty.set()
        self.in_flight = 0
        self.buffered_bytes = 0
        self.closing = False
        """Set while the server stops: every answer from now on is a connection's last."""
        self._metrics = metrics
        self._head_source: list[tuple[bytes, bytes]] | None = None
        self._head_lines = b""
        self._sweep: asyncio.TimerHandle | None = None

    def head_lines(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Headers that every response has, as they are sent.

        The list is another one once a second: its date changed.
        """
        if self._head_source is not headers:
            self._head_source = headers
            self._head_lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        return self._head_lines

    def due_in(self, delay_ms: int) -> int:
        """The tick that is at least `delay_ms` away."""
        return self.tick + 1 - -delay_ms // self.settings.sweep_ms

    def start(self) -> None:
        """Begin to sweep; needs the running loop."""
        loop = asyncio.get_running_loop()
        self._sweep = loop.call_later(self.settings.sweep_ms / 1000, self._tick, loop)

    def stop(self) -> None:
        """End the sweep."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweep = loop.call_later(self.settings.sweep_ms / 1000, self._tick, loop)
        self.tick += 1
        for connection in [*self.connections, *self._turned_away]:
            if connection.due <= self.tick:
                connection.overdue()

    def join(self, connection: Guarded) -> bool:
        """Count a new connection; False when there are too many."""
        if len(self.connections) >= self.settings.connections_max:
            self.refused("overloaded")
            return False
        self.connections.add(connection)
        self.empty.clear()
        self._metrics.connections = len(self.connections)
        return True

    def linger(self, connection: Guarded) -> bool:
        """Let a connection that was not admitted stay until it could read why; False when too many do."""
        if len(self._turned_away) >= TURNED_AWAY_MAX:
            return False
        self._turned_away.add(connection)
        return True

    def leave(self, connection: Guarded) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        self._turned_away.discard(connection)
        if not self.connections:
            self.empty.set()
        self._metrics.connections = len(self.connections)

    def enter(self) -> bool:
        """Count a request that is to be worked on; False when there are too many."""
        if self.in_flight >= self.settings.requests_max:
            self.refused("overloaded")
            return False
        self.in_flight += 1
        self._metrics.in_flight = self.in_flight
        return True

    def exit(self) -> None:
        """A request that had entered is answered."""
        self.in_flight -= 1
        self._metrics.in_flight = self.in_flight

    def refused(self, code: str) -> None:
        """Count a refusal by a guard."""
        self._metrics.refused.add((code,))


class Refusal:
    """In a connection's queue: what it is told as its last answer."""

    __slots__ = ("error",)

    def __init__(self, error: ApiError) -> None:
        self.error = error


_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in HTTPStatus
}
_heads: dict[tuple[int, bytes], bytes] = {}


def written(response: HttpResponse, default_head: bytes, *, close: bool, head_only: bool) -> bytes:
    """A response as it goes to the socket.

    `default_head`: header lines that every response has (the date).
    """
    key = (response.status, response.content_type)
    head = _heads.get(key)
    if head is None:
        head = _STATUS_LINES[response.status] + (
            b"content-type: %b\r\n" % response.content_type if response.content_type else b""
        )
        if len(_heads) < 256:
            _heads[key] = head
    lines = response.lines
    if response.headers:
        lines += b"".join([b"%b: %b\r\n" % header for header in response.headers])
    if close:
        lines += b"connection: close\r\n"
    length = b"" if response.status == 204 else b"content-length: %d\r\n" % len(response.body)
    body = b"" if head_only or response.status == 204 else response.body
    return b"%b%b%b%b\r\n%b" % (head, default_head, length, lines, body)
