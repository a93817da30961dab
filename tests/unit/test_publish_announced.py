"""The map of what is announced: against a plain model, and what it costs."""

import tracemalloc
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from metaservice.core.windows import EXTERNAL, Gone, Run, Window
from metaservice.publish import announced as module
from metaservice.publish.announced import CHUNK_BLOCKS_MAX, Announced
from metaservice.wire.tokens import pack_tokens

KEY = 16
POOL = (EXTERNAL, "")


def key(number: int) -> bytes:
    return number.to_bytes(KEY, "big")


def tokens(number: int) -> bytes:
    """Of one or two bytes a token, so that blocks of a run differ in length."""
    return pack_tokens([number % 300 + at for at in range(4)])


def run(numbers: list[int], parent: int | None = None, node: str = "", medium: str = EXTERNAL) -> Run:
    above = None if parent is None else key(parent)
    return Run("i", medium, node, "", "s", above, KEY, b"".join(map(key, numbers)), [*map(tokens, numbers)])


def gone(numbers: list[int], node: str = "", medium: str = EXTERNAL) -> Gone:
    return Gone("i", medium, node, KEY, b"".join(map(key, numbers)))


def window(number: int, stored: list[Run], removed: list[Gone], restated: list[Run] | None = None) -> Window:
    return Window(0, number, number, number, stored, restated or [], removed, [])


def held(
    announced: Announced, node: str = "", up_to: int | None = None
) -> dict[bytes, tuple[bytes | None, bytes]]:
    """key -> (parent, tokens). A child never comes before its parent, no block comes twice."""
    found: dict[bytes, tuple[bytes | None, bytes]] = {}
    for one in announced.runs("i", node, up_to):
        parent = one.parent
        for at, packed in enumerate(one.tokens):
            name = one.keys[at * KEY : (at + 1) * KEY]
            assert name not in found
            assert parent is None or parent in found or not announced.find("i", [parent])
            found[name] = parent, packed
            parent = name
        assert len(one.tokens) * KEY == len(one.keys)
    return found


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_it_holds_what_was_stored_and_not_removed(random: Random, steps: int) -> None:
    announced = Announced()
    model: dict[int, int | None] = {}
    fresh = 0
    for number in range(steps):
        removed: list[int] = []
        for _ in range(random.choice((0, 0, 1, 5))):
            leaves = sorted(set(model) - set(model.values()))
            if leaves:
                leaf = random.choice(leaves)
                del model[leaf]
                removed.append(leaf)
        parent = random.choice([None, *model])
        numbers = list(range(fresh, fresh + random.randrange(0, 12)))
        fresh += len(numbers)
        stored = [run(numbers, parent)] if numbers else []
        for name, above in zip(numbers, [parent, *numbers], strict=False):
            model[name] = above
        old = random.sample(sorted(model), min(len(model), 3))
        restated = [run([one], model[one]) for one in old]
        announced.apply(window(number, stored, [gone(removed)] if removed else [], restated))
    wanted = {
        key(name): (None if above is None else key(above), tokens(name)) for name, above in model.items()
    }
    assert held(announced) == wanted
    assert announced.blocks("i") == len(model)
    gone_keys = {key(name) for name in range(fresh)} - wanted.keys()
    told = b"".join(one.keys for one in announced.gone("i", ""))
    assert {told[at : at + KEY] for at in range(0, len(told), KEY)} == gone_keys


def test_children_that_came_before_their_parents_are_told_after_them() -> None:
    announced = Announced()
    chain = list(range(2_000))
    order = chain.copy()
    Random(3).shuffle(order)
    announced.standing(0, [run([one], one - 1 if one else None) for one in order], 7)
    assert list(held(announced)) == [key(one) for one in chain]


def test_a_parent_on_another_medium_of_the_node_comes_first() -> None:
    announced = Announced()
    announced.standing(0, [run([2], 1, "n", "CPU"), run([1], None, "n", "STORAGE")], 7)
    assert [one.medium for one in announced.runs("i", "n")] == ["STORAGE", "CPU"]
    assert list(announced.runs("i", "")) == []


def test_keys_that_go_round_in_a_circle_are_told_once() -> None:
    announced = Announced()
    announced.standing(0, [run([1], 2), run([2], 3), run([3], 1), run([4], 4)], 7)
    assert sum(len(one.tokens) for one in announced.runs("i", "")) == 4


def test_what_came_later_is_left_out() -> None:
    announced = Announced()
    announced.apply(window(5, [run([1, 2])], []))
    walk = announced.runs("i", "", up_to=5)
    announced.apply(window(6, [run([3], 2)], [], [run([1])]))
    assert list(held(announced, up_to=5)) == [key(1), key(2)]
    assert [one.keys for one in walk] == [key(1) + key(2)]


def test_long_runs_and_runs_that_repeat_themselves() -> None:
    announced = Announced()
    long = list(range(3 * CHUNK_BLOCKS_MAX + 5))
    announced.apply(window(1, [run(long)], []))
    assert list(held(announced)) == [key(one) for one in long]
    announced.apply(window(2, [run([9_000, 9_001, 9_000, 5, 9_002])], []))
    assert announced.blocks("i") == len(long) + 3
    announced.apply(window(3, [], [gone([9_000, 9_001, 9_002, *long])]))
    assert announced.blocks("i") == 0
    assert held(announced) == {}


def test_tombstones_are_bounded_and_end_when_a_block_comes_back() -> None:
    announced = Announced()
    announced.admit(0, "i")
    announced.tombstones(0, [gone(list(range(module.TOMBSTONES_MAX + 100)))])
    assert announced.tombstone_count == module.TOMBSTONES_MAX
    oldest = next(iter(announced.gone("i", ""))).keys[:KEY]
    assert oldest == key(100)
    announced.apply(window(1, [run(list(range(200, 300)))], []))
    assert announced.tombstone_count == module.TOMBSTONES_MAX - 100
    announced.forget_instance("i")
    assert announced.tombstone_count == 0


def test_an_instance_that_is_announced_no_more_takes_no_room() -> None:
    announced = Announced()
    announced.admit(0, "i")
    announced.tombstones(0, [gone([1, 2])])
    elsewhere = [Gone("left", EXTERNAL, "", KEY, key(number)) for number in range(100)]
    announced.tombstones(0, elsewhere)
    announced.apply(Window(0, 1, 1, 1, [], [], [], elsewhere))
    assert announced.tombstone_count == 2
    assert set(announced.instances) == {"i"}


def test_an_instance_that_moved_is_the_new_shards_alone() -> None:
    announced = Announced()
    announced.apply(window(1, [run([1, 2])], []))
    announced.admit(5, "i")
    announced.standing(5, [run([3])], 1)
    announced.apply(window(2, [run([4], 2)], [gone([3])]))
    assert list(held(announced)) == [key(3)]
    announced.forget(0)
    assert announced.blocks("i") == 1


def test_one_place_does_not_push_out_what_others_remember() -> None:
    announced = Announced()
    announced.admit(0, "i")
    announced.tombstones(0, [gone(list(range(module.TOMBSTONES_MAX)))])
    announced.admit(0, "j")
    announced.tombstones(0, [Gone("j", EXTERNAL, "", KEY, b"".join(map(key, range(50))))])
    assert announced.tombstone_count == module.TOMBSTONES_MAX
    assert sum(len(one.keys) for one in announced.gone("j", "")) == 50 * KEY
    assert announced.forgotten == 50


def test_find_says_where_each_block_is_up_to_the_first_that_is_nowhere() -> None:
    announced = Announced()
    announced.standing(0, [run([1, 2, 3]), run([2], 1, "n", "CPU"), run([5], 4)], 7)
    found = announced.find("i", [key(1), key(2), key(4), key(5)])
    assert [set(one) for one in found] == [{POOL}, {POOL, ("CPU", "n")}]
    assert announced.find("j", [key(1)]) == []


def test_only_one_shard_is_forgotten() -> None:
    announced = Announced()
    announced.standing(0, [run([1])], 7)
    announced.standing(1, [Run("j", EXTERNAL, "", "", "", None, KEY, key(1), [tokens(1)])], 7)
    announced.tombstones(1, [Gone("j", EXTERNAL, "", KEY, key(2))])
    announced.forget(1)
    assert announced.blocks("i") == 1
    assert announced.blocks("j") == announced.tombstone_count == 0


def test_a_block_costs_little() -> None:
    """In runs of 64 and alone; 32-byte keys, 16 tokens of two bytes."""
    for length, limit_bytes in ((64, 300), (1, 500)):
        announced = Announced()
        blocks = 6_400
        tracemalloc.start()
        for first in range(0, blocks, length):
            numbers = range(first, first + length)
            keys = b"".join(number.to_bytes(32, "big") for number in numbers)
            packed = [pack_tokens([300 + number % 100] * 16) for number in numbers]
            announced.standing(0, [Run("i", EXTERNAL, "", "", "", None, 32, keys, packed)], 7)
        del keys, packed
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert announced.blocks("i") == blocks
        assert held_bytes / blocks < limit_bytes
