"""What the scheduler's side knows of the service, and what it leaves the service to do. Nothing here waits.

    scheduler's thread:  ask, answer, drop, release, bad, instance_of, identity, switch
    ucm-lookup-*         the lookups (asking.py), each cut to what can be opened here (openings.py)
    ucm-errands          registration (joining.py), releases of leases (leases.py), removals (removals.py)
    ucm-switch           hears of switches (watching.py)
    ucm-adapters         reads LoRA adapters (adapters.py)

Whoever asks gives a ticket, and ends it with `drop` or `release`: its lease is released then, or as soon as
an answer comes that nobody waits for any more.
"""

import logging
import time
from collections.abc import Callable, Sequence
from random import Random
from threading import Condition, Lock, Thread

from msgspec.structs import replace

from engine_adapters.namespace import Namespace, Part
from engine_adapters.vllm.adapters import NO_INSTANCE, Adapter
from engine_adapters.vllm.asking import Answer, Asking, Limits, Question, miss
from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.joining import Joining
from engine_adapters.vllm.leases import Leases
from engine_adapters.vllm.openings import Openings
from engine_adapters.vllm.orders import Identity
from engine_adapters.vllm.publishing import Presence, presence_of
from engine_adapters.vllm.removals import Removals
from engine_adapters.vllm.settings import Settings
from engine_adapters.vllm.watching import Watching
from metaservice.client import Client, LookupResult
from metaservice.client.breaker import Backoff, new_random
from metaservice.client.errors import PASSING
from metaservice.client.results import now_ms

__all__ = ["NO_INSTANCE", "Answer", "Broker"]

log = logging.getLogger(__name__)

TICKETS_MAX = 65_536
CLOSE_MS = 2_000
"""`close` takes no longer; what is not said by then ends by its deadline."""
FAREWELL_MS = 1_200
_FAREWELL_CALL_MS = 400
_ADMIN_TIMEOUT_MS = 3_000
_SWEEP_MS = 1_000
_PAUSE_MS_MIN = 50
_PAUSE_MS_MAX = 2_000
_READY_LOOK_S = 0.01
_NEVER_BROKEN = 1 << 30
_UNKNOWN = "rejected:instance_unknown"


class Broker:
    """One engine's. All methods may be called from any thread, return at once (but for `wait_ready` and
    `close`) and raise nothing for what the service does."""

    def __init__(
        self,
        settings: Settings,
        namespace: Namespace,
        parts: Sequence[Part],
        presence: Presence | None = None,
        *,
        clock: Callable[[], int] = now_ms,
        random: Random | None = None,
        openings: Openings | None = None,
    ) -> None:
        """`parts`: what all ranks hold of a block. `settings.engine` names the engine; `presence` says where
        it is (None: nothing but what the settings say)."""
        config = replace(settings.client(), admin_timeout_ms=_ADMIN_TIMEOUT_MS)
        random = random or new_random()
        self._clock = clock
        self._counts = Counts()
        self._client = Client(config)
        self._leases = Leases(settings.lease_ms, settings.timeout_ms, clock)
        self._removals = Removals(settings.bad_blocks_per_minute_max, clock)
        self._joining = Joining(
            self._client, settings, namespace, parts, self._counts,
            presence or presence_of(settings),
            clock=clock, random=random, changed=self._joined,
        )  # fmt: skip
        self._watching = Watching(
            replace(config, breaker_failures=_NEVER_BROKEN),
            lambda: self._joining.instance,
            self._joining.doubt,
            clock=clock,
            random=random,
        )
        self._asking = Asking(
            self._client,
            Limits(settings.lookup_wait_ms, settings.timeout_ms, settings.lease_ms),
            openings or Openings(clock=clock),
            self._counts,
            clock,
            self._joining.adapters.unchanged,
            self._answered,
            self._heard,
        )
        self._tickets: dict[str, Question] = {}
        self._settling = Lock()
        self._work = Condition()
        self._called = False
        self._closing = False
        self._farewell_until_ms = 0
        self._pause_until_ms = 0
        self._swept_ms = 0
        self._backoff = Backoff(_PAUSE_MS_MIN, _PAUSE_MS_MAX, random)
        self._errands = Thread(target=self._run_errands, name="ucm-errands", daemon=True)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begin to register, and to answer."""
        self._asking.start()
        self._watching.start()
        self._errands.start()

    def wait_ready(self, patience_ms: int) -> bool:
        """Wait until the engine is registered, or refused, or patience is over; whether it is registered.
        Once at start: the engine goes on without the service, which it joins later by itself."""
        until_s = time.monotonic() + patience_ms / 1_000
        while self.identity is None and self.refused is None and time.monotonic() < until_s:
            time.sleep(_READY_LOOK_S)
        return self.identity is not None

    def close(self) -> None:
        """Release all leases, leave the service, end all threads; within CLOSE_MS whatever the service does.
        Any number of times."""
        until_s = time.monotonic() + CLOSE_MS / 1_000
        with self._work:
            if self._closing:
                return
            self._farewell_until_ms = self._clock() + FAREWELL_MS
            self._closing = True
            self._work.notify()
        self._asking.close()
        self._joining.adapters.close()
        self._watching.close()
        if self._errands.ident is not None:
            self._errands.join(FAREWELL_MS / 1_000)
        self._client.close(cut=True)
        for room in (self._asking, self._watching, self._joining.adapters):
            room.join(max(0.0, until_s - time.monotonic()))
        if self._errands.ident is not None:
            self._errands.join(max(0.0, until_s - time.monotonic()))

    # ------------------------------------------------------------ who we are

    @property
    def identity(self) -> Identity | None:
        """As whom the engine reads and writes now; None while it is not registered: nothing is then looked up
        or saved."""
        return self._joining.identity

    @property
    def refused(self) -> str | None:
        """Why the service will not have this engine, ever; None when it will."""
        return self._joining.refused

    @property
    def switch(self) -> str:
        """`normal`, `read_only` or `bypass`: what holds on the engine's instance, as last heard."""
        return self._watching.mode

    def instance_of(self, adapter: Adapter | None = None) -> str | None:
        """The instance of the base model, or of an adapter (name and path, as requests have them), whose
        files are read in the background from the first call on. None: not known yet. NO_INSTANCE (""): this
        adapter has no cache (its files cannot be read, or changed while it was used), or nothing has, while
        the engine is not registered."""
        if adapter is None:
            return self._joining.instance
        return NO_INSTANCE if self.identity is None else self._joining.adapters.instance_of(adapter)

    def renew_namespace(self, namespace: Namespace) -> None:
        """The engine's weights are others: another instance, another incarnation. All that was found before
        is worthless from now on, and its leases are released."""
        self._joining.renew(namespace)
        with self._settling:
            for question in list(self._tickets.values()):
                self._let_go(question)
                question.answer = miss(len(question.keys), failure="renewed")
        self._removals.clear()
        self._watching.wake()
        self._call()

    # ------------------------------------------------------------ lookups

    def ask(self, ticket: str, instance: str, keys: Sequence[bytes], traceparent: str = "") -> None:
        """Look up which of `keys`, root first, are stored, once, in the background; `answer` has the result.
        `ticket` is unique for each lookup. `keys` must not change any more."""
        self.drop(ticket)
        question = Question(instance, keys, traceparent, self._clock(), self._joining.generation)
        if len(self._tickets) >= TICKETS_MAX:
            self._counts.add("lookup_failures_full")
            return
        self._tickets[ticket] = question
        if self.identity is None or not instance:
            question.answer = miss(len(keys), failure="not_registered")
        elif self.switch == "bypass":
            question.answer = miss(len(keys), cut="switch")
        elif not keys:
            question.answer = miss(0, cut="none")
        elif not self._asking.put(question):
            question.answer = miss(len(keys), failure="full")
        if question.answer is not None and question.answer.failure is not None:
            self._counts.add(f"lookup_failures_{question.answer.failure}")

    def answer(self, ticket: str) -> Answer | None:
        """The answer; None while there is none, and for a ticket that is over."""
        question = self._tickets.get(ticket)
        return None if question is None else question.answer

    def held(self, ticket: str) -> bool:
        """Whether the blocks of this answer are known to be leased to us now, or were named a moment ago by
        a follower, who gives no leases. Asks nobody."""
        question = self._tickets.get(ticket)
        if question is None:
            return False
        if question.lease is None:
            return self._clock() < question.until_ms
        return self._client.held(question.lease)

    def drop(self, ticket: str) -> None:
        """The answer is not wanted (any more): its lease is released, now or when it comes. Any number of
        times."""
        question = self._tickets.pop(ticket, None)
        if question is not None:
            with self._settling:
                question.dropped = True
                self._let_go(question)
            if question.answer is not None:
                self._call()

    def release(self, ticket: str) -> None:
        """What was read under the answer's lease is read: the lease is released, in the background."""
        self.drop(ticket)

    def _let_go(self, question: Question) -> None:
        """Holds `_settling`: an answer that comes now is either seen here, or sees what was done here."""
        if question.answer is not None and question.lease is not None:
            self._leases.let_go(question.lease)

    def _answered(self, question: Question, answer: Answer) -> None:
        with self._settling:
            lease = question.lease
            if lease is not None:
                self._leases.took(lease)
                self._counts.add("leases")
            stale = question.generation != self._joining.generation
            if question.dropped or stale:
                answer = miss(len(question.keys), failure="renewed" if stale else "late")
                self._counts.add("late_answers")
            question.answer = answer
            if lease is not None and not answer.hits:
                self._leases.let_go(lease)
        if not answer.hits:
            self._call()

    def _heard(self, found: LookupResult) -> None:
        if found.failure is None:
            self._watching.heard(found.switch)
        elif found.failure == _UNKNOWN:
            self._joining.doubt()

    # ------------------------------------------------------------ the rest

    def bad(self, instance: str, keys: Sequence[bytes]) -> None:
        """These blocks were named and could not be read: they are removed for everybody, as fast as the
        settings allow."""
        left = self._removals.add(instance, keys)
        self._counts.add("removals_left", left)
        self._call()

    def leases_open(self) -> int:
        """Leases that the service may hold for this engine."""
        return len(self._leases)

    def counters(self) -> dict[str, int]:
        """What was counted since the last call: `lookup_calls`, `lookup_us` (and `_max`),
        `lookup_failures_*`, `lookups_by_followers`, `late_answers`, `unreachable_blocks`, `leases`,
        `leases_released`, `leases_ran_out`, `removed_blocks`, `removals_left`, `registrations`,
        `registrations_lost`, `switch_changes`."""
        changes, self._watching.changes = self._watching.changes, 0
        self._counts.add("switch_changes", changes)
        return self._counts.drain()

    # ------------------------------------------------------------ errands

    def _joined(self) -> None:
        self._watching.wake()
        self._call()

    def _call(self) -> None:
        """There is something to do."""
        with self._work:
            self._called = True
            self._work.notify()

    def _run_errands(self) -> None:
        while True:
            due_ms = self._clock() + _SWEEP_MS
            try:
                due_ms = min(due_ms, self._turn())
            except Exception:
                log.exception("an errand failed; the others go on")
            with self._work:
                if not self._called and not self._closing:
                    self._work.wait(max(1, due_ms - self._clock()) / 1_000)
                self._called = False
                if self._closing:
                    break
        try:
            self._farewell()
        except Exception:
            log.exception("leaving the service failed")

    def _turn(self) -> int:
        """Do what is due. Returns when the next thing is."""
        due_ms = self._joining.turn()
        now = self._clock()
        if now - self._swept_ms >= _SWEEP_MS:
            self._swept_ms = now
            self._counts.add("leases_ran_out", self._leases.sweep(self._client.held))
        if now < self._pause_until_ms:
            return min(due_ms, self._pause_until_ms)
        if not (self._release() and self._remove()):
            self._pause_until_ms = self._clock() + self._backoff.next_ms()
            return min(due_ms, self._pause_until_ms)
        self._backoff.reset()
        return due_ms

    def _release(self, timeout_ms: int | None = None) -> bool:
        """Release what is to be; whether the service answered."""
        while leases := self._leases.leaving():
            if self._client.release(leases, timeout_ms=timeout_ms).failure is not None:
                return False
            self._leases.released(leases)
            self._counts.add("leases_released", len(leases))
        return True

    def _remove(self) -> bool:
        """Remove what could not be read; whether the service answered."""
        while (batch := self._removals.next()) is not None and not self._closing:
            instance, keys = batch
            result = self._client.remove(instance, keys)
            if result.failure in PASSING:
                return False
            self._removals.done(batch)
            self._counts.add("removed_blocks", result.removed)
        return True

    def _farewell(self) -> None:
        self._asking.rest(_FAREWELL_CALL_MS / 1_000)
        self._leases.let_all_go()
        registration = self._client.registration
        for say in (
            self._release,
            self._client.deregister if registration is not None and registration.active else None,
        ):
            left_ms = min(_FAREWELL_CALL_MS, self._farewell_until_ms - self._clock())
            if say is not None and left_ms > 0:
                say(timeout_ms=left_ms)
