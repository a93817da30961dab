"""Streams of cache events as vLLM publishes them, for engines that the harness plays: three ZMQ frames
(topic, seq as u64 big-endian, msgpack), batches `[ts, [events as tagged maps], rank]`, a replay socket."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from metaservice.cli.local.places import HOST, free_port

END = b"\xff" * 8
RING_BATCHES = 10_000
"""What vLLM keeps for its replay socket."""
POLL_MS = 20

GPU = "GPU"

Event = dict[str, Any]


def stored(
    hashes: Sequence[int],
    parent: int | None,
    tokens: Sequence[int],
    block_size: int,
    *,
    medium: str = GPU,
    lora: str = "",
    salt: str = "",
) -> Event:
    """A BlockStored of blocks that follow each other; `tokens` are the ids of all of them."""
    event: Event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": lora or None,
    }
    if salt:
        event["cache_salt"] = salt
    return event


def removed(hashes: Sequence[int], *, medium: str = GPU) -> Event:
    """A BlockRemoved."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


def cleared() -> Event:
    """An AllBlocksCleared."""
    return {"type": "AllBlocksCleared"}


class EngineStream:
    """One engine's publisher. Its ports stay the same over `restart`, its numbers begin at 0 again, and
    nothing of before can be replayed, as when an engine's process died. Published to from one thread."""

    def __init__(self, topic: str = "", rank: int = 0) -> None:
        self.rank = rank
        self.endpoint = f"tcp://{HOST}:{free_port()}"
        self.replay = f"tcp://{HOST}:{free_port()}"
        self._topic = topic.encode()
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._seq = 0
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=RING_BATCHES)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, 100_000)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.bind(self.endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(self.replay)
        self._thread = threading.Thread(target=self._serve, name="engine-replay", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._pub.close()
        self._router.close()
        self._context.term()  # the ports are free once it returns, and not before

    def restart(self) -> None:
        """A new life of the engine."""
        self._stop()
        self._start()

    def close(self) -> None:
        """End it; says nothing to subscribers, as a process that dies."""
        if not self._context.closed:
            self._stop()

    def publish(self, events: Sequence[Event]) -> int:
        """One batch; its seq."""
        payload = msgspec.msgpack.encode([time.time(), list(events), self.rank])
        with self._lock:
            seq = self._seq
            self._ring.append((seq, payload))
            self._seq += 1
            self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))
        return seq

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if not self._router.poll(POLL_MS):
                continue
            asker, *rest = self._router.recv_multipart()
            start = int.from_bytes(rest[-1], "big")
            with self._lock:
                wanted = [entry for entry in self._ring if entry[0] >= start]
            for seq, payload in wanted:
                self._router.send_multipart((asker, b"", self._topic, seq.to_bytes(8, "big"), payload))
            self._router.send_multipart((asker, b"", b"", END, b""))
