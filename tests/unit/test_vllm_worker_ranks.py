"""Saves of several ranks: one session, and a block that serves only where every rank's part is in."""

from pathlib import Path
from typing import Any

import pytest

from engine_adapters.vllm.orders import NO_BLOCK, SaveOrder
from metaservice.wire.schemas import WriteOutcome
from tests.unit.vllm_memory_service import PAGE_BYTES, MemoryService, key_of
from tests.unit.vllm_worker_house import Gate, Rank, eventually, load_order, ranks_of, save_order, step


@pytest.fixture
def wide(tmp_path: Path) -> MemoryService:
    return MemoryService(tmp_path, ["tp0", "tp1"])


def both(ranks: list[Rank], *orders: SaveOrder, **more: Any) -> None:
    for rank in ranks:
        rank.step(step(saves=tuple(rank.compute(order) for order in orders), **more))


def test_row2_a_block_of_two_ranks_serves_with_the_second_finish(wide: MemoryService) -> None:
    with ranks_of(wide, world=2) as ranks:
        gate = Gate()
        ranks[1].mover.before_write = gate
        both(ranks, save_order("s", [1, 2, 3], [1, 2, 3]))
        (first,) = ranks[0].saves_over(1)
        assert (first.published, first.dropped, first.size_bytes) == ((), 0, 3 * PAGE_BYTES)
        assert ranks[0].counts["pending_blocks"] == 3 and not wide.serves(key_of(1))
        gate.open()
        (second,) = ranks[1].saves_over(1)
        assert second.published == (key_of(1), key_of(2), key_of(3))
        assert len(wide.sessions) == 1 and wide.holds_only_right_bytes() == 3


@pytest.mark.parametrize("first", [0, 1])
def test_row17_a_rank_that_drops_a_save_lets_the_others_go(wide: MemoryService, first: int) -> None:
    """Its session is given up: whoever comes first, the keys are free for the next writer."""
    with ranks_of(wide, world=2) as ranks:
        slow, other = Gate(), Gate()
        ranks[1].pages.before_gather = slow
        if first == 1:
            ranks[0].pages.before_gather = other
        both(ranks, save_order("s0", [9], [9], request="q"))
        both(ranks, save_order("s", [1, 2], [1, 2]))
        assert slow.reached.wait(5)
        if first == 0:
            ranks[0].saves_over(2)
        ranks[1].side.preempted(step(preempted=("r",)))
        slow.open()
        saved = ranks[1].saves_over(2)[0]
        assert (saved.save, saved.reason, saved.dropped) == ("s", "preempted", 2)
        eventually(lambda: ("i", key_of(1)) not in wide.blocks and "abort" in wide.calls)
        other.open()
        ranks[0].saves_over(2)
        assert not wide.serves(key_of(1)) and not wide.serves(key_of(2))
        both(ranks, save_order("s2", [1, 2], [1, 2], request="q"))
        for rank in ranks:
            rank.saves_over(3)
        assert wide.holds_only_right_bytes() == 3


def test_one_rank_copies_less_than_the_other(wide: MemoryService) -> None:
    with ranks_of(wide, world=2) as ranks:

        def fault(block: int) -> None:
            if block == 2:
                raise RuntimeError("this page cannot be read")

        ranks[1].pages.before_gather = fault
        both(ranks, save_order("s", [1, 2, 3], [1, 2, 3]))
        for rank in ranks:
            rank.saves_over(1)
        assert wide.serves(key_of(1)) and wide.holds_only_right_bytes() == 1
        assert set(wide.blocks) == {("i", key_of(1))}, "what a rank lacks is free at once"


def test_rows_that_no_rank_can_deliver_are_told_once(tmp_path: Path) -> None:
    service = MemoryService(tmp_path, ["g0-tp0", "g1-tp0", "g0-tp1", "g1-tp1"])
    with ranks_of(service, world=2, groups=2) as ranks:
        order = save_order("s", [1, 2], [1, 2], groups=2)
        order = SaveOrder("s", "r", "i", order.keys, None, ((1, 2), (NO_BLOCK, 2)))
        both(ranks, order)
        saved = [one for rank in ranks for one in rank.saves_over(1)]
        assert [one.dropped for one in saved] == [1, 1] and {one.reason for one in saved} == {"no_block"}
        assert {key for one in saved for key in one.published} == {key_of(2)}
        assert service.holds_only_right_bytes() == 1


def test_a_tainted_step_is_not_stored_by_any_rank(wide: MemoryService) -> None:
    """One rank's synchronous load fails; the other does not know, and computes from the same garbage."""
    with ranks_of(wide, world=2, load="sync") as ranks:
        places = wide.put([key_of(1), key_of(2)])
        wide.path(key_of(2), "tp1").unlink()
        load = load_order(places, [1, 2], sync=True)
        order = save_order("s1", [3], [3])
        for rank in ranks:
            rank.step(step(loads=(load,), saves=(rank.compute(order),)))
        assert [rank.loaded[0].blocks for rank in ranks] == [2, 1]
        assert ranks[1].side.load_errors() == {2} and not ranks[0].side.load_errors()
        (saved,) = ranks[1].saves_over(1)
        assert (saved.dropped, saved.reason) == (1, "tainted")
        ranks[0].saves_over(1)
        eventually(lambda: ("i", key_of(3)) not in wide.blocks)
        assert [report.failures for report in ranks[1].reports if report.failures] == [{1: 1}]
        # a step that was decided before the scheduler knew
        both(ranks, save_order("s2", [4], [4]))
        assert ranks[1].saves_over(2)[1].reason == "tainted"
        ranks[0].saves_over(2)
        both(ranks, save_order("s3", [5], [5]), failures_seen={1: 1})
        for rank in ranks:
            rank.saves_over(3)
        assert wide.serves(key_of(5)) and not wide.serves(key_of(3)) and not wide.serves(key_of(4))


def test_the_session_of_a_block_others_hold_is_not_given_up(wide: MemoryService) -> None:
    """Nothing to write means no session, on every rank."""
    wide.put([key_of(1)])
    with ranks_of(wide, world=2) as ranks:
        both(ranks, save_order("s", [1], [1]))
        for rank in ranks:
            assert rank.saves_over(1)[0].present == (key_of(1),)
        assert wide.calls == ["start", "start"]
        assert next(iter(wide.answers.values())).outcomes == bytes([WriteOutcome.present])
