"""What clients of a cluster were told: the record that the journals are held against.

What exactly must hold is written in `cluster_judge.py`; here is only what that needs. All times are seconds
of this machine's wall clock, which PostgreSQL's commit times are of, too.
"""

import threading
from collections import deque
from dataclasses import dataclass, field

from tests.torture.cluster_speech import Answer

Place = tuple[int, int]
"""(location, generation)"""
RECENT = 400


@dataclass(frozen=True, slots=True)
class Position:
    """From where in which shard's journal an answer was, and when it was asked for and came."""

    shard: int
    epoch: int
    seq: int
    sent_s: float
    received_s: float
    leader: bool

    @classmethod
    def of(cls, answer: Answer) -> "Position":
        """Of an answer that has one."""
        return cls(
            answer.shard,
            answer.epoch,
            answer.seq,
            answer.sent_s,
            answer.received_s,
            leader=answer.staleness_ms < 0,
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """A finish was acknowledged: this block serves."""

    place: Place
    key: bytes
    at: Position


@dataclass(slots=True)
class Looked:
    """A lookup was answered. `rows`: what was found; `absent`: what was asked for and not found, in mode
    `each` only. `until_s`: no byte of the rows may go before; later when the lease was renewed, earlier when
    it was released."""

    at: Position
    staleness_ms: int
    rows: tuple[tuple[bytes, Place], ...]
    absent: tuple[bytes, ...]
    until_s: float


@dataclass
class Record:
    """Shared by all threads of a run; every method takes the lock."""

    commits: list[Commit] = field(default_factory=list)
    lookups: list[Looked] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    """Of every answer that has one."""
    dirty: list[str] = field(default_factory=list)
    """Wrong bytes, or answers of somebody who must not give any."""
    early: list[str] = field(default_factory=list)
    """Bytes that were gone although they were promised."""
    faults: list[str] = field(default_factory=list)
    """Anything else that must not happen."""
    refused: dict[str, int] = field(default_factory=dict)
    """Writes refused, by reason: no fault."""
    unanswered: int = 0
    """Calls that nobody answered in time."""
    reads: int = 0
    """Blocks whose bytes were read and found right."""
    recent: dict[str, deque[bytes]] = field(default_factory=dict)
    """By instance, keys that were acknowledged lately."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def troubles(self) -> int:
        """How much that must not happen was noticed so far."""
        return len(self.dirty) + len(self.early) + len(self.faults)

    def answered(self, answer: Answer) -> Position | None:
        """Any answer: its position counts, if it has one."""
        if answer.shard < 0 or not answer.ok:
            return None
        position = Position.of(answer)
        with self.lock:
            self.positions.append(position)
        return position

    def committed(self, instance: str, places: dict[bytes, Place], at: Position, *, known: bool) -> None:
        """These blocks serve. `known`: others may look them up, their bytes are there."""
        with self.lock:
            self.commits += [Commit(place, key, at) for key, place in places.items()]
            if known:
                self.recent.setdefault(instance, deque(maxlen=RECENT)).extend(places)

    def looked(self, looked: Looked) -> None:
        """A lookup was answered."""
        with self.lock:
            self.lookups.append(looked)

    def keys_of(self, instance: str) -> list[bytes]:
        """Keys that somebody wrote lately."""
        with self.lock:
            return list(self.recent.get(instance, ()))

    def wrong(self, kind: str, what: str) -> None:
        """`kind`: dirty, early or faults."""
        with self.lock:
            getattr(self, kind).append(what)

    def count(self, *, refused: str = "", unanswered: int = 0, reads: int = 0) -> None:
        """What happens and is no fault."""
        with self.lock:
            if refused:
                self.refused[refused] = self.refused.get(refused, 0) + 1
            self.unanswered += unanswered
            self.reads += reads
