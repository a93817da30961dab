"""A worker for a service of many shards: each shard's leader is asked, and one without a leader keeps the
others from nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane import Backend, open_backend
from dataplane.tasks import LANES_MAX, dealt
from tests.unit.dataplane_house import NO_SWEEPS, QUICK, MemoryService, old, put, running, stored, task, until

SHARD_BITS = 44


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def backend(root: Path) -> Iterator[Backend]:
    opened = open_backend("posix", {"root": str(root), "fsync": "none"})
    yield opened
    opened.close()


@pytest.mark.parametrize("shards", [1, 3, LANES_MAX, 200])
def test_every_shard_is_asked_in_one_lane(shards: int) -> None:
    lanes = dealt(shards)
    asked = sorted(shard for lane in lanes for shard in lane if shard is not None)
    assert asked == (list(range(shards)) if shards > 1 else [])
    assert 1 <= len(lanes) <= LANES_MAX


def test_tasks_of_all_shards_are_done_though_one_has_no_leader(backend: Backend) -> None:
    service = MemoryService(shards=20)
    service.leaderless = {4}
    slots = [((shard << SHARD_BITS) + 1, 1) for shard in range(20)]
    for location, generation in slots:
        put(backend, location, generation)
    service.tasks = [task(f"t-{shard}-1-1", slot) for shard, slot in enumerate(slots)]
    with running(service, backend, NO_SWEEPS) as worker:
        until(lambda: worker.stats.tasks == 19)
        assert stored(backend) == {(*slots[4], "tp0")}
        assert set(service.asked) == set(range(20))
        service.leaderless = set()
        until(lambda: worker.stats.tasks == 20)
    assert worker.stats.deleted == 20
    assert stored(backend) == set()


def test_a_service_of_one_shard_is_asked_as_ever(backend: Backend) -> None:
    service = MemoryService()
    with running(service, backend, NO_SWEEPS):
        until(lambda: len(service.asked) >= 2)
    assert set(service.asked) == {None}


def test_a_sweep_asks_each_shard_about_its_own_places(backend: Backend, root: Path) -> None:
    service = MemoryService(shards=3)
    known, orphans, beyond = [], [], put(backend, 3 << SHARD_BITS, 1)
    for shard in range(3):
        known.append(put(backend, (shard << SHARD_BITS) + 1, 1))
        orphans.append(put(backend, (shard << SHARD_BITS) + 2, 1))
    old(root, beyond, *known, *orphans)
    service.known = {(place.location, place.generation) for place in known}
    with running(service, backend, QUICK) as worker:
        until(lambda: worker.stats.sweeps >= 1)
    kept = {(place.location, 1, "tp0") for place in (*known, beyond)}
    assert stored(backend) == kept, "no shard of this service can know the last one: it is left alone"
    assert (worker.stats.swept, worker.stats.foreign) == (3, 1)


def test_nothing_of_a_shard_without_a_leader_is_swept(backend: Backend, root: Path) -> None:
    service = MemoryService(shards=2)
    service.leaderless = {1}
    place = put(backend, (1 << SHARD_BITS) + 1, 1)
    old(root, place)
    with running(service, backend, QUICK) as worker:
        until(lambda: len(service.questions) >= 3)
        assert stored(backend) == {(place.location, 1, "tp0")}
        service.leaderless = set()
        until(lambda: worker.stats.swept == 1)
