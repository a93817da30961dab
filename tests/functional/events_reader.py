"""A router as strict as routers can be: what it is sent is held against the rules of all that are known, and
followed the way they follow it. It shares nothing with the publisher but the wire."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import msgspec
import zmq

STORED_ALWAYS = {
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
}
STORED_SOMETIMES = {"cache_salt", "extra_keys"}
REMOVED_ALWAYS = {"type", "block_hashes", "medium"}
MEDIA = {"CPU", "STORAGE", "EXTERNAL"}
END = b"\xff" * 8
HASH_MIN = 2**32
"""An older llm-d cannot take a hash that msgpack makes shorter than this."""
EVENT_BLOCKS_MAX = 64
WAIT_S = 10.0


class Broken(AssertionError):
    """A router would have been misled, or would have dropped the batch."""


class Batch(NamedTuple):
    """One message of a stream."""

    topic: str
    seq: int
    ts: float
    events: list[dict[str, Any]]
    rank: int
    size_bytes: int


class Block(NamedTuple):
    """A block as a router knows it."""

    parent: int | None
    tokens: tuple[int, ...]
    lora: str | None
    salt: str


def decoded(frames: list[bytes]) -> Batch:
    """Topic, seq and payload by the rules. Raises Broken."""
    must(len(frames) == 3, f"{len(frames)} frames")
    topic, number, payload = frames
    must(len(number) == 8, f"a seq of {len(number)} bytes")
    name = topic.decode()
    must(name.startswith("kv@") and name.count("@") == 2, f"topic {name!r}")
    body = msgspec.msgpack.decode(payload)
    must(isinstance(body, list) and len(body) == 3, f"a batch that is {body!r}"[:200])
    ts, events, rank = body
    must(isinstance(ts, float), f"a time that is {ts!r}")
    must(isinstance(rank, int) and rank >= 0, f"rank {rank!r}")
    must(isinstance(events, list), f"events {events!r}"[:200])
    for event in events:
        check_event(event)
    return Batch(name, int.from_bytes(number, "big"), ts, events, rank, sum(map(len, frames)))


def check_event(event: Any) -> None:
    """One event as the strictest router wants it. Raises Broken."""
    must(isinstance(event, dict), f"an event that is no map: {event!r}"[:200])
    kind = event.get("type")
    hashes = event.get("block_hashes")
    must(kind in ("BlockStored", "BlockRemoved"), f"an event of type {kind!r}")
    must(isinstance(hashes, list) and 0 < len(hashes) <= EVENT_BLOCKS_MAX, f"hashes {hashes!r}"[:200])
    for one in hashes:
        must(isinstance(one, int) and HASH_MIN <= one < 2**64, f"hash {one!r}")
    must(len(set(hashes)) == len(hashes), "a hash twice in one event")
    must(event["medium"] in MEDIA, f"medium {event.get('medium')!r}")
    if kind == "BlockRemoved":
        must(event.keys() == REMOVED_ALWAYS, f"fields {sorted(event)}")
        return
    must(
        STORED_ALWAYS <= event.keys() <= STORED_ALWAYS | STORED_SOMETIMES,
        f"fields {sorted(event)}",
    )
    parent, tokens, size = event["parent_block_hash"], event["token_ids"], event["block_size"]
    must(parent is None or HASH_MIN <= parent < 2**64, f"parent {parent!r}")
    must(parent not in hashes, "a block that is its own parent")
    must(isinstance(size, int) and size > 0, f"block size {size!r}")
    must(len(tokens) == len(hashes) * size, f"{len(tokens)} tokens for {len(hashes)} blocks of {size}")
    must(all(isinstance(token, int) and 0 <= token < 2**32 for token in tokens), "a token id out of range")
    must(event["lora_id"] is None, f"lora_id {event['lora_id']!r}")
    must(event["lora_name"] is None or bool(event["lora_name"]), "an adapter without a name")


def must(holds: bool, otherwise: str) -> None:
    """Raises Broken."""
    if not holds:
        raise Broken(otherwise)


class Index:
    """What a router knows, followed event by event: by (hash, medium), counted as llm-d and Dynamo's relay
    count it. A plain repeat would need two removals, a child before its parent would be dropped: neither may
    be sent. `parents`: other indexes in whose blocks this stream's may hang."""

    def __init__(self, *parents: "Index") -> None:
        self.blocks: dict[tuple[int, str], Block] = {}
        self.parents = parents
        self.removed_absent = 0
        """Removals of what was not there: allowed, and how much they cost is worth knowing."""
        self.stored = 0
        self.removed = 0

    def take(self, event: dict[str, Any]) -> None:
        """Follow one event. Raises Broken."""
        medium, hashes = event["medium"], event["block_hashes"]
        if event["type"] == "BlockRemoved":
            self.removed += len(hashes)
            for one in hashes:
                self.removed_absent += self.blocks.pop((one, medium), None) is None
            return
        size, parent, tokens = event["block_size"], event["parent_block_hash"], event["token_ids"]
        self.stored += len(hashes)
        for row, one in enumerate(hashes):
            must((one, medium) not in self.blocks, f"{one} is stored twice in {medium}")
            must(parent is None or self.knows(parent), f"{one} hangs on {parent}, which nobody was told of")
            ids = tuple(tokens[row * size : (row + 1) * size])
            self.blocks[one, medium] = Block(parent, ids, event["lora_name"], event.get("cache_salt", ""))
            parent = one

    def knows(self, one: int) -> bool:
        """Whether a block of that hash is there in any medium, here or where this stream's may hang."""
        return any((one, medium) in self.blocks for medium in MEDIA) or any(
            other.knows(one) for other in self.parents
        )

    def hashes(self, medium: str | None = None) -> set[int]:
        """What is there, in a medium or in any."""
        return {one for one, where in self.blocks if medium in (None, where)}


def dealer(endpoint: str) -> "zmq.Socket[bytes]":
    """A socket that asks for replays and takes its time to read them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    made.connect(endpoint)
    return made


class Keys(NamedTuple):
    """CURVE keys of a consumer: its own pair and the service's public one."""

    public: bytes
    secret: bytes
    server: bytes


class Reader:
    """One subscriber to one stream: follows it without a gap, asks for a replay when there is one, and when
    it joins. Not thread safe; `pump` does all the work."""

    def __init__(
        self,
        endpoint: str,
        replay: str,
        *,
        topic: str = "",
        keys: Keys | None = None,
        index: Index | None = None,
        context: "zmq.Context[Any] | None" = None,
    ) -> None:
        self.index = index or Index()
        self.batches: list[Batch] = []
        self.seq: int | None = None
        """The newest batch that was followed."""
        self.live: int = -1
        """The newest live batch."""
        self.replays = 0
        self.resets = 0
        self.drop: Callable[[Batch], bool] = lambda batch: False
        """Live batches for which it says yes are lost on the way."""
        self._endpoint, self._replay, self._keys = endpoint, replay, keys
        self._context = context or zmq.Context.instance()
        self._sub = self.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, 0)
        self._sub.subscribe(topic)
        self._sub.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave."""
        self._sub.close(0)

    def socket(self, kind: int) -> "zmq.Socket[bytes]":
        """One with this consumer's keys."""
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        if self._keys is not None:
            made.curve_publickey, made.curve_secretkey = self._keys.public, self._keys.secret
            made.curve_serverkey = self._keys.server
        return made

    # ------------------------------------------------------------ live

    def pump(self, until: Callable[[], object], within_s: float = WAIT_S, what: str = "") -> float:
        """Follow the stream until a condition holds; after how many seconds it did. AssertionError when it
        does not come to."""
        began_s = time.monotonic()
        while not until():
            left_s = began_s + within_s - time.monotonic()
            assert left_s > 0, f"it never happened: {what or until}; {self}"
            if self._sub.poll(int(min(50, left_s * 1000))):
                self.take(self._sub.recv_multipart())
        return time.monotonic() - began_s

    def drain(self, seconds: float) -> None:
        """Follow the stream for so long."""
        until_s = time.monotonic() + seconds
        self.pump(lambda: time.monotonic() >= until_s, seconds + WAIT_S)

    def beats(self, count: int, within_s: float = WAIT_S) -> None:
        """Follow it for so many more batches."""
        last = len(self.batches) + count
        self.pump(lambda: len(self.batches) >= last, within_s, f"{count} more batches")

    def take(self, frames: list[bytes]) -> None:
        """One live message."""
        if len(frames) == 3 and frames[1] == END:
            # from a history that may not be the one we know: forget, and ask for all of it
            self.resets += 1
            self.seq = None
            self.index.blocks.clear()
            return
        batch = decoded(frames)
        if self.drop(batch):
            return
        if batch.seq <= self.live:
            raise Broken(f"batch {batch.seq} after {self.live}")
        self.live = batch.seq
        if self.seq is None or batch.seq > self.seq + 1:
            self.catch_up(0 if self.seq is None else self.seq + 1)
        if self.seq is None or batch.seq > self.seq:
            self.follow(batch)

    def follow(self, batch: Batch) -> None:
        """Apply a batch that is the next one."""
        if self.seq is not None and batch.seq != self.seq + 1:
            raise Broken(f"batch {batch.seq} follows {self.seq}, and the replay had nothing between them")
        for event in batch.events:
            self.index.take(event)
        self.batches.append(batch)
        self.seq = batch.seq

    # ------------------------------------------------------------ replay

    def catch_up(self, start: int) -> None:
        """Ask for what was missed. What comes may begin later than asked (a snapshot), and is without a gap
        then."""
        self.replays += 1
        for batch in self.replayed(start):
            if self.seq is None or batch.seq > self.seq:
                if self.seq is not None and batch.seq != self.seq + 1:
                    self.seq = batch.seq - 1  # a snapshot: its numbers begin where it wants
                self.follow(batch)

    def replayed(self, start: int, within_s: float = WAIT_S) -> list[Batch]:
        """The answer to one replay request, up to END. AssertionError when END does not come."""
        dealer = self.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.RCVHWM, 0)
            dealer.connect(self._replay)
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            batches: list[Batch] = []
            deadline_s = time.monotonic() + within_s
            while True:
                left_s = deadline_s - time.monotonic()
                assert left_s > 0 and dealer.poll(int(left_s * 1000)), f"no END after {len(batches)} batches"
                frames = dealer.recv_multipart()
                must(len(frames) == 4 and frames[0] == b"", f"a reply of {len(frames)} frames")
                if frames[2] == END:
                    must(frames[1] == b"" and frames[3] == b"", "an END with something in it")
                    return batches
                batch = decoded(frames[1:])
                must(not batches or batch.seq > batches[-1].seq, f"replayed {batch.seq} after the next one")
                batches.append(batch)
        finally:
            dealer.close(0)

    # ------------------------------------------------------------ what came

    def events(self) -> Iterable[dict[str, Any]]:
        """Everything that was followed."""
        return (event for batch in self.batches for event in batch.events)

    def has(self, hashes: Iterable[int], medium: str | None = None) -> bool:
        """Whether all of these are known."""
        return set(hashes) <= self.index.hashes(medium)

    def __str__(self) -> str:
        return (
            f"{self._endpoint}: batch {self.seq}, {len(self.batches)} followed, "
            f"{len(self.index.blocks)} blocks, {self.replays} replays"
        )
