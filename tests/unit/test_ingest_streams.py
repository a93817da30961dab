"""Streams over real sockets: publishers as vLLM and SGLang have them, of whom frames get lost."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from metaservice.publish.feed import EngineDown, EngineUp, InstanceDown
from metaservice.publish.ingest.follow import BadEndpoint, endpoint_of
from metaservice.publish.ingest.ingest import Ingest
from metaservice.publish.ingest.limits import IngestLimits
from tests.unit.ingest_house import (
    CLEARED,
    ToyEngine,
    batch,
    engine_up,
    ids,
    instance_up,
    names,
    stored,
    until,
)

END = b"\xff" * 8
QUICK = IngestLimits(replay_idle_ms=300, probe_ms=200, silent_ms=300)
A, B, C, D = names(4)


class Nowhere:
    """Nothing is announced."""

    def find(self, instance: str, keys: Sequence[bytes]) -> list[Any]:
        return []


class Publisher:
    """An engine's sockets: PUB, and ROUTER for replays. `topic_frame`: as vLLM answers since mid-2026, else
    as it did before, and as SGLang does. It can lose frames, die, and come back at the same place."""

    def __init__(self, context: zmq.asyncio.Context, toy: ToyEngine, *, topic_frame: bool = True) -> None:
        self._context = context
        self.toy = toy
        self.topic_frame = topic_frame
        self.ports = [0, 0]
        self.asked: list[int] = []
        self.answers = True
        self.open()

    def open(self) -> None:
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for row, socket in enumerate((self._pub, self._router)):
            if self.ports[row]:
                socket.bind(f"tcp://127.0.0.1:{self.ports[row]}")
            else:
                self.ports[row] = socket.bind_to_random_port("tcp://127.0.0.1")
        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        self._serving.cancel()
        self._pub.close(linger=0)
        self._router.close(linger=0)
        await asyncio.sleep(0.01)

    @property
    def up(self) -> EngineUp:
        return engine_up(events=f"tcp://127.0.0.1:{self.ports[0]}", replay=f"tcp://127.0.0.1:{self.ports[1]}")

    async def step(self, *, lost: bool = False) -> None:
        """Does something; `lost`: nobody hears of it."""
        number, payload = self.toy.step()
        if not lost:
            await self.send(number, payload)

    async def tell(self, *events: Any) -> None:
        """Publishes these events."""
        payload = batch(*events, ts=self.toy.clock_s + 0.001 * self.toy.number)
        self.toy.log.append((self.toy.number, payload))
        self.toy.number += 1
        await self.send(self.toy.number - 1, payload)

    async def send(self, number: int, payload: bytes) -> None:
        await self._pub.send_multipart([b"kv-events", number.to_bytes(8, "big"), payload])

    async def send_raw(self, *frames: bytes) -> None:
        await self._pub.send_multipart(list(frames))

    async def _serve(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if not self.answers:
                continue
            topic = [b"kv-events"] if self.topic_frame else []
            for number, payload in self.toy.replay(self.asked[-1]):
                await self._router.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", *([b""] if self.topic_frame else []), END, b""])


class House:
    """An ingest, and publishers that it follows."""

    def __init__(self, limits: IngestLimits) -> None:
        self.context = zmq.asyncio.Context()
        self.cleared: list[tuple[str, str]] = []
        self.said: list[str] = []
        loop = asyncio.get_running_loop()
        self.ingest = Ingest(
            Nowhere(),
            lambda instance, engine: self.cleared.append((instance, engine)),
            lambda level, text: self.said.append(f"{level}: {text}"),
            loop.time,
            limits,
        )
        self.publishers: list[Publisher] = []

    def publisher(self, seed: int = 1, **given: Any) -> Publisher:
        found = Publisher(self.context, ToyEngine(Random(seed)), **given)
        self.publishers.append(found)
        return found

    def held(self, engine: str = "e0") -> list[set[int]]:
        member = self.ingest.holdings.get(engine)
        return [set(member.own.hashes(tier)) for tier in range(4)] if member else [set()] * 4

    def equal(self, publisher: Publisher) -> Callable[[], bool]:
        return lambda: self.held() == publisher.toy.holds()

    def stat(self, name: str) -> float:
        return self.ingest.stats().get(name, 0)


@asynccontextmanager
async def house(limits: IngestLimits = QUICK) -> AsyncIterator[House]:
    found = House(limits)
    await found.ingest.start()
    found.ingest.instance_up(instance_up())
    try:
        yield found
    finally:
        await found.ingest.close()
        for publisher in found.publishers:
            await publisher.close()
        found.context.destroy(linger=0)


@pytest.mark.parametrize("topic_frame", [True, False])
async def test_row_01_replays_with_and_without_a_topic_frame(topic_frame: bool) -> None:
    async with house(IngestLimits(probe_ms=60_000)) as found:
        publisher = found.publisher(topic_frame=topic_frame)
        for _ in range(50):
            await publisher.step(lost=True)
        found.ingest.engine_up(publisher.up)
        await until(found.equal(publisher))
        assert sum(map(len, found.held())) > 10
        assert found.ingest.engine_view("e0")[0] == "following"
        assert publisher.asked[0] == 0


async def test_row_15_lost_frames_come_by_a_replay_before_those_that_showed_it() -> None:
    async with house() as found:
        publisher = found.publisher()
        found.ingest.engine_up(publisher.up)
        await until(lambda: found.stat("ingest_streams_connected") == 1)
        random = Random(3)
        for _ in range(300):
            await publisher.step(lost=random.random() < 0.2)
            await asyncio.sleep(0)
        await publisher.step()
        await until(found.equal(publisher))
        assert found.stat("ingest_gaps_total") > 0
        assert (found.stat("ingest_gaps_lost_total"), found.stat("ingest_restarts_total")) == (0, 0)


async def test_what_was_lost_last_is_found_by_looking_after_an_engine_that_is_silent() -> None:
    async with house() as found:
        publisher = found.publisher()
        found.ingest.engine_up(publisher.up)
        await publisher.tell(stored([A], ids(1)))
        await until(lambda: found.held()[0] == {A})
        publisher.toy.log.append((1, batch(stored([B], ids(1, 9)), ts=2_000.0)))
        publisher.toy.number += 1
        await until(lambda: found.held()[0] == {A, B})


async def test_row_09_an_engine_that_starts_again_at_zero_leaves_nothing_of_its_old_life() -> None:
    async with house() as found:
        publisher = found.publisher()
        found.ingest.engine_up(publisher.up)
        for _ in range(40):
            await publisher.step()
        await until(found.equal(publisher))
        for lost in (0, 3, 45):
            await publisher.close()
            publisher.toy.restart()
            publisher.open()
            for _ in range(lost):
                await publisher.step(lost=True)
            await publisher.step()
            await until(found.equal(publisher), 8.0)
        assert found.stat("ingest_restarts_total") == 3


async def test_row_11_a_dead_engines_entries_go_and_nothing_of_it_counts_any_more() -> None:
    async with house() as found:
        publisher = found.publisher()
        found.ingest.engine_up(publisher.up)
        for _ in range(20):
            await publisher.step()
        await until(found.equal(publisher))
        assert found.stat("holdings_entries") > 0
        found.ingest.engine_down(EngineDown(0, "e0", "expired"))
        assert found.stat("holdings_entries") == 0
        for _ in range(20):
            await publisher.step()
        await asyncio.sleep(0.1)
        assert (found.stat("holdings_entries"), found.stat("holdings_engines")) == (0, 0)
        found.ingest.engine_up(publisher.up)
        await until(found.equal(publisher))


async def test_row_11_another_incarnation_begins_with_nothing() -> None:
    async with house() as found:
        publisher = found.publisher()
        found.ingest.engine_up(publisher.up)
        await publisher.tell(stored([A], ids(1)))
        await until(lambda: found.held()[0] == {A})
        found.ingest.engine_up(engine_up(incarnation="life-2"))
        assert found.held() == [set()] * 4
        await publisher.tell(stored([B], ids(1)))
        await asyncio.sleep(0.1)
        assert found.held() == [set()] * 4
        assert found.ingest.engine_view("e0") == (
            "none",
            -1,
            dict.fromkeys(("gpu", "cpu", "storage", "external"), 0),
        )


async def test_row_12_all_cleared_is_told_on_once() -> None:
    async with house() as found:
        publisher = found.publisher()
        found.ingest.engine_up(publisher.up)
        await publisher.tell(stored([A], ids(1)))
        await until(lambda: found.held()[0] == {A})
        await publisher.tell(CLEARED)
        await until(lambda: found.held()[0] == set())
        assert found.cleared == [("i0", "e0")]


async def test_row_23_an_engine_that_was_never_heard_is_said_to_be_silent_and_an_idle_one_is_not() -> None:
    async with house() as found:
        idle = found.publisher()
        found.ingest.engine_up(idle.up)
        found.ingest.engine_up(engine_up("e1", events="tcp://127.0.0.1:1", replay="tcp://127.0.0.1:1"))
        await until(lambda: found.stat('ingest_silent{engine="e1"}') == 1)
        assert found.ingest.engine_view("e1")[:2] == ("silent", -1)
        await asyncio.sleep(0.5)
        state, staleness_ms, _ = found.ingest.engine_view("e0")
        assert state == "following"
        assert 0 <= staleness_ms < 400, "it was asked"
        assert found.stat('ingest_silent{engine="e0"}') == 0
        assert found.stat('ingest_staleness_seconds{engine="e1"}') > 0.5


async def test_an_engine_without_a_replay_endpoint_is_followed_as_well_as_it_can_be() -> None:
    async with house() as found:
        publisher = found.publisher()
        found.ingest.engine_up(msgspec.structs.replace(publisher.up, replay=""))
        await until(lambda: found.stat("ingest_streams_connected") == 1)
        await asyncio.sleep(0.1)
        await publisher.tell(stored([A], ids(1)))
        await publisher.tell(stored([B], ids(1)))
        await until(lambda: found.held()[0] == {A, B})
        publisher.toy.number += 1
        await publisher.tell(stored([C], ids(1)))
        await until(lambda: found.held()[0] == {C})
        assert (found.stat("ingest_gaps_lost_total"), found.stat("ingest_streams_partial")) == (1, 1)


async def test_an_engine_that_does_not_answer_replays_is_followed_after_a_few_tries() -> None:
    async with house() as found:
        publisher = found.publisher()
        publisher.answers = False
        publisher.toy.number = 5
        found.ingest.engine_up(publisher.up)
        await until(lambda: bool(publisher.asked))
        await publisher.tell(stored([A], ids(1)))
        await until(lambda: found.held()[0] == {A})
        assert len(publisher.asked) == QUICK.replay_tries


async def test_hostile_frames_are_counted_and_the_stream_goes_on() -> None:
    limits = IngestLimits(replay_idle_ms=300, probe_ms=200, message_bytes_max=200_000)
    async with house(limits) as found:
        publisher = found.publisher()
        found.ingest.engine_up(publisher.up)
        await publisher.tell(stored([A], ids(1)))
        await until(lambda: found.held()[0] == {A})
        await publisher.send_raw(b"")
        await publisher.send_raw(b"t", b"short", b"x")
        await publisher.send_raw(b"a", b"b", b"c", b"d", b"e")
        await publisher.send_raw(b"t", b"\0" * 9, b"x")
        await publisher.send_raw(b"t", (1).to_bytes(8, "big"), b"no batch at all")
        await until(lambda: found.stat('ingest_invalid_total{reason="frames"}') == 4)
        await publisher.send_raw(b"t", (1).to_bytes(8, "big"), b"x" * 300_000)
        await publisher.tell(stored([B], ids(1, 4)))
        await publisher.tell(stored([C], ids(1, 8)))
        await until(lambda: {A, C} <= found.held()[0])
        await until(lambda: found.held()[0] == {A, B, C})


async def test_a_flood_is_held_back_and_ends_with_the_truth() -> None:
    limits = IngestLimits(
        replay_idle_ms=500, inbox_frames_max=20, queue_frames_max=20, socket_frames_max=50, probe_ms=300
    )
    async with house(limits) as found:
        publisher = found.publisher()
        found.ingest.engine_up(publisher.up)
        await until(lambda: found.stat("ingest_streams_connected") == 1)
        for _ in range(1_500):
            await publisher.step()
        await until(found.equal(publisher), 15.0)
        assert found.stat("ingest_inbox_bytes") == 0


async def test_engines_of_an_instance_that_is_not_announced_yet_are_followed_when_it_is() -> None:
    async with house() as found:
        found.ingest.instance_down(InstanceDown(0, "i0"))
        publisher = found.publisher()
        found.ingest.engine_up(publisher.up)
        await publisher.tell(stored([A], ids(1)))
        assert found.stat("ingest_streams") == 0
        found.ingest.instance_up(instance_up())
        await until(lambda: found.held()[0] == {A})
        found.ingest.instance_up(instance_up(block_size_tokens=8))
        assert found.held()[0] == set()
        found.ingest.forget(0)
        assert (found.stat("ingest_streams"), found.stat("holdings_engines")) == (0, 0)
        found.ingest.instance_up(instance_up())
        assert found.stat("ingest_streams") == 0


async def test_a_shard_that_an_engine_moved_away_from_does_not_take_it_away() -> None:
    async with house() as found:
        found.ingest.engine_up(engine_up())
        found.ingest.engine_up(engine_up("e1", instance="i1"))
        found.ingest.instance_up(instance_up(shard=1))
        for engine in ("e0", "e1"):
            found.ingest.engine_up(engine_up(engine, shard=1, instance="i0" if engine == "e0" else "i1"))
            found.ingest.engine_down(EngineDown(0, engine, "expired"))
        found.ingest.instance_down(InstanceDown(0, "i0"))
        found.ingest.instance_up(instance_up(shard=1, instance="i1"))
        assert found.stat("holdings_engines") == 2
        for engine in ("e0", "e1"):
            found.ingest.engine_down(EngineDown(1, engine, "expired"))
        assert found.stat("holdings_engines") == 0


async def test_streams_and_engines_are_bounded() -> None:
    async with house(IngestLimits(engines_max=3, streams_max=2)) as found:
        for row in range(5):
            found.ingest.engine_up(engine_up(f"e{row}", events=f"tcp://127.0.0.1:{row + 1}"))
        assert (found.stat("holdings_engines"), found.stat("ingest_streams")) == (3, 2)
        assert found.stat('ingest_invalid_total{reason="engines"}') == 2
        assert found.stat('ingest_invalid_total{reason="streams"}') == 1


@pytest.mark.parametrize(
    ("told", "address", "expected"),
    [
        ("tcp://*:5557", "10.0.0.7:8000", "tcp://10.0.0.7:5557"),
        ("tcp://0.0.0.0:5557", "host-1:8000", "tcp://host-1:5557"),
        ("tcp://[::1]:5557", "", "tcp://[::1]:5557"),
        ("tcp://engine.svc:5557", "", "tcp://engine.svc:5557"),
    ],
)
def test_where_an_engine_is_connected_to(told: str, address: str, expected: str) -> None:
    assert endpoint_of(told, address) == expected


@pytest.mark.parametrize(
    "told",
    [
        "ipc:///run/x.sock",
        "inproc://x",
        "tcp://*:5557",
        "tcp://h:0",
        "tcp://h:70000",
        "tcp://h;x:1",
        "h:1",
        "udp://h:1",
        "tcp://a:1\n",
    ],
)
async def test_an_endpoint_that_is_none_is_refused_and_the_engine_is_there_all_the_same(told: str) -> None:
    with pytest.raises(BadEndpoint):
        endpoint_of(told, "")
    async with house() as found:
        found.ingest.engine_up(engine_up(events=told, address=""))
        assert (found.stat("holdings_engines"), found.stat("ingest_streams")) == (1, 0)
        assert found.stat('ingest_invalid_total{reason="endpoint"}') == 1
        assert "not followed" in found.said[0]
