"""Histories on llm-d's index (`llmd_model`): after stores, removals, repeats and losses it must be where we
are."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaservice.core.windows import Gone, Run
from metaservice.publish.emitters import Emitter, Stream, make
from metaservice.wire.tokens import pack_tokens
from tests.unit.emitter_house import Chain, frames, prompt, stream, window
from tests.unit.llmd_model import Frames, Llmd

IDS = prompt(10_000, 4)
WEIGHTS = {"gpu": 1.0, "cpu": 0.8, "storage": 0.5, "external": 0.25}


def pod(number: int) -> Stream:
    return stream(topic=f"kv@10.0.0.{number}:8000@m".encode())


def name(number: int) -> str:
    return f"10.0.0.{number}:8000"


def index(**changes: Any) -> Llmd:
    plain: dict[str, Any] = {"block_size_tokens": 4, "weights": WEIGHTS}
    return Llmd(**plain | changes)


@dataclass
class Publisher:
    """Windows of one stream with their numbers, all of them kept."""

    stream: Stream
    emitter: Emitter = field(default_factory=lambda: make("vllm"))
    log: list[Frames] = field(default_factory=list)

    def send(self, **parts: Any) -> Frames:
        """The next window."""
        number = len(self.log)
        message = frames(self.stream, number, self.emitter.batch(self.stream, window(number, **parts)))
        self.log.append(message)
        return message

    def replay(self, start: int) -> Iterator[Frames]:
        """What was sent from `start` on, and a little from before it."""
        yield from self.log[max(0, start - 2) :]


def engine_events(of: Stream, *events: dict[str, Any]) -> Frames:
    """A message of the engine's own stream."""
    return frames(of, 0, msgspec.msgpack.encode([1.0, events, 0]))


def on_gpu(chain: Chain) -> dict[str, Any]:
    """The engine's own event for the whole chain."""
    return {
        "type": "BlockStored",
        "block_hashes": chain.hashes,
        "parent_block_hash": None,
        "token_ids": chain.ids,
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("ids", [IDS[:3], IDS[:5], []], ids=["short", "long", "none"])
def test_row_03_a_span_of_another_length_is_not_sent(ids: list[int]) -> None:
    llmd, publisher, chain = index(), Publisher(pod(1)), Chain(IDS)
    chain.tokens[2] = pack_tokens(ids)
    llmd.receive(publisher.send(stored=[chain.run()]))
    assert llmd.scores("m", IDS) == {name(1): 0.5}
    assert len(llmd.pods) == 2
    assert publisher.emitter.invalid == {"tokens": 1, "behind": 1}


@pytest.mark.parametrize("repeats", [1, 2, 7])
def test_row_10_restated_blocks_are_gone_after_one_removal(repeats: int) -> None:
    llmd, publisher, chain = index(), Publisher(pod(1)), Chain(IDS)
    llmd.receive(publisher.send(stored=[chain.run()]))
    for _ in range(repeats):
        llmd.receive(publisher.send(restated=[chain.run(0, 2), chain.run(2)]))
        assert llmd.scores("m", IDS) == {name(1): 1.0}
    llmd.receive(publisher.send(removed=[chain.gone()]))
    assert llmd.scores("m", IDS) == {}
    assert not llmd.pods and not llmd.references


def test_row_10_a_plain_repeat_would_have_to_be_removed_twice() -> None:
    """So the judge counts, and what we do is needed."""
    llmd, publisher, chain = index(), Publisher(pod(1)), Chain(IDS)
    for _ in range(2):
        llmd.receive(engine_events(pod(1), on_gpu(chain) | {"medium": "EXTERNAL"}))
    llmd.receive(publisher.send(removed=[chain.gone()]))
    assert llmd.scores("m", IDS) == {name(1): 1.0}


def test_row_10_a_block_stored_again_after_a_removal_that_was_missed_counts_once() -> None:
    llmd, publisher, chain = index(), Publisher(pod(1)), Chain(IDS)
    llmd.receive(publisher.send(stored=[chain.run()]))
    publisher.send(removed=[chain.gone()])
    llmd.receive(publisher.send(stored=[chain.run()]))
    llmd.receive(publisher.send(removed=[chain.gone()]))
    assert llmd.scores("m", IDS) == {}


def test_row_12_what_an_engines_clearing_wiped_is_told_again() -> None:
    llmd, publisher, chain = index(), Publisher(pod(1)), Chain(IDS)
    llmd.receive(engine_events(pod(1), on_gpu(chain)))
    llmd.receive(publisher.send(stored=[chain.run()]))
    assert llmd.scores("m", IDS) == {name(1): 4.0}
    llmd.receive(engine_events(pod(1), {"type": "AllBlocksCleared"}))
    assert llmd.scores("m", IDS) == {}
    llmd.receive(publisher.send(restated=[chain.run()]))
    assert llmd.scores("m", IDS) == {name(1): 1.0}


def test_row_13_a_dropped_frame_is_replayed_before_the_one_that_showed_it() -> None:
    publisher, chain = Publisher(pod(1)), Chain(IDS)
    llmd = index(replay=publisher.replay)
    llmd.receive(publisher.send(stored=[chain.run(0, 1)]))
    publisher.send(stored=[chain.run(1, 3)])
    llmd.receive(publisher.send(stored=[chain.run(3)]))
    assert llmd.scores("m", IDS) == {name(1): 1.0}
    assert set(llmd.references.values()) == {1}
    llmd.receive(publisher.send(removed=[chain.gone()]))
    assert not llmd.pods and not llmd.references


def test_row_13_without_a_replay_port_restating_heals() -> None:
    llmd, publisher, chain = index(), Publisher(pod(1)), Chain(IDS)
    publisher.send(stored=[chain.run(0, 2)])
    llmd.receive(publisher.send(stored=[chain.run(2)]))
    assert llmd.scores("m", IDS) == {}
    llmd.receive(publisher.send(restated=[chain.run()]))
    assert llmd.scores("m", IDS) == {name(1): 1.0}


def test_row_13_a_missed_removal_is_healed_by_a_tombstone() -> None:
    llmd, publisher, chain = index(), Publisher(pod(1)), Chain(IDS)
    llmd.receive(publisher.send(stored=[chain.run()]))
    publisher.send(removed=[chain.gone(2)])
    llmd.receive(publisher.send(again=[chain.gone(2)]))
    assert llmd.scores("m", IDS) == {name(1): 0.5}
    llmd.receive(publisher.send(again=[chain.gone(2)]))
    assert llmd.scores("m", IDS) == {name(1): 0.5}


def test_row_25_a_shared_pool_is_every_pods_and_counts_less_than_a_gpu() -> None:
    llmd, chain = index(), Chain(IDS)
    for number in (1, 2, 3):
        llmd.receive(Publisher(pod(number)).send(stored=[chain.run()]))
    llmd.receive(engine_events(pod(2), on_gpu(chain)))
    assert llmd.scores("m", IDS) == {name(1): 1.0, name(2): 4.0, name(3): 1.0}


def test_row_25_more_pods_than_its_cache_holds_cost_the_gpus_entry() -> None:
    """Fifteen pods tell of one pool block: with ten entries a key the GPU's own is among those dropped."""
    chain = Chain(IDS)
    small, large = index(), index(pod_cache_size=16)
    for llmd in (small, large):
        llmd.receive(engine_events(pod(1), on_gpu(chain)))
        for number in range(1, 16):
            llmd.receive(Publisher(pod(number)).send(stored=[chain.run()]))
    assert name(1) not in small.scores("m", IDS)
    assert small.scores("m", IDS) == {name(number): 1.0 for number in range(6, 16)}
    assert large.scores("m", IDS) == {name(1): 4.0} | {name(number): 1.0 for number in range(2, 16)}


def test_row_25_a_pool_block_that_is_gone_leaves_the_gpus_entry() -> None:
    llmd, publisher, chain = index(), Publisher(pod(1)), Chain(IDS)
    llmd.receive(engine_events(pod(1), on_gpu(chain)))
    llmd.receive(publisher.send(stored=[chain.run()]))
    llmd.receive(publisher.send(removed=[chain.gone()]))
    assert llmd.scores("m", IDS) == {name(1): 4.0}


def test_a_heartbeat_changes_nothing() -> None:
    llmd, publisher, chain = index(), Publisher(pod(1)), Chain(IDS)
    llmd.receive(publisher.send(stored=[chain.run()]))
    llmd.receive(publisher.send())
    assert llmd.scores("m", IDS) == {name(1): 1.0}
    assert llmd.poisoned == 0


# ---------------------------------------------------------------- histories

PROMPTS = [IDS, [*IDS[:8], *prompt(20_000, 2)], prompt(30_000, 3), [*IDS[:4], *prompt(40_000, 3)]]
CHAINS = [Chain(ids) for ids in PROMPTS]

Step = tuple[str, int, int, bool]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "restate", "again", "beat"]),
        st.integers(0, len(CHAINS) - 1),
        st.integers(1, 4),
        st.booleans(),
    ),
    max_size=40,
)
"""(what, of which chain, how many blocks, whether the frame is lost)."""


@dataclass
class Announced:
    """What is announced, as the core decides it: parents before children, gone leaves first."""

    keys: set[bytes] = field(default_factory=set)
    tombstones: list[bytes] = field(default_factory=list)

    def known(self, chain: Chain) -> int:
        """How many of the chain's blocks are announced, from the first on."""
        return next((at for at, key in enumerate(chain.keys) if key not in self.keys), len(chain))

    def step(self, what: str, chain: Chain, count: int) -> dict[str, list[Run] | list[Gone]]:
        """The parts of the next window."""
        known = self.known(chain)
        if what == "store" and known < len(chain):
            told = chain.keys[known : known + count]
            self.keys |= set(told)
            self.tombstones = [key for key in self.tombstones if key not in told]
            return {"stored": [chain.run(known, known + len(told))]}
        if what == "remove" and known:
            shared = {
                key for other in CHAINS if other is not chain for key in other.keys[: self.known(other)]
            }
            first = max(known - count, 0)
            while first < known and chain.keys[first] in shared:
                first += 1
            self.keys -= set(chain.keys[first:known])
            self.tombstones += chain.keys[first:known]
            return {"removed": [chain.gone(first, known)]} if first < known else {}
        if what == "restate" and known:
            return {"restated": [chain.run(0, min(count, known))]}
        if what == "again" and self.tombstones:
            return {"again": [gone(self.tombstones[-count:])]}
        return {}

    def all(self) -> dict[str, list[Run] | list[Gone]]:
        """The whole of it again."""
        told: set[bytes] = set()
        runs = []
        for chain in CHAINS:
            first, last = (
                next((a for a, key in enumerate(chain.keys) if key not in told), 0),
                self.known(chain),
            )
            if first < last:
                runs.append(chain.run(first, last))
                told |= set(chain.keys[first:last])
        return {"restated": runs, "again": [gone(self.tombstones)]}

    def scores(self) -> list[float]:
        return [self.known(chain) * 0.25 for chain in CHAINS]


def gone(keys: list[bytes]) -> Gone:
    return Gone("i", "EXTERNAL", "", 32, b"".join(keys))


def scores(llmd: Llmd) -> list[float]:
    return [llmd.scores("m", ids).get(name(1), 0.0) for ids in PROMPTS]


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_row_13_with_replay_every_loss_is_made_good(steps: list[Step]) -> None:
    publisher, announced = Publisher(pod(1)), Announced()
    llmd = index(replay=publisher.replay)
    for what, which, count, lost in steps:
        message = publisher.send(**announced.step(what, CHAINS[which], count))
        if not lost:
            llmd.receive(message)
            assert scores(llmd) == announced.scores()
    llmd.receive(publisher.send())
    assert scores(llmd) == announced.scores()
    assert set(llmd.references.values()) <= {1}
    assert llmd.poisoned == 0


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_row_13_without_replay_one_rotation_makes_every_loss_good(steps: list[Step]) -> None:
    publisher, announced, llmd = Publisher(pod(1)), Announced(), index()
    for what, which, count, lost in steps:
        message = publisher.send(**announced.step(what, CHAINS[which], count))
        if not lost:
            llmd.receive(message)
        assert set(llmd.references.values()) <= {1}
    llmd.receive(publisher.send(**announced.all()))
    assert scores(llmd) == announced.scores()
    assert set(llmd.references.values()) <= {1}
    assert len(llmd.pods) == len(announced.keys)


@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_a_late_index_reaches_the_same_state_from_a_snapshot(steps: list[Step]) -> None:
    """Row 7's half that is the emitter's: the events of a snapshot say all there is."""
    publisher, announced, llmd = Publisher(pod(1)), Announced(), index()
    for what, which, count, lost in steps:
        message = publisher.send(**announced.step(what, CHAINS[which], count))
        if lost:  # it heard some of it
            llmd.receive(message)
    told = announced.all()
    restated, again = told["restated"], told["again"]
    for number, events in enumerate(publisher.emitter.snapshot(publisher.stream, restated, again)):  # type: ignore[arg-type]
        llmd.receive(frames(publisher.stream, number, publisher.emitter.payload(publisher.stream, events, 1)))
    assert scores(llmd) == announced.scores()
    assert set(llmd.references.values()) <= {1}
