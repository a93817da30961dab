"""What engines' events mean, in every dialect, and that nothing that an engine sends does harm."""

import asyncio
from random import Random
from typing import Any

import msgspec
import pytest

from metaservice.publish.hashes import token_keys, token_root
from metaservice.publish.ingest.limits import IngestLimits
from metaservice.publish.packing import root_of
from tests.unit.ingest_house import (
    CLEARED,
    ROOT,
    Desk,
    batch,
    engine_up,
    ids,
    instance_up,
    names,
    packed,
    removed,
    stored,
)

GPU, CPU, STORAGE, EXTERNAL = range(4)
A, B, C, D = names(4)


def array_stored(hashes: list[Any], tokens: list[int], parent: Any = None, *tail: Any) -> list[Any]:
    return ["BlockStored", hashes, parent, tokens, 4, None, *tail]


# ---------------------------------------------------------------- dialects


def test_row_02_maps_and_arrays_long_and_short_say_the_same() -> None:
    tokens = ids(2)
    forms: list[Any] = [
        stored([A, B], tokens),
        array_stored([A, B], tokens),
        array_stored([A, B], tokens, None, "GPU"),
        array_stored([A, B], tokens, None, "GPU", None),
        array_stored([A, B], tokens, None, "GPU", None, [None, None], 0, "full_attention", None, "LOCAL"),
    ]
    gone: list[Any] = [
        removed([A]),
        ["BlockRemoved", [A]],
        ["BlockRemoved", [A], "GPU", 0],
        removed([A], None),
    ]
    for form in forms:
        for going in gone:
            desk = Desk()
            desk.take(batch(form))
            assert desk.held() == {A, B}
            assert desk.member.own.hash_of(token_keys(ROOT, packed(tokens))[1]) == B
            desk.take(batch(going))
            assert desk.held() == {B}
            assert not desk.bad


def test_row_02_a_batch_may_mix_maps_and_arrays_and_have_two_three_or_more_elements() -> None:
    desk = Desk()
    desk.take(msgspec.msgpack.encode([1, [stored([A], ids(1)), array_stored([B], ids(1, 50))]]))
    desk.take(msgspec.msgpack.encode([1.0, [array_stored([C], ids(1, 90))], 0, "more"]))
    assert desk.held() == {A, B, C}
    desk.take(msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]], None]))
    assert desk.held() == set()


def test_sglangs_signed_hashes_its_media_and_one_event_a_page() -> None:
    """From the reference's description of SGLang 0.5.23; its engine does not run on CPUs."""
    desk = Desk("sglang", instance=instance_up(hash_of="head64"))
    first, second = -(2**62), -5
    for row, (page, parent) in enumerate(((first, None), (second, first))):
        event = stored([page], ids(1, 4 * row), parent, cache_salt=None, session_id="s")
        desk.take(batch(event))
    assert desk.held() == {first & (2**64 - 1), second & (2**64 - 1)}
    assert desk.member.own.hash_of(token_keys(ROOT, packed(ids(2)))[1]) == second & (2**64 - 1)
    desk.take(batch(stored([first], ids(1), medium="CPU_PINNED"), stored([first], ids(1), medium="DISK")))
    desk.take(batch(removed([first, second])))
    assert [len(held) for held in desk.everything()] == [0, 1, 1, 0]


def test_sglang_tells_a_page_that_it_has_already_once_more_and_removes_it_once() -> None:
    desk = Desk("sglang")
    desk.take(batch(stored([A], ids(1)), stored([A], ids(1)), removed([A])))
    assert desk.held() == set()


def test_pairs_of_tokens_are_content_that_takes_in_the_next_blocks_first() -> None:
    tokens = ids(2)
    pairs = [[one, one + 1] for one in tokens]
    desk = Desk("sglang")
    desk.take(batch(stored([A, B], pairs)))
    windows = [packed(tokens[:5], 5)[0], packed([*tokens[4:], 8], 5)[0]]
    assert desk.member.overlap == 1
    assert desk.member.own.hash_of(token_keys(ROOT, windows)[1]) == B
    assert desk.member.own.hash_of(token_keys(ROOT, packed(tokens))[0]) is None


def test_row_21_what_sglang_put_where_vllm_has_a_name_is_not_misread() -> None:
    desk = Desk("sglang")
    for page, tail in ((A, {"cache_salt": "s"}), (B, "salt"), (C, [1, 2])):
        desk.take(batch(array_stored([page], ids(1), None, "GPU", tail)))
    assert desk.held() == {A, B, C}
    assert desk.member.own.hash_of(token_keys(ROOT, packed(ids(1)))[0]) is None
    desk.take(batch(array_stored([D], ids(1), None, "GPU", None)))
    assert desk.member.own.hash_of(token_keys(ROOT, packed(ids(1)))[0]) == D, "only what is known to be plain"
    assert desk.member.own.hash_of(token_keys(token_root("salt"), packed(ids(1)))[0]) is None
    vllm = Desk()
    vllm.take(batch(array_stored([A], ids(1), None, "GPU", {"cache_salt": "s"}), array_stored([B], ids(1))))
    assert vllm.held() == {A, B}
    vllm.take(batch(removed([B])))
    assert vllm.member.own.hash_of(token_keys(ROOT, packed(ids(1)))[0]) is None
    vllm.take(batch(array_stored([B], ids(1))))
    assert vllm.member.own.hash_of(token_keys(ROOT, packed(ids(1)))[0]) == B
    vllm.take(
        batch(["BlockRemoved", [A], "GPU", "LOCAL", 3, {}], ["BlockRemoved", [B], "GPU", 0, None, 9, 9])
    )
    assert vllm.held() == set()


def test_whole_digests_count_by_the_eight_bytes_that_the_instance_says() -> None:
    digest = bytes(range(1, 33))
    for hash_of, part in (("tail64", digest[-8:]), ("head64", digest[:8])):
        desk = Desk(instance=instance_up(hash_of=hash_of))
        desk.take(batch(stored([digest], ids(1)), stored([A], ids(1, 4), digest)))
        assert desk.held() == {int.from_bytes(part, "big"), A}
        assert desk.room.orphaned == 0


def test_media_by_any_of_their_names() -> None:
    for medium, tier in (
        ("gpu", GPU),
        (None, GPU),
        ("", GPU),
        ("cpu", CPU),
        ("CPU_PINNED", CPU),
        ("STORAGE", STORAGE),
        ("FS", STORAGE),
        ("OBJ", EXTERNAL),
        ("EXTERNAL", EXTERNAL),
    ):
        desk = Desk()
        desk.take(batch(stored([A], ids(1), medium=medium)))
        assert desk.held(tier) == {A}, medium
    desk.take(batch(stored([B], ids(1), medium="UCM"), removed([A], "nonsense")))
    assert desk.bad["medium"] == 2


# ---------------------------------------------------------------- rows


def test_row_03_a_short_span_of_tokens_gives_whole_blocks_only_and_a_long_one_none() -> None:
    desk = Desk()
    desk.take(batch(stored([A, B, C], ids(3)[:-1])))
    assert desk.held() == {A, B}
    desk.take(batch(stored([C, D], ids(3, 40)), stored([D], [1, 2])))
    assert desk.held() == {A, B}
    assert desk.bad["token_span"] == 3


def test_row_04_a_block_before_its_parent_is_counted_and_found_by_its_tokens_when_that_comes() -> None:
    desk = Desk()
    keys = token_keys(ROOT, packed(ids(4)))
    desk.take(batch(stored([D], ids(4)[12:], C)))
    desk.take(batch(stored([B, C], ids(4)[4:12], A)))
    own = desk.member.own
    assert (desk.room.orphans, desk.room.orphaned) == (3, 3)
    assert [own.hash_of(key) for key in keys] == [None] * 4
    desk.take(batch(stored([A], ids(4)[:4])))
    assert [own.hash_of(key) for key in keys] == [A, B, C, D]
    assert desk.room.orphans == 0


def test_row_04_what_waits_is_bounded_and_goes_with_its_blocks() -> None:
    desk = Desk(limits=IngestLimits(orphans_per_engine_max=4))
    desk.take(batch(stored([A, B], ids(2), 2**50), stored([C, D], ids(2), 2**51)))
    assert desk.room.orphans == 4
    more = names(4, 100)
    desk.take(batch(stored(more[:2], ids(2), 2**52)))
    assert desk.room.orphans_dropped == 2
    desk.take(batch(removed([A, B]), stored(more[2:], ids(2), 2**53)))
    assert (desk.room.orphans, desk.room.orphans_dropped) == (4, 2), "those that went made room"
    desk.take(batch(CLEARED))
    assert (desk.room.orphans, desk.room.entries) == (0, 0)


def test_row_04_an_orphan_that_went_is_not_found_when_its_parent_comes() -> None:
    desk = Desk()
    desk.take(batch(stored([B, C], ids(3)[4:], A), removed([B]), stored([A], ids(1))))
    keys = token_keys(ROOT, packed(ids(3)))
    assert [desk.member.own.hash_of(key) for key in keys] == [A, None, C]


def test_row_05_a_block_that_is_there_twice_goes_with_its_last_copy() -> None:
    desk = Desk()
    desk.take(batch(stored([A, B], ids(2)), stored([A, B], ids(2)), stored([A], ids(1), medium="CPU")))
    desk.take(batch(removed([A]), removed([A], "CPU")))
    assert desk.everything() == [{A, B}, set(), set(), set()]
    desk.take(batch(removed([A]), removed([B]), removed([B])))
    assert desk.everything() == [set()] * 4
    desk.take(batch(removed([A]), stored([A], ids(1))))
    assert desk.held() == {A}, "a removal too many takes nothing from later"


def test_row_12_all_cleared_empties_every_tier_and_is_told_on() -> None:
    desk = Desk()
    desk.take(
        batch(stored([A], ids(1)), stored([B], ids(1, 9), medium="STORAGE"), CLEARED, stored([C], ids(1)))
    )
    assert desk.everything() == [{C}, set(), set(), set()]
    assert desk.told_cleared == [("i0", "e0")]


def test_row_16_another_block_size_is_counted_and_left_out() -> None:
    desk = Desk()
    desk.take(
        batch(stored([A], ids(1), block_size=8), stored([B], [1, 2], block_size=2), stored([C], ids(1)))
    )
    assert desk.held() == {C}
    assert desk.bad["block_size"] == 2


def test_row_17_only_the_first_group_that_makes_prefixes_counts() -> None:
    def of(group: int, kind: str | None, medium: str = "GPU") -> dict[str, Any]:
        return stored([A], ids(1), medium=medium, group_idx=group, kv_cache_spec_kind=kind)

    desk = Desk()
    desk.take(batch(of(0, "sliding_window"), of(1, "mamba"), of(2, None)))
    assert desk.held() == set()
    desk.take(batch(of(3, "full_attention"), of(4, "full_attention"), of(0, "sliding_window")))
    assert desk.held() == {A}
    desk.take(batch(removed([A], group_idx=0), removed([A], group_idx=4), removed([A], group_idx=1)))
    assert desk.held() == {A}, "another group's copy went"
    desk.take(batch(removed([A], group_idx=3)))
    assert desk.held() == set()
    assert desk.bad["group"] == 8


def test_row_17_a_group_that_turns_out_to_come_before_the_one_that_counted() -> None:
    desk = Desk()
    desk.take(batch(stored([A], ids(1), group_idx=2, kv_cache_spec_kind="full_attention")))
    desk.take(batch(stored([B], ids(1), group_idx=1, kv_cache_spec_kind="mla_attention")))
    assert desk.held() == {B}


def test_row_18_a_batch_of_another_rank_is_left_out() -> None:
    desk = Desk(up=engine_up(rank=1))
    desk.take(batch(stored([A], ids(1)), rank=0))
    desk.take(batch(stored([B], ids(1)), rank=1))
    desk.take(batch(stored([C], ids(1)), rank=None))
    assert desk.held() == {B, C}
    assert desk.bad["rank"] == 1


def test_row_19_the_same_tokens_for_two_adapters_and_the_base_are_three_blocks() -> None:
    desk = Desk()
    desk.take(batch(stored([A], ids(1))))
    desk.take(batch(stored([B], ids(1), lora_id=1, lora_name="one", extra_keys=[["one"]])))
    desk.take(batch(stored([C], ids(1), lora_id=2, lora_name="two", extra_keys=[["two"]])))
    desk.take(batch(stored([D], ids(1), lora_id=1)))
    found = [
        desk.member.own.hash_of(token_keys(token_root(lora), packed(ids(1)))[0])
        for lora in ("", "one", "two", "1")
    ]
    assert found == [A, B, C, None], "a number is no name"


def test_row_20_the_same_tokens_with_another_salt_never_match() -> None:
    desk = Desk()
    desk.take(batch(stored([A, B], ids(2), extra_keys=[["acme"], None])))
    desk.take(batch(stored([C], ids(1), cache_salt="zeta")))
    desk.take(batch(stored([D], ids(1), lora_name="one", extra_keys=[["one", "acme"]])))

    def by(lora: str, salt: str) -> list[int | None]:
        return [desk.member.own.hash_of(key) for key in token_keys(token_root(lora, salt), packed(ids(2)))]

    assert by("", "") == [None, None]
    assert by("", "acme") == [A, B]
    assert by("", "zeta") == [C, None]
    assert by("one", "acme") == [D, None]
    assert by("one", "") == [None, None]


def test_images_and_embeddings_are_never_met_by_token_ids_alone() -> None:
    desk = Desk()
    image = ["an image", 0]
    desk.take(batch(stored([A, B], ids(2), extra_keys=[None, [image]])))
    desk.take(
        batch(
            stored([C], ids(1, 50), extra_keys=[[image, "salt"]]),
            stored([D], ids(1, 90), extra_keys=[[b"digest"]]),
        )
    )
    own = desk.member.own
    assert [own.hash_of(key) for key in token_keys(ROOT, packed(ids(2)))] == [A, None]
    for tokens in (ids(1, 50), ids(1, 90)):
        assert own.hash_of(token_keys(ROOT, packed(tokens))[0]) is None
        assert own.hash_of(token_keys(token_root("", "salt"), packed(tokens))[0]) is None
    assert desk.held() == {A, B, C, D}


def test_a_text_among_the_extra_keys_of_a_later_block_is_no_salt() -> None:
    desk = Desk()
    desk.take(
        batch(
            stored([A, B], ids(2), extra_keys=[None, ["what"]]),
            stored([C], ids(2)[4:], A, extra_keys=[["x"]]),
        )
    )
    own = desk.member.own
    assert [own.hash_of(key) for key in token_keys(ROOT, packed(ids(2)))] == [A, None]
    assert own.hash_of(token_keys(token_root("", "what"), packed(ids(1)))[0]) is None


def test_a_parent_of_zero_is_none() -> None:
    desk = Desk()
    desk.take(batch(stored([A], ids(1), 0)))
    assert desk.member.own.hash_of(token_keys(ROOT, packed(ids(1)))[0]) == A


def test_names_of_any_length_are_told_apart_and_not_remembered() -> None:
    desk = Desk()
    token_root.cache_clear()
    for row, end in enumerate("ab"):
        desk.take(batch(stored(names(1, row), ids(1), cache_salt="s" * 1_000 + end)))
        desk.take(batch(stored(names(1, 10 + row), ids(1), lora_name="l" * 1_000 + end)))
    assert token_root.cache_info().currsize == 0
    assert len(desk.held()) == 4
    assert desk.room.conflicts == 0
    long = "s" * 1_000 + "b"
    assert desk.member.own.hash_of(token_keys(root_of("", long), packed(ids(1)))[0]) == names(1, 1)[0]


def test_a_block_without_tokens_is_known_by_its_hash_and_by_what_another_tier_told() -> None:
    desk = Desk()
    desk.take(batch(stored([A], ids(1)), stored([A, B], [], block_size=0, medium="FS")))
    desk.take(batch(removed([A])))
    assert desk.everything() == [set(), set(), {A, B}, set()]
    assert desk.member.own.hash_of(token_keys(ROOT, packed(ids(1)))[0]) == A


def test_what_is_far_away_is_not_the_engines() -> None:
    desk = Desk()
    desk.take(batch(stored([A], ids(1), locality="REMOTE"), stored([B], ids(1), locality="LOCAL")))
    desk.take(batch(removed([B], locality="REMOTE")))
    assert desk.held() == {B}
    assert desk.bad["locality"] == 2


# ---------------------------------------------------------------- hostile


BAD_EVENTS: list[Any] = [
    None,
    7,
    "BlockStored",
    [],
    ["BlockStored"],
    ["Nonsense", 1],
    {},
    {"type": "Nonsense"},
    {"type": "BlockStored"},
    {"type": 5, "block_hashes": [A]},
    {"type": "BlockRemoved", "block_hashes": ["a"], "medium": "GPU"},
    stored([], []),
    stored([A, A], ids(2)),
    stored([A], ids(1), A),
    stored([A], ids(1), medium=5),
    stored([1.5], ids(1)),  # type: ignore[list-item]
    stored([5], ids(1)),
    stored([A], [1, 2, 3, -1]),
    stored([A], [1, 2, 3, 2**32]),
    stored([A], ["a", "b", "c", "d"]),
    stored([A], [[1], [2], [3], [4]]),
    stored([A], [[1, "x"], [2, 3], [3, 4], [4, 5]]),
    stored([A], [1, 2, 3, [4, 5]]),
    stored([A], [[1, 2], [2, 3], [7, 4], [4, 5]]),
    stored([A], ids(1), block_size=-4),
    stored([A], ids(1), block_size="4"),
    array_stored("abc", ids(1)),  # type: ignore[arg-type]
    array_stored([A], ids(1), "parent"),
    ["BlockRemoved", 5],
    ["BlockRemoved", [A], 5],
]


@pytest.mark.parametrize("event", BAD_EVENTS, ids=repr)
def test_row_28_one_bad_event_is_counted_and_takes_nothing_of_its_batch_along(event: Any) -> None:
    desk = Desk()
    desk.take(batch(stored([B], ids(1)), event, array_stored([C], ids(1, 4), B), removed([B])))
    assert desk.held() == {C}
    assert desk.bad.total() == 1
    assert desk.member.own.hash_of(token_keys(ROOT, packed(ids(2)))[1]) == C


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, 5, 0]),
        msgspec.msgpack.encode(["now", [], 0]),
        msgspec.msgpack.encode([1.0, [], "rank"]),
        b"\x93\xcb" + b"\0" * 8 + b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x93\xcb" + b"\0" * 8 + b"\x91" * 100_000 + b"\xc0",
    ],
    ids=range(11),
)
def test_what_is_no_batch_is_counted(payload: bytes) -> None:
    desk = Desk()
    desk.take(payload)
    desk.take(batch(stored([A], ids(1))))
    assert desk.bad == {"batch": 1}
    assert desk.held() == {A}


def test_strange_extra_keys_and_adapters_do_no_harm() -> None:
    desk = Desk()
    strange: list[Any] = [5, "x", [], [None], [[[]]], [{"a": 1}], [["s", "t"]], [[5]], {"a": 1}, [[b"\xff"]]]
    for row, extra in enumerate(strange):
        desk.take(batch(stored(names(1, row), ids(1, 100 * row), extra_keys=extra)))
    desk.take(
        batch(stored(names(1, 50), ids(1), lora_id={"a": [1]}), stored(names(1, 51), ids(1), lora_id="x"))
    )
    desk.take(batch(stored(names(1, 52), ids(1), lora_name="n" * 100_000, cache_salt="s" * 100_000)))
    assert len(desk.held()) == len(strange) + 3
    assert not desk.bad
    asked = token_keys(ROOT, packed(ids(1)))[0]
    assert desk.member.own.hash_of(asked) is None


def test_noise_is_never_fatal(seed: int = 20261129) -> None:
    print(f"seed {seed}")
    random = Random(seed)
    desk = Desk()
    good = batch(
        stored([A, B], ids(2), extra_keys=[["x"], None], group_idx=0), removed([A]), array_stored([C], ids(1))
    )

    async def noise() -> None:
        for _ in range(3_000):
            spoilt = bytearray(good)
            for _ in range(random.randint(1, 4)):
                spoilt[random.randrange(len(spoilt))] = random.randrange(256)
            await desk.taking(bytes(spoilt[: random.choice((len(spoilt), random.randrange(len(spoilt))))]))

    asyncio.run(noise())
    assert desk.bad.total() > 1_000
    desk.member.own.clear()
    assert desk.room.entries == desk.room.orphans == 0


def test_a_full_house_takes_nothing_more_and_what_it_has_stays() -> None:
    desk = Desk(limits=IngestLimits(entries_per_engine_max=3))
    desk.take(batch(stored(names(3), ids(3)), stored(names(3, 10), ids(3, 50))))
    assert desk.held() == set(names(3))
    assert desk.room.refused == 3
    desk.take(batch(removed(names(3)), stored(names(3, 10), ids(3, 50))))
    assert desk.held() == set(names(3, 10))


def test_an_event_of_too_many_blocks_is_left_out() -> None:
    desk = Desk(limits=IngestLimits(event_blocks_max=8))
    desk.take(batch(stored(names(9), ids(9)), stored(names(8, 20), ids(8))))
    assert desk.held() == set(names(8, 20))
    assert desk.bad["too_large"] == 1


def test_a_long_event_gives_the_loop_back_and_is_one_chain_all_the_same() -> None:
    desk = Desk(limits=IngestLimits(slice_blocks=8))

    async def both() -> int:
        turns = 0
        taking = asyncio.ensure_future(desk.taking(batch(stored(names(100), ids(100)))))
        while not taking.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(both()) > 10
    assert desk.member.own.hash_of(token_keys(ROOT, packed(ids(100)))[99]) == names(100)[99]


def test_told_otherwise_the_first_content_stays() -> None:
    desk = Desk()
    desk.take(batch(stored([A], ids(1)), stored([A], ids(1, 50))))
    assert desk.room.conflicts == 1
    assert desk.member.own.hash_of(token_keys(ROOT, packed(ids(1)))[0]) == A
    assert desk.member.own.hash_of(token_keys(ROOT, packed(ids(1, 50)))[0]) is None
