"""The part of a client that routers use, and engines that tell what they hold."""

from collections.abc import Sequence

from metaservice.wire.schemas_events import RemovedItem, StoredItem

from .face import AsyncFace, Face
from .router_calls import AskRoute, Events, Report, Restate
from .router_results import EventsResult, ReportResult, RestateResult, RouteResult


class Routers(Face):
    """Router queries, reports and streams of cache events."""

    def route(
        self,
        instance: str,
        keys: Sequence[bytes] | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        lora: str = "",
        salt: str = "",
        top_k: int = 0,
        staleness_ms_max: int | None = None,
        timeout_ms: int | None = None,
    ) -> RouteResult:
        """Which engines hold how much of this prompt, by tier, and how much of it is in the pool. Exactly one
        of `keys` (root first) and `token_ids` (the whole prompt). `top_k`: the best so many engines (0: all).
        Answered by any replica from what it has, but not from a state older than `staleness_ms_max`.
        """
        call = AskRoute(instance, keys, token_ids, lora, salt, top_k, staleness_ms_max)
        return self._run(call, timeout_ms)

    def report_cache(
        self,
        number: int,
        base: int | None,
        *,
        stored: Sequence[StoredItem] = (),
        removed: Sequence[RemovedItem] = (),
        cleared: bool = False,
        timeout_ms: int | None = None,
    ) -> ReportResult:
        """Tell one replica what this engine holds, as `ReportRequest` describes it. Each replica knows only
        what it is told itself: `CacheReporter` tells all of them.
        """
        return self._run(Report(number, base, stored, removed, cleared), timeout_ms)

    def restate(self, instance: str, *, timeout_ms: int | None = None) -> RestateResult:
        """Tell routers again of all that is announced of an instance."""
        return self._run(Restate(instance), timeout_ms)

    def events(self, instance: str = "", *, timeout_ms: int | None = None) -> EventsResult:
        """The streams of cache events (of `instance`, or all) as one replica serves them: that which is known
        to lead the instance's shard, if any; `live` says of each stream whether it does."""
        return self._run(Events(instance), timeout_ms)


class AsyncRouters(AsyncFace):
    """Router queries, reports and streams of cache events, awaited."""

    async def route(
        self,
        instance: str,
        keys: Sequence[bytes] | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        lora: str = "",
        salt: str = "",
        top_k: int = 0,
        staleness_ms_max: int | None = None,
        timeout_ms: int | None = None,
    ) -> RouteResult:
        """Which engines hold how much of this prompt, by tier, and how much of it is in the pool. Exactly one
        of `keys` (root first) and `token_ids` (the whole prompt). `top_k`: the best so many engines (0: all).
        Answered by any replica from what it has, but not from a state older than `staleness_ms_max`.
        """
        call = AskRoute(instance, keys, token_ids, lora, salt, top_k, staleness_ms_max)
        return await self._run(call, timeout_ms)

    async def report_cache(
        self,
        number: int,
        base: int | None,
        *,
        stored: Sequence[StoredItem] = (),
        removed: Sequence[RemovedItem] = (),
        cleared: bool = False,
        timeout_ms: int | None = None,
    ) -> ReportResult:
        """Tell one replica what this engine holds, as `ReportRequest` describes it. Each replica knows only
        what it is told itself: `CacheReporter` tells all of them.
        """
        return await self._run(Report(number, base, stored, removed, cleared), timeout_ms)

    async def restate(self, instance: str, *, timeout_ms: int | None = None) -> RestateResult:
        """Tell routers again of all that is announced of an instance."""
        return await self._run(Restate(instance), timeout_ms)

    async def events(self, instance: str = "", *, timeout_ms: int | None = None) -> EventsResult:
        """The streams of cache events (of `instance`, or all) as one replica serves them: that which is known
        to lead the instance's shard, if any; `live` says of each stream whether it does."""
        return await self._run(Events(instance), timeout_ms)
