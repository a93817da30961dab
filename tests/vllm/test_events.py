"""KV cache events, decoded as a follower of vLLM decodes them."""

import os
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from engine_adapters.vllm import events
from engine_adapters.vllm.events import Teller
from engine_adapters.vllm.requests import Published

SIZE = 4


def chain(
    keys: Sequence[bytes],
    parent: bytes | None = None,
    *,
    tier: str = "posix",
    adapter: tuple[str, str] | None = None,
    first: int = 100,
) -> Published:
    tokens = list(range(first, first + SIZE * len(keys)))
    return Published("i", list(keys), parent, tokens, adapter, tier)


def keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def wired(told: list[Any]) -> list[Any]:
    """Through the encoding that vLLM publishes with."""
    batch = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=told))
    return list(msgspec.msgpack.decode(batch, type=KVEventBatch).events)


def test_a_chain_is_told_with_its_parent_tokens_and_medium() -> None:
    parent, *blocks = keys(4)
    (event,) = wired(Teller(SIZE).events([chain(blocks, parent)]))
    assert event == BlockStored(
        block_hashes=[int.from_bytes(key[-8:], "big") for key in blocks],
        parent_block_hash=int.from_bytes(parent[-8:], "big"),
        token_ids=list(range(100, 112)),
        block_size=SIZE,
        lora_id=None,
        medium="STORAGE",
        lora_name=None,
    )


def test_hashes_are_vllms_own_in_either_form(monkeypatch: pytest.MonkeyPatch) -> None:
    (key,) = keys(1)
    for form in ("0", "1"):
        monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", form)
        (event,) = wired(Teller(SIZE).events([chain([key])]))
        assert event.block_hashes == [maybe_convert_block_hash(key)]
        assert event.block_hashes[0] == (key if form == "0" else int.from_bytes(key[-8:], "big"))


def test_memory_of_a_host_and_an_adapters_name_are_told() -> None:
    (event,) = Teller(SIZE).events([chain(keys(1), tier="shm", adapter=("poet", "/adapters/poet"))])
    assert (event.medium, event.lora_name) == ("CPU", "poet")


def test_a_block_is_announced_once_and_what_is_new_in_a_chain_keeps_its_parents() -> None:
    teller = Teller(SIZE)
    a, b, c, d, e = keys(5)
    teller.events([chain([b, c], a)])
    told = wired(teller.events([chain([a, b, c, d, e])]))
    assert [(x.block_hashes, x.parent_block_hash, x.token_ids) for x in told] == [
        ([maybe_convert_block_hash(a)], None, [100, 101, 102, 103]),
        (
            [maybe_convert_block_hash(d), maybe_convert_block_hash(e)],
            maybe_convert_block_hash(c),
            list(range(112, 120)),
        ),
    ]
    assert teller.events([chain([a, b, c, d, e])]) == []


def test_what_is_gone_is_told_before_it_is_stored_again() -> None:
    teller = Teller(SIZE)
    a, b, unknown = keys(3)
    teller.events([chain([a, b]), chain([unknown][:0])])
    told = wired(teller.events([chain([a, b])], removed=[a, unknown, a]))
    assert told[0] == BlockRemoved(block_hashes=[maybe_convert_block_hash(a)], medium="STORAGE")
    assert [event.block_hashes for event in told[1:]] == [[maybe_convert_block_hash(a)]]


@pytest.mark.parametrize("tokens", [[], [1, 2, 3], list(range(9))])
def test_tokens_that_do_not_fit_are_never_told(tokens: list[int]) -> None:
    a, b = keys(2)
    assert Teller(SIZE).events([Published("i", [a, b], None, tokens, None, "posix")]) == []


def test_after_a_reset_everything_is_news_again() -> None:
    teller = Teller(SIZE)
    blocks = chain(keys(2))
    assert teller.events([blocks]) == (teller.forget() or teller.events([blocks]))  # type: ignore[func-returns-value]


def test_what_is_remembered_is_bounded_and_a_follower_agrees_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that counts copies, as some routers do, never holds a block twice, nor more than the bound."""
    monkeypatch.setattr(events, "ANNOUNCED_MAX", 50)
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    teller = Teller(SIZE)
    held: dict[tuple[int, str], int] = {}
    pool = keys(200)
    for _ in range(400):
        start = chance.randrange(190)
        run = pool[start : start + chance.randrange(1, 10)]
        gone = chance.sample(pool, 3)
        for event in teller.events([chain(run, tier=chance.choice(["posix", "shm"]))], gone):
            for told in event.block_hashes:
                place = (told, event.medium)
                if isinstance(event, BlockStored):
                    held[place] = held.get(place, 0) + 1
                else:
                    held[place] -= 1
        assert set(held.values()) <= {0, 1}
        serving = {place for place, copies in held.items() if copies}
        assert len(serving) <= 50
        assert serving == {(maybe_convert_block_hash(k), m) for k, m in teller._announced.items()}
