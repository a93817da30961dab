"""What engines hold, against a model that does it the slow way."""

import tracemalloc
from random import Random

import pytest

from metaservice.publish.hashes import token_keys
from metaservice.publish.holdings import Holdings, Room, SourceHoldings, Stored
from tests.unit.ingest_house import ROOT, engine_up, ids, names, packed


def source(
    *, counted: bool = True, entries: int = 10_000, orphans: int = 1_000
) -> tuple[Room, SourceHoldings]:
    room = Room(entries, entries, orphans)
    return room, SourceHoldings(room, counted)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_stores_and_removals_is_as_in_a_naive_model(seed: int, counted: bool) -> None:
    """A tree of blocks, told in runs in any order; parents may be unknown, children come first."""
    print(f"seed {seed}")
    random = Random(seed)
    room, held = source(counted=counted)
    parents: dict[int, int | None] = {}
    tokens: dict[int, list[int]] = {}
    for block in names(40):
        parents[block] = random.choice([None, *parents])
        tokens[block] = [random.randrange(3) for _ in range(4)]
    keys: dict[int, bytes] = {}
    for block, parent in parents.items():
        before = ROOT if parent is None else keys[parent]
        keys[block] = token_keys(before, packed(tokens[block]))[0]
    told = [dict.fromkeys(parents, 0) for _ in range(4)]
    for _ in range(600):
        tier = random.randrange(4)
        block = random.choice(list(parents))
        if random.random() < 0.55:
            run = [block]
            while parents[run[0]] is not None and random.random() < 0.4:
                run.insert(0, parents[run[0]])  # type: ignore[arg-type]
            held.store(tier, parents[run[0]], run, [packed(tokens[one])[0] for one in run], ROOT)
            for one in run:
                told[tier][one] = told[tier][one] + 1 if counted else 1
        else:
            held.remove(tier, [block])
            told[tier][block] = max(0, told[tier][block] - 1)
        for row, there in enumerate(told):
            assert set(held.hashes(row)) == {one for one, count in there.items() if count}, f"seed {seed}"
        assert (
            held.entries
            == room.entries
            == sum(map(bool, (count for there in told for count in there.values())))
        )
        same: dict[bytes, set[int]] = {}
        for one, key in keys.items():
            if any(there[one] for there in told):
                same.setdefault(key, set()).add(one)
        for key in keys.values():
            found = held.hash_of(key)
            assert found is None or found in same.get(key, ()), f"seed {seed}"
    order = list(parents)
    for one in order:
        held.store(0, parents[one], [one], packed(tokens[one]), ROOT)
    assert all(held.hash_of(keys[one]) is not None for one in order), "with all told, all is found"
    assert held.orphans == room.orphans == 0
    held.clear()
    assert (len(held), room.entries) == (0, 0)


def test_the_bound_of_all_sources_together_is_kept() -> None:
    room = Room(5, 4, 10)
    first, second = SourceHoldings(room, True), SourceHoldings(room, True)
    assert first.store(0, None, names(4), packed(ids(4)), ROOT) is Stored.taken
    assert second.store(0, None, names(2), packed(ids(2)), ROOT) is Stored.full
    assert second.store(0, None, names(1), packed(ids(1)), ROOT) is Stored.taken
    assert first.store(1, None, names(1), packed(ids(1)), ROOT) is Stored.full
    assert (room.entries, room.refused) == (5, 3)
    first.clear()
    assert second.store(0, None, names(3, 5), packed(ids(3, 60)), ROOT) is Stored.taken


def test_engines_come_and_go_with_what_they_hold() -> None:
    holdings = Holdings(Room(100, 100, 100))
    for engine, instance in (("a", "i0"), ("b", "i0"), ("c", "i1")):
        member = holdings.add(engine_up(engine, instance=instance), True)
        member.own.store(0, None, names(2), packed(ids(2)), ROOT)
        member.reported.store(1, None, names(1), packed(ids(1)), ROOT)
    assert {member.up.engine for member in holdings.of("i0")} == {"a", "b"}
    assert holdings.room.entries == 9
    again = holdings.add(engine_up("a", incarnation="life-2"), True)
    assert again.blocks() == dict.fromkeys(("gpu", "cpu", "storage", "external"), 0)
    assert holdings.room.entries == 6
    holdings.drop("b")
    holdings.drop("nobody")
    assert [member.up.engine for member in holdings] == ["c", "a"]
    holdings.drop("a")
    assert list(holdings.of("i0")) == []
    assert holdings.room.entries == 3


def test_two_names_of_one_content_do_not_take_each_other_along() -> None:
    _, held = source()
    first, second = names(2)
    (key,) = token_keys(ROOT, packed(ids(1)))
    held.store(0, None, [first], packed(ids(1)), ROOT)
    held.store(0, None, [second], packed(ids(1)), ROOT)
    held.remove(0, [first])
    assert held.hash_of(key) == second


def test_a_block_that_is_told_again_without_its_parent_keeps_its_content() -> None:
    room, held = source()
    first, second, third = names(3)
    keys = token_keys(ROOT, packed(ids(3)))
    held.store(0, None, [first, second], packed(ids(2)), ROOT)
    held.remove(0, [first])
    assert held.store(1, first, [second, third], packed(ids(3)[4:]), ROOT) is Stored.taken
    held.remove(0, [second])
    assert [held.hash_of(key) for key in keys] == [None, second, third]
    assert room.orphaned == 0


def test_an_entry_costs_no_more_memory_than_is_documented() -> None:
    """Just after its tables grew, when they are emptiest."""
    count = 2**17 * 2 // 3 + 64
    hashes = [2**40 + 2**33 * row for row in range(count)]
    tokens = packed(ids(64))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        _, held = source(entries=count)
        for at in range(0, count - 63, 64):
            root = token_keys(ROOT, [b"\x01%d" % at])[0]
            held.store(0, None, [one + 1 for one in hashes[at : at + 64]], tokens, root)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 150 < (after - before) / len(held) <= 250
