"""The publisher process, killed, stopped, starved and orphaned."""

import asyncio
import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from metaservice.clock import lease_s
from metaservice.publish import feed, pipe
from metaservice.publish.errors import PublisherUnavailable
from metaservice.publish.settings import PublishRefused
from tests.functional.publish_house import (
    House,
    Model,
    Subscriber,
    free_ports,
    gone_of,
    instance_up,
    open_house,
    run_of,
)


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    made.linger = 0
    yield made
    made.destroy(linger=0)


async def until(true: object, timeout_s: float = 10.0) -> None:
    assert callable(true)
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        state = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def silent(consumer: Subscriber, for_s: float) -> list[int]:
    """The numbers that it still gets within this time."""
    numbers = []
    try:
        while True:
            numbers.append((await consumer.receive(for_s))[1])
    except TimeoutError:
        return numbers


async def test_a_killed_process_is_started_again_and_told_everything(
    context: zmq.asyncio.Context, seed: int
) -> None:
    async with open_house() as house:
        model = Model(seed)
        house.told = lambda: house.tell_standing(model)
        house.told()
        consumer = Subscriber(context, house)
        await house.joined()
        for _ in range(50):
            house.publisher.tell(model.step())
        await consumer.follow(model.number)
        for _ in range(2):
            pid = house.publisher.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda killed=pid: house.publisher.pid not in (None, killed))
            model.step()  # while there was no publisher
            house.told()
            await house.joined()
            house.publisher.tell(model.step())
            await consumer.follow(model.number)
            assert consumer.index.names == model.wanted()
        assert house.publisher.starts == 3


async def test_a_stopped_process_that_wakes_after_its_lease_sends_nothing(
    context: zmq.asyncio.Context, seed: int
) -> None:
    async with open_house() as house:
        model = Model(seed)
        house.tell_standing(model)
        consumer = Subscriber(context, house)
        await house.joined()
        house.publisher.tell(model.step())
        await consumer.follow(model.number)
        pid = house.publisher.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        house.publisher.fence(0, 1, lease_s() + 0.3)
        for _ in range(20):
            house.publisher.tell(model.step())
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
        assert await silent(consumer, 0.5) == []
        status = await house.settled()
        assert [one["live"] for one in status["streams"]] == [False, False]
        # What was due in the epoch that is over is never sent, for others have gone on; whoever asks
        # is told of it.
        consumer.gaps = 0
        house.lead(epoch=2)
        await house.joined()
        assert await silent(consumer, 0.3) == []
        house.publisher.tell(model.step())
        await consumer.follow(model.number)
        assert consumer.gaps == 1
        assert consumer.index.names == model.wanted()


async def test_what_is_due_is_sent_when_the_same_epoch_goes_on(
    context: zmq.asyncio.Context, seed: int
) -> None:
    """The replica renewed its lease late; nobody else led meanwhile."""
    async with open_house() as house:
        model = Model(seed)
        model.number += 5_000
        house.tell_standing(model, lease_for_s=0.0)
        for _ in range(20):
            house.publisher.tell(model.step())
        await house.settled()
        assert house.publisher.stats.get("batches_total", 0) == 0
        house.publisher.fence(0, 1, lease_s() + 60)
        await until(lambda: house.publisher.stats.get("batches_total", 0) == 40)
        assert house.publisher.stats["dropped_total"] == 0


async def test_an_orphan_sends_nothing_more_and_ends(tmp_path: Path, context: zmq.asyncio.Context) -> None:
    """The replica is killed with -9."""
    base = free_ports()
    program = textwrap.dedent(f"""
        import asyncio
        from tests.functional.publish_house import Model, open_house
        async def main():
            async with open_house({base}) as house:
                model = Model(1)
                model.number += 5_000
                house.tell_standing(model)
                await house.settled()
                with open({str(tmp_path / "pid")!r}, "w") as file:
                    file.write(str(house.publisher.pid))
                while True:
                    house.publisher.tell(model.step())
                    await asyncio.sleep(0.001)
        asyncio.run(main())
    """)
    replica = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    try:
        await until((tmp_path / "pid").exists)
        await asyncio.sleep(0.1)
        child = int((tmp_path / "pid").read_text())
        sub = context.socket(zmq.SUB)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(f"tcp://127.0.0.1:{base}")
        await asyncio.wait_for(sub.recv_multipart(), 10)
    finally:
        replica.kill()
        await replica.wait()
    killed_s = time.monotonic()
    await until(lambda: not alive(child), 2)
    assert time.monotonic() - killed_s < 1
    while await sub.poll(200):
        await sub.recv_multipart()


async def test_a_process_that_does_not_read_is_told_anew_and_costs_the_replica_nothing(
    context: zmq.asyncio.Context, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipe, "BACKLOG_BYTES_MAX", 256 * 1024)
    async with open_house() as house:
        model = Model(seed)
        house.told = lambda: house.tell_standing(model)
        house.told()
        await house.settled()
        pid = house.publisher.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        slowest_s = 0.0
        while not house.publisher.overflows:
            begun_s = time.perf_counter()
            before = list(model.blocks)
            model.blocks.clear()
            house.publisher.tell(model.window([model.grow(64)], [gone_of(before)]))
            slowest_s = max(slowest_s, time.perf_counter() - begun_s)
            await asyncio.sleep(0)
        assert slowest_s < 0.1
        assert house.publisher.backlog_bytes < 512 * 1024
        with pytest.raises(PublisherUnavailable):
            await house.publisher.ask("status", b"\x80", 1_000)
        house.publisher.tell(model.window([model.grow(64)]))
        house.begun.clear()
        await asyncio.sleep(0.1)
        assert not house.begun.is_set()
        os.kill(pid, signal.SIGCONT)
        await asyncio.wait_for(house.begun.wait(), 5)
        status = await house.settled()
        assert house.publisher.starts == 1
        assert status["streams"][0]["announced"] == len(model.blocks)


async def test_questions_do_not_wait_for_ever(seed: int) -> None:
    async with open_house() as house:
        house.tell_standing(Model(seed))
        await house.settled()
        with pytest.raises(PublisherUnavailable, match="not_found"):
            await house.publisher.ask("weather", b"", 1_000)
        with pytest.raises(PublisherUnavailable, match="invalid_field"):
            await house.publisher.ask("status", b"\xc1", 1_000)
        pid = house.publisher.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(PublisherUnavailable, match="did not answer in 200 ms"):
            await house.publisher.ask("status", b"\x80", 200)
        asking = asyncio.create_task(house.publisher.ask("status", b"\x80", 60_000))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PublisherUnavailable, match="ended"):
            await asking


async def test_it_is_nicer_than_its_replica(seed: int) -> None:
    async with open_house() as house:
        await house.settled()
        pid = house.publisher.pid
        assert pid is not None
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)


async def test_a_port_that_is_taken_is_waited_for(context: zmq.asyncio.Context, seed: int) -> None:
    base = free_ports()
    squatter = socket.socket()
    squatter.bind(("127.0.0.1", base))
    async with open_house(base) as house:
        model = Model(seed)
        house.tell_standing(model)
        status = await house.settled()
        assert [one["live"] for one in status["streams"]] == [False, True]
        squatter.close()
        consumer = Subscriber(context, house)
        await house.joined()
        house.publisher.tell(model.step())
        await consumer.follow(model.number)


async def test_replays_are_answered_while_another_replica_leads(
    context: zmq.asyncio.Context, seed: int
) -> None:
    async with open_house() as house:
        model = Model(seed)
        house.tell_standing(model, leads=False)
        for _ in range(10):
            house.publisher.tell(model.step())
        status = await house.settled()
        assert [one["live"] for one in status["streams"]] == [False, False]
        consumer = Subscriber(context, house)
        for number, payload in await consumer.replay(0):
            consumer.index.take(number, payload)
        assert consumer.index.names == model.wanted()


async def test_with_a_shared_address_only_the_leader_listens(context: zmq.asyncio.Context, seed: int) -> None:
    base = free_ports()
    async with (
        open_house(base, shared_address=True) as first,
        open_house(base, shared_address=True) as second,
    ):
        model = Model(seed)
        model.number += 5_000
        first.tell_standing(model)
        second.tell_standing(model, leads=False)
        consumer = Subscriber(context, first)
        await first.joined()
        for _ in range(20):
            window = model.step()
            first.publisher.tell(window)
            second.publisher.tell(window)
        await consumer.follow(model.number)
        consumer.gaps = 0
        first.resign()
        second.lead(epoch=2)
        led_s = time.monotonic()
        await second.joined()
        second.publisher.tell(model.step())
        await consumer.follow(model.number)
        assert time.monotonic() - led_s < 2
        assert consumer.index.faults == []
        assert consumer.index.names == model.wanted()
        assert consumer.gaps == 0


async def test_settings_that_cannot_work_are_refused_at_the_start() -> None:
    for settings, said in (
        ({"host": "0.0.0.0"}, "curve_secret"),
        ({"host": "*"}, "advertise"),
        ({"curve_secret": "/nowhere"}, "curve_clients"),
        ({"channels_max": 30_000}, "channels_max"),
        ({"curve_secret": "/nowhere", "curve_clients": {"x" * 40: "*"}}, "nowhere"),
    ):
        with pytest.raises(PublishRefused, match=said):
            async with open_house(40_000, **settings):
                pass


async def test_runs_of_several_instances_share_a_stream(context: zmq.asyncio.Context, seed: int) -> None:
    """The engines of an instance read its adapters' blocks from the same stream."""
    async with open_house() as house:
        await _share(house, context, seed)


async def _share(house: House, context: zmq.asyncio.Context, seed: int) -> None:
    model = Model(seed)
    house.tell_standing(model, instances=[instance_up(), instance_up("a", base="i", lora="adapter")])
    consumer = Subscriber(context, house)
    await house.joined()
    house.publisher.tell(model.window([model.grow(3), run_of(range(900, 903), instance="a")]))
    await consumer.follow(model.number)
    assert len(consumer.index.names) == 6
    assert consumer.index.loras == {None: 3, "adapter": 3}
    fresh = Subscriber(context, house)
    for number, payload in await fresh.replay(0):
        fresh.index.take(number, payload)
    assert fresh.index.names == consumer.index.names
    house.publisher.tell(feed.InstanceDown(0, "a"))
    await house.settled()
