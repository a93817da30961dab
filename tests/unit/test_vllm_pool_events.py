"""The engine's follower of the service's streams: whatever is lost, late, doubled or begun anew, who follows
the engine ends with what the service announces, no block twice, none that is gone."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from socket import SO_REUSEADDR, SOL_SOCKET, socket
from typing import Any

import msgspec
import pytest
import zmq

from engine_adapters.vllm import pool_follower, pool_stream
from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.pool_follower import PoolFollower
from engine_adapters.vllm.pool_stream import StreamAt
from engine_adapters.vllm.pool_wire import Stored, Told, events_of, tokens_of
from tests.functional.events_reader import Index
from tests.unit.pool_sender import FIRST, TOPIC, Message, Sender, as_told, hash_of, removed, stored, wait


class Engine:
    """An engine with a follower: what its steps published, and a router that follows it."""

    def __init__(self, *streams: StreamAt) -> None:
        self.streams: list[StreamAt] | None = list(streams)
        self.counts = Counts()
        self.seen: dict[str, int] = {}
        self.router = Index()
        self.told: list[Message] = []
        self.follower: PoolFollower[Told] = PoolFollower(
            lambda: self.streams, lambda told: told, lambda socket: None, self.counts
        )
        self.follower.start()

    def step(self) -> list[Message]:
        """One step; what it published."""
        events = as_told(self.follower.take())
        for event in events:
            self.told.append(event)
            self.router.take(event)
        return events

    def cleared(self) -> None:
        """vLLM's caches were reset: routers forget all of the engine's."""
        self.router.blocks.clear()
        self.follower.cleared()

    def counted(self, name: str) -> int:
        for each, value in self.counts.drain().items():
            self.seen[each] = self.seen.get(each, 0) + value
        return self.seen.get(name, 0)

    def knows(self, sender: Sender) -> bool:
        """Whether its router has exactly what the service announces."""
        self.step()
        return self.router.hashes() == set(sender.blocks)


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def sender(context: "zmq.Context[Any]") -> Iterator[Sender]:
    made = Sender(context)
    made.say()
    yield made
    made.close()


@pytest.fixture
def engine(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(pool_stream, "AGAIN_MS", 50)
    monkeypatch.setattr(pool_stream, "SILENCE_MS", 200)
    monkeypatch.setattr(pool_follower, "FIND_MS", 100)
    monkeypatch.setattr(pool_follower, "FIND_SOON_MS", 50)
    made = Engine(sender.at)
    yield made
    made.follower.close()


def test_what_was_announced_before_and_what_comes_is_published(sender: Sender, engine: Engine) -> None:
    sender.say(stored(0, 3))
    wait(lambda: engine.knows(sender))
    sender.say(stored(3, 2, parent=2), stored(10, 1))
    sender.say(removed([10]))
    wait(lambda: engine.knows(sender))
    assert engine.router.hashes() == {hash_of(block) for block in range(5)}
    last = engine.told[-1]
    assert last == removed([10])


def test_row_20_adapters_and_salts_stay_with_their_blocks(sender: Sender, engine: Engine) -> None:
    sender.say(stored(0, 1, lora_name="poet", cache_salt="sea", extra_keys=[["sea"]]))
    wait(lambda: engine.knows(sender))
    ((block,),) = ([one for one in engine.told if one["type"] == "BlockStored"],)
    assert (block["lora_name"], block["cache_salt"], block["extra_keys"]) == ("poet", "sea", [["sea"]])


def test_row_13_a_batch_that_was_lost_is_asked_for_again(sender: Sender, engine: Engine) -> None:
    sender.say(stored(0, 2))
    wait(lambda: engine.knows(sender))
    sender.drop = {sender.number + 1, sender.number + 2}
    sender.say(stored(2, 1, parent=1))
    lost = sender.number
    sender.say(removed([0]))
    sender.say()
    wait(lambda: engine.knows(sender))
    assert lost in sender.replays and engine.counted("pool_event_gaps") == 1
    assert engine.counted("pool_event_resyncs") == 1, "only at the beginning"


def test_row_07_after_a_long_absence_it_is_told_as_a_whole_and_nothing_stays_that_is_gone(
    sender: Sender, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_stream, "GAP_MAX", 20)
    sender.say(stored(0, 4), stored(100, 4))
    wait(lambda: engine.knows(sender))
    sender.drop = set(range(sender.number, sender.number + 80))
    sender.say(removed([3]))
    for number in range(60):
        sender.say(stored(200 + number, 1))
    sender.say(removed(range(100, 104)))
    sender.drop = set()
    sender.say()
    wait(lambda: engine.knows(sender))
    assert hash_of(3) not in engine.router.hashes()
    assert engine.counted("pool_event_resyncs") == 2


def test_row_09_numbers_that_begin_anew_are_believed(sender: Sender, engine: Engine) -> None:
    sender.say(stored(0, 4))
    wait(lambda: engine.knows(sender))
    sender.lose(number=FIRST - 1)
    sender.say(stored(50, 2))
    wait(lambda: engine.knows(sender))
    assert engine.router.hashes() == {hash_of(50), hash_of(51)}


def test_row_09_numbers_that_begin_anew_are_believed_when_nobody_said_so(
    sender: Sender, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_stream, "STALE_MS", 200)
    for _ in range(10):
        sender.say()
    sender.say(stored(0, 4))
    wait(lambda: engine.knows(sender))
    sender.batches.clear()
    sender.blocks.clear()
    sender.number = FIRST
    sender.say(stored(50, 2))

    def beats() -> bool:
        sender.say()
        return engine.knows(sender)

    sender.number = FIRST - 200
    wait(beats)


def test_row_12_after_the_engine_cleared_its_caches_everything_is_told_again(
    sender: Sender, engine: Engine
) -> None:
    sender.say(stored(0, 70), stored(100, 3))
    wait(lambda: engine.knows(sender))
    engine.cleared()
    assert not engine.router.hashes()
    wait(lambda: engine.knows(sender))
    sender.say(stored(70, 1, parent=69))
    wait(lambda: engine.knows(sender))


def test_row_26_a_replay_that_is_never_answered_is_asked_for_again(sender: Sender, engine: Engine) -> None:
    sender.say(stored(0, 2))
    wait(lambda: engine.knows(sender))
    sender.silent = True
    sender.drop = {sender.number + 1}
    sender.say(stored(2, 1, parent=1))
    sender.say()
    asked = len(sender.replays)
    wait(lambda: len(sender.replays) > asked)
    sender.silent = False

    def beats() -> bool:
        sender.say()
        return engine.knows(sender)

    wait(beats)


def test_a_replica_that_has_nothing_yet_is_asked_until_it_has(
    context: "zmq.Context[Any]", engine: Engine
) -> None:
    young = Sender(context)
    engine.streams = [StreamAt("young", b"", (young.endpoint,), (young.replay,))]
    wait(lambda: len(young.replays) > 1)
    young.say(stored(0, 2))
    wait(lambda: engine.knows(young))
    young.close()


def test_row_28_what_cannot_be_read_costs_itself_and_nothing_else(sender: Sender, engine: Engine) -> None:
    sender.say(stored(0, 1))
    wait(lambda: engine.knows(sender))
    sender.raw(TOPIC + b" and nothing else")
    sender.raw(TOPIC, b"short", b"")
    sender.say({"type": "Unheard"}, stored(1, 1, parent=0), {"type": "BlockRemoved", "block_hashes": []})
    sender.say({"type": "AllBlocksCleared"})
    sender.say(stored(2, 1, parent=1))
    wait(lambda: engine.knows(sender))
    assert engine.counted("pool_events_invalid") == 5
    assert all(event["type"] in ("BlockStored", "BlockRemoved") for event in engine.told)


def test_another_topic_is_not_ours(sender: Sender, engine: Engine) -> None:
    sender.say(stored(0, 1))
    wait(lambda: engine.knows(sender))
    other = msgspec.msgpack.encode([1.0, [stored(9, 1)], 0])
    sender.raw(b"kv@pool@mine", (sender.number + 1).to_bytes(8, "big"), other)
    sender.say(stored(1, 1, parent=0))
    wait(lambda: engine.knows(sender))
    assert hash_of(9) not in engine.router.hashes()


def test_row_22_an_idle_engine_holds_little_and_catches_up(
    sender: Sender, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It publishes nothing while it takes no steps: what would wait is dropped, and told as a whole."""
    monkeypatch.setattr(pool_stream, "WAITING_BYTES_MAX", 20_000)
    monkeypatch.setattr(pool_follower, "READY_BLOCKS", 64)
    monkeypatch.setattr(pool_follower, "IDLE_MS", 100)
    sender.say(stored(0, 50))
    wait(lambda: engine.knows(sender))
    for turn in range(60):
        sender.say(stored(1_000 + 60 * turn, 60))
        if turn % 2:
            sender.say(removed(range(1_000 + 60 * turn, 1_060 + 60 * turn)))
        time.sleep(0.005)
    (stream,) = engine.follower._streams.values()
    wait(lambda: stream.paused)
    assert not stream.waiting
    sender.say(removed(range(1_000, 1_060)))
    wait(lambda: engine.knows(sender), 10)
    assert engine.counted("pool_event_pauses") == 1


def test_a_step_publishes_only_so_much(
    sender: Sender, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_follower, "READY_BLOCKS", 100)
    for row in range(20):
        sender.say(stored(row * 50, 50))
    wait(lambda: len(engine.follower._ready) > 0)
    most = 0
    until_s = time.monotonic() + 8
    while engine.router.hashes() != set(sender.blocks):
        assert time.monotonic() < until_s
        published = engine.step()
        most = max(most, sum(len(one["block_hashes"]) for one in published))
        time.sleep(0.005)
    assert 100 <= most < 100 + 64


def test_row_11_a_stream_that_is_the_engines_no_more_is_told_as_removed(
    sender: Sender, engine: Engine, context: "zmq.Context[Any]"
) -> None:
    sender.say(stored(0, 3))
    wait(lambda: engine.knows(sender))
    other = Sender(context)
    other.say(stored(500, 2))
    engine.streams = [StreamAt("other", b"", (other.endpoint,), (other.replay,))]
    engine.follower.renew()
    wait(lambda: engine.knows(other))
    other.close()


def test_a_service_that_cannot_be_asked_changes_nothing(sender: Sender, engine: Engine) -> None:
    sender.say(stored(0, 3))
    wait(lambda: engine.knows(sender))
    engine.streams = None
    time.sleep(0.3)
    sender.say(stored(3, 1, parent=2))
    wait(lambda: engine.knows(sender))


def test_row_09_another_replica_leads_and_goes_on(
    sender: Sender, engine: Engine, context: "zmq.Context[Any]"
) -> None:
    """It sends from an address of its own, what comes next by the numbers."""
    heir = Sender(context)
    heir.leads = False
    engine.streams = [StreamAt("s", TOPIC, (sender.endpoint, heir.endpoint), (sender.replay, heir.replay))]
    heir.say()
    for one in (sender, heir):
        one.say(stored(0, 3))
    wait(lambda: engine.knows(sender))
    heir.say(stored(3, 2, parent=2))
    sender.close()
    heir.leads = True
    heir.drop = {heir.number + 1}
    heir.say(stored(5, 1, parent=4))

    def beats() -> bool:
        heir.say()
        return engine.knows(heir)

    wait(beats)
    assert engine.counted("pool_event_resyncs") == 1, "what was missed was asked of the heir"
    heir.close()


def taken(bind: Callable[[Any], object], address: Any) -> bool:
    """Whether an address could be had: libzmq gives one back when it likes."""
    try:
        bind(address)
    except OSError:
        return False
    return True


def test_an_address_where_something_else_answered_for_a_moment_is_tried_again(
    sender: Sender, engine: Engine, context: "zmq.Context[Any]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_stream, "DEAF_MS", 300)
    sender.say(stored(0, 2))
    wait(lambda: engine.knows(sender))
    sender.close()
    port = int(sender.endpoint.rpartition(":")[2])
    with socket() as other:
        other.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        wait(lambda: taken(other.bind, ("127.0.0.1", port)))
        other.listen()
        caller, _ = other.accept()
        caller.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"ODD".ljust(20, b"\0") + bytes(32))
        caller.settimeout(1)
        with suppress(OSError):
            while caller.recv(1_024):
                pass
        caller.close()
    again = Sender(context, number=sender.number, port=port)
    again.batches, again.blocks = dict(sender.batches), dict(sender.blocks)
    engine.streams = [StreamAt("s", TOPIC, (again.endpoint,), (again.replay,))]
    again.say(stored(2, 1, parent=1))

    def beats() -> bool:
        again.say()
        time.sleep(0.05)
        return engine.knows(again)

    wait(beats)
    again.close()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_a_router_ends_with_what_is_announced(
    sender: Sender, engine: Engine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(pool_stream, "GAP_MAX", 12)
    print("seed", seed)
    chance = random.Random(seed)
    next_block = 0
    for _ in range(150):
        act = chance.random()
        if act < 0.5:
            count = chance.randrange(1, 8)
            sender.say(*(stored(next_block + row, 1) for row in range(count)))
            next_block += count
        elif act < 0.75 and sender.blocks:
            gone = chance.sample(sorted(sender.blocks), min(3, len(sender.blocks)))
            sender.say(removed([one - hash_of(0) for one in gone]))
        elif act < 0.85:
            sender.drop |= set(range(sender.number, sender.number + chance.choice([2, 5, 20])))
        elif act < 0.88:
            engine.cleared()
        elif act < 0.9:
            sender.silent = not sender.silent
        else:
            time.sleep(chance.choice([0.0, 0.02]))
        if chance.random() < 0.5:
            engine.step()
    sender.silent, sender.drop = False, set()

    def beats() -> bool:
        sender.say()
        return engine.knows(sender)

    wait(beats)


def test_events_are_read_as_the_service_writes_them() -> None:
    payload = msgspec.msgpack.encode([1.5, [removed([1]), stored(2, 3)], 0])
    first, second = events_of(payload)
    assert first is not None and second is not None
    event, size = second
    assert size == len(msgspec.msgpack.encode(stored(2, 3)))
    assert msgspec.structs.asdict(first[0])["block_hashes"] == [hash_of(1)]
    assert tokens_of(event) == stored(2, 3)["token_ids"]  # type: ignore[arg-type]
    short = {**stored(2, 3), "token_ids": [1, 2, 3]}
    ((cut, _),) = events_of(msgspec.msgpack.encode([1.5, [short], 0]))  # type: ignore[misc]
    assert isinstance(cut, Stored) and tokens_of(cut) is None, "a short span is never passed on"
    assert list(events_of(b"\xc1")) == [None]
