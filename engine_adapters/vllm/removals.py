"""Blocks that were named and could not be read: which of them are removed for everybody, and how fast."""

from collections.abc import Callable, Sequence
from threading import Lock

AGAIN_MS = 10_000
"""A block that was removed is not removed once more so soon: its readers report it one after the other."""
KEPT_MS = 60_000
"""What could not be removed for so long is left to the next who meets it."""
_MINUTE_MS = 60_000

Batch = tuple[str, list[bytes]]


class Removals:
    """Thread safe, and bounded by its rate: an engine whose mount is broken must not clear the whole
    cache."""

    def __init__(self, blocks_per_minute_max: int, clock: Callable[[], int]) -> None:
        self._rate_max = blocks_per_minute_max
        self._clock = clock
        self._lock = Lock()
        self._tokens = float(blocks_per_minute_max)
        self._filled_ms = clock()
        self._seen_ms: dict[tuple[str, bytes], int] = {}
        self._waiting: list[tuple[int, Batch]] = []

    def add(self, instance: str, keys: Sequence[bytes]) -> int:
        """These cannot be read. Returns how many are left alone, for the rate."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            fresh = [key for key in dict.fromkeys(keys) if (instance, key) not in self._seen_ms]
            self._fill(now)
            taken = fresh[: int(self._tokens)]
            self._tokens -= len(taken)
            for key in taken:
                self._seen_ms[instance, key] = now
            if taken:
                self._waiting.append((now, (instance, taken)))
            return len(fresh) - len(taken)

    def _fill(self, now: int) -> None:
        gained = (now - self._filled_ms) * self._rate_max / _MINUTE_MS
        self._tokens = min(float(self._rate_max), self._tokens + gained)
        self._filled_ms = now

    def _forget(self, now: int) -> None:
        while self._seen_ms:
            oldest = next(iter(self._seen_ms))
            if self._seen_ms[oldest] + AGAIN_MS > now:
                break
            del self._seen_ms[oldest]

    def next(self) -> Batch | None:
        """The next to remove; it stays until `done`."""
        with self._lock:
            now = self._clock()
            while self._waiting and self._waiting[0][0] + KEPT_MS <= now:
                del self._waiting[0]
            return self._waiting[0][1] if self._waiting else None

    def done(self, batch: Batch) -> None:
        """It is removed, or never will be."""
        with self._lock:
            self._waiting = [row for row in self._waiting if row[1] is not batch]

    def clear(self) -> None:
        """None of them is this engine's business any more."""
        with self._lock:
            self._waiting.clear()
