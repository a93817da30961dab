"""A subscriber of our own that sees frames as they are: what is on a stream, and what a replay gives."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from tests.compat.streams import END

RCVBUF_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Frame:
    """One batch as it came."""

    topic: bytes
    seq: int
    payload: bytes

    def events(self) -> list[dict[str, Any]]:
        """What is in it."""
        batch = msgspec.msgpack.decode(self.payload)
        events: list[dict[str, Any]] = batch[1]
        return events


@dataclass(frozen=True, slots=True)
class Replay:
    """The answer of a replay socket. `ended`: the marker came; `took_ms` until it did, or until it was
    given up; `first_ms` until the first part of the answer."""

    frames: tuple[Frame, ...]
    ended: bool
    took_ms: float
    first_ms: float
    quiet_ms: float
    """The longest wait for the next part."""


class Reader:
    """Sockets of one test. A context manager."""

    def __init__(self) -> None:
        self._context = zmq.Context()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def subscribe(self, endpoint: str, *, hwm: int = 100_000) -> "zmq.Socket[bytes]":
        """Everything that is published there from now on."""
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, hwm)
        socket.setsockopt(zmq.RCVBUF, RCVBUF_BYTES)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        return socket

    def dealer(self, endpoint: str) -> "zmq.Socket[bytes]":
        """A socket to ask a replay socket with."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        return socket

    def replay(self, endpoint: str, start: int, timeout_s: float = 10.0) -> Replay:
        """All batches from `start` on, as the socket at `endpoint` knows them."""
        asker = Asker(self, endpoint)
        try:
            return asker.replay(start, timeout_s)
        finally:
            asker.close()


class Asker:
    """Asks one replay socket again and again, over one connection."""

    def __init__(self, reader: Reader, endpoint: str) -> None:
        self._socket = reader.dealer(endpoint)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def replay(self, start: int, timeout_s: float = 10.0) -> Replay:
        """All batches from `start` on."""
        frames: list[Frame] = []
        began = last = time.monotonic()
        first = quiet = 0.0
        ended = False
        self._socket.send_multipart((b"", start.to_bytes(8, "big")))
        while not ended and (left_s := began + timeout_s - time.monotonic()) > 0:
            if not self._socket.poll(math.ceil(left_s * 1_000)):
                break
            _, topic, seq, payload = self._socket.recv_multipart()
            now = time.monotonic()
            first = first or now - began
            quiet = max(quiet, now - last)
            last = now
            ended = seq == END
            if not ended:
                frames.append(Frame(topic, int.from_bytes(seq, "big"), payload))
        took = time.monotonic() - began
        return Replay(tuple(frames), ended, took * 1_000, first * 1_000, quiet * 1_000)


def arrived(socket: "zmq.Socket[bytes]", read_s: float) -> Iterator[Frame]:
    """The batches that come on a subscription within `read_s`."""
    until_s = time.monotonic() + read_s
    while (left_s := until_s - time.monotonic()) > 0 and socket.poll(math.ceil(left_s * 1_000)):
        topic, seq, payload = socket.recv_multipart()
        if seq != END:
            yield Frame(topic, int.from_bytes(seq, "big"), payload)


def apply(known: set[int], frame: Frame) -> None:
    """What a subscriber makes of a batch: `known` is the hashes of the blocks that it believes are there."""
    for event in frame.events():
        if event["type"] == "BlockStored":
            known.update(event["block_hashes"])
        elif event["type"] == "BlockRemoved":
            known.difference_update(event["block_hashes"])
        else:
            known.clear()
