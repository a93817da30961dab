"""When snapshots are cut, by a process of their own, and what happens when that process fails."""

import logging
import os
import time
from pathlib import Path

import pytest

from metaservice.core import commands as cmd
from metaservice.core.machine import Machine
from metaservice.core.model import Limits, Quota
from metaservice.journal.memory import MemoryJournal, MemoryStore
from metaservice.journal.port import JournalSize
from metaservice.journal.sqlite import SqliteJournal, open_reader
from metaservice.replica.cut import cut, main
from metaservice.replica.snapshot import SnapshotKeeper
from tests.unit.replica_house import LIMITS, Bench, chain, fill, furnish, hits, until


def test_due_by_batches_or_bytes_since_the_last_cut() -> None:
    keeper = SnapshotKeeper([], batches_max=10, bytes_max=1_000)
    assert not keeper.due(JournalSize(9, 999))
    assert keeper.due(JournalSize(10, 0))
    assert keeper.due(JournalSize(0, 1_000))
    keeper.trimmed(JournalSize(10, 700))  # one snapshot's worth stays behind
    assert not keeper.due(JournalSize(19, 1_699))
    assert keeper.due(JournalSize(20, 700))
    assert keeper.due(JournalSize(10, 1_700))


async def test_a_cut_that_fails_says_why_and_the_service_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench("sqlite", tmp_path)
    script = "import sys; sys.exit('the disk of the snapshots is gone')"
    keeper = SnapshotKeeper(["-c", script], batches_max=1, check_s=0.02)
    with caplog.at_level(logging.ERROR):
        async with bench.leading(keeper) as shard:
            await furnish(shard)
            await until(lambda: caplog.text.count("no snapshot was cut") >= 2, "it is tried again")
            await fill(shard, chain(3))
            assert hits(shard, chain(3)) == 3
    assert "cutting a snapshot failed with 1: the disk of the snapshots is gone" in caplog.text


def _is_alive(mark: Path) -> bool:
    try:
        os.kill(int(mark.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


HANGING = (
    "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
)


async def test_a_cut_that_hangs_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    keeper = SnapshotKeeper(["-c", HANGING, str(mark)], timeout_s=1.0)
    with pytest.raises(TimeoutError):
        await keeper.cut(MemoryJournal(MemoryStore(), 0).snapshots)
    assert not _is_alive(mark)


async def test_a_stop_leaves_no_cutting_process_behind(tmp_path: Path) -> None:
    bench = Bench("sqlite", tmp_path)
    mark = tmp_path / "pid"
    async with bench.leading(
        SnapshotKeeper(["-c", HANGING, str(mark)], batches_max=1, check_s=0.02)
    ) as shard:
        await until(lambda: mark.exists() and mark.read_text(), "the cut begins")
        began_s = time.monotonic()
        await shard.stop()
        assert time.monotonic() - began_s < 5
    assert not _is_alive(mark)


async def test_d6_a_journal_with_nothing_in_it_is_cut_and_restored(tmp_path: Path) -> None:
    bench = Bench("sqlite", tmp_path)
    journal = SqliteJournal(bench.path, 0)
    journal.open()
    assert main(["sqlite", str(bench.path), "0", "1"]) == 0
    journal.close()
    async with bench.leading() as shard:
        assert shard.durable_seq == 1


async def test_d6_tenants_without_blocks_are_cut_and_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench("sqlite", tmp_path)
    async with bench.leading() as shard:
        await shard.submit(cmd.PutTenant(tenant="t", quota=Quota(blocks=5)))
        assert main(["sqlite", str(bench.path), "0", "1"]) == 0  # beside the writer, as the service does it
        digest = shard.machine.digest()
        seq = shard.durable_seq
    assert capsys.readouterr().out == f"{seq}\n"
    reader = open_reader(bench.path, 0)
    info = reader.snapshots.latest()
    assert info is not None and (info.seq, info.digest) == (seq, digest)
    machine = Machine.restore(reader.snapshots.load(info), 0, LIMITS)
    reader.close()
    assert machine.digest() == digest
    assert machine.state.tenants["t"].quota == Quota(blocks=5)


async def test_a_snapshot_needs_no_setting_of_the_service(tmp_path: Path) -> None:
    """The cutting process knows no limits: a replay decides nothing, so the digest is the same."""
    odd = Limits(
        lease_ms_max=77, reclaim_delay_ms=1, late_write_ms=3, leases_max=1, high_permille=100, low_permille=50
    )
    bench = Bench("sqlite", tmp_path, odd)
    async with bench.leading() as shard:
        await furnish(shard)
        await fill(shard, chain(40))
        await shard.submit(cmd.Remove(instance="i", keys=chain(5, 35)))
        reader = open_reader(bench.path, 0)
        assert cut(reader, 0, 1) == shard.durable_seq
        info = reader.snapshots.latest()
        assert info is not None and info.digest == shard.machine.digest()
        reader.close()
