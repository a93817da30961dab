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
from metaservice.publish.hashes import EVENT_HASH_MIN, event_hash, event_hashes

MEDIA = frozenset({CPU, STORAGE, EXTERNAL})
"""A consumer drops any other, or thinks it is the GPU's. GPU is the engines' own to tell: where a block of it
is told as removed and stored, Dynamo forgets what hangs on it."""


class Span(Struct, frozen=True):
    """At most EVENT_BLOCKS_MAX blocks that follow each other in `run`, all of them good. `parent` is the
    event hash of the block before (None: the prompt begins here)."""

    run: Run
    hashes: tuple[int, ...]
    parent: int | None
    tokens: Sequence[bytes]


class Checks:
    """Cuts runs and gones into what goes in one event, and counts the blocks it leaves out by reason:

    `medium`: none of MEDIA. `key_length`: not the stream's. `columns`: not as many blocks of token ids as
    keys. `tokens`: not the stream's number of ids. `hash_low`: below EVENT_HASH_MIN. `duplicate`: named
    before in the run. `parent`: hangs on a block that could never be told. `behind`: good, but behind a bad
    one."""

    def __init__(self, invalid: Counter[str]) -> None:
        self._invalid = invalid

    def spans(self, stream: Stream, run: Run) -> Iterator[Span]:
        """The run's blocks up to the first bad one: the next would hang on a parent that nobody was told of,
        and some consumers put it at the prompt's beginning then."""
        count = _count(run)
        wrong = _unfit(stream, run) or ("columns" if len(run.tokens) != count else "")
        if wrong:
            self._invalid[wrong] += max(count, len(run.tokens))
            return
        hashes = event_hashes(run.keys, run.key_length, stream.hash_of)
        parent = _parent(stream, run)
        if parent is not None and parent < EVENT_HASH_MIN:
            self._invalid["parent"] += count
            return
        good = self._until_bad(hashes, parent, run.tokens, stream.block_size_tokens)
        for first in range(0, good, EVENT_BLOCKS_MAX):
            last = min(first + EVENT_BLOCKS_MAX, good)
            yield Span(run, hashes[first:last], parent, run.tokens[first:last])
            parent = hashes[last - 1]

    def removed(self, stream: Stream, gone: Gone) -> Iterator[tuple[int, ...]]:
        """The event hashes of what is gone, each once, at most EVENT_BLOCKS_MAX at a time."""
        count = _count(gone)
        if wrong := _unfit(stream, gone):
            self._invalid[wrong] += count
            return
        each = tuple(dict.fromkeys(event_hashes(gone.keys, gone.key_length, stream.hash_of)))
        if len(each) < count:
            self._invalid["duplicate"] += count - len(each)
        if each and min(each) < EVENT_HASH_MIN:
            fit = tuple(name for name in each if name >= EVENT_HASH_MIN)
            self._invalid["hash_low"] += len(each) - len(fit)
            each = fit
        for first in range(0, len(each), EVENT_BLOCKS_MAX):
            yield each[first : first + EVENT_BLOCKS_MAX]

    def _until_bad(
        self, hashes: Sequence[int], parent: int | None, tokens: Sequence[bytes], block_size_tokens: int
    ) -> int:
        """How many blocks are good from the first on; those that are not are counted."""
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
            self._invalid[wrong] += 1
            if behind := len(hashes) - at - 1:
                self._invalid["behind"] += behind
            return at
        return len(hashes)


def _parent(stream: Stream, run: Run) -> int | None:
    """The event hash of the block before the run. 0, which is none, for a parent of another length than the
    keys: no key of the instance."""
    if run.parent is None:
        return None
    if len(run.parent) != run.key_length:
        return 0
    return event_hash(run.parent, stream.hash_of)


def _unfit(stream: Stream, blocks: Run | Gone) -> str:
    """Why none of these blocks can be told, or ""."""
    if blocks.medium not in MEDIA:
        return "medium"
    if blocks.key_length != stream.key_length or len(blocks.keys) % stream.key_length:
        return "key_length"
    return ""


def _count(blocks: Run | Gone) -> int:
    return len(blocks.keys) // max(blocks.key_length, 1)


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
