"""What a reporter remembers of its engine, and how it says it."""

from array import array

import msgspec
import pytest

from metaservice.client.cache_mirror import ITEM_BLOCKS_MAX, CacheMirror, Changes, Items
from metaservice.wire.schemas_events import StoredItem

A, B, C, D = (2**40 + at for at in range(4))
GPU, CPU = 0, 1


def ids(*firsts: int) -> list[int]:
    """Two token ids a block."""
    return [token for first in firsts for token in (first, first + 1)]


def stored(items: Items) -> list[tuple[str, int | None, list[int], list[int], str]]:
    """Tier, parent, hashes, token ids and salt of each stored item."""
    return [
        (item.tier, item.parent, list(array("Q", item.hashes)), list(array("I", item.token_ids)), item.salt)
        for item in items.stored
    ]


def removed(items: Items) -> list[tuple[str, list[int]]]:
    return [(item.tier, list(array("Q", item.hashes))) for item in items.removed]


def mirror_of_two() -> CacheMirror:
    mirror = CacheMirror(100)
    mirror.stored("gpu", [A, B], ids(1, 70_000), None, "", "s")
    return mirror


def test_a_chain_is_one_run_and_tiers_are_apart() -> None:
    mirror = mirror_of_two()
    mirror.stored("gpu", [C], ids(5), B, "", "s")
    mirror.stored("cpu", [A], ids(1), None, "", "s")
    mirror.stored("gpu", [D], ids(7), C, "", "other")
    changes = mirror.take()
    assert changes == Changes(False, [(A, GPU), (B, GPU), (C, GPU), (A, CPU), (D, GPU)])
    assert stored(mirror.items(changes.told, 10_000, 10**9)) == [
        ("gpu", None, [A, B, C], ids(1, 70_000, 5), "s"),
        ("cpu", None, [A], ids(1), "s"),
        ("gpu", C, [D], ids(7), "other"),
    ]
    assert mirror.take() == Changes(False, [])
    assert sorted(mirror.all()) == sorted(changes.told)


def test_only_what_is_so_in_the_end_is_told() -> None:
    mirror = mirror_of_two()
    mirror.removed("gpu", [B, A])
    mirror.stored("gpu", [A], ids(1), None, "", "s")
    mirror.removed("cpu", [A])  # was never there
    items = mirror.items(mirror.take().told, 10_000, 10**9)
    assert stored(items) == [("gpu", None, [A], ids(1), "s")]
    assert removed(items) == [("gpu", [B])]
    assert len(mirror) == 1


def test_a_block_stays_known_while_any_tier_has_it() -> None:
    mirror = mirror_of_two()
    mirror.stored("cpu", [B], ids(70_000), A, "", "s")
    mirror.removed("gpu", [B])
    items = mirror.items(mirror.take().told, 10_000, 10**9)
    assert stored(items) == [("gpu", None, [A], ids(1), "s"), ("cpu", A, [B], ids(70_000), "s")]
    assert removed(items) == [("gpu", [B])]


def test_clearing_voids_what_was_before() -> None:
    mirror = mirror_of_two()
    mirror.cleared()
    assert (len(mirror), mirror.all()) == (0, [])
    mirror.stored("gpu", [C], ids(3), None, "", "")
    assert mirror.take() == Changes(True, [(C, GPU)])
    assert mirror.take() == Changes(False, [])


def test_memory_is_bounded_and_what_is_left_out_is_counted() -> None:
    mirror = CacheMirror(2)
    mirror.stored("gpu", [A, B, C, D], ids(1, 2, 3, 4), None, "", "")
    assert (len(mirror), mirror.left_out) == (2, 2)
    mirror.removed("gpu", [A])
    mirror.stored("gpu", [D], ids(4), C, "", "")
    assert (len(mirror), mirror.left_out) == (2, 2)


def test_runs_have_an_end_and_blocks_of_other_sizes_are_apart() -> None:
    mirror = CacheMirror(10_000)
    count = ITEM_BLOCKS_MAX + 3
    hashes = [A + at for at in range(count)]
    mirror.stored("gpu", hashes, [7] * count, None, "", "")
    mirror.stored("gpu", [2**50], [1, 2], hashes[-1], "", "")
    rows: list[StoredItem] = mirror.items(mirror.take().told, 10_000, 10**9).stored
    assert [len(row.hashes) // 8 for row in rows] == [ITEM_BLOCKS_MAX, 3, 1]
    assert [row.parent for row in rows] == [None, hashes[ITEM_BLOCKS_MAX - 1], hashes[-1]]


def test_a_report_has_a_size() -> None:
    mirror = mirror_of_two()
    mirror.stored("gpu", [C, D], [1] * 200, B, "", "s")
    mirror.removed("gpu", [D])
    changes = mirror.take().told
    for blocks_max, tokens_max, fits in (
        (10, 10**9, 4),
        (3, 10**9, 3),
        (10, 104, 4),
        (10, 103, 2),
        (10, 1, 1),
    ):
        items = mirror.items(changes, blocks_max, tokens_max)
        told = sum(len(rows) for _, _, rows, _, _ in stored(items)) + sum(
            len(rows) for _, rows in removed(items)
        )
        assert items.changes == told == fits


@pytest.mark.parametrize(
    ("tier", "hashes", "token_ids"),
    [
        ("hbm", [A], [1]),
        ("external", [A], [1]),
        ("gpu", [A, B], [1]),
        ("gpu", [A], []),
        ("gpu", [A], [-1]),
        ("gpu", [A], [2**32]),
        ("gpu", [A, -1], [1, 2]),
        ("gpu", [2**64], [1]),
        ("gpu", ["a"], [1]),
        ("gpu", [A + 0.5], [1]),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    tier: str, hashes: list[int], token_ids: list[int]
) -> None:
    mirror = CacheMirror(10)
    with pytest.raises(ValueError):
        mirror.stored(tier, hashes, token_ids, None, "", "")
    assert (len(mirror), mirror.take()) == (0, Changes(False, []))


@pytest.mark.parametrize("parent", [-1, 2**64, "root"])
def test_a_parent_that_cannot_be_is_refused(parent: int) -> None:
    mirror = CacheMirror(10)
    with pytest.raises(ValueError):
        mirror.stored("gpu", [A], [1], parent, "", "")
    assert len(mirror) == 0


@pytest.mark.parametrize(("lora", "salt"), [("", "s" * 513), ("l" * 513, ""), ("", "a\nb"), ("\x7f", "")])
def test_what_a_request_brought_and_the_service_does_not_take_is_left_out(lora: str, salt: str) -> None:
    mirror = CacheMirror(10)
    mirror.stored("gpu", [A, B], ids(1, 2), None, lora, salt)
    mirror.stored("gpu", [C], ids(1), None, "l" * 512, "ü" * 512)
    assert (len(mirror), mirror.left_out) == (1, 2)
    msgspec.convert(msgspec.to_builtins(mirror.items(mirror.all(), 10, 10).stored), list[StoredItem])
