"""What the worker side saves, and what it must not: above all nothing of a page that the engine took back."""

import random
import time
from pathlib import Path
from threading import Thread

import pytest

from engine_adapters.vllm.orders import NO_BLOCK, Identity, SaveOrder
from tests.unit.vllm_memory_service import PAGE_BYTES, MemoryService, key_of
from tests.unit.vllm_worker_house import (
    BLOCKS,
    Gate,
    eventually,
    ranks_of,
    save_order,
    step,
)


@pytest.fixture
def service(tmp_path: Path) -> MemoryService:
    return MemoryService(tmp_path, ["tp0"])


def test_what_was_computed_is_stored_and_told_once(service: MemoryService) -> None:
    with ranks_of(service) as (rank,):
        order = rank.compute(save_order("s1", range(5), range(10, 15)))
        rank.step(step(saves=(order,)))
        (saved,) = rank.saves_over(1)
        assert saved.published == tuple(order.keys)
        assert (saved.dropped, saved.reason, saved.size_bytes) == (0, "", 5 * PAGE_BYTES)
        assert saved.tier == "posix"
        assert 0 < saved.began_ns <= saved.ended_ns
        assert service.holds_only_right_bytes() == 5
        assert rank.gathered == ["s1"]
        again = rank.compute(save_order("s2", range(3, 7), range(20, 24)))
        rank.step(step(saves=(again,)))
        saved = rank.saves_over(2)[1]
        assert saved.present == tuple(again.keys[:2]) and saved.published == tuple(again.keys[2:])
        assert rank.gathered == ["s1", "s2"] and len(rank.saved) == 2
        assert rank.counts["copied_pages"] == 9 and rank.counts["written_pages"] == 7
        assert rank.side._saver._buffers.used == 0


def test_many_saves_of_a_step_are_one_session(service: MemoryService) -> None:
    with ranks_of(service) as (rank,):
        orders = [rank.compute(save_order(f"s{n}", [n], [n + 1], request=f"r{n}")) for n in range(20)]
        rank.step(step(saves=tuple(orders)))
        assert len(rank.saves_over(20)) == 20
        assert service.calls == ["start", "finish"]
        assert service.holds_only_right_bytes() == 20


def test_a_long_save_goes_in_sessions_that_fit_the_buffers(service: MemoryService) -> None:
    with ranks_of(service, save_buffer_bytes=8 * PAGE_BYTES) as (rank,):
        order = rank.compute(save_order("s", range(50), range(1, 51)))
        rank.step(step(saves=(order,)))
        (saved,) = rank.saves_over(1)
        assert saved.published == tuple(order.keys)
        assert rank.pages.allocated <= 8 * PAGE_BYTES
        assert service.holds_only_right_bytes() == 50


# ------------------------------------------------------------------------------------------ preemption


def test_row17_no_page_is_copied_once_preempted_returned(service: MemoryService) -> None:
    """The page that is being copied is waited for; the ones behind it never are."""
    with ranks_of(service) as (rank,):
        gate = Gate()
        rank.pages.before_gather = lambda block: gate() if block == 12 else None
        order = rank.compute(save_order("s", range(5), range(10, 15)))
        rank.step(step(saves=(order,)))
        assert gate.reached.wait(5)
        preempting = Thread(target=rank.side.preempted, args=(step(preempted=("r",)),))
        preempting.start()
        (save,) = rank.side._saver._ledger.uncopied(["r"])
        eventually(lambda: save.cancelled)
        preempting.join(0.05)
        assert preempting.is_alive(), "a page was still being copied"
        gate.open()
        preempting.join(5)
        assert not preempting.is_alive()
        rank.pages.spoil(range(10, 15))
        (saved,) = rank.saves_over(1)
        assert saved.dropped == 3 and saved.reason == "preempted"
        assert [block for _, block in rank.pages.gathered] == [10, 11, 12]
        assert rank.gathered == ["s"]
        assert saved.published == (key_of(0), key_of(1))
        assert service.holds_only_right_bytes() == len(saved.published)


def test_row17_a_save_in_the_queue_is_given_up_at_once(service: MemoryService) -> None:
    with ranks_of(service) as (rank,):
        gate = Gate()
        rank.pages.before_gather = lambda block: gate() if block == 1 else None
        first = rank.compute(save_order("s1", [1], [1], request="other"))
        second = rank.compute(save_order("s2", [2, 3], [2, 3]))
        rank.step(step(saves=(first,)))
        assert gate.reached.wait(5)
        rank.step(step(saves=(second,)))
        began = time.monotonic()
        rank.side.preempted(step(preempted=("r",)))
        assert time.monotonic() - began < 1, "it waits for pages of its own requests only"
        rank.pages.spoil([2, 3])
        gate.open()
        saved = {one.save: one for one in rank.saves_over(2)}
        assert saved["s1"].published and not saved["s2"].published and saved["s2"].dropped == 2
        assert service.holds_only_right_bytes() == 1


def test_row19_what_a_preempted_request_saves_later_is_its_own_affair(service: MemoryService) -> None:
    with ranks_of(service) as (rank,):
        before = rank.compute(save_order("s1", [1], [1]))
        rank.step(step(saves=(before,)))
        after = rank.compute(save_order("s2", [2], [2]))
        rank.step(step(preempted=("r",), saves=(after,)))
        saved = {one.save: one for one in rank.saves_over(2)}
        assert saved["s2"].published == (key_of(2),)


@pytest.mark.parametrize("seed", range(12))
def test_row17_nothing_stored_is_ever_of_a_block_that_was_taken_back(
    service: MemoryService, seed: int
) -> None:
    """Requests come, are preempted at any moment and their blocks used for others."""
    chance = random.Random(seed)
    with ranks_of(service, save_buffer_bytes=chance.choice([4, 8, 64]) * PAGE_BYTES) as (rank,):
        rank.pages.before_gather = lambda block: time.sleep(chance.random() * 0.001)
        numbers = iter(range(10_000))
        free = list(range(1, BLOCKS))
        alive: dict[str, list[int]] = {}
        saves = 0
        for round_ in range(60):
            gone = [name for name in alive if chance.random() < 0.3]
            orders: list[SaveOrder] = []
            rank.side.preempted(step(preempted=tuple(gone)))
            for name in gone:
                blocks = alive.pop(name)
                rank.pages.spoil(blocks)
                free += blocks
            for _ in range(chance.randrange(3)):
                wanted = chance.randrange(1, 8)
                if len(free) < wanted:
                    continue
                chance.shuffle(free)
                blocks, free = free[:wanted], free[wanted:]
                name = f"r{round_}-{len(orders)}"
                alive[name] = blocks
                order = save_order(
                    f"s{saves}", [next(numbers) for _ in blocks], blocks, request=name,
                    urgent=chance.random() < 0.3,
                )  # fmt: skip
                orders.append(rank.compute(order))
                saves += 1
            rank.side.submit_saves(step(saves=tuple(orders)))
            rank.results()
        assert len(rank.saves_over(saves)) == saves, f"seed {seed}"
        assert len({one.save for one in rank.saved}) == saves, f"seed {seed}"
        assert sorted(rank.gathered) == sorted(f"s{n}" for n in range(saves)), f"seed {seed}"
        published = sum(len(one.published) for one in rank.saved)
        assert published == service.holds_only_right_bytes(), f"seed {seed}"
        assert rank.side._saver._buffers.used == 0


# -------------------------------------------------------------------------------------------- urgent


def test_urgent_pages_are_copied_before_the_next_step(service: MemoryService) -> None:
    """Also when an ordinary save is under way before them."""
    with ranks_of(service) as (rank,):
        rank.pages.before_gather = lambda block: time.sleep(0.003)
        ordinary = rank.compute(save_order("s1", range(30), range(1, 31), request="other"))
        urgent = rank.compute(save_order("s2", range(100, 105), range(40, 45), urgent=True))
        rank.step(step(saves=(ordinary,)))
        eventually(lambda: rank.pages.gathered)
        rank.step(step(saves=(urgent,)))
        rank.side.preempted(step())
        copied = [block for _, block in list(rank.pages.gathered)]
        assert set(copied) >= set(range(40, 45))
        assert len(copied) < 30, "it does not wait for the ordinary ones"
        rank.pages.spoil(range(40, 45))
        saved = {one.save: one for one in rank.saves_over(2)}
        assert len(saved["s2"].published) == 5 and len(saved["s1"].published) == 30
        assert service.holds_only_right_bytes() == 35


def test_an_urgent_save_without_room_is_dropped_not_waited_for(service: MemoryService) -> None:
    with ranks_of(service, save_buffer_bytes=4 * PAGE_BYTES, save_threads=1) as (rank,):
        gate = Gate()
        rank.mover.before_write = gate
        first = rank.compute(save_order("s1", range(8), range(1, 9), request="other"))
        rank.step(step(saves=(first,)))
        assert gate.reached.wait(5)
        urgent = rank.compute(save_order("s2", range(100, 103), range(40, 43), urgent=True))
        rank.step(step(saves=(urgent,)))
        began = time.monotonic()
        rank.side.preempted(step())
        assert time.monotonic() - began < 0.5
        rank.pages.spoil(range(40, 43))
        gate.open()
        saved = {one.save: one for one in rank.saves_over(2)}
        assert saved["s2"].dropped == 3 and saved["s2"].reason == "no_buffer"
        assert len(saved["s1"].published) == 8, "the ordinary save goes on where it was"
        assert service.holds_only_right_bytes() == 8


# ------------------------------------------------------------------------------------- what is dropped


def test_saves_that_find_no_buffer_in_time_are_dropped_and_let_the_blocks_go(service: MemoryService) -> None:
    with ranks_of(service, save_buffer_bytes=4 * PAGE_BYTES, save_wait_ms=50, save_threads=1) as (rank,):
        gate = Gate()
        rank.mover.before_write = gate
        orders = [
            rank.compute(save_order(f"s{n}", range(10 * n, 10 * n + 4), range(1, 5), request=f"r{n}"))
            for n in range(5)
        ]
        for order in orders:
            rank.step(step(saves=(order,)))
        began = time.monotonic()
        eventually(lambda: len(rank.gathered) == 5)
        assert time.monotonic() - began < 2
        gate.open()
        saved = rank.saves_over(5)
        assert sum(len(one.published) for one in saved) == 4
        assert {one.reason for one in saved if one.dropped} == {"no_buffer"}


def test_a_full_queue_drops_and_stays_bounded(service: MemoryService) -> None:
    with ranks_of(service, save_queue_blocks_max=10) as (rank,):
        gate = Gate()
        rank.pages.before_gather = gate
        for n in range(20):
            rank.step(step(saves=(rank.compute(save_order(f"s{n}", [3 * n, 3 * n + 1], [1, 2])),)))
        assert rank.side._saver._ledger.rows_uncopied == 10
        assert sum(len(batch.rows) for batch in rank.side._saver._ordinary) == 10
        gate.open()
        saved = rank.saves_over(20)
        assert [one.reason for one in saved if one.dropped] == ["queue_full"] * 15
        assert rank.counts["save_queue_blocks_max"] >= 10


def test_a_block_that_is_not_in_every_group_is_not_saved(tmp_path: Path) -> None:
    service = MemoryService(tmp_path, ["g0-tp0", "g1-tp0"])
    with ranks_of(service, groups=2) as (rank,):
        order = save_order("s", range(3), range(1, 4), groups=2)
        order = type(order)(order.save, order.request, "i", order.keys, None, ((1, 2, 3), (1, NO_BLOCK, 3)))
        rank.step(step(saves=(rank.compute(order),)))
        (saved,) = rank.saves_over(1)
        assert saved.published == (order.keys[0], order.keys[2]) and saved.reason == "no_block"
        assert service.holds_only_right_bytes() == 2


def test_saves_of_an_engine_that_is_not_registered_are_dropped(service: MemoryService) -> None:
    with ranks_of(service) as (rank,):
        rank.step(step(identity=None, saves=(save_order("s", [1], [1]),)))
        (saved,) = rank.saves_over(1)
        assert (saved.dropped, saved.reason) == (1, "identity")
        assert rank.gathered == ["s"] and not service.calls


@pytest.mark.parametrize("where", ["copy", "start", "write"])
def test_row23_another_identity_drops_what_was_ordered_before(service: MemoryService, where: str) -> None:
    """Weights were updated, or the engine lost its registration: wherever the save is by then."""
    with ranks_of(service) as (rank,):
        gate = Gate()
        if where == "copy":
            rank.pages.before_gather = gate
        elif where == "start":
            service.before["start"] = gate
        else:
            rank.mover.before_write = gate
        rank.step(step(saves=(rank.compute(save_order("s1", [1, 2], [1, 2])),)))
        assert gate.reached.wait(5)
        renewed = Identity("i2", "e", "two")
        other = rank.compute(save_order("s2", [3], [3], instance="i2"))
        turning = Thread(target=rank.side.preempted, args=(step(identity=renewed),))
        turning.start()
        eventually(lambda: rank.side._saver._identity == renewed)
        if where == "copy":
            (save,) = rank.side._saver._ledger.uncopied()
            eventually(lambda: save.cancelled)
        gate.open()
        turning.join(5)
        rank.step(step(identity=renewed, saves=(other,)))
        saved = {one.save: one for one in rank.saves_over(2)}
        assert not saved["s1"].published and saved["s1"].reason == "identity"
        assert saved["s2"].published == (key_of(3),)
        assert not service.serves(key_of(1)) and service.serves(key_of(3), "i2")
        if where == "copy":
            assert [block for _, block in rank.pages.gathered] == [1, 3]
        eventually(lambda: service.sessions_open == 1)


# --------------------------------------------------------------------------------------------- faults


def test_row33_a_finish_that_fails_is_told_and_nothing_is_left(service: MemoryService) -> None:
    with ranks_of(service) as (rank,):
        service.fail["finish"] = ["rejected:invalid_field"]
        rank.step(step(saves=(rank.compute(save_order("s1", [1, 2], [1, 2])),)))
        (saved,) = rank.saves_over(1)
        assert (saved.published, saved.dropped, saved.reason) == ((), 2, "finish_failed")
        assert rank.counts["finish_failures"] == 1
        assert not service.serves(key_of(1))
        assert service.sessions_open == 0, "the key is free for the next writer at once"
        rank.step(step(saves=(rank.compute(save_order("s2", [1, 2], [1, 2])),)))
        assert rank.saves_over(2)[1].published == (key_of(1), key_of(2))


def test_an_answer_that_was_lost_is_asked_for_again(service: MemoryService) -> None:
    with ranks_of(service) as (rank,):
        service.finishes_lost = 2
        service.fail["start"] = ["timeout", "breaker_open"]
        rank.step(step(saves=(rank.compute(save_order("s", [1, 2], [1, 2])),)))
        (saved,) = rank.saves_over(1)
        assert saved.published == (key_of(1), key_of(2)) and saved.dropped == 0
        assert service.calls == ["start"] * 3 + ["finish"] * 3
        assert len(set(service.finish_ids)) == 1


def test_a_service_that_is_away_costs_a_drop(service: MemoryService) -> None:
    with ranks_of(service, write_ttl_ms=300) as (rank,):
        service.fail["start"] = ["refused_connection"] * 1_000
        rank.step(step(saves=(rank.compute(save_order("s", [1, 2], [1, 2])),)))
        eventually(lambda: rank.gathered == ["s"], 1)
        (saved,) = rank.saves_over(1)
        assert (saved.dropped, saved.reason) == (2, "start_failed")
        assert rank.counts["start_failures"] == 1
        assert rank.side._saver._buffers.used == 0


def test_a_page_that_a_storage_does_not_take_is_told_as_failed(
    service: MemoryService, tmp_path: Path
) -> None:
    with ranks_of(service) as (rank,):
        (tmp_path / "c").write_text("a file where a folder should be")
        rank.step(step(saves=(rank.compute(save_order("s", [1, 2], [1, 2])),)))
        (saved,) = rank.saves_over(1)
        assert (saved.published, saved.dropped, saved.reason) == ((), 2, "write_failed")
        assert not service.blocks, "the finish said so, and freed the places"
        assert sum(value for name, value in rank.counts.items() if name.startswith("write_failures_")) == 2


def test_a_storage_that_is_not_here(service: MemoryService, tmp_path: Path) -> None:
    with ranks_of(service) as (rank,):
        service.storage.options["root"] = str(tmp_path / "not mounted")
        rank.step(step(saves=(rank.compute(save_order("s", [1], [1])),)))
        (saved,) = rank.saves_over(1)
        assert saved.reason == "write_failed" and rank.counts["write_failures_not_open"] == 1
        assert not service.blocks


def test_a_fault_in_copying_or_writing_ends_one_save_only(service: MemoryService) -> None:
    with ranks_of(service) as (rank,):

        def fault(block: int) -> None:
            if block == 2:
                raise RuntimeError("the device is gone")

        rank.pages.before_gather = fault
        rank.step(step(saves=(rank.compute(save_order("s1", [1, 2, 3], [1, 2, 3])),)))
        (saved,) = rank.saves_over(1)
        assert (saved.published, saved.dropped, saved.reason) == ((key_of(1),), 2, "internal")
        service.before["start"] = lambda: (_ for _ in ()).throw(RuntimeError("a bug"))
        rank.step(step(saves=(rank.compute(save_order("s2", [4], [4])),)))
        assert rank.saves_over(2)[1].reason == "internal"
        del service.before["start"]
        rank.step(step(saves=(rank.compute(save_order("s3", [5], [5])),)))
        assert rank.saves_over(3)[2].published == (key_of(5),)
        assert rank.gathered == ["s1", "s2", "s3"] and rank.side._saver._buffers.used == 0


def test_a_slow_storage_keeps_its_session_open(service: MemoryService) -> None:
    with ranks_of(service, write_ttl_ms=200) as (rank,):
        rank.mover.before_write = lambda: time.sleep(0.06)
        order = rank.compute(save_order("s", range(32), range(1, 33)))
        rank.step(step(saves=(order,)))
        (saved,) = rank.saves_over(1)
        assert saved.published == tuple(order.keys)
        assert "renew" in service.calls


def test_another_engine_is_writing_it(service: MemoryService) -> None:
    with ranks_of(service) as (rank,):
        service.blocks["i", key_of(1)] = {"location": 77, "sums": {}, "session": "w-0-x"}
        rank.step(step(saves=(rank.compute(save_order("s", [1, 2], [1, 2])),)))
        (saved,) = rank.saves_over(1)
        assert (saved.published, saved.dropped, saved.reason) == ((key_of(2),), 1, "in_progress")


# ------------------------------------------------------------------------------------------ finished requests


def test_a_finished_request_is_sent_once_when_its_pages_are_copied(service: MemoryService) -> None:
    with ranks_of(service) as (rank,):
        gate = Gate()
        rank.pages.before_gather = gate
        rank.step(step(saves=(rank.compute(save_order("s", [1], [1])),)))
        assert gate.reached.wait(5)
        assert not rank.step(step(awaited=("r",)), {"r"}).sent
        assert not rank.results().sent
        gate.open()
        sent: list[str] = []

        def some_sent() -> list[str]:
            sent.extend(rank.results().sent)
            return sent

        eventually(some_sent)
        assert sent == ["r"]
        rank.saves_over(1)
        assert not rank.results().sent


def test_row18_nothing_is_told_of_a_request_that_nobody_waits_for(service: MemoryService) -> None:
    with ranks_of(service) as (rank,):
        rank.step(step(saves=(rank.compute(save_order("s", [1], [1])),)))
        rank.saves_over(1)
        results = rank.step(step(), {"r", "unknown"})
        assert not (results.sent or results.received or results.failed)
        assert rank.step(step(awaited=("nothing-saved",)), {"nothing-saved"}).sent == {"nothing-saved"}
