"""The fake engine's scheduler: the order of calls, the assertions and the mistakes of vLLM 0.32's.

What it leaves out (encoders, speculative decoding, streaming input, priorities, pipeline stages) no connector
of ours is told about.
"""

from collections import deque
from dataclasses import dataclass

from tests.engines.engine_request import FakeRequest, Status
from tests.engines.failures import check_promise, truncated
from tests.engines.kv_pool import Block
from tests.engines.kv_tables import Tables
from tests.engines.oracle import EngineBroken, Shape
from tests.engines.plans import KvOutput, Scheduled, SchedulerFace, StepOutput, StepPlan


@dataclass(frozen=True)
class Options:
    """Of one engine. `depth` 2 is vLLM's asynchronous scheduling: a step is planned while the one before
    runs."""

    blocks: int = 64
    budget_tokens: int = 32
    running_max: int = 8
    depth: int = 1
    recompute: bool = True
    reserve_whole: bool = True
    chunk_tokens: int = 0
    caching: bool = True


class FakeScheduler:
    """`schedule`, `update` and `finish`, as an engine's core calls them."""

    def __init__(self, shape: Shape, options: Options, connector: SchedulerFace) -> None:
        self.shape = shape
        self.options = options
        self.connector = connector
        self.tables = Tables(
            shape,
            options.blocks,
            in_flight_tokens_max=options.budget_tokens * options.depth,
            caching=options.caching,
        )
        connector.bind_tables(self.tables)
        self.requests: dict[str, FakeRequest] = {}
        self.running: list[FakeRequest] = []
        self.waiting: deque[FakeRequest] = deque()
        self.holding: deque[FakeRequest] = deque()
        self.preemptions = 0
        self.loaded_tokens = 0
        self._finished_ids: set[str] = set()
        self._preempted_ids: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._prefilling: set[str] = set()
        self._last_step: set[str] = set()
        self._steps = 0
        self._planned = 0
        self._processed = 0
        self._deferred: deque[tuple[int, list[Block]]] = deque()

    # ---------------------------------------------------------------------------------------- from outside

    def add(self, request: FakeRequest) -> None:
        """A new request."""
        assert request.request_id not in self.requests
        self.waiting.append(request)
        self.requests[request.request_id] = request
        self.connector.on_new_request(request)

    def finish(self, names: set[str], status: Status) -> list[FakeRequest]:
        """Abort, or end with an error."""
        ended = [request for name in names if (request := self.requests.get(name)) and not request.finished]
        gone = {request.request_id for request in ended}
        self._leave_queues(gone)
        for request in ended:
            delay = False
            if request.status == Status.waiting_for_remote:
                delay = request.request_id not in self._received
                self._received.discard(request.request_id)
                self._failed.discard(request.request_id)
            request.status = status
            self._free(request, delay)
        return ended

    def preempt_all(self) -> None:
        """Between two steps: every running request goes back to the queue, and the prefix cache is emptied
        of what nobody holds."""
        while self.running:
            self._preempt(self.running.pop())
        self.tables.pool.forget_free()

    @property
    def has_requests(self) -> bool:
        """Whether the engine goes on stepping."""
        return bool(self.requests) or bool(self._finished_ids) or self.connector.has_pending_push_work()

    @property
    def unfinished(self) -> int:
        return len(self.running) + len(self.waiting) + len(self.holding)

    # ------------------------------------------------------------------------------------------- one step

    def schedule(self) -> StepPlan:
        """Plan one step."""
        self._steps += 1
        budget = self.options.budget_tokens
        planned: dict[str, Scheduled] = {}
        preempted: list[FakeRequest] = []
        alone = self.unfinished == 1
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            if (
                request.num_output_placeholders > 0
                and request.num_computed_tokens + 2 - request.num_output_placeholders
                >= request.num_prompt_tokens + request.max_tokens
            ):
                index += 1
                continue
            count = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            count = min(self._chunk(count, alone), budget)
            if count == 0:
                index += 1
                continue
            if not self._room_for(request, count, preempted):
                break
            planned[request.request_id] = self._share(request, count, fresh=False)
            budget -= count
            index += 1
        sync = False
        if not preempted:
            sync = self._admit(planned, budget, alone)
        plan = StepPlan(self._steps, planned, self._preempted_ids, self._finished_ids, sync)
        plan.orders = self.connector.build_connector_meta(plan)
        if self._defers and plan.tokens:
            self._planned += 1
        self._after(plan)
        return plan

    def _chunk(self, count: int, alone: bool) -> int:
        limit = self.options.chunk_tokens
        return min(count, limit) if limit and not alone else count

    def _room_for(self, request: FakeRequest, count: int, preempted: list[FakeRequest]) -> bool:
        while not self.tables.allocate(request, count):
            victim = self.running[-1]
            if not self._may_free(victim):
                return False
            self.running.pop()
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _admit(self, planned: dict[str, Scheduled], budget: int, alone: bool) -> bool:
        """Waiting requests, as many as fit. Whether one of them loads within this step."""
        sync = False
        skipped: list[FakeRequest] = []
        while budget > 0 and (queue := self.holding or self.waiting):
            if len(self.running) >= self.options.running_max:
                break
            request = queue[0]
            if not self._ready(request) or request.num_stale_output_tokens:
                skipped.append(queue.popleft())
                continue
            hits: list[list[Block]] | None = None
            local = external = 0
            load_async = False
            if request.num_computed_tokens == 0:
                hits, local = self.tables.hits(request)
                asked, load_async = self.connector.get_num_new_matched_tokens(request, local)
                if asked is None:
                    skipped.append(queue.popleft())
                    continue
                external = asked
                check_promise(request, self.shape, local, external, load_async=load_async)
            computed = request.num_computed_tokens or local + external
            count = 0 if load_async else min(self._chunk(request.num_tokens - computed, alone), budget)
            assert load_async or count > 0
            if not self.tables.allocate(
                request,
                count,
                hits=hits,
                local=local,
                external=external,
                delay_cache=load_async,
                whole=self.options.reserve_whole,
                reserved=self._reserved() if load_async else 0,
            ):
                break
            self.connector.update_state_after_alloc(request, self.tables.ids(request.request_id), external)
            self.loaded_tokens += external
            if load_async:
                request.status = Status.waiting_for_remote
                request.num_computed_tokens = computed
                self._prefilling.add(request.request_id)
                skipped.append(queue.popleft())
                continue
            queue.popleft()
            self.running.append(request)
            sync = sync or external > 0
            request.status = Status.running
            request.num_computed_tokens = computed
            planned[request.request_id] = self._share(request, count, fresh=True)
            budget -= count
            if computed + count < request.num_tokens:
                self._prefilling.add(request.request_id)
        for request in reversed(skipped):
            (self.holding if request.holds_blocks else self.waiting).appendleft(request)
        return sync

    def _share(self, request: FakeRequest, count: int, *, fresh: bool) -> Scheduled:
        known = request.num_tokens + request.num_output_placeholders
        return Scheduled(
            request.request_id,
            request.num_computed_tokens,
            count,
            known,
            self.tables.ids(request.request_id),
            fresh,
            list(request.all_token_ids) if fresh else [],
            request.num_prompt_tokens,
            request.lora_request.weights if request.lora_request else "",
        )

    def _reserved(self) -> int:
        return sum(self.tables.remaining(self.requests[name]) for name in self._prefilling)

    def _preempt(self, request: FakeRequest) -> None:
        assert request.status == Status.running
        self._free_blocks_of(request)
        self._prefilling.discard(request.request_id)
        request.status = Status.preempted
        request.num_computed_tokens = 0
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)
        self._preempted_ids.add(request.request_id)

    def _after(self, plan: StepPlan) -> None:
        for name, share in plan.scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += share.count
            request.num_in_flight_tokens += share.count
            request.last_step = self._planned
            if request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders:
                self._prefilling.discard(name)
                if self.options.depth > 1:
                    request.num_output_placeholders += 1
        self._finished_ids = set()
        self._preempted_ids = set()

    def _ready(self, request: FakeRequest) -> bool:
        """Whether a waiting request may go on; one whose load is over is told what came of it."""
        if request.status != Status.waiting_for_remote:
            return True
        name = request.request_id
        if name not in self._received:
            return False
        if name in self._failed:
            if request.num_computed_tokens:
                self.tables.cache(request, request.num_computed_tokens)
            else:
                self.tables.pool.give(self.tables.drop(name))
            self._failed.discard(name)
        else:
            self.tables.cache(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        self._received.discard(name)
        request.status = Status.preempted if request.num_preemptions else Status.waiting
        return True

    # ------------------------------------------------------------------------------------------ its output

    def update(self, plan: StepPlan, output: StepOutput) -> dict[str, FakeRequest]:
        """Take in what a step gave. Returns the requests that ended."""
        if self._defers and plan.tokens:
            self._processed += 1
            self._drain()
        kv = output.kv
        failed = self._failed_requests(kv.failed_recving)
        if kv.invalid_blocks:
            failed |= self._invalid(kv.invalid_blocks, plan)
        ended: dict[str, FakeRequest] = {}
        for name, share in plan.scheduled.items():
            request = self.requests.get(name)
            stale = False
            if request is not None:
                request.num_in_flight_tokens -= share.count
                if request.num_stale_output_tokens > 0:
                    stale = True
                    request.num_stale_output_tokens -= share.count
                    assert request.num_stale_output_tokens >= 0
            if name in failed or request is None or request.finished or name not in output.sampled:
                continue
            self._take_token(request, output.sampled[name], stale)
            if len(request.outputs) >= request.max_tokens:
                self._leave_queues({name})
                request.status = Status.stopped
                ended[name] = request
                self._free(request, False)
        if failed and not self.options.recompute:
            for request in self.finish(failed, Status.error):
                ended[request.request_id] = request
        self.connector.update_connector_output(kv)
        self._transfers(kv)
        return ended

    def _take_token(self, request: FakeRequest, token: int, stale: bool) -> None:
        status = request.status
        request.append(token)
        if self.options.depth > 1:
            if not stale:
                request.num_output_placeholders -= 1
                assert request.num_output_placeholders >= 0
            if status == Status.running:
                self.tables.cache(request, request.num_computed_tokens - request.num_output_placeholders)

    def _transfers(self, kv: KvOutput) -> None:
        for name in kv.finished_recving:
            if name not in self.requests:
                raise EngineBroken(f"received for {name}, which the engine does not know")
            request = self.requests[name]
            if request.status == Status.waiting_for_remote:
                self._received.add(name)
            else:
                if not request.finished:
                    raise EngineBroken(f"received for {name}, which waits for nothing")
                self._free_finished(request)
        for name in kv.finished_sending:
            if name not in self.requests:
                raise EngineBroken(f"sent for {name}, which the engine does not know")
            if not self.requests[name].finished:
                raise EngineBroken(f"sent for {name}, which is not finished")
            self._free_finished(self.requests[name])

    def _failed_requests(self, names: set[str]) -> set[str]:
        affected = set()
        for name in names:
            request = self.requests.get(name)
            if request is not None and request.status == Status.waiting_for_remote:
                affected.add(name)
                if self.options.recompute:
                    request.num_computed_tokens = 0
                    self._failed.add(name)
        return set() if self.options.recompute else affected

    def _invalid(self, blocks: set[int], plan: StepPlan) -> set[str]:
        if len(self.shape.windows) > 1:
            raise EngineBroken("block numbers of failed loads with several KV cache groups")
        remote = [each for each in self.holding if each.status == Status.waiting_for_remote]
        late, _ = truncated(self.tables, remote, blocks, plan)
        now, downstream = truncated(self.tables, self.running, blocks, plan)
        if downstream and not self.options.recompute:
            self.tables.pool.evict(downstream)
        if not self.options.recompute:
            return late | now
        self._failed |= late
        return now

    # ---------------------------------------------------------------------------------------------- blocks

    def _free(self, request: FakeRequest, delay: bool) -> None:
        name = request.request_id
        self._prefilling.discard(name)
        self.tables.move_on(request)
        held = -(-request.num_computed_tokens // self.shape.block_tokens)
        blocks = tuple(row[:held] for row in self.tables.ids(name))
        delay = self.connector.request_finished(request, blocks) or delay
        self._finished_ids.add(name)
        if not delay:
            self._free_finished(request)

    def _free_finished(self, request: FakeRequest) -> None:
        assert request.finished
        self._free_blocks_of(request)
        del self.requests[request.request_id]

    @property
    def _defers(self) -> bool:
        """Blocks that a step under way may still write are given back after it."""
        return self.options.depth > 1

    def _may_free(self, request: FakeRequest) -> bool:
        return not self._defers or request.last_step <= self._processed

    def _free_blocks_of(self, request: FakeRequest) -> None:
        blocks = self.tables.drop(request.request_id)
        if self._may_free(request):
            self.tables.pool.give(blocks)
        elif blocks:
            self._deferred.append((self._planned, blocks))

    def _drain(self) -> None:
        while self._deferred and self._deferred[0][0] <= self._processed:
            self.tables.pool.give(self._deferred.popleft()[1])

    def _leave_queues(self, names: set[str]) -> None:
        self.running = [each for each in self.running if each.request_id not in names]
        self.waiting = deque(each for each in self.waiting if each.request_id not in names)
        self.holding = deque(each for each in self.holding if each.request_id not in names)
