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
    DELETING,
    GONE,
    SERVING,
    WRITING,
    BlockIndex,
    Table,
    live_of,
    packed_slots,
    span_of,
    split,
    unpacked_slots,
)
from tests.contract.index_model import ModelIndex, ModelTable, model_tables

FACTORIES: list[tuple[Callable[[], BlockIndex], type[Table]]] = [(BlockIndex, Table)]
STEPS = 60
KEYS = [bytes([letter]) * 16 for letter in range(40)]


class Pair:
    """An index under test and the naive one, given the same calls; `compare` after each."""

    def __init__(self, factory: tuple[Callable[[], BlockIndex], type[Table]]) -> None:
        make_index, make_table = factory
        self.index = make_index()
        self.model = ModelIndex()
        self.models = model_tables()
        self.tables: dict[int, Table] = {}
        for one in self.models:
            primary = self.tables[one.primary.number] if one.primary is not None else None
            table = make_table(one.number, f"i{one.number // 4}", one.group, one.parts, primary)
            self.tables[one.number] = self.index.tables[one.number] = table
        self.used_ms = 1_000
        self.session = 0

    def table(self, model: ModelTable) -> Table:
        return self.tables[model.number]

    # -- calls

    def reserve(
        self,
        model: ModelTable,
        keys: list[bytes],
        parents: list[bytes | None],
        storages: list[int] | None = None,
    ) -> list[int]:
        self.session += 1
        storages = storages or [7] * len(keys)
        slots = self.index.free_slots(len(keys))
        assert slots.tolist() == self.model.next_slots(len(keys))
        generations = self.index.next_generations(slots)
        assert generations.tolist() == [self.model.next_generation(slot) for slot in slots]
        self.index.reserve(
            self.table(model), slots, generations, array("H", storages), keys, parents, self.session
        )
        self.model.reserve(model, slots.tolist(), storages, keys, parents, self.session)
        return slots.tolist()

    def record(self, model: ModelTable, parts_of: dict[int, set[int]], *, whole: bool) -> None:
        """Record parts of slots of one table; `whole`: all parts of all of them, by the short form."""
        count = len(model.parts)
        sums, masks = array("Q"), array("Q")
        for slot, parts in parts_of.items():
            wanted = range(count) if whole else parts
            sums.extend(slot * 100 + part + 1 if part in wanted else 0 for part in range(count))
            masks.append(sum(1 << part for part in wanted))
            for part in wanted:
                self.model.record(slot, part, slot * 100 + part + 1)
        slots = array("I", parts_of)
        self.index.record_parts(slots, None if whole else masks, sums.tobytes(), self.table(model))

    def publish(self, slots: list[int]) -> None:
        self.index.publish(array("I", slots))
        self.model.publish(slots)

    def reveal(self, slots: list[int]) -> None:
        self.index.reveal(array("I", slots))
        self.model.reveal(slots)

    def serve(self, slots: list[int]) -> None:
        self.publish(slots)
        self.reveal(slots)

    def retire(self, slots: list[int]) -> None:
        rows = {slot: self.model.rows[slot] for slot in slots}
        uppers = {slot: self.model.live(row.table.home, row.needs() or b"") for slot, row in rows.items()}
        leaves = self.index.retire(array("I", slots))
        expected = self.model.retire(slots)
        assert {slot for slot in leaves if self.index.state[slot] != DELETING} == expected
        for slot, upper in uppers.items():
            if upper is not None and upper not in rows:
                # A prefix was used when what hangs on it was: it must not look colder than that.
                assert self.index.used_ms[upper] >= self.index.used_ms[slot]

    def release(self, slots: list[int]) -> None:
        self.index.release(array("I", slots))
        self.model.release(slots)

    def touch(self, slot: int) -> None:
        self.used_ms += 1
        self.index.used_ms[slot] = self.used_ms

    # -- comparison

    def compare(self, rng: random.Random) -> None:
        index, model = self.index, self.model
        assert len(index) == len(model.generations)
        assert index.deleting_count == sum(model.deleting(table) for table in self.models)
        for slot, generation in enumerate(model.generations):
            assert index.generation[slot] == generation
            row = model.rows.get(slot)
            if row is None:
                assert index.state[slot] == GONE and not index.visible[slot]
                continue
            assert index.state[slot] == row.state
            assert index.is_deleting(slot) == (row.state == DELETING)
            assert (index.key[slot], index.parent[slot]) == (row.key, row.parent)
            assert (index.table[slot], index.storage[slot]) == (row.table.number, row.storage)
            assert (index.session[slot], bool(index.visible[slot])) == (row.session, row.visible)
            assert index.children[slot] == model.children(slot)
            assert index.done[slot] == sum(1 << part for part in row.sums)
            sums = index.sums[slot] or bytes(8 * len(row.table.parts))
            assert array("Q", sums).tolist() == [
                row.sums.get(part, 0) for part in range(len(row.table.parts))
            ]
        for one in self.models:
            self._compare_table(one, rng)

    def _compare_table(self, one: ModelTable, rng: random.Random) -> None:
        index, model, table = self.index, self.model, self.table(one)
        assert table.pending == model.pending(one)
        assert table.blocks_deleting == model.deleting(one)
        keys = rng.sample(KEYS, len(KEYS))
        found = index.find(table, keys)
        assert found == [model.live(one, key) for key in keys]
        assert table.slots == {key: slot for key, slot in zip(keys, found, strict=True) if slot is not None}
        slots, flags = index.visible_of(table, keys)
        assert slots == found
        assert [bool(flag) for flag in flags] == [model.visible(one, key) is not None for key in keys]
        for start in range(0, 30, 7):
            for parent in (None, KEYS[start - 1], b"x" * 16):
                run = KEYS[start : start + rng.randint(1, 10)]
                prefix, span = index.visible_prefix(table, run, parent)
                assert prefix == model.prefix(one, run, parent)
                assert span is None or prefix == list(range(*span))
                self._compare_places(prefix, span)

    def _compare_places(self, slots: list[int], span: tuple[int, int] | None) -> None:
        """The same whether or not the slots are known to be one run."""
        rows = [self.model.rows[slot] for slot in slots]
        sums = b"".join(self.index.sums[slot] for slot in slots)
        for known in {None, span}:
            generations, storages, checksums = self.index.places(slots, known)
            assert generations.tolist() == [self.model.generations[slot] for slot in slots]
            assert storages.tolist() == [row.storage for row in rows]
            assert checksums == sums


@pytest.fixture(params=FACTORIES, ids=lambda factory: f"{factory[0].__module__}.{factory[0].__name__}")
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


class Walk:
    """A random life of a pair."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.rng = random.Random(seed)

    def slots(self, *states: int, at_least: int = 1) -> list[int]:
        """Some slots in these states, in ascending or random order."""
        rows = self.pair.model.rows
        found = [slot for slot, row in rows.items() if row.state in states]
        if len(found) < at_least:
            return []
        picked = self.rng.sample(found, self.rng.randint(1, min(len(found), 12)))
        return sorted(picked) if self.rng.random() < 0.5 else picked

    def reserve(self) -> None:
        model = self.rng.choice(self.pair.models)
        start, count = self.rng.randrange(len(KEYS)), self.rng.randint(1, 9)
        keys = [key for key in KEYS[start : start + count] if self.pair.model.live(model, key) is None]
        if self.rng.random() < 0.3:
            keys = keys[:: self.rng.randint(1, 3)]
        if not keys:
            return
        parents: list[bytes | None] = [KEYS[at - 1] if (at := KEYS.index(key)) else None for key in keys]
        if self.rng.random() < 0.2:  # another tree over the same keys: children of something else
            parents = [None if self.rng.random() < 0.5 else self._elder(key) for key in keys]
        self.pair.reserve(model, keys, parents, [self.rng.randint(1, 3) for _ in keys])

    def _elder(self, key: bytes) -> bytes | None:
        at = KEYS.index(key)
        return KEYS[self.rng.randrange(at)] if at else None

    def record(self) -> None:
        slots = self.slots(WRITING)
        by_table: dict[int, list[int]] = {}
        for slot in slots:
            by_table.setdefault(self.pair.model.rows[slot].table.number, []).append(slot)
        for number, group in by_table.items():
            model = next(one for one in self.pair.models if one.number == number)
            parts = range(len(model.parts))
            fresh = not any(self.pair.model.rows[slot].sums for slot in group)
            wanted = {
                slot: {
                    part
                    for part in parts
                    if part not in self.pair.model.rows[slot].sums and self.rng.random() < 0.6
                }
                for slot in group
            }
            self.pair.record(model, wanted, whole=fresh and self.rng.random() < 0.5)

    def step(self) -> None:
        pair, rng = self.pair, self.rng
        act = rng.choice(("reserve", "reserve", "record", "publish", "reveal", "retire", "release", "touch"))
        if act == "reserve":
            self.reserve()
        elif act == "record":
            self.record()
        elif act == "publish":
            pair.publish(self.slots(WRITING))
        elif act == "reveal":
            pair.reveal(self.slots(SERVING, DELETING))
        elif act == "retire":
            pair.retire(self.slots(WRITING, SERVING))
        elif act == "release":
            pair.release(self.slots(DELETING))
        else:
            for slot in self.slots(SERVING):
                pair.touch(slot)


@pytest.mark.parametrize("seed", range(12))
def test_random_lives_equal_the_naive_table(pair: Pair, seed: int) -> None:
    walk = Walk(pair, seed)
    for _ in range(STEPS):
        walk.step()
        pair.compare(walk.rng)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1_000, 1_200))
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
