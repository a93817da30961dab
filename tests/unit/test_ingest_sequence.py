"""The order of an engine's batches, and that whatever happens to them we end with the engine's truth."""

import asyncio
from collections.abc import Iterable
from random import Random

import pytest

from metaservice.publish.ingest.limits import IngestLimits
from metaservice.publish.ingest.sequence import CHECKED, END, Sequencer
from tests.unit.ingest_house import Desk, ToyEngine, batch

LIMITS = IngestLimits()


def told(number: int, life: float = 1.0) -> bytes:
    return batch(ts=life + number / 1_000)


class Seen:
    """What a sequencer gave out: batches by their bytes, and None where all was forgotten."""

    def __init__(self, replayable: bool = True, limits: IngestLimits = LIMITS) -> None:
        self.sequencer = Sequencer(replayable, limits)
        self.steps: list[bytes | None] = []

    def live(self, *numbers: int, life: float = 1.0) -> None:
        for number in numbers:
            self.steps += self.sequencer.live(number, told(number, life))

    def replayed(self, *numbers: int, life: float = 1.0) -> None:
        for number in numbers:
            self.steps += self.sequencer.replayed(number, told(number, life))

    def ended(self) -> None:
        self.steps += self.sequencer.ended()

    def expect(self, *numbers: int | None, life: float = 1.0) -> None:
        assert self.steps == [None if number is None else told(number, life) for number in numbers]
        self.steps.clear()


def test_batches_in_order_are_taken_at_once() -> None:
    seen = Seen()
    seen.live(0, 1, 2)
    seen.expect(0, 1, 2)
    assert seen.sequencer.wanted is None
    assert seen.sequencer.whole


def test_row_08_whoever_joins_late_asks_from_the_beginning() -> None:
    seen = Seen()
    seen.live(5)
    assert seen.sequencer.wanted == 0
    seen.replayed(0, 1, 2, 3, 4, 5)
    seen.ended()
    seen.expect(0, 1, 2, 3, 4, 5)
    assert seen.sequencer.duplicates == 1


def test_row_15_what_was_missed_comes_before_the_batch_that_showed_it() -> None:
    seen = Seen()
    seen.live(0, 1, 2, 6, 7)
    seen.expect(0, 1, 2)
    assert seen.sequencer.wanted == 0, "the last that were taken come along, to see that it is the same life"
    seen.replayed(0, 1, 2, 3, 4, 5)
    seen.live(8)
    seen.replayed(6, 7, 8)
    seen.expect(3, 4, 5, 6, 7, 8)
    seen.ended()
    seen.live(9)
    seen.expect(9)
    assert (seen.sequencer.gaps, seen.sequencer.lost, seen.sequencer.restarts) == (1, 0, 0)


def test_row_15_a_replay_that_loses_some_itself_is_done_again_and_nothing_is_taken_twice() -> None:
    seen = Seen()
    seen.live(0, 1, 9)
    seen.replayed(1, 2, 3, 7, 8)
    seen.ended()
    seen.replayed(*range(10))
    seen.ended()
    seen.expect(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert seen.sequencer.lost == 0


def test_a_batch_that_comes_twice_counts_once() -> None:
    seen = Seen()
    seen.live(0, 1, 1, 0, 2)
    seen.expect(0, 1, 2)
    assert seen.sequencer.duplicates == 2


def test_row_09_numbers_that_begin_anew_are_another_life() -> None:
    seen = Seen()
    seen.live(0, 1, 2)
    seen.expect(0, 1, 2)
    seen.live(0, life=2.0)
    assert seen.sequencer.wanted == 0
    seen.replayed(0, 1, life=2.0)
    seen.ended()
    seen.expect(None, 0, 1, life=2.0)
    assert seen.sequencer.restarts == 1
    assert seen.sequencer.whole


def test_another_life_is_known_by_the_bytes_of_the_last_batch_though_its_numbers_fit() -> None:
    seen = Seen()
    seen.live(0, 1, 2)
    seen.expect(0, 1, 2)
    seen.live(7, life=2.0)
    seen.replayed(0, life=2.0)
    assert seen.sequencer.session == 2, "all of it, from the beginning"
    seen.replayed(*range(8), life=2.0)
    seen.ended()
    seen.expect(None, *range(8), life=2.0)


def test_another_life_that_is_shorter_is_known_when_the_connection_is_made_again() -> None:
    seen = Seen()
    seen.live(*range(2_000))
    seen.steps.clear()
    seen.sequencer.joined()
    assert seen.sequencer.wanted == 2_000 - CHECKED
    seen.replayed(*range(2_000 - CHECKED, 2_000))
    seen.ended()
    assert not seen.steps, "it is the same"
    seen.sequencer.joined()
    seen.ended()
    assert seen.sequencer.wanted == 0, "it does not know its own last batch"
    seen.replayed(0, 1, 2, life=2.0)
    seen.ended()
    seen.expect(None, 0, 1, 2, life=2.0)
    seen.sequencer.joined()
    seen.ended()
    seen.ended()
    seen.expect(None)
    seen.live(0, life=3.0)
    seen.replayed(0, life=3.0)
    seen.ended()
    seen.expect(0, life=3.0)
    assert seen.sequencer.restarts == 2


def test_row_11_a_late_batch_of_a_life_that_is_over_is_ignored() -> None:
    seen = Seen()
    seen.live(0, 1, 2)
    seen.live(0, life=2.0)
    seen.replayed(0, life=2.0)
    seen.ended()
    seen.steps.clear()
    for number in (3, 900, 1):
        seen.live(number)
        while seen.sequencer.wanted is not None:
            seen.replayed(0, life=2.0)
            seen.ended()
    seen.expect()
    assert seen.sequencer.late == 3
    seen.live(1, life=2.0)
    seen.expect(1, life=2.0)


def test_what_is_lost_for_good_makes_everything_be_forgotten() -> None:
    seen = Seen()
    seen.live(0, 1, 50)
    seen.expect(0, 1)
    seen.replayed(40, *range(41, 51))
    seen.ended()
    seen.expect(None, *range(40, 51))
    assert seen.sequencer.lost == 1
    assert not seen.sequencer.whole


def test_a_gap_that_no_replay_fills_is_given_up_after_a_few() -> None:
    seen = Seen()
    seen.live(0, 1)
    for number in (5, 6, 7, 8):
        seen.live(number)
        while seen.sequencer.wanted is not None:
            seen.replayed(1)
            seen.ended()
    seen.expect(0, 1, None, 8)
    seen.live(9)
    seen.expect(9)
    assert (seen.sequencer.late, seen.sequencer.lost) == (3, 1)


def test_an_engine_that_never_answers_a_replay_is_followed_all_the_same() -> None:
    seen = Seen()
    seen.sequencer.joined()
    seen.live(3, 4)
    seen.steps += seen.sequencer.unanswered()
    seen.expect(None, 3, 4)
    assert not seen.sequencer.whole


def test_without_replay_a_gap_loses_what_was_known() -> None:
    seen = Seen(replayable=False)
    seen.live(0, 1, 4)
    seen.expect(0, 1, None, 4)
    seen.live(0, life=2.0)
    seen.expect(None, 0, life=2.0)


def test_an_end_frame_on_the_live_stream_is_a_reset() -> None:
    seen = Seen()
    seen.live(0, 1)
    seen.steps += seen.sequencer.live(END, b"")
    seen.expect(0, 1, None)
    seen.live(0, life=2.0)
    seen.replayed(0, life=2.0)
    seen.ended()
    seen.expect(0, life=2.0)


def test_what_waits_for_a_replay_is_bounded_and_what_did_not_fit_is_asked_for() -> None:
    seen = Seen(limits=IngestLimits(queue_frames_max=3))
    seen.live(0, 2, 3, 4, 5, 6)
    seen.replayed(0, 1)
    seen.ended()
    seen.expect(0, 1, 2, 3, 4)
    seen.live(7)
    seen.replayed(*range(8))
    seen.ended()
    seen.expect(5, 6, 7)


# ---------------------------------------------------------------- all of it


class Wire:
    """Between a toy engine and a desk: it drops, repeats, and loses connections."""

    def __init__(self, seed: int, retained: int) -> None:
        self.random = Random(seed)
        self.engine = ToyEngine(self.random, retained)
        self.desk = Desk()
        self.sequencer = Sequencer(True, IngestLimits(queue_frames_max=20))
        self.sent: list[tuple[int, bytes]] = []
        self.unnoticed = 0
        """Steps until it is seen that the connection broke with the engine's restart."""

    async def give(self, steps: Iterable[bytes | None]) -> None:
        for step in steps:
            if step is None:
                self.desk.member.own.clear()
            else:
                await self.desk.taking(step)

    async def history(self, steps: int) -> None:
        for _ in range(steps):
            await self._step()
        await self._heal()

    async def _step(self) -> None:
        self.unnoticed -= 1
        if self.unnoticed == 0:
            self.sequencer.joined()
        dice = self.random.random()
        if dice < 0.02:
            self.engine.restart()
            self.unnoticed = self.random.randint(1, 3)
        elif dice < 0.70:
            told = self.engine.step()
            self.sent.append(told)
            if self.random.random() < 0.85:
                await self.give(self.sequencer.live(*told))
        elif dice < 0.80 and self.sent:
            again = self.random.choice(self.sent[-200:])
            await self.give(self.sequencer.live(*again))
        elif dice < 0.83:
            self.sequencer.joined()
        else:
            await self._answer(lossy=True)

    async def _answer(self, lossy: bool) -> None:
        """One replay, all of it or not. A socket that overflows drops any but the first."""
        if self.sequencer.wanted is None:
            return
        session = self.sequencer.session
        for row, (number, payload) in enumerate(self.engine.replay(self.sequencer.wanted)):
            if lossy and row and self.random.random() < 0.1:
                continue
            if lossy and self.random.random() < 0.05:
                return  # no end
            await self.give(self.sequencer.replayed(number, payload))
            if self.sequencer.session != session:
                return
        await self.give(self.sequencer.ended())

    async def _heal(self) -> None:
        """The connection is made again, and nothing is lost any more."""
        self.sequencer.joined()
        for _ in range(20):
            await self._answer(lossy=False)
            if self.sequencer.wanted is None:
                self.sequencer.probe()
        told = self.engine.step()
        await self.give(self.sequencer.live(*told))
        for _ in range(5):
            await self._answer(lossy=False)


@pytest.mark.parametrize("seed", range(25))
def test_any_interleaving_of_drops_repeats_and_restarts_ends_with_what_the_engine_holds(seed: int) -> None:
    print(f"seed {seed}")
    wire = Wire(seed, retained=10_000)
    asyncio.run(wire.history(250))
    assert wire.desk.everything() == wire.engine.holds(), f"seed {seed}"
    assert not wire.desk.bad


@pytest.mark.parametrize("seed", range(25))
def test_when_the_engine_has_forgotten_what_was_missed_nothing_is_believed_that_is_not_there(
    seed: int,
) -> None:
    print(f"seed {seed}")
    wire = Wire(seed, retained=15)
    asyncio.run(wire.history(250))
    for known, truth in zip(wire.desk.everything(), wire.engine.holds(), strict=True):
        assert known <= truth, f"seed {seed}"
