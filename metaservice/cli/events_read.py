"""Reading streams of cache events: where they are, what they say, and what was missed."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.auth
from msgspec import Struct

from metaservice.client import Client, ClientConfig, ClientError
from metaservice.wire.schemas_events import EventsReply, StreamView

END = 2**64 - 1
"""The number of the message that ends a replay; on a stream it says that numbers begin anew."""
SILENT_S = 4.0
"""Heartbeats come each second."""
CONNECT_MS = 3_000
"""A replay that does not begin for so long is not answered."""
PUMP_MS = 100
"""While a replay is read, streams are looked at so often."""
INBOX_MAX = 100_000
"""Messages that wait until somebody takes them; more stay in their sockets."""
LOOK_S_MAX = 1.0
"""Between two looks at a stream no more than this counts as its silence: that we did not look, or stood
still, is not the stream's fault."""


class EventsUnreadable(Exception):
    """Streams cannot be found or read; the message says where and why."""


class Keys(NamedTuple):
    """How to get through CURVE: our key pair, and whom we expect."""

    public: bytes
    secret: bytes
    server: bytes


class Message(NamedTuple):
    """One message of a stream."""

    topic: str
    number: int
    payload: bytes


class Batch(Struct, array_like=True):
    """What is in a message, in the canonical dialect. `events`: as they are."""

    ts: float
    events: list[Any]
    rank: int | None = None


class Desk(NamedTuple):
    """Where a replica answers replays, and what tells the replica from others."""

    endpoint: str
    replica: str


class Place(NamedTuple):
    """One stream, and everywhere that it may come from: whoever leads publishes, everybody replays. `live`:
    one of the replicas said that it publishes it now."""

    channel: int
    name: str
    instance: str
    node: str
    endpoints: tuple[str, ...]
    replays: tuple[Desk, ...]
    live: bool = True


def load_keys(secret: Path, server: str) -> Keys:
    """Our key pair from a file as `zmq.auth` writes them, and the server's public key (Z85). Raises
    EventsUnreadable."""
    try:
        ours, hidden = zmq.auth.load_certificate(secret)
    except (OSError, ValueError) as error:
        raise EventsUnreadable(f"{secret}: {error}") from None
    if hidden is None or len(server) != 40:
        raise EventsUnreadable(f"{secret} needs a secret key, and the server's public key has 40 characters")
    return Keys(ours, hidden, server.encode())


def collect(urls: Sequence[str], timeout_ms: int) -> list[EventsReply]:
    """What the replicas say of their streams. Raises EventsUnreadable when none answers, when events are
    off, and when a URL is none."""
    replies, failures = [], []
    if not urls:
        raise EventsUnreadable("no URL of a replica is given")
    for url in urls:
        try:
            config = ClientConfig(url=url, raise_errors=True, admin_timeout_ms=timeout_ms)
        except ValueError as error:
            raise EventsUnreadable(str(error)) from None
        try:
            with Client(config) as client:
                replies.append(msgspec.convert(client.get_json("/v1/events"), EventsReply))
        except (ClientError, ValueError) as error:
            failures.append(f"{url}: {error}")
    if not replies:
        raise EventsUnreadable("; ".join(failures))
    return replies


def places(
    replies: Sequence[EventsReply], channel: int | None, instance: str, *, merged: bool
) -> list[Place]:
    """The streams, each with its endpoints on all replicas, those of who publishes now first; `merged`: those
    that have an engine's own events in them too. Raises EventsUnreadable when there is none."""
    found: dict[tuple[str, int], list[tuple[StreamView, str]]] = {}
    for reply in replies:
        for view in reply.streams:
            if channel in (None, view.channel) and instance in ("", view.instance):
                found.setdefault(key_of(view), []).append((view, reply.replica or view.replay))
    chosen = [_place(found[key]) for key in sorted(found) if merged or not key[0]]
    if not chosen:
        raise EventsUnreadable("there is no such stream: no instance with a publication has an engine")
    return chosen


def key_of(view: StreamView) -> tuple[str, int]:
    """What tells streams apart on all replicas: an engine has one merged stream, whose channel is known only
    where it is published."""
    return (view.engine, -1) if view.engine else ("", view.channel)


def _place(views: list[tuple[StreamView, str]]) -> Place:
    views = sorted(views, key=lambda one: not one[0].live)
    first = views[0][0]
    endpoints = dict.fromkeys(view.endpoint for view, _ in views if view.endpoint)
    desks: dict[str, Desk] = {}
    for view, replica in views:
        if view.replay:
            desks.setdefault(view.replay, Desk(view.replay, replica))
    return Place(
        first.channel,
        first.topic,
        first.instance,
        first.node,
        tuple(endpoints),
        tuple(desks.values()),
        first.live,
    )


class Streams:
    """Several streams, read together, also while a replay is read. To be closed."""

    def __init__(self, places: Sequence[Place], keys: Keys | None = None) -> None:
        self.places = places
        self.silence_s = [0.0] * len(places)
        """For how long nothing has come on each, ..."""
        self.longest_silence_s = [0.0] * len(places)
        """... and the longest time of that."""
        self._keys = keys
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 1_023 + 2 * len(places))
        self._poller = zmq.Poller()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._renewed_s = [0.0] * len(places)
        self._inbox: deque[tuple[int, Message]] = deque()
        self._looked_s = time.monotonic()
        for place in places:
            self._sockets.append(self._subscribed(place))

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def live(self, timeout_ms: int) -> Iterator[tuple[int, Message]]:
        """Messages that are there, with the place's index; waits for the first at most so long."""
        self._look(0 if self._inbox else timeout_ms)
        for _ in range(len(self._inbox)):
            yield self._inbox.popleft()

    def _look(self, timeout_ms: int) -> None:
        """Put what came in the inbox. A stream that was found to have nothing is silent; one that was not
        looked at is not."""
        if len(self._inbox) >= INBOX_MAX:
            self._looked_s = time.monotonic()
            return
        ready = {socket for socket, _ in self._poller.poll(timeout_ms)}
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, LOOK_S_MAX), now_s
        for at, socket in enumerate(self._sockets):
            if socket in ready:
                self.silence_s[at] = self._renewed_s[at] = 0.0
                self._read(at, socket)
                continue
            self.silence_s[at] += passed_s
            self.longest_silence_s[at] = max(self.longest_silence_s[at], self.silence_s[at])
            if self.silence_s[at] - self._renewed_s[at] > SILENT_S:
                self._renewed_s[at] = self.silence_s[at]
                self._renew(at, socket)

    def _read(self, at: int, socket: "zmq.Socket[bytes]") -> None:
        while len(self._inbox) < INBOX_MAX:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = _message(frames)
            if message is not None:
                self._inbox.append((at, message))

    def _subscribed(self, place: Place) -> "zmq.Socket[bytes]":
        socket = self._socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        socket.subscribe(b"")
        for endpoint in place.endpoints:
            _connect(socket, endpoint)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _renew(self, at: int, socket: "zmq.Socket[bytes]") -> None:
        """Subscribe anew where nothing came for long: a socket that connected just when the other end closed
        may have lost its subscription, and never notices."""
        self._poller.unregister(socket)
        socket.close()
        self._sockets[at] = self._subscribed(self.places[at])

    def replay(self, endpoint: str, start: int, timeout_ms: int = CONNECT_MS) -> Iterator[Message]:
        """The batches from `start` on, or a snapshot when that is too long ago, up to the end. Streams are
        read on meanwhile, for `live`. Raises EventsUnreadable when nothing comes for `timeout_ms` though the
        end did not."""
        with self._socket(zmq.DEALER) as socket:
            _connect(socket, endpoint)
            socket.send_multipart((b"", start.to_bytes(8, "big")))
            heard_s = time.monotonic()
            while True:
                if time.monotonic() - self._looked_s > PUMP_MS / 1_000:
                    self._look(0)
                if not socket.poll(PUMP_MS):
                    if time.monotonic() - heard_s > timeout_ms / 1_000:
                        text = (
                            f"{endpoint} does not end its replay, or refuses us: nothing for {timeout_ms} ms"
                        )
                        raise EventsUnreadable(text)
                    continue
                frames = socket.recv_multipart()
                heard_s = time.monotonic()
                message = _message(frames[1:])
                if message is None:
                    raise EventsUnreadable(f"{endpoint} answers with {len(frames)} frames that are no replay")
                if message.number == END:
                    return
                yield message

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        socket.setsockopt(zmq.IPV6, 1)
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server)
        return socket


def _connect(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise EventsUnreadable(f"{endpoint}: {error}") from None


def _message(frames: Sequence[bytes]) -> Message | None:
    """None: this is nothing that a stream says."""
    if len(frames) != 3 or len(frames[1]) != 8:
        return None
    return Message(frames[0].decode("utf-8", "replace"), int.from_bytes(frames[1], "big"), frames[2])


_batch = msgspec.msgpack.Decoder(Batch)


def decoded(message: Message) -> Batch | None:
    """The batch in a message, None when it is none."""
    try:
        return _batch.decode(message.payload)
    except msgspec.MsgspecError:
        return None
