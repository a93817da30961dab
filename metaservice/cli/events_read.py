"""Reading streams of cache events: where they are, what they say, and what was missed."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.auth
from msgspec import Struct

from metaservice.client import Client, ClientConfig, ClientError
from metaservice.wire.schemas_events import EventsReply

END = 2**64 - 1
"""The number of the message that ends a replay; on a stream it says that numbers begin anew."""
SILENT_S = 4.0
"""Heartbeats come each second."""
CONNECT_MS = 3_000
"""A replay that does not begin for so long is not answered."""


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


class Place(NamedTuple):
    """One stream, and everywhere that it may come from: whoever leads publishes, everybody replays."""

    channel: int
    name: str
    instance: str
    node: str
    endpoints: tuple[str, ...]
    replays: tuple[str, ...]


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
    """What the replicas say of their streams. Raises EventsUnreadable when none answers, and when events are
    off."""
    replies, failures = [], []
    for url in urls:
        config = ClientConfig(url=url, raise_errors=True, admin_timeout_ms=timeout_ms)
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
    """The streams, each with its endpoints on all replicas; `merged`: those that have an engine's own events
    in them too. Raises EventsUnreadable when there is none."""
    found: dict[tuple[str, int], Place] = {}
    for reply in replies:
        for view in reply.streams:
            if channel not in (None, view.channel) or instance not in ("", view.instance):
                continue
            if view.engine and not merged:
                continue
            one = found.get((view.engine, view.channel)) or Place(
                view.channel, view.topic, view.instance, view.node, (), ()
            )
            found[view.engine, view.channel] = one._replace(
                endpoints=_with(one.endpoints, view.endpoint, view.live),
                replays=_with(one.replays, view.replay, view.live),
            )
    if not found:
        raise EventsUnreadable("there is no such stream: no instance with a publication has an engine")
    return [found[key] for key in sorted(found)]


def _with(endpoints: tuple[str, ...], endpoint: str, live: bool) -> tuple[str, ...]:
    if not endpoint or endpoint in endpoints:
        return endpoints
    return (endpoint, *endpoints) if live else (*endpoints, endpoint)


class Streams:
    """Several streams, read together. To be closed."""

    def __init__(self, places: Sequence[Place], keys: Keys | None = None) -> None:
        self.places = places
        self._keys = keys
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 1_023 + 2 * len(places))
        self._poller = zmq.Poller()
        self._at: dict[zmq.Socket[bytes], int] = {}
        self._heard_s: dict[zmq.Socket[bytes], float] = {}
        for at in range(len(places)):
            self._subscribe(at)

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def live(self, timeout_ms: int) -> Iterator[tuple[int, Message]]:
        """Messages that are there, with the place's index; waits for the first at most so long."""
        for socket, _ in self._poller.poll(timeout_ms):
            while True:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._heard_s[socket] = time.monotonic()
                message = _message(frames)
                if message is not None:
                    yield self._at[socket], message
        self._renew()

    def _subscribe(self, at: int) -> None:
        socket = self._socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        socket.subscribe(b"")
        for endpoint in self.places[at].endpoints:
            _connect(socket, endpoint)
        self._at[socket] = at
        self._heard_s[socket] = time.monotonic()
        self._poller.register(socket, zmq.POLLIN)

    def _renew(self) -> None:
        """Subscribe anew where nothing came for long: a socket that connected just when the other end closed
        may have lost its subscription, and never notices."""
        late_s = time.monotonic() - SILENT_S
        for socket in [socket for socket, heard_s in self._heard_s.items() if heard_s < late_s]:
            at = self._at.pop(socket)
            del self._heard_s[socket]
            self._poller.unregister(socket)
            socket.close()
            self._subscribe(at)

    def replay(self, endpoint: str, start: int, timeout_ms: int = CONNECT_MS) -> Iterator[Message]:
        """The batches from `start` on, or a snapshot when that is too long ago, up to the end. Raises
        EventsUnreadable when nothing comes for `timeout_ms` though the end did not."""
        with self._socket(zmq.DEALER) as socket:
            _connect(socket, endpoint)
            socket.send_multipart((b"", start.to_bytes(8, "big")))
            while True:
                if not socket.poll(timeout_ms):
                    raise EventsUnreadable(f"{endpoint} does not end its replay: nothing for {timeout_ms} ms")
                frames = socket.recv_multipart()
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
