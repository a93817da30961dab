"""D11: an engine is killed and comes back under a new incarnation, before it has expired, after, and when it
is forgotten; the worker of the storage is killed too. What the engine wrote is in a durable storage and is of
its instance, not its own: everybody reads it all the time, and the engine that comes back writes nothing.

Media that go with the engine that holds them (device and host memory) come with a later change, which has to
say here that what was in them goes.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from dataplane import Place, open_backend
from metaservice.client import Client, ClientConfig
from metaservice.client.results import LookupResult
from tests.functional.client_service import FINGERPRINT, ROOT, Service, eventually, new_keys

SIZE_BYTES = int(FINGERPRINT["parts"][0]["bytes"])
PARTS = [str(part["name"]) for part in FINGERPRINT["parts"]]
BLOCKS = 12
FLAGS = {
    "heartbeat-ms": 200, "suspect-ms": 500, "expire-ms": 1_500, "forget-ms": 1_500,
    "reclaim-delay-ms": 100, "late-write-ms": 300, "lease-ms-max": 2_000, "task-ttl-ms": 1_500,
}  # fmt: skip

# An engine of its own process: it says what it found and what it had to write, and lives until it is killed.
ENGINE = f"""
import sys, time
from dataplane import Place, open_backend
from metaservice.client import Client, ClientConfig

url, root, *texts = sys.argv[1:]
keys = [bytes.fromhex(text) for text in texts]
client = Client(ClientConfig(url=url, timeout_ms=10_000))
assert client.register_engine("engine", instance="i").failure is None
found = client.lookup("i", keys)
started = client.start_write("i", keys)
assert found.failure is None and started.failure is None, (found.failure, started.failure)
rows = started.writable
if rows:
    backend = open_backend("posix", {{"root": root, "fsync": "none"}})
    sums = [
        backend.write(Place.of(started.place(row, part)), keys[row][:1] * {SIZE_BYTES})
        for row in rows for part in {PARTS!r}
    ]
    finished = client.finish(started, started.locations, started.generations, checksums=sums)
    assert finished.published == len(keys), finished
print(found.hits, len(rows), flush=True)
time.sleep(3600)
"""


class Fleet:
    """One service and storage; an engine and a worker that come and go as processes."""

    def __init__(self, folder: Path, service: Service) -> None:
        self.service = service
        self.root = folder / "storage"
        self.root.mkdir()
        self._log = folder / "processes.log"
        self._running: list[subprocess.Popen[str]] = []
        self.keys = new_keys(BLOCKS)
        self.client = self.new_client()
        self.client.put_tenant("t")
        self.client.put_storage("s", "posix", {"root": str(self.root)})
        self.client.put_group("g", "t", ["s"])
        self.client.put_instance("i", "g", FINGERPRINT)

    def new_client(self) -> Client:
        return Client(ClientConfig(url=self.service.url, timeout_ms=10_000))

    def _start(self, *words: str) -> "subprocess.Popen[str]":
        with self._log.open("a") as log:
            child = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._running.append(child)
        return child

    def engine(self) -> tuple["subprocess.Popen[str]", int, int]:
        """Its process, and how many blocks it found and had to write."""
        words = ("-c", ENGINE, self.service.url, str(self.root), *(key.hex() for key in self.keys))
        child = self._start(*words)
        assert child.stdout is not None
        found, written = child.stdout.readline().split() or pytest.fail(self._log.read_text()[-2_000:])
        return child, int(found), int(written)

    def worker(self) -> "subprocess.Popen[str]":
        """A worker that sweeps all the time."""
        sweeps = (
            "--sweep-ms",
            "200",
            "--safe-age-ms",
            "60000",
            "--poll-ms",
            "200",
            "--backoff-ms-max",
            "500",
        )
        who = ("--url", self.service.url, "--worker", "w", "--storage", "s")
        return self._start("-m", "metaservice.cli.worker", *who, *sweeps)

    def status(self, kind: str, id: str) -> str:
        """active, suspect, expired, or "" when nobody knows it any more."""
        items: list[Any] = self.client.get_json(f"/v1/{kind}")["items"]
        return next((str(one["status"]) for one in items if one["id"] == id), "")

    def incarnation(self) -> str:
        """Of the engine that is registered."""
        return str(self.client.get_json("/v1/engines/engine")["incarnation"])

    def files(self) -> list[Path]:
        """What has bytes."""
        return [path for path in self.root.rglob("*") if path.is_file()]

    def close(self) -> None:
        for child in self._running:
            kill(child)
        self.client.close()


def kill(child: "subprocess.Popen[str]") -> None:
    """SIGKILL."""
    child.kill()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


class Reader:
    """Another engine: looks everything up under a lease and reads the bytes, again and again."""

    def __init__(self, fleet: Fleet) -> None:
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()
        """How often everything was read while the writing engine was in which status."""
        self._fleet = fleet
        self._stop = Event()
        self._backend = open_backend("posix", {"root": str(fleet.root), "fsync": "none"})
        self._thread = Thread(target=self._run, daemon=True)

    @contextmanager
    def reading(self) -> Iterator["Reader"]:
        """It reads until the end of the context."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()
            self._backend.close()

    def _run(self) -> None:
        try:
            with self._fleet.new_client() as client:
                assert client.register_engine("reader", instance="i").failure is None
                while not self._stop.wait(0.02):
                    status = self._fleet.status("engines", "engine")
                    found = client.lookup("i", self._fleet.keys, lease_ms=2_000)
                    if found.failure == "rejected:reregister":
                        continue  # its own heartbeats were late: the keeper registers it again
                    self._read(found)
                    self.seen[status] += 1
        except Exception as error:
            self.wrong.append(repr(error))

    def _read(self, found: LookupResult) -> None:
        if found.failure is not None or found.hits != BLOCKS:
            self.wrong.append(f"{found.failure} {found.detail}: {found.hits} of {BLOCKS}")
            return
        places = [Place.of(found.place(row, part)) for row in range(BLOCKS) for part in PARTS]
        for place, data in zip(places, self._backend.read_many(places), strict=True):
            if data != place.key[:1] * SIZE_BYTES:
                self.wrong.append(f"{place}: other bytes")


@pytest.fixture
def fleet(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Fleet]:
    words = (word for flag, value in FLAGS.items() for word in (f"--{flag}", str(value)))
    service = Service(tmp_path, free_port(), *words)
    service.start()
    opened = Fleet(tmp_path, service)
    try:
        yield opened
    finally:
        opened.close()
        service.stop()


@pytest.mark.timeout(120)
def test_d11_an_engine_that_comes_back_finds_what_it_wrote_and_nobody_ever_missed_it(fleet: Fleet) -> None:
    engine, found, written = fleet.engine()
    assert (found, written) == (0, BLOCKS)
    worker = fleet.worker()
    files = fleet.files()
    for path in files:
        os.utime(path, (time.time() - 3_600,) * 2)  # old enough to be swept, if the service did not know it
    incarnations = {fleet.incarnation()}
    eventually(lambda: fleet.status("workers", "w") == "active", 30)
    with Reader(fleet).reading() as reader:
        # within its grace, when it has expired, and when it is forgotten
        for gone in (None, "expired", ""):
            kill(engine)
            kill(worker)
            if gone is not None:
                eventually(lambda gone=gone: fleet.status("engines", "engine") == gone, 30)  # type: ignore[misc]
                seen = reader.seen[gone]
                eventually(lambda gone=gone, seen=seen: reader.wrong or reader.seen[gone] > seen, 30)  # type: ignore[misc]
            engine, found, written = fleet.engine()
            assert (found, written) == (BLOCKS, 0), f"nothing is written again (it was {gone!r})"
            incarnations.add(fleet.incarnation())
            worker = fleet.worker()
            eventually(lambda: fleet.status("workers", "w") == "active", 30)
            assert fleet.status("engines", "engine") in ("active", "suspect")
        at = reader.seen.total()
        eventually(lambda: reader.wrong or reader.seen.total() > at + 5, 30)
    assert reader.wrong == []
    assert sorted(fleet.files()) == sorted(files)
    assert len(incarnations) == 4

    # the worker that came back still does what it is there for
    assert fleet.client.remove("i", fleet.keys).removed == BLOCKS
    eventually(lambda: fleet.files() == [], 30)
