"""An engine's memory in bytearrays, a service in plain Python and real storages, for tests of the connector's
worker side."""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from pathlib import Path
from threading import Event, RLock
from typing import Any, cast

from dataplane import Place, open_backend
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
from engine_adapters.vllm.settings import Settings
from engine_adapters.vllm.worker import RankParts, Results, WorkerSide
from metaservice.client import AbortResult, Client, FinishResult, Places, RenewResult, WriteResult
from metaservice.client.results import now_ms
from metaservice.wire.schemas import FinishStatus, PartRef, StorageRef, WriteOutcome

PAGE_BYTES = 96
BLOCKS = 64
IDENTITY = Identity("i", "e", "one")
GARBAGE = 0xEE


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "big"), digest_size=32).digest()


def content(key: bytes, part: str, size_bytes: int = PAGE_BYTES) -> bytes:
    """What the page of a block has to hold."""
    return (blake2b(key + part.encode(), digest_size=32).digest() * (size_bytes // 32 + 1))[:size_bytes]


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


class _Session:
    def __init__(self, name: str, who: tuple[str, str], reply: WriteResult) -> None:
        self.name = name
        self.who = who
        self.reply = reply
        self.open = True


class MemoryService:
    """Blocks, write sessions and answers to repeated requests, as the service has them. `fail[call]` are
    failures that the next such calls meet instead; `before[call]` runs first, in the caller's thread."""

    def __init__(self, root: Path, parts: Sequence[str]) -> None:
        self.storage = StorageRef(name="s", kind="posix", options={"root": str(root), "fsync": "none"})
        self.parts = list(parts)
        self.lock = RLock()
        self.blocks: dict[tuple[str, bytes], dict[str, Any]] = {}
        self.sessions: dict[str, _Session] = {}
        self.answers: dict[tuple[Any, ...], Any] = {}
        self.numbers = count(1)
        self.calls: list[str] = []
        self.fail: dict[str, list[str]] = {}
        self.before: dict[str, Callable[[], None]] = {}
        self.ttl_ms = 0
        self.finish_ids: list[str] = []
        self.finishes_lost = 0
        """So many finishes are done, and their answers lost."""

    def entered(self, call: str) -> str | None:
        self.before.get(call, lambda: None)()
        with self.lock:
            self.calls.append(call)
            return self.fail[call].pop(0) if self.fail.get(call) else None

    def serves(self, key: bytes, instance: str = "i") -> bool:
        with self.lock:
            block = self.blocks.get((instance, key))
            return block is not None and len(block["sums"]) == len(self.parts)

    def forget(self, key: bytes, instance: str = "i") -> None:
        with self.lock:
            self.blocks.pop((instance, key), None)

    @property
    def sessions_open(self) -> int:
        with self.lock:
            return sum(session.open for session in self.sessions.values())

    def places(self, keys: Sequence[bytes], instance: str = "i") -> Places:
        """The places of blocks that serve."""
        with self.lock:
            found = [self.blocks[instance, key] for key in keys]
            return Places(
                keys=list(keys),
                locations=array("Q", [block["location"] for block in found]),
                generations=array("I", [1] * len(found)),
                storages=array("H", bytes(2 * len(found))),
                checksums=array("Q", [block["sums"][part] for block in found for part in self.parts]),
                storage_table=[self.storage],
                parts=[PartRef(name=part, bytes=PAGE_BYTES) for part in self.parts],
                cluster="c",
            )

    def stored(self, key: bytes, part: str, instance: str = "i") -> bytes:
        """The bytes that readers of a block get."""
        places = self.places([key], instance)
        ref = places.place(0, part)
        return open_backend("posix", self.storage.options).read(Place.of(ref), ref.checksum)

    def put(self, keys: Sequence[bytes]) -> Places:
        """Blocks that others stored."""
        backend = open_backend("posix", self.storage.options)
        for key in keys:
            location = next(self.numbers)
            sums = {
                part: backend.write(Place("c", location, 1, part, PAGE_BYTES, key), content(key, part))
                for part in self.parts
            }
            self.blocks["i", key] = {"location": location, "sums": sums, "session": ""}
        backend.close()
        return self.places(keys)

    def path(self, key: bytes, part: str) -> Path:
        """The file of one part."""
        location = self.blocks["i", key]["location"]
        root = Path(self.storage.options["root"])
        (found,) = root.rglob(f"{location:016x}-1.{part}")
        return found


class MemoryClient:
    """The calls of a worker process."""

    def __init__(self, service: MemoryService) -> None:
        self.service = service
        self.who = ("", "")
        self.closed = False
        self._numbers = count(1)

    def act_as(self, engine: str, incarnation: str) -> None:
        self.who = (engine, incarnation)

    def close(self) -> None:
        self.closed = True

    def start_write(
        self,
        instance: str,
        keys: list[bytes],
        *,
        parents: list[bytes | None],
        ttl_ms: int,
        request_id: str,
        traceparent: str,
    ) -> WriteResult:
        service = self.service
        failure = service.entered("start")
        who = self.who
        if self.closed:
            failure = "closed"
        if failure or not who[1]:
            return WriteResult(
                keys=keys, engine=who[0], incarnation=who[1], failure=failure or "not_registered"
            )
        assert len(parents) == len(keys)
        with service.lock:
            known = service.answers.get((who, request_id))
            if known is not None:
                assert list(known.keys) == keys, "a request id was used twice"
                return cast(WriteResult, known)
            name = f"w-0-{next(service.numbers)}"
            outcomes, locations = [], []
            for key in keys:
                block = service.blocks.get((instance, key))
                if block is None:
                    location = next(service.numbers)
                    service.blocks[instance, key] = {"location": location, "sums": {}, "session": name}
                    outcomes.append(WriteOutcome.write)
                    locations.append(location)
                else:
                    done = len(block["sums"]) == len(service.parts)
                    outcomes.append(WriteOutcome.present if done else WriteOutcome.in_progress)
                    locations.append(0)
            writes = WriteOutcome.write in outcomes
            ttl_ms = service.ttl_ms or ttl_ms
            reply = WriteResult(
                keys=keys,
                locations=array("Q", locations),
                generations=array("I", [int(location > 0) for location in locations]),
                storages=array("H", bytes(2 * len(keys))),
                storage_table=[service.storage],
                parts=[PartRef(name=part, bytes=PAGE_BYTES) for part in service.parts],
                cluster="c",
                session=name if writes else None,
                engine=who[0],
                incarnation=who[1],
                ttl_ms=ttl_ms,
                deadline_ms=now_ms() + ttl_ms,
                outcomes=bytes(outcomes),
                reasons=bytes(len(keys)),
                request_id=request_id,
            )
            service.answers[who, request_id] = reply
            if writes:
                service.sessions[name] = _Session(name, who, reply)
            return reply

    def _session(self, started: WriteResult) -> _Session | None:
        session = self.service.sessions.get(started.session or "")
        return session if session is not None and session.open else None

    def renew_write(self, started: WriteResult, *, ttl_ms: int) -> RenewResult:
        failure = self.service.entered("renew")
        if failure is None and self._session(started) is None:
            failure = "rejected:session_expired"
        return RenewResult(ttl_ms=ttl_ms, deadline_ms=0 if failure else now_ms() + ttl_ms, failure=failure)

    def finish(
        self,
        started: WriteResult,
        locations: Sequence[int],
        generations: Sequence[int],
        *,
        parts: list[str],
        ok: Sequence[bool],
        checksums: Sequence[int],
        request_id: str | None,
        traceparent: str,
    ) -> FinishResult:
        service = self.service
        request_id = request_id or f"{id(self)}-{next(self._numbers)}"
        failure = service.entered("finish")
        service.finish_ids.append(request_id)
        if failure:
            return FinishResult(
                status=bytes([FinishStatus.pending]) * len(locations), failure=failure, request_id=request_id
            )
        with service.lock:
            known = service.answers.get((self.who, request_id))
            if known is None:
                known = self._finish(started, locations, parts, ok, checksums, request_id)
                service.answers[self.who, request_id] = known
            if service.finishes_lost:
                service.finishes_lost -= 1
                return FinishResult(failure="connection_lost", request_id=request_id)
            return cast(FinishResult, known)

    def _finish(
        self,
        started: WriteResult,
        locations: Sequence[int],
        parts: list[str],
        ok: Sequence[bool],
        checksums: Sequence[int],
        request_id: str,
    ) -> FinishResult:
        service = self.service
        session = self._session(started)
        if session is None:
            return FinishResult(
                status=bytes([FinishStatus.removed]) * len(locations),
                failure="rejected:session_expired",
                request_id=request_id,
            )
        status = []
        by_location = {block["location"]: at for at, block in service.blocks.items()}
        for row, location in enumerate(locations):
            at = by_location.get(location)
            if at is None:
                status.append(FinishStatus.freed)
                continue
            block = service.blocks[at]
            for index, part in enumerate(parts):
                if at not in service.blocks:
                    continue
                if ok[row * len(parts) + index]:
                    block["sums"][part] = checksums[row * len(parts) + index]
                else:
                    del service.blocks[at]
            if at not in service.blocks:
                status.append(FinishStatus.freed)
            else:
                whole = len(block["sums"]) == len(service.parts)
                status.append(FinishStatus.serving if whole else FinishStatus.pending)
        serving = status.count(FinishStatus.serving)
        return FinishResult(status=bytes(status), published=serving, request_id=request_id)

    def abort(self, started: WriteResult) -> AbortResult:
        service = self.service
        failure = service.entered("abort")
        if failure:
            return AbortResult(failure=failure)
        with service.lock:
            session = self._session(started)
            if session is None:
                return AbortResult(failure="rejected:session_expired")
            session.open = False
            unfinished = [
                at
                for at, block in service.blocks.items()
                if block["session"] == session.name and len(block["sums"]) < len(service.parts)
            ]
            for at in unfinished:
                del service.blocks[at]
            return AbortResult(freed=len(unfinished))


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
