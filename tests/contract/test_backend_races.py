"""What every backend must do when processes die, and when many come at once."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane import Backend, Place, ReadRefused, WriteFailed
from dataplane.integrity import checksum_of
from tests.contract.backend_storages import DATA, PLACE, STORAGES, Storage


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest) -> Storage:
    return STORAGES[request.param]


@pytest.fixture
def backend(storage: Storage, tmp_path: Path) -> Iterator[Backend]:
    opened = storage.open(tmp_path)
    yield opened
    opened.close()


def test_of_writers_of_one_place_one_wins(storage: Storage, tmp_path: Path) -> None:
    """Mooncake 1374: two writers, same key, and what exists is empty. Here it is all of one of them."""
    backends = [storage.open(tmp_path) for _ in range(4)]
    together = threading.Barrier(len(backends), timeout=30)
    outcomes: list[dict[int, str]] = [{} for _ in backends]

    def contend(number: int) -> None:
        for generation in range(1, 16):
            together.wait()
            try:
                backends[number].write(PLACE._replace(generation=generation), bytes([number]) * 10_000)
                outcomes[number][generation] = "won"
            except WriteFailed as failed:
                outcomes[number][generation] = failed.reason

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(len(backends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for generation in range(1, 16):
        row = [outcome[generation] for outcome in outcomes]
        assert sorted(row) == ["exists", "exists", "exists", "won"]
        winner = row.index("won")
        if not storage.slots or generation == 15:
            assert backends[0].read(PLACE._replace(generation=generation)) == bytes([winner]) * 10_000
    assert {found.state for found in backends[0].scan()} == {"published"}
    for backend in backends:
        backend.close()


_ENDLESS_WRITER = """
import json, random, sys
from dataplane import Place, open_backend
kind, options, size_bytes = json.loads(sys.argv[1])
backend = open_backend(kind, options)
for location in range(1 << 40):
    place = Place("c1", location, 1, "tp0", size_bytes, location.to_bytes(16))
    checksum = backend.write(place, random.Random(location).randbytes(size_bytes))
    sys.stdout.write(f"{location} {checksum}\\n")
    sys.stdout.flush()
"""


@pytest.mark.torture
def test_a1_writer_killed_leaves_all_of_a_block_or_nothing(
    storage: Storage, backend: Backend, tmp_path: Path, seed: int
) -> None:
    """SIGKILL at any moment: whatever is readable is whole, and whatever was acknowledged is readable."""
    size_bytes = 300_000
    arguments = json.dumps([storage.kind, storage.filled(tmp_path), size_bytes])
    chance = random.Random(seed)
    for _ in range(5):
        command = [sys.executable, "-c", _ENDLESS_WRITER, arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            acknowledged = [child.stdout.readline()]
            time.sleep(chance.uniform(0, 0.05))
            child.send_signal(signal.SIGKILL)
            acknowledged += child.stdout.readlines()
        assert child.returncode == -signal.SIGKILL
        acknowledged = [line for line in acknowledged if line.endswith("\n")]
        assert acknowledged
        for line in acknowledged:
            location, checksum = map(int, line.split())
            expected = random.Random(location).randbytes(size_bytes)
            assert backend.read(_endless(location, size_bytes), checksum) == expected
        for found in list(backend.scan()):
            assert found.place is not None
            if found.state == "published":
                assert len(backend.read(_endless(found.place.location, size_bytes))) == size_bytes
            else:
                assert found.state == "temporary"
            assert backend.discard(found)
        assert list(backend.scan()) == []


def _endless(location: int, size_bytes: int) -> Place:
    return Place("c1", location, 1, "tp0", size_bytes, location.to_bytes(16))


def test_readers_see_all_or_nothing_while_a_place_comes_and_goes(storage: Storage, tmp_path: Path) -> None:
    writer, reader = (storage.open(tmp_path) for _ in range(2))
    over = threading.Event()
    times = 0

    def come_and_go() -> None:
        nonlocal times
        while times < 300 or not over.is_set():
            writer.write(PLACE, DATA)
            writer.delete(PLACE)
            times += 1

    thread = threading.Thread(target=come_and_go)
    thread.start()
    seen = {"all": 0, "missing": 0}
    try:
        while thread.is_alive():
            try:
                assert reader.read(PLACE) == DATA
                seen["all"] += 1
            except ReadRefused as read:
                assert read.reason == "missing"
                seen["missing"] += 1
            if sum(seen.values()) > 300:
                over.set()
    finally:
        over.set()
    thread.join()
    assert sum(seen.values()) > 300
    writer.close()
    reader.close()


def test_a_forked_child_writes_and_reads(backend: Backend) -> None:
    """Engines fork: neither threads nor temporary names of the parent may get in the way of the child."""
    places = [PLACE._replace(location=number) for number in range(40)]
    assert backend.write_many(places, [DATA] * 40) == [checksum_of(DATA)] * 40
    child = os.fork()
    if child == 0:
        fresh = [PLACE._replace(location=number) for number in range(100, 140)]
        done = backend.read_many(places) == [DATA] * 40
        done = done and backend.write_many(fresh, [DATA] * 40) == [checksum_of(DATA)] * 40
        os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert backend.read(PLACE._replace(location=139)) == DATA
