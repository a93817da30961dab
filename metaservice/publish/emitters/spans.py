"""Runs and gones cut into what goes in one event, with everything checked that a consumer would choke on.

One bad event costs a consumer the whole batch, and some never notice. So nothing is encoded unchecked, though
the service has checked all of it when it was written.
"""

import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from msgspec import Struct

from metaservice.core.windows import CPU, EXTERNAL, STORAGE, Gone, Run
from metaservice.publish.emitters.port import EVENT_BLOCKS_MAX, Stream
from metaservice.publish.hashes import EVENT_HASH_MIN, event_hashes

MEDIA = frozenset({"GPU", CPU, STORAGE, EXTERNAL})
"""A consumer drops any other, or thinks it is the GPU's."""


class Span(Struct, frozen=True):
    """At most EVENT_BLOCKS_MAX blocks that follow each other, all of them good: those of `run` from `first`
    on. `parent` is the event hash of the block before (None: the prompt begins with this span)."""

    run: Run
    first: int
    hashes: tuple[int, ...]
    parent: int | None
    tokens: Sequence[bytes]


class Checks:
    """Cuts runs and gones into spans, and counts by reason the blocks it leaves out."""

    def __init__(self) -> None:
        self.invalid: Counter[str] = Counter()

    def spans(self, stream: Stream, run: Run) -> Iterator[Span]:
        """The run's blocks up to the first bad one: what follows would hang on a parent nobody was told
        of."""
        hashes, parent, good = self._good(stream, run)
        for first in range(0, good, EVENT_BLOCKS_MAX):
            last = min(first + EVENT_BLOCKS_MAX, good)
            yield Span(run, first, hashes[first:last], parent, run.tokens[first:last])
            parent = hashes[last - 1]

    def removed(self, stream: Stream, gone: Gone | Run) -> Iterator[tuple[int, ...]]:
        """Event hashes for a removal, each once, in pieces of at most EVENT_BLOCKS_MAX."""
        count = _count(gone.keys, gone.key_length)
        if wrong := _unfit(stream, gone):
            self.invalid[wrong] += count
            return
        hashes = event_hashes(gone.keys, gone.key_length, stream.hash_of)
        each = tuple(dict.fromkeys(hashes))
        fit = (
            each if not each or min(each) >= EVENT_HASH_MIN else tuple(h for h in each if h >= EVENT_HASH_MIN)
        )
        if len(each) < count:
            self.invalid["duplicate"] += count - len(each)
        if len(fit) < len(each):
            self.invalid["hash_low"] += len(each) - len(fit)
        for first in range(0, len(fit), EVENT_BLOCKS_MAX):
            yield fit[first : first + EVENT_BLOCKS_MAX]

    def _good(self, stream: Stream, run: Run) -> tuple[tuple[int, ...], int | None, int]:
        """(event hashes, that of the parent, how many blocks are good from the first on)."""
        count = _count(run.keys, run.key_length)
        wrong = _unfit(stream, run)
        if not wrong and len(run.tokens) != count:
            wrong = "columns"
        if wrong:
            self.invalid[wrong] += max(count, len(run.tokens))
            return (), None, 0
        hashes = event_hashes(run.keys, run.key_length, stream.hash_of)
        parent: int | None = None
        if run.parent is not None:
            if len(run.parent) != run.key_length:
                self.invalid["parent"] += count
                return (), None, 0
            parent = event_hashes(run.parent, run.key_length, stream.hash_of)[0]
            if parent < EVENT_HASH_MIN:
                self.invalid["parent"] += count
                return (), None, 0
        good = self._until_bad(hashes, parent, run.tokens, stream.block_size_tokens)
        if good < count - 1:
            self.invalid["behind"] += count - 1 - good
        return hashes, parent, good

    def _until_bad(
        self, hashes: Sequence[int], parent: int | None, tokens: Sequence[bytes], block_size_tokens: int
    ) -> int:
        """How many blocks are good from the first on; the bad one is counted."""
        widths = _widths(block_size_tokens)
        told = {parent}
        for at, (name, packed) in enumerate(zip(hashes, tokens, strict=True)):
            if widths.get(len(packed)) != packed[:1]:
                wrong = "tokens"
            elif name < EVENT_HASH_MIN:
                wrong = "hash_low"
            elif name in told:
                wrong = "duplicate"
            else:
                told.add(name)
                continue
            self.invalid[wrong] += 1
            return at
        return len(hashes)


def _unfit(stream: Stream, blocks: Run | Gone) -> str:
    """Why none of them can be told, or ""."""
    if blocks.medium not in MEDIA:
        return "medium"
    if blocks.key_length != stream.key_length or len(blocks.keys) % blocks.key_length:
        return "key_length"
    return ""


def _count(keys: bytes, key_length: int) -> int:
    return len(keys) // max(key_length, 1)


@lru_cache(maxsize=64)
def _widths(block_size_tokens: int) -> Mapping[int, bytes]:
    """How many bytes a packed block of this size has, for each width of a token id (its first byte)."""
    return {1 + width * block_size_tokens: bytes((width,)) for width in (1, 2, 3, 4)}


def token_ids(tokens: Sequence[bytes], block_size_tokens: int) -> list[int]:
    """The ids of these packed blocks, one after the other. Each must have passed the checks: they are not
    looked at again. All blocks of an event at once, which is several times as fast as one by one."""
    blank = bytes(block_size_tokens)
    raw = bytearray(4 * block_size_tokens * len(tokens))
    widest = max((packed[0] for packed in tokens), default=0)
    for plane in range(widest):
        first = 1 + plane * block_size_tokens
        last = first + block_size_tokens
        raw[plane::4] = b"".join([packed[first:last] or blank for packed in tokens])
    ids = array("I", bytes(raw))
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
