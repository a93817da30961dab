"""The connector's side in a worker process: moves pages between the engine's memory and the storages.

Every method belongs to the engine's thread. In each step they are called in this order:

    preempted(orders)      before anything of the step touches the engine's memory
    start_loads(orders)    before the forward when loads of the step are synchronous, else after it
    submit_saves(orders)   after the forward
    take_results(finished), load_errors(), report()

What waits for the service or a storage are threads of our own; the engine waits for copies of pages that its
next step would overwrite, and for synchronous loads, `load_wait_ms` at the longest.
"""

import time
from dataclasses import dataclass, field

from dataplane.pages import Pages
from engine_adapters.vllm.audit import Audit
from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.loader import ABORTED, LATE, SUPERSEDED, Load, Loader
from engine_adapters.vllm.mover import Mover
from engine_adapters.vllm.orders import NO_BLOCK, Identity, Loaded, StepOrders, WorkerReport
from engine_adapters.vllm.rank import RankParts
from engine_adapters.vllm.saver import Saver
from engine_adapters.vllm.settings import Settings

__all__ = ["COUNTERS", "RankParts", "Results", "WorkerSide"]

COUNTERS = {
    "read_pages": "pages read from storages into the engine",
    "read_bytes": "bytes of these",
    "read_us": "time spent reading",
    "read_refused_*": "pages that could not be read, by reason",
    "sync_loads_failed": "synchronous loads that failed, whose step was computed from garbage and again",
    "sync_wait_us": "how long steps waited for synchronous loads",
    "sync_wait_us_max": "the longest such wait",
    "loads_late": "loads given up after load_wait_ms",
    "copied_pages": "pages copied out of the engine's memory",
    "copied_bytes": "bytes of these",
    "copy_us": "time spent copying them",
    "urgent_wait_us": "how long steps waited for copies of pages that they overwrite",
    "save_queue_blocks_max": "the most blocks that waited to be copied",
    "save_buffer_bytes_max": "the most host memory that was in use for saves",
    "written_pages": "pages written to storages",
    "written_bytes": "bytes of these",
    "write_us": "time spent writing them",
    "write_failures_*": "pages that could not be written, by reason",
    "pending_blocks": "blocks that this rank has written, and that serve once the others have",
    "sessions": "write sessions asked for",
    "sessions_aborted": "write sessions given up",
    "start_failures": "write sessions that the service did not open",
    "finish_failures": "finishes that failed: what was written does not serve",
    "refused_*": "blocks that the service would not have, by reason",
}
"""What a worker counts. A `*` stands for a word that tells them apart; names in `_max` are the largest value
seen, the others add up."""


@dataclass
class Results:
    """What ended since the last time. `sent`: requests that were awaited and whose blocks are the engine's
    again. `received`: requests whose asynchronous load is over; `failed`: those of them of whose blocks none
    counts."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerSide:
    """One rank's. Nothing here raises for what the service or a storage does."""

    def __init__(
        self, settings: Settings, rank: RankParts, pages: Pages, mover: Mover, *, audit: Audit | None = None
    ) -> None:
        """Raises ValueError when the settings do not go with this model, OSError when the audit file cannot
        be opened."""
        if len(rank.parts) != len(pages.groups):
            raise ValueError(f"{len(rank.parts)} parts for {len(pages.groups)} KV cache groups")
        if settings.load == "sync" and not rank.by_block:
            raise ValueError(
                "kv_connector_extra_config.load: 'sync' is for models of one KV cache group without a "
                "sliding window; set 'async'"
            )
        self._rank = rank
        self._pages = pages
        self._mover = mover
        self._counts = Counts()
        self._audit = audit or Audit(settings.audit_path)
        self._identity: Identity | None = None
        self._loader = Loader(settings, rank, pages, mover, self._counts, self._audit)
        self._saver = Saver(settings, rank, pages, mover, self._counts, self._audit)
        self._awaited: set[str] = set()
        self._results = Results()
        self._errors: set[int] = set()
        self._loaded: list[Loaded] = []
        self._failures = self._told_failures = 0

    def preempted(self, orders: StepOrders) -> None:
        """A step begins: blocks that it takes back are not copied any more once this returns, and those that
        had to be copied before are."""
        self._act_as(orders.identity)
        if orders.preempted:
            self._saver.cancel(orders.preempted)
        self._saver.copy_urgent()

    def start_loads(self, orders: StepOrders) -> None:
        """Begin the loads. Synchronous ones are over when this returns."""
        if not orders.loads:
            return
        self._pages.fence()
        began_ns = time.monotonic_ns()
        sync = []
        for order in orders.loads:
            load = self._loader.start(order)
            if order.sync:
                sync.append(load)
        if sync:
            self._loader.wait(sync)
            self._collect()
            self._pages.settle()
            waited_us = (time.monotonic_ns() - began_ns) // 1_000
            self._counts.add("sync_wait_us", waited_us)
            self._counts.top("sync_wait_us_max", waited_us)

    def submit_saves(self, orders: StepOrders) -> None:
        """The forward was asked for: hand over what is to be saved of it."""
        self._act_as(orders.identity)
        self._awaited.update(orders.awaited)
        if orders.saves:
            self._pages.fence()
            tainted = orders.failures_seen.get(self._rank.rank, 0) < self._failures
            self._saver.submit(orders.saves, tainted=tainted)

    def take_results(self, finished: set[str]) -> Results:
        """What ended since the last call. `finished` are requests that have ended: their loads are given up,
        and are reported like any other, since the engine holds their blocks until then."""
        self._loader.expire()
        if finished:
            self._loader.abort(finished)
        self._collect()
        results, self._results = self._results, Results()
        results.sent = {request for request in self._awaited if not self._saver.copying(request)}
        self._awaited -= results.sent
        if results.received:
            self._pages.settle()
        return results

    def load_errors(self) -> set[int]:
        """Engine blocks that were to be loaded and are not, since the last call. Only models of one group
        without a window are told so; for others see `Results.failed`."""
        errors, self._errors = self._errors, set()
        return errors

    def report(self) -> WorkerReport | None:
        """What the scheduler's side is to know; None when that is nothing."""
        gathered, saved = self._saver.take()
        loaded, self._loaded = self._loaded, []
        failures = {}
        if self._failures != self._told_failures:
            failures[self._rank.rank] = self._told_failures = self._failures
        report = WorkerReport(gathered, loaded, saved, failures)
        return None if report.empty else report

    def counters(self) -> dict[str, int]:
        """What was counted since the last call; see COUNTERS."""
        return self._counts.drain()

    def shutdown(self) -> None:
        """End within about two seconds: loads are given up, what was not copied is dropped, what is being
        written is finished or given up."""
        self._loader.stop()
        self._saver.stop()
        self._mover.hang_up()
        self._mover.close()
        self._audit.close()

    # ---------------------------------------------------------------------------------------------- within

    def _act_as(self, identity: Identity | None) -> None:
        if identity == self._identity:
            return
        self._identity = identity
        self._mover.act_as(identity)
        if identity is not None:
            self._audit.act_as(identity.engine, identity.incarnation)
        self._saver.act_as(identity)

    def _collect(self) -> None:
        """Take in the loads that are over."""
        for load in self._loader.take():
            failed = load.blocks < load.asked
            if failed and load.reason == LATE:
                self._counts.add("loads_late")
            if not load.order.sync and load.reason != SUPERSEDED:
                self._results.received.add(load.order.request)
            if failed:
                self._tell_failure(load)
            self._loaded.append(load.loaded())

    def _tell_failure(self, load: Load) -> None:
        if load.order.sync:
            self._failures += 1
            self._counts.add("sync_loads_failed")
        if load.reason in (ABORTED, SUPERSEDED):
            return  # nobody will compute what is missing
        if not self._rank.by_block:
            # The request is computed from its first token: nothing of it counts as loaded.
            load.blocks = 0
            self._results.failed.add(load.order.request)
        else:
            missing = load.order.blocks[0][load.blocks :]
            self._errors.update(block for block in missing if block != NO_BLOCK)
