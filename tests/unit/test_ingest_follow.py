"""Following one engine over sockets, with a reader that is slow."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import msgspec
import zmq.asyncio

from metaservice.publish.ingest.follow import Follower, Inbox
from metaservice.publish.ingest.limits import IngestLimits
from metaservice.publish.ingest.sequence import Step
from tests.unit.ingest_house import ToyEngine, batch, until
from tests.unit.test_ingest_streams import Publisher

SLOW_S = 0.003


class Reader:
    """Takes its time."""

    def __init__(
        self, publisher: Publisher, context: zmq.asyncio.Context, limits: IngestLimits, replay: bool
    ) -> None:
        self.steps: list[Step] = []
        self.heard = 0
        self.bad: Counter[str] = Counter()
        self.fails = 0
        up = publisher.up if replay else msgspec.structs.replace(publisher.up, replay="")
        self.inbox = Inbox(limits)
        self.follower = Follower(up, self.take, self.hear, self.inbox, context, self.bad, lambda *_: None)

    async def take(self, step: Step) -> None:
        await asyncio.sleep(SLOW_S)
        if self.fails:
            self.fails -= 1
            raise RuntimeError("a fault in whoever takes it")
        self.steps.append(step)

    def hear(self) -> None:
        self.heard += 1

    def last_life(self) -> list[Step]:
        """What was taken since all before was void."""
        begin = max((row for row, step in enumerate(self.steps) if step is None), default=-1)
        return self.steps[begin + 1 :]


@asynccontextmanager
async def followed(
    *, replay: bool = True, limits: IngestLimits | None = None
) -> AsyncIterator[tuple[Publisher, Reader]]:
    context = zmq.asyncio.Context()
    publisher = Publisher(context, ToyEngine(Random(5)))
    reader = Reader(publisher, context, limits or IngestLimits(probe_ms=60_000, replay_idle_ms=500), replay)
    try:
        yield publisher, reader
    finally:
        reader.follower.stop()
        await reader.follower.stopped()
        assert reader.inbox.bytes == 0
        await publisher.close()
        context.destroy(linger=0)


def log(publisher: Publisher) -> list[bytes]:
    return [payload for _, payload in publisher.toy.log]


async def test_another_life_is_taken_from_its_beginning_though_the_old_replay_is_still_under_way() -> None:
    async with followed() as (publisher, reader):
        for _ in range(40):
            await publisher.step(lost=True)
        await until(lambda: reader.steps == log(publisher))
        await publisher.close()
        publisher.toy.restart()
        for _ in range(80):
            publisher.toy.step()
        publisher.open()
        await until(lambda: reader.last_life() == log(publisher))
        assert reader.steps.count(None) == 1


async def test_an_idle_engine_of_a_shorter_life_is_noticed_when_it_is_there_again() -> None:
    async with followed() as (publisher, reader):
        for _ in range(30):
            await publisher.step(lost=True)
        await until(lambda: reader.steps == log(publisher))
        await publisher.close()
        publisher.toy.restart()
        for _ in range(3):
            publisher.toy.step()
        publisher.open()
        await until(lambda: None in reader.steps and reader.last_life() == log(publisher))


async def test_a_message_that_is_too_long_is_never_taken() -> None:
    limits = IngestLimits(probe_ms=60_000, message_bytes_max=100_000)
    async with followed(replay=False, limits=limits) as (publisher, reader):
        await until(lambda: reader.follower.connected)
        await asyncio.sleep(0.1)
        first, last = batch(ts=1.0), batch(ts=3.0)
        await publisher.send(0, first)
        await until(lambda: reader.steps == [first])
        await publisher.send(1, b"x" * 200_000)
        await until(lambda: not reader.follower.connected)
        await until(lambda: reader.follower.connected)
        await asyncio.sleep(0.1)
        await publisher.send(2, last)
        await until(lambda: reader.steps == [first, None, last])


async def test_a_fault_of_whoever_takes_the_batches_is_counted_and_the_rest_still_comes() -> None:
    async with followed() as (publisher, reader):
        for _ in range(10):
            await publisher.step(lost=True)
        reader.fails = 1
        await until(lambda: reader.bad["failed"] == 1)
        for _ in range(5):
            await publisher.step()
        await until(lambda: len(reader.steps) == 14, 8.0)
        assert reader.steps == log(publisher)[1:]


async def test_an_address_where_somebody_speaks_something_else_is_tried_again() -> None:
    async with followed(replay=False) as (publisher, reader):
        await publisher.close()
        greeted = 0

        async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal greeted
            greeted += 1
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", publisher.ports[0])
        await until(lambda: greeted >= 3)
        server.close()
        await server.wait_closed()
        publisher.open()
        await until(lambda: reader.follower.connected)
        await asyncio.sleep(0.1)
        await publisher.step()
        await until(lambda: reader.last_life() == log(publisher))
