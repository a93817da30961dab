"""What any block table has to be: held, call by call, against a naive one made of dicts.

Another implementation joins by one entry in `FACTORIES`. Columns are read by index only, so that a native
one may keep them as it likes.
"""

import random
from array import array
from collections.abc import Callable
from itertools import pairwise

import pytest

from metaservice.core.index import (
    BlockIndex,
    Table,
    live_of,
    packed_slots,
    span_of,
    split,
    unpacked_slots,
)
from tests.contract.index_pair import KEYS, Factory, Pair, Walk

FACTORIES: list[Factory] = [(BlockIndex, Table)]
STEPS = 60


@pytest.fixture(params=FACTORIES, ids=lambda factory: f"{factory[0].__module__}.{factory[0].__name__}")
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


@pytest.mark.parametrize("seed", range(8))
def test_random_lives_equal_the_naive_table(pair: Pair, seed: int) -> None:
    walk = Walk(pair, seed)
    for _ in range(STEPS):
        walk.step()
        pair.compare(walk.rng)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1_000, 1_060))
def test_many_random_lives_equal_the_naive_table(pair: Pair, seed: int) -> None:
    walk = Walk(pair, seed)
    for _ in range(4 * STEPS):
        walk.step()
        pair.compare(walk.rng)


# --- rules, one by one ---------------------------------------------------------------------------------


def chain_of(keys: list[bytes]) -> list[bytes | None]:
    """The parents of a chain from a root."""
    return [None, *keys[:-1]]


def test_what_is_published_is_hidden_until_it_is_revealed(pair: Pair) -> None:
    full = pair.models[0]
    slots = pair.reserve(full, KEYS[:3], chain_of(KEYS[:3]))
    assert pair.index.visible_prefix(pair.table(full), KEYS[:3], None)[0] == []
    pair.publish(slots)
    assert pair.index.visible_prefix(pair.table(full), KEYS[:3], None)[0] == []
    pair.reveal(slots[:2])
    assert pair.index.visible_prefix(pair.table(full), KEYS[:3], None)[0] == slots[:2]


def test_what_was_retired_before_it_was_revealed_stays_hidden(pair: Pair) -> None:
    full = pair.models[0]
    slots = pair.reserve(full, KEYS[:2], chain_of(KEYS[:2]))
    pair.publish(slots)
    pair.retire(slots[1:])
    pair.reveal(slots)
    pair.compare(random.Random(1))
    assert pair.index.visible_prefix(pair.table(full), KEYS[:2], None)[0] == slots[:1]


def test_a_slot_used_again_has_the_next_generation_and_nothing_of_the_block_before(pair: Pair) -> None:
    full = pair.models[0]
    slots = pair.reserve(full, KEYS[:3], chain_of(KEYS[:3]))
    pair.record(full, {slot: {0, 1} for slot in slots}, whole=True)
    pair.serve(slots)
    pair.retire([slots[1]])
    pair.release([slots[1]])
    again = pair.reserve(pair.models[3], [KEYS[9]], [None])
    assert again == [slots[1]]
    assert pair.index.generation[again[0]] == 2
    assert pair.index.done[again[0]] == 0
    pair.compare(random.Random(1))


def test_last_freed_is_first_used(pair: Pair) -> None:
    full = pair.models[0]
    slots = pair.reserve(full, KEYS[:5], chain_of(KEYS[:5]))
    pair.retire(slots)
    pair.release([slots[3], slots[0], slots[4]])
    assert pair.index.free_slots(2).tolist() == [slots[4], slots[0]]
    assert pair.reserve(full, KEYS[10:15], chain_of(KEYS[10:15])) == [slots[4], slots[0], slots[3], 5, 6]
    pair.compare(random.Random(1))


def test_a_deleting_location_no_longer_stands_in_the_way_of_its_key(pair: Pair) -> None:
    full = pair.models[0]
    old = pair.reserve(full, KEYS[:1], [None])
    pair.serve(old)
    pair.retire(old)
    new = pair.reserve(full, KEYS[:1], [None])
    pair.serve(new)
    pair.compare(random.Random(1))
    pair.release(old)
    pair.compare(random.Random(1))
    assert pair.index.find(pair.table(full), KEYS[:1]) == new


def test_a_prefix_needs_the_recorded_parents(pair: Pair) -> None:
    full = pair.models[0]
    pair.serve(pair.reserve(full, [KEYS[0], KEYS[1], KEYS[2]], [None, KEYS[0], KEYS[5]]))
    table = pair.table(full)

    def prefix(keys: list[bytes], parent: bytes | None) -> list[int]:
        return pair.index.visible_prefix(table, keys, parent)[0]

    assert prefix(KEYS[:3], None) == [0, 1]
    assert prefix(KEYS[1:3], KEYS[0]) == [1]
    assert prefix(KEYS[1:3], None) == []
    assert prefix([KEYS[2]], KEYS[5]) == [2]
    assert prefix([], None) == []


def test_children_that_come_before_their_parent_are_adopted(pair: Pair) -> None:
    full = pair.models[0]
    pair.reserve(full, [KEYS[1], KEYS[2]], [KEYS[0], KEYS[0]])
    assert pair.table(full).pending == {KEYS[0]: 2}
    [parent] = pair.reserve(full, [KEYS[0]], [None])
    assert (pair.index.children[parent], pair.table(full).pending) == (2, {})
    pair.compare(random.Random(1))


def test_children_outlive_a_retired_parent_and_are_adopted_by_its_successor(pair: Pair) -> None:
    full = pair.models[0]
    slots = pair.reserve(full, KEYS[:2], chain_of(KEYS[:2]))
    pair.retire(slots[:1])
    assert pair.table(full).pending == {KEYS[0]: 1}
    [again] = pair.reserve(full, KEYS[:1], [None])
    assert pair.index.children[again] == 1
    pair.compare(random.Random(1))


def test_blocks_of_other_groups_hang_on_the_primary_block_of_their_key(pair: Pair) -> None:
    full, window, state = pair.models[:3]
    slots = pair.reserve(full, KEYS[:2], chain_of(KEYS[:2]))
    states = pair.reserve(state, [KEYS[1]], [KEYS[0]])
    windows = pair.reserve(window, KEYS[:2], chain_of(KEYS[:2]))
    assert [pair.index.children[slot] for slot in slots] == [2, 2]
    assert not any(pair.index.children[slot] for slot in states + windows)
    pair.retire(windows)
    pair.retire(states)
    assert [pair.index.children[slot] for slot in slots] == [1, 0]
    pair.compare(random.Random(1))


def test_a_parent_is_as_recently_used_as_its_last_child(pair: Pair) -> None:
    full = pair.models[0]
    slots = pair.reserve(full, KEYS[:3], chain_of(KEYS[:3]))
    pair.serve(slots)
    pair.touch(slots[2])
    pair.retire([slots[2]])
    assert pair.index.used_ms[slots[1]] == pair.used_ms
    pair.retire([slots[1]])
    assert pair.index.used_ms[slots[0]] == pair.used_ms


def test_a_whole_chain_may_go_at_once_in_any_order(pair: Pair) -> None:
    full = pair.models[0]
    for order in (list(range(6)), [5, 4, 3, 2, 1, 0], [2, 5, 0, 3, 1, 4]):
        slots = pair.reserve(full, KEYS[:6], chain_of(KEYS[:6]))
        pair.serve(slots)
        pair.retire([slots[at] for at in order])
        pair.compare(random.Random(1))
        pair.release(slots)
    assert pair.table(full).pending == {}


def test_a_storage_loses_all_that_it_has_in_one_step_and_nothing_else(pair: Pair) -> None:
    full, swa = pair.models[:2]
    kept = pair.reserve(full, KEYS[:2], [None, KEYS[0]], [1, 1])
    lost = pair.reserve(full, KEYS[2:5], [KEYS[1], KEYS[2], KEYS[3]], [2, 2, 2])
    aside = pair.reserve(swa, KEYS[1:3], [KEYS[0], KEYS[1]], [2, 1])
    pair.serve(kept)
    pair.serve(lost[:2])
    pair.retire(lost[1:2])
    assert pair.index.in_storage(2).tolist() == [*lost, aside[0]]
    pair.drop(2)
    assert pair.index.in_storage(1).tolist() == [*kept, aside[1]]
    assert pair.index.children[kept[1]] == 0 and pair.table(full).pending == {KEYS[2]: 1}
    pair.compare(random.Random(0))
    again = pair.reserve(full, KEYS[2:4], [KEYS[1], KEYS[2]], [2, 2])
    assert set(again) < {*lost, *aside}
    pair.compare(random.Random(0))
    pair.drop(9)
    assert pair.index.deleting_count == 0


def test_runs_and_scattered_slots_are_the_same(pair: Pair) -> None:
    """Ascending runs may take a shorter way; what comes of it must not differ."""
    full = pair.models[3]
    slots = pair.reserve(full, KEYS[:8], chain_of(KEYS[:8]))
    shuffled = [slots[at] for at in (3, 0, 7, 1, 2, 6, 5, 4)]
    pair.record(full, {slot: {0} for slot in slots}, whole=True)
    pair.serve(shuffled)
    pair.compare(random.Random(1))
    pair.retire(shuffled)
    pair.release(shuffled)
    assert any(second < first for first, second in pairwise(pair.model.next_slots(8)))
    again = pair.reserve(full, KEYS[:8], chain_of(KEYS[:8]))
    pair.record(full, {slot: {0} for slot in again}, whole=True)
    pair.serve(again)
    pair.compare(random.Random(1))


def test_parts_come_one_by_one_and_keep_their_checksums(pair: Pair) -> None:
    window = pair.models[1]
    slots = pair.reserve(window, KEYS[:2], chain_of(KEYS[:2]))
    pair.record(window, {slots[0]: {1}, slots[1]: set()}, whole=False)
    pair.compare(random.Random(1))
    pair.record(window, {slots[0]: {0, 2}, slots[1]: {2}}, whole=False)
    pair.compare(random.Random(1))
    assert pair.index.done[slots[0]] == pair.table(window).full_mask


def test_sizes_of_a_table_are_the_sum_of_its_parts(pair: Pair) -> None:
    assert [pair.table(model).size_bytes for model in pair.models] == [200, 45, 7, 50]


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda pair, slots: pair.index.publish(array("I", slots[1:3])),
        lambda pair, slots: pair.index.publish(array("I", slots[3:])),
        lambda pair, slots: pair.index.retire(array("I", slots[3:])),
        lambda pair, slots: pair.index.release(array("I", slots[:1])),
        lambda pair, slots: pair.index.release(array("I", slots[2:3])),
        lambda pair, slots: pair.index.drop(array("I", (pair.gone(),))),
        lambda pair, slots: pair.reserve(pair.models[0], KEYS[:1], [None]),
        lambda pair, slots: pair.index.reserve(
            pair.table(pair.models[0]),
            array("I", slots[:1]),
            array("I", [9]),
            array("H", [1]),
            [KEYS[30]],
            [None],
            9,
        ),
    ],
    ids=[
        "publish a serving one",
        "publish a deleting one",
        "retire a deleting one",
        "release a writing one",
        "release a serving one",
        "drop a gone one",
        "reserve a key that is being written",
        "reserve a slot that is not free",
    ],
)
def test_what_the_transition_table_does_not_know_is_an_assertion(
    pair: Pair, forbidden: Callable[[Pair, list[int]], object]
) -> None:
    slots = pair.reserve(pair.models[0], KEYS[:5], chain_of(KEYS[:5]))
    pair.publish(slots[2:])
    pair.retire(slots[3:])
    with pytest.raises(AssertionError):
        forbidden(pair, slots)


def test_live_of_names_slots_that_hold_that_generation(pair: Pair) -> None:
    full = pair.models[0]
    slots = pair.reserve(full, KEYS[:3], chain_of(KEYS[:3]))
    pair.serve(slots)
    pair.retire(slots[1:])
    pair.release(slots[2:])
    none = (1 << 32) - 1
    assert live_of(pair.index, [0, 1, 2, 0, 99, none], [1, 1, 1, 2, 1, 1]) == bytes([1, 1, 0, 0, 0, 0])
    pair.reserve(full, KEYS[2:3], [KEYS[1]])
    assert live_of(pair.index, [2, 2], [1, 2]) == bytes([0, 1])


@pytest.mark.parametrize(
    ("slots", "span"),
    [
        ([], None),
        ([5], (5, 6)),
        ([5, 6], (5, 7)),
        ([6, 5], None),
        ([5, 7], None),
        ([5, 5], None),
        ([3, 4, 5, 6], (3, 7)),
        ([3, 5, 4, 6], None),
        ([3, 3, 3, 6], None),
        ([6, 5, 4, 3], None),
    ],
)
def test_slots_that_lie_in_one_run_have_a_span(slots: list[int], span: tuple[int, int] | None) -> None:
    assert span_of(slots) == span
    assert span_of(array("I", slots)) == span


def test_packed_columns_split_into_rows() -> None:
    assert split(b"aabbcc", 2) == [b"aa", b"bb", b"cc"]
    assert split(b"", 16) == []


def test_columns_of_slots_pack_and_unpack() -> None:
    assert packed_slots(range(3)) == bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])
    assert unpacked_slots(packed_slots([7, 4_000_000_000])).tolist() == [7, 4_000_000_000]
