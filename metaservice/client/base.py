"""What both clients share: everything about a call but the waiting."""

import logging
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from . import admin, forks
from .breaker import Backoff, Breaker, new_random
from .calls import Call, Who
from .config import ClientConfig, Keepalive
from .endpoints import Endpoints
from .errors import (
    BREAKER_OPEN,
    CLOSED,
    INTERNAL,
    INVALID_REQUEST,
    NOT_READY,
    PASSING,
    REJECTED,
    UNHEALTHY,
    CallFailed,
    client_error,
)
from .holder import Holder, Registration
from .http import Reply
from .messages import Member
from .notices import Notices
from .resolve import Resolver
from .results import Registered, now_ms
from .speech import spoken, understood
from .trip import Trip

T = TypeVar("T")
X = TypeVar("X")

_REREGISTER = REJECTED + "reregister"
_LEASES_FULL = REJECTED + "too_many_leases"
_WRITES_ONLY = frozenset({REJECTED + "journal_unavailable", REJECTED + "too_many_sessions"})
"""Refusals that say nothing about reads."""
_LEADERLESS_MS_MAX = 500
"""A shard that nobody leads is asked for again this soon: elections are short."""
_RETRY_MS_MIN = 40
_RETRY_MS_MAX = 400


class Calling(Generic[X]):
    """The state of a client that decides on calls and judges answers. Thread safe."""

    def __init__(
        self,
        config: ClientConfig,
        make: Callable[[ClientConfig, Resolver], X],
        retire: Callable[[X], None],
    ) -> None:
        """`make` gives the transport to a replica, `retire` ends one that is not needed any more."""
        self.config = config
        self.who = Who()
        self.endpoints = Endpoints(config, make, retire)
        self._notices = Notices()
        self._name = ",".join(config.urls)
        self._spread = Backoff(1, 1, new_random())
        self._breaker = self._new_breaker(self._name)
        self._write_breaker = self._new_breaker(f"{self._name} (writes)")
        self.keeps = Holder(config, self.who, self._notices)
        forks.register(self)

    def _new_breaker(self, name: str) -> Breaker:
        config = self.config
        return Breaker(
            name,
            failures_max=config.breaker_failures,
            slow_ms=config.breaker_slow_ms,
            probe_ms=config.timeout_ms,
            backoff=Backoff(config.breaker_pause_ms_min, config.breaker_pause_ms_max, new_random()),
        )

    def after_fork(self) -> None:
        """Another process: other request ids, own jitter, and nothing known of the service's health."""
        self.who.renumber()
        self._notices.after_fork()
        self.endpoints.after_fork()
        self._spread = Backoff(1, 1, new_random())
        self._breaker = self._new_breaker(self._name)
        self._write_breaker = self._new_breaker(f"{self._name} (writes)")

    # -- a call on its way

    def begin(self, call: Call[Any], sent_ms: int, timeout_ms: int) -> Trip[X]:
        """The way of a call through the replicas. Raises CallFailed when it must not or cannot go out."""
        writes = call.writes
        if writes and self._write_breaker.blocked(sent_ms):
            raise CallFailed(BREAKER_OPEN, "the writes before failed")
        if self._breaker.blocked(sent_ms):
            if writes:
                self._write_breaker.abandoned()  # should it have been the probe there
            raise CallFailed(BREAKER_OPEN, "the calls before failed")
        try:
            sending = spoken(self.who, call)
            endpoints = self.endpoints
            if endpoints.several and endpoints.held(call.route, writes, sent_ms):
                raise CallFailed(BREAKER_OPEN, "the service asked to be left alone with this")
            return Trip(endpoints, call, sending, sent_ms, timeout_ms)
        except CallFailed:
            self.cancelled()  # it was never sent
            raise

    def judged(self, call: Call[T], trip: Trip[X], reply: Reply) -> T:
        """The result of a call from its reply. Raises CallFailed."""
        asked_ms = trip.asked_ms
        result = understood(call, reply, asked_ms)
        answered_ms = max(asked_ms, now_ms() - call.wait_ms)
        if self.endpoints.several:
            trip.arrived()
        self._breaker.answered(asked_ms, answered_ms)
        if call.writes:
            self._write_breaker.answered(asked_ms, answered_ms)
        call.after(result, self.keeps)
        return result

    def go_on(self, call: Call[Any], trip: Trip[X], failed: CallFailed) -> int:
        """A replica did not do what was asked: `trip` is on its way to the next, after a pause of so many
        ms. Raises CallFailed when it is over."""
        try:
            return trip.go_on(failed)
        except CallFailed as final:
            self._learn(call, trip, final)
            raise

    def _learn(self, call: Call[Any], trip: Trip[X], failed: CallFailed) -> None:
        now, asked_ms = now_ms(), trip.asked_ms
        failure = failed.failure
        if failed.status == 503 and failure != _LEASES_FULL:
            self._refused_for_now(trip, failed, now)
        elif failure in UNHEALTHY and trip.heard:
            # The service is there, though not all of it: no reason to stay away from the rest.
            self._breaker.answered(asked_ms, asked_ms)
        elif failure == _LEASES_FULL:
            self._breaker.answered(asked_ms, now)  # lookups without a lease go on
        elif failure in UNHEALTHY or failed.status >= 500:
            self._breaker.failed(asked_ms, now, failure)
        elif failed.status:
            self._breaker.answered(asked_ms, max(asked_ms, now - call.wait_ms))
        else:
            self.cancelled()  # it was never sent

    def _refused_for_now(self, trip: Trip[X], failed: CallFailed, now: int) -> None:
        """The service answered that it cannot now, perhaps with how long to stay away."""
        asked_ms = trip.asked_ms
        writes = failed.failure in _WRITES_ONLY
        breaker = self._write_breaker if writes else self._breaker
        pause_ms = min(failed.retry_after_ms, self.config.retry_after_ms_max)
        if writes:
            self._breaker.answered(asked_ms, now)
        if self.endpoints.several:
            # It is about one shard; those that others lead may be well.
            if failed.failure == NOT_READY:
                pause_ms = min(pause_ms, _LEADERLESS_MS_MAX)
            self.endpoints.hold(trip.route, writes, now + self._spread.spread_ms(pause_ms))
            self._breaker.answered(asked_ms, asked_ms)
            self._write_breaker.abandoned()
        elif pause_ms:
            breaker.hold(now, pause_ms)
        else:
            breaker.failed(asked_ms, now, failed.failure)

    def cancelled(self) -> None:
        """A call was not sent, or given up by its caller: its fate says nothing."""
        self._breaker.abandoned()
        self._write_breaker.abandoned()

    # -- what becomes of it

    def came_to_nothing(self, call: Call[T], failed: CallFailed) -> T:
        """The result of a call that failed; raises it as ClientError where that was asked for."""
        if failed.failure not in (BREAKER_OPEN, CLOSED):
            kind = f"{type(call).__name__} {failed.failure}"
            where = f" ({failed.field})" if failed.field else ""
            self._notices.say(logging.WARNING, kind, f"{kind}{where}: {failed.detail}"[:500])
        result = call.failed(failed.failure, failed.detail)
        call.after(result, self.keeps)
        if failed.failure == _REREGISTER:
            self.keeps.doubt()
        if self.config.raise_errors:
            raise client_error(failed)
        return result

    def patience(self, call: Call[Any], failed: CallFailed) -> Backoff | None:
        """The pauses between tries of a call that came to nothing; None when it is not tried again."""
        if self.config.retry_ms and call.writes and call.repeatable and failed.failure in PASSING:
            return Backoff(_RETRY_MS_MIN, _RETRY_MS_MAX, new_random())
        return None

    def retry_in_ms(self, failed: CallFailed, began_ms: int, patience: Backoff) -> int:
        """After which pause it is tried again; 0: not again."""
        if failed.failure not in PASSING:
            return 0
        asked_ms = min(failed.retry_after_ms, _RETRY_MS_MAX)
        pause_ms = max(patience.next_ms(), patience.spread_ms(asked_ms))
        return pause_ms if now_ms() + pause_ms < began_ms + self.config.retry_ms else 0

    def left_ms(self, began_ms: int, sent_ms: int, timeout_ms: int) -> int:
        """How long a try that begins now may take."""
        return min(timeout_ms, began_ms + max(timeout_ms, self.config.retry_ms) - sent_ms)

    def registered(
        self,
        member: Member,
        answer: Registered,
        keepalive: Keepalive | None,
        on_lost: Callable[[Registration], None] | None,
    ) -> Registration:
        """Act as this member from now on. Where the service did not take it, the keeper goes on trying."""
        registration = Registration(member.kind, member.id, member.incarnation, on_lost)
        if answer.failure is None:
            registration.joined(answer)
            member.registered = True
            member.heartbeat_ms, member.expire_ms = answer.heartbeat_ms, answer.expire_ms
        else:
            registration.failure, registration.detail = answer.failure, answer.detail
        # A name that can never be sent is not tried for ever.
        self.keeps.register(registration, member, None if answer.failure == INVALID_REQUEST else keepalive)
        return registration

    def ask(self, ask: admin.Ask, accept: str) -> Trip[X]:
        """The way of an operator's request, which each replica answers or passes on. Raises ClientError."""
        try:
            return Trip(self.endpoints, ask, ask.sending(accept), now_ms(), self.config.admin_timeout_ms)
        except CallFailed as failed:
            raise client_error(failed) from None

    def ask_on(self, trip: Trip[X], failed: CallFailed) -> int:
        """A replica did not answer an operator: `trip` is on its way to the next, after a pause of so many
        ms. Raises ClientError when it is over."""
        try:
            return trip.go_on(failed)
        except CallFailed as final:
            raise client_error(final) from None

    def broke(self, call: Call[T]) -> T:
        """The result of a call in which this client itself failed: an engine must not pay for our
        mistakes."""
        text = traceback.format_exc()
        self._notices.say(
            logging.ERROR, INTERNAL, f"{type(call).__name__}: a fault of the client itself\n{text}"
        )
        self.cancelled()
        if self.config.raise_errors:
            raise client_error(CallFailed(INTERNAL, text.strip().rpartition("\n")[2]))
        return call.failed(INTERNAL, text.strip().rpartition("\n")[2])
