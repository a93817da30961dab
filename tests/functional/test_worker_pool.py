"""Worker processes that own shared memory, against the real service: with a pool go its locations."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataplane import Backend, OpenFailed, Place, ReadRefused, WriteFailed, open_backend
from metaservice.client.results import WriteResult
from metaservice.wire.schemas import StorageRef
from tests.functional.client_service import FINGERPRINT, ROOT, Service, eventually, new_keys

SIZE_BYTES = int(FINGERPRINT["parts"][0]["bytes"])
PARTS = [str(part["name"]) for part in FINGERPRINT["parts"]]
FLAGS = {
    "heartbeat-ms": 200,
    "suspect-ms": 1_500,
    "expire-ms": 3_000,
    "reclaim-delay-ms": 100,
    "lease-ms-max": 1_000,
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[Service]:
    flags = [text for flag, value in FLAGS.items() for text in (f"--{flag}", str(value))]
    shared = Service(tmp_path_factory.mktemp("service"), free_port(), *flags)
    shared.start()
    yield shared
    shared.stop()


class House:
    """One volatile storage, an engine that writes to it, and workers that own it one after the other."""

    def __init__(self, service: Service, memory: Path, logs: Path, name: str) -> None:
        self.memory = memory
        self.instance = f"i-{name}"
        self._name = name
        self._service = service
        self._log = logs / "workers.log"
        self._workers: list[subprocess.Popen[bytes]] = []
        self.client = service.client()
        self.client.put_tenant(f"t-{name}")
        self.client.put_storage(f"s-{name}", "shm", {"dir": str(memory), "slot_bytes": str(SIZE_BYTES)})
        self.client.put_group(f"g-{name}", f"t-{name}", [f"s-{name}"])
        self.client.put_instance(self.instance, f"g-{name}", FINGERPRINT)
        self.client.register_engine(f"e-{name}", instance=self.instance)

    def worker(self, name: str = "w", owns: bool = True) -> "subprocess.Popen[bytes]":
        """A worker process; returns when its pool is there, if it is to own one."""
        before = self.pools()
        who = ("--worker", f"{name}-{self._name}", "--storage", f"s-{self._name}")
        words = [
            "-m",
            "metaservice.cli.worker",
            "--url",
            self._service.url,
            *who,
            "--poll-ms",
            "200",
            "--backoff-ms-max",
            "300",
        ]
        with self._log.open("ab") as log:
            child = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=log, stderr=log)
        self._workers.append(child)
        if owns:
            eventually(lambda: self.pools() - before and len(self.pools()) == 1)
        return child

    def said(self) -> str:
        """What workers logged."""
        return self._log.read_text()

    def pools(self) -> set[str]:
        """Folders of pools that are there."""
        return {path.name for path in self.memory.iterdir() if not path.name.startswith(".")}

    def start_write(self, keys: list[bytes]) -> WriteResult:
        return self.client.start_write(self.instance, keys)

    def write(self, keys: list[bytes]) -> tuple[Backend, list[Place]]:
        """Write a chain of blocks, bytes and all; through which backend, and where to."""
        started = self.start_write(keys)
        assert len(started.writable) == len(keys), (started.failure, started.detail, list(started.reasons))
        backend = self.opened(started.place(0).storage)
        places = [Place.of(started.place(row, part)) for row in range(len(keys)) for part in PARTS]
        checksums = [backend.write(place, content(place)) for place in places]
        done = self.client.finish(started, started.locations, started.generations, checksums=checksums)
        assert (done.failure, done.published) == (None, len(keys))
        return backend, places

    def read(self, keys: list[bytes]) -> int:
        """How many leading blocks another engine finds and reads, bytes and all."""
        found = self.client.lookup(self.instance, keys)
        assert found.failure is None
        for row in range(found.hits):
            for part in PARTS:
                ref = found.place(row, part)
                place = Place.of(ref)
                assert self.opened(ref.storage).read(place, ref.checksum) == content(place)
        return found.hits

    def opened(self, ref: StorageRef) -> Backend:
        return open_backend(ref.kind, ref.options)

    def held_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.memory.rglob("0.tp*"))

    def remove(self, keys: list[bytes]) -> int:
        return self.client.remove(self.instance, keys).removed

    def blocks_used(self) -> int:
        usage = self.client.get_json(f"/v1/tenants/t-{self._name}")["usage"]
        return int(usage["blocks"])

    def close(self) -> None:
        for child in self._workers:
            child.kill()
            child.wait()
        self.client.close()


def content(place: Place) -> bytes:
    return place.key[:1] * SIZE_BYTES


@pytest.fixture
def house(service: Service, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[House]:
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ucm-test-", dir=base) as memory:
        opened = House(service, Path(memory), tmp_path, request.node.name[-40:])
        yield opened
        opened.close()


def test_blocks_go_through_shared_memory_and_deletions_give_it_back(house: House) -> None:
    house.worker()
    keys, kept = new_keys(5), new_keys(2)
    house.write(keys)
    house.write(kept)
    assert (house.read(keys), house.read(kept)) == (5, 2)
    assert house.held_bytes() == 7 * len(PARTS) * 2 * 4_096
    assert house.remove(keys) == 5
    eventually(lambda: house.held_bytes() == 2 * len(PARTS) * 2 * 4_096)
    eventually(lambda: house.blocks_used() == 2)
    assert (house.read(keys), house.read(kept)) == (0, 2)


def test_a_killed_workers_blocks_are_gone_the_moment_it_starts_again(house: House) -> None:
    """kill -9 leaves its memory there, but nobody is sent to it; what is written next is found."""
    first = house.worker()
    keys = new_keys(4)
    backend, places = house.write(keys)
    under_way = house.start_write(new_keys(1))
    first.kill()
    first.wait()
    assert house.read(keys) == 4, "nobody has said yet that it is gone, and the bytes are there"
    house.worker()
    assert house.client.lookup(house.instance, keys).hits == 0
    assert house.blocks_used() == 0, "without a task for anybody: there is nothing to delete"
    for place in places:
        with pytest.raises(ReadRefused) as refused:
            backend.read(place)
        assert refused.value.reason == "missing"
    late = Place.of(under_way.place(0, PARTS[0]))
    with pytest.raises(WriteFailed) as failed:
        backend.write(late, content(late))
    assert failed.value.reason == "root_missing"
    done = house.client.finish(under_way, under_way.locations, under_way.generations, checksums=[0, 0])
    assert done.published == 0, "a write to the earlier pool never serves"
    renewed, _ = house.write(keys)
    assert renewed is not backend
    assert house.read(keys) == 4


def test_a_stopped_workers_blocks_are_gone_at_once_and_its_memory_too(house: House) -> None:
    worker = house.worker()
    keys = new_keys(3)
    house.write(keys)
    ref = house.start_write(new_keys(1)).place(0).storage
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(10) == 0
    assert (house.read(keys), house.blocks_used()) == (0, 0)
    assert list(house.memory.iterdir()) == []
    with pytest.raises(OpenFailed) as failed:
        house.opened(ref)
    assert failed.value.field == "options.pool"
    refused = house.start_write(new_keys(1))
    assert refused.writable == [], "there is nowhere to write to"
    house.worker()
    house.write(keys)
    assert house.read(keys) == 3


def test_a_worker_that_was_away_for_too_long_comes_back_with_an_empty_pool(house: House) -> None:
    """SIGSTOP beyond its expiry: its blocks are gone, and it does not go on with the memory of before."""
    worker = house.worker()
    keys = new_keys(3)
    house.write(keys)
    before = house.pools()
    worker.send_signal(signal.SIGSTOP)
    eventually(lambda: house.read(keys) == 0)
    worker.send_signal(signal.SIGCONT)
    eventually(lambda: len(house.pools()) == 1 and house.pools() != before)
    eventually(lambda: house.start_write(new_keys(1)).writable == [0])
    house.write(keys)
    assert house.read(keys) == 3
    assert worker.poll() is None


def test_another_worker_takes_over_only_when_the_owner_is_gone(house: House) -> None:
    owner = house.worker("one")
    keys = new_keys(2)
    house.write(keys)
    pool = house.pools()
    house.worker("two", owns=False)
    eventually(lambda: "storage_owned" in house.said())
    assert (house.pools(), house.read(keys)) == (pool, 2)
    owner.kill()
    owner.wait()
    eventually(lambda: len(house.pools()) == 1 and house.pools() != pool)
    assert house.read(keys) == 0
