"""Small parts of the publisher: the ring, the fence's page, the pipe, the plan of streams."""

import asyncio
import socket
from collections.abc import Iterator

import pytest
from msgspec import Raw

from metaservice.publish import pipe as pipe_module
from metaservice.publish.feed import EngineUp, InstanceUp, framed
from metaservice.publish.fence import SHARDS_MAX, FencePage
from metaservice.publish.pipe import Pipe
from metaservice.publish.plan import plan
from metaservice.publish.ring import Ring, RingBudget
from metaservice.publish.segments import Segment
from metaservice.publish.settings import is_loopback

# ---------------------------------------------------------------- the ring


def test_a_ring_keeps_the_newest_windows() -> None:
    ring = Ring(3, RingBudget(1_000))
    for number in range(10, 15):
        ring.add(number, bytes([number]))
    assert ring.oldest == 12
    assert [ring.get(number) for number in range(11, 16)] == [None, b"\x0c", b"\x0d", b"\x0e", None]


def test_a_ring_never_has_holes() -> None:
    ring = Ring(10, RingBudget(1_000))
    for number in (1, 2, 5, 6):
        ring.add(number, b"x")
    assert ring.oldest == 5
    ring.add(3, b"x")
    assert (ring.oldest, len(ring)) == (3, 1)


def test_rings_share_a_budget_of_bytes() -> None:
    budget = RingBudget(100)
    first, second = Ring(10, budget), Ring(10, budget)
    for number in range(9):
        first.add(number, bytes(10))
    for number in range(9):
        second.add(number, bytes(10))
    assert budget.held_bytes <= 110
    assert second.get(8) is not None
    first.clear()
    second.clear()
    assert budget.held_bytes == 0


# ---------------------------------------------------------------- the fence


def test_the_fence_holds_in_its_epoch_and_until_its_end() -> None:
    page = FencePage.make()
    assert not page.holds(0, 0, 0.0)
    page.set(3, 7, 100.0)
    assert page.holds(3, 7, 99.9)
    assert not page.holds(3, 7, 100.0)
    assert not page.holds(3, 8, 99.9)
    assert not page.holds(2, 7, 99.9)
    page.set(3, 7, 0.0)
    assert not page.holds(3, 7, 0.0)
    page.set(3, 70_000, float("inf"))
    assert page.holds(3, 70_000, 1e9)
    for shard in (-1, SHARDS_MAX):
        with pytest.raises(ValueError, match="not in"):
            page.set(shard, 1, 1.0)
    page.close()


# ---------------------------------------------------------------- the pipe


async def test_messages_of_any_length_arrive_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    heard: list[bytes] = []
    ended = asyncio.Event()
    reader = Pipe(theirs, lambda frame: heard.append(bytes(frame)), ended.set)
    writer = Pipe(ours, lambda _: None, lambda: None)
    sent = [
        bytes([number % 251]) * size for number, size in enumerate([0, 1, 3, 70_000, 5_000_000, 2, 900_000])
    ]
    for message in sent:
        assert writer.send(message)
    assert writer.backlog_bytes > 5_000_000
    async with asyncio.timeout(10):
        while len(heard) < len(sent):
            await asyncio.sleep(0.001)
    assert heard == sent
    assert writer.backlog_bytes == 0
    writer.close()
    await asyncio.wait_for(ended.wait(), 5)
    assert not reader.send(b"x")


async def test_what_waits_is_bounded_and_can_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe_module, "BACKLOG_BYTES_MAX", 4_000_000)
    ours, theirs = socket.socketpair()
    writer = Pipe(ours, lambda _: None, lambda: None)
    sent = 0
    while writer.send(bytes([sent % 251]) * 100_000):
        sent += 1
        await asyncio.sleep(0)
    assert 4_000_000 - 200_000 < writer.backlog_bytes <= 4_000_000
    empty = asyncio.Event()
    writer.forget(empty.set)
    assert writer.backlog_bytes < 200_000
    assert writer.send(b"after")
    heard: list[bytes] = []
    reader = Pipe(theirs, lambda frame: heard.append(bytes(frame)), lambda: None)
    await asyncio.wait_for(empty.wait(), 5)
    async with asyncio.timeout(5):
        while not heard or heard[-1] != b"after":
            await asyncio.sleep(0.001)
    assert all(len(set(message)) == 1 and len(message) == 100_000 for message in heard[:-1])
    assert len(heard) < sent
    reader.close()
    writer.close()


async def test_a_frame_that_is_too_long_ends_the_pipe() -> None:
    ours, theirs = socket.socketpair()
    ended = asyncio.Event()
    reader = Pipe(theirs, lambda _: None, ended.set)
    ours.sendall(framed(b"good") + (2**32 - 1).to_bytes(4, "little") + b"rest")
    await asyncio.wait_for(ended.wait(), 5)
    reader.close()
    ours.close()


# ---------------------------------------------------------------- the plan


def up(name: str, base: str = "", model: str = "m") -> InstanceUp:
    return InstanceUp(0, name, "t", model, "g", "", "tail64", 16, 32, "sha256_cbor", "", "", base)


def engine(name: str, instance: str, pool: int, local: int = -1, node: str = "", rank: int = 0) -> EngineUp:
    return EngineUp(0, name, "1", instance, rank, node, "", 0, "", "", "vllm", pool, local)


def test_streams_follow_from_engines_and_instances() -> None:
    instances = {one.instance: one for one in (up("i"), up("b", "i"), up("a", "i"), up("j", model="x@y"))}
    engines = [
        engine("e0", "i", 0, 1, "n@1"),
        engine("e1", "i", 0, 2, "n2"),
        engine("e2", "i", 3, rank=1),
        engine("e3", "j", 4),
        engine("e4", "nobody", 5),
        engine("e5", "i", 9, 10, "n3"),
    ]
    plans = plan(engines, instances, channels_max=9)
    assert sorted(plans) == [0, 1, 2, 3, 4]
    assert plans[0].place == (("i", "a", "b"), "")
    assert plans[1].place == (("i", "a", "b"), "n@1")
    assert plans[1].stream.topic == b"kv@n_1@m"
    assert [one.topic for one in plans[0].streams] == [b"kv@pool@m"] * 3
    assert plans[3].stream.rank == 1
    assert plans[4].place == (("j",), "")
    assert plans[4].stream.topic == b"kv@pool@x_y"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("0.0.0.0", False),
     ("10.0.0.1", False), ("*", False), ("localhost", False), ("::", False)],
)  # fmt: skip
def test_only_addresses_of_this_machine_are_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


# ---------------------------------------------------------------- segments


def items(count: int) -> Iterator[list[Raw]]:
    for number in range(count):
        yield [Raw(bytes([number % 251]) * 100)]


def segment(count: int, pieces_max: int, piece_bytes: int) -> Segment:
    made = Segment(7, pieces_max, piece_bytes, items(count), lambda events: b"".join(map(bytes, events)))
    while not made.complete:
        made.step(10**9)
    return made


@pytest.mark.parametrize("count", [0, 1, 2, 7, 50])
@pytest.mark.parametrize("pieces_max", [1, 2, 3, 100])
def test_a_segment_has_everything_in_few_enough_pieces(count: int, pieces_max: int) -> None:
    made = segment(count, pieces_max, 300)
    assert 1 <= len(made.pieces) <= pieces_max
    assert b"".join(made.pieces) == b"".join(bytes([number % 251]) * 100 for number in range(count))
    assert len(made.pieces) > 1 or pieces_max == 1


def test_a_segment_that_is_too_large_is_cut_off() -> None:
    made = Segment(7, 10**6, 300, items(10_000), lambda events: b"".join(map(bytes, events)))
    whole = True
    while not made.complete:
        whole = made.step(50_000)
    assert not whole
    assert made.size_bytes <= 51_000
