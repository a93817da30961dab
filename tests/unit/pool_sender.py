"""The service's side of one stream of cache events, in plain Python: batches that are numbered one by one,
replays that always come to their end, the whole for those who ask from too far back. It can do what networks
and failovers do."""

import time
from collections.abc import Iterable, Sequence
from threading import Event, Lock, Thread
from typing import Any

import msgspec
import zmq

from engine_adapters.vllm.pool_stream import StreamAt
from engine_adapters.vllm.pool_wire import END

FIRST = 1 << 20
MEDIUM = "EXTERNAL"
BLOCK_TOKENS = 4
TOPIC = b"kv@pool@m"
CHUNK_BLOCKS = 64
TICK_MS = 5
SOMETIMES = frozenset({"cache_salt", "extra_keys"})

Message = dict[str, Any]


def stored(first: int, count: int, parent: int | None = None, **more: Any) -> Message:
    """Blocks `first` and so on, a chain."""
    blocks = range(first, first + count)
    return {
        "type": "BlockStored",
        "block_hashes": [hash_of(block) for block in blocks],
        "parent_block_hash": None if parent is None else hash_of(parent),
        "token_ids": [token for block in blocks for token in tokens_of(block)],
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
        **more,
    }


def removed(blocks: Iterable[int], medium: str = MEDIUM) -> Message:
    return {"type": "BlockRemoved", "block_hashes": [hash_of(block) for block in blocks], "medium": medium}


def hash_of(block: int) -> int:
    return 2**40 + block


def tokens_of(block: int) -> list[int]:
    return [block * BLOCK_TOKENS + row for row in range(BLOCK_TOKENS)]


class Sender:
    """One stream. `drop`: numbers that are not sent, only replayed. `silent`: replays are not answered."""

    def __init__(
        self, context: "zmq.Context[Any]", *, ring: int = 50, number: int = FIRST, port: int = 0
    ) -> None:
        self.ring = ring
        self.number = number
        self.batches: dict[int, bytes] = {}
        self.blocks: dict[int, Message] = {}
        """What is announced: hash -> an event with it alone."""
        self.drop: set[int] = set()
        self.silent = False
        self.leads = True
        self.replays: list[int] = []
        self._out: list[list[bytes]] = []
        self._lock = Lock()
        self._live = context.socket(zmq.XPUB)
        self._router = context.socket(zmq.ROUTER)
        self._router.set_hwm(100_000)
        self._live.set_hwm(100_000)
        wait(lambda: self._bound(f"tcp://127.0.0.1:{port or '*'}"))
        self._router.bind("tcp://127.0.0.1:*")
        self.endpoint = self._live.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._over = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _bound(self, endpoint: str) -> bool:
        try:
            self._live.bind(endpoint)
        except zmq.ZMQError:
            return False
        return True

    @property
    def at(self) -> StreamAt:
        return StreamAt("s", TOPIC, (self.endpoint,), (self.replay,))

    def say(self, *events: Message) -> int:
        """One window. Returns its number."""
        with self._lock:
            self.number += 1
            payload = msgspec.msgpack.encode([1.0, list(events), 0])
            self.batches[self.number] = payload
            self.batches.pop(self.number - self.ring, None)
            for event in events:
                self._follow(event)
            if self.leads and self.number not in self.drop:
                self._out.append([TOPIC, self.number.to_bytes(8, "big"), payload])
            return self.number

    def raw(self, *frames: bytes) -> None:
        """Send just this."""
        with self._lock:
            self._out.append(list(frames))

    def lose(self, number: int = FIRST) -> None:
        """The journal is lost: everything begins anew, and subscribers are told so."""
        with self._lock:
            self._out.append([TOPIC, END, b""])
            self.batches.clear()
            self.blocks.clear()
            self.number = number

    def _follow(self, event: Message) -> None:
        if event.get("type") == "BlockRemoved":
            for block in event["block_hashes"]:
                self.blocks.pop(block, None)
        elif event.get("type") == "BlockStored":
            parent = event["parent_block_hash"]
            for row, block in enumerate(event["block_hashes"]):
                tokens = event["token_ids"][row * BLOCK_TOKENS : (row + 1) * BLOCK_TOKENS]
                alone = {"block_hashes": [block], "parent_block_hash": parent, "token_ids": tokens}
                self.blocks[block] = {**event, **alone}
                parent = block

    def close(self) -> None:
        self._over.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                out, self._out = self._out, []
            for frames in out:
                self._live.send_multipart(frames)
            while self._live.poll(0):
                self._live.recv()
            if self._router.poll(TICK_MS):
                self._answer(*self._router.recv_multipart())
        self._live.close(linger=0)
        self._router.close(linger=0)

    def _answer(self, who: bytes, _: bytes, start: bytes) -> None:
        first = int.from_bytes(start, "big")
        with self._lock:
            self.replays.append(first)
            if self.silent:
                return
            numbers = [number for number in self.batches if number >= first]
            batches = [(number, self.batches[number]) for number in numbers]
            if self.batches and first < min(self.batches):
                batches = self._whole(first)
        for number, payload in batches:
            self._router.send_multipart([who, b"", TOPIC, number.to_bytes(8, "big"), payload])
        self._router.send_multipart([who, b"", b"", END, b""])

    def _whole(self, first: int) -> list[tuple[int, bytes]]:
        """All that is announced, as removed and stored, in numbers up to the newest."""
        told = list(self.blocks.values())
        chunks: list[list[Message]] = [
            [event for one in told[at : at + CHUNK_BLOCKS] for event in (_gone(one), one)]
            for at in range(0, len(told), CHUNK_BLOCKS)
        ] or [[]]
        last = self.number
        assert last - len(chunks) >= first
        return [
            (last - len(chunks) + 1 + row, msgspec.msgpack.encode([1.0, chunk, 0]))
            for row, chunk in enumerate(chunks)
        ]


def _gone(event: Message) -> Message:
    return {"type": "BlockRemoved", "block_hashes": event["block_hashes"], "medium": event["medium"]}


def wait(check: Any, within_s: float = 8.0) -> None:
    """Until `check` is true."""
    until_s = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.01)


def as_told(events: Sequence[Any]) -> list[Message]:
    """Events of the follower's as a router sees them: what some have and others have not is left out where it
    is not."""
    plain: list[Message] = msgspec.msgpack.decode(msgspec.msgpack.encode(events))
    return [
        {name: value for name, value in event.items() if value is not None or name not in SOMETIMES}
        for event in plain
    ]
