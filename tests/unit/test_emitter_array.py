"""The array dialect, read as AIBrix reads it: by place, and nothing else of a block than its ids."""

from typing import Any

import pytest

from metaservice.core.windows import CPU, Window
from metaservice.publish.emitters import make
from tests.unit.emitter_house import NOW_MS, Chain, decode, prompt, stream, window
from tests.unit.llmd_model import decoded

IDS = list(range(100, 116))
CHAIN = Chain(IDS)


def batch(of: Window, **changes: Any) -> list[Any]:
    told: list[Any] = decode(make("array").batch(stream(**changes), of))
    return told


def test_row_02_events_are_arrays_for_who_cannot_read_maps() -> None:
    ts, events, rank = batch(window(stored=[CHAIN.run(1, 3)], removed=[CHAIN.gone(3)]), rank=2)
    assert (ts, rank) == (NOW_MS / 1000.0, 2)
    assert isinstance(ts, float) and isinstance(rank, int)
    assert events == [
        ["BlockRemoved", CHAIN.hashes[3:], "EXTERNAL"],
        ["BlockRemoved", CHAIN.hashes[1:3], "EXTERNAL"],
        ["BlockStored", CHAIN.hashes[1:3], CHAIN.hashes[0], IDS[4:12], 4, None, "EXTERNAL"],
    ]


@pytest.mark.parametrize("now_ms", [0, 1000, 1_764_460_800_000])
def test_row_02_a_whole_second_is_a_float_still(now_ms: int) -> None:
    """A whole number would have AIBrix drop the batch."""
    payload = make("array").payload(stream(), [], now_ms)
    assert payload[:2] == b"\x93\xcb"
    assert isinstance(decode(payload)[0], float)


def test_row_02_both_dialects_say_the_same() -> None:
    """To one who reads both, as llm-d does."""
    long = Chain(prompt(10_000, 150))
    said = window(stored=[long.run(), CHAIN.run()], restated=[CHAIN.run()], removed=[long.gone()])
    maps, arrays = (list(decoded(make(name).batch(stream(), said))) for name in ("vllm", "array"))
    assert len(maps) == 13
    assert maps == arrays


def test_row_21_an_array_ends_where_dialects_begin_to_differ() -> None:
    """vLLM has the adapter's name at place 7, SGLang once had something else there: nothing of ours is."""
    _, events, _ = batch(window(stored=[CHAIN.run()], removed=[CHAIN.gone()]))
    assert [len(event) for event in events] == [3, 3, 7]


def test_row_20_a_salted_block_is_not_told_to_who_knows_no_salt() -> None:
    emitter = make("array")
    said = window(stored=[Chain(IDS, salt="a").run(), CHAIN.run()], restated=[Chain(IDS, salt="b").run()])
    events = decode(emitter.batch(stream(), said))[1]
    assert [event[1] for event in events] == [CHAIN.hashes] * 2
    assert emitter.invalid == {"salt": 8}


def test_row_19_nor_is_an_adapters() -> None:
    emitter = make("array")
    said = window(stored=[Chain(IDS, lora="a").run(), CHAIN.run()])
    assert len(decode(emitter.batch(stream(), said))[1]) == 2
    assert decode(emitter.batch(stream(lora="b"), said))[1] == []
    assert emitter.invalid == {"adapter": 12}


def test_row_28_a_bad_block_is_left_out_here_too() -> None:
    emitter = make("array")
    assert decode(emitter.batch(stream(), window(stored=[CHAIN.run(medium="OBJ")])))[1] == []
    assert emitter.invalid == {"medium": 4}


def test_a_local_medium_is_told_by_its_name() -> None:
    _, [event], _ = batch(window(removed=[CHAIN.gone(medium=CPU, node="n")]), node="n")
    assert event[2] == "CPU"
