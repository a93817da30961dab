"""What a real engine publishes over ZMQ of the blocks that the connector stored, as followers receive it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from metaservice.cli.local.places import HOST
from tests.accept.handle import EngineProcess
from tests.accept.messages import BLOCK_SIZE_TOKENS, Answer
from tests.vllm.engine_house import ANSWER_TOKENS, Engines, ServiceProcess, loaded, prompts
from tests.vllm.test_engine_loads import damaged

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCKS = 6
WAIT_S = 10.0
PAUSE_MS = 300
TINY = [1, 2, 3]
"""A prompt without a block."""

Told = bytes | int
Event = Any
"""BlockStored, BlockRemoved or AllBlocksCleared."""


class Follower:
    """Listens on the loopback address; the engine connects to it. No batch is missing once it has joined."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        port: int = self._socket.bind_to_random_port(f"tcp://{HOST}")
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._next = 0
        self.arguments: dict[str, Any] = {
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://{HOST}:{port}",
            }
        }

    def close(self) -> None:
        self._socket.close(linger=0)

    def join(self, engine: EngineProcess, service: ServiceProcess) -> None:
        """Returns when the engine's publisher knows of this follower: what it says before is lost."""
        until_s = time.monotonic() + WAIT_S
        number = 0
        while not self._next:
            assert time.monotonic() < until_s
            number += 1
            engine.ask([[number] * (BLOCK_SIZE_TOKENS + 1)], 1)
            self.received()
        service.settle()
        for _ in range(2):
            engine.ask([TINY], 1)
            self.received()

    def heard(self, engine: EngineProcess, enough: Callable[[list[Event]], bool]) -> list[Event]:
        """Events that came since the last call, till there are enough of them. An engine publishes with its
        steps, so it is made to take some."""
        found: list[Event] = []
        until_s = time.monotonic() + WAIT_S
        while not enough(found):
            assert time.monotonic() < until_s, found
            engine.ask([TINY], 1)
            found += self.received()
        return found

    def received(self) -> list[Event]:
        """All that has come, and what comes till there is a pause."""
        found: list[Event] = []
        while self._socket.poll(PAUSE_MS):
            _, told, batch = self._socket.recv_multipart()
            number = int.from_bytes(told, "big")
            assert number == self._next or not self._next, "a batch is missing"
            self._next = number + 1
            found += msgspec.msgpack.decode(batch, type=KVEventBatch).events
        return found


@pytest.fixture
def follower() -> Iterator[Follower]:
    found = Follower()
    try:
        yield found
    finally:
        found.close()


def stored(events: list[Event], medium: str) -> dict[Told, tuple[Told | None, list[int]]]:
    """Block -> its parent and its tokens. No block is told twice."""
    blocks: dict[Told, tuple[Told | None, list[int]]] = {}
    for event in events:
        if not isinstance(event, BlockStored) or event.medium != medium:
            continue
        assert event.block_size == BLOCK_SIZE_TOKENS
        assert len(event.token_ids) == len(event.block_hashes) * BLOCK_SIZE_TOKENS
        parent = event.parent_block_hash
        for row, block in enumerate(event.block_hashes):
            assert block not in blocks
            tokens = event.token_ids[row * BLOCK_SIZE_TOKENS : (row + 1) * BLOCK_SIZE_TOKENS]
            blocks[block] = parent, tokens
            parent = block
    return blocks


def removed(events: list[Event], medium: str) -> list[Told]:
    return [
        block
        for event in events
        if isinstance(event, BlockRemoved) and event.medium == medium
        for block in event.block_hashes
    ]


def names(answer: Answer) -> list[Told]:
    """A prompt's blocks as followers are told them."""
    return [maybe_convert_block_hash(BlockHash(bytes.fromhex(key))) for key in answer.keys]


def expected(answer: Answer, prompt: list[int]) -> dict[Told, tuple[Told | None, list[int]]]:
    """What has to be told of a prompt's blocks."""
    blocks = names(answer)
    parents: list[Told | None] = [None, *blocks]
    return {
        block: (parents[row], prompt[row * BLOCK_SIZE_TOKENS : (row + 1) * BLOCK_SIZE_TOKENS])
        for row, block in enumerate(blocks)
    }


def count(medium: str, blocks: int) -> Callable[[list[Event]], bool]:
    return lambda events: len(stored(events, medium)) >= blocks


def test_what_was_stored_is_told_to_a_follower_with_its_parents_tokens_and_medium(
    engines: Engines, service: ServiceProcess, models: Callable[[str], Path], follower: Follower
) -> None:
    model = models("llama")
    first, other = prompts(model, 2, BLOCKS, first=400)
    forked = first[: 3 * BLOCK_SIZE_TOKENS] + other[3 * BLOCK_SIZE_TOKENS :]
    engine = engines.start("one", model, salt="told", arguments=follower.arguments)
    follower.join(engine, service)
    (answer,) = engine.ask([first], ANSWER_TOKENS)
    service.settle()
    events = follower.heard(engine, count(MEDIUM_STORAGE, BLOCKS))
    assert stored(events, MEDIUM_STORAGE) == expected(answer, first)
    assert stored(events, MEDIUM_GPU) == expected(answer, first), (
        "vLLM's own events say the same of its memory"
    )
    (fork,) = engine.ask([forked], ANSWER_TOKENS)
    service.settle()
    events = follower.heard(engine, count(MEDIUM_STORAGE, BLOCKS - 3))
    branch = {block: expected(fork, forked)[block] for block in names(fork)[3:]}
    assert stored(events, MEDIUM_STORAGE) == branch
    assert branch[names(fork)[3]][0] == names(answer)[2], "a branch hangs below the block that both have"

    engine.reset()
    again = engine.ask([first, forked], ANSWER_TOKENS, at_once=False)
    assert loaded(engine) == 2 * BLOCKS - 3
    service.settle()
    events = follower.heard(engine, count(MEDIUM_GPU, 2 * BLOCKS - 3))
    assert not stored(events, MEDIUM_STORAGE), "a block that is loaded is no news"
    assert [one.keys for one in again] == [answer.keys, fork.keys]


def test_nothing_is_told_of_requests_with_a_salt(
    engines: Engines, service: ServiceProcess, models: Callable[[str], Path], follower: Follower
) -> None:
    model = models("llama")
    secret, public = prompts(model, 2, BLOCKS, first=430)
    engine = engines.start("one", model, salt="salted-events", arguments=follower.arguments)
    follower.join(engine, service)
    (salted,) = engine.ask([secret], ANSWER_TOKENS, salt="a")
    service.settle()
    published = {entry.key for entry in engines.pages("one", "published")}
    assert len(salted.keys) == BLOCKS
    assert published >= set(salted.keys), "they are stored"
    (answer,) = engine.ask([public], ANSWER_TOKENS)
    service.settle()
    events = follower.heard(engine, count(MEDIUM_STORAGE, BLOCKS))
    assert stored(events, MEDIUM_STORAGE) == expected(answer, public)
    assert set(names(salted)) <= set(stored(events, MEDIUM_GPU)), "vLLM itself tells of its memory"


def test_a_block_that_cannot_be_read_is_told_as_removed_and_told_again_when_it_is_stored_again(
    engines: Engines, service: ServiceProcess, models: Callable[[str], Path], follower: Follower
) -> None:
    model = models("llama")
    asked = prompts(model, 2, BLOCKS, first=460)
    engine = engines.start("one", model, salt="gone", arguments=follower.arguments)
    follower.join(engine, service)
    right = engine.ask(asked, ANSWER_TOKENS)
    service.settle()
    follower.heard(engine, count(MEDIUM_STORAGE, 2 * BLOCKS))
    lost = 3
    damaged(service, right[0], lost)
    engine.reset()
    answers = engine.ask(asked, ANSWER_TOKENS)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in right]
    assert engine.counts.connector["bad_blocks"] == 1
    block = names(right[0])[lost]
    events = follower.heard(engine, lambda found: bool(removed(found, MEDIUM_STORAGE)))
    for _ in range(3):  # the first of these may be told that a block is present which is just being removed
        if block in stored(events, MEDIUM_STORAGE):
            break
        service.settle()
        engine.reset()
        engine.ask(asked, ANSWER_TOKENS)
        service.settle()
        events += [
            event
            for event in follower.heard(engine, bool)
            if not isinstance(event, BlockStored) or event.medium == MEDIUM_STORAGE
        ]
    assert removed(events, MEDIUM_STORAGE) == [block]
    assert stored(events, MEDIUM_STORAGE) == {block: expected(right[0], asked[0])[block]}
