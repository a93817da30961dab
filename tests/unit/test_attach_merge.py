"""Merged streams: one source for a worker, of its engine's own events and the pool's."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from metaservice.core.windows import Gone
from metaservice.publish.attach import Attachment, make
from tests.functional.events_engine import CLEARED, EngineStream
from tests.functional.events_service import free_ports
from tests.unit.attach_house import BLOCK_SIZE, FIRST, House, key, run

END = b"\xff" * 8


def own(*numbers: int, parent: int | None = None, **other: Any) -> dict[str, Any]:
    """An engine's own BlockStored, of blocks named as the pool names them."""
    event = {
        "type": "BlockStored",
        "block_hashes": [2**40 + n for n in numbers],
        "parent_block_hash": None if parent is None else 2**40 + parent,
        "token_ids": [token for n in numbers for token in range(BLOCK_SIZE * n, BLOCK_SIZE * (n + 1))],
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return event | other


class Router:
    """Follows one stream without a gap, from its beginning."""

    def __init__(self, house: House, port: int) -> None:
        self._context = house.context
        self._replay = f"tcp://127.0.0.1:{port + 1}"
        self._sub = house.context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(f"tcp://127.0.0.1:{port}")
        self.blocks: set[tuple[str, int]] = set()
        self.seq = -1
        self.topics: set[str] = set()
        self.ranks: set[int] = set()
        self.replays = self.resets = self.clears = 0

    async def look(self, timeout_ms: int = 20) -> None:
        while await self._sub.poll(timeout_ms):
            topic, seq, payload = await self._sub.recv_multipart()
            number = int.from_bytes(seq, "big")
            if seq == END:
                self.resets += 1
                self.seq = -1
                continue
            if self.seq < 0 or number > self.seq + 1:
                self.replays += 1
                for again, told in await self.replay(self.seq + 1):
                    self.take(again, told)
            if number > self.seq:
                assert number == self.seq + 1
                self.take(number, payload)
            self.topics.add(topic.decode())

    async def replay(self, start: int) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        with self._context.socket(zmq.DEALER) as socket:
            socket.connect(self._replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                assert await socket.poll(3_000), "no END"
                _, _, seq, payload = await socket.recv_multipart()
                if seq == END:
                    return found
                found.append((int.from_bytes(seq, "big"), payload))

    def take(self, number: int, payload: bytes) -> None:
        assert number > self.seq
        self.seq = number
        _, events, rank = msgspec.msgpack.decode(payload)
        self.ranks.add(rank)
        for event in events:
            named = {(event.get("medium"), one) for one in event.get("block_hashes", ())}
            if event["type"] == "AllBlocksCleared":
                self.clears += 1
                self.blocks.clear()
            elif event["type"] == "BlockRemoved":
                self.blocks -= named
            else:
                assert not named & self.blocks, "a plain repeat"
                assert all(one >= 2**32 for _, one in named)
                self.blocks |= named

    async def until(self, blocks: set[tuple[str, int]]) -> None:
        for _ in range(200):
            await self.look()
            if self.blocks == blocks:
                return
        pytest.fail(f"not within 4 s: {blocks}, it is {self.blocks}")


def pool(*numbers: int) -> set[tuple[str, int]]:
    return {("EXTERNAL", 2**40 + n) for n in numbers}


def gpu(*numbers: int) -> set[tuple[str, int]]:
    return {("GPU", 2**40 + n) for n in numbers}


class Stage:
    """A house with an engine, its merged stream, and whoever looks at it."""

    def __init__(self, house: House, engine: EngineStream, ring: int = 10_000) -> None:
        self.house, self.engine = house, engine
        self.port = free_ports(2)
        self.attachment: Attachment = make(f"merge port_base={self.port} engines=a ring={ring}", house)
        house.add_instance(rank=3)
        house.add_engine("a", 7, rank=3, events=engine.endpoint, replay=engine.replay)

    async def start(self) -> None:
        await self.attachment.start()
        self.attachment.leads(0, True)

    def publish(self, *events: Any, **more: Any) -> None:
        self.engine.publish(*events, rank=3, **more)

    def tell(self, *runs: Any, **more: Any) -> None:
        """A window of the pool's, which is announced by it."""
        self.house.announced.setdefault(0, []).extend(runs)
        self.attachment.window(0, self.house.window(*runs, **more))

    def stat(self, name: str) -> float:
        return sum(value for full, value in self.attachment.stats().items() if f"_{name}" in full)


@pytest.fixture
async def stage() -> AsyncIterator[Callable[..., Stage]]:
    made: list[Stage] = []
    house = House()
    engine = EngineStream()

    def build(**more: Any) -> Stage:
        made.append(Stage(house, engine, **more))
        return made[-1]

    yield build
    for one in made:
        await one.attachment.close()
    engine.close()
    house.context.destroy(linger=0)


async def test_both_are_told_on_one_stream_with_the_engines_rank(stage: Callable[..., Stage]) -> None:
    it = stage()
    it.house.announced[0] = [run(1, 2)]
    await it.start()
    it.publish(own(1))
    router = Router(it.house, it.port)
    await router.until(pool(1, 2) | gpu(1))
    it.publish(own(2, parent=1))
    it.tell(run(3, parent=2))
    await router.until(pool(1, 2, 3) | gpu(1, 2))
    it.publish({"type": "BlockRemoved", "block_hashes": [2**40 + 1], "medium": "GPU"})
    it.house.announced[0] = [run(1, 2)]
    it.attachment.window(0, it.house.window(removed=[Gone("i", "EXTERNAL", "", 16, key(3))]))
    await router.until(pool(1, 2) | gpu(2))
    assert router.topics == {"kv@a@m"}
    assert router.ranks == {3}
    assert router.replays == 1  # when it joined
    (view,) = it.attachment.streams()
    assert (view.kind, view.engine, view.rank, view.live) == ("merged", "a", 3, True)
    assert view.endpoint == f"tcp://127.0.0.1:{it.port}"
    assert it.attachment.status().ok


async def test_row_12_after_a_clear_the_pool_is_told_again(stage: Callable[..., Stage]) -> None:
    it = stage()
    it.house.announced[0] = [run(1, 2), run(*range(10, 700))]
    await it.start()
    router = Router(it.house, it.port)
    everything = pool(1, 2, *range(10, 700))
    it.publish(own(1))
    await router.until(everything | gpu(1))
    it.publish(own(2), CLEARED, own(5))
    await router.until(everything | gpu(5))
    assert router.clears >= 1


async def test_row_13_a_gap_of_the_engine_is_replayed(stage: Callable[..., Stage]) -> None:
    it = stage()
    await it.start()
    router = Router(it.house, it.port)
    it.publish(own(1))
    await router.until(gpu(1))
    it.publish(own(2), lost=True)
    it.publish(own(3))
    await router.until(gpu(1, 2, 3))


async def test_row_09_an_engine_that_begins_anew_leaves_no_ghosts(stage: Callable[..., Stage]) -> None:
    it = stage()
    it.house.announced[0] = [run(1)]
    await it.start()
    router = Router(it.house, it.port)
    it.publish(own(1, 2))
    it.publish(own(3))
    await router.until(pool(1) | gpu(1, 2, 3))
    it.engine.restart()
    it.publish(own(9))
    await router.until(pool(1) | gpu(9))


async def test_row_11_an_engine_that_is_gone_is_cleared_and_comes_back(stage: Callable[..., Stage]) -> None:
    it = stage()
    it.house.announced[0] = [run(1)]
    await it.start()
    router = Router(it.house, it.port)
    it.publish(own(1))
    await router.until(pool(1) | gpu(1))
    up = it.house.engines.pop("a")
    it.attachment.changed()
    await router.until(set())
    assert "no engine a" in it.attachment.status().detail
    seq = router.seq
    it.house.engines["a"] = up
    it.attachment.changed()
    await router.until(pool(1) | gpu(1))
    assert router.seq > seq
    assert router.replays == 1


async def test_row_07_who_joins_late_gets_what_stands(stage: Callable[..., Stage]) -> None:
    """More batches than are kept: the pool's part begins with a snapshot. Of the engine's, what is kept."""
    it = stage(ring=100)
    it.house.announced[0] = [run(1, 2)]
    await it.start()
    first = Router(it.house, it.port)
    await first.until(pool(1, 2))
    for number in range(10, 160):
        it.tell(run(number))
        if number % 20 == 0:
            await first.look()
    await first.until(pool(1, 2, *range(10, 160)))
    late = Router(it.house, it.port)
    it.tell()
    await late.until(first.blocks)
    replayed = await late.replay(0)
    assert [number for number, _ in replayed] == sorted({number for number, _ in replayed})


async def test_the_next_leader_goes_on_above(stage: Callable[..., Stage]) -> None:
    it = stage()
    it.house.announced[0] = [run(1)]
    await it.start()
    router = Router(it.house, it.port)
    it.publish(own(1))
    await router.until(pool(1) | gpu(1))
    seq = router.seq
    assert seq >= FIRST << 20
    it.attachment.leads(0, False)
    it.tell(run(2))
    assert await router.replay(0) == []  # END, whoever is asked
    it.house.window()
    it.attachment.leads(0, True)
    await router.until(pool(1, 2) | gpu(1))
    assert router.seq > seq


async def test_who_leads_no_more_sends_nothing(stage: Callable[..., Stage]) -> None:
    it = stage()
    await it.start()
    router = Router(it.house, it.port)
    it.tell(run(1))
    await router.until(pool(1))
    it.house.leading = False
    it.tell(run(2))
    it.publish(own(5))
    await asyncio.sleep(0.2)
    await router.look()
    assert router.blocks == pool(1)
    it.house.leading = True
    it.tell()
    await router.until(pool(1, 2) | gpu(5))  # it sees the gap, and asks


async def test_a_history_that_nobody_led_before_is_told_to_begin(stage: Callable[..., Stage]) -> None:
    it = stage()
    it.house.epochs = 1
    await it.start()
    router = Router(it.house, it.port)
    it.tell(run(1))
    await router.until(pool(1))
    assert router.resets >= 1


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (own(5, block_size=8), "block_size"),
        (own(5, token_ids=[1]), "token_span"),
        (own(5, token_ids=[1, 2, 3, 2**32]), "token"),
        (own(5, medium="TAPE"), "medium"),
        (own(5, locality="REMOTE"), "locality"),
        (own(5, group_idx=1), "group"),
        (own(5, group_idx=0, kv_cache_spec_kind="mamba"), "group"),
        (own(5, 5), "loop"),
        (own(5, block_hashes=[b"1"]), "hash"),
        ({"type": "Novelty"}, "unknown_event"),
    ],
)
async def test_row_28_one_bad_event_of_the_engine_poisons_nothing(
    stage: Callable[..., Stage], event: dict[str, Any], reason: str
) -> None:
    it = stage()
    await it.start()
    router = Router(it.house, it.port)
    it.publish(own(1), event, own(2, parent=1))
    await router.until(gpu(1, 2))
    assert it.stat("invalid_total") == 1


async def test_names_of_all_engines_are_told_alike(stage: Callable[..., Stage]) -> None:
    """Bytes, signed numbers and small media are what some engines send."""
    it = stage()
    await it.start()
    router = Router(it.house, it.port)
    it.publish(
        own(1, block_hashes=[key(1)], medium=None),
        own(2, block_hashes=[-5], medium="cpu_pinned"),
        ["BlockStored", [2**40 + 3], None, [12, 13, 14, 15], BLOCK_SIZE, None, "GPU"],
    )
    await router.until(gpu(1, 3) | {("CPU", 2**64 - 5)})


async def test_an_engine_without_a_stream_has_the_pools_part(stage: Callable[..., Stage]) -> None:
    it = stage()
    it.house.add_engine("a", 7, rank=3)
    it.house.announced[0] = [run(1)]
    await it.start()
    await Router(it.house, it.port).until(pool(1))


async def test_an_endpoint_that_is_none_is_a_problem(stage: Callable[..., Stage]) -> None:
    it = stage()
    it.house.add_engine("a", 7, rank=3, events="ipc:///etc/passwd")
    await it.start()
    await asyncio.sleep(0.1)
    assert "ipc:///etc/passwd" in it.attachment.status().detail
