"""The real service on its data directory: killed, started twice, started on a damaged journal."""

import re
import signal
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from metaservice.client import Client
from metaservice.client.results import WriteResult
from metaservice.main import main
from tests.torture.ledger import checksum_of
from tests.torture.service_process import ServiceProcess
from tests.torture.writers import SETTINGS, chain_of, client_of
from tests.unit.replica_house import Bench, furnish
from tests.unit.replica_house import fill as fill_shard

CHAINS = [chain_of(f"chain-{number}", 5) for number in range(4)]


def finish(client: Client, started: WriteResult) -> str | None:
    """Finish all of it; the failure, if any."""
    places = list(zip(started.locations, started.generations, strict=True))
    sums = [checksum_of(place, 0) for place in places]
    return client.finish(started, list(started.locations), list(started.generations), checksums=sums).failure


def found(client: Client, keys: list[bytes]) -> int:
    """How long a prefix is readable."""
    looked = client.lookup("i", keys)
    assert looked.failure is None, looked.detail
    return looked.hits


def last_line(log: str) -> str:
    """What a person reads at the end of a start that failed."""
    assert "Traceback" not in log
    return log.strip().splitlines()[-1]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    """A service that would start on a directory with four finished chains, each in batches of its own."""
    with ServiceProcess(tmp_path, **SETTINGS) as service:
        service.data.mkdir()
        async with Bench("sqlite", service.data).leading() as shard:
            await furnish(shard)
            for keys in CHAINS:
                await fill_shard(shard, keys)
        yield service


def damage(service: ServiceProcess, place: int) -> int:
    """Flip a byte in the stored batch at `place` (as of a list, by seq); returns its first seq."""
    connection = sqlite3.connect(service.data / "journal.sqlite", isolation_level=None)
    try:
        seqs = [row[0] for row in connection.execute("SELECT first_seq FROM journal ORDER BY first_seq")]
        seq: int = seqs[place]
        (payload,) = connection.execute("SELECT payload FROM journal WHERE first_seq = ?", (seq,)).fetchone()
        changed = payload[:-3] + bytes([payload[-3] ^ 0x40]) + payload[-2:]
        connection.execute("UPDATE journal SET payload = ? WHERE first_seq = ?", (changed, seq))
    finally:
        connection.close()
    return seq


def test_a_damaged_tail_is_cut_and_told(service: ServiceProcess) -> None:
    seq = damage(service, -1)
    service.start()
    assert f"the journal's tail was damaged and cut: 1 batches from seq {seq}" in service.log()
    assert "its checksum does not match" in service.log()
    with client_of(service.url) as client:
        assert [found(client, keys) for keys in CHAINS] == [5, 5, 5, 0]
        # The finish was cut, so the session is open again; it ends as any session does whose writer is gone.
        client.register_engine("e", incarnation="again", instance="i", keepalive=None)
        started = client.start_write("i", CHAINS[3])
        assert len(started.writable) == 5
        assert finish(client, started) is None
        assert [found(client, keys) for keys in CHAINS] == [5, 5, 5, 5]
    assert service.terminate(10) == 0


def test_damage_in_the_middle_stops_the_start_and_says_where(
    service: ServiceProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    seq = damage(service, -3)
    before = (service.data / "journal.sqlite").read_bytes()
    assert main(["serve", "--data", str(service.data), "--port", "0"]) == 1
    line = last_line(capsys.readouterr().err)
    assert line.startswith("ucm-meta serve: ")
    assert f"journal.sqlite shard 0 is corrupt at seq {seq}" in line
    assert "restore the file" in line
    assert (service.data / "journal.sqlite").read_bytes() == before


def test_what_is_no_journal_stops_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "journal.sqlite").write_bytes(
        b"not a database at all, but long enough to look like one" * 100
    )
    assert main(["serve", "--data", str(tmp_path), "--port", "0"]) == 1
    assert "is corrupt" in last_line(capsys.readouterr().err)


def test_a2_a3_a_killed_service_frees_what_nobody_finishes(
    service: ServiceProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also: nobody else can take the directory or the port meanwhile, and the epoch rises (D10)."""
    service.start()
    keys = chain_of("unfinished", 100)
    with client_of(service.url) as client:
        client.register_engine("e", instance="i", incarnation="x", keepalive=None)
        epoch = service.epoch()
        _nobody_else_starts(service, capsys)
        started = client.start_write("i", keys, ttl_ms=1_000)
        assert len(started.writable) == 100
        assert service.process is not None
        service.process.send_signal(signal.SIGKILL)
        service.process.wait()
        service.start()
        assert service.epoch() > epoch
        assert service.get("/v1/tenants/t")["usage"]["blocks"] == 120
        _usage_falls_to(service, 20)
        assert finish(client, started) == "rejected:session_expired"
        again = client.start_write("i", keys)
        assert len(again.writable) == 100
        assert not {*zip(again.locations, again.generations, strict=True)} & {
            *zip(started.locations, started.generations, strict=True)
        }
        assert [found(client, chain) for chain in CHAINS] == [5, 5, 5, 5]


def _nobody_else_starts(service: ServiceProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert service.process is not None
    assert main(["serve", "--data", str(service.data), "--port", "0"]) == 1
    assert f"is held by process {service.process.pid}" in last_line(capsys.readouterr().err)
    other = service.data.parent / "other"
    assert main(["serve", "--data", str(other), "--port", str(service.port)]) == 1
    line = last_line(capsys.readouterr().err)
    assert re.search(rf"ucm-meta serve: .*127\.0\.0\.1.*{service.port}.*in use", line)
    assert httpx.get(f"{service.url}/readyz", trust_env=False).status_code == 200


def _usage_falls_to(service: ServiceProcess, blocks: int) -> None:
    """By itself: the only call that it gets is the question."""
    time.sleep(1.0)
    deadline_s = time.monotonic() + 10
    while (usage := service.get("/v1/tenants/t")["usage"])["blocks"] != blocks:
        assert time.monotonic() < deadline_s, f"still {usage}"
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        (["--expire-ms", "3000"], 2, "--heartbeat-ms (2000) and --expire-ms (3000, flag) clash"),
        (["--grace-ms", "0"], 2, "--grace-ms is 0"),
        (["--host", "0.0.0.0"], 1, "is not a loopback address"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_impossible_setting_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], status: int, says: str
) -> None:
    assert main(["serve", "--data", str(tmp_path / "data"), *flags]) == status
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("ucm-meta serve: ")
    assert says in said
    assert not (tmp_path / "data").exists()
