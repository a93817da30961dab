"""Whatever is in a window, nothing is sent that a router would choke on, and what is left out is counted."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaservice.core.windows import Gone, Run
from metaservice.publish.emitters import EVENT_BLOCKS_MAX, make
from metaservice.wire.tokens import pack_tokens
from tests.unit.emitter_house import BLOCK, Chain, decode, flat, prompt, stream, window
from tests.unit.llmd_model import decoded

IDS = prompt(10_000, 6)


def told(runs: list[Run], **changes: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """(the events that say that they are stored, blocks left out by reason)."""
    emitter = make("vllm")
    events = decode(emitter.batch(stream(**changes), window(stored=runs)))[1]
    return [event for event in events if event["type"] == "BlockStored"], dict(emitter.invalid)


def low(key: bytes, number: int = 2**32 - 1) -> bytes:
    """The key, but its event hash is `number`."""
    return key[:24] + number.to_bytes(8, "big")


# ---------------------------------------------------------------- each reason


@pytest.mark.parametrize("size", [3, 5, 8, 0])
def test_row_16_a_block_of_another_size_is_counted_and_not_sent(size: int) -> None:
    chain = Chain(IDS)
    chain.tokens[3] = pack_tokens([1] * size)
    events, invalid = told([chain.run()])
    assert [event["block_hashes"] for event in events] == [chain.hashes[:3]]
    assert invalid == {"tokens": 1, "behind": 2}


def test_row_16_a_stream_of_another_block_size_sends_nothing() -> None:
    events, invalid = told([Chain(IDS).run()], block_size_tokens=BLOCK * 2)
    assert events == []
    assert invalid == {"tokens": 1, "behind": 5}


@pytest.mark.parametrize("packed", [b"", b"\x00abcd", b"\x05" + bytes(20), b"\x02abcd", b"\x01abc"])
def test_row_28_bytes_that_are_no_packed_block(packed: bytes) -> None:
    chain = Chain(IDS)
    chain.tokens[1] = packed
    events, invalid = told([chain.run()])
    assert [event["block_hashes"] for event in events] == [chain.hashes[:1]]
    assert invalid == {"tokens": 1, "behind": 4}


def test_row_28_the_smallest_hash_that_is_taken() -> None:
    chain = Chain(IDS)
    chain.keys[0] = low(chain.keys[0], 2**32)
    events, invalid = told([chain.run(0, 1)])
    assert events[0]["block_hashes"] == [2**32]
    assert not invalid


@pytest.mark.parametrize("number", [0, 1, 2**31, 2**32 - 1])
def test_row_28_a_small_hash_is_not_sent_nor_what_hangs_on_it(number: int) -> None:
    chain = Chain(IDS)
    chain.keys[2] = low(chain.keys[2], number)
    events, invalid = told([chain.run(0, 4), chain.run(3)])
    assert [event["block_hashes"] for event in events] == [chain.hashes[:2]]
    assert invalid == {"hash_low": 1, "behind": 1, "parent": 3}


def test_row_28_a_parent_of_another_length_is_none_of_ours() -> None:
    events, invalid = told([Chain(IDS).run(1, parent=b"x" * 16)])
    assert (events, invalid) == ([], {"parent": 5})


def test_row_28_a_block_is_not_its_own_parent() -> None:
    chain = Chain(IDS)
    events, invalid = told([chain.run(1, 3, parent=chain.keys[1])])
    assert (events, invalid) == ([], {"duplicate": 1, "behind": 1})


def test_row_28_a_hash_is_once_in_a_run() -> None:
    chain = Chain(IDS)
    chain.keys[4] = chain.keys[1]
    events, invalid = told([chain.run()])
    assert [event["block_hashes"] for event in events] == [chain.hashes[:4]]
    assert invalid == {"duplicate": 1, "behind": 1}


@pytest.mark.parametrize("medium", ["GPU", "FS", "OBJ", "UCM", "external", ""])
def test_row_28_a_medium_that_a_router_drops_or_takes_for_the_gpu(medium: str) -> None:
    events, invalid = told([Chain(IDS).run(medium=medium)])
    assert (events, invalid) == ([], {"medium": 6})


def test_row_28_keys_of_another_length_than_the_instances() -> None:
    events, invalid = told([Chain(IDS).run(key_length=16)])
    assert (events, invalid) == ([], {"key_length": 12})


def test_row_28_not_as_many_keys_as_blocks() -> None:
    chain = Chain(IDS)
    events, invalid = told([chain.run(tokens=chain.tokens[:4])])
    assert (events, invalid) == ([], {"columns": 6})


def test_row_28_removals_are_checked_too() -> None:
    chain = Chain(IDS)
    keys = [chain.keys[0], low(chain.keys[1]), chain.keys[2], chain.keys[0]]
    emitter = make("vllm")
    parts = [
        Gone("i", "EXTERNAL", "", 32, b"".join(keys)),
        chain.gone(medium="OBJ"),
        chain.gone(key_length=64),
    ]
    events = decode(emitter.batch(stream(), window(removed=parts)))[1]
    assert [event["block_hashes"] for event in events] == [[chain.hashes[0], chain.hashes[2]]]
    assert emitter.invalid == {"duplicate": 1, "hash_low": 1, "medium": 6, "key_length": 3}


def test_a_removal_of_nothing_is_no_event() -> None:
    emitter = make("vllm")
    keys = low(Chain(IDS).keys[0])
    assert not emitter.events(stream(), window(removed=[Gone("i", "EXTERNAL", "", 32, keys)]))


def test_what_was_left_out_is_counted_once_for_all_ranks() -> None:
    emitter, bad = make("vllm"), window(stored=[Chain(IDS).run(medium="FS")])
    for rank in range(4):
        emitter.batch(stream(rank=rank), bad)
    assert emitter.invalid == {"medium": 6}


# ---------------------------------------------------------------- all at once

Spoil = Callable[[Chain, int], None]


def spoil_size(chain: Chain, at: int) -> None:
    chain.tokens[at] = pack_tokens([7] * 5)


def spoil_bytes(chain: Chain, at: int) -> None:
    chain.tokens[at] = b"\x07rubbish"


def spoil_low(chain: Chain, at: int) -> None:
    chain.keys[at] = low(chain.keys[at], 17)


def spoil_twice(chain: Chain, at: int) -> None:
    chain.keys[at] = chain.keys[max(at - 1, 0)]


SPOILS: list[Spoil] = [spoil_size, spoil_bytes, spoil_low, spoil_twice]


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[list[Run], int, list[list[int]]]:
    """(runs, how many blocks they have, the hashes that must be told of each)."""
    runs, count, good = [], 0, []
    for at in range(draw(st.integers(1, 5))):
        chain = Chain(prompt(10_000 * (at + 1), draw(st.integers(1, 80))))
        first_bad = len(chain)
        for _ in range(draw(st.integers(0, 2))):
            where = draw(st.integers(1, len(chain)))
            if where < len(chain):
                draw(st.sampled_from(SPOILS))(chain, where)
                first_bad = min(first_bad, where)
        medium = draw(st.sampled_from(["EXTERNAL", "EXTERNAL", "EXTERNAL", "OBJ"]))
        runs.append(chain.run(medium=medium))
        count += len(chain)
        good.append(chain.hashes[:first_bad] if medium == "EXTERNAL" else [])
    return runs, count, good


@given(spoilt())
@settings(max_examples=150, deadline=None)
def test_row_28_no_bad_block_costs_a_good_one_its_batch(case: tuple[list[Run], int, list[list[int]]]) -> None:
    runs, count, good = case
    emitter = make("vllm")
    payload = emitter.batch(stream(), window(stored=runs))
    # llm-d's decoder, which drops a batch for one bad event
    events = [event for event in decoded(payload) if event["type"] == "BlockStored"]
    assert flat(event["block_hashes"] for event in events) == flat(good)
    assert sum(map(len, good)) + sum(emitter.invalid.values()) == count
    known: set[int | None] = {None}
    removed: list[int] = []
    for event in msgspec.msgpack.decode(payload)[1]:
        hashes = event["block_hashes"]
        if event["type"] == "BlockRemoved":
            removed = hashes
            continue
        assert hashes == removed
        assert event["parent_block_hash"] in known
        assert event["parent_block_hash"] not in hashes
        assert len(set(hashes)) == len(hashes) <= EVENT_BLOCKS_MAX
        assert all(2**32 <= name < 2**64 for name in hashes)
        assert len(event["token_ids"]) == len(hashes) * event["block_size"] == len(hashes) * BLOCK
        assert event["medium"] == "EXTERNAL"
        assert set(event) <= ALLOWED
        known |= set(hashes)


ALLOWED = {
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "cache_salt",
    "extra_keys",
}
"""Row 17 too: no event names a group, so none is dropped for one, and none is taken for a window's."""
