"""Routers of the measurement: a process with many subscribers that count, and one that asks for replays."""

import os
import sys
import time
from collections.abc import Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from tests.bench.bench_service import BenchError

END = b"\xff" * 8
NICENESS = 10
"""Routers have machines of their own; here they must not be what lookups wait for."""
SETTLE_S = 60.0
DRAIN_MAX = 256
"""Messages taken of one subscriber before the others have their turn."""


class Counted(msgspec.Struct, kw_only=True):
    """What the subscribers had since they were last asked. `blocks` and `block_bytes` are of the first one,
    which looks into what it gets; `deliveries` of all together."""

    seconds: float
    deliveries: int
    bytes: int
    stored: int
    removed: int
    empty: int
    gaps: int
    block_bytes: int
    busy_s: float
    """From the first to the last batch that had blocks in it, as the first one saw them."""


def subscribers(pipe: "Connection[Any, Any]", endpoints: list[str], each: int) -> None:
    """The process: `each` subscribers to every endpoint. Answers `count` with Counted, until the pipe
    ends."""
    os.nice(NICENESS)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    poller = zmq.Poller()
    sockets = []
    for endpoint in endpoints:
        for _ in range(each):
            made = context.socket(zmq.SUB)
            made.setsockopt(zmq.RCVHWM, 0)
            made.setsockopt(zmq.LINGER, 0)
            made.subscribe(b"")
            made.connect(endpoint)
            poller.register(made, zmq.POLLIN)
            sockets.append(made)
    poller.register(pipe.fileno(), zmq.POLLIN)
    firsts = {sockets[row * each] for row in range(len(endpoints))}
    last: dict[zmq.Socket[bytes], int] = {}
    counted = _fresh()
    began_s = time.perf_counter()
    first_s = last_s = 0.0
    decode = msgspec.msgpack.decode
    while True:
        for ready, _ in poller.poll(1_000):
            if isinstance(ready, int):
                if pipe.recv() == "end":
                    context.destroy(0)
                    return
                counted.seconds = time.perf_counter() - began_s
                counted.busy_s = last_s - first_s
                pipe.send(counted)
                counted, began_s, first_s, last_s = _fresh(), time.perf_counter(), 0.0, 0.0
                continue
            for _ in range(DRAIN_MAX):
                try:
                    _, seq, payload = ready.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                number = int.from_bytes(seq, "big")
                counted.gaps += ready in last and number != last[ready] + 1
                last[ready] = number
                counted.deliveries += 1
                counted.bytes += len(payload)
                if ready not in firsts:
                    continue
                stored, removed = blocks_of(decode(payload)[1])
                counted.stored += stored
                counted.removed += removed
                if stored or removed:
                    counted.block_bytes += len(payload)
                    last_s = time.perf_counter()
                    first_s = first_s or last_s
                else:
                    counted.empty += 1


def blocks_of(events: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """How many blocks these events store and remove."""
    stored = removed = 0
    for event in events:
        count = len(event["block_hashes"])
        if event["type"] == "BlockStored":
            stored += count
        else:
            removed += count
    return stored, removed


def _fresh() -> Counted:
    return Counted(
        seconds=0.0, deliveries=0, bytes=0, stored=0, removed=0, empty=0, gaps=0, block_bytes=0, busy_s=0.0
    )


class Subscribers:
    """The process of subscribers, from outside. Ends with its `with` block."""

    def __init__(self, endpoints: list[str], each: int) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=subscribers, args=(theirs, endpoints, each), daemon=True)
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.send("end")
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def count(self) -> Counted:
        """What they had since the last time."""
        self._pipe.send("count")
        if not self._pipe.poll(60):
            raise BenchError("the subscribers do not answer")
        counted: Counted = self._pipe.recv()
        return counted

    def settled(self) -> Counted:
        """What came until nothing came any more, but beats."""
        total = self.count()
        until_s = time.perf_counter() + SETTLE_S
        while time.perf_counter() < until_s:
            time.sleep(0.5)
            more = self.count()
            for name in (
                "seconds",
                "deliveries",
                "bytes",
                "stored",
                "removed",
                "empty",
                "gaps",
                "block_bytes",
            ):
                setattr(total, name, getattr(total, name) + getattr(more, name))
            if more.stored + more.removed < 1_024:
                break
        return total


class Recovered(msgspec.Struct, kw_only=True):
    """One replay from the beginning by somebody who knows nothing."""

    seconds: float
    first_s: float
    """Until the first batch."""
    batches: int
    bytes: int
    blocks: int


def recover(replay: str, start: int = 0, within_s: float = 120.0) -> Recovered:
    """Ask for everything and take it; looked into only afterwards, as a router's own work is not ours."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(replay)
        began_s = time.perf_counter()
        first_s = 0.0
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        payloads: list[bytes] = []
        while True:
            if not dealer.poll(int(1000 * max(0.0, began_s + within_s - time.perf_counter()))):
                raise BenchError(f"no END within {within_s} s, {len(payloads)} batches came")
            frames = dealer.recv_multipart()
            first_s = first_s or time.perf_counter() - began_s
            if frames[2] == END:
                break
            payloads.append(frames[3])
        seconds = time.perf_counter() - began_s
    finally:
        context.destroy(0)
    known: set[int] = set()
    for payload in payloads:
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                known.update(event["block_hashes"])
            else:
                known.difference_update(event["block_hashes"])
    return Recovered(
        seconds=seconds,
        first_s=first_s,
        batches=len(payloads),
        bytes=sum(map(len, payloads)),
        blocks=len(known),
    )


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(recover(sys.argv[1])).decode() + "\n")
