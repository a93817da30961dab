"""An engine's memory in bytearrays and its worker side, for tests of the latter."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any, cast

from dataplane.pages import GroupPages, Pages
from engine_adapters.vllm.mover import Mover
from engine_adapters.vllm.orders import (
    NO_BLOCK,
    Identity,
    Loaded,
    LoadOrder,
    Saved,
    SaveOrder,
    StepOrders,
    WorkerReport,
)
from engine_adapters.vllm.rank import RankParts
from engine_adapters.vllm.settings import Settings
from engine_adapters.vllm.worker import Results, WorkerSide
from metaservice.client import Client, Places
from tests.unit.vllm_memory_service import PAGE_BYTES, MemoryClient, MemoryService, content, key_of

BLOCKS = 64
IDENTITY = Identity("i", "e", "one")
GARBAGE = 0xEE


class MemoryPages(Pages):
    """`before_gather` and `before_scatter` run in the copier's thread before each copy, with the block."""

    def __init__(self, groups: int = 1, blocks: int = BLOCKS) -> None:
        self._groups = tuple(GroupPages((f"l{group}",), PAGE_BYTES, blocks) for group in range(groups))
        self.memory = [bytearray(PAGE_BYTES * blocks) for _ in range(groups)]
        self.before_gather: Callable[[int], None] = lambda block: None
        self.before_scatter: Callable[[int], None] = lambda block: None
        self.gathered: list[tuple[int, int]] = []
        self.scattered: list[tuple[int, int]] = []
        self.allocated = 0

    @property
    def groups(self) -> tuple[GroupPages, ...]:
        return self._groups

    def allocate(self, size_bytes: int) -> memoryview:
        self.allocated += size_bytes
        return memoryview(bytearray(size_bytes))

    def fence(self) -> None:
        pass

    def gather(self, group: int, block: int, out: memoryview) -> None:
        self.before_gather(block)
        out[:PAGE_BYTES] = self.page(group, block)
        self.gathered.append((group, block))

    def scatter(self, group: int, block: int, data: memoryview) -> None:
        self.before_scatter(block)
        self.page(group, block)[:] = data[:PAGE_BYTES]
        self.scattered.append((group, block))

    def settle(self) -> None:
        pass

    def page(self, group: int, block: int) -> memoryview:
        assert 0 <= block < self._groups[group].blocks
        return memoryview(self.memory[group])[block * PAGE_BYTES : (block + 1) * PAGE_BYTES]

    def compute(self, rank: RankParts, key: bytes, blocks: Sequence[int]) -> None:
        """What a forward leaves in these blocks, one a group."""
        for group, block in enumerate(blocks):
            if block != NO_BLOCK:
                self.page(group, block)[:] = content(key, rank.parts[group])

    def spoil(self, blocks: Sequence[int]) -> None:
        """The engine uses them for something else."""
        for group in range(len(self._groups)):
            for block in blocks:
                self.page(group, block)[:] = bytes([GARBAGE]) * PAGE_BYTES


class GateMover(Mover):
    """A mover whose reads and writes can be stopped."""

    def __init__(self, settings: Settings, client: MemoryClient | Client) -> None:
        super().__init__(settings, cast(Client, client))
        self.before_read: Callable[[], None] = lambda: None
        self.before_write: Callable[[], None] = lambda: None

    def read(self, refs: Any, buffers: Any) -> list[str]:
        self.before_read()
        return super().read(refs, buffers)

    def write(self, refs: Any, data: Any) -> list[int | str]:
        self.before_write()
        return super().write(refs, data)


class Rank:
    """One worker process: its memory, its mover and the side under test."""

    def __init__(self, settings: Settings, parts: RankParts, client: MemoryClient | Client) -> None:
        self.parts = parts
        self.pages = MemoryPages(len(parts.parts))
        self.mover = GateMover(settings, client)
        self.side = WorkerSide(settings, parts, self.pages, self.mover)
        self.reports: list[WorkerReport] = []
        self.counts: dict[str, int] = {}

    def step(self, orders: StepOrders, finished: set[str] | None = None) -> Results:
        """One step of the engine without any loads that the forward needs."""
        self.side.preempted(orders)
        self.side.start_loads(orders)
        self.side.submit_saves(orders)
        return self.results(finished)

    def results(self, finished: set[str] | None = None) -> Results:
        results = self.side.take_results(finished or set())
        report = self.side.report()
        if report is not None:
            self.reports.append(report)
        for name, value in self.side.counters().items():
            self.counts[name] = self.counts.get(name, 0) + value
        return results

    @property
    def saved(self) -> list[Saved]:
        self.results()
        return [saved for report in self.reports for saved in report.saved]

    @property
    def loaded(self) -> list[Loaded]:
        return [loaded for report in self.reports for loaded in report.loaded]

    @property
    def gathered(self) -> list[str]:
        self.results()
        return [
            save for report in self.reports for save, times in report.gathered.items() for _ in range(times)
        ]

    def saves_over(self, number: int) -> list[Saved]:
        """Wait for the ends of so many saves."""
        eventually(lambda: len(self.saved) >= number)
        return self.saved

    def received(self, request: str, finished: set[str] | None = None) -> Results:
        """Step until an asynchronous load of this request is reported."""
        until = time.monotonic() + 10
        while True:
            results = self.results(finished)
            finished = None
            if request in results.received:
                return results
            assert time.monotonic() < until, "the load was not reported"
            time.sleep(0.002)

    def compute(self, order: SaveOrder) -> SaveOrder:
        """The forward that gives the blocks of this order their content."""
        for key, blocks in zip(order.keys, zip(*order.blocks, strict=True), strict=True):
            self.pages.compute(self.parts, key, blocks)
        return order

    def right(self, keys: Sequence[bytes], blocks: Sequence[int], group: int = 0) -> list[bool]:
        """Which of these blocks hold what they should."""
        return [
            self.pages.page(group, block) == content(key, self.parts.parts[group])
            for key, block in zip(keys, blocks, strict=True)
        ]


def settings_with(**changes: Any) -> Settings:
    return Settings(**{"group": "g", "save_wait_ms": 10_000, "save_buffer_bytes": 64 * PAGE_BYTES, **changes})


def save_order(
    name: str,
    numbers: Sequence[int],
    blocks: Sequence[int],
    *,
    request: str = "r",
    groups: int = 1,
    **more: Any,
) -> SaveOrder:
    """Save the blocks called `numbers`, which lie in `blocks`."""
    keys = [key_of(number) for number in numbers]
    return SaveOrder(name, request, more.pop("instance", "i"), keys, None, (tuple(blocks),) * groups, **more)


def load_order(
    places: Places, blocks: Sequence[int], *, request: str = "r", ticket: str = "r#1", sync: bool = False,
    groups: int = 1,
) -> LoadOrder:  # fmt: skip
    return LoadOrder(request, ticket, places, (tuple(blocks),) * groups, sync)


def step(**orders: Any) -> StepOrders:
    return StepOrders(**{"identity": IDENTITY, **orders})


class Gate:
    """A place where threads are stopped until it is opened; `reached` is set by the first."""

    def __init__(self) -> None:
        self.reached = Event()
        self.opened = Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self.opened.wait(20)

    def open(self) -> None:
        self.opened.set()


@contextmanager
def ranks_of(
    service: MemoryService, *, world: int = 1, windows: tuple[bool, ...] = (), groups: int = 1, **changes: Any
) -> Iterator[list[Rank]]:
    """The ranks of one engine. Their parts are those of `service`, group by group of each rank."""
    settings = settings_with(**changes)
    ranks = [
        Rank(
            settings,
            RankParts(rank, world, tuple(service.parts[rank * groups : (rank + 1) * groups]), windows),
            MemoryClient(service),
        )
        for rank in range(world)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.side.shutdown()


def eventually(check: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait until `check` is true."""
    until = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.002)
