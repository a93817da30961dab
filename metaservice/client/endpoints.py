"""The replicas of the service as a client knows them: where they are, how they do, and who leads what.

Nothing here is a promise: a leader may be another by now. What was learned only says whom to ask first.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Generic, TypeVar

from .breaker import Backoff, Breaker, new_random
from .config import ClientConfig, address_of
from .http import Heads
from .resolve import Resolver

X = TypeVar("X")

Route = int | str
"""What a call is about: a shard, or an instance, whose shard a client learns."""

CATALOGUE = 0
"""The shard of all that is registered."""

ENDPOINTS_MAX = 32
"""Replicas beyond those configured are forgotten, the oldest first: their addresses may change for ever."""
ROUTES_MAX = 4_096
_FAILURES_MAX = 2
"""A replica that failed so often in a row is gone round: each failure costs a part of somebody's deadline."""
_PAUSE_MS_MAX = 1_000
"""It is tried again this soon, for it may lead again."""
_NEVER_SLOW_MS = 1 << 62
PATIENCE_MS = 600
"""When leadership moves on purpose, nobody leads for a moment. Calls wait for that, this long after the first
of them found nobody; after that it is an outage, and they fail at once."""
_OUTAGE_MS_MAX = 10_000
"""Nobody was found so long ago that it says nothing about now."""
_MOVING_PAUSE_MS = 20


class Endpoint(Generic[X]):
    """One replica. `reached`: it answered once, so an address that it has from others is right for us."""

    __slots__ = ("breaker", "configured", "heads", "reached", "resolver", "transport", "url")

    def __init__(
        self, url: str, config: ClientConfig, make: Callable[[ClientConfig, Resolver], X], configured: bool
    ) -> None:
        host, port, base_path = address_of(url)
        self.url = url
        self.configured = configured
        self.reached = False
        self.heads = Heads(host, port, base_path)
        self.resolver = Resolver(host, port)
        self.transport = make(config, self.resolver)
        pause_ms_min = min(config.breaker_pause_ms_min, _PAUSE_MS_MAX)
        pause_ms_max = min(config.breaker_pause_ms_max, _PAUSE_MS_MAX)
        self.breaker = Breaker(
            url,
            failures_max=min(config.breaker_failures, _FAILURES_MAX),
            slow_ms=_NEVER_SLOW_MS,
            probe_ms=config.timeout_ms,
            backoff=Backoff(pause_ms_min, pause_ms_max, new_random()),
        )


class Endpoints(Generic[X]):
    """All that a client knows of the service's replicas, each with a transport of its own. Thread safe:
    changes are single operations on dicts and attributes, additions are made under a lock."""

    def __init__(
        self,
        config: ClientConfig,
        make: Callable[[ClientConfig, Resolver], X],
        retire: Callable[[X], None],
    ) -> None:
        """`make` gives the transport to a replica, `retire` ends one that is not needed any more."""
        self._config = config
        self._make = make
        self._retire = retire
        first = [Endpoint(url, config, make, configured=True) for url in config.urls]
        self._random = new_random()
        self._random.shuffle(first)  # else all clients would ask the first one named
        self.all: Sequence[Endpoint[X]] = tuple(first)
        self.several = len(first) > 1
        """Whether there is more than one: with one alone there is nothing to choose."""
        self.only = self._current = first[0]
        self._leaders: dict[Route, Endpoint[X]] = {}
        self._homes: dict[Route, Route] = {}
        self._held_until_ms: dict[tuple[Route, bool], int] = {}
        self._moving_since_ms: dict[Route, int] = {}
        self._lock = Lock()

    def after_fork(self) -> None:
        """Another process: nothing known of the replicas' health, no lock held."""
        self._lock = Lock()
        self._random = new_random()
        for endpoint in self.all:
            endpoint.breaker.after_fork()

    # -- whom to ask

    def toward(self, route: Route) -> Endpoint[X]:
        """Who leads there as far as known, else who answered last."""
        return self._leaders.get(self._homes.get(route, route)) or self._current

    def first(self, route: Route, now_ms: int) -> tuple[Endpoint[X] | None, bool]:
        """Whom to ask first, and whether straight: a leader that cannot be reached from here is asked
        through another. None when nobody may be asked now."""
        leader = self.toward(route)
        if not leader.breaker.blocked(now_ms):
            return leader, True
        return self.other((leader,), now_ms), leader.reached or leader.configured

    def other(self, asked: Sequence[Endpoint[X]], now_ms: int) -> Endpoint[X] | None:
        """One that was not asked and may be asked now."""
        for endpoint in self.all:
            if endpoint not in asked and not endpoint.breaker.blocked(now_ms):
                return endpoint
        return None

    def has_other(self, asked: Sequence[Endpoint[X]], now_ms: int) -> bool:
        """Whether there is such a one."""
        for endpoint in self.all:  # noqa: SIM110 - a generator would cost every call more than the rest
            if endpoint not in asked and not endpoint.breaker.shut(now_ms):
                return True
        return False

    # -- what was learned

    def answered(self, route: Route, endpoint: Endpoint[X], straight: bool) -> None:
        """`endpoint` did what was asked of it about `route`."""
        endpoint.reached = True
        self._current = endpoint
        if straight:
            route = self._homes.get(route, route)
            if self._leaders.get(route) is not endpoint:
                self._remember(route, endpoint)
            if self._held_until_ms:
                self._held_until_ms.pop((route, False), None)
                self._held_until_ms.pop((route, True), None)
            if self._moving_since_ms:
                self._moving_since_ms.pop(route, None)

    def failed(self, endpoint: Endpoint[X], asked_ms: int, now_ms: int, why: str) -> None:
        """`endpoint` gave no answer that could be used."""
        endpoint.breaker.failed(asked_ms, now_ms, why)
        if self._current is endpoint:
            others = (one for one in self.all if one is not endpoint and not one.breaker.shut(now_ms))
            self._current = next(others, endpoint)

    def _remember(self, route: Route, endpoint: Endpoint[X]) -> None:
        if len(self._leaders) >= ROUTES_MAX:
            self._leaders.clear()
        self._leaders[route] = endpoint

    def told(self, route: Route, shard: int, url: str) -> tuple[Endpoint[X] | None, bool]:
        """A replica named the leader of `shard`, to which `route` belongs: that leader, and whether this
        is news. None when it is nobody that could be asked."""
        endpoint = self._known(url.strip().rstrip("/"))
        if shard >= 0 and route != shard:
            if len(self._homes) >= ROUTES_MAX:
                self._homes.clear()
            self._homes[route] = shard
            self._leaders.pop(route, None)
        if endpoint is None:
            return None, False
        route = self._homes.get(route, route)
        if self._leaders.get(route) is endpoint:
            return endpoint, False
        self._remember(route, endpoint)
        return endpoint, True

    def _known(self, url: str) -> Endpoint[X] | None:
        """The replica at this URL, known from now on; None when that is no URL of ours."""
        for endpoint in self.all:
            if endpoint.url == url:
                return endpoint
        try:
            added = Endpoint(url, self._config, self._make, configured=False)
        except ValueError:
            return None
        with self._lock:
            for endpoint in self.all:
                if endpoint.url == url:  # another thread was told, too
                    self._retire(added.transport)
                    return endpoint
            learned = [endpoint for endpoint in self.all if not endpoint.configured]
            gone = learned[0] if len(learned) >= ENDPOINTS_MAX else None
            self.all = (*(endpoint for endpoint in self.all if endpoint is not gone), added)
            self.several = True
        if gone is not None:
            self._forget(gone)
        return added

    def _forget(self, gone: Endpoint[X]) -> None:
        for route, endpoint in list(self._leaders.items()):
            if endpoint is gone:
                self._leaders.pop(route, None)
        if self._current is gone:
            self._current = self.all[0]
        self._retire(gone.transport)

    # -- pauses

    def moving_pause_ms(self, route: Route, rounds: int, now_ms: int) -> int:
        """How long a call that found nobody to lead, `rounds` times before, is to wait before it asks again;
        0: no longer."""
        route = self._homes.get(route, route)
        since_ms = self._moving_since_ms.get(route, 0)
        if now_ms - since_ms > _OUTAGE_MS_MAX:
            if len(self._moving_since_ms) >= ROUTES_MAX:
                self._moving_since_ms.clear()
            since_ms = self._moving_since_ms[route] = now_ms
        pause_ms = round((_MOVING_PAUSE_MS << min(rounds, 3)) * self._random.uniform(0.5, 1.0))
        return pause_ms if now_ms + pause_ms < since_ms + PATIENCE_MS else 0

    def hold(self, route: Route, writes: bool, until_ms: int) -> None:
        """No calls about `route` before `until_ms`; with `writes`, only no writes."""
        if len(self._held_until_ms) >= ROUTES_MAX:
            self._held_until_ms.clear()
        self._held_until_ms[self._homes.get(route, route), writes] = until_ms

    def held(self, route: Route, writes: bool, now_ms: int) -> bool:
        """Whether calls about `route`, or writes, are to wait."""
        held = self._held_until_ms
        if not held:
            return False
        route = self._homes.get(route, route)
        return now_ms < held.get((route, False), 0) or (writes and now_ms < held.get((route, True), 0))
