"""The shard when its journal is full, busy, unsure of an append, or belongs to somebody else."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from metaservice.clock import monotonic_s
from metaservice.core import commands as cmd
from metaservice.core.outcomes import WriteOutcome
from metaservice.core.replies import Started
from metaservice.journal.errors import FateUnknown, JournalLocked
from metaservice.journal.memory import AppendFault, MemoryJournal
from metaservice.replica import sequencer
from metaservice.replica.errors import ShardUnavailable
from tests.unit.replica_house import (
    BLOCK_BYTES,
    Bench,
    HeldMemoryJournal,
    chain,
    fill,
    finish_of,
    furnish,
    hits,
    leave_the_heap_alone,
    refusal,
    start_of,
    until,
)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(sequencer, "RETRY_MS", 30)
    leave_the_heap_alone(monkeypatch)
    return Bench("memory", tmp_path)


def fill_up(bench: Bench) -> None:
    """Nothing fits any more."""
    bench.store.bytes_max = bench.store.payload_bytes()


async def test_full_journal_refuses_writes_and_answers_lookups(bench: Bench) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        await fill(shard, chain(3))
        fill_up(bench)
        held = asyncio.create_task(shard.submit(start_of(chain(2, 10))))
        await until(lambda: shard.stuck, "the journal is found full")
        error = await refusal(shard, start_of(chain(1, 20)))
        assert (error.code, error.retry_after_ms > 0) == ("journal_unavailable", True)
        assert "no space left" in error.message
        assert (shard.ready, hits(shard, chain(3))) == (True, 3)
        leased = shard.read(cmd.Lookup(instance="i", keys=chain(3), lease_ms=500))
        assert shard.read(cmd.ReleaseLeases(leases=(leased.lease,))).outcomes == b"\x01"
        assert shard.read(cmd.Heartbeat(kind="engine", id="e", incarnation="x")).status == "active"
        bench.store.bytes_max = None
        assert (await held).outcomes == bytes([WriteOutcome.write]) * 2


async def test_a_write_that_cannot_be_taken_is_refused_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when the journal is tried again: an engine waits for its answer."""
    monkeypatch.setattr(sequencer, "RETRY_MS", 800)
    async with bench.leading() as shard:
        await furnish(shard)
        fill_up(bench)
        held = asyncio.create_task(shard.submit(start_of(chain(2, 10))))
        await until(lambda: shard.stuck, "the journal is found full")
        began_s = monotonic_s()
        for number in range(20):
            assert (await refusal(shard, start_of(chain(1, 50 + number)))).code == "journal_unavailable"
        assert monotonic_s() - began_s < 0.5
        bench.store.bytes_max = None
        await held


async def test_full_journal_recovers_unaided_and_keeps_the_held_batch_once(bench: Bench) -> None:
    """The batch that met the full disk was decided: it gets in when there is room, exactly once, and a retry
    with its request id gets the first answer (I7)."""
    async with bench.leading() as shard:
        await furnish(shard)
        fill_up(bench)
        appended = len(bench.gate.appended)
        held = asyncio.create_task(shard.submit(start_of(chain(2), "r1")))
        await until(lambda: shard.stuck, "the journal is found full")
        held.cancel()  # its caller's patience ends before the disk has room
        assert (await refusal(shard, start_of(chain(2), "r1"))).code == "journal_unavailable"
        bench.store.bytes_max = None
        await until(lambda: not shard.stuck, "the journal takes writes again")
        again: Started = await shard.submit(start_of(chain(2), "r1"))
        assert again.outcomes == bytes([WriteOutcome.write]) * 2
        assert [*again.locations] == [0, 1]
        assert len(shard.machine.state.sessions) == 1
        first_seq, last_seq = bench.gate.appended[appended]
        assert first_seq == last_seq
        assert (await shard.submit(finish_of(again))).published == 2
        usage = shard.machine.state.tenants["t"].usage
        assert (usage.blocks, usage.bytes) == (2, 2 * BLOCK_BYTES)
        epoch, seq = shard.epoch, shard.durable_seq
    async with bench.leading() as shard:
        assert (shard.epoch, shard.durable_seq) == (epoch + 1, seq + 1)
        assert hits(shard, chain(2)) == 2
    assert bench.told.reasons == []


async def test_full_journal_tells_everybody_who_waits_behind_it(bench: Bench) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        bench.gate.hold()
        held = asyncio.create_task(shard.submit(start_of(chain(1))))
        await until(lambda: bench.gate.waiting, "the append begins")
        queued = [asyncio.create_task(shard.submit(cmd.PutTenant(tenant=f"t{n}"))) for n in range(30)]
        await asyncio.sleep(0.02)
        fill_up(bench)
        bench.gate.free()
        errors = await asyncio.gather(*queued, return_exceptions=True)
        assert {getattr(error, "code", error) for error in errors} == {"journal_unavailable"}
        assert not held.done()
        bench.store.bytes_max = None
        await held
        assert [view.id for view in shard.describe("tenants")] == ["t"]  # type: ignore[attr-defined]


async def test_a_service_stops_though_its_journal_is_full(bench: Bench) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        await fill(shard, chain(2))
        fill_up(bench)
        held = asyncio.create_task(shard.submit(start_of(chain(2, 10))))
        await until(lambda: shard.stuck, "the journal is found full")
        await asyncio.wait_for(shard.stop(), 5)
        with pytest.raises(ShardUnavailable) as raised:
            await held
        assert raised.value.code == "not_ready"
    bench.store.bytes_max = None
    async with bench.leading() as shard:
        assert hits(shard, chain(2)) == 2
        assert not shard.machine.state.sessions  # what was not durable never was


async def test_a_busy_journal_is_tried_until_it_takes_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequencer, "RETRY_MS", 30)
    monkeypatch.setattr("metaservice.journal.sqlite_database.BUSY_WAIT_MS", 50)
    bench = Bench("sqlite", tmp_path)
    async with bench.leading() as shard:
        await furnish(shard)
        await fill(shard, chain(3))
        other = sqlite3.connect(bench.path, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            held = asyncio.create_task(shard.submit(start_of(chain(1, 10))))
            await until(lambda: shard.stuck, "the journal is found locked")
            assert "locked by another program" in shard.stuck
            assert hits(shard, chain(3)) == 3
            assert (await refusal(shard, start_of(chain(1, 20)))).code == "journal_unavailable"
            other.execute("ROLLBACK")
        finally:
            other.close()
        assert (await held).outcomes == bytes([WriteOutcome.write])
        assert shard.stuck == ""
    assert bench.told.reasons == []


@pytest.mark.parametrize("fault", list(AppendFault))
async def test_unknown_fate_is_looked_up_and_never_guessed(bench: Bench, fault: AppendFault) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        started = await shard.submit(start_of(chain(3)))
        bench.store.next_append = fault
        finished = await shard.submit(finish_of(started, "f1"))
        assert finished.published == 3
        assert (await shard.submit(finish_of(started, "f1"))) == finished
        assert hits(shard, chain(3)) == 3
        assert shard.durable_seq == shard.machine.seq
        seqs = [
            seq for kept in bench.store.shards[0].records for seq in range(kept.first_seq, kept.last_seq + 1)
        ]
        assert seqs == list(range(1, shard.durable_seq + 1))
        epoch = shard.epoch
    async with bench.leading() as shard:
        assert hits(shard, chain(3)) == 3
        assert shard.epoch == epoch + 1
    assert bench.told.reasons == []


async def test_a_fate_that_stays_unknown_refuses_writes_until_it_is_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        await fill(shard, chain(2))
        bench.store.next_append = AppendFault.WRITTEN
        monkeypatch.setattr(HeldMemoryJournal, "resolve", _cannot_tell)
        held = asyncio.create_task(shard.submit(start_of(chain(2, 10), "r9")))
        await until(lambda: shard.stuck, "the fate stays unknown")
        assert (await refusal(shard, start_of(chain(1, 20)))).code == "journal_unavailable"
        assert hits(shard, chain(2)) == 2
        with pytest.raises(ShardUnavailable, match="does not answer") as told:
            await held  # nobody waits for hours; who asks again gets the answer that counts
        assert told.value.code == "journal_unavailable"
        monkeypatch.setattr(HeldMemoryJournal, "resolve", MemoryJournal.resolve)
        await until(lambda: not shard.stuck, "the fate is known")
        seq = shard.durable_seq
        again = await shard.submit(start_of(chain(2, 10), "r9"))
        assert again.outcomes == bytes([WriteOutcome.write]) * 2 and again.session is not None
        assert shard.durable_seq == seq, "it was decided once"
        await fill(shard, chain(1, 30))


def _cannot_tell(journal: object, first_seq: int, payload: bytes) -> bool:
    raise FateUnknown("journal", first_seq, "its disk does not answer")


async def test_a7_leadership_lost_between_decision_and_append_leaves_one_allocation(bench: Bench) -> None:
    """Another leader fenced this one while it decided: that decision never was; the retry decides once."""
    async with bench.leading() as shard:
        await furnish(shard)
        await fill(shard, chain(2))
        bench.gate.hold()
        losing = asyncio.create_task(shard.submit(start_of(chain(4, 10), "r1")))
        await until(lambda: bench.gate.waiting, "the append begins")
        kept = bench.store.shards[0]
        kept.marks = type(kept.marks)(kept.marks.epoch + 1, kept.marks.head_seq, kept.marks.trimmed_seq)
        bench.gate.free()
        with pytest.raises(ShardUnavailable) as raised:
            await losing
        assert raised.value.code == "not_ready"
        await until(lambda: shard.ready, "it leads again")
        again: Started = await shard.submit(start_of(chain(4, 10), "r1"))
        assert again.outcomes == bytes([WriteOutcome.write]) * 4
        assert (await shard.submit(start_of(chain(4, 10), "r1"))).session == again.session
        usage = shard.machine.state.tenants["t"].usage
        assert (usage.blocks, usage.bytes) == (6, 6 * BLOCK_BYTES)
        shard.machine.check()
        assert shard.epoch == 3
    assert len(bench.told.reasons) == 1
    assert "nothing was written, rebuild" in bench.told.reasons[0]


async def test_a_second_shard_on_one_store_is_refused(bench: Bench) -> None:
    async with bench.leading():
        second = bench.shard()
        with pytest.raises(JournalLocked, match="is held by process"):
            await second.start()
        await second.stop()
