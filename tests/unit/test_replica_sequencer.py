"""The sequencer over real journals: when it answers, how commands gather, how it ends."""

import asyncio
from array import array
from pathlib import Path

import pytest

from metaservice.core import commands as cmd
from metaservice.core.model import Quota
from metaservice.core.outcomes import WriteOutcome
from metaservice.core.rejections import Rejection
from metaservice.core.replies import Done, Finished, Looked, Started
from metaservice.replica import sequencer
from metaservice.replica.errors import ShardUnavailable
from tests.unit.replica_house import (
    LIMITS,
    Bench,
    chain,
    fill,
    finish_of,
    furnish,
    hits,
    leave_the_heap_alone,
    refusal,
    remove_of,
    start_of,
    until,
)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    leave_the_heap_alone(monkeypatch)
    return Bench("memory", tmp_path)


@pytest.fixture(params=["memory", "sqlite"])
def any_bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """For what depends on how the journal behaves."""
    leave_the_heap_alone(monkeypatch)
    return Bench(request.param, tmp_path)


async def test_a_reply_comes_only_after_its_events_are_durable(any_bench: Bench) -> None:
    async with any_bench.leading() as shard:
        await furnish(shard)
        durable = shard.durable_seq
        any_bench.gate.hold()
        waiting = asyncio.create_task(shard.submit(start_of(chain(4))))
        await until(lambda: any_bench.gate.waiting, "the append begins")
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert shard.durable_seq == durable
        any_bench.gate.free()
        started: Started = await waiting
        assert started.outcomes == bytes([WriteOutcome.write]) * 4
        assert shard.durable_seq == durable + 1


async def test_a5_a_lookup_never_sees_a_block_whose_finish_is_not_durable(any_bench: Bench) -> None:
    keys = chain(5)
    async with any_bench.leading() as shard:
        await furnish(shard)
        started = await shard.submit(start_of(keys))
        any_bench.gate.hold()
        finishing = asyncio.create_task(shard.submit(finish_of(started)))
        await until(lambda: any_bench.gate.waiting, "the append begins")
        for mode in ("each", "prefix"):
            looked: Looked = shard.read(cmd.Lookup(instance="i", keys=keys, mode=mode, lease_ms=500))
            assert (looked.hits, looked.cut, looked.lease) == (0, "miss", None)
        any_bench.gate.free()
        await finishing
        assert hits(shard, keys) == 5


async def test_a_block_that_somebody_finishes_now_is_no_place_to_write(bench: Bench) -> None:
    """Serving, durable or not: the answer `present` waits for the same durability as the finish."""
    keys = chain(2)
    async with bench.leading() as shard:
        await furnish(shard)
        started = await shard.submit(start_of(keys))
        bench.gate.hold()
        finishing = asyncio.create_task(shard.submit(finish_of(started)))
        await until(lambda: bench.gate.waiting, "the append begins")
        second = asyncio.create_task(shard.submit(start_of(keys)))
        await asyncio.sleep(0.02)
        assert not second.done()
        bench.gate.free()
        again: Started = await second
        assert finishing.done()
        assert again.outcomes == bytes([WriteOutcome.present]) * 2


async def test_commands_gather_while_an_append_is_in_flight(any_bench: Bench) -> None:
    async with any_bench.leading() as shard:
        await furnish(shard)
        any_bench.gate.hold()
        first = asyncio.create_task(shard.submit(start_of(chain(1))))
        await until(lambda: any_bench.gate.waiting, "the append begins")
        rest = [asyncio.create_task(shard.submit(start_of(chain(3, 10 * n)))) for n in range(1, 41)]
        await asyncio.sleep(0.02)
        before, batches = len(any_bench.gate.appended), len(any_bench.told.batches)
        any_bench.gate.free()
        await asyncio.gather(first, *rest)
        assert len(any_bench.gate.appended) - before == 2
        assert any_bench.told.batches[batches:] == [1, 40]
        first_seq, last_seq = any_bench.gate.appended[-1]
        assert last_seq - first_seq + 1 == 40


async def test_a_batch_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequencer, "COMMANDS_PER_BATCH_MAX", 7)
    monkeypatch.setattr(sequencer, "KEYS_PER_BATCH_MAX", 10)
    async with bench.leading() as shard:
        await furnish(shard)
        bench.gate.hold()
        first = asyncio.create_task(shard.submit(start_of(chain(1))))
        await until(lambda: bench.gate.waiting, "the append begins")
        small = [asyncio.create_task(shard.submit(cmd.PutTenant(tenant=f"t{n}"))) for n in range(16)]
        large = [asyncio.create_task(shard.submit(start_of(chain(6, 10 * n)))) for n in range(1, 5)]
        await asyncio.sleep(0.02)
        batches = len(bench.told.batches)
        bench.gate.free()
        await asyncio.gather(first, *small, *large)
        assert bench.told.batches[batches:] == [1, 7, 7, 4, 2]


async def test_commands_are_decided_in_the_order_they_came(bench: Bench) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        keys = chain(3)
        bench.gate.hold()
        first = asyncio.create_task(shard.submit(start_of(chain(1, 50))))
        await until(lambda: bench.gate.waiting, "the append begins")
        racers = [asyncio.create_task(shard.submit(start_of(keys))) for _ in range(5)]
        await asyncio.sleep(0.02)
        bench.gate.free()
        outcomes = [set((await racer).outcomes) for racer in racers]
        await first
        assert outcomes == [{WriteOutcome.write}] + [{WriteOutcome.in_progress}] * 4


async def test_a_refusal_changes_nothing_and_is_not_journaled(bench: Bench) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        durable, digest = shard.durable_seq, shard.machine.digest()
        reply = await shard.submit(start_of([b"short"]))
        assert isinstance(reply, Rejection) and reply.code == "key_length"
        assert (shard.durable_seq, shard.machine.digest()) == (durable, digest)


async def test_a_caller_gone_before_its_command_is_decided_changes_nothing(bench: Bench) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        bench.gate.hold()
        first = asyncio.create_task(shard.submit(start_of(chain(1))))
        await until(lambda: bench.gate.waiting, "the append begins")
        gone = asyncio.create_task(shard.submit(start_of(chain(1, 5))))
        stays = asyncio.create_task(shard.submit(start_of(chain(1, 6))))
        await asyncio.sleep(0.02)
        gone.cancel()
        bench.gate.free()
        await asyncio.gather(first, stays)
        assert gone.cancelled()
        again: Started = await shard.submit(start_of(chain(1, 5)))
        assert again.outcomes == bytes([WriteOutcome.write])
        assert len(shard.machine.state.sessions) == 3


async def test_a_caller_gone_after_its_command_is_decided_loses_only_the_answer(bench: Bench) -> None:
    """What was decided stands; with the same request id the caller gets the first answer (I7)."""
    async with bench.leading() as shard:
        await furnish(shard)
        bench.gate.hold()
        gone = asyncio.create_task(shard.submit(start_of(chain(2), "r1")))
        await until(lambda: bench.gate.waiting, "the append begins")
        gone.cancel()
        stays = asyncio.create_task(shard.submit(start_of(chain(2), "r2")))
        await asyncio.sleep(0.02)
        bench.gate.free()
        assert (await stays).outcomes == bytes([WriteOutcome.in_progress]) * 2
        again: Started = await shard.submit(start_of(chain(2), "r1"))
        assert again.outcomes == bytes([WriteOutcome.write]) * 2
        assert (await shard.submit(finish_of(again))).published == 2


async def test_a_full_queue_says_overloaded_and_forgets_nobody(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequencer, "QUEUE_MAX", 50)
    async with bench.leading() as shard:
        await furnish(shard)
        keys = chain(3)
        await fill(shard, keys)
        bench.gate.hold()
        first = asyncio.create_task(shard.submit(start_of(chain(1, 10))))
        await until(lambda: bench.gate.waiting, "the append begins")
        queued = [asyncio.create_task(shard.submit(cmd.PutTenant(tenant=f"t{n}"))) for n in range(50)]
        await asyncio.sleep(0.02)
        error = await refusal(shard, cmd.PutTenant(tenant="late"))
        assert error.code == "overloaded"
        assert error.retry_after_ms > 0
        assert hits(shard, keys) == 3
        bench.gate.free()
        await first
        assert all(isinstance(reply, Done) for reply in await asyncio.gather(*queued))
        await shard.submit(cmd.PutTenant(tenant="late"))
        assert len(shard.describe("tenants")) == 52


async def test_stop_makes_durable_what_is_queued_and_takes_no_more(any_bench: Bench) -> None:
    keys = chain(3)
    async with any_bench.leading() as shard:
        await furnish(shard)
        started = await shard.submit(start_of(keys))
        any_bench.gate.hold()
        first = asyncio.create_task(shard.submit(finish_of(started)))
        await until(lambda: any_bench.gate.waiting, "the append begins")
        queued = [asyncio.create_task(shard.submit(cmd.PutTenant(tenant=f"t{n}"))) for n in range(20)]
        await asyncio.sleep(0.02)
        stopping = asyncio.create_task(shard.stop())
        await asyncio.sleep(0.02)
        assert not shard.ready
        assert (await refusal(shard, cmd.PutTenant(tenant="late"))).code == "not_ready"
        assert not stopping.done()
        any_bench.gate.free()
        await stopping
        assert shard.status == "stopped"
        finished: Finished = await first
        assert finished.published == 3
        assert all(isinstance(reply, Done) for reply in await asyncio.gather(*queued))
    async with any_bench.leading() as shard:
        assert hits(shard, keys) == 3
        assert {view.id for view in shard.describe("tenants")} == {"t", *(f"t{n}" for n in range(20))}  # type: ignore[attr-defined]


async def test_stop_may_be_called_in_any_state(any_bench: Bench) -> None:
    await any_bench.shard().stop()
    async with any_bench.leading() as shard:
        await shard.stop()
        await shard.stop()
        assert (shard.status, shard.ready) == ("stopped", False)


async def test_deadlines_pass_without_any_caller(bench: Bench) -> None:
    """A2, A3: an idle service with nothing but half-written blocks frees them by itself."""
    keys = chain(100)
    async with bench.leading() as shard:
        await furnish(shard)
        started = await shard.submit(start_of(keys, ttl_ms=5_000))
        bench.clock.value_ms += 4_999
        await asyncio.sleep(0.25)
        assert len(shard.machine.state.sessions) == 1
        bench.clock.value_ms += 1
        await until(lambda: not shard.machine.state.sessions, "the session expires")
        await until(lambda: bench.told.ended == [("session", 1)], "the observer hears of it")
        usage = shard.machine.state.tenants["t"].usage
        assert (usage.bytes, usage.blocks, usage.deleting_blocks) == (0, 0, 100)
        reply = await shard.submit(finish_of(started))
        assert isinstance(reply, Rejection) and reply.code == "session_expired"
        shard.machine.check()


async def test_a_busy_service_keeps_its_deadlines(bench: Bench) -> None:
    """Callers without a pause must not keep the tick away."""
    async with bench.leading() as shard:
        await furnish(shard)
        await shard.submit(start_of(chain(3), ttl_ms=5_000))
        bench.clock.value_ms += 5_000

        async def press(number: int) -> None:
            for turn in range(3_000):
                if not shard.machine.state.sessions:
                    return
                await shard.submit(cmd.PutTenant(tenant=f"t{number}", quota=Quota(blocks=turn)))
            raise AssertionError("the tick never came")

        bench.gate.hold()
        first = asyncio.create_task(press(0))
        await until(lambda: bench.gate.waiting, "the append begins")
        second = asyncio.create_task(
            press(1)
        )  # from now on one of them always waits behind the other's append
        await asyncio.sleep(0.01)
        bench.gate.free()
        await asyncio.gather(first, second)
        assert bench.told.ended == [("session", 1)]


async def test_b6_a_lease_of_a_holder_who_is_gone_ends_by_itself(bench: Bench) -> None:
    keys = chain(4)
    async with bench.leading() as shard:
        await furnish(shard)
        await fill(shard, keys)
        shard.read(cmd.Lookup(instance="i", keys=keys, lease_ms=500))
        bench.clock.value_ms += 500
        await until(lambda: ("lease", 1) in bench.told.ended, "the observer hears of the lease's end")
        assert not any(shard.machine.state.index.pins)


async def test_bytes_go_only_after_their_removal_is_durable(any_bench: Bench) -> None:
    """I3: a removal whose append hangs is no fact yet; were the bytes deleted and the service then killed,
    the block would serve again without bytes."""
    keys = chain(3)
    async with any_bench.leading() as shard:
        await furnish(shard)
        await fill(shard, keys)
        any_bench.clock.value_ms += LIMITS.lease_ms_max  # the take-over's own wait
        any_bench.gate.hold()
        removing = asyncio.create_task(shard.submit(remove_of(keys)))
        await until(lambda: any_bench.gate.waiting, "the append begins")
        any_bench.clock.value_ms += 10 * LIMITS.reclaim_delay_ms
        take = cmd.TakeTasks(worker="w", incarnation="x")
        assert shard.read(take).tasks == []
        any_bench.gate.free()
        await removing
        # whoever was told of the block while the append hung counts from now
        any_bench.clock.value_ms += LIMITS.reclaim_delay_ms - 1
        assert shard.read(take).tasks == []
        any_bench.clock.value_ms += 1
        tasks = (await shard.take_tasks(take, 2_000)).tasks  # type: ignore[union-attr]
        assert sum(len(task.locations) for task in tasks) == 3


async def test_evictions_are_told_with_their_bytes(bench: Bench) -> None:
    async with bench.leading() as shard:
        await furnish(shard, high_permille=1_000, low_permille=1_000)
        await shard.submit(cmd.PutTenant(tenant="t", quota=Quota(blocks=4)))
        await fill(shard, chain(4))
        await fill(shard, chain(2, 100))
        assert bench.told.evictions == [("quota", 2, 2_000)]


async def test_long_poll_gets_work_when_there_is_some_and_nothing_after_its_wait(bench: Bench) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        await fill(shard, chain(2))
        bench.clock.value_ms += LIMITS.lease_ms_max
        take = cmd.TakeTasks(worker="w", incarnation="x")
        assert (await shard.take_tasks(take, 50)).tasks == []  # type: ignore[union-attr]
        polling = asyncio.create_task(shard.take_tasks(take, 10_000))
        await asyncio.sleep(0.02)
        await shard.submit(remove_of(chain(2)))
        bench.clock.value_ms += LIMITS.reclaim_delay_ms
        reply = await asyncio.wait_for(polling, 5)
        assert not isinstance(reply, Rejection)
        assert sorted(reply.tasks[0].locations) == [0, 1]
        wrong = await shard.take_tasks(cmd.TakeTasks(worker="w", incarnation="old"), 10_000)
        assert isinstance(wrong, Rejection) and wrong.code == "reregister"


async def test_nobody_is_answered_before_the_take_over_is_durable(any_bench: Bench) -> None:
    any_bench.gate.hold()
    shard = any_bench.shard()
    starting = asyncio.create_task(shard.start())
    await until(lambda: any_bench.gate.waiting, "the take-over's append begins")
    assert not shard.ready
    with pytest.raises(ShardUnavailable, match="promoting") as raised:
        shard.read(cmd.Lookup(instance="i", keys=chain(1)))
    assert raised.value.code == "not_ready"
    assert (await refusal(shard, cmd.PutTenant(tenant="t"))).code == "not_ready"
    assert shard.durable_seq == 0
    any_bench.gate.free()
    await starting
    assert (shard.ready, shard.epoch, shard.durable_seq) == (True, 1, 1)
    await shard.stop()


async def test_d10_every_start_has_a_larger_epoch(any_bench: Bench) -> None:
    epochs = []
    for _ in range(3):
        async with any_bench.leading() as shard:
            epochs.append(shard.epoch)
            cluster = shard.cluster
    assert epochs == [1, 2, 3]
    assert cluster == "c1"


async def test_views_of_instances_and_storages(bench: Bench) -> None:
    async with bench.leading() as shard:
        await furnish(shard)
        info = shard.instance("i")
        assert info is not None and info.key_length == 16 and list(info.groups) == ["full"]
        assert shard.instance("i") is info
        assert shard.instance("nobody") is None
        await fill(shard, chain(1))
        number = shard.machine.state.index.storage[0]
        assert (shard.storage(number).name, shard.storage(number).options) == ("s", {"root": "/s"})
        detail = shard.block("i", None, chain(1)[0])
        assert not isinstance(detail, Rejection)
        assert (detail.state, detail.visible, detail.location) == ("serving", True, 0)
        unknown = shard.read(
            cmd.Unknown(
                worker="w",
                incarnation="x",
                storage="s",
                locations=array("Q", [0, 0, 9]),
                generations=array("I", [1, 2, 1]),
            )
        )
        assert unknown.unknown == bytes([0, 1, 1])
