"""What the dialects have in common: which events a window has and in which order, encoded once."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec import Raw

from metaservice.core.windows import Gone, Run, Window
from metaservice.publish.emitters.port import Stream
from metaservice.publish.emitters.spans import Checks, Span

_Kind = tuple[str, str, int, int, str, str]

Events = Sequence[object]
"""Events that follow each other in one payload, not yet encoded."""


class WindowEmitter(ABC):
    """A dialect that says what was stored and what was removed (an Emitter).

    The events of the window that was asked for last are kept, for the streams of the other ranks and for
    those of single engines: however many engines there are, a window is encoded once."""

    name: str

    def __init__(self) -> None:
        self.invalid: Counter[str] = Counter()
        self._encode = msgspec.msgpack.Encoder().encode
        self._window: Window | None = None
        self._parts: Mapping[tuple[str, str], _Part] = {}
        self._events: dict[_Kind, Sequence[Raw]] = {}

    def events(self, stream: Stream, window: Window) -> Sequence[Raw]:
        if window is not self._window:
            self._window, self._parts, self._events = window, _parts(window), {}
        part = self._parts.get((stream.instance, stream.node))
        if part is None:
            return ()
        kind = _kind(stream)
        events = self._events.get(kind)
        if events is None:
            events = self._events[kind] = tuple(self._told(stream, part))
        return events

    def snapshot(self, stream: Stream, runs: Iterable[Run], gone: Iterable[Gone]) -> Iterator[Sequence[Raw]]:
        place = stream.instance, stream.node
        for item in gone:
            if (item.instance, item.node) == place:
                for events in self.removed(stream, item):
                    yield self._encoded(events)
        for run in runs:
            if (run.instance, run.node) == place:
                for events in self.stored(stream, run):
                    yield self._encoded(events)

    def batch(self, stream: Stream, window: Window) -> bytes:
        return self.payload(stream, self.events(stream, window), window.now_ms)

    def payload(self, stream: Stream, events: Sequence[Raw], now_ms: int) -> bytes:
        return self._encode((now_ms / 1000.0, events, stream.rank))

    @abstractmethod
    def stored(self, stream: Stream, run: Run) -> Iterator[Events]:
        """The events after which whoever hears them has these blocks exactly once, whatever it heard or
        missed before; in pieces of at most EVENT_BLOCKS_MAX blocks."""

    @abstractmethod
    def removed(self, stream: Stream, gone: Gone) -> Iterator[Events]:
        """Those for blocks that are gone, in such pieces."""

    def _told(self, stream: Stream, part: "_Part") -> Iterator[Raw]:
        for gone in (*part.removed, *part.again):
            for events in self.removed(stream, gone):
                yield from self._encoded(events)
        for run in (*part.restated, *part.stored):
            for events in self.stored(stream, run):
                yield from self._encoded(events)

    def _encoded(self, events: Events) -> list[Raw]:
        return [Raw(self._encode(event)) for event in events]


class EngineEmitter(WindowEmitter):
    """A dialect that names blocks as their engine does, with one event for the blocks of a span.

    Some consumers count how often a block was stored, and want as many removals. So what is stored is told as
    removed first, also where it is new: one that missed a removal a while ago would count two from then on,
    and be left with a block that is not there after the next.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checks = Checks(self.invalid)

    @abstractmethod
    def stored_event(self, stream: Stream, span: Span) -> object:
        """That these blocks are there now."""

    @abstractmethod
    def removed_event(self, hashes: tuple[int, ...], medium: str) -> object:
        """That these blocks are there no longer."""

    def stored(self, stream: Stream, run: Run) -> Iterator[Events]:
        for span in self.checks.spans(stream, run):
            yield self.removed_event(span.hashes, run.medium), self.stored_event(stream, span)

    def removed(self, stream: Stream, gone: Gone) -> Iterator[Events]:
        for hashes in self.checks.removed(stream, gone):
            yield (self.removed_event(hashes, gone.medium),)


class _Part:
    """What of a window is one instance's on one node."""

    __slots__ = ("again", "removed", "restated", "stored")

    def __init__(self) -> None:
        self.removed: list[Gone] = []
        self.again: list[Gone] = []
        self.restated: list[Run] = []
        self.stored: list[Run] = []


def _parts(window: Window) -> Mapping[tuple[str, str], _Part]:
    parts: dict[tuple[str, str], _Part] = {}

    def part(of: Run | Gone) -> _Part:
        return parts.setdefault((of.instance, of.node), _Part())

    for gone in window.removed:
        part(gone).removed.append(gone)
    for gone in window.again:
        part(gone).again.append(gone)
    for run in window.restated:
        part(run).restated.append(run)
    for run in window.stored:
        part(run).stored.append(run)
    return parts


def _kind(stream: Stream) -> _Kind:
    """What the events depend on besides the window."""
    return (
        stream.instance,
        stream.node,
        stream.block_size_tokens,
        stream.key_length,
        stream.hash_of,
        stream.lora,
    )
