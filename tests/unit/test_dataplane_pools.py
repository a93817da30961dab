"""Who owns a pool, and when: with each registration another one, none after the end."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane import Backend, OpenFailed, Place, ReadRefused, WriteFailed, open_backend
from dataplane.backends import shm_layout as layout
from dataplane.backends import shm_pool
from dataplane.options import WorkerOptions, WorkerStats
from dataplane.pools import PoolOwner
from dataplane.registry import pools_of
from dataplane.service import Standing
from dataplane.worker import Worker
from metaservice.client.calls import shard_of_location
from metaservice.client.results import LeaveResult
from metaservice.core.model import VOLATILE_KINDS
from metaservice.wire.schemas import StorageRef
from tests.unit.dataplane_house import (
    DATA,
    NO_SWEEPS,
    QUICK,
    MemoryService,
    put,
    running,
    stored,
    task,
    until,
)


@pytest.fixture
def ref(tmp_path: Path) -> StorageRef:
    return StorageRef(name="disk", kind="shm", options={"dir": str(tmp_path), "slot_bytes": "4096"})


@pytest.fixture
def service(ref: StorageRef) -> MemoryService:
    return MemoryService(ref)


@pytest.fixture
def owner() -> Iterator[PoolOwner]:
    owner = PoolOwner(WorkerStats())
    yield owner
    owner.leave()


def opened(ref: StorageRef, pool: str) -> Backend:
    """As an engine does."""
    return open_backend(ref.kind, {**ref.options, "pool": pool})


def there(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- names and offsets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("location", [0, 1, (1 << 44) - 1, 1 << 44, (255 << 44) + 7])
def test_a_location_is_its_shards_file_and_its_slot(location: int) -> None:
    place = Place("c1", location, 1, "g0.tp1")
    shard, part = layout.parse_file(layout.file_of(place)) or (-1, "")
    assert (shard, part) == (shard_of_location(location), "g0.tp1")
    slot = layout.offset_of(place, 4096) // 4096
    assert layout.location_of(shard, slot) == location


@pytest.mark.parametrize(
    "name",
    [
        "ucm-c1",
        "ucm-@p",
        "ucm-c1@",
        "ucm-.c@p",
        "ucm-c1@a b",
        "ucm-c1@" + "p" * 65,
        "xucm-c1@p",
        "ucm-c1@p\n",
    ],
)
def test_folders_of_others_are_no_pools(name: str) -> None:
    assert layout.parse_folder(name) is None


def test_a_pools_folder_says_whose_it_is() -> None:
    for cluster, pool, hidden in (("c-1.x_y", "a:b@c+d", False), ("c1", "..", True)):
        path = layout.folder_of("/d", cluster, pool, hidden)
        assert layout.parse_folder(path.removeprefix("/d/")) == (cluster, pool, hidden)


@pytest.mark.parametrize(
    "name", ["about", "0", "0.", "00.tp0", "256.tp0", "-1.tp0", "0.a/b", "0.a\n", "x.tp0"]
)
def test_files_of_others_hold_no_slots(name: str) -> None:
    assert layout.parse_file(name) is None


@pytest.mark.parametrize("slot_bytes", [1, 4095, 4096, 4097, 1 << 20])
def test_slots_are_whole_pages_that_take_the_largest_part(slot_bytes: int) -> None:
    stride = layout.stride_of(slot_bytes)
    assert stride % 4096 == 0
    assert 0 <= stride - layout.FRONT_BYTES - slot_bytes < 4096


def test_a_label_is_read_as_written_and_no_other_bytes_are_one() -> None:
    label = layout.Label(True, 7, 1 << 40, 1_700_000_000_000_000_000, 123)
    front = bytes(512) + layout.encode_label(label)
    assert layout.decode_label(front) == label
    assert layout.decode_label(front[:-1]) is None
    for at in range(512, len(front)):
        bad = bytearray(front)
        bad[at] ^= 1
        assert layout.decode_label(bytes(bad)) is None, at


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"dir": "relative"}, "options.dir", "absolute"),
        ({"dir": "/with\0nul"}, "options.dir", "absolute"),
        ({"dir": "{tmp}/absent"}, "options.dir", "no directory"),
        ({"slot_bytes": ""}, "options.slot_bytes", "number"),
        ({"slot_bytes": "0"}, "options.slot_bytes", "number"),
        ({"slot_bytes": "٣"}, "options.slot_bytes", "number"),
        ({"slot_bytes": "9" * 5_000}, "options.slot_bytes", "number"),
        ({"threads": "0"}, "options.threads", "1..64"),
        ({"pool": ""}, "options.pool", "no worker owns it"),
        ({"root": "/x"}, "options.root", "dir, slot_bytes, pool, threads"),
    ],
)
def test_what_cannot_be_opened_says_why(
    tmp_path: Path, ref: StorageRef, change: dict[str, str], field: str, says: str
) -> None:
    shm_pool.make({**ref.options, "pool": "p"}, "c1", "disk")
    options = {name: value.format(tmp=tmp_path) for name, value in change.items()}
    with pytest.raises(OpenFailed) as failed:
        open_backend("shm", {**ref.options, "pool": "p", **options})
    assert failed.value.field == field
    assert says in failed.value.detail


# --- the owner -----------------------------------------------------------------------------------------


def test_only_volatile_kinds_have_pools() -> None:
    assert pools_of("posix") is None
    assert pools_of("nothing") is None
    assert VOLATILE_KINDS and all(map(pools_of, VOLATILE_KINDS)), "the service and its workers mean the same"
    with pytest.raises(OpenFailed, match="has no pools"):
        PoolOwner(WorkerStats()).own(StorageRef(name="d", kind="posix", options={}), Standing("c1", "i1", 0))


def test_each_registration_has_a_pool_of_its_own(tmp_path: Path, ref: StorageRef, owner: PoolOwner) -> None:
    first = owner.own(ref, Standing("c1", "i1", 0))
    assert first.capabilities.volatile
    place = put(opened(ref, "i1"), 1, 1)
    assert owner.own(ref, Standing("c1", "i1", 0)) is first
    assert first.read(place) == DATA, "still the same registration"
    second = owner.own(ref, Standing("c1", "i2", 1))
    assert there(tmp_path) == {"ucm-c1@i2"}
    for backend in (first, second):
        with pytest.raises(ReadRefused) as refused:
            backend.read(place)
        assert refused.value.reason == "missing"
    owner.leave()
    assert there(tmp_path) == set()
    with pytest.raises(OpenFailed):
        owner.own(ref, Standing("c1", "i3", 2))
    assert there(tmp_path) == set(), "who left owns nothing any more"


def test_what_a_killed_owner_left_is_removed_and_what_others_own_stays(
    tmp_path: Path, ref: StorageRef, owner: PoolOwner
) -> None:
    for cluster, storage, pool in (("c1", "disk", "dead"), ("c1", "other", "o1"), ("c2", "disk", "o2")):
        shm_pool.make({**ref.options, "pool": pool}, cluster, storage)
    owner.own(ref, Standing("c1", "i1", 0))
    assert there(tmp_path) == {"ucm-c1@i1", "ucm-c1@o1", "ucm-c2@o2"}


def test_a_pool_that_somebody_removed_is_made_anew_and_empty(
    tmp_path: Path, ref: StorageRef, owner: PoolOwner
) -> None:
    """Cleaners of temporary files do such things. What was in it is a miss; what is written now is kept."""
    backend = owner.own(ref, Standing("c1", "i1", 0))
    place = put(backend, 1, 1)
    shutil.rmtree(tmp_path / "ucm-c1@i1")
    with pytest.raises(WriteFailed) as failed:
        put(backend, 2, 1)
    assert failed.value.reason == "root_missing"
    assert owner.own(ref, Standing("c1", "i1", 0)) is backend
    with pytest.raises(ReadRefused):
        backend.read(place)
    put(backend, 2, 1)
    assert stored(backend) == {(2, 1, "tp0")}


# --- the worker ----------------------------------------------------------------------------------------


def test_a_worker_makes_its_pool_deletes_in_it_and_takes_it_away_after_it_left(
    tmp_path: Path, ref: StorageRef, service: MemoryService, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_leave: list[set[str]] = []
    real = service.deregister

    def deregister() -> LeaveResult:
        at_leave.append(there(tmp_path))
        return real()

    monkeypatch.setattr(service, "deregister", deregister)
    with running(service, None, NO_SWEEPS) as worker:
        until(lambda: service.calls > 0)
        engine = opened(ref, "i1")
        put(engine, 1, 1)
        put(engine, 2, 1)
        service.tasks = [task("t1", (1, 1))]
        until(lambda: service.confirmed == [("t1", [True])])
        assert stored(engine) == {(2, 1, "tp0")}
    assert at_leave == [{"ucm-c1@i1"}], "the service hears first, so that nobody is sent to what is gone"
    assert there(tmp_path) == set()
    assert (worker.stats.pools, worker.stats.deleted) == (1, 1)


def test_a_worker_that_is_registered_anew_has_a_new_pool(
    tmp_path: Path, ref: StorageRef, service: MemoryService
) -> None:
    """Its heartbeats were late, the service let it go: its locations are gone, and so are their bytes."""
    with running(service, None, NO_SWEEPS) as worker:
        until(lambda: service.calls > 0)
        put(opened(ref, "i1"), 1, 1)
        service.registration.active = False
        service.registration.lost += 1
        service.registration.incarnation = "i2"
        service.registration.active = True
        until(lambda: there(tmp_path) == {"ucm-c1@i2"})
        service.tasks = [task("t1", (1, 1))]
        until(lambda: service.confirmed == [("t1", [True])])
        assert worker.stats.pools == 2


def test_no_block_of_a_volatile_storage_is_swept(service: MemoryService, ref: StorageRef) -> None:
    """What the service does not know there is a write under way or dies with the pool."""
    options = WorkerOptions(poll_ms=20, sweep_ms=10, safe_age_ms=0, backoff_ms_min=5, backoff_ms_max=20)
    with running(service, None, options) as worker:
        until(lambda: service.calls > 0)
        engine = opened(ref, "i1")
        put(engine, 1, 1)
        until(lambda: worker.stats.sweeps > 3)
        assert stored(engine) == {(1, 1, "tp0")}
    assert service.questions == []


def test_a_worker_without_room_for_its_pool_waits_for_it(
    tmp_path: Path, ref: StorageRef, service: MemoryService
) -> None:
    ref.options["dir"] = str(tmp_path / "later")
    with running(service, None, QUICK):
        threading.Event().wait(0.2)
        assert service.calls == 0, "no task is taken by a worker that could not do it"
        (tmp_path / "later").mkdir()
        until(lambda: service.calls > 0)
        assert there(tmp_path / "later") == {"ucm-c1@i1"}


def test_pools_go_even_when_the_service_does_not_hear_the_goodbye(
    tmp_path: Path, service: MemoryService, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def deaf() -> LeaveResult:
        over.wait(10)
        return LeaveResult()

    monkeypatch.setattr(service, "deregister", deaf)
    options = WorkerOptions(poll_ms=20, sweep_ms=3_600_000, stop_ms=100)
    stop = threading.Event()
    worker = Worker(service, "w1", {"disk": None}, options)
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    until(lambda: service.calls > 0)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert there(tmp_path) == set()
    over.set()
