"""What an emitter is: it makes of windows what one kind of router reads.

An emitter decides nothing. What is announced, and in which window, is in the journal; an emitter only spells
it, the same bytes for the same window whoever asks, so that a batch sent by a new leader is the batch that
its predecessor would have sent.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from msgspec import Raw, Struct

from metaservice.core.windows import Gone, Run, Window

EVENT_BLOCKS_MAX = 64
"""Blocks in one event: a run that is longer is told in several."""


class Stream(Struct, frozen=True):
    """One channel, as its consumers see it: what one instance has on `node` ("": what every engine reaches),
    told for the engines of one data-parallel rank.

    `lora` is the instance's adapter, for runs that name none. `topic` is the first frame of every message.
    """

    channel: int
    instance: str
    model: str
    node: str
    rank: int
    block_size_tokens: int
    key_length: int
    hash_of: str
    lora: str
    topic: bytes


class Emitter(Protocol):
    """One dialect. Not for several threads at a time.

    `invalid` counts the blocks that were left out, by reason: one that a consumer would choke on must not
    take the rest of its batch along. Nothing of a run follows a block of it that was left out, for it would
    hang on a parent that nobody was told of.
    """

    @property
    def name(self) -> str:
        """By which it is configured."""
        ...

    @property
    def invalid(self) -> Mapping[str, int]:
        """Blocks left out since the start, by reason; a reason is there once it happened. They count again
        when a window is encoded again."""
        ...

    def events(self, stream: Stream, window: Window) -> Sequence[Raw]:
        """The encoded events of this window that are the stream's: removed, again, restated, stored. The last
        two leave whoever hears them with exactly one of each block, whatever it missed before: where a
        consumer counts, they are told as removed and stored. Streams that differ only in channel, rank or
        topic get the very same objects."""
        ...

    def snapshot(self, stream: Stream, runs: Iterable[Run], gone: Iterable[Gone]) -> Iterator[Sequence[Raw]]:
        """The stream's state from nothing: what is gone as removed, then each of `runs` as in `events`. Runs
        and gones of other streams are passed over; `runs` come parents first. Each item is the events of at
        most EVENT_BLOCKS_MAX blocks that belong in one payload; items may be put in one payload together."""
        ...

    def payload(self, stream: Stream, events: Sequence[Raw], now_ms: int) -> bytes:
        """The last frame: these events, told at `now_ms`. None at all is a heartbeat."""
        ...

    def batch(self, stream: Stream, window: Window) -> bytes:
        """The payload of one window."""
        ...
