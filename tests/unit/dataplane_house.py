"""A small service in memory for tests of the worker daemon, and what they do with it."""

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dataplane import Backend, Place
from dataplane.backends.posix_layout import path_of
from dataplane.options import WorkerOptions
from dataplane.worker import Worker
from metaservice.client.calls import shard_of, shard_of_location
from metaservice.client.results import (
    ClusterResult,
    ConfirmResult,
    DeleteTask,
    LeaveResult,
    TasksResult,
    UnknownResult,
    now_ms,
)
from metaservice.wire.schemas import StorageRef
from metaservice.wire.schemas_cluster import ClusterShard

DATA = b"x" * 100
QUICK = WorkerOptions(
    poll_ms=20, sweep_ms=30, safe_age_ms=60_000, backoff_ms_min=5, backoff_ms_max=20, stop_ms=5_000
)
NO_SWEEPS = WorkerOptions(poll_ms=20, sweep_ms=3_600_000, backoff_ms_min=5, backoff_ms_max=20)


class Registration:
    """What the fake service's client says about the registration. Tests change it."""

    def __init__(self, storage_table: list[StorageRef]) -> None:
        self.active = True
        self.incarnation = "i1"
        self.lost = 0
        self.cluster = "c1"
        self.storage_table = storage_table
        self.failure: str | None = None

    def lose(self, cluster: str) -> None:
        """Registered anew, perhaps by a service of another cluster."""
        self.lost += 1
        self.incarnation += "'"
        self.cluster = cluster


class MemoryService:
    """The calls of a worker over plain Python state; `down` makes them fail, `on_unknown` runs while a
    question is under way. `leaderless` shards hand out no tasks and answer no questions."""

    def __init__(self, *storage_table: StorageRef, shards: int = 1) -> None:
        self.shards = shards
        self.leaderless: set[int] = set()
        self.asked: list[int | None] = []
        self.registration = Registration(list(storage_table))
        self.registered: list[str] = []
        self.cluster_name = "c1"
        self.lock = threading.Lock()
        self.known: set[tuple[int, int]] = set()
        self.tasks: list[DeleteTask] = []
        self.confirmed: list[tuple[str, list[bool]]] = []
        self.questions: list[int] = []
        self.calls = 0
        self.down = False
        self.on_unknown: Callable[[], None] = lambda: None

    def register_worker(self, worker: str, storages: Sequence[str]) -> Registration:
        self.registered.append(f"{worker} {','.join(storages)}")
        return self.registration

    def deregister(self) -> LeaveResult:
        self.registered.append("left")
        return LeaveResult()

    def cluster(self) -> ClusterResult:
        rows = [
            ClusterShard(
                shard=number, role="leader", status="", reason="", ready=True, leader="r", leader_url="",
                epoch=1, seq=1,
            )
            for number in range(self.shards)
        ]  # fmt: skip
        return ClusterResult(cluster=self.cluster_name, shards=rows)

    def take_tasks(self, *, limit: int, wait_ms: int, shard: int | None) -> TasksResult:
        self.calls += 1
        self.asked.append(shard)
        if self.down:
            return TasksResult(failure="refused_connection")
        if shard in self.leaderless:
            return TasksResult(failure="rejected:not_ready")
        with self.lock:
            mine = [task for task in self.tasks if shard is None or shard_of(task.task) == shard]
            self.tasks = [task for task in self.tasks if task not in mine]
        if not mine:
            time.sleep(wait_ms / 1_000)
            return TasksResult(cluster=self.cluster_name)
        return TasksResult(tasks=mine, cluster=self.cluster_name)

    def confirm_task(self, task: DeleteTask, *, ok: Sequence[bool] | None = None) -> ConfirmResult:
        if self.down:
            return ConfirmResult(failure="timeout")
        done = list(ok) if ok is not None else [True] * len(task.locations)
        self.confirmed.append((task.task, done))
        return ConfirmResult(gone=done.count(True), again=done.count(False))

    def unknown_places(
        self, storage: str, locations: Sequence[int], generations: Sequence[int]
    ) -> UnknownResult:
        self.questions.append(len(locations))
        shards = set(map(shard_of_location, locations))
        assert len(shards) == 1, "each leader knows its own shard only"
        if shards & self.leaderless:
            return UnknownResult(unknown=bytes(len(locations)), failure="rejected:not_ready")
        slots = zip(locations, generations, strict=True)
        unknown = bytes(slot not in self.known for slot in slots)
        self.on_unknown()
        return UnknownResult(unknown=unknown, failure="refused_connection" if self.down else None)


def task(
    name: str, *slots: tuple[int, int], parts: Sequence[str] = ("tp0",), ttl_ms: int = 30_000
) -> DeleteTask:
    return DeleteTask(
        task=name,
        storage=StorageRef(name="disk", kind="posix", options={}),
        parts=tuple(parts),
        locations=array("Q", [slot[0] for slot in slots]),
        generations=array("I", [slot[1] for slot in slots]),
        ttl_ms=ttl_ms,
        deadline_ms=now_ms() + ttl_ms,
    )


@contextmanager
def running(service: MemoryService, backend: Backend | None, options: WorkerOptions) -> Iterator[Worker]:
    worker = Worker(service, "w1", {"disk": backend}, options)
    stop = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            worker.run(stop)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        stop.set()
        thread.join(10)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`; fails after 10 s."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def put(backend: Backend, location: int, generation: int, part: str = "tp0", cluster: str = "c1") -> Place:
    place = Place(cluster, location, generation, part, len(DATA), b"k" * 16)
    backend.write(place, DATA)
    return place


def old(root: Path, *places: Place) -> None:
    """Make files two minutes old."""
    for place in places:
        age(Path(path_of(str(root), place)))


def age(path: Path) -> None:
    then = time.time() - 120
    os.utime(path, (then, then))


def stored(backend: Backend) -> set[tuple[int, int, str]]:
    return {
        (found.place.location, found.place.generation, found.place.part)
        for found in backend.scan()
        if found.place is not None
    }
