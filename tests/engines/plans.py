"""What passes between the fake engine's scheduler, its workers and a connector: vLLM's own words, smaller."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.engines.engine_request import FakeRequest
from tests.engines.kv_tables import Tables


@dataclass
class Scheduled:
    """One request's share of a step. `fresh`: the workers forget what they knew of it and begin with
    `tokens`."""

    request: str
    start: int
    count: int
    known: int
    tables: tuple[list[int], ...]
    fresh: bool
    tokens: list[int]
    prompt_tokens: int
    adapter: str


@dataclass
class StepPlan:
    """One step: SchedulerOutput."""

    number: int
    scheduled: dict[str, Scheduled]
    preempted: set[str]
    finished: set[str]
    has_sync_loads: bool
    orders: bytes = b""

    @property
    def tokens(self) -> int:
        return sum(each.count for each in self.scheduled.values())


@dataclass
class KvOutput:
    """What the workers' connectors said after a step: KVConnectorOutput. `meta`: all ranks' report."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)
    meta: Any = None


@dataclass
class StepOutput:
    """A step's sampled tokens and what the connectors said."""

    sampled: dict[str, int]
    kv: KvOutput


class SchedulerFace(Protocol):
    """The connector in the scheduler's process, with the names of vLLM's interface."""

    def on_new_request(self, request: FakeRequest) -> None: ...

    def get_num_new_matched_tokens(self, request: FakeRequest, computed: int) -> tuple[int | None, bool]: ...

    def update_state_after_alloc(
        self, request: FakeRequest, blocks: Sequence[Sequence[int]], external: int
    ) -> None: ...

    def build_connector_meta(self, plan: StepPlan) -> bytes: ...

    def update_connector_output(self, output: KvOutput) -> None: ...

    def request_finished(self, request: FakeRequest, blocks: Sequence[Sequence[int]]) -> bool: ...

    def has_pending_push_work(self) -> bool: ...

    def bind_tables(self, tables: Tables) -> None: ...


class WorkerFace(Protocol):
    """The connector in one rank's process."""

    def handle_preemptions(self, orders: bytes) -> None: ...

    def bind(self, orders: bytes) -> None: ...

    def start_load_kv(self) -> None: ...

    def wait_for_save(self) -> None: ...

    def results(self, finished: set[str]) -> KvOutput: ...

    def clear(self) -> None: ...


class NoConnector:
    """The scheduler's side of no connector at all."""

    def on_new_request(self, request: FakeRequest) -> None:
        pass

    def get_num_new_matched_tokens(self, request: FakeRequest, computed: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: FakeRequest, blocks: Sequence[Sequence[int]], external: int
    ) -> None:
        pass

    def build_connector_meta(self, plan: StepPlan) -> bytes:
        return b""

    def update_connector_output(self, output: KvOutput) -> None:
        pass

    def request_finished(self, request: FakeRequest, blocks: Sequence[Sequence[int]]) -> bool:
        return False

    def has_pending_push_work(self) -> bool:
        return False

    def bind_tables(self, tables: Tables) -> None:
        pass
