"""When to stop asking a service that does not answer, and when to ask again.

Pauses are drawn at random from the upper half of a growing bound: clients that failed together must not
come back together.
"""

import logging
from random import Random, SystemRandom
from threading import Lock

log = logging.getLogger("metaservice.client")


def new_random() -> Random:
    """A source of chance that no other process shares."""
    return Random(SystemRandom().getrandbits(64))  # noqa: S311 - jitter, not secrets


class Backoff:
    """Pauses between tries: double from `min_ms` to `max_ms`, each drawn from its upper half."""

    __slots__ = ("_bound_ms", "_max_ms", "_min_ms", "_random")

    def __init__(self, min_ms: int, max_ms: int, random: Random) -> None:
        self._min_ms = min_ms
        self._max_ms = max_ms
        self._random = random
        self._bound_ms = min_ms

    def reset(self) -> None:
        """After a success: the next pause is short again."""
        self._bound_ms = self._min_ms

    def next_ms(self) -> int:
        """The next pause."""
        bound = min(self._bound_ms, self._max_ms)
        self._bound_ms = min(bound * 2, self._max_ms)
        return max(1, round(bound * self._random.uniform(0.5, 1.0)))

    def spread_ms(self, pause_ms: int) -> int:
        """A pause that was asked for, made up to a fifth longer."""
        return round(pause_ms * self._random.uniform(1.0, 1.2))


class Breaker:
    """Closed: calls go out. Open: they do not, until a pause is over; then one of them goes out as a
    probe, and its fate decides for all. Thread safe; `blocked` takes no lock while closed.
    """

    __slots__ = (
        "_backoff",
        "_failures",
        "_failures_max",
        "_lock",
        "_name",
        "_open",
        "_opened_ms",
        "_probe_ms",
        "_probe_until_ms",
        "_slow_ms",
        "_until_ms",
    )

    def __init__(
        self, name: str, *, failures_max: int, slow_ms: int, probe_ms: int, backoff: Backoff
    ) -> None:
        """`probe_ms`: how long a probe is waited for before another call may try, should its caller have
        vanished."""
        self._name = name
        self._failures_max = failures_max
        self._slow_ms = slow_ms
        self._probe_ms = probe_ms
        self._backoff = backoff
        self.after_fork()

    def after_fork(self) -> None:
        """Nothing known, no lock held."""
        self._lock = Lock()
        self._failures = 0
        self._open = False
        self._opened_ms = 0
        self._until_ms = 0
        self._probe_until_ms = 0

    def blocked(self, now_ms: int) -> bool:
        """Whether a call must not go out now. When it may although open, that call is the probe: its
        fate must be told."""
        if not self._open:
            return False
        with self._lock:
            if not self._open:
                return False
            if now_ms < self._until_ms or now_ms < self._probe_until_ms:
                return True
            self._probe_until_ms = now_ms + self._probe_ms
            return False

    def shut(self, now_ms: int) -> bool:
        """Whether a call would be blocked now. Unlike `blocked`, this lets no probe out."""
        return self._open and (now_ms < self._until_ms or now_ms < self._probe_until_ms)

    def answered(self, sent_ms: int, now_ms: int) -> None:
        """A call was answered as it should be, whatever the answer."""
        if now_ms - sent_ms > self._slow_ms:
            self.failed(sent_ms, now_ms, f"took {now_ms - sent_ms} ms")
        elif self._failures or self._open:
            with self._lock:
                if self._open and sent_ms <= self._opened_ms:
                    return  # it was on its way before, and says nothing about now
                was_open, self._open = self._open, False
                self._failures = 0
                self._probe_until_ms = 0
                self._backoff.reset()
            if was_open:
                log.info("%s answers again", self._name)

    def failed(self, sent_ms: int, now_ms: int, why: str) -> None:
        """A call came to nothing, or was slow."""
        with self._lock:
            if self._open:
                if sent_ms > self._opened_ms:
                    self._pause(now_ms)
                return
            self._failures += 1
            if self._failures < self._failures_max:
                return
            self._open = True
            self._pause(now_ms)
        log.warning(
            "%s: %d calls in a row failed or were slow (the last: %s); not asking for a while",
            self._name,
            self._failures,
            why,
        )

    def hold(self, now_ms: int, pause_ms: int) -> None:
        """The service asked to be left alone for a while: open at once."""
        with self._lock:
            was_open, self._open = self._open, True
            self._pause(now_ms)
            self._until_ms = max(self._until_ms, now_ms + self._backoff.spread_ms(pause_ms))
        if not was_open:
            log.warning("%s asked to be left alone for %d ms", self._name, pause_ms)

    def abandoned(self) -> None:
        """A call was cancelled: its fate says nothing. Were it the probe, another call may be."""
        if self._open:
            with self._lock:
                self._probe_until_ms = 0

    def _pause(self, now_ms: int) -> None:
        self._opened_ms = now_ms
        self._until_ms = now_ms + self._backoff.next_ms()
        self._probe_until_ms = 0
