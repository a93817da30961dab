"""A core that fails: its state is thrown away and rebuilt from the journal; nothing acknowledged is lost."""

import asyncio
import gc
import logging
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metaservice.core import commands as cmd
from metaservice.core import machine as core_machine
from metaservice.core.events import TenantPut
from metaservice.core.machine import Machine
from metaservice.core.model import Limits, Quota
from metaservice.core.outcomes import LeaseOutcome, WriteOutcome
from metaservice.core.replies import Looked, Started
from metaservice.journal.errors import CorruptJournal, JournalFailed
from metaservice.journal.memory import MemoryJournal
from metaservice.journal.snapshots import SnapshotInfo
from metaservice.replica import life as replica_life
from metaservice.replica.errors import ShardUnavailable
from metaservice.replica.replay import replay
from metaservice.replica.shard import Shard
from tests.unit.replica_house import (
    BLOCK_BYTES,
    LIMITS,
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


class Poison(cmd.Command, kw_only=True, frozen=True):
    """A command that makes the core contradict itself: at once, or after it changed the state."""

    after_change: bool = False


def _poisoned(state: Any, memory: Any, command: Poison, now_ms: int) -> Any:
    if command.after_change:
        state.tenants["t"].usage.blocks += 7  # half of a change, and then:
    raise AssertionError("a counter disagrees with the rows")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(replica_life, "REBUILD_PAUSE_MS", 20)
    monkeypatch.setitem(core_machine._DECIDE, Poison, _poisoned)
    leave_the_heap_alone(monkeypatch)
    return Bench("memory", tmp_path)


async def poison(shard: Shard, *, after_change: bool = False) -> None:
    """Let the core fail once, and wait until the shard leads again."""
    epoch = shard.epoch
    assert (await refusal(shard, Poison(after_change=after_change))).code == "not_ready"
    await until(lambda: shard.ready and shard.epoch > epoch, "it leads again")


@pytest.mark.parametrize("after_change", [False, True])
async def test_core_failure_loses_nothing_acknowledged(bench: Bench, after_change: bool) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        await fill(shard, chain(5))
        started: Started = await shard.submit(start_of(chain(2, 10), "r1"))
        digest = replay(shard._journal, 0, LIMITS).digest()
        assert shard.machine.digest() == digest
        await poison(shard, after_change=after_change)
        assert (shard.status, shard.epoch) == ("leading", 2)
        assert hits(shard, chain(5)) == 5
        shard.machine.check()
        assert shard.machine.state.tenants["t"].usage.blocks == 7
        again: Started = await shard.submit(start_of(chain(2, 10), "r1"))
        assert (again.session, again.locations) == (started.session, started.locations)
        assert (await shard.submit(finish_of(started))).published == 2
    assert len(bench.told.reasons) == 1
    assert "a counter disagrees with the rows" in bench.told.reasons[0]


async def test_core_failure_is_logged_with_its_traceback(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        with caplog.at_level(logging.INFO):
            await poison(shard)
    assert "in _poisoned" in caplog.text
    assert "state thrown away, rebuilding from the journal" in caplog.text


async def test_core_failure_answers_everybody_in_the_batch_and_behind_it(bench: Bench) -> None:
    """What was decided before the failure in the same batch was never durable: it never was."""
    async with bench.leading() as shard:
        await furnish(shard)
        bench.gate.hold()
        first = asyncio.create_task(shard.submit(start_of(chain(1))))
        await until(lambda: bench.gate.waiting, "the append begins")
        sent = (
            start_of(chain(3, 10), "r10"),
            cmd.PutTenant(tenant="t2"),
            Poison(),
            start_of(chain(3, 20), "r20"),
        )
        waiting = [asyncio.create_task(shard.submit(command)) for command in sent]
        await asyncio.sleep(0.02)
        bench.gate.free()
        assert (await first).outcomes == bytes([WriteOutcome.write])
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [getattr(answer, "code", answer) for answer in answers] == ["not_ready"] * 4
        await until(lambda: shard.ready and shard.epoch == 2, "it leads again")
        assert shard.describe_one("tenants", "t2") is None
        assert shard.machine.state.tenants["t"].usage.blocks == 1
        assert (await shard.submit(start_of(chain(3, 10), "r10"))).outcomes == bytes([WriteOutcome.write]) * 3


async def test_while_rebuilding_it_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_life, "REBUILD_PAUSE_MS", 500)
    async with bench.leading() as shard:
        await furnish(shard)
        await refusal(shard, Poison())
        await until(lambda: shard.status == "rebuilding", "it rebuilds")
        assert not shard.ready
        assert "a counter disagrees" in shard.reason
        assert (await refusal(shard, cmd.PutTenant(tenant="t2"))).code == "not_ready"
        with pytest.raises(ShardUnavailable, match="rebuilding"):
            shard.read(cmd.Lookup(instance="i", keys=chain(1)))


async def test_b_leases_of_before_are_unknown_after_a_rebuild(bench: Bench) -> None:
    """Leases are leader memory: waiting keeps what they promised, and holders are told the truth."""
    async with bench.leading() as shard:
        await furnish(shard)
        await fill(shard, chain(3))
        looked: Looked = shard.read(cmd.Lookup(instance="i", keys=chain(3), lease_ms=1_000))
        assert looked.lease is not None
        await poison(shard)
        renewed = shard.read(cmd.RenewLeases(leases=(looked.lease,), ttl_ms=1_000))
        assert renewed.outcomes == bytes([LeaseOutcome.unknown])
        later: Looked = shard.read(cmd.Lookup(instance="i", keys=chain(3), lease_ms=1_000))
        assert later.lease not in (None, looked.lease)
        # The old lease may still be read under: no bytes go before it would have ended.
        await shard.submit(cmd.Remove(instance="i", keys=chain(3), lease=later.lease or ""))
        take = cmd.TakeTasks(worker="w", incarnation="x")
        bench.clock.value_ms += LIMITS.lease_ms_max - 1
        assert shard.read(take).tasks == []
        bench.clock.value_ms += 1
        assert len(shard.read(take).tasks) == 1


async def test_sessions_of_before_get_their_whole_time_again(bench: Bench) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        started = await shard.submit(start_of(chain(2), ttl_ms=2_000))
        bench.clock.value_ms += 1_900
        await poison(shard)
        bench.clock.value_ms += 1_900
        assert (await shard.submit(finish_of(started))).published == 2


async def test_repeated_failures_each_get_a_new_epoch_and_lose_nothing(bench: Bench) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        for turn in range(5):
            await fill(shard, chain(2, 10 * turn))
            await poison(shard)
        assert shard.epoch == 6
        assert sum(hits(shard, chain(2, 10 * turn)) for turn in range(5)) == 10
        assert shard.machine.state.tenants["t"].usage.bytes == 10 * BLOCK_BYTES


async def test_failures_far_apart_do_not_lengthen_the_pause(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause grows while rebuilding helps nothing, not over the life of the process."""
    monkeypatch.setattr(replica_life, "REBUILD_PAUSE_MS", 100)
    pauses: list[float] = []
    async with bench.leading() as shard:
        await furnish(shard)
        for _ in range(4):
            began = asyncio.get_running_loop().time()
            await poison(shard)
            pauses.append(asyncio.get_running_loop().time() - began)
            await fill(shard, chain(1, 10 * len(pauses)))
    assert pauses[-1] < pauses[0] + 0.5, f"rebuilding took {pauses}"


async def test_a_state_thrown_away_is_not_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block table is the largest thing in the process: a rebuild must not leave the old one behind."""
    monkeypatch.setattr(replica_life, "gc", gc)
    # What is logged keeps the frames of the fault, and they keep the state.
    monkeypatch.setattr(logging.getLogger("metaservice.replica.sequencer"), "disabled", True)
    async with bench.leading() as shard:
        await furnish(shard)
        await fill(shard, chain(2))
        await poison(shard)  # the state below was replayed, as it is after a start
        old = weakref.ref(shard.machine)
        [key, _] = shard.machine.state.instances["i"].primary.slots
        await poison(shard)
        await asyncio.sleep(0)
        gc.collect()
        assert old() is None
        # The journal's payloads are bytes of their own: whoever else names this very object is the old table.
        assert sys.getrefcount(key) <= 2


async def test_stop_while_rebuilding_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_life, "REBUILD_PAUSE_MS", 100)
    shard = bench.shard()
    await shard.start()
    await furnish(shard)
    await refusal(shard, Poison())
    await until(lambda: shard.status == "rebuilding", "it rebuilds")
    await asyncio.wait_for(shard.stop(), 5)
    assert shard.status == "stopped"
    async with bench.leading() as shard:  # the journal was let go
        assert shard.describe_one("tenants", "t") is not None


async def test_a_rebuild_that_fails_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        await fill(shard, chain(2))
        failures = 2

        def failing(journal: Any, number: int, limits: Any, shards: int) -> Machine:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise JournalFailed("journal", "reading", "Input/output error")
            return replay(journal, number, limits, shards)

        monkeypatch.setattr(replica_life, "replay", failing)
        await poison(shard)
        assert hits(shard, chain(2)) == 2
    assert len(bench.told.reasons) == 3
    assert "Input/output error" in bench.told.reasons[1]


async def test_start_says_why_it_cannot(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(journal: Any, number: int, limits: Any, shards: int) -> Machine:
        raise CorruptJournal("journal", 7, "its checksum does not match")

    monkeypatch.setattr(replica_life, "replay", failing)
    shard = bench.shard()
    with pytest.raises(CorruptJournal, match="corrupt at seq 7"):
        await shard.start()
    await asyncio.wait_for(shard.stop(), 5)
    monkeypatch.undo()
    async with bench.leading() as again:
        assert again.ready


def _journal_with(bench: Bench, events: list[list[Any]]) -> MemoryJournal:
    from metaservice.journal.codec import encode_batch

    journal = HeldMemoryJournal(bench.store, bench.gate)
    journal.open()
    epoch = journal.claim()
    seq = 0
    for batch in events:
        journal.append(seq + 1, seq + len(batch), epoch, encode_batch(batch))
        seq += len(batch)
    return journal


def test_replay_refuses_a_batch_with_another_number_of_events(bench: Bench) -> None:
    from metaservice.journal.codec import encode_batch

    journal = _journal_with(bench, [[TenantPut(1, "a", Quota())]])
    journal.append(2, 3, 1, encode_batch([TenantPut(1, "b", Quota())]))
    with pytest.raises(CorruptJournal, match=r"at seq 2.*with 1 events"):
        replay(journal, 0, LIMITS)


def test_replay_refuses_a_snapshot_of_another_state(bench: Bench) -> None:
    """Whole by its checksums, and yet not the state that its digest names: it never was."""
    journal = _journal_with(bench, [[TenantPut(1, "a", Quota())], [TenantPut(1, "b", Quota())]])
    machine = replay(journal, 0, LIMITS)
    journal.snapshots.save(2, 1, b"x" * len(machine.digest()), machine.capture())
    with pytest.raises(CorruptJournal, match="another digest"):
        replay(journal, 0, LIMITS)


def test_replay_from_a_snapshot_and_its_tail_is_replay_of_everything(bench: Bench) -> None:
    batches: list[list[Any]] = [[TenantPut(n, f"t{n}", Quota(blocks=n))] for n in range(1, 9)]
    journal = _journal_with(bench, batches)
    whole = replay(journal, 0, LIMITS)
    loaded: list[SnapshotInfo] = []
    load: Callable[..., Any] = journal.snapshots.load
    for upto in (3, 5):
        part = Machine(0, LIMITS)
        for batch in batches[:upto]:
            part.apply(batch[0])
        journal.snapshots.save(upto, 1, part.digest(), part.capture())
    journal.snapshots.load = lambda info: loaded.append(info) or load(info)  # type: ignore[method-assign,func-returns-value]
    assert journal.trim(5) == 3
    again = replay(journal, 0, LIMITS)
    assert (again.seq, again.digest()) == (8, whole.digest())
    assert loaded[-1].seq == 5


async def use_and_delete(shard: Shard, bench: Bench, number: int) -> list[cmd.ConfirmTask]:
    """Write one block, remove it, and take its deletion; the confirmations are still to be sent."""
    await fill(shard, chain(1, number))
    await shard.submit(cmd.Remove(instance="i", keys=chain(1, number)))
    bench.clock.value_ms += LIMITS.lease_ms_max + LIMITS.late_write_ms
    tasks = shard.read(cmd.TakeTasks(worker="w", incarnation="x")).tasks
    assert [[*task.locations] for task in tasks] == [[0]]
    return [cmd.ConfirmTask(worker="w", incarnation="x", task=task.task) for task in tasks]


async def test_deletions_after_a_replay_name_each_place_once(bench: Bench) -> None:
    """A slot was used, deleted and used again before: what the journal says of then is no work of now."""
    async with bench.leading() as shard:
        await furnish(shard)
        for number in range(3):
            for confirm in await use_and_delete(shard, bench, number):
                await shard.submit(confirm)
        await fill(shard, chain(1, 50))
        await shard.submit(cmd.Remove(instance="i", keys=chain(1, 50)))
    async with bench.leading() as shard:
        bench.clock.value_ms += LIMITS.lease_ms_max + LIMITS.late_write_ms
        [task] = shard.read(cmd.TakeTasks(worker="w", incarnation="x")).tasks
        assert ([*task.locations], [*task.generations]) == ([0], [4])
        confirmed = await shard.submit(cmd.ConfirmTask(worker="w", incarnation="x", task=task.task))
        assert (confirmed.gone, confirmed.again) == (1, 0)
        shard.machine.check()


async def test_deletions_after_a_replay_name_the_storage_of_now(bench: Bench) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        for confirm in await use_and_delete(shard, bench, 0):
            await shard.submit(confirm)
        await shard.submit(cmd.PutStorage(storage="s2", kind="posix", options={"root": "/s2"}))
        await shard.submit(cmd.RegisterWorker(worker="w", incarnation="x", storages=("s", "s2")))
        await shard.submit(cmd.PutGroup(group="g", tenant="t", storages=("s2", "s")))
        await fill(shard, chain(1, 50))
        await shard.submit(cmd.Remove(instance="i", keys=chain(1, 50)))
    async with bench.leading() as shard:
        bench.clock.value_ms += LIMITS.lease_ms_max + LIMITS.late_write_ms
        [task] = shard.read(cmd.TakeTasks(worker="w", incarnation="x")).tasks
        assert (task.storage, [*task.locations], [*task.generations]) == ("s2", [0], [2])


async def test_a_wall_clock_that_jumped_ahead_shortens_nobodys_late_write(tmp_path: Path) -> None:
    """How long a writer may still be writing is a promise about real time: a restart after the wall clock was
    set forward must not pass it at once."""
    limits = Limits(lease_ms_max=1_000, late_write_ms=20_000)
    bench = Bench("memory", tmp_path, limits)
    async with bench.leading() as shard:
        await furnish(shard)
        await shard.submit(start_of(chain(2), ttl_ms=2_000))
        bench.clock.value_ms += 2_000
        await until(lambda: not shard.machine.state.sessions, "the session expires")
    bench.clock.value_ms += 3_600_000  # the machine was off for a moment, and its clock was wrong before
    async with bench.leading() as shard:
        take = cmd.TakeTasks(worker="w", incarnation="x")
        bench.clock.value_ms += 19_999
        assert shard.read(take).tasks == []
        bench.clock.value_ms += 1
        [task] = (await shard.take_tasks(take, 2_000)).tasks  # type: ignore[union-attr]
        assert [*task.locations] == [0, 1]
