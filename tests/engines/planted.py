"""Mistakes planted on purpose, each of which the histories have to catch: what they cannot tell from the real
connector they do not test."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace as with_fields

from engine_adapters.vllm.broker import Broker
from engine_adapters.vllm.loader import Load, Loader
from engine_adapters.vllm.mover import Mover
from engine_adapters.vllm.ordering import Ordering, Step
from engine_adapters.vllm.orders import SaveOrder, StepOrders
from engine_adapters.vllm.requests import EngineRequest, Phase, Tracked
from engine_adapters.vllm.saver import Saver
from engine_adapters.vllm.saves import Row
from engine_adapters.vllm.scheduler import SchedulerSide
from engine_adapters.vllm.worker import Results, WorkerSide
from tests.engines.ground import Ground
from tests.engines.histories import HistoryFailed, Setting, play, setting_of
from tests.engines.oracle import Shape

PATIENCE_S = 1.5
Patch = tuple[type, str, Callable[..., Any]]


@dataclass(frozen=True)
class Plant:
    """`patches`: methods and what stands in their place, given the right one first. `aim` narrows a seed's
    setting to where the mistake can show."""

    patches: Callable[[], list[Patch]]
    aim: Callable[[Setting], Setting]


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """The mistake is in the code for now."""
    before = []
    for owner, name, wrong in plant.patches():
        right = getattr(owner, name)
        before.append((owner, name, right))

        def method(*args: Any, _right: Any = right, _wrong: Any = wrong, **kwargs: Any) -> Any:
            return _wrong(_right, *args, **kwargs)

        setattr(owner, name, method)
    try:
        yield
    finally:
        for owner, name, right in before:
            setattr(owner, name, right)


def caught(ground: Ground, plant: Plant, seeds: Sequence[int]) -> str:
    """How a history shows the mistake; empty when none of the seeds' does."""
    with planted(plant):
        for seed in seeds:
            setting = replace(plant.aim(setting_of(seed)), patience_s=PATIENCE_S)
            try:
                play(ground, seed, setting)
            except HistoryFailed as failed:
                return str(failed)
    return ""


# ------------------------------------------------------------------------------------------ where it shows


def _anywhere(setting: Setting) -> Setting:
    return setting


def _crowded(setting: Setting) -> Setting:
    """Little memory, slow copies: blocks are taken back while they wait to be copied."""
    return replace(
        setting,
        options=replace(
            setting.options, blocks=20 * len(setting.shape.windows), reserve_whole=False, running_max=6
        ),
        copy_ms=4.0,
        faults=0.0,
        switches=False,
        asks=0.9,
        outputs=(12, 24),
    )


def _hanging_up(setting: Setting) -> Setting:
    return replace(_crowded(setting), aborts=0.5)


def _rotten(setting: Setting) -> Setting:
    """Bytes are lost; loads are asynchronous."""
    return replace(setting, settings={**setting.settings, "load": "async"}, faults=0.5, engines=2)


def _rotten_sync(setting: Setting) -> Setting:
    return replace(
        setting,
        shape=Shape(),
        options=replace(setting.options, blocks=300, depth=1, chunk_tokens=0, recompute=True),
        settings={**setting.settings, "load": "sync", "min_load_blocks": 1},
        faults=0.5,
        aborts=0.0,
        kills=False,
        engines=2,
        copy_ms=0.0,
        pace_ms=3.0,
        switches=False,
    )


def _windows(setting: Setting) -> Setting:
    shape = Shape(windows=(0, 7))
    return replace(_crowded(replace(setting, shape=shape)), settings={**setting.settings, "load": "async"})


def _loading(setting: Setting) -> Setting:
    return replace(
        setting,
        shape=Shape(windows=(0, 7)),
        options=replace(setting.options, blocks=120),
        settings={**setting.settings, "load": "async", "min_load_blocks": 1},
        engines=2,
        turns=50,
    )


def _slow_lookups(setting: Setting) -> Setting:
    """Requests end while their lookups are on the way."""
    return replace(
        setting,
        options=replace(setting.options, blocks=120),
        settings={**setting.settings, "lookup_wait_ms": 3_000},
        wire_ms=10.0,
        aborts=0.5,
        engines=1,
        switches=False,
        kills=False,
    )


def _published(setting: Setting) -> Setting:
    return replace(setting, settings={**setting.settings, "publish": True})


def _published_by_ranks(setting: Setting) -> Setting:
    """Blocks are taken back that one rank has copied already and the other has not."""
    return _crowded(replace(_published(setting), shape=Shape(ranks=2)))


def _slow_loads(setting: Setting) -> Setting:
    return replace(
        setting,
        shape=Shape(),
        options=replace(setting.options, blocks=20, reserve_whole=False, running_max=6, budget_tokens=32),
        settings={**setting.settings, "load": "async", "load_batch_blocks": 32, "min_load_blocks": 1},
        aborts=0.9,
        asks=0.9,
        outputs=(2, 5, 12),
        switches=False,
        faults=0.0,
        copy_ms=0.0,
        read_ms=25.0,
        engines=1,
        turns=100,
    )


# -------------------------------------------------------------------------------------------- the mistakes


def _nothing(_right: Any, *_args: Any, **_kwargs: Any) -> None:
    return None


def _untainted(right: Any, self: Saver, orders: Sequence[SaveOrder], *, tainted: bool) -> None:
    right(self, orders, tainted=False)


def _never_held(right: Any, self: SchedulerSide, request: EngineRequest) -> bool:
    right(self, request)
    self._awaited.clear()
    return False


def _held_for_ever(right: Any, self: SchedulerSide, request: EngineRequest) -> bool:
    right(self, request)
    self._awaited.clear()
    return True


def _all_rows_good(right: Any, self: Mover, refs: Sequence[Any], buffers: Sequence[memoryview]) -> list[str]:
    right(self, refs, buffers)
    return [""] * len(refs)


def _one_block_too_far(right: Any, self: Ordering, tracked: Tracked, tokens: int, step: Step) -> Any:
    return right(self, tracked, tokens + self._shape.block_size_tokens, step)


def _keys_of_the_next(right: Any, self: Ordering, tracked: Tracked, tokens: int, step: Step) -> Any:
    order = right(self, tracked, tokens, step)
    if order is None or len(order.keys) < 2:
        return order
    columns = tuple(column[1:] + column[:1] for column in order.blocks)
    return with_fields(order, blocks=columns)


def _tokens_of_the_block_before(
    right: Any, self: Ordering, request: EngineRequest, start: int, end: int
) -> Any:
    return right(self, request, start - 1, end - 1) if start else right(self, request, start, end)


def _tokens_of_what_was_copied(right: Any, self: Row) -> bytes:
    told: bytes = right(self)
    return told if self.pages is not None else b""


def _unheard_kept(right: Any, self: Broker, ticket: str) -> None:
    question = self._tickets.get(ticket)
    if question is not None and question.answer is None:
        del self._tickets[ticket]
        return
    right(self, ticket)


def _asked_each_time(right: Any, self: SchedulerSide, request: EngineRequest, computed: int) -> Any:
    tracked = self._tracked.get(request.request_id)
    if tracked is not None and tracked.phase in (Phase.answered, Phase.settled):
        self._settle(tracked)
        tracked.phase = Phase.fresh
    return right(self, request, computed)


def _half_a_block(right: Any, self: SchedulerSide, request: EngineRequest, computed: int) -> Any:
    tokens, load_async = right(self, request, computed)
    return (tokens - 1 if tokens else tokens), load_async


def _windows_pushed_together(right: Any, self: Loader, load: Load) -> Iterator[list[tuple[int, int, int]]]:
    for batch in right(self, load):
        moved: dict[int, int] = {}
        pages = []
        for row, group, block in batch:
            moved[group] = moved.get(group, -1) + 1 if group else row
            pages.append((moved[group], group, block))
        yield sorted(pages)


def _failures_hidden(right: Any, self: WorkerSide, finished: set[str]) -> Results:
    results: Results = right(self, finished)
    results.failed = set()
    self._errors = set()
    return results


def _failed_never_received(right: Any, self: WorkerSide, finished: set[str]) -> Results:
    errors = set(self._errors)
    results: Results = right(self, finished)
    if results.failed or self._errors - errors:
        results.received = set()
    return results


def _received_twice(right: Any, self: WorkerSide, finished: set[str]) -> Results:
    results: Results = right(self, finished)
    self._results.received |= {name for name in results.received if name not in finished}
    return results


def _sent_for_all(right: Any, self: WorkerSide, finished: set[str]) -> Results:
    results: Results = right(self, finished)
    results.sent = results.sent | finished
    return results


def _loads_go_on(right: Any, self: Loader, load: Load, pages: Any, buffers: list[memoryview]) -> Any:
    """Of a load that was given up the bytes still reach the engine's memory."""
    unaware = SimpleNamespace(order=load.order, lock=Lock(), done=lambda: False, over=False, size_bytes=0)
    return right(self, unaware, pages, buffers)


def _preempted_too_late(right: Any, self: WorkerSide, orders: StepOrders) -> None:
    right(self, with_fields(orders, preempted=()))


PLANTS: dict[str, Plant] = {
    "pages are copied after their blocks were taken back": Plant(
        lambda: [(WorkerSide, "preempted", _preempted_too_late)], _crowded
    ),
    "saves of a step whose load failed are kept": Plant(
        lambda: [(Saver, "submit", _untainted)], _rotten_sync
    ),
    "a finished request's blocks are not held until they are copied": Plant(
        lambda: [(SchedulerSide, "finished", _never_held)], _hanging_up
    ),
    "finished requests are held for ever": Plant(
        lambda: [(SchedulerSide, "finished", _held_for_ever)], _anywhere
    ),
    "leases are never released": Plant(
        lambda: [(Broker, "release", _nothing), (Broker, "drop", _nothing)], _anywhere
    ),
    "rows behind the verified prefix count as loaded": Plant(
        lambda: [(Mover, "read", _all_rows_good)], _rotten
    ),
    "blocks are saved before they are computed": Plant(
        lambda: [(Ordering, "order", _one_block_too_far)], _anywhere
    ),
    "pages are saved under their neighbours' keys": Plant(
        lambda: [(Ordering, "order", _keys_of_the_next)], _anywhere
    ),
    "routers are told the tokens of the block before": Plant(
        lambda: [(Ordering, "_tokens", _tokens_of_the_block_before)], _published
    ),
    "each rank tells the tokens of what it has itself": Plant(
        lambda: [(Row, "packed_tokens", _tokens_of_what_was_copied)], _published_by_ranks
    ),
    "answers that nobody waits for keep their leases": Plant(
        lambda: [(Broker, "drop", _unheard_kept)], _slow_lookups
    ),
    "every question is a lookup": Plant(lambda: [(SchedulerSide, "matched", _asked_each_time)], _crowded),
    "loads end inside a block": Plant(lambda: [(SchedulerSide, "matched", _half_a_block)], _loading),
    "rows outside the window are not counted": Plant(
        lambda: [(Loader, "_batches", _windows_pushed_together)], _loading
    ),
    "blocks that leave the window are not copied in time": Plant(
        lambda: [(Saver, "copy_urgent", _nothing)], _windows
    ),
    "failed loads are not told": Plant(lambda: [(WorkerSide, "take_results", _failures_hidden)], _rotten),
    "failed loads never end": Plant(lambda: [(WorkerSide, "take_results", _failed_never_received)], _rotten),
    "a load is reported twice": Plant(lambda: [(WorkerSide, "take_results", _received_twice)], _loading),
    "requests that nobody waits for are reported": Plant(
        lambda: [(WorkerSide, "take_results", _sent_for_all)], _anywhere
    ),
    "loads that were given up go on": Plant(lambda: [(Loader, "_load_pages", _loads_go_on)], _slow_loads),
}
"""What is wrong -> how it is done."""
