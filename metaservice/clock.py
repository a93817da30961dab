"""The only place of the service that reads a clock or draws randomness; everything else gets time and ids as
arguments."""

import random
import secrets
import time


class ShardClock:
    """Milliseconds for one shard's decisions: never backwards, and never faster than the service itself runs.

    It starts no earlier than the last journaled time, so that a wall clock that was set back cannot revive a
    deadline. Then it follows the monotonic clock, but one reading adds `step_ms_max` at most: time during
    which this process stood still (stopped, swapped, stuck in one call) is not held against clients whose
    renewals could not be taken meanwhile. All deadlines it judges are promises of ours, so being slow is the
    safe side.
    """

    def __init__(self, step_ms_max: int = 250) -> None:
        self._step_ms_max = step_ms_max
        self._now_ms = 0
        self._read_ms = _monotonic_ms()
        self.stalled_ms = 0
        """Time left out so far."""

    def start(self, journaled_ms: int) -> None:
        """Begin after everything that was journaled, at the wall clock's time if that is later."""
        self._now_ms = max(time.time_ns() // 1_000_000, journaled_ms + 1, self._now_ms)
        self._read_ms = _monotonic_ms()

    def now_ms(self) -> int:
        """The shard's time."""
        read_ms = _monotonic_ms()
        passed_ms = read_ms - self._read_ms
        self._read_ms = read_ms
        if passed_ms > self._step_ms_max:
            self.stalled_ms += passed_ms - self._step_ms_max
            passed_ms = self._step_ms_max
        self._now_ms += passed_ms
        return self._now_ms


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def monotonic_s() -> float:
    """Seconds for measuring durations."""
    return time.perf_counter()


def new_life() -> str:
    """A token for one process from its start to its end."""
    return secrets.token_hex(8)


def new_cluster_id() -> str:
    """A name for a new journal. It is part of every place, so that a service that lost its journal never
    hands out a place that an earlier life may have filled."""
    return secrets.token_hex(8)


def lease_s() -> float:
    """Seconds by which leases are judged. It goes on while the machine sleeps, as the elector's clock does: a
    leader that wakes up must not believe that no time has passed."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def chance() -> float:
    """A number from 0 up to 1, to spread retries."""
    return random.random()  # noqa: S311 - no secret hangs on it
