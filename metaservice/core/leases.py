"""Read leases: named promises that blocks stay readable. Leader memory, bounded in time and number.

A lease is a list of segments, each with its own deadline, because a caller may renew a part of its blocks.
`pins[slot]` in the block index counts the live segments over a slot; it is derived, the names are what
counts: a lease released twice changes nothing.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush

from .ids import lease_name
from .index import BlockIndex, live_of
from .model import Limits
from .outcomes import LeaseOutcome
from .replies import Looked


class Segment:
    """Blocks of one lease with a common deadline."""

    __slots__ = ("deadline_ms", "slots", "span")

    def __init__(self, deadline_ms: int, slots: "array[int]", span: tuple[int, int] | None = None) -> None:
        self.deadline_ms = deadline_ms
        self.slots = slots
        self.span = span
        """(first, end) when the slots are known to be one run."""


class Lease:
    """One held lease."""

    __slots__ = ("generations", "lost", "name", "reply", "request", "segments", "slots")

    def __init__(
        self,
        name: str,
        segment: Segment,
        generations: "array[int]",
        request: tuple[str, str] | None,
        reply: Looked | None,
    ) -> None:
        self.name = name
        self.segments = [segment]
        self.slots = segment.slots
        self.generations = generations
        self.request = request
        self.reply = reply
        self.lost: set[int] = set()
        """Slots whose locations went under the lease, bytes and all. They may be others' by now."""


class Leases:
    """All read leases of a leader."""

    def __init__(self, index: BlockIndex, limits: Limits, shard: int) -> None:
        self._index = index
        self._limits = limits
        self._shard = shard
        self._next = 1
        self._held: dict[str, Lease] = {}
        self._by_request: dict[tuple[str, str], Lease] = {}
        self._deadlines: list[tuple[int, str]] = []
        self._ended: OrderedDict[str, tuple[LeaseOutcome, array[int], array[int], int]] = OrderedDict()
        """name -> how it ended, its slots and generations, how many were lost while it was held."""
        self.unpinned: list[int] = []
        """Deleting slots whose last lease ended: `deletions` collects them."""
        self.expired = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def full(self) -> bool:
        """Whether the bound on held leases is reached."""
        return len(self._held) >= self._limits.leases_max

    def of_request(self, request: tuple[str, str]) -> Looked | None:
        """The first answer to this (client, request id), while its lease lives."""
        lease = self._by_request.get(request)
        return lease.reply if lease is not None else None

    def grant(
        self,
        slots: "array[int]",
        span: tuple[int, int] | None,
        generations: "array[int]",
        deadline_ms: int,
        epoch: int,
        request: tuple[str, str] | None,
        reply: Looked | None,
    ) -> str:
        """Pin the slots under a new name until the deadline. `span`: (first, end) when they are known to be
        one run."""
        name = lease_name(self._shard, epoch, self._next)
        self._next += 1
        _add(self._index.pins, slots, span, 1)
        lease = Lease(name, Segment(deadline_ms, slots, span), generations, request, reply)
        self._held[name] = lease
        if request is not None:
            self._by_request[request] = lease
        heappush(self._deadlines, (deadline_ms, name))
        return name

    def foreign(self, name: str, slots: Sequence[int]) -> int | None:
        """The first row of `slots` that is not of the lease; None when all are, or the lease is not held."""
        lease = self._held.get(name)
        if lease is None:
            return None
        own = set(lease.slots)
        return next((row for row, slot in enumerate(slots) if slot not in own), None)

    def renew(self, name: str, deadline_ms: int, only: Sequence[int] | None) -> tuple[LeaseOutcome, int]:
        """Prolong (never shorten) the whole lease, or only some of its slots. Returns the outcome and how
        many of its blocks changed since (while it is held: were lost)."""
        lease = self._held.get(name)
        if lease is None:
            return self._late(name)
        if only is None:
            for segment in lease.segments:
                segment.deadline_ms = max(segment.deadline_ms, deadline_ms)
        else:
            wanted = set(only)
            split: list[Segment] = []
            for segment in lease.segments:
                keep = array("I", [slot for slot in segment.slots if slot not in wanted])
                take = array("I", [slot for slot in segment.slots if slot in wanted])
                if keep:
                    split.append(Segment(segment.deadline_ms, keep))
                if take:
                    split.append(Segment(max(segment.deadline_ms, deadline_ms), take))
            lease.segments = split
        heappush(self._deadlines, (min(segment.deadline_ms for segment in lease.segments), name))
        return LeaseOutcome.renewed, len(lease.lost)

    def release(self, name: str) -> tuple[LeaseOutcome, int]:
        """Give the lease back. Again: the same answer; after its deadline: `expired`."""
        lease = self._held.get(name)
        if lease is None:
            return self._late(name)
        self._end(lease, LeaseOutcome.released)
        return LeaseOutcome.released, len(lease.lost)

    def sweep(self, now_ms: int) -> int:
        """End what is past its deadline; returns how many leases ended."""
        ended = 0
        heap = self._deadlines
        while heap and heap[0][0] <= now_ms:
            name = heappop(heap)[1]
            lease = self._held.get(name)
            if lease is None:
                continue
            past = [segment for segment in lease.segments if segment.deadline_ms <= now_ms]
            if not past:
                heappush(heap, (min(segment.deadline_ms for segment in lease.segments), name))
            elif len(past) == len(lease.segments):
                self._end(lease, LeaseOutcome.expired)
                ended += 1
            else:
                for segment in past:
                    self._unpin(lease, segment)
                lease.segments = [segment for segment in lease.segments if segment.deadline_ms > now_ms]
                heappush(heap, (min(segment.deadline_ms for segment in lease.segments), name))
        self.expired += ended
        return ended

    def lost(self, slots: "array[int]") -> None:
        """These locations are gone with their bytes: no lease can hold them, and those that did say so.
        Their slots may be used again at once, so what a lease named first is no answer to a retry."""
        pins = self._index.pins
        if not any(map(pins.__getitem__, slots)):
            return
        gone = set(slots)
        for lease in self._held.values():
            lost = [slot for segment in lease.segments for slot in segment.slots if slot in gone]
            lease.lost.update(lost)
            if lost and lease.request is not None and self._by_request.get(lease.request) is lease:
                del self._by_request[lease.request]
        for slot in slots:
            pins[slot] = 0

    def drop(self) -> None:
        """Forget every lease, held or ended: whoever holds one is waited for by the next leader."""
        for lease in self._held.values():
            for segment in lease.segments:
                _add(self._index.pins, *_pinned(lease, segment), -1)
        self._held.clear()
        self._by_request.clear()
        self._deadlines.clear()
        self._ended.clear()
        self.unpinned = []

    def _late(self, name: str) -> tuple[LeaseOutcome, int]:
        ended = self._ended.get(name)
        if ended is None:
            return LeaseOutcome.unknown, 0
        outcome, slots, generations, lost = ended
        if outcome is LeaseOutcome.released:
            return outcome, lost
        return outcome, live_of(self._index, slots, generations).count(0)

    def _end(self, lease: Lease, outcome: LeaseOutcome) -> None:
        for segment in lease.segments:
            self._unpin(lease, segment)
        del self._held[lease.name]
        if lease.request is not None and self._by_request.get(lease.request) is lease:
            del self._by_request[lease.request]
        self._ended[lease.name] = (outcome, lease.slots, lease.generations, len(lease.lost))
        if len(self._ended) > self._limits.ended_leases_max:
            self._ended.popitem(last=False)

    def _unpin(self, lease: Lease, segment: Segment) -> None:
        pins, index = self._index.pins, self._index
        slots, span = _pinned(lease, segment)
        _add(pins, slots, span, -1)
        if index.deleting_count:
            self.unpinned += [slot for slot in slots if not pins[slot] and index.is_deleting(slot)]


def _pinned(lease: Lease, segment: Segment) -> "tuple[array[int], tuple[int, int] | None]":
    """The slots that the segment pins, and their span when that is known."""
    if not lease.lost:
        return segment.slots, segment.span
    return array("I", [slot for slot in segment.slots if slot not in lease.lost]), None


def _add(pins: "array[int]", slots: "array[int]", span: tuple[int, int] | None, amount: int) -> None:
    """Add to the pins of the slots; one run of slots with equal pins, the usual case, costs nearly
    nothing."""
    if span is None or len(slots) < 8:
        for slot in slots:
            pins[slot] += amount
        return
    run = slice(*span)
    raw = pins[run].tobytes()
    if raw == raw[:4] * len(slots):
        pins[run] = array("I", (pins[span[0]] + amount,)) * len(slots)
    else:
        pins[run] = array("I", map(amount.__add__, pins[run]))
