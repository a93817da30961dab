"""The worker daemon: tasks, outages, whom it believes, and its own end."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dataplane import Backend, open_backend
from dataplane.options import WorkerOptions
from dataplane.worker import Worker, run_worker
from metaservice.client.results import ConfirmResult, DeleteTask
from metaservice.wire.schemas import StorageRef
from tests.unit.dataplane_house import NO_SWEEPS, QUICK, MemoryService, old, put, running, stored, task, until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def backend(root: Path) -> Iterator[Backend]:
    opened = open_backend("posix", {"root": str(root), "fsync": "none"})
    yield opened
    opened.close()


@pytest.fixture
def service() -> MemoryService:
    return MemoryService()


# --- tasks ---------------------------------------------------------------------------------------------


def test_a_task_deletes_all_parts_of_its_locations_and_nothing_else(
    service: MemoryService, backend: Backend
) -> None:
    for part in ("tp0", "tp1"):
        for slot in ((1, 1), (1, 2), (2, 1), (3, 1)):
            put(backend, *slot, part)
    put(backend, 1, 1, "tp0", cluster="c2")
    service.tasks = [task("t1", (1, 1), (3, 1), parts=("tp0", "tp1"))]
    with running(service, backend, NO_SWEEPS) as worker:
        until(lambda: service.confirmed != [])
    assert service.registered == ["w1 disk", "left"]
    assert service.confirmed == [("t1", [True, True])]
    rest = {(1, 2, "tp0"), (1, 2, "tp1"), (2, 1, "tp0"), (2, 1, "tp1"), (1, 1, "tp0")}
    assert stored(backend) == rest
    assert [
        found.name.split("/")[0] for found in backend.scan() if found.place and found.place[1:3] == (1, 1)
    ] == ["c2"]
    assert (worker.stats.tasks, worker.stats.deleted, worker.stats.absent) == (1, 4, 0)


def test_what_is_gone_already_is_gone(service: MemoryService, backend: Backend) -> None:
    put(backend, 1, 1)
    service.tasks = [task("t1", (1, 1), (2, 1)), task("t2", (1, 1))]
    with running(service, backend, NO_SWEEPS) as worker:
        until(lambda: len(service.confirmed) == 2)
    assert service.confirmed == [("t1", [True, True]), ("t2", [True])]
    assert (worker.stats.deleted, worker.stats.absent) == (1, 2)


def test_what_cannot_be_deleted_is_not_called_gone(
    service: MemoryService, backend: Backend, root: Path
) -> None:
    put(backend, 1, 1)
    root.rename(root.with_name("away"))
    service.tasks = [task("t1", (1, 1))]
    with running(service, backend, NO_SWEEPS) as worker:
        until(lambda: len(service.confirmed) == 1)
        root.with_name("away").rename(root)
        service.tasks = [task("t2", (1, 1))]
        until(lambda: len(service.confirmed) == 2)
    assert service.confirmed == [("t1", [False]), ("t2", [True])]
    assert (worker.stats.failed, worker.stats.deleted) == (1, 1)


def test_large_tasks_are_done_whole(service: MemoryService, backend: Backend) -> None:
    for number in range(600):
        put(backend, number, 1)
    service.tasks = [task("t1", *((number, 1) for number in range(600)))]
    with running(service, backend, NO_SWEEPS):
        until(lambda: service.confirmed != [])
    assert service.confirmed == [("t1", [True] * 600)]
    assert stored(backend) == set()


def test_a_task_whose_time_is_over_is_left_to_the_next_worker(
    service: MemoryService, backend: Backend
) -> None:
    put(backend, 1, 1)
    service.tasks = [task("late", (1, 1), ttl_ms=0)]
    with running(service, backend, NO_SWEEPS):
        until(lambda: service.confirmed != [])
    assert service.confirmed == [("late", [False])]
    assert stored(backend) == {(1, 1, "tp0")}


def test_a_task_for_a_storage_of_others_is_handed_back(service: MemoryService, backend: Backend) -> None:
    put(backend, 1, 1)
    foreign = StorageRef(name="elsewhere", kind="posix", options={})
    mine = task("t1", (1, 1))
    service.tasks = [
        DeleteTask(
            task="t1",
            storage=foreign,
            parts=mine.parts,
            locations=mine.locations,
            generations=mine.generations,
            ttl_ms=mine.ttl_ms,
            deadline_ms=mine.deadline_ms,
        )
    ]
    with running(service, backend, NO_SWEEPS):
        until(lambda: service.confirmed != [])
    assert service.confirmed == [("t1", [False])]
    assert stored(backend) == {(1, 1, "tp0")}


def test_an_outage_is_waited_out_without_haste(service: MemoryService, backend: Backend) -> None:
    put(backend, 1, 1)
    service.down = True
    service.tasks = [task("t1", (1, 1))]
    slow = WorkerOptions(poll_ms=20, sweep_ms=3_600_000, backoff_ms_min=20, backoff_ms_max=50)
    with running(service, backend, slow):
        time.sleep(0.5)
        assert 3 <= service.calls <= 25, "neither given up nor hammering"
        assert stored(backend) == {(1, 1, "tp0")}
        service.down = False
        until(lambda: service.confirmed != [])
    assert stored(backend) == set()


def test_a_confirmation_that_does_not_arrive_is_repeated(
    service: MemoryService, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, 1, 1)
    service.tasks = [task("t1", (1, 1))]
    real, tries = service.confirm_task, []

    def unreliable(task: DeleteTask, *, ok: Sequence[bool] | None = None) -> ConfirmResult:
        tries.append(task.task)
        return ConfirmResult(failure="timeout") if len(tries) < 3 else real(task, ok=ok)

    monkeypatch.setattr(service, "confirm_task", unreliable)
    with running(service, backend, NO_SWEEPS):
        until(lambda: service.confirmed != [])
    assert tries == ["t1"] * 3
    assert service.confirmed == [("t1", [True])]


@pytest.mark.parametrize("failure", ["rejected:task_unknown", "rejected:foreign_task", "rejected:reregister"])
def test_a_confirmation_that_is_rejected_is_not_repeated(
    service: MemoryService, backend: Backend, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    put(backend, 1, 1)
    service.tasks = [task("t1", (1, 1))]
    tries: list[str] = []

    def rejected(task: DeleteTask, *, ok: Sequence[bool] | None = None) -> ConfirmResult:
        tries.append(task.task)
        return ConfirmResult(failure=failure)

    monkeypatch.setattr(service, "confirm_task", rejected)
    with running(service, backend, NO_SWEEPS):
        until(lambda: tries != [])
        time.sleep(0.1)
    assert tries == ["t1"]


# --- whom it believes ----------------------------------------------------------------------------------


def test_tasks_of_another_cluster_are_not_done(service: MemoryService, backend: Backend) -> None:
    put(backend, 1, 1)
    put(backend, 1, 1, cluster="c2")
    with running(service, backend, NO_SWEEPS) as worker:
        until(lambda: service.calls > 0)
        service.cluster_name = "c2"
        service.tasks = [task("t1", (1, 1))]
        until(lambda: worker.stats.refused > 0)
    assert len(list(backend.scan())) == 2
    assert service.confirmed == []


@pytest.mark.parametrize("pinned", [None, "c1"])
def test_a_service_of_another_cluster_makes_it_do_nothing(
    service: MemoryService, backend: Backend, root: Path, pinned: str | None
) -> None:
    """A wiped service at the same address knows nothing, and would call everything an orphan."""
    old(root, put(backend, 1, 1))
    service.known = {(1, 1)}
    options = WorkerOptions(
        cluster=pinned, poll_ms=20, sweep_ms=20, safe_age_ms=60_000, backoff_ms_min=5, backoff_ms_max=20
    )
    with running(service, backend, options) as worker:
        until(lambda: worker.stats.sweeps > 0)
        service.registration.lose("c2")
        service.cluster_name, service.known = "c2", set()
        asked, taken = len(service.questions), service.calls
        time.sleep(0.3)
        assert len(service.questions) <= asked + 1
        assert service.calls <= taken + 1
        assert stored(backend) == {(1, 1, "tp0")}
        service.registration.lose("c1")
        service.cluster_name = "c1"
        until(lambda: stored(backend) == set())


def test_it_registers_with_no_other_cluster_than_it_was_told(
    service: MemoryService, backend: Backend
) -> None:
    service.tasks = [task("t1", (1, 1))]
    options = WorkerOptions(cluster="mine", poll_ms=20, sweep_ms=20, backoff_ms_min=5, backoff_ms_max=20)
    with running(service, backend, options) as worker:
        time.sleep(0.2)
    assert (service.calls, service.questions, worker.stats.sweeps) == (0, [], 0)


# --- its life ------------------------------------------------------------------------------------------


def test_storages_are_opened_as_the_service_describes_them_and_waited_for(
    root: Path, backend: Backend
) -> None:
    put(backend, 1, 1)
    root.rename(root.with_name("away"))
    service = MemoryService(StorageRef(name="disk", kind="posix", options={"root": str(root)}))
    service.tasks = [task("t1", (1, 1))]
    with running(service, None, NO_SWEEPS):
        time.sleep(0.2)
        assert service.calls == 0, "no task is taken by a worker that could not do it"
        root.with_name("away").rename(root)
        until(lambda: service.confirmed == [("t1", [True])])
    assert stored(backend) == set()


def test_a_storage_that_the_service_does_not_describe_is_waited_for(
    service: MemoryService, root: Path
) -> None:
    with running(service, None, NO_SWEEPS):
        time.sleep(0.1)
    assert (service.calls, service.registered) == (0, ["w1 disk", "left"])
    with running(service, None, NO_SWEEPS):
        time.sleep(0.1)
        assert service.calls == 0
        service.registration.storage_table = [
            StorageRef(name="disk", kind="posix", options={"root": str(root)})
        ]
        until(lambda: service.calls > 0)


def test_a_fault_of_its_own_ends_the_worker_loudly(
    service: MemoryService, backend: Backend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old(root, put(backend, 1, 1))
    monkeypatch.setattr(service, "unknown_places", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Worker(service, "w1", {"disk": backend}, QUICK).run(threading.Event())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it(service: MemoryService, backend: Backend, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    put(backend, 1, 1)
    service.tasks = [task("t1", (1, 1))]

    def kill() -> None:
        until(lambda: service.confirmed != [])
        os.kill(os.getpid(), number)

    killer = threading.Thread(target=kill)
    killer.start()
    stats = run_worker(service, "w1", {"disk": backend}, NO_SWEEPS)
    killer.join()
    assert stats.deleted == 1
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    "field",
    ["tasks_max", "sweep_ms", "backoff_ms_min", "backoff_ms_max", "poll_ms", "safe_age_ms", "stop_ms"],
)
def test_options_that_cannot_be_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        WorkerOptions(**{field: -1})  # type: ignore[arg-type]


def test_a_worker_without_storages_is_refused(service: MemoryService) -> None:
    with pytest.raises(ValueError, match="storages"):
        Worker(service, "w1", {})
