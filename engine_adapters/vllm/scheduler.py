"""The connector's side in vLLM's scheduler: decides, step by step, what is loaded and what is saved.

Every method is called from the scheduler's thread and returns at once: it reads what the broker has heard,
and leaves the broker what to ask. Asking is free of side effects however often the scheduler does it: a
request has one lookup and one lease (another pair after a preemption), and what the lookup answered is what
is loaded.
"""

import time
from collections.abc import Collection

from engine_adapters.vllm.broker import Answer, Broker
from engine_adapters.vllm.known import KnownKeys
from engine_adapters.vllm.ordering import NULL_BLOCK, Ordering, Shape, Step
from engine_adapters.vllm.orders import NO_BLOCK, Loaded, LoadOrder, StepOrders, WorkerReport
from engine_adapters.vllm.outcomes import TAINTED, Outcomes
from engine_adapters.vllm.requests import EngineRequest, Loading, Phase, Tracked
from engine_adapters.vllm.settings import Settings
from engine_adapters.vllm.spans import Spans
from engine_adapters.vllm.sparse import sparse_of
from metaservice.client import LookupResult, Places

LOOKUPS_MAX = 3
"""Lookups of a request, all in all, beyond which a lost lease is a miss."""
_NS_PER_MS = 1_000_000
_BEFORE = "-"
"""No instance's name: of a request whose blocks were computed before the caches were reset."""


class SchedulerSide:
    """One engine's. Nothing here waits, and nothing raises for what the service or a worker does."""

    def __init__(
        self, settings: Settings, shape: Shape, broker: Broker, spans: Spans, *, events: bool = False
    ) -> None:
        """`events`: remember the tokens of what is saved, for KV cache events."""
        self._settings = settings
        self._shape = shape
        self._broker = broker
        self._spans = spans
        self._tracked: dict[str, Tracked] = {}
        self._known = KnownKeys()
        self.outcomes = Outcomes(shape.block_size_tokens, shape.ranks, broker, spans, self._known, events)
        self._ordering = Ordering(
            shape, broker, spans, self._known, self.outcomes, events=events, publish=settings.publish
        )
        self._loads: list[LoadOrder] = []
        self._sync_firsts: list[tuple[int, bytes]] = []
        self._awaited: list[str] = []
        self._failures: dict[int, int] = {}
        self._tables: list[list[int]] = []
        self._wait_ns = settings.lookup_wait_ms * _NS_PER_MS
        self._now_ns = 0
        """When the last step was built: near enough to say that a wait is not over."""
        self._suspended = False
        self._count = self.outcomes.counts.add

    # ------------------------------------------------------------------------------------------- lookups

    def new_request(self, request: EngineRequest) -> None:
        """A request arrived: its lookup goes out before the scheduler first thinks of it."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and tracked.request is request:
            return
        traceparent = self._spans.begin(request.request_id, request.num_tokens, request.trace_headers)
        tracked = self._tracked[request.request_id] = Tracked(request, traceparent)
        self._count("requests")
        self._begin(tracked)

    def matched(self, request: EngineRequest, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind `computed_tokens` can be loaded, in whole blocks, and whether beside the
        steps; (None, False): not known yet, to be asked again. The scheduler may ask any number of times."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            self.new_request(request)
            tracked = self._tracked[request.request_id]
        elif (
            tracked.phase is Phase.asked
            and self._now_ns - tracked.asked_ns < self._wait_ns
            and self._broker.answer(tracked.ticket) is None
        ):
            return None, False  # the short way: hundreds may be asked about in each step
        if tracked.phase is Phase.fresh:
            self._begin(tracked)
        if tracked.phase in (Phase.unplaced, Phase.asked) and not self._heard(tracked):
            return None, False
        tracked.local_blocks = computed_tokens // self._shape.block_size_tokens
        if self._stands_on_a_load(request, tracked.local_blocks):
            return None, False
        if tracked.phase is not Phase.answered:
            return 0, False
        assert tracked.answer is not None
        if not self._broker.held(tracked.ticket):
            return (None if self._asks_again(tracked) else 0), False
        if self._broker.switch == "bypass" or tracked.instance != self._broker.instance_of(tracked.adapter):
            self._settle(tracked)
            return 0, False
        blocks = min(tracked.answer.hits, self._loadable(request)) - tracked.local_blocks
        if blocks < self._settings.min_load_blocks:
            return 0, False
        return blocks * self._shape.block_size_tokens, self._settings.load == "async"

    def _stands_on_a_load(self, request: EngineRequest, local_blocks: int) -> bool:
        """Whether what vLLM takes for computed is only loaded in the step that is being planned. Should that
        load fail, vLLM lets the first of those who share the blocks compute them again, and the others go on
        with garbage when it ends before it has. So they come a step later, when it is known."""
        return any(
            first < local_blocks and request.block_hashes[first] == key for first, key in self._sync_firsts
        )

    def _asks_again(self, tracked: Tracked) -> bool:
        """The lease is lost, as with the leader that gave it: what it covered may be going. Whether another
        lookup is under way."""
        self._settle(tracked)
        if tracked.lookups >= LOOKUPS_MAX:
            return False
        tracked.asked_ns = 0
        self._begin(tracked)
        return tracked.phase is Phase.asked

    def _loadable(self, request: EngineRequest) -> int:
        """Blocks that a load may cover: whole ones, and one token is left to compute."""
        return min((request.num_tokens - 1) // self._shape.block_size_tokens, len(request.block_hashes))

    def _begin(self, tracked: Tracked) -> None:
        """Send the lookup out, when there is something to ask and somebody to ask it."""
        if self._suspended or self._broker.switch == "bypass" or not self._loadable(tracked.request):
            tracked.phase = Phase.settled
            return
        instance = self._broker.instance_of(tracked.adapter)
        if instance is None:
            # The adapter's files are being read; an engine that is not registered has no cache.
            tracked.phase = Phase.unplaced if tracked.adapter is not None else Phase.settled
            return
        tracked.instance = instance
        tracked.lookups += 1
        tracked.ticket = f"{tracked.request.request_id}#{tracked.lookups}"
        tracked.phase = Phase.asked
        keys = list(tracked.request.block_hashes[: self._loadable(tracked.request)])
        tracked.traceparent = self._spans.open(tracked.request.request_id, "ucm.lookup")
        self._broker.ask(tracked.ticket, instance, keys, tracked.traceparent)
        self._count("lookups")

    def _heard(self, tracked: Tracked) -> bool:
        """Whether the wait for the lookup is over: it was answered, or it took too long and is a miss."""
        if tracked.phase is Phase.unplaced:
            self._begin(tracked)
        answer = self._broker.answer(tracked.ticket) if tracked.phase is Phase.asked else None
        if answer is not None:
            self._answered(tracked, answer)
            return True
        if tracked.phase is Phase.settled:
            return True
        now_ns = time.monotonic_ns()
        tracked.asked_ns = tracked.asked_ns or now_ns
        if now_ns - tracked.asked_ns < self._wait_ns:
            return False
        self._count("lookups_late")
        self._settle(tracked)
        return True

    def _answered(self, tracked: Tracked, answer: Answer) -> None:
        self._spans.close(
            tracked.request.request_id,
            "ucm.lookup",
            {"ucm.hits": answer.hits, "ucm.cut": answer.cut, "ucm.failure": answer.failure or ""},
            answer.began_ns,
            answer.ended_ns,
            tracked.traceparent,
        )
        self._count("asked_blocks", self._loadable(tracked.request))
        self._count("found_blocks", answer.hits)
        if answer.cut == "miss":
            missed = tracked.request.block_hashes[answer.hits : self._loadable(tracked.request)]
            self._known.missed(tracked.instance, missed, answer.began_ns)
        tracked.stored = answer.hits
        if answer.hits:
            tracked.answer, tracked.phase = answer, Phase.answered
            tracked.tier = answer.tier
        else:
            self._settle(tracked)

    def _settle(self, tracked: Tracked) -> None:
        """Nothing will be loaded for it (any more): whatever the service holds for it is let go."""
        if tracked.ticket:
            self._broker.drop(tracked.ticket)
        tracked.ticket, tracked.answer, tracked.phase = "", None, Phase.settled

    # --------------------------------------------------------------------------------------------- loads

    def allocated(self, request: EngineRequest, blocks: tuple[list[int], ...], external_tokens: int) -> None:
        """The scheduler made room: `external_tokens` are to be loaded, behind the local ones. It calls again,
        with 0, when what was loaded asynchronously is in."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.phase is Phase.loading:
            return
        rows = external_tokens // self._shape.block_size_tokens
        assert external_tokens == rows * self._shape.block_size_tokens, "loads are of whole blocks"
        if not rows:
            self._settle(tracked)
            return
        assert tracked.phase is Phase.answered and tracked.answer is not None, (
            "a load that was never promised"
        )
        first = tracked.local_blocks
        columns = tuple(
            tuple(NO_BLOCK if block == NULL_BLOCK else block for block in column[first : first + rows])
            for column in blocks
        )
        traceparent = self._spans.open(request.request_id, "ucm.load")
        self._loads.append(
            LoadOrder(
                request.request_id,
                tracked.ticket,
                rows_of(tracked.answer.found, first, first + rows),
                columns,
                self._settings.load == "sync",
                traceparent,
            )
        )
        if self._loads[-1].sync:
            self._sync_firsts.append((first, self._loads[-1].places.keys[0]))
        self.outcomes.loads[tracked.ticket] = Loading(
            request.request_id,
            tracked.instance,
            rows,
            blocks=rows,
            traceparent=traceparent,
            leased=tracked.answer.found.lease is not None,
        )
        tracked.answer, tracked.phase = None, Phase.loading

    def tier(self, request: str) -> str:
        """The kind of storage that a request's load comes from; empty without one."""
        tracked = self._tracked.get(request)
        return "" if tracked is None else tracked.tier

    # --------------------------------------------------------------------------------------------- saves

    def build(self, step: Step) -> StepOrders:
        """The orders of this step."""
        self._now_ns = time.monotonic_ns()
        for name in step.preempted:
            self._preempted(name)
        saves = []
        identity = self._broker.identity
        may_save = self._settings.save and not self._suspended and self._broker.switch == "normal"
        if may_save and identity is not None:
            for name, tokens in step.scheduled.items():
                tracked = self._tracked.get(name)
                order = None if tracked is None else self._ordering.order(tracked, tokens, step)
                if order is not None:
                    saves.append(order)
        for name in step.scheduled:
            self._computed(name)
        self._tables = []
        if any(order.sync for order in self._loads):
            self._tables = [step.blocks_of(name)[0] for name in step.scheduled]
        loads, self._loads = self._loads, []
        self._sync_firsts = []
        awaited, self._awaited = self._awaited, []
        return StepOrders(
            identity,
            tuple(loads),
            tuple(saves),
            tuple(step.preempted),
            tuple(awaited),
            dict(self._failures),
        )

    def _computed(self, name: str) -> None:
        """For the spans: when a request's own computing began. It ends with the request."""
        tracked = self._tracked.get(name)
        if tracked is not None and not tracked.computed_ns:
            tracked.computed_ns = time.time_ns()
            self._spans.open(name, "ucm.compute")

    # --------------------------------------------------------------------------------------- what is told

    def report(self, report: WorkerReport) -> None:
        """What the ranks said after a step."""
        for save, ranks in report.gathered.items():
            tracked = self._tracked.get(self.outcomes.copied(save, ranks))
            if tracked is not None:
                tracked.saves.discard(save)
        for rank, failures in report.failures.items():
            self._failures[rank] = max(self._failures.get(rank, 0), failures)
        for loaded in report.loaded:
            self._loaded(loaded)
        for saved in report.saved:
            saving = self.outcomes.saved(saved)
            tracked = self._tracked.get(saving.request) if saving is not None else None
            if saving is not None and tracked is not None and saved.reason == TAINTED:
                tracked.stored = min(tracked.stored, saving.start)

    def _loaded(self, loaded: Loaded) -> None:
        loading = self.outcomes.loaded(loaded)
        if loading is None:
            return
        tracked = self._tracked.get(loading.request)
        if tracked is None or tracked.ticket != loaded.ticket:
            return
        tracked.ticket, tracked.phase = "", Phase.settled
        tracked.hit_blocks = loading.blocks
        if loading.blocks < loading.asked:
            # What could not be read has to be stored again, by us as likely as by anybody.
            tracked.stored = min(tracked.stored, tracked.local_blocks + loading.blocks)

    def _preempted(self, name: str) -> None:
        """Its blocks are taken back now. It comes again with a lookup and a lease of its own."""
        tracked = self._tracked.get(name)
        if tracked is None:
            return
        tracked.saves.clear()
        if any(order.request == name for order in self._loads):
            return  # it was preempted between two steps, and this one has taken it in again
        if tracked.phase is not Phase.loading:
            self._settle(tracked)
        tracked.ticket, tracked.answer, tracked.phase = "", None, Phase.fresh
        tracked.asked_ns = 0
        tracked.stored = tracked.local_blocks = 0
        self._count("preemptions")

    def finished(self, request: EngineRequest) -> bool:
        """A request ended, whichever way. True: vLLM is to hold its blocks until all ranks have copied what
        they were told to save. A load that is under way goes on, and vLLM waits for its end by itself."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        if tracked.phase is not Phase.loading:
            self._settle(tracked)
        asked = self._loadable(request)
        sparse = sparse_of(request.kv_transfer_params)
        if sparse.began_ns:
            child = self._spans.open(request.request_id, "ucm.sparse_calc")
            self._spans.close(
                request.request_id, "ucm.sparse_calc", {}, sparse.began_ns, sparse.ended_ns, child
            )
        self._spans.close(request.request_id, "ucm.compute", {}, tracked.computed_ns, time.time_ns())
        self._spans.end(
            request.request_id,
            {
                "requested_tokens": request.num_prompt_tokens,
                "hit_tokens": tracked.hit_blocks * self._shape.block_size_tokens,
                "hit_rate": tracked.hit_blocks / asked if asked else 0.0,
                "store_tier": tracked.tier,
                "sparse_algo": sparse.algo,
            },
        )
        # A request that waits for an asynchronous load has no saves: vLLM holds its blocks till the load
        # ends, and would take a second report for one about a request that it no longer knows.
        waits = tracked.phase is Phase.loading and self._settings.load == "async"
        if tracked.saves and not waits:
            self._awaited.append(request.request_id)
            return True
        return False

    def spoiled(self, invalid: Collection[int]) -> set[int]:
        """Blocks that hold garbage after the step, when its synchronous loads of the `invalid` ones failed:
        these, and all that was computed behind them, of whichever request, also of one that has ended by
        now."""
        blocks: set[int] = set()
        for table in self._tables:
            first = next((row for row, block in enumerate(table) if block in invalid), len(table))
            blocks.update(table[first:])
        return blocks

    def reset(self) -> None:
        """The caches were reset: what was known to be stored is not any more, and who has computed nothing
        begins anew. What was computed before belongs to no instance: it is not saved."""
        self._suspended = False
        self._known.clear()
        for tracked in self._tracked.values():
            self._give_up(tracked)
            if tracked.phase is Phase.loading or tracked.request.num_computed_tokens:
                tracked.instance = tracked.instance or _BEFORE
            else:
                tracked.phase, tracked.instance = Phase.fresh, ""
                tracked.stored = tracked.asked_ns = 0

    def suspend(self) -> None:
        """The caches were to be reset and blocks of before are still in the engine's memory: nothing is
        looked up or saved until a reset empties it."""
        self._suspended = True
        for tracked in self._tracked.values():
            self._give_up(tracked)

    def _give_up(self, tracked: Tracked) -> None:
        if tracked.phase in (Phase.asked, Phase.answered, Phase.unplaced):
            self._settle(tracked)

    def counters(self) -> dict[str, int]:
        """What was counted since the last call."""
        return self.outcomes.counts.drain()


def rows_of(found: LookupResult, first: int, end: int) -> Places:
    """The places of rows `first` to `end - 1` of a lookup's answer."""
    width = len(found.parts)
    return Places(
        keys=list(found.keys[first:end]),
        locations=found.locations[first:end],
        generations=found.generations[first:end],
        storages=found.storages[first:end],
        checksums=found.checksums[first * width : end * width],
        storage_table=found.storage_table,
        parts=found.parts,
        cluster=found.cluster,
    )
