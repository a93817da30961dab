"""The worker side's end, and settings that it cannot begin with."""

import time
from pathlib import Path
from threading import Thread

import pytest

from tests.unit.vllm_memory_service import MemoryService, key_of
from tests.unit.vllm_worker_house import Gate, eventually, load_order, ranks_of, save_order, step


@pytest.fixture
def service(tmp_path: Path) -> MemoryService:
    return MemoryService(tmp_path, ["tp0"])


@pytest.mark.parametrize("where", ["copy", "start", "write", "finish"])
def test_shutdown_is_bounded_wherever_a_save_hangs(service: MemoryService, where: str) -> None:
    with ranks_of(service) as (rank,):
        gate = Gate()
        if where == "copy":
            rank.pages.before_gather = gate
        elif where == "write":
            rank.mover.before_write = gate
        else:
            service.before[where] = gate
        rank.step(step(saves=(rank.compute(save_order("s", range(9), range(1, 10))),)))
        assert gate.reached.wait(5)
        stopping = Thread(target=rank.side.shutdown)
        began = time.monotonic()
        stopping.start()
        stopping.join(5)
        assert time.monotonic() - began < 2.5 and not stopping.is_alive()
        gate.open()


def test_shutdown_finishes_what_is_written_and_gives_up_the_rest(service: MemoryService) -> None:
    with ranks_of(service) as (rank,):
        gate = Gate()
        rank.mover.before_write = gate
        order = rank.compute(save_order("s", range(20), range(1, 21)))
        rank.step(step(saves=(order,)))
        assert gate.reached.wait(5)
        stopping = Thread(target=rank.side.shutdown)
        stopping.start()
        eventually(rank.side._saver._stopping.is_set)
        gate.open()
        stopping.join(5)
        (saved,) = rank.saves_over(1)
        assert len(saved.published) == 8 and saved.dropped == 12 and saved.reason == "stopped"
        assert service.holds_only_right_bytes() == 8
        assert len(service.blocks) == 8


def test_shutdown_gives_up_what_waits_to_be_written(service: MemoryService) -> None:
    with ranks_of(service, save_threads=1) as (rank,):
        gate = Gate()
        rank.mover.before_write = gate
        for number in (1, 2):
            order = save_order(f"s{number}", [number], [number], request=f"r{number}")
            rank.step(step(saves=(rank.compute(order),)))
        assert gate.reached.wait(5)
        eventually(lambda: sorted(rank.gathered) == ["s1", "s2"])
        stopping = Thread(target=rank.side.shutdown)
        stopping.start()
        eventually(rank.side._saver._stopping.is_set)
        gate.open()
        stopping.join(5)
        saved = {one.save: one for one in rank.saves_over(2)}
        assert saved["s2"].reason == "stopped" and service.calls.count("start") == 1
        assert rank.side._saver._buffers.used == 0


def test_shutdown_gives_up_what_is_being_copied(service: MemoryService) -> None:
    """Nobody is left to write it."""
    with ranks_of(service) as (rank,):
        gate = Gate()
        rank.pages.before_gather = lambda block: gate() if block == 2 else None
        rank.step(step(saves=(rank.compute(save_order("s", [1, 2], [1, 2])),)))
        assert gate.reached.wait(5)
        stopping = Thread(target=rank.side.shutdown)
        stopping.start()
        _, *writers = rank.side._saver._threads
        eventually(lambda: not any(thread.is_alive() for thread in writers))
        gate.open()
        stopping.join(5)
        (saved,) = rank.saves_over(1)
        assert (saved.dropped, saved.reason) == (2, "stopped")
        assert rank.gathered == ["s"] and rank.side._saver._buffers.used == 0


def test_shutdown_ends_the_wait_for_a_service_that_is_away(service: MemoryService) -> None:
    with ranks_of(service) as (rank,):
        service.fail["start"] = ["timeout"] * 1_000_000
        rank.step(step(saves=(rank.compute(save_order("s", [1], [1])),)))
        eventually(lambda: len(service.calls) > 1)
        began = time.monotonic()
        rank.side.shutdown()
        assert time.monotonic() - began < 1
        assert not any(thread.is_alive() for thread in rank.side._saver._threads)
        assert rank.saves_over(1)[0].reason == "start_failed"


@pytest.mark.parametrize("where", ["read", "scatter"])
def test_shutdown_is_bounded_wherever_a_load_hangs(service: MemoryService, where: str) -> None:
    places = service.put([key_of(1), key_of(2)])
    with ranks_of(service) as (rank,):
        gate = Gate()
        if where == "read":
            rank.mover.before_read = gate
        else:
            rank.pages.before_scatter = gate
        rank.pages.spoil([1, 2])
        rank.step(step(loads=(load_order(places, [1, 2]),)))
        assert gate.reached.wait(5)
        began = time.monotonic()
        rank.side.shutdown()
        assert time.monotonic() - began < 1
        gate.open()
        eventually(lambda: not any(thread.is_alive() for thread in rank.side._loader._threads))
        assert len(rank.pages.scattered) == (where == "scatter")


def test_settings_that_hold_no_block_are_refused(service: MemoryService) -> None:
    text = r"save_buffer_bytes.*one block of this model takes 96 bytes"
    with pytest.raises(ValueError, match=text), ranks_of(service, save_buffer_bytes=95):
        pass
    with pytest.raises(ValueError, match="load_buffer_bytes"), ranks_of(service, load_buffer_bytes=95):
        pass
