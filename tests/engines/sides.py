"""Our two sides under the fake engine, as the connector's face puts them under vLLM: orders and reports cross
from process to process as bytes."""

import pickle
from collections.abc import Sequence

from engine_adapters.vllm.ordering import Step
from engine_adapters.vllm.orders import StepOrders
from engine_adapters.vllm.scheduler import SchedulerSide
from engine_adapters.vllm.worker import WorkerSide
from tests.engines.engine_request import FakeRequest
from tests.engines.kv_tables import Tables
from tests.engines.plans import KvOutput, StepPlan


class OurScheduler:
    """SchedulerFace over SchedulerSide."""

    def __init__(self, side: SchedulerSide, *, sync: bool) -> None:
        self.side = side
        self._sync = sync
        self.asked = 0
        self.steps = 0
        self._tables: Tables | None = None

    def bind_tables(self, tables: Tables) -> None:
        self._tables = tables

    def on_new_request(self, request: FakeRequest) -> None:
        self.side.new_request(request)

    def get_num_new_matched_tokens(self, request: FakeRequest, computed: int) -> tuple[int | None, bool]:
        self.asked += 1
        return self.side.matched(request, computed)

    def update_state_after_alloc(
        self, request: FakeRequest, blocks: Sequence[Sequence[int]], external: int
    ) -> None:
        self.side.allocated(request, tuple(list(row) for row in blocks), external)

    def build_connector_meta(self, plan: StepPlan) -> bytes:
        self.steps += 1
        tables = {name: share.tables for name, share in plan.scheduled.items()}
        step = Step(
            {name: share.count for name, share in plan.scheduled.items()}, plan.preempted, tables.__getitem__
        )
        return pickle.dumps(self.side.build(step))

    def update_connector_output(self, output: KvOutput) -> None:
        if output.meta is not None:
            self.side.report(output.meta)
        if output.invalid_blocks and self._sync:
            assert self._tables is not None
            self._tables.pool.evict(self.side.spoiled(output.invalid_blocks))

    def request_finished(self, request: FakeRequest, blocks: Sequence[Sequence[int]]) -> bool:
        return self.side.finished(request)

    def has_pending_push_work(self) -> bool:
        return False


class OurWorker:
    """WorkerFace over WorkerSide, of one rank."""

    def __init__(self, side: WorkerSide) -> None:
        self.side = side
        self._orders: StepOrders | None = None

    def handle_preemptions(self, orders: bytes) -> None:
        self.side.preempted(self._loaded(orders))

    def bind(self, orders: bytes) -> None:
        self._orders = self._loaded(orders)

    def start_load_kv(self) -> None:
        assert self._orders is not None
        self.side.start_loads(self._orders)

    def wait_for_save(self) -> None:
        assert self._orders is not None
        self.side.submit_saves(self._orders)

    def results(self, finished: set[str]) -> KvOutput:
        results = self.side.take_results(finished)
        return KvOutput(
            set(results.sent or ()),
            set(results.received or ()),
            set(results.failed or ()),
            set(self.side.load_errors()),
            _through_the_wire(self.side.report()),
        )

    def clear(self) -> None:
        self._orders = None

    @staticmethod
    def _loaded(orders: bytes) -> StepOrders:
        loaded = pickle.loads(orders)
        assert isinstance(loaded, StepOrders)
        return loaded


def _through_the_wire(report: object) -> object:
    return pickle.loads(pickle.dumps(report))
