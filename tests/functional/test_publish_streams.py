"""What consumers see of the publisher process, on real sockets."""

import asyncio
from collections.abc import Iterator

import pytest
import zmq.asyncio

from metaservice.publish import feed
from tests.functional.publish_house import END, FIRST, Model, Subscriber, engine_up, instance_up, open_house


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    made.linger = 0
    yield made
    made.destroy(linger=0)


async def test_a_subscriber_sees_every_window_once_and_in_order(
    context: zmq.asyncio.Context, seed: int
) -> None:
    async with open_house() as house:
        model = Model(seed)
        house.tell_standing(model)
        await house.settled()
        consumer = Subscriber(context, house)
        await house.joined()
        for _ in range(300):
            house.publisher.tell(model.step())
        await consumer.follow(model.number)
        assert consumer.index.faults == []
        assert consumer.index.names == model.wanted()
        status = await house.settled()
        assert [one["number"] for one in status["streams"]] == [model.number] * 2
        assert [one["live"] for one in status["streams"]] == [True, True]
        assert status["streams"][0]["subscribers"] == 1
        assert status["streams"][0]["announced"] == len(model.blocks)


async def test_row_01_replies_have_the_topic_frame_and_end(context: zmq.asyncio.Context, seed: int) -> None:
    async with open_house() as house:
        model = Model(seed)
        house.tell_standing(model)
        for _ in range(5):
            house.publisher.tell(model.step())
        await house.settled()
        consumer = Subscriber(context, house)
        await consumer.dealer.send_multipart([b"", (FIRST + 2).to_bytes(8, "big")])
        frames = [await asyncio.wait_for(consumer.dealer.recv_multipart(), 5) for _ in range(4)]
        assert [frame[:2] for frame in frames[:3]] == [[b"", b"kv@pool@m"]] * 3
        assert [int.from_bytes(frame[2], "big") for frame in frames[:3]] == [FIRST + 2, FIRST + 3, FIRST + 4]
        assert frames[3] == [b"", b"", b"\xff" * 8, b""]


async def test_row_07_joining_behind_the_ring_gets_the_exact_state(
    context: zmq.asyncio.Context, seed: int
) -> None:
    async with open_house(ring_windows=20) as house:
        model = Model(seed)
        house.tell_standing(model)
        late = Subscriber(context, house)
        ghosts = Subscriber(context, house)
        await house.joined(count=2)
        for _ in range(200):
            house.publisher.tell(model.step())
        await house.settled()
        await ghosts.follow(model.number)
        missed = ghosts.index.watermark
        for _ in range(200):
            house.publisher.tell(model.step())
        await house.settled()
        for consumer, start in ((late, 0), (ghosts, missed + 1)):
            told = await consumer.replay(start)
            numbers = [number for number, _ in told]
            assert numbers == sorted(set(numbers))
            assert numbers[0] == start
            assert numbers[-1] == model.number
            for number, payload in told:
                consumer.index.take(number, payload)
            assert consumer.index.faults == []
            assert consumer.index.names == model.wanted()
        house.publisher.tell(model.step())
        await late.follow(model.number)
        assert late.index.names == model.wanted()


async def test_row_07_a_snapshot_fits_in_the_numbers_that_are_left(
    context: zmq.asyncio.Context, seed: int
) -> None:
    """A publisher that was started anew knows only the newest windows, and a consumer may have missed just
    three."""
    async with open_house() as house:
        model = Model(seed)
        for _ in range(2_000):
            model.grow(3)
        model.number += 5_000
        house.tell_standing(model)
        await house.settled()
        consumer = Subscriber(context, house)
        for missed in (3, 2, 1):
            told = await consumer.replay(model.number - missed + 1)
            assert told[-1][0] == model.number
            assert len(told) <= missed
            consumer.index.watermark = -1
            for number, payload in told:
                assert consumer.index.take(number, payload)
            assert consumer.index.faults == []
            assert consumer.index.names == model.wanted()
        assert await consumer.replay(model.number + 1) == []


async def test_row_08_the_first_batch_seen_has_a_high_number(context: zmq.asyncio.Context, seed: int) -> None:
    """Somebody who joins is sent a heartbeat at once, sees that it missed something, and is told from 0."""
    async with open_house() as house:
        model = Model(seed)
        house.beat = lambda _: house.publisher.tell(model.window())
        house.tell_standing(model)
        for _ in range(100):
            house.publisher.tell(model.step())
        await house.settled()
        consumer = Subscriber(context, house)
        await consumer.follow(model.number + 1, timeout_s=3)
        assert house.beats == [0]
        assert consumer.gaps == 1
        assert consumer.index.names == model.wanted()


async def test_row_09_a_lost_history_ends_with_end(context: zmq.asyncio.Context, seed: int) -> None:
    async with open_house() as house:
        model = Model(seed)
        model.number += 10_000
        house.tell_standing(model)
        consumer = Subscriber(context, house)
        await house.joined()
        for _ in range(20):
            house.publisher.tell(model.step())
        await consumer.follow(model.number)
        assert consumer.ends == 0
        lost = Model(seed + 1)
        house.tell_standing(lost)
        for _ in range(20):
            house.publisher.tell(lost.step())
        numbers = [0]
        while numbers[-1] != END:
            _, number, payload = await consumer.receive()
            numbers.append(number)
        assert lost.number not in numbers
        assert payload.startswith(b"\x93")
        consumer.index.take(END, payload)
        await consumer.follow(lost.number)
        assert consumer.index.names >= lost.wanted()
        assert consumer.index.watermark == lost.number


async def test_row_09_a_channel_number_that_is_used_again_begins_with_end(
    context: zmq.asyncio.Context, seed: int
) -> None:
    async with open_house() as house:
        first, second = Model(seed), Model(seed, shard=1, instance="j")
        first.number += 50_000
        second.number += 5_000
        house.tell_standing(first)
        house.tell_standing(second, instances=[instance_up("j", shard=1)], engines=[])
        consumer = Subscriber(context, house)
        await house.joined()
        house.publisher.tell(first.step())
        await consumer.follow(first.number)
        house.publisher.tell(feed.EngineDown(0, "e", "left"))
        async with asyncio.timeout(5):
            while (await house.status())["streams"]:
                await asyncio.sleep(0.02)
        house.publisher.tell(engine_up("f", shard=1, instance="j"))
        await house.settled()
        house.beat = lambda _: house.publisher.tell(second.window())
        house.lead(1)
        numbers: list[int] = []
        while not numbers or numbers[-1] != second.number:
            numbers.append((await consumer.receive())[1])
        assert numbers[0] == END


async def test_row_14_young_histories_begin_with_end(context: zmq.asyncio.Context, seed: int) -> None:
    """A journal that was lost while no publisher ran: its consumers remember higher numbers."""
    async with open_house() as house:
        model = Model(seed)
        house.tell_standing(model)
        await house.settled()
        consumer = Subscriber(context, house)
        consumer.index.watermark = FIRST + 5_000
        await house.joined()
        for _ in range(10):
            house.publisher.tell(model.step())
        _, number, payload = await consumer.receive()
        assert number == END
        consumer.index.take(number, payload)
        await consumer.follow(model.number)
        assert consumer.index.names == model.wanted()


async def test_row_15_what_was_missed_comes_before_what_showed_it(
    context: zmq.asyncio.Context, seed: int
) -> None:
    """Every tenth frame is lost on its way; a replay that is asked for twice is answered twice, each to its
    END."""
    async with open_house() as house:
        model = Model(seed)
        model.number += 10_000
        house.tell_standing(model)
        consumer = Subscriber(context, house)
        await house.joined()
        for _ in range(500):
            house.publisher.tell(model.step())
        chance = Model(seed).random
        while consumer.index.watermark < model.number:
            _, number, payload = await consumer.receive()
            if chance.random() < 0.1 and number < model.number:
                continue
            if number > consumer.index.watermark + 1:
                consumer.gaps += 1
                told = await consumer.replay(consumer.index.watermark + 1)
                assert [one for one, _ in told][-1] >= number
                for one, missed in told:
                    consumer.index.take(one, missed)
            consumer.index.take(number, payload)
        assert consumer.gaps > 0
        assert consumer.index.faults == []
        assert consumer.index.names == model.wanted()
        start = (model.number - 9).to_bytes(8, "big")
        await consumer.dealer.send_multipart([b"", start])
        await consumer.dealer.send_multipart([b"", start])
        for _ in range(2):
            numbers = []
            while True:
                frames = await asyncio.wait_for(consumer.dealer.recv_multipart(), 5)
                numbers.append(int.from_bytes(frames[2], "big"))
                if numbers[-1] == END:
                    break
            assert numbers == [*range(model.number - 9, model.number + 1), END]


async def test_an_engine_that_moved_to_another_shard_stays(seed: int) -> None:
    """The shard that it left says so after the other one told of it."""
    async with open_house() as house:
        house.tell_standing(Model(seed))
        house.tell_standing(
            Model(seed, shard=1, instance="j"), instances=[instance_up("j", shard=1)], engines=[]
        )
        house.publisher.tell(engine_up("e", shard=1, instance="j", pool=2, local=3))
        house.publisher.tell(feed.EngineDown(0, "e", "left"))
        async with asyncio.timeout(5):
            while [one["channel"] for one in (await house.status())["streams"]] != [2, 3]:
                await asyncio.sleep(0.02)
