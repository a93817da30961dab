"""The order of one engine's batches: what is missing, what comes twice, and when it began anew.

An engine numbers its batches from 0 in each of its lives, and says nothing when it starts again. It can be
asked for those it still has, from a number on. So every request for a replay begins with the last batches
that were taken: if one of them has other bytes now, this is another life.

Nothing here waits or sends: `wanted` says from where on a replay is needed, and whoever has sockets tells
what came of it.
"""

from collections import deque
from collections.abc import Iterator

from .dialect import stamp
from .limits import IngestLimits

END = 2**64 - 1
"""The number of the frame that ends a replay."""
RECENT = 1_024
"""Batches whose bytes are remembered, as a number, to tell one that comes twice from one of another life."""
CHECKED = 16
"""Batches that a replay brings again, to be compared. A connection is noticed a few batches late at most."""
FRUITLESS_MAX = 2
"""Replays that brought nothing of what is missing, until it is given up."""
FOREIGN_MAX = 3
"""Batches in a row that the engine's replay does not know: then it is the replay that is wrong."""

Step = bytes | None
"""A batch to take in, or None: forget all that this engine said."""


class Sequencer:
    """One stream. Every iterator it returns must be used up before the next call.

    When batches are lost for good, all that was known is forgotten and what the engine still has is taken
    from the beginning: then nothing is believed to be there that is not, though something may be there that
    is not known (`whole` is False).
    """

    def __init__(self, replayable: bool, limits: IngestLimits) -> None:
        self._replayable = replayable
        self._limits = limits
        self.next: int | None = None
        """The number that comes next; None before the first batch."""
        self.wanted: int | None = None
        """A replay is needed from this number on, and live batches wait for it."""
        self.session = 0
        """Goes up with each replay that is needed."""
        self.whole = False
        """Nothing since the engine's start is missing."""
        self.gaps = self.lost = self.restarts = self.duplicates = self.late = 0
        self._recent: dict[int, int] = {}
        self._life_s: float | None = None
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queue_bytes = 0
        self._delivered = 0
        self._broken = False
        self._answers = False
        """It has replayed something before: then an answer with nothing in it says something."""
        self._suspect = False
        """It began anew, by all signs: it knew nothing of our last batch, or its numbers fell."""
        self._fruitless = 0
        self._refused = False
        """The engine, which answers, has just said that it has no more than it replayed: a batch beyond that
        is not one of its own."""
        self._foreign = 0
        self._lived = False

    # ------------------------------------------------------------ what comes

    def live(self, number: int, payload: bytes) -> Iterator[Step]:
        """A batch as it is published."""
        if self.wanted is not None:
            self._keep(number, payload)
        elif number == END:
            self.restarts += 1
            yield self._begin(None)
        elif self._is_known(number, payload):
            self.duplicates += 1
        elif self._is_late(payload):
            yield from self._made_before(number, payload)
        elif number == self.next or (number == 0 and self._is_first()):
            self.whole = self.whole or number == 0
            yield self._taken(number, payload)
        else:
            yield from self._out_of_order(number, payload)

    def joined(self) -> None:
        """The connection was made, maybe again: something may have been missed, or another life begun."""
        if not self._replayable:
            self._life_s = None
        self.probe()

    def probe(self) -> None:
        """See whether anything was missed."""
        if self._replayable and self.wanted is None:
            self._want(self._check_from())

    def replayed(self, number: int, payload: bytes) -> Iterator[Step]:
        """A batch of the replay that was asked for last. `session` may go up: then ask anew.

        One that is behind the next is no more than a check of the life, except when a life began: then it
        is the first. One that is ahead of it is the oldest that the engine still has, when it comes first;
        later it says that the replay itself lost some, and is done again."""
        if self.wanted is None or self._broken:
            return
        first = self._delivered == 0
        self._delivered += 1
        self._answers = True
        if self.next is None or number == self.next:
            self.whole = self.whole or number == 0
            yield self._taken(number, payload)
        elif first and self._suspect:
            self.restarts += 1
            yield self._begin(number)
            yield self._taken(number, payload)
        elif number < self.next:
            known = self._recent.get(number)
            if known is not None and known != hash(payload):
                self._suspect = True
                self._want(0)
        elif first:
            self.lost += 1
            yield self._begin(number)
            yield self._taken(number, payload)
        else:
            self._broken = True

    def ended(self) -> Iterator[Step]:
        """The replay is over."""
        assert self.wanted is not None
        if not self._delivered and self._answers and self.next:
            if not self._suspect:
                self._suspect = True
                self._want(0)
                return
            self.restarts += 1
            yield self._begin(None)
        self._refused = self._answers
        try:
            yield from self._go_on()
        finally:
            self._refused = False

    def unanswered(self) -> Iterator[Step]:
        """It does not answer: go on without."""
        assert self.wanted is not None
        self._fruitless = FRUITLESS_MAX
        yield from self._go_on()

    # ------------------------------------------------------------ inside

    def _go_on(self) -> Iterator[Step]:
        """Live batches again, those that waited first."""
        self.wanted = None
        self._suspect = False
        waited, self._queue, self._queue_bytes = self._queue, deque(), 0
        for number, payload in waited:
            yield from self.live(number, payload)
        if self.wanted is None:
            self._fruitless = 0

    def _out_of_order(self, number: int, payload: bytes) -> Iterator[Step]:
        """Batches are missing, or it began anew, or this is the first that is seen."""
        ahead = self.next is not None and number > self.next
        if ahead and not self._fruitless:
            self.gaps += 1
        if self._replayable and self._fruitless < FRUITLESS_MAX:
            self._fruitless += 1
            self._keep(number, payload)
            self._suspect = self.next is not None and not ahead
            self._want(self._check_from() if ahead else 0)
            return
        if self._refused and self._foreign < FOREIGN_MAX:
            self._foreign += 1
            self._fruitless = 0
            self.late += 1
            return
        if ahead:
            self.lost += 1
        elif self.next is not None:
            self.restarts += 1
        yield self._begin(number)
        yield self._taken(number, payload)

    def _made_before(self, number: int, payload: bytes) -> Iterator[Step]:
        """Made before this life's first batch: by a process that is gone, or its clock was set back. A replay
        tells: the engine has it, or it is not this one's."""
        if self._replayable and not self._fruitless:
            self._fruitless += 1
            self._keep(number, payload)
            self._want(self._check_from())
        elif not self._replayable and number == self.next:
            yield self._taken(number, payload)
        else:
            self.late += 1

    def _check_from(self) -> int:
        return max((self.next or 0) - CHECKED, 0)

    def _want(self, start: int) -> None:
        self.wanted = start
        self.session += 1
        self._delivered = 0
        self._broken = False

    def _keep(self, number: int, payload: bytes) -> None:
        """For after the replay. What does not fit is missed, seen as missing then, and asked for."""
        if len(self._queue) >= self._limits.queue_frames_max or (
            self._queue and self._queue_bytes + len(payload) > self._limits.queue_bytes_max
        ):
            return
        self._queue.append((number, payload))
        self._queue_bytes += len(payload)

    def _begin(self, number: int | None) -> Step:
        """All that was known is of another life."""
        self.next = number
        self.whole = number == 0
        self._lived = True
        self._recent.clear()
        self._life_s = None
        return None

    def _taken(self, number: int, payload: bytes) -> bytes:
        self.next = number + 1
        self._fruitless = self._foreign = 0
        self._recent[number] = hash(payload)
        self._recent.pop(number - RECENT, None)
        made_s = stamp(payload)
        if made_s is not None:
            self._life_s = made_s if self._life_s is None else min(self._life_s, made_s)
        return payload

    def _is_known(self, number: int, payload: bytes) -> bool:
        return self._recent.get(number) == hash(payload)

    def _is_first(self) -> bool:
        """Its first batch ever. That of a later life is believed when a replay brings it: until then one of
        the life before may be under way."""
        return self.next is None and not (self._lived and self._replayable)

    def _is_late(self, payload: bytes) -> bool:
        """It was made before this life's first batch."""
        made_s = stamp(payload)
        return self._life_s is not None and made_s is not None and made_s < self._life_s
