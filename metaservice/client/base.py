"""What both clients share: everything about a call but the waiting."""

import logging
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from . import forks
from .breaker import Backoff, Breaker, new_random
from .calls import Call, Who
from .config import ClientConfig, Keepalive
from .errors import (
    BREAKER_OPEN,
    CLOSED,
    CONNECTION_LOST,
    INTERNAL,
    INVALID_REQUEST,
    PROTOCOL,
    REFUSED_CONNECTION,
    REJECTED,
    TIMEOUT,
    CallFailed,
    client_error,
)
from .holder import Holder, Registration
from .http import Heads, Reply
from .messages import Member
from .notices import Notices
from .resolve import Resolver
from .results import Registered, now_ms
from .speech import built, understood

T = TypeVar("T")

_UNHEALTHY = frozenset({TIMEOUT, REFUSED_CONNECTION, CONNECTION_LOST, PROTOCOL})
_REREGISTER = REJECTED + "reregister"
_LEASES_FULL = REJECTED + "too_many_leases"
_WRITES_ONLY = frozenset({"journal_unavailable", "too_many_sessions"})
"""Refusals that say nothing about reads."""


class Calling:
    """The state of a client that decides on calls and judges answers. Thread safe."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.who = Who()
        self.resolver = Resolver(config.host, config.port)
        self.heads = Heads(config.host, config.port, config.base_path)
        self._notices = Notices()
        self._breaker = self._new_breaker(config.url)
        self._write_breaker = self._new_breaker(f"{config.url} (writes)")
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
        self._breaker = self._new_breaker(self.config.url)
        self._write_breaker = self._new_breaker(f"{self.config.url} (writes)")

    def blocked(self, call: Call[Any], sent_ms: int) -> bool:
        """Whether the call must not go out now."""
        if call.writes and self._write_breaker.blocked(sent_ms):
            return True
        if not self._breaker.blocked(sent_ms):
            return False
        if call.writes:
            self._write_breaker.abandoned()  # should it have been the probe there
        return True

    def built(self, call: Call[Any]) -> bytes:
        """The request of a call. Raises CallFailed."""
        return built(self.heads, self.who, call)

    def judged(self, call: Call[T], reply: Reply, sent_ms: int) -> T:
        """The result of a call from its reply. Raises CallFailed."""
        result = understood(call, reply, sent_ms)
        answered_ms = max(sent_ms, now_ms() - call.wait_ms)
        self._breaker.answered(sent_ms, answered_ms)
        if call.writes:
            self._write_breaker.answered(sent_ms, answered_ms)
        call.after(result, self.keeps)
        return result

    def refused(self, call: Call[T]) -> T:
        """The result of a call that was not sent because the breaker is open."""
        result = call.failed(BREAKER_OPEN, "")
        call.after(result, self.keeps)
        if self.config.raise_errors:
            raise client_error(CallFailed(BREAKER_OPEN, "the calls before failed"))
        return result

    def came_to_nothing(self, call: Call[T], failed: CallFailed, sent_ms: int) -> T:
        """The result of a call that failed; raises it as ClientError where that was asked for."""
        self._learn(call, failed, sent_ms)
        if failed.failure != CLOSED:
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

    def _learn(self, call: Call[Any], failed: CallFailed, sent_ms: int) -> None:
        now = now_ms()
        if failed.status == 503 and failed.failure.removeprefix(REJECTED) in _WRITES_ONLY:
            if failed.retry_after_ms:
                self._write_breaker.hold(now, self._bounded(failed.retry_after_ms))
            else:
                self._write_breaker.failed(sent_ms, now, failed.failure)
            self._breaker.answered(sent_ms, now)
        elif failed.failure == _LEASES_FULL:
            self._breaker.answered(sent_ms, now)  # lookups without a lease go on
        elif failed.status == 503 and failed.retry_after_ms:
            self._breaker.hold(now, self._bounded(failed.retry_after_ms))
        elif failed.failure in _UNHEALTHY or failed.status >= 500:
            self._breaker.failed(sent_ms, now, failed.failure)
        elif failed.status:
            self._breaker.answered(sent_ms, max(sent_ms, now - call.wait_ms))
        else:
            self._breaker.abandoned()  # it was never sent
            self._write_breaker.abandoned()

    def _bounded(self, retry_after_ms: int) -> int:
        return min(retry_after_ms, self.config.retry_after_ms_max)

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

    def cancelled(self) -> None:
        """A call was cancelled by its caller."""
        self._breaker.abandoned()
        self._write_breaker.abandoned()

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
