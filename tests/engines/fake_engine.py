"""A small engine that calls a connector as vLLM 0.32 does, with a model that shows every wrong byte.

One `step` is EngineCore's: plan, run on every rank, take in. With depth 2 a step is planned before the one
before it was taken in; when in between it *runs* is chosen by `lazy`.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.engines.engine_request import Adapter, FakeRequest, Status
from tests.engines.fake_scheduler import FakeScheduler, Options
from tests.engines.oracle import EngineBroken, Shape, compute, new_memory
from tests.engines.plans import KvOutput, NoConnector, SchedulerFace, StepOutput, StepPlan, WorkerFace


class Aggregator:
    """What vLLM makes of the outputs of all ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._sending: dict[str, int] = {}
        self._receiving: dict[str, int] = {}
        self._failing: set[str] = set()

    def add_up(self, outputs: Sequence[KvOutput]) -> KvOutput:
        """One output of all ranks': a request is through when every rank has said so."""
        total = KvOutput()
        for output in outputs:
            self._count(output.finished_sending, self._sending, total.finished_sending)
            self._count(output.finished_recving, self._receiving, total.finished_recving)
            total.invalid_blocks |= output.invalid_blocks
            self._failing |= output.failed_recving
            if total.meta is None:
                total.meta = output.meta
            elif output.meta is not None:
                total.meta = total.meta.plus(output.meta)
        total.failed_recving = self._failing & total.finished_recving
        self._failing -= total.failed_recving
        return total

    def _count(self, names: set[str], counts: dict[str, int], through: set[str]) -> None:
        for name in names:
            counts[name] = counts.get(name, self._ranks) - 1
            if counts[name] == 0:
                through.add(name)
                del counts[name]


class Runner:
    """The model runner of all ranks: token lists of its own, and the connector's calls around each
    forward."""

    def __init__(self, shape: Shape, blocks: int, workers: Sequence[WorkerFace]) -> None:
        self.shape = shape
        self.memory = new_memory(shape, blocks)
        self.workers = list(workers)
        self._tokens: dict[str, list[int]] = {}
        self._aggregator = Aggregator(shape.ranks)

    def run(self, plan: StepPlan) -> StepOutput:
        """One step on every rank."""
        for worker in self.workers:
            worker.handle_preemptions(plan.orders)
        for name in plan.finished:
            self._tokens.pop(name, None)
        for worker in self.workers:
            worker.bind(plan.orders)
        if plan.has_sync_loads:
            for worker in self.workers:
                worker.start_load_kv()
        sampled = self._forward(plan)
        outputs = []
        for worker in self.workers:
            if not plan.has_sync_loads:
                worker.start_load_kv()
            worker.wait_for_save()
            outputs.append(worker.results(plan.finished))
            worker.clear()
        return StepOutput(sampled, self._aggregator.add_up(outputs))

    def _forward(self, plan: StepPlan) -> dict[str, int]:
        sampled = {}
        for name, share in plan.scheduled.items():
            if share.fresh:
                self._tokens[name] = list(share.tokens)
            tokens = self._tokens[name]
            del tokens[share.known :]
            end = share.start + share.count
            if end > len(tokens):
                raise EngineBroken(f"{name} is scheduled beyond its tokens")
            token = compute(self.shape, self.memory, share.tables, tokens, share.start, end, share.adapter)
            if end == len(tokens):
                tokens.append(token)
                sampled[name] = token
        return sampled


@dataclass
class Outcome:
    """How a request ended."""

    outputs: tuple[int, ...]
    status: Status


@dataclass
class FakeEngine:
    """An engine: `add`, `abort` and `step`. `lazy` says, each time, whether the last planned step waits with
    running until its output is asked for."""

    shape: Shape
    options: Options = field(default_factory=Options)
    connector: SchedulerFace = field(default_factory=NoConnector)
    workers: Sequence[WorkerFace] = ()
    lazy: Callable[[], bool] = lambda: False
    memory_of: Callable[[list[bytearray]], None] = lambda memory: None

    def __post_init__(self) -> None:
        self.scheduler = FakeScheduler(self.shape, self.options, self.connector)
        self.runner = Runner(self.shape, self.options.blocks, self.workers)
        self.memory_of(self.runner.memory)
        self.outcomes: dict[str, Outcome] = {}
        self.steps = 0
        self._queue: deque[tuple[StepPlan, list[StepOutput]]] = deque()
        self._aborts: set[str] = set()

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        salt: str = "",
        adapter: Adapter | None = None,
        images: bool = False,
        embeds: bool = False,
    ) -> FakeRequest:
        """A new request."""
        request = FakeRequest(self.shape, request_id, prompt, max_tokens, salt=salt, adapter=adapter)
        request.mm_features = ("an image",) if images else ()
        request.prompt_embeds = "embeddings" if embeds else None
        self.scheduler.add(request)
        return request

    def abort(self, request_id: str, *, within_step: bool = False) -> None:
        """The caller went away; `within_step`: while a step runs, which the core hears of after it."""
        if within_step:
            self._aborts.add(request_id)
        else:
            self._abort({request_id})

    def reset_prefix_cache(self) -> None:
        """What an update of the weights does: all running requests begin anew, and nothing is remembered."""
        self.scheduler.preempt_all()

    @property
    def busy(self) -> bool:
        """Whether the core would go on stepping."""
        return self.scheduler.has_requests or bool(self._queue)

    def step(self) -> None:
        """One turn of the core."""
        self.steps += 1
        if self.scheduler.has_requests:
            plan = self.scheduler.schedule()
            self._queue.append((plan, []))
            if not self.lazy():
                self._run_all()
            if len(self._queue) < self.options.depth and (plan.tokens or self.scheduler.has_requests):
                return
        if not self._queue:
            return
        self._run_all(1)
        plan, (output,) = self._queue.popleft()
        if self._aborts:
            self._abort(self._aborts)
            self._aborts = set()
        for name, request in self.scheduler.update(plan, output).items():
            self.outcomes[name] = Outcome(request.outputs, request.status)

    def run(self, steps_max: int = 10_000, between: Callable[[], None] = lambda: None) -> None:
        """Step until nothing is left to do. Raises when that never comes."""
        for _ in range(steps_max):
            if not self.busy:
                return
            self.step()
            between()
        raise EngineBroken(f"not done after {steps_max} steps: {sorted(self.scheduler.requests)}")

    def check_idle(self) -> None:
        """Nothing is held when nothing is to be done."""
        assert not self.scheduler.requests, sorted(self.scheduler.requests)
        if leaked := self.scheduler.tables.pool.leaked:
            raise EngineBroken(f"{leaked} blocks leaked")

    def _run_all(self, count: int = 1 << 30) -> None:
        for plan, output in list(self._queue)[:count]:
            if not output:
                output.append(self.runner.run(plan))

    def _abort(self, names: set[str]) -> None:
        for request in self.scheduler.finish(set(names), Status.aborted):
            self.outcomes[request.request_id] = Outcome(request.outputs, request.status)


def often(seed: int, share: float) -> Callable[[], bool]:
    """True in `share` of all calls, the same ones for the same seed."""
    chance = random.Random(seed)
    return lambda: chance.random() < share
