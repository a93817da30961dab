"""Answers to requesters that do not read, are too many, or are overtaken: with real sockets, and a clock and
windows of the test's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from metaservice.publish import replay as module
from metaservice.publish.channel import Channel, ChannelPlan
from metaservice.publish.emitters.port import Stream
from metaservice.publish.replay import Replays
from metaservice.publish.segments import Segment, Segments
from metaservice.publish.settings import PublishConfig
from tests.functional.publish_house import free_ports

END = b"\xff" * 8


class Windows:
    """A Source of windows from `oldest` to `newest`, all of the same payload."""

    def __init__(self, oldest: int, newest: int, payload: bytes) -> None:
        self.oldest = oldest
        self.newest = newest
        self._payload = payload
        self.planned = 0

    @property
    def segments(self) -> Segments:
        return self  # type: ignore[return-value]

    def step(self, segment: Segment) -> None:
        segment.step(10**9)

    def reach(self, shard: int) -> tuple[int, int]:
        return self.oldest, self.newest

    def stands(self, shard: int) -> bool:
        return True

    def batch_of(self, channel: Channel, number: int) -> bytes | None:
        return self._payload if self.oldest <= number <= self.newest else None

    def segment(self, channel: Channel, start: int) -> Segment:
        self.planned += 1
        return Segment(self.newest, 2, 1, iter(()), lambda _: b"state")


class Door:
    """A channel's replay socket, and who asks there."""

    def __init__(self, source: Windows) -> None:
        self.now_s = 0.0
        self.source = source
        self.replays = Replays(source, lambda: self.now_s)
        self.context = zmq.asyncio.Context()
        self.context.linger = 0
        config = PublishConfig(port_base=free_ports(), channels_max=1)
        self.endpoint = f"tcp://127.0.0.1:{config.port(0) + 1}"
        stream = Stream(0, "i", "m", "", 0, 16, 32, "tail64", "", b"topic")
        plan = ChannelPlan(0, "t", (stream,))
        self.channel = Channel(plan, config, self.context, None, lambda _: None, self.replays.request)
        self.channel.settle(False, True)
        self.replays.start()

    def dealer(self, hwm: int = 0) -> zmq.asyncio.Socket:
        made = self.context.socket(zmq.DEALER)
        made.setsockopt(zmq.RCVHWM, hwm)
        if hwm:
            made.setsockopt(zmq.RCVBUF, 4_096)
        made.connect(self.endpoint)
        return made


@asynccontextmanager
async def open_door(source: Windows) -> AsyncIterator[Door]:
    door = Door(source)
    try:
        yield door
    finally:
        await door.replays.close()
        door.channel.close()
        door.context.destroy(linger=0)


async def read(dealer: zmq.asyncio.Socket) -> list[int]:
    """Numbers up to END."""
    numbers: list[int] = []
    async with asyncio.timeout(10):
        while True:
            _, _, number, _ = await dealer.recv_multipart()
            if number == END:
                return numbers
            numbers.append(int.from_bytes(number, "big"))


async def until(true: object) -> None:
    assert callable(true)
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.005)


async def test_who_does_not_read_is_dropped_and_holds_up_nobody() -> None:
    async with open_door(Windows(0, 2_000, bytes(200_000))) as door:
        deaf = door.dealer(hwm=1)
        await deaf.send_multipart([b"", bytes(8)])
        await until(lambda: door.replays.under_way == 1)
        reader = door.dealer()
        await reader.send_multipart([b"", (1_990).to_bytes(8, "big")])
        assert await read(reader) == list(range(1_990, 2_001))
        told = door.replays.counts["batches"]
        assert told < 1_500
        door.now_s += module.STALL_S / 2
        await asyncio.sleep(0.05)
        assert door.replays.under_way == 1
        door.now_s += module.STALL_S
        await until(lambda: door.replays.under_way == 0)
        assert door.replays.counts["stalled"] == 1


async def test_who_leaves_in_the_middle_is_forgotten() -> None:
    async with open_door(Windows(0, 100_000, bytes(2_000))) as door:
        leaver = door.dealer(hwm=1)
        await leaver.send_multipart([b"", bytes(8)])
        await until(lambda: door.replays.counts["batches"] > 0)
        leaver.close()
        await until(lambda: door.replays.under_way == 0)
        assert door.replays.counts["gone"] == 1


async def test_who_is_overtaken_by_the_ring_is_told_the_state() -> None:
    source = Windows(0, 300, bytes(300_000))
    async with open_door(source) as door:
        slow = door.dealer(hwm=1)
        await slow.send_multipart([b"", bytes(8)])
        await until(lambda: door.replays.counts["batches"] > 2)
        await asyncio.sleep(0.05)
        source.oldest, source.newest = 1_000, 1_010
        numbers = await read(slow)
        assert numbers == sorted(set(numbers))
        assert source.planned == 1
        assert numbers[-1] == 1_010


async def test_more_requesters_than_there_may_be_get_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUESTERS_MAX", 2)
    async with open_door(Windows(0, 2_000, bytes(200_000))) as door:
        busy = [door.dealer(hwm=1) for _ in range(2)]
        for dealer in busy:
            await dealer.send_multipart([b"", bytes(8)])
        await until(lambda: door.replays.under_way == 2)
        third = door.dealer()
        await third.send_multipart([b"", bytes(8)])
        assert await read(third) == []
        assert door.replays.counts["refused"] == 1


async def test_a_requester_has_only_so_many_requests_waiting() -> None:
    async with open_door(Windows(0, 2_000, bytes(200_000))) as door:
        impatient = door.dealer(hwm=1)
        for _ in range(20):
            await impatient.send_multipart([b"", bytes(8)])
        await until(lambda: door.replays.counts["requests"] == 20)
        assert door.replays.counts["refused"] == 20 - 1 - module.REQUESTS_MAX


async def test_a_replay_that_fails_ends_with_end_and_takes_no_other_along() -> None:
    class Broken(Windows):
        def batch_of(self, channel: Channel, number: int) -> bytes | None:
            if number == 7:
                raise RuntimeError("broken")
            return super().batch_of(channel, number)

    async with open_door(Broken(0, 20, b"x")) as door:
        dealer = door.dealer()
        await dealer.send_multipart([b"", bytes(8)])
        assert await read(dealer) == list(range(7))
        await dealer.send_multipart([b"", (8).to_bytes(8, "big")])
        assert await read(dealer) == list(range(8, 21))
