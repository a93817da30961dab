"""What emitters over engines' hashes have in common: which events there are and in which order."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec import Raw

from metaservice.core.windows import Gone, Run, Window
from metaservice.publish.emitters.port import Stream
from metaservice.publish.emitters.spans import Checks, Span

Kind = tuple[str, str, int, int, str, str]
"""What the encoded events depend on besides the window: instance, node, block size, key's length and part,
and adapter."""


class WindowEmitter(ABC):
    """The events of a dialect that has one for stored and one for removed blocks (an Emitter).

    The events of the window that was asked for last are kept, for the streams of the other ranks and those of
    single engines: a window is encoded once, whatever the number of engines.
    """

    name: str

    def __init__(self) -> None:
        self._checks = Checks()
        self._encode = msgspec.msgpack.Encoder().encode
        self._window: Window | None = None
        self._parts: dict[tuple[str, str], _Part] = {}
        self._events: dict[Kind, Sequence[Raw]] = {}

    @property
    def invalid(self) -> Mapping[str, int]:
        return self._checks.invalid

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
        for item in gone:
            if (item.instance, item.node) == (stream.instance, stream.node):
                for event in self._removals(stream, item):
                    yield (event,)
        for run in runs:
            if (run.instance, run.node) == (stream.instance, stream.node):
                yield from self._restated(stream, run)

    def batch(self, stream: Stream, window: Window) -> bytes:
        return self.payload(stream, self.events(stream, window), window.now_ms)

    def payload(self, stream: Stream, events: Sequence[Raw], now_ms: int) -> bytes:
        return self._encode((now_ms / 1000.0, events, stream.rank))

    @abstractmethod
    def stored(self, stream: Stream, span: Span) -> object:
        """The event that says so, to be encoded."""

    @abstractmethod
    def removed(self, stream: Stream, hashes: tuple[int, ...], medium: str) -> object:
        """The event that says so, to be encoded."""

    def _told(self, stream: Stream, part: "_Part") -> Iterator[Raw]:
        for gone in part.removed:
            yield from self._removals(stream, gone)
        for gone in part.again:
            yield from self._removals(stream, gone)
        for run in part.restated:
            for events in self._restated(stream, run):
                yield from events
        for run in part.stored:
            for span in self._checks.spans(stream, run):
                yield self._raw(self.stored(stream, span))

    def _restated(self, stream: Stream, run: Run) -> Iterator[Sequence[Raw]]:
        for span in self._checks.spans(stream, run):
            removed = self._raw(self.removed(stream, span.hashes, run.medium))
            yield removed, self._raw(self.stored(stream, span))

    def _removals(self, stream: Stream, gone: Gone) -> Iterator[Raw]:
        for hashes in self._checks.removed(stream, gone):
            yield self._raw(self.removed(stream, hashes, gone.medium))

    def _raw(self, event: object) -> Raw:
        return Raw(self._encode(event))


class _Part:
    """What of a window is one instance's on one node."""

    __slots__ = ("again", "removed", "restated", "stored")

    def __init__(self) -> None:
        self.removed: list[Gone] = []
        self.again: list[Gone] = []
        self.restated: list[Run] = []
        self.stored: list[Run] = []


def _parts(window: Window) -> dict[tuple[str, str], _Part]:
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


def _kind(stream: Stream) -> Kind:
    return (
        stream.instance,
        stream.node,
        stream.block_size_tokens,
        stream.key_length,
        stream.hash_of,
        stream.lora,
    )
