"""The payloads of windows, each made once however many streams, replays and attachments ask for it."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Raw

from metaservice.core.windows import Gone, Run, Window

from .announced import Announced
from .channel import ChannelPlan
from .emitters.port import Emitter

PAYLOADS_BYTES_MAX = 32 * 1024 * 1024
"""Kept for replays of what was sent lately, which is what most of them ask for."""
_ENTRY_BYTES = 256
"""What a kept payload costs beside its bytes."""


class Speller:
    """The canonical dialect over windows. Only for one thread."""

    def __init__(self, emitter: Emitter, announced: Announced) -> None:
        self.emitter = emitter
        self._announced = announced
        self._decoder = msgspec.msgpack.Decoder(Window)
        self._window: Window | None = None
        self._touched: frozenset[tuple[str, str]] = frozenset()
        self._payloads: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._payloads_bytes = 0
        self._empty: tuple[tuple[int, int], bytes] = ((-1, -1), b"")

    def window(self, frame: bytes) -> Window:
        """The window that a ring kept."""
        return self._decoder.decode(frame)

    def events(self, plan: ChannelPlan, window: Window) -> Sequence[Raw]:
        """What the window says on this channel."""
        if window is not self._window:
            self._window, self._touched = window, _touched(window)
        told = [one for one in plan.streams if (one.instance, one.node) in self._touched]
        if not told:
            return ()
        if len(told) == 1:
            return self.emitter.events(told[0], window)
        return [event for one in told for event in self.emitter.events(one, window)]

    def payload(self, plan: ChannelPlan, window: Window) -> bytes:
        """The batch of this window on this channel."""
        name = plan.stream.channel, window.number
        payload = self._payloads.get(name)
        if payload is None:
            events = self.events(plan, window)
            if not events:
                return self.empty(plan, window.now_ms)
            payload = self.emitter.payload(plan.stream, events, window.now_ms)
            self._keep(name, payload)
        return payload

    def empty(self, plan: ChannelPlan, now_ms: int) -> bytes:
        """A batch with no events in it."""
        name = now_ms, plan.stream.rank
        if self._empty[0] != name:
            self._empty = name, self.emitter.payload(plan.stream, (), now_ms)
        return self._empty[1]

    def kept(self, channel: int, number: int) -> bytes | None:
        """The batch with this number, if it was made lately."""
        return self._payloads.get((channel, number))

    def snapshot(self, plan: ChannelPlan, up_to: int | None = None) -> Iterator[Sequence[Raw]]:
        """The stream's state from nothing, as `Emitter.snapshot`; with `up_to` without what came in later
        windows."""
        for one in plan.streams:
            runs = self._announced.runs(one.instance, one.node, up_to)
            gone = self._announced.gone(one.instance, one.node)
            yield from self.emitter.snapshot(one, runs, gone)

    def withdrawal(self, plan: ChannelPlan) -> Iterator[Sequence[Raw]]:
        """Everything that is announced on the channel, told as removed."""
        for one in plan.streams:
            runs = self._announced.runs(one.instance, one.node)
            yield from self.emitter.snapshot(one, (), map(_as_gone, runs))

    def forget(self, channel: int) -> None:
        """The channel is for something else now."""
        for name in [name for name in self._payloads if name[0] == channel]:
            self._payloads_bytes -= len(self._payloads.pop(name)) + _ENTRY_BYTES

    def _keep(self, name: tuple[int, int], payload: bytes) -> None:
        self._payloads[name] = payload
        self._payloads_bytes += len(payload) + _ENTRY_BYTES
        while self._payloads_bytes > PAYLOADS_BYTES_MAX:
            _, oldest = self._payloads.popitem(last=False)
            self._payloads_bytes -= len(oldest) + _ENTRY_BYTES


def blocks_told(window: Window) -> int:
    """How many blocks the window says something of."""
    told: list[Run | Gone] = [*window.removed, *window.again, *window.restated, *window.stored]
    return sum(len(one.keys) // one.key_length for one in told if one.key_length)


def _touched(window: Window) -> frozenset[tuple[str, str]]:
    """The places that the window says something of."""
    told: list[Run | Gone] = [*window.removed, *window.again, *window.restated, *window.stored]
    return frozenset((one.instance, one.node) for one in told)


def _as_gone(run: Run) -> Gone:
    return Gone(run.instance, run.medium, run.node, run.key_length, run.keys)
