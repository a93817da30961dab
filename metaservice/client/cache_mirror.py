"""What an engine holds in its own tiers, kept so that a replica which missed something can be told all."""

import re
from array import array
from collections.abc import Iterable, Sequence
from threading import Lock

from msgspec import Struct, field

from metaservice.wire.columns import packed
from metaservice.wire.schemas_events import REPORTED_TIERS, RemovedItem, StoredItem
from metaservice.wire.tokens import pack_tokens, token_count, unpack_tokens

Change = tuple[int, int]
"""A block's event hash, and the index of the tier in which it came or went."""
ITEM_BLOCKS_MAX = 512
_TEXT = re.compile(r"[^\x00-\x1f\x7f]{0,512}")
"""An adapter's name, or a salt, that the service takes (`wire.schemas.Text`)."""
_TIER = {name: index for index, name in enumerate(REPORTED_TIERS)}


class Changes(Struct):
    """What happened since the last time, net: `cleared` first, then `told` (each once; what a block is now,
    the mirror knows)."""

    cleared: bool = False
    told: list[Change] = field(default_factory=list)


class Items(Struct):
    """Changes as a report says them; `changes`: how many of those that were named are in it."""

    stored: list[StoredItem]
    removed: list[RemovedItem]
    changes: int = 0


class _Block:
    """A block: its place in its prompt, and its tiers as bits. `tokens` packed as in `wire.tokens`."""

    __slots__ = ("lora", "parent", "salt", "tiers", "tokens")

    def __init__(self, parent: int | None, tokens: bytes, lora: str, salt: str) -> None:
        self.parent = parent
        self.tokens = tokens
        self.lora = lora
        self.salt = salt
        self.tiers = 0


class CacheMirror:
    """Blocks by event hash. Thread safe; what an engine calls takes a few µs a block and never waits for the
    service. Beyond `blocks_max` further blocks are left out and counted: a router then takes the engine for
    colder than it is, which is safe."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._blocks: dict[int, _Block] = {}
        self._changes: dict[Change, None] = {}
        self._cleared = False
        self._lock = Lock()
        self.left_out = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def stored(
        self,
        tier: str,
        hashes: Sequence[int],
        token_ids: Sequence[int],
        parent: int | None,
        lora: str,
        salt: str,
    ) -> None:
        """Blocks that follow each other, the first one below `parent`. Raises ValueError for a tier, a hash,
        or a number of token ids, that cannot be: one of those in a report, and no report would be taken. Left
        out and counted are blocks whose salt or adapter the service would not take: those are not the
        engine's own doing, but in requests."""
        index = _index(tier)
        _check(hashes if parent is None else [parent, *hashes])
        size, rest = divmod(len(token_ids), len(hashes) or 1)
        if rest or (hashes and not size):
            raise ValueError(f"{len(token_ids)} token ids for {len(hashes)} blocks")
        rows = [pack_tokens(token_ids[at * size : (at + 1) * size]) for at in range(len(hashes))]
        bit = 1 << index
        with self._lock:
            if not (_TEXT.fullmatch(lora) and _TEXT.fullmatch(salt)):
                self.left_out += len(rows)
                return
            for event_hash, tokens in zip(hashes, rows, strict=True):
                block = self._blocks.get(event_hash)
                if block is None:
                    if len(self._blocks) >= self._blocks_max:
                        self.left_out += 1
                        continue
                    block = self._blocks[event_hash] = _Block(parent, tokens, lora, salt)
                parent = event_hash
                block.tiers |= bit
                self._changes[event_hash, index] = None

    def removed(self, tier: str, hashes: Iterable[int]) -> None:
        """Blocks that are not in `tier` any more; unknown ones are passed over. Raises ValueError for a tier
        that cannot be."""
        index = _index(tier)
        bit = 1 << index
        with self._lock:
            for event_hash in hashes:
                block = self._blocks.get(event_hash)
                if block is None or not block.tiers & bit:
                    continue
                block.tiers &= ~bit
                if not block.tiers:
                    del self._blocks[event_hash]
                self._changes[event_hash, index] = None

    def cleared(self) -> None:
        """All tiers are empty."""
        with self._lock:
            self._blocks.clear()
            self._changes.clear()
            self._cleared = True

    def take(self) -> Changes:
        """What happened since this was last asked."""
        with self._lock:
            changes = Changes(self._cleared, list(self._changes))
            self._changes.clear()
            self._cleared = False
        return changes

    def all(self) -> list[Change]:
        """All there is, parents before children where they came so."""
        with self._lock:
            return [
                (event_hash, index)
                for event_hash, block in self._blocks.items()
                for index in range(len(REPORTED_TIERS))
                if block.tiers >> index & 1
            ]

    def items(self, changes: Iterable[Change], blocks_max: int, tokens_max: int) -> Items:
        """What became of these, as it is now: runs of blocks that are there, lists of those that are not. Of
        the first ones only, so that they are at most `blocks_max` with `tokens_max` token ids (but at least
        one)."""
        gone: list[list[int]] = [[] for _ in REPORTED_TIERS]
        runs: list[_Run] = []
        last: dict[int, _Run] = {}
        told = tokens = 0
        with self._lock:
            for event_hash, index in changes:
                block = self._blocks.get(event_hash)
                tokens += 0 if block is None else token_count(block.tokens)
                if told and (told >= blocks_max or tokens > tokens_max):
                    break
                told += 1
                if block is None or not block.tiers >> index & 1:
                    gone[index].append(event_hash)
                    continue
                run = last.get(index)
                if run is None or not run.takes(block):
                    run = last[index] = _Run(index, block)
                    runs.append(run)
                run.add(event_hash, block)
        removed = [
            RemovedItem(tier=REPORTED_TIERS[index], hashes=packed("Q", hashes))
            for index, hashes in enumerate(gone)
            if hashes
        ]
        return Items([run.item() for run in runs], removed, told)


class _Run:
    """Blocks that follow each other in one tier."""

    __slots__ = ("first", "hashes", "index", "size", "tokens")

    def __init__(self, index: int, first: _Block) -> None:
        self.index = index
        self.first = first
        self.size = token_count(first.tokens)
        self.hashes: list[int] = []
        self.tokens: array[int] = array("I")

    def takes(self, block: _Block) -> bool:
        """Whether the block follows the last one."""
        first = self.first
        return (
            block.parent == self.hashes[-1]
            and len(self.hashes) < ITEM_BLOCKS_MAX
            and (block.lora, block.salt) == (first.lora, first.salt)
            and token_count(block.tokens) == self.size
        )

    def add(self, event_hash: int, block: _Block) -> None:
        self.hashes.append(event_hash)
        self.tokens.extend(unpack_tokens(block.tokens))

    def item(self) -> StoredItem:
        first = self.first
        return StoredItem(
            tier=REPORTED_TIERS[self.index],
            hashes=packed("Q", self.hashes),
            parent=first.parent,
            token_ids=packed("I", self.tokens),
            lora=first.lora,
            salt=first.salt,
        )


def _check(hashes: Sequence[int]) -> None:
    """Raises ValueError for what is no event hash."""
    try:
        array("Q", list(hashes))
    except (OverflowError, TypeError):
        raise ValueError(
            "event hashes are whole numbers from 0 to 2**64 - 1 (a negative one: modulo 2**64)"
        ) from None


def _index(tier: str) -> int:
    try:
        return _TIER[tier]
    except KeyError:
        raise ValueError(f"tier {tier!r}: expected one of {', '.join(REPORTED_TIERS)}") from None
