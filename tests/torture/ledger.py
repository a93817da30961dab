"""What writers were told: the independent record that the service is held against."""

import threading
from dataclasses import dataclass, field

Place = tuple[int, int]
"""(location, generation)"""

SLACK_MS = 1_500
"""From a session's deadline to when its blocks must be free: a tick, and a step of the shard's clock."""


def checksum_of(place: Place, part: int) -> int:
    """The checksum that writers report for a part, so that a lookup's can be checked."""
    return (place[0] << 24 ^ place[1] << 8 ^ part) + 1


@dataclass
class Open:
    """A write session whose writer went away. `due_ms` (monotonic): by then it must be over."""

    session: str
    keys: tuple[bytes, ...]
    ttl_ms: int
    due_ms: int


@dataclass
class Ledger:
    """Shared by all threads of a run; every method takes the lock."""

    finished: dict[bytes, Place] = field(default_factory=dict)
    """Blocks whose finish was acknowledged, with their place."""
    finishes: int = 0
    """Acknowledged finish calls."""
    unfinished: list[Open] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)
    """Every key that a start was ever sent for."""
    shared: set[bytes] = field(default_factory=set)
    """Those of them that several writers write."""
    holders: dict[Place, str] = field(default_factory=dict)
    """Which session got each place."""
    unsure: set[bytes] = field(default_factory=set)
    """Keys whose finish got no answer that counts; either fate is right."""
    problems: list[str] = field(default_factory=list)
    """What must not happen and did."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wrong(self, what: str) -> None:
        """Remember a violation."""
        with self.lock:
            self.problems.append(what)

    def asked(self, keys: list[bytes], *, shared: bool) -> set[bytes]:
        """A start is about to be sent; returns those of the keys that serve for certain already."""
        with self.lock:
            self.keys.update(keys)
            if shared:
                self.shared.update(keys)
            return {key for key in keys if key in self.finished}

    def placed(self, session: str, places: dict[bytes, Place], serving_before: set[bytes]) -> None:
        """A start was answered with places to write to."""
        with self.lock:
            for key, place in places.items():
                holder = self.holders.setdefault(place, session)
                if holder != session:
                    self.problems.append(f"place {place} was given to {holder} and to {session}")
                if key in serving_before:
                    self.problems.append(
                        f"{key.hex()} serves at {self.finished[key]} and was given to {session}"
                    )

    def published(self, places: dict[bytes, Place]) -> None:
        """A finish was acknowledged: these blocks serve."""
        with self.lock:
            self.finishes += 1
            for key, place in places.items():
                known = self.finished.setdefault(key, place)
                if known != place:
                    self.problems.append(f"{key.hex()} serves at {known} and at {place}")

    def left(self, session: str, keys: list[bytes], ttl_ms: int, now_ms: int) -> None:
        """A session is left to its deadline."""
        with self.lock:
            self.unfinished.append(Open(session, tuple(keys), ttl_ms, now_ms + ttl_ms))

    def doubted(self, keys: list[bytes]) -> None:
        """A finish ended without an answer that counts."""
        with self.lock:
            self.unsure.update(keys)

    def restarted(self, killed_ms: int, ready_ms: int) -> None:
        """A new leader gives every session that was still open its whole time again."""
        with self.lock:
            for one in self.unfinished:
                if one.due_ms >= killed_ms - SLACK_MS:  # its end may not have been durable yet
                    one.due_ms = ready_ms + one.ttl_ms

    def take_due(self, now_ms: int) -> list[Open]:
        """The unfinished sessions that must be over by now; they are forgotten here."""
        late_ms = now_ms - SLACK_MS
        with self.lock:
            due = [one for one in self.unfinished if one.due_ms < late_ms]
            self.unfinished = [one for one in self.unfinished if one.due_ms >= late_ms]
            return due

    def last_due_ms(self) -> int:
        """When the last unfinished session must be over; 0 without one."""
        with self.lock:
            return max((one.due_ms for one in self.unfinished), default=0)

    def serving(self) -> dict[bytes, Place]:
        """A copy of what must be found."""
        with self.lock:
            return dict(self.finished)

    def all_keys(self) -> list[bytes]:
        """Every key ever used, in an order that does not change."""
        with self.lock:
            return sorted(self.keys)
