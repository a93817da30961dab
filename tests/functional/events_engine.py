"""An engine's own stream of cache events, as vLLM publishes it: PUB, and ROUTER for replays."""

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from tests.functional.events_reader import END
from tests.functional.events_service import BLOCK_TOKENS, Prompt

POLL_MS = 20
ARRAY_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
)


class EngineStream:
    """Publishes batches; what was published is kept for replays. `topics`: whether replays have a topic frame
    (older vLLM sends none)."""

    def __init__(self, *, topics: bool = True, replays: bool = True, topic: bytes = b"") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        self.endpoint = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self.replay = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self.kept: dict[int, bytes] = {}
        self.number = 0
        self.asked: list[int] = []
        """Starts of the replays that were asked for."""
        self._topics, self._topic = topics, topic
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(replays,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The engine is gone."""
        self._ending.set()
        self._thread.join(5)
        self._pub.close(0)
        self._router.close(0)
        self._context.term()

    def _serve(self, replays: bool) -> None:
        while not self._ending.is_set():
            if not self._router.poll(POLL_MS):
                continue
            name, _, start = self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if not replays:
                continue
            with self._lock:
                kept = sorted(self.kept.items())
            for number, payload in kept:
                if number >= self.asked[-1]:
                    self._answer(name, number.to_bytes(8, "big"), payload)
            self._answer(name, END, b"")

    def _answer(self, name: bytes, number: bytes, payload: bytes) -> None:
        topic = [self._topic] if self._topics else []
        self._router.send_multipart([name, b"", *topic, number, payload])

    def publish(self, *events: Any, lost: bool = False, rank: int = 0) -> None:
        """One batch; `lost` on the way to whoever listens."""
        self.send(msgspec.msgpack.encode([1.5, list(events), rank]), lost=lost)

    def send(self, payload: bytes, *, lost: bool = False) -> None:
        """A batch of these bytes."""
        with self._lock:
            self.kept[self.number] = payload
        if not lost:
            self._pub.send_multipart([self._topic, self.number.to_bytes(8, "big"), payload])
        self.number += 1

    def frames(self, frames: Sequence[bytes]) -> None:
        """Anything at all."""
        self._pub.send_multipart(frames)

    def restart(self) -> None:
        """Another life of the engine at the same address: numbers begin at 0 and nothing of before is
        known."""
        with self._lock:
            self.kept.clear()
        self.number = 0


def stored(
    prompt: Prompt, first: int = 0, last: int | None = None, medium: str | None = "GPU"
) -> dict[str, Any]:
    """A BlockStored of some blocks of a prompt, as a map."""
    hashes = prompt.hashes[first:last]
    if first:
        parent: int | None = prompt.hashes[first - 1]
    else:
        parent = None if prompt.parent is None else int.from_bytes(prompt.parent[-8:], "big")
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [token for row in prompt.tokens[first:last] for token in row],
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": medium,
        "lora_name": prompt.lora or None,
    }


def removed(hashes: Sequence[int], medium: str = "GPU") -> dict[str, Any]:
    """A BlockRemoved, as a map."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


def as_array(event: dict[str, Any], fields: int = len(ARRAY_FIELDS)) -> list[Any]:
    """A BlockStored as vLLM before mid-2026 sent it; the oldest had 5 fields."""
    return [event["type"], *(event[name] for name in ARRAY_FIELDS[:fields])]


CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}
