"""Worker processes against the real service: tasks change hands, orphans go, and what is known stays."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplane import Backend, Place, open_backend
from dataplane.backends.posix_layout import path_of, temporary_of
from metaservice.client.results import WriteResult
from tests.functional.client_service import FINGERPRINT, ROOT, Service, eventually, new_keys

SIZE_BYTES = int(FINGERPRINT["parts"][0]["bytes"])
PARTS = [str(part["name"]) for part in FINGERPRINT["parts"]]
FLAGS = {
    "task-ttl-ms": 1_500,
    "reclaim-delay-ms": 100,
    "late-write-ms": 300,
    "lease-ms-max": 1_000,
}
QUICK = ("--sweep-ms", "200", "--safe-age-ms", "60000", "--poll-ms", "200", "--backoff-ms-max", "500")
NO_SWEEPS = ("--sweep-ms", "3600000", "--poll-ms", "200", "--backoff-ms-max", "500")

# A worker that is as real as the others up to the moment when it has bytes to delete: its disk hangs.
HANGING_WORKER = """
import sys, time
from dataplane.backends.posix import Posix
from dataplane.worker import run_worker
from metaservice.client import Client, ClientConfig

class Hanging(Posix):
    def delete_many(self, places):
        print(len(places), flush=True)
        time.sleep(3600)

url, root, name = sys.argv[1:]
run_worker(Client(ClientConfig(url=url)), "hanging-" + name, {"s-" + name: Hanging(root, "none", 1)})
"""


def started_service(folder: Path, port: int) -> Service:
    service = Service(
        folder, port, *(text for flag, value in FLAGS.items() for text in (f"--{flag}", str(value)))
    )
    service.start()
    return service


class House:
    """In one service: a tenant, storage and instance of its own, one writing engine and any number of
    workers."""

    def __init__(self, service: Service, folder: Path, name: str) -> None:
        self.service = service
        self.folder = folder
        self.name = name
        self.root = folder / "storage"
        self.root.mkdir()
        self.client = service.client()
        self.set_up()
        self.client.put_group(f"g-{name}", f"t-{name}", [f"s-{name}"])
        self.client.put_instance(f"i-{name}", f"g-{name}", FINGERPRINT)
        self.client.register_engine(f"e-{name}", instance=f"i-{name}")
        self.backend: Backend = open_backend("posix", {"root": str(self.root), "fsync": "none"})
        self._workers: list[subprocess.Popen[str]] = []

    def set_up(self) -> None:
        self.client.put_tenant(f"t-{self.name}")
        self.client.put_storage(f"s-{self.name}", "posix", {"root": str(self.root)})

    def worker(self, *flags: str) -> "subprocess.Popen[str]":
        who = ("--worker", f"w-{self.name}", "--storage", f"s-{self.name}")
        words = ["-m", "metaservice.cli.worker", "--url", self.service.url, *who, *flags]
        return self._start(words, subprocess.DEVNULL)

    def hanging_worker(self) -> "subprocess.Popen[str]":
        return self._start(
            ["-c", HANGING_WORKER, self.service.url, str(self.root), self.name], subprocess.PIPE
        )

    def _start(self, words: list[str], stdout: int) -> "subprocess.Popen[str]":
        with (self.folder / "workers.log").open("a") as log:
            child = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=stdout, stderr=log, text=True)
        self._workers.append(child)
        return child

    def start_write(self, keys: list[bytes], **changes: Any) -> WriteResult:
        started = self.client.start_write(f"i-{self.name}", keys, **changes)
        assert started.failure is None, (started.failure, started.detail)
        assert len(started.writable) == len(keys)
        return started

    def write(self, keys: list[bytes]) -> list[Place]:
        """Write a chain of blocks, bytes and all; returns their places."""
        started = self.start_write(keys)
        places = [Place.of(started.place(row, part)) for row in range(len(keys)) for part in PARTS]
        checksums = [self.backend.write(place, content(place)) for place in places]
        done = self.client.finish(started, started.locations, started.generations, checksums=checksums)
        assert (done.failure, done.published) == (None, len(keys))
        return places

    def remove(self, keys: list[bytes]) -> int:
        return self.client.remove(f"i-{self.name}", keys).removed

    def worker_status(self) -> str:
        workers = self.client.get_json("/v1/workers?page_size=1000")["items"]
        return next((str(row["status"]) for row in workers if row["id"] == f"w-{self.name}"), "")

    def stored(self) -> set[str]:
        return {found.name for found in self.backend.scan()}

    def blocks_used(self) -> int:
        usage = self.client.get_json(f"/v1/tenants/t-{self.name}")["usage"]
        return int(usage["blocks"])

    def close(self) -> None:
        for child in self._workers:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
        self.client.close()
        self.backend.close()


def content(place: Place) -> bytes:
    return place.key[:1] * SIZE_BYTES


def aged(path: Path) -> Path:
    """Make a file an hour old."""
    then = time.time() - 3_600
    os.utime(path, (then, then))
    return path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[Service]:
    shared = started_service(tmp_path_factory.mktemp("service"), free_port())
    yield shared
    shared.stop()


@pytest.fixture
def house(service: Service, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[House]:
    opened = House(service, tmp_path, request.node.name[-40:])
    yield opened
    opened.close()


@pytest.fixture
def own_house(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[House]:
    """With a service that the test may kill."""
    service = started_service(tmp_path, free_port())
    opened = House(service, tmp_path, "own")
    yield opened
    opened.close()
    service.stop()


def file_of(house: House, place: Place) -> Path:
    return Path(path_of(str(house.root), place))


def test_removed_blocks_lose_their_bytes_and_a_stopped_worker_leaves(house: House) -> None:
    keys = new_keys(20)
    places = house.write(keys)
    kept = house.write(new_keys(3))
    worker = house.worker(*NO_SWEEPS)
    assert house.remove(keys) == 20
    eventually(lambda: len(house.stored()) == len(kept))
    assert not any(file_of(house, place).exists() for place in places)
    assert house.backend.read_many(kept) == [content(place) for place in kept]
    assert house.worker_status() == "active"
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(10) == 0
    assert house.worker_status() == ""


@pytest.mark.torture
def test_tasks_of_a_killed_worker_go_to_another(house: House) -> None:
    """kill -9 with tasks in hand: nobody hands them back, their deadline does."""
    keys = new_keys(30)
    house.write(keys)
    hanging = house.hanging_worker()
    house.remove(keys)
    assert hanging.stdout is not None
    assert int(hanging.stdout.readline()) == 30 * len(PARTS)
    second = house.worker(*NO_SWEEPS)
    time.sleep(0.3)
    assert len(house.stored()) == 30 * len(PARTS), "the first worker still has its time"
    hanging.kill()
    eventually(lambda: house.stored() == set())
    assert second.poll() is None
    eventually(lambda: house.blocks_used() == 0)
    assert house.write(keys), "the keys can be written again"


@pytest.mark.torture
@pytest.mark.slow
def test_tasks_of_a_hanging_worker_go_to_another_too(house: House) -> None:
    """Its disk hangs, its heartbeats do not: only the task's own deadline tells."""
    keys = new_keys(5)
    house.write(keys)
    hanging = house.hanging_worker()
    house.remove(keys)
    assert hanging.stdout is not None
    hanging.stdout.readline()
    house.worker(*NO_SWEEPS)
    eventually(lambda: house.stored() == set())
    assert hanging.poll() is None


def test_orphans_and_stale_generations_are_swept_and_known_files_stay(house: House) -> None:
    keys = new_keys(2)
    known = house.write(keys)
    one = known[0]
    stale = one._replace(generation=one.generation + 1)  # of a use of the slot that never was
    orphan = one._replace(location=one.location + 100_000)
    young = orphan._replace(generation=orphan.generation + 1)
    for place in (stale, orphan, young):
        house.backend.write(place, content(place))
    unfinished = Path(temporary_of(str(house.root), orphan, "ab" * 8, 1, 1))
    unfinished.write_bytes(b"cut off")
    foreign = file_of(house, one).with_name("notes")
    foreign.touch()
    for path in (*(file_of(house, place) for place in (*known, stale, orphan)), unfinished, foreign):
        aged(path)
    house.worker(*QUICK)
    gone = [file_of(house, stale), file_of(house, orphan), unfinished]
    eventually(lambda: not any(path.exists() for path in gone))
    time.sleep(0.6)  # two more sweeps
    assert file_of(house, young).exists()
    assert foreign.exists()
    assert house.backend.read_many(known) == [content(place) for place in known]
    assert house.client.lookup(f"i-{house.name}", keys).hits == 2


def test_a_reused_slot_is_told_from_its_former_use(house: House) -> None:
    """A write that lands after its place was given away: it is under the old generation, and is swept."""
    keys = new_keys(1)
    (former, *_) = house.write(keys)
    worker = house.worker(*QUICK)
    house.remove(keys)
    eventually(lambda: house.blocks_used() == 0 and house.stored() == set())
    later = house.write(new_keys(1))
    assert (later[0].location, later[0].generation) == (former.location, former.generation + 1)
    house.backend.write(former, content(former))
    aged(file_of(house, former))
    aged(file_of(house, later[0]))
    eventually(lambda: not file_of(house, former).exists())
    assert house.backend.read(later[0]) == content(later[0])
    assert worker.poll() is None


def test_a_write_under_way_is_not_swept_before_its_session_ended(house: House) -> None:
    started = house.start_write(new_keys(1), ttl_ms=2_000)
    place = Place.of(started.place(0, PARTS[0]))
    house.backend.write(place, content(place))
    aged(file_of(house, place))
    unfinished = Path(temporary_of(str(house.root), place, "ab" * 8, 1, 1))
    unfinished.write_bytes(b"under way")
    aged(unfinished)
    house.worker(*QUICK)
    time.sleep(1.0)
    assert unfinished.exists() and file_of(house, place).exists(), "its session is open"
    eventually(lambda: house.stored() == set())


@pytest.mark.torture
def test_a_worker_outlives_the_service(own_house: House) -> None:
    """SIGKILL of the service: nothing is swept meanwhile, and the same worker goes on afterwards."""
    house = own_house
    keys = new_keys(10)
    known = house.write(keys)
    for place in known:
        aged(file_of(house, place))
    orphan = known[0]._replace(location=known[0].location + 100_000)
    worker = house.worker(*QUICK)
    eventually(lambda: house.worker_status() == "active")
    house.service.kill()
    house.backend.write(orphan, content(orphan))
    aged(file_of(house, orphan))
    time.sleep(1.0)
    assert file_of(house, orphan).exists(), "swept although nobody could say that it is unknown"
    house.service.start()
    eventually(lambda: not file_of(house, orphan).exists())
    assert house.backend.read_many(known) == [content(place) for place in known]
    eventually(lambda: house.remove(keys) == 10)
    eventually(lambda: house.stored() == set(), 20)
    assert worker.poll() is None


@pytest.mark.torture
@pytest.mark.slow
def test_a_wiped_service_is_not_believed(own_house: House) -> None:
    """Another cluster at the same address knows no file at all: not one of them is deleted."""
    house = own_house
    known = house.write(new_keys(5))
    for place in known:
        aged(file_of(house, place))
    worker = house.worker("--sweep-ms", "100", "--safe-age-ms", "0", "--poll-ms", "100")
    eventually(lambda: house.worker_status() == "active")
    time.sleep(0.5)
    house.service.kill()
    shutil.rmtree(house.folder / "data")
    house.service.start()
    house.set_up()
    eventually(lambda: house.worker_status() == "active", 20)
    time.sleep(1.0)
    assert house.backend.read_many(known) == [content(place) for place in known]
    assert worker.poll() is None
