"""What must come to an end in a replica that is busy, waits for a leader, or fails at an odd moment: nobody
is left waiting, and no shard is led by what is dead."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from metaservice.clock import monotonic_s
from metaservice.core import commands as cmd
from metaservice.core.events import Event, TookOver
from metaservice.core.model import Quota
from metaservice.journal.memory import MemoryJournal, MemoryStore
from metaservice.journal.port import Batch, OpenReport
from metaservice.replica.election import Election
from metaservice.replica.shard import Clock, Hooks, Shard
from tests.unit.replica_house import WAIT_S, Bench, LoneShard, furnish, leave_the_heap_alone, until

CALLERS = 32


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    leave_the_heap_alone(monkeypatch)
    return Bench("memory", tmp_path)


class SlowJournal(MemoryJournal):
    """As a disk: while one batch gets in, the next one has gathered."""

    def append(self, first_seq: int, last_seq: int, epoch: int, payload: bytes) -> None:
        time.sleep(0.005)
        super().append(first_seq, last_seq, epoch, payload)


async def test_what_needs_the_state_at_rest_gets_it_from_a_shard_that_never_rests(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalogue is shown to a shard that is behind at a moment when all of it is durable. Under a load
    that has the next batch ready whenever one is durable there is no pause to wait for."""
    monkeypatch.setattr(bench, "journal", lambda: SlowJournal(bench.store, 0))
    async with bench.leading() as shard:
        await furnish(shard)
        stop = asyncio.Event()

        async def one_after_the_other(number: int) -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                await shard.submit(cmd.PutTenant(tenant=f"t{number}", quota=Quota(blocks=turn)))

        async def look() -> None:
            seq, clean = await shard.at_rest(lambda machine: (machine.seq, machine.memory.durable_seq))
            assert seq == clean

        callers: list[asyncio.Task[None]] = []
        try:
            for number in range(CALLERS):
                callers.append(asyncio.create_task(one_after_the_other(number)))
                await asyncio.sleep(0.001)  # so that they are not all in one batch
            for _ in range(5):
                await asyncio.wait_for(look(), 5)
        finally:
            stop.set()
            await asyncio.wait(callers)


async def test_waiting_for_a_leader_costs_next_to_nothing_however_many_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nobody leads, all requests wait. If each looked again and again, the loop would have no time left
    for the election that ends it."""
    looks = 0

    def leader(self: Election, number: int) -> tuple[str, str]:
        nonlocal looks
        looks += 1
        return ("", "")

    async with bench.leading() as shard:
        monkeypatch.setattr(Election, "leader", leader)
        waiting = [shard.replica.await_leader(0, 500) for _ in range(500)]
        assert set(await asyncio.gather(*waiting)) == {""}
        assert looks <= 10 * len(waiting)


class Failing(Hooks):
    """Fails when it hears of the first take-over, as a fault in what listens would."""

    def __init__(self) -> None:
        self.failed = False

    def applied(self, shard: int, events: Sequence[Event], seq: int) -> None:
        if not self.failed and any(isinstance(event, TookOver) for event in events):
            self.failed = True
            raise RuntimeError("a listener failed")


async def test_a_fault_right_behind_the_take_over_leaves_no_leader_that_never_answers(bench: Bench) -> None:
    shard = LoneShard(bench, None)
    hooks = shard._hooks = Failing()
    await shard.load()
    shard.lease_until_s = float("inf")
    led = await shard.promote()
    assert hooks.failed
    if led:
        assert (await asyncio.wait_for(shard.submit(cmd.PutTenant(tenant="t")), 2)) is not None
    else:
        assert not shard.ready
        await shard.catch_up()
        assert await shard.promote()
        await asyncio.wait_for(shard.submit(cmd.PutTenant(tenant="t")), WAIT_S)
    await shard.close()


async def test_a_promotion_that_is_cancelled_leaves_nothing_running(bench: Bench) -> None:
    """A replica that stops in the middle of a take-over."""
    shard = LoneShard(bench, None)
    await shard.load()
    shard.lease_until_s = monotonic_s() + WAIT_S
    bench.gate.hold()
    promoting = asyncio.create_task(shard.promote())
    await until(lambda: bench.gate.waiting, "the take-over is being appended")
    promoting.cancel()
    await asyncio.wait([promoting])
    bench.gate.free()
    await asyncio.wait_for(shard.close(), WAIT_S)
    await asyncio.sleep(0.05)
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert left == []
    assert shard.status == "stopped"


async def test_i10_a_replica_that_is_alone_answers_until_its_drain_is_over(bench: Bench) -> None:
    """There is nobody to hand over to: letting go when it begins to leave would fail every request of the
    time that it promises to go on for."""
    async with bench.leading() as shard:
        await furnish(shard)
        await shard.replica.leave()
        for _ in range(20):
            await asyncio.sleep(0.02)
            assert shard.ready
        await asyncio.wait_for(shard.submit(cmd.PutTenant(tenant="t2")), WAIT_S)


class ReadGate(MemoryJournal):
    """A follower's, beside the journal that leads. It can be held up behind what it has read."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store, 0)
        self.free = threading.Event()
        self.free.set()
        self.held = False

    def open(self) -> OpenReport:
        self._is_open = True
        return OpenReport(self.head(), 0, None, ())

    def close(self) -> None:
        self._is_open = False

    def read(self, after_seq: int) -> Iterator[Batch]:
        found = list(super().read(after_seq))
        self.held = not self.free.is_set()
        assert self.free.wait(WAIT_S)
        return iter(found)


async def test_a_hint_that_comes_while_the_journal_is_read_is_not_lost(bench: Bench) -> None:
    """What it tells of may have come after the reading: the follower must look again, not a poll later."""
    async with bench.leading() as leader:
        journal = ReadGate(bench.store)
        clock = Clock(bench.clock.start, bench.clock.now_ms, monotonic_s)
        follower = Shard(0, journal, bench.limits, clock, bench.told, lambda: "c1", poll_ms=1_000_000)
        await follower.load()
        following = asyncio.create_task(follower.live())
        try:
            journal.free.clear()
            await leader.submit(cmd.PutTenant(tenant="t1"))
            follower.hint()
            await until(lambda: journal.held, "it reads")
            await leader.submit(cmd.PutTenant(tenant="t2"))
            follower.hint()
            journal.free.set()
            await until(lambda: follower.durable_seq == leader.durable_seq, "it has read all")
        finally:
            journal.free.set()
            await follower.close()
            following.cancel()
            await asyncio.wait([following])
