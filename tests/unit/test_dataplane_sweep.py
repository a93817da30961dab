"""Sweeps: what is deleted without a task, and above all what is not."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane import Backend, open_backend
from dataplane.backends.posix_layout import temporary_of
from tests.unit.dataplane_house import DATA, QUICK, MemoryService, age, old, put, running, stored, task, until


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


def test_a_sweep_takes_old_unknown_files_and_no_others(
    service: MemoryService, backend: Backend, root: Path
) -> None:
    known, stale, orphan, young = (
        put(backend, 1, 7),
        put(backend, 1, 6),
        put(backend, 2, 1, "tp1"),
        put(backend, 3, 1),
    )
    elsewhere = put(backend, 2, 1, cluster="c2")
    old(root, known, stale, orphan, elsewhere)
    unfinished = [Path(temporary_of(str(root), place, "ab" * 8, 1, 1)) for place in (known, orphan, young)]
    for path in unfinished:
        path.write_bytes(b"cut off")
    for path in unfinished[:2]:
        age(path)
    notes = root / "c1" / "01" / "notes"
    notes.write_text("foreign")
    age(notes)
    service.known = {(1, 7)}
    with running(service, backend, QUICK) as worker:
        until(lambda: worker.stats.sweeps >= 2)
    assert {(found.name, found.state) for found in backend.scan("c1")} == {
        ("c1/01/0000000000000001-7.tp0", "published"),
        ("c1/03/0000000000000003-1.tp0", "published"),
        (str(unfinished[0].relative_to(root)), "temporary"),
        (str(unfinished[2].relative_to(root)), "temporary"),
        ("c1/01/notes", "foreign"),
    }
    assert [found.place for found in backend.scan("c2")] == [elsewhere._replace(size_bytes=0, key=b"")]
    stats = worker.stats
    assert (stats.swept, stats.swept_temporary, stats.foreign, stats.sweep_failed) == (2, 1, 1, 0)


def test_a_sweep_asks_in_bounded_batches_and_once_a_location(
    service: MemoryService, backend: Backend, root: Path
) -> None:
    for number in range(1_100):
        old(root, put(backend, number, 1, "tp0"), put(backend, number, 1, "tp1"))
    with running(service, backend, QUICK) as worker:
        until(lambda: worker.stats.sweeps >= 1)
    assert worker.stats.swept == 2_200
    assert max(service.questions) <= 1_024
    assert 1_100 <= sum(service.questions) <= 1_103, (
        "parts of a location that fell into two batches ask twice"
    )


def test_nothing_is_swept_while_the_service_is_away(
    service: MemoryService, backend: Backend, root: Path
) -> None:
    old(root, put(backend, 1, 1))
    service.down = True
    with running(service, backend, QUICK) as worker:
        until(lambda: len(service.questions) >= 3)
        assert worker.stats.sweeps == 0
        assert stored(backend) == {(1, 1, "tp0")}
        service.down = False
        until(lambda: worker.stats.swept == 1)
    assert stored(backend) == set()


def test_an_answer_is_not_believed_when_the_registration_changed_meanwhile(
    service: MemoryService, backend: Backend, root: Path
) -> None:
    """It may be the answer of another service, which took over the address between question and answer."""
    old(root, put(backend, 1, 1))
    service.on_unknown = lambda: service.registration.lose("c1")
    with running(service, backend, QUICK) as worker:
        until(lambda: len(service.questions) >= 3)
        assert (worker.stats.swept, worker.stats.sweeps) == (0, 0)
    assert stored(backend) == {(1, 1, "tp0")}


def test_nothing_is_done_without_a_registration(service: MemoryService, backend: Backend, root: Path) -> None:
    old(root, put(backend, 1, 1))
    service.registration.active = False
    service.tasks = [task("t1", (1, 1))]
    with running(service, backend, QUICK):
        time.sleep(0.2)
    assert (service.calls, service.questions) == (0, [])
    assert stored(backend) == {(1, 1, "tp0")}


def test_a_file_that_changed_since_it_was_found_stays(
    service: MemoryService, backend: Backend, root: Path
) -> None:
    place = put(backend, 1, 1)
    old(root, place)

    def replace() -> None:
        backend.delete(place)
        backend.write(place, DATA)

    service.on_unknown = replace
    with running(service, backend, QUICK) as worker:
        until(lambda: worker.stats.sweeps >= 2)
    assert worker.stats.swept == 0
    assert backend.read(place) == DATA
