"""One call on its way through the replicas: whom to ask, for how long, and whom next."""

from typing import Generic, Protocol, TypeVar

from .calls import Sending
from .endpoints import Endpoint, Endpoints, Route
from .errors import (
    BREAKER_OPEN,
    CONNECTION_LOST,
    NOT_LEADER,
    NOT_READY,
    OVERLOADED,
    PROTOCOL,
    REFUSED_CONNECTION,
    TIMEOUT,
    UNHEALTHY,
    CallFailed,
)
from .results import now_ms

X = TypeVar("X")

_NOT_DONE = frozenset({REFUSED_CONNECTION, OVERLOADED})
_MAYBE_DONE = frozenset({TIMEOUT, CONNECTION_LOST, PROTOCOL, NOT_READY})
"""After these the replica may have done what was asked: only what may be repeated is asked again."""

_MOVING = frozenset({NOT_LEADER, NOT_READY})


class Asked(Protocol):
    """What a trip has to know of a call."""

    @property
    def route(self) -> Route:
        """Whose leader has to answer."""

    @property
    def repeatable(self) -> bool:
        """Whether it may be asked again where it is not known whether it was done."""

    @property
    def wait_ms(self) -> int:
        """How long the service may wait on purpose, besides the deadline."""


class Trip(Generic[X]):
    """One call within one deadline. Ask `endpoint` with `request()` until `until_ms`; then tell how it
    went with `arrived` or `go_on`, or `abandon`.

    A replica that may hang gets only a part of the time while there are others to ask. No replica is
    asked twice, unless all are well and none leads: that is so while leadership moves, and is waited for.
    """

    __slots__ = (
        "_asked",
        "_cause",
        "_deadline_ms",
        "_endpoints",
        "_rounds",
        "_sending",
        "_straight",
        "_what",
        "asked_ms",
        "endpoint",
        "heard",
        "until_ms",
    )

    def __init__(
        self, endpoints: Endpoints[X], what: Asked, sending: Sending, sent_ms: int, timeout_ms: int
    ) -> None:
        """Raises CallFailed(breaker_open) when no replica may be asked now."""
        self._endpoints = endpoints
        self._what = what
        self._sending = sending
        self._straight = sending.straight
        self._asked: tuple[Endpoint[X], ...] = ()
        self._cause: CallFailed | None = None
        self._rounds = 0
        self.heard = False
        """Whether a replica answered, whatever it said: then the service is there."""
        self.asked_ms = sent_ms
        self.until_ms = self._deadline_ms = sent_ms + timeout_ms + what.wait_ms
        if endpoints.several:
            first, straight = endpoints.first(what.route, sent_ms)
            if first is None:
                raise CallFailed(BREAKER_OPEN, "no replica answered before")
            self._straight &= straight
            self._go(first, sent_ms)
        else:
            self.endpoint = endpoints.only

    def request(self) -> bytes:
        """What to send to `endpoint`."""
        sending, heads = self._sending, self.endpoint.heads
        if self._straight:
            return heads.request(sending.method, sending.path, sending.body, sending.traceparent)
        return heads.forwarded(
            sending.method, sending.path, sending.body, sending.media, sending.accept, sending.traceparent
        )

    @property
    def route(self) -> Route:
        """What was asked about."""
        return self._what.route

    def arrived(self) -> None:
        """The replica did what was asked."""
        self._endpoints.answered(self._what.route, self.endpoint, self._straight)
        self.endpoint.breaker.answered(self.asked_ms, self.asked_ms)

    def abandon(self) -> None:
        """The caller waits no longer."""
        self.endpoint.breaker.abandoned()

    def go_on(self, failed: CallFailed) -> int:
        """The replica did not do it: go on to the next, after a pause of so many ms. Raises the failure of
        the call when there is none, or none in time."""
        here, now = self.endpoint, now_ms()
        self.heard |= bool(failed.status) and failed.failure not in UNHEALTHY
        if self._endpoints.several:
            self._judge(failed, now)
        elif failed.failure != NOT_LEADER:
            raise failed
        self._asked = (*self._asked, here)
        if failed.failure in UNHEALTHY and self._cause is None:
            self._cause = failed
        following = self._following(failed, now) if now < self._deadline_ms else None
        if following is not None:
            self._go(following, now)
            return 0
        if self._cause is None and failed.failure in _MOVING:
            return self._once_more(failed, now)
        raise self._cause or failed

    def _once_more(self, failed: CallFailed, now: int) -> int:
        """Nobody leads, and all are well: ask all again in a moment."""
        pause_ms = self._endpoints.moving_pause_ms(self._what.route, self._rounds, now)
        then = now + pause_ms
        if not pause_ms or then >= self._deadline_ms:
            raise failed
        self._rounds += 1
        self._asked = ()
        following, straight = self._endpoints.first(self._what.route, then)
        if following is None:
            raise failed
        self._straight = self._sending.straight and straight
        self._go(following, then)
        return pause_ms

    def _following(self, failed: CallFailed, now: int) -> Endpoint[X] | None:
        """Whom to ask next."""
        endpoints, failure = self._endpoints, failed.failure
        if failure == NOT_LEADER:
            return self._named(failed, now)
        if failure == OVERLOADED and endpoints.toward(self._what.route) is self.endpoint:
            return None  # the others could only name it
        if failure in _NOT_DONE or (failure in _MAYBE_DONE and self._what.repeatable):
            return endpoints.other(self._asked, now)
        return None

    def _named(self, failed: CallFailed, now: int) -> Endpoint[X] | None:
        """The replica that is said to lead, unless it failed before."""
        endpoints = self._endpoints
        leader, news = endpoints.told(self._what.route, failed.shard, failed.leader)
        if leader is not None and leader not in self._asked:
            if news or not leader.breaker.blocked(now):
                return leader
            if self._straight and not leader.reached and not leader.configured:
                self._straight = False  # its address is not for us, so the others must pass it on
                return self.endpoint
            self._cause = self._cause or failed  # it leads and does not answer: that is no move
        return endpoints.other(self._asked, now)

    def _go(self, endpoint: Endpoint[X], now: int) -> None:
        self.endpoint = endpoint
        self.asked_ms = now
        self.until_ms = self._deadline_ms
        if self._what.repeatable and self._endpoints.has_other((*self._asked, endpoint), now):
            self.until_ms -= (self._deadline_ms - now) // 2

    def _judge(self, failed: CallFailed, now: int) -> None:
        """What this failure says of the replica."""
        here = self.endpoint
        if failed.failure in UNHEALTHY:
            self._endpoints.failed(here, self.asked_ms, now, failed.failure)
        elif failed.status:
            here.reached = True
            here.breaker.answered(self.asked_ms, self.asked_ms)
        else:
            here.breaker.abandoned()
