"""The worker side's end, and settings that it cannot begin with."""

import time
from pathlib import Path
from threading import Thread

import pytest

from tests.unit.vllm_memory_service import MemoryService
from tests.unit.vllm_worker_house import Gate, eventually, ranks_of, save_order, step


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
        if where == "copy":
            time.sleep(0.05)
            gate.open()  # a device that does not answer is the engine's end anyway
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


def test_settings_that_hold_no_block_are_refused(service: MemoryService) -> None:
    text = r"save_buffer_bytes.*one block of this model takes 96 bytes"
    with pytest.raises(ValueError, match=text), ranks_of(service, save_buffer_bytes=95):
        pass
    with pytest.raises(ValueError, match="load_buffer_bytes"), ranks_of(service, load_buffer_bytes=95):
        pass
