"""A full disk: writes are refused with the reason, lookups go on, and with space all goes on by itself."""

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from metaservice.client import Client
from metaservice.client.results import WriteResult
from tests.torture.ledger import Ledger, Place, checksum_of
from tests.torture.service_process import ServiceProcess
from tests.torture.writers import INSTANCE, PARTS, chain_of, client_of, furnish

SIZE_MIB = 4
BLOCKS = 60


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "ucm-torture", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=20)
    except OSError as error:
        pytest.skip(f"no small disk: mount cannot be run ({error})")
    if done.returncode:
        pytest.skip(f"no small disk: mounting is not permitted here ({done.stderr.strip()})")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False, timeout=20)


@pytest.fixture
def service(small_disk: Path, tmp_path: Path) -> Iterator[ServiceProcess]:
    """A service whose journal is on the small disk; its log is elsewhere."""
    with ServiceProcess(tmp_path / "service") as service:
        service.data = small_disk / "data"
        service.start()
        with client_of(service.url) as operator:
            furnish(operator)
        yield service


def fill_up(disk: Path) -> Path:
    """Take every byte that is left, in a file; returns the file."""
    ballast = disk / "ballast"
    file = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for size in (1 << 16, 1 << 12, 1):
            while True:
                try:
                    os.write(file, bytes(size))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    break
    finally:
        os.close(file)
    return ballast


class Engine:
    """Writes chains, and remembers what was acknowledged."""

    def __init__(self, url: str) -> None:
        self.client: Client = client_of(url, timeout_ms=700)
        self.client.register_engine("e1", instance=INSTANCE, keepalive=None)
        self.ledger = Ledger()
        self.number = 0
        self.last: tuple[list[bytes], str] = ([], "")
        """Keys and request id of the last start."""

    def write(self) -> str | None:
        """Write one chain and finish it; the failure, if any."""
        self.number += 1
        keys = chain_of(f"disk-{self.number}", BLOCKS)
        self.last = (keys, f"start-{self.number}")
        started = self.start_again()
        return started.failure or self.finish(keys, started)

    def start_again(self) -> WriteResult:
        """The last start, with its request id."""
        keys, request_id = self.last
        return self.client.start_write(INSTANCE, keys, request_id=request_id)

    def finish(self, keys: list[bytes], started: WriteResult) -> str | None:
        places: list[Place] = list(zip(started.locations, started.generations, strict=True))
        sums = [checksum_of(place, part) for place in places for part in range(len(PARTS))]
        finished = self.client.finish(
            started,
            list(started.locations),
            list(started.generations),
            checksums=sums,
            request_id=f"finish-{self.number}",
        )
        if finished.failure is None:
            self.ledger.published(dict(zip(keys, places, strict=True)))
        return finished.failure

    def write_until_full(self) -> str:
        """How it fails once nothing fits any more: the journal may have some room of its own left."""
        for _ in range(2_000):
            failure = self.write()
            if failure is not None:
                return failure
        raise AssertionError("the disk never got full")

    def lost(self) -> int:
        """How many acknowledged blocks are not found at their place."""
        serving = self.ledger.serving()
        looked = self.client.lookup(INSTANCE, sorted(serving), mode="each", timeout_ms=5_000)
        assert looked.failure is None, looked.detail
        found = dict(zip(looked.keys, zip(looked.locations, looked.generations, strict=True), strict=True))
        return sum(found.get(key) != place for key, place in serving.items())


def refused_write(service: ServiceProcess) -> httpx.Response:
    """The raw answer to a write."""
    body = {"engine": "e1", "incarnation": "any", "keys": [key.hex() for key in chain_of("raw", 2)]}
    return httpx.post(
        f"{service.url}/v1/instances/{INSTANCE}/writes", json=body, timeout=10.0, trust_env=False
    )


@pytest.mark.torture
@pytest.mark.slow
def test_disk_full_refuses_writes_and_recovers_unaided(service: ServiceProcess, small_disk: Path) -> None:
    engine = Engine(service.url)
    for _ in range(5):
        assert engine.write() is None
    ballast = fill_up(small_disk)
    # The call that meets the full disk is held until its caller gives up; those after it are told at once.
    assert engine.write_until_full() in ("timeout", "rejected:journal_unavailable")
    refused = refused_write(service)
    assert refused.status_code == 503
    assert refused.json()["code"] == "journal_unavailable"
    assert "no space left" in refused.json()["detail"]
    assert int(refused.headers["retry-after"]) >= 1
    began_s = time.monotonic()
    for _ in range(20):
        assert engine.lost() == 0
        assert engine.client.heartbeat().failure is None
    assert time.monotonic() - began_s < 10
    assert httpx.get(f"{service.url}/livez", trust_env=False).status_code == 200
    assert service.get("/v1/status")["ready"] is True

    ballast.unlink()
    deadline_s = time.monotonic() + 20
    while (again := engine.start_again()).failure is not None:
        assert time.monotonic() < deadline_s, f"it never recovered: {again.failure} {again.detail}"
        time.sleep(0.1)
    if len(again.writable) == BLOCKS:  # else the finish was what failed, and its session is over by now
        assert engine.finish(engine.last[0], again) is None
    for _ in range(5):
        assert engine.write() is None
    assert engine.lost() == 0
    assert "the journal takes writes again" in service.log()
    assert "Traceback" not in service.log()
    service.kill()
    service.start()
    assert engine.lost() == 0
    usage = service.get("/v1/tenants/acme")["usage"]
    assert usage["blocks"] == len(engine.ledger.serving())


@pytest.mark.torture
@pytest.mark.slow
def test_killed_on_a_full_disk_and_started_again(service: ServiceProcess, small_disk: Path) -> None:
    engine = Engine(service.url)
    for _ in range(3):
        assert engine.write() is None
    ballast = fill_up(small_disk)
    engine.write_until_full()
    service.kill()
    fill_up(small_disk)  # what the kill may have freed
    status, log = service.refused()
    assert status == 1
    assert "Traceback" not in log
    assert "no space left" in log.strip().splitlines()[-1]
    ballast.unlink()
    service.start()
    assert engine.lost() == 0
    assert engine.client.register_engine("e1", incarnation="again", instance=INSTANCE, keepalive=None).active
    assert engine.write() is None
