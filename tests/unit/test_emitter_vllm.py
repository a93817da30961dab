"""The canonical dialect: the exact maps, their order, and that a window is encoded once."""

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaservice.core.windows import CPU, STORAGE, Window
from metaservice.publish.emitters import EVENT_BLOCKS_MAX, NAMES, make
from tests.unit.emitter_house import NOW_MS, Chain, decode, flat, prompt, stream, window

IDS = list(range(100, 116))
CHAIN = Chain(IDS)
LONG = Chain(prompt(10_000, 150))


def events(of: Window, **changes: Any) -> list[dict[str, Any]]:
    """What the stream with these changes says of the window."""
    told: list[dict[str, Any]] = decode(make("vllm").batch(stream(**changes), of))[1]
    return told


def stored(of: Window, **changes: Any) -> list[dict[str, Any]]:
    """Of these, what says that something is stored."""
    return [event for event in events(of, **changes) if event["type"] == "BlockStored"]


# ---------------------------------------------------------------- the maps


def test_a_stored_run_is_exactly_these_maps() -> None:
    assert events(window(stored=[CHAIN.run(1, 3)])) == [
        {"type": "BlockRemoved", "block_hashes": CHAIN.hashes[1:3], "medium": "EXTERNAL"},
        {
            "type": "BlockStored",
            "block_hashes": CHAIN.hashes[1:3],
            "parent_block_hash": CHAIN.hashes[0],
            "token_ids": IDS[4:12],
            "block_size": 4,
            "lora_id": None,
            "medium": "EXTERNAL",
            "lora_name": None,
        },
    ]


def test_the_first_blocks_parent_is_nil_and_the_tag_comes_first() -> None:
    [event] = stored(window(stored=[CHAIN.run()]))
    assert event["parent_block_hash"] is None
    assert next(iter(event)) == "type"


def test_a_removal_is_exactly_this_map() -> None:
    told = events(window(removed=[CHAIN.gone(0, 2, medium=CPU, node="n")]), node="n")
    assert told == [{"type": "BlockRemoved", "block_hashes": CHAIN.hashes[:2], "medium": "CPU"}]


def test_sglangs_keys_are_named_by_their_heads() -> None:
    [event] = stored(window(stored=[CHAIN.run(0, 1)]), hash_of="head64")
    assert event["block_hashes"] == [int.from_bytes(CHAIN.keys[0][:8], "big")]


def test_the_batch_is_seconds_events_and_rank() -> None:
    payload = make("vllm").batch(stream(rank=3), window())
    assert payload == b"\x93\xcb" + struct.pack(">d", NOW_MS / 1000.0) + b"\x90\x03"


def test_a_window_that_says_nothing_of_the_stream_is_a_heartbeat() -> None:
    elsewhere = window(stored=[CHAIN.run(instance="another"), CHAIN.run(node="n", medium=CPU)])
    assert events(elsewhere) == []


def test_row_18_the_rank_of_the_batch_is_the_streams() -> None:
    emitter = make("vllm")
    told = window(stored=[CHAIN.run()])
    assert [decode(emitter.batch(stream(rank=rank), told))[2] for rank in (0, 1, 7)] == [0, 1, 7]


# ---------------------------------------------------------------- order and size


def test_removed_comes_first_then_again_then_restated_then_stored() -> None:
    other = Chain(prompt(20_000, 4))
    told = events(
        window(
            stored=[other.run(0, 1)],
            restated=[CHAIN.run(0, 2), CHAIN.run(2)],
            removed=[other.gone(1, 2)],
            again=[other.gone(2, 3)],
        )
    )
    assert [(event["type"], event["block_hashes"]) for event in told] == [
        ("BlockRemoved", other.hashes[1:2]),
        ("BlockRemoved", other.hashes[2:3]),
        ("BlockRemoved", CHAIN.hashes[:2]),
        ("BlockStored", CHAIN.hashes[:2]),
        ("BlockRemoved", CHAIN.hashes[2:]),
        ("BlockStored", CHAIN.hashes[2:]),
        ("BlockRemoved", other.hashes[:1]),
        ("BlockStored", other.hashes[:1]),
    ]


def test_a_long_run_is_several_events_that_hang_together() -> None:
    told = stored(window(stored=[LONG.run()]))
    assert [len(event["block_hashes"]) for event in told] == [64, 64, 22]
    assert [event["parent_block_hash"] for event in told] == [None, LONG.hashes[63], LONG.hashes[127]]
    assert flat(event["token_ids"] for event in told) == LONG.ids


def test_a_long_removal_is_several_events() -> None:
    told = events(window(removed=[LONG.gone()]))
    assert [len(event["block_hashes"]) for event in told] == [64, 64, 22]


@pytest.mark.parametrize(
    "of", [window(stored=[LONG.run()]), window(restated=[LONG.run()])], ids=["new", "old"]
)
def test_a_long_run_is_told_as_removed_and_stored_span_by_span(of: Window) -> None:
    """The two stand side by side, so that no payload need hold more than one span."""
    told = events(of)
    assert [event["type"] for event in told] == ["BlockRemoved", "BlockStored"] * 3
    assert told[2]["block_hashes"] == told[3]["block_hashes"] == LONG.hashes[64:128]


# ---------------------------------------------------------------- adapters and salts


@pytest.mark.parametrize(
    ("of_run", "of_stream", "told"), [("", "", None), ("a", "", "a"), ("", "b", "b"), ("a", "b", "a")]
)
def test_row_19_an_adapter_is_told_by_its_name(of_run: str, of_stream: str, told: str | None) -> None:
    [event] = stored(window(stored=[CHAIN.run(lora=of_run)]), lora=of_stream)
    assert event["lora_name"] == told
    assert event["lora_id"] is None
    assert "extra_keys" not in event


def test_row_20_each_event_has_the_salt_and_the_prompts_first_has_it_for_llmd_too() -> None:
    told = stored(window(stored=[Chain(LONG.ids, salt="tenant-a").run()]))
    assert [event["cache_salt"] for event in told] == ["tenant-a"] * 3
    assert told[0]["extra_keys"] == [["tenant-a"], *[None] * 63]
    assert "extra_keys" not in told[1] and "extra_keys" not in told[2]


def test_row_20_what_begins_within_a_prompt_has_no_extra_keys() -> None:
    [event] = stored(window(stored=[Chain(IDS, salt="tenant-a").run(1)]))
    assert event["cache_salt"] == "tenant-a"
    assert "extra_keys" not in event


def test_row_20_an_unsalted_block_has_neither() -> None:
    [event] = stored(window(stored=[CHAIN.run()]))
    assert not {"cache_salt", "extra_keys"} & set(event)


@pytest.mark.parametrize(
    ("engines", "routers"),
    [("dynamo-cache-salt:t", "t"), ("t", "t"), ("dynamo-cache-salt:", "dynamo-cache-salt:")],
)
def test_row_20_a_salt_that_dynamo_marked_is_told_as_its_router_knows_it(engines: str, routers: str) -> None:
    """Its workers put the mark before a request's salt; the block is hashed with it, the query comes
    without."""
    [event] = stored(window(stored=[Chain(IDS, salt=engines).run()]))
    assert event["cache_salt"] == routers
    assert event["extra_keys"] == [[engines], None, None, None]


# ---------------------------------------------------------------- the same bytes, made once


def full() -> Window:
    return window(
        stored=[LONG.run(), CHAIN.run(medium=STORAGE, node="n")],
        restated=[CHAIN.run()],
        removed=[CHAIN.gone()],
    )


@pytest.mark.parametrize("name", NAMES)
def test_whoever_builds_it_a_window_has_the_same_bytes(name: str) -> None:
    own, other = make(name), make(name)
    other.batch(stream(), window(stored=[CHAIN.run()]))
    other.batch(stream(node="n"), full())
    sent = msgspec.msgpack.encode(full())
    read = msgspec.msgpack.decode(sent, type=Window)
    for at in (stream(), stream(node="n"), stream(rank=2)):
        assert own.batch(at, full()) == other.batch(at, read)


def test_streams_that_differ_in_rank_or_topic_share_the_encoded_events() -> None:
    emitter, told = make("vllm"), full()
    first = emitter.events(stream(), told)
    assert len(first) == 9
    assert emitter.events(stream(rank=1, topic=b"another", channel=9), told) is first


@pytest.mark.parametrize(
    "changes", [{"node": "n"}, {"lora": "a"}, {"hash_of": "head64"}, {"instance": "another"}]
)
def test_streams_that_differ_in_content_do_not(changes: dict[str, str]) -> None:
    emitter, told = make("vllm"), full()
    assert list(emitter.events(stream(**changes), told)) != list(emitter.events(stream(), told))


def test_a_window_of_the_same_number_is_not_taken_for_the_one_before() -> None:
    """After lost history a number may come again."""
    emitter = make("vllm")
    assert emitter.events(stream(), window(stored=[CHAIN.run()]))
    assert not emitter.events(stream(), window())


# ---------------------------------------------------------------- snapshots


def test_a_snapshot_says_what_is_gone_and_then_what_there_is() -> None:
    emitter = make("vllm")
    pieces = list(emitter.snapshot(stream(), [LONG.run(), CHAIN.run(node="n")], [CHAIN.gone()]))
    told = [[msgspec.msgpack.decode(event) for event in piece] for piece in pieces]
    assert [[event["type"] for event in piece] for piece in told] == [
        ["BlockRemoved"],
        *[["BlockRemoved", "BlockStored"]] * 3,
    ]
    assert told[1][0]["block_hashes"] == told[1][1]["block_hashes"] == LONG.hashes[:64]


@pytest.mark.parametrize("name", NAMES)
def test_pieces_of_a_snapshot_may_share_a_payload(name: str) -> None:
    emitter = make(name)
    pieces = list(emitter.snapshot(stream(), [LONG.run(), CHAIN.run()], [LONG.gone()]))
    together = emitter.payload(stream(), [event for piece in pieces for event in piece], NOW_MS)
    alone = [decode(emitter.payload(stream(), piece, NOW_MS))[1] for piece in pieces]
    assert decode(together)[1] == flat(alone)


# ---------------------------------------------------------------- ids


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), min_size=1, max_size=70))
def test_ids_of_any_width_arrive_as_they_were(blocks: list[list[int]]) -> None:
    ids = flat(blocks)
    told = stored(window(stored=[Chain(ids).run()]))
    assert flat(event["token_ids"] for event in told) == ids
    assert all(len(event["block_hashes"]) <= EVENT_BLOCKS_MAX for event in told)


@pytest.mark.parametrize("name", ["", "vLLM", "vllm:x=1", "mooncake:tp=x", "mooncake:ranks=2", "dump"])
def test_an_emitter_that_there_is_none_of(name: str) -> None:
    with pytest.raises(ValueError, match="there is no emitter"):
        make(name)


@pytest.mark.parametrize("name", NAMES)
def test_an_emitter_knows_its_name(name: str) -> None:
    assert make(name).name == name
