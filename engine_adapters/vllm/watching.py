"""Hears of switches as soon as they change. An engine that hears nothing goes by what lookups answer."""

import logging
from collections.abc import Callable
from random import Random
from threading import Event, Thread

from metaservice.client import Client, ClientConfig
from metaservice.client.breaker import Backoff, new_random
from metaservice.client.results import now_ms
from metaservice.wire.schemas import SwitchRef

log = logging.getLogger(__name__)

NORMAL = "normal"
POLL_MS = 5_000
PAUSE_MS_MIN = 20
PAUSE_MS_MAX = 1_000
OLD_SERVICE_PAUSE_MS = 60_000
"""A service without the route may be a newer one after so long."""
HEARD_MS = 1_000
"""How long a lookup's word holds: after that the next lookup is let out, to hear whether it still is so."""
_NO_ROUTE = frozenset({"rejected:not_found", "rejected:method_not_allowed"})
_UNKNOWN = "rejected:instance_unknown"


class Watching:
    """One thread with a client of its own: a poll that waits on purpose must be nobody else's probe."""

    def __init__(
        self,
        config: ClientConfig,
        instance: Callable[[], str | None],
        doubt: Callable[[], None],
        *,
        clock: Callable[[], int] = now_ms,
        random: Random | None = None,
        poll_ms: int = POLL_MS,
    ) -> None:
        """`instance`: the one whose switch matters now. `doubt`: called when the service does not know it."""
        self._client = Client(config)
        self._instance = instance
        self._doubt = doubt
        self._clock = clock
        self._random = random or new_random()
        self._backoff = Backoff(PAUSE_MS_MIN, PAUSE_MS_MAX, self._random)
        self._poll_ms = poll_ms
        self._wake = Event()
        self._closing = False
        self._of = ""
        self._mode = NORMAL
        self._fresh = False
        self._heard_mode = NORMAL
        self._heard_until_ms = 0
        self.changes = 0
        self._thread = Thread(target=self._run, name="ucm-switch", daemon=True)

    @property
    def mode(self) -> str:
        """`normal`, `read_only` or `bypass`, as last heard. Reading it costs nothing."""
        if self._fresh:
            return self._mode
        return self._heard_mode if self._clock() < self._heard_until_ms else NORMAL

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def wake(self) -> None:
        """The instance may be another."""
        self._fresh = False
        self._wake.set()

    def heard(self, switch: SwitchRef | None) -> None:
        """A lookup was answered with this switch. It counts only while nothing else is known."""
        if switch is not None and switch.scope != "storage":
            self._heard_mode, self._heard_until_ms = switch.mode, self._clock() + HEARD_MS
        else:
            self._heard_until_ms = 0

    def close(self) -> None:
        """Stop; the poll that waits ends at once."""
        self._closing = True
        self._wake.set()
        self._client.close(cut=True)

    def join(self, seconds: float) -> None:
        """Wait for the thread's end."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._closing:
            try:
                pause_ms = self._turn()
            except Exception:
                log.exception("watching the switch failed; it goes on")
                self._fresh, pause_ms = False, PAUSE_MS_MAX
            if pause_ms and not self._closing:
                self._wake.wait(pause_ms / 1_000)
                self._wake.clear()

    def _turn(self) -> int:
        """One poll. Returns for how long to pause before the next."""
        instance = self._instance()
        if instance is None:
            self._fresh = False
            return PAUSE_MS_MAX
        if instance != self._of:
            self._of, self._fresh = instance, False
        known = self._mode if self._fresh else ""
        asked_ms = self._clock()
        told = self._client.watch_switch(instance, known, wait_ms=self._poll_ms)
        if self._closing or instance != self._instance():
            return 0
        if told.failure is None:
            self._backoff.reset()
            self._set(told.mode)
            # An answer that comes early and says nothing new: the service stops, or too many wait there.
            early = told.mode == known and self._clock() - asked_ms < self._poll_ms // 2
            return self._random.randint(PAUSE_MS_MAX // 2, PAUSE_MS_MAX) if early else 0
        if self._fresh:
            # It holds a little longer: leadership may only be moving.
            self._heard_mode, self._heard_until_ms = self._mode, self._clock() + 2 * HEARD_MS
            self._fresh = False
        if told.failure in _NO_ROUTE:
            return OLD_SERVICE_PAUSE_MS
        if told.failure == _UNKNOWN:
            self._doubt()
        return self._backoff.next_ms()

    def _set(self, mode: str) -> None:
        if mode != self._mode:
            self.changes += 1
            log.warning("the switch on %s is %s now", self._of, mode)
        self._mode = mode
        self._fresh = True
