"""All that is announced on a stream, spelled for those who missed more than the ring holds.

A segment is the state as of one window. It is spelled bit by bit, by whoever is answered from it, and several
are answered from the same: when a router starts, each of its subscriptions asks for all of it at once.
"""

from collections.abc import Callable, Iterator, Sequence

from msgspec import Raw

from .channel import ChannelPlan
from .spelling import Speller

PIECE_BYTES = 128 * 1024
"""Events in one message of a segment, about."""
STEP_ITEMS_MAX = 8
"""Spelled in one go, each at most 64 blocks."""
SEGMENTS_BYTES_MAX = 1024 * 1024 * 1024
"""All segments together. One that would make it more is cut off: what is missing is told again in time."""
IDLE_S = 10.0
"""A segment that nobody was answered from for so long is dropped."""
_BLOCK_BYTES = 400
_TOKEN_BYTES = 5
_GONE_BYTES = 16
"""What a block takes at most: hashes and names, a token id, a removal."""


class Segment:
    """The state of one channel as of window `number`, in at most `pieces_max` messages."""

    def __init__(
        self,
        number: int,
        pieces_max: int,
        piece_bytes: int,
        items: Iterator[Sequence[Raw]],
        payload: Callable[[Sequence[Raw]], bytes],
    ) -> None:
        self.number = number
        self.pieces_max = pieces_max
        self._piece_bytes = piece_bytes
        self._items = items
        self._payload = payload
        self._gathered: list[Raw] = []
        self._gathered_bytes = 0
        self.pieces: list[bytes] = []
        """Payloads, in order; at least one once it is complete."""
        self.size_bytes = 0
        self.complete = False
        self.used_s = 0.0

    def step(self, bytes_max: int) -> bool:
        """Spell a bit more; whether all of it is there within `bytes_max`. False: it was cut off."""
        for _ in range(STEP_ITEMS_MAX):
            if self.complete:
                return True
            item = next(self._items, None)
            if item is None:
                self._finish()
                return True
            self._gathered += item
            self._gathered_bytes += sum(memoryview(event).nbytes for event in item)
            if self._gathered_bytes >= self._piece_bytes and len(self.pieces) < self.pieces_max - 1:
                self._close_piece()
            if self.size_bytes + self._gathered_bytes > bytes_max:
                self._items = iter(())
                self._finish()
                return False
        return True

    def _finish(self) -> None:
        self._close_piece()
        if len(self.pieces) == 1 and self.pieces_max > 1:
            # The first has the number that was asked for and the last that of the window: some consumers take
            # a replay that begins later for one that is not complete.
            self.pieces.append(self._payload(()))
        self.complete = True

    def _close_piece(self) -> None:
        if self._gathered or not self.pieces:
            payload = self._payload(self._gathered)
            self.pieces.append(payload)
            self.size_bytes += len(payload)
        self._gathered, self._gathered_bytes = [], 0


class Segments:
    """The segments that are used now. Only for one thread."""

    def __init__(self, speller: Speller, now_s: Callable[[], float]) -> None:
        self._speller = speller
        self._now_s = now_s
        self._held: dict[int, list[Segment]] = {}
        self.cut = 0
        """Segments that were cut off."""
        self.made = 0

    @property
    def size_bytes(self) -> int:
        """Of all of them."""
        return sum(segment.size_bytes for segments in self._held.values() for segment in segments)

    def get(
        self, plan: ChannelPlan, number: int, now_ms: int, start: int, oldest: int, blocks: int, gone: int
    ) -> Segment:
        """One whose messages can be numbered from `start` on, and that the ring, which begins with window
        `oldest`, goes on from; made anew as of window `number` when there is none. `blocks` and `gone`: how
        many there are."""
        held = self._held.setdefault(plan.stream.channel, [])
        for segment in held:
            room = segment.number - start + 1
            if segment.pieces_max <= room and (segment.number + 1 >= oldest or segment.number == number):
                segment.used_s = self._now_s()
                return segment
        room = number - start + 1
        tokens_bytes = _TOKEN_BYTES * plan.stream.block_size_tokens
        size_bytes = blocks * (_BLOCK_BYTES + tokens_bytes) + gone * _GONE_BYTES
        piece_bytes = max(PIECE_BYTES, -(-size_bytes // room))
        segment = Segment(
            number,
            min(room, size_bytes // piece_bytes + 2),
            piece_bytes,
            self._speller.snapshot(plan, up_to=number),
            lambda events: self._speller.emitter.payload(plan.stream, events, now_ms),
        )
        segment.used_s = self._now_s()
        held.append(segment)
        self.made += 1
        return segment

    def step(self, segment: Segment) -> None:
        """Spell a bit more of it."""
        segment.used_s = self._now_s()
        others = self.size_bytes - segment.size_bytes
        if not segment.step(SEGMENTS_BYTES_MAX - others):
            self.cut += 1

    def forget(self, channel: int) -> None:
        """What the channel told is not so any more."""
        self._held.pop(channel, None)

    def tidy(self) -> None:
        """Drop those that nobody uses."""
        now_s = self._now_s()
        for channel, segments in list(self._held.items()):
            kept = [segment for segment in segments if now_s - segment.used_s < IDLE_S]
            if kept:
                self._held[channel] = kept
            else:
                del self._held[channel]
