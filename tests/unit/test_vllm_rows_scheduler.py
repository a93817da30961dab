"""Bugs that users of other connectors reported, about what the scheduler's thread is made to do: shown on
fake engines with the real connector and service. Rows are those of the list of reports."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_adapters.vllm.scheduler import SchedulerSide
from tests.engines.engine_request import Status
from tests.engines.fleet import UcmEngine
from tests.engines.ground import Ground
from tests.engines.row_house import BLOCKS, DOCUMENT, RowHouse, row_house, until

WAITING = 250
STEPS = 200


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    logging.getLogger("ucm.vllm").setLevel(logging.CRITICAL)
    logging.getLogger("metaservice.client").setLevel(logging.CRITICAL)
    made = Ground(tmp_path_factory.mktemp("scheduler"))
    yield made
    made.close()


class StepClock:
    """What the connector takes of the scheduler's thread in each step: time of its processor, so that other
    programs on the machine do not count."""

    def __init__(self, side: SchedulerSide) -> None:
        self.steps_ms: list[float] = []
        self._spent_ns = 0
        began_ns = time.thread_time_ns()
        for _ in range(1_000):
            time.thread_time_ns()
        self._clock_ns = (time.thread_time_ns() - began_ns) // 1_000
        for name in ("new_request", "matched", "allocated", "report", "finished", "build"):
            self._time(side, name)

    def _time(self, side: SchedulerSide, name: str) -> None:
        call: Callable[..., Any] = getattr(side, name)

        def timed(*args: Any) -> Any:
            began_ns = time.thread_time_ns()
            try:
                return call(*args)
            finally:
                self._spent_ns += time.thread_time_ns() - began_ns - self._clock_ns
                if name == "build":
                    self.steps_ms.append(self._spent_ns / 1e6)
                    self._spent_ns = 0

        setattr(side, name, timed)

    def at(self, share: float) -> float:
        """The step time that this share of all steps stays below."""
        return sorted(self.steps_ms)[int(len(self.steps_ms) * share)]


def _answered(house: RowHouse, wire: str, name: str) -> UcmEngine:
    engine = house.engine(name, lookup_wait_ms=60_000 if wire == "slow" else 300, running_max=2)
    if wire == "slow":
        engine.wire.delay_s = 0.05
    elif wire == "down":
        engine.wire.cut()
    elif wire == "lying":
        engine.wire.lie = lambda answer: answer[:-12] + os.urandom(12)
    return engine


@pytest.mark.parametrize("wire", ["healthy", "slow", "down", "lying"])
def test_row11_hundreds_of_waiting_requests_cost_one_lookup_each_and_no_time(
    ground: Ground, wire: str
) -> None:
    """The scheduler asks after every waiting request in every step, for hundreds of steps."""
    with row_house(ground) as house:
        house.filled()
        engine = _answered(house, wire, wire)
        clock = StepClock(engine.side)
        for number in range(WAITING):
            engine.ask(f"r{number}", (number % 251, number // 251, *DOCUMENT[:7]), 1)
        for _ in range(STEPS):
            engine.pump()
            time.sleep(0.0005)
        assert engine.face.asked >= WAITING
        assert engine.wire.count(b"/lookup") <= WAITING + engine.engine.scheduler.preemptions
        assert clock.at(0.99) < 5.0, f"p99 {clock.at(0.99):.2f} ms"
        assert clock.at(0.50) < 1.0, f"median {clock.at(0.50):.2f} ms"
        if wire == "slow":
            for name in list(engine.asked):
                engine.engine.abort(name)
        engine.wire.lie, engine.wire.delay_s = None, 0.0
        engine.wire.mend()


def test_row10_an_answer_that_never_comes_is_a_miss_in_time(ground: Ground) -> None:
    with row_house(ground) as house:
        house.filled()
        engine = house.engine("e", lookup_wait_ms=300)
        engine.wire.delay_s = 1.2
        began_s = time.monotonic()
        engine.serve("r", DOCUMENT, 2)
        took_s = time.monotonic() - began_s
        assert 0.25 < took_s < 1.1
        assert engine.face.asked > 20
        assert engine.wire.count(b"/lookup") == 2, "the leader once, and once whoever follows"
        assert engine.engine.scheduler.loaded_tokens == 0
        engine.wire.delay_s = 0.0


def test_row11_asking_changes_nothing(ground: Ground) -> None:
    with row_house(ground) as house:
        house.filled()
        engine = house.engine("e")
        engine.ask("r", DOCUMENT, 2)
        request = engine.engine.scheduler.requests["r"]
        until(lambda: engine.side.matched(request, 0)[0] is not None, what="the answer")
        answers = {engine.side.matched(request, 0) for _ in range(500)}
        assert answers == {(BLOCKS * 4, True)}
        assert {engine.side.matched(request, 8) for _ in range(3)} == {((BLOCKS - 2) * 4, True)}
        assert engine.wire.count(b"/lookup") == 1 and engine.broker.leases_open() == 1


@pytest.mark.parametrize("length", [4, 5, 8, 9, 39, 40, 41, 44])
@pytest.mark.parametrize("computed", [0, 4, 12])
def test_row34_promised_tokens_end_on_a_block_and_leave_one_to_compute(
    ground: Ground, length: int, computed: int
) -> None:
    with row_house(ground) as house:
        house.filled()
        engine = house.engine("e")
        prompt = (*DOCUMENT, 9, 9, 9, 9)[:length]
        engine.ask("r", prompt, 1)
        request = engine.engine.scheduler.requests["r"]
        until(lambda: engine.side.matched(request, computed)[0] is not None, what="the answer")
        tokens, _ = engine.side.matched(request, computed)
        assert tokens == max(0, min(BLOCKS, (length - 1) // 4) * 4 - computed)


@pytest.mark.parametrize("mode", ["bypass", "read_only"])
def test_a_switch_is_obeyed_in_the_next_step(ground: Ground, mode: str) -> None:
    with row_house(ground) as house:
        house.filled(prompt=DOCUMENT[:21])
        engine = house.engine("e")
        ground.client.set_switch("group", f"g-{house.group}", mode)
        until(lambda: engine.broker.switch == mode, 5, "the news")
        lookups, writes = engine.wire.count(b"/lookup"), engine.wire.count(b"/writes")
        engine.serve("r", DOCUMENT, 2)
        engine.settle()
        assert engine.wire.count(b"/writes") == writes
        loaded = engine.counted().get("loaded_blocks", 0)
        assert loaded == (5 if mode == "read_only" else 0)
        assert (engine.wire.count(b"/lookup") == lookups) == (mode == "bypass")
        ground.client.set_switch("group", f"g-{house.group}", "normal")
        until(lambda: engine.broker.switch == "normal", 5, "the news")
        engine.engine.scheduler.tables.pool.reset()
        engine.serve("after", DOCUMENT, 2)
        engine.settle()
        assert engine.counted()["loaded_blocks"] == loaded + 5 and house.stored() == BLOCKS


def test_bypass_also_stops_what_was_promised_already(ground: Ground) -> None:
    """The answer is here, the request waits for room, and then the switch is turned."""
    with row_house(ground) as house:
        house.filled()
        engine = house.engine("e")
        engine.ask("r", DOCUMENT, 2)
        until(lambda: engine.broker.answer("r#1") is not None, what="the answer")
        ground.client.set_switch("group", f"g-{house.group}", "bypass")
        until(lambda: engine.broker.switch == "bypass", 5, "the news")
        engine.run()
        assert engine.engine.scheduler.loaded_tokens == 0
        ground.client.set_switch("group", f"g-{house.group}", "normal")


def test_prefix_caches_that_are_reset_with_requests_running_are_no_danger(ground: Ground) -> None:
    """As after an update of the weights: all running requests are preempted between two steps, and taken in
    again in the very step in which the connector hears of it."""
    with row_house(ground) as house:
        engine = house.engine("e")
        for number in range(4):
            engine.ask(f"r{number}", DOCUMENT[: 9 + 5 * number], 12)
        for turn in range(60):
            if turn % 7 == 3:
                engine.engine.reset_prefix_cache()
            engine.pump()
        engine.run()
        assert all(each.status == Status.stopped for each in engine.engine.outcomes.values())


def test_row07_preempted_aborted_and_answered_requests_hold_no_lease_in_the_end(ground: Ground) -> None:
    with row_house(ground) as house:
        house.filled()
        engine = house.engine("e", blocks=16, reserve_whole=False, running_max=4)
        for number in range(12):
            engine.ask(f"r{number}", DOCUMENT[: 8 + 2 * number], 12)
            for _ in range(4):
                engine.pump()
            if number % 3 == 2:
                engine.engine.abort(f"r{number - 1}")
        engine.run()
        engine.settle()
        until(lambda: not ground.leases_open(), 5, "the end of all leases")
