"""What a careful subscriber makes of a stream: the blocks that are announced on it, and everything that is
wrong with what it was told. No sockets here.

Announced is what was stored and not removed since, by medium and hash. That is all that routers make of it;
so two readers who come to the same blocks by different ways have been told the same.
"""

from collections import Counter
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from metaservice.cli.events_read import END, Message

Hash = Annotated[int, Meta(ge=2**32)]
Token = Annotated[int, Meta(ge=0, lt=2**32)]
Medium = Literal["CPU", "STORAGE", "EXTERNAL"]
BLOCKS_MAX = 64
PROBLEMS_MAX = 20


class Stored(Struct, tag_field="type", tag="BlockStored", forbid_unknown_fields=True):
    """All that a router can be trusted with: what is not listed here makes some of them drop the event, or
    the whole batch."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[Token]
    block_size: Annotated[int, Meta(ge=1)]
    lora_id: None
    medium: Medium
    lora_name: str | None
    cache_salt: str | None = None
    extra_keys: list[list[str] | None] | None = None


class Removed(Struct, tag_field="type", tag="BlockRemoved", forbid_unknown_fields=True):
    """Blocks that are not there any more."""

    block_hashes: list[Hash]
    medium: Medium


class _Batch(Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[Raw]
    rank: int


_batch = msgspec.msgpack.Decoder(_Batch)
_event = msgspec.msgpack.Decoder(Stored | Removed)

Blocks = set[tuple[str, int]]
"""(medium, hash) of each that is announced."""


class Judge:
    """What is wrong, over all streams: the first so many in words, all in numbers."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def problem(self, kind: str, text: str) -> None:
        """Note one."""
        self.counts[kind] += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)

    @property
    def faults(self) -> int:
        """How many there were."""
        return self.counts.total()


class State:
    """One stream, as it was told from its beginning (a replay from 0) on."""

    def __init__(self, name: str, judge: Judge, *, shared: bool) -> None:
        """`shared`: blocks that every engine reaches, whose parents have to be on this stream too."""
        self.name = name
        self.number = -1
        """Of the last batch."""
        self.blocks: Blocks = set()
        self.batches = self.events = self.heartbeats = 0
        self._judge = judge
        self._shared = shared

    def take(self, message: Message) -> None:
        """One batch, in the order of their numbers."""
        self.number = message.number
        self.batches += 1
        try:
            batch = _batch.decode(message.payload)
        except msgspec.MsgspecError as error:
            self._problem("schema", f"batch {message.number} is none: {error}")
            return
        self.heartbeats += not batch.events
        for raw in batch.events:
            self.events += 1
            try:
                event = _event.decode(raw)
            except msgspec.MsgspecError as error:
                self._problem("schema", f"batch {message.number} has an event that is none: {error}")
                continue
            if isinstance(event, Removed):
                self.blocks -= {(event.medium, one) for one in event.block_hashes}
            else:
                self._store(event)

    def _store(self, event: Stored) -> None:
        at = f"batch {self.number}"
        hashes, parent = event.block_hashes, event.parent_block_hash
        if len(event.token_ids) != len(hashes) * event.block_size:
            self._problem("schema", f"{at}: {len(event.token_ids)} tokens for {len(hashes)} blocks")
        if not 0 < len(set(hashes)) == len(hashes) <= BLOCKS_MAX or parent in hashes:
            self._problem("schema", f"{at}: hashes are doubled, too many, none, or their own parent")
        if parent is not None and self._shared and (event.medium, parent) not in self.blocks:
            self._problem("orphan", f"{at}: {hashes[0]:016x} hangs on {parent:016x}, which was never told")
        stored = {(event.medium, one) for one in hashes}
        if twice := stored & self.blocks:
            _, one = min(twice)
            self._problem("repeated", f"{at}: {one:016x} is stored twice, and removed in between it was not")
        self.blocks |= stored

    def _problem(self, kind: str, text: str) -> None:
        self._judge.problem(kind, f"{self.name}: {text}")

    def follows(self, message: Message) -> bool:
        """Whether this is the next batch."""
        return message.number == self.number + 1

    def is_old(self, message: Message) -> bool:
        """Whether this batch was taken before."""
        return message.number != END and message.number <= self.number
