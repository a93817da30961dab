"""Which of several places is asked next, and when: in time that only passes when everybody waits."""

import asyncio
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any

import pytest

from metaservice.leadership.errors import LeadershipUnavailable
from metaservice.leadership.rota import PlaceFailed, Rota

TIMEOUT_MS = 750


class _Leaps(selectors.SelectSelector):
    """Waits for nobody: time is set forward to the moment at which somebody has something to do."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a time of its own."""

    def __init__(self) -> None:
        self.leaps = _Leaps()
        super().__init__(self.leaps)

    def time(self) -> float:
        return self.leaps.now_s


def run(test: Callable[[Callable[[], float]], Coroutine[Any, Any, None]]) -> None:
    """The test, with the clock of a loop whose time is virtual."""
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(test(loop.time))


class Places:
    """What each place does when it is asked: 'answers', 'refuses', or 'hangs'."""

    def __init__(self, now_s: Callable[[], float], *behaviours: str) -> None:
        self.behaviours = list(behaviours)
        self.asked: list[tuple[float, int]] = []
        self._now_s = now_s

    async def attempt(self, index: int) -> int:
        self.asked.append((self._now_s(), index))
        if self.behaviours[index] == "refuses":
            raise PlaceFailed("refused")
        if self.behaviours[index] == "hangs":
            await asyncio.sleep(1_000_000)
        return index

    def rota(self, chance: Callable[[], float] = lambda: 0.0) -> Rota:
        names = [f"p{number}" for number in range(len(self.behaviours))]
        return Rota("places", names, TIMEOUT_MS, self._now_s, chance)


def test_the_one_that_answered_is_asked_again() -> None:
    async def test(now_s: Callable[[], float]) -> None:
        places = Places(now_s, "refuses", "answers", "answers")
        rota = places.rota()
        for _ in range(3):
            assert await rota.ask("asking", places.attempt) == 1
            await asyncio.sleep(1)
        assert [index for _, index in places.asked] == [0, 1, 1, 1]
        places.behaviours[1] = "refuses"
        assert await rota.ask("asking", places.attempt) in (0, 2)

    run(test)


def test_d4_one_that_hangs_costs_one_timeout_once() -> None:
    async def test(now_s: Callable[[], float]) -> None:
        places = Places(now_s, "hangs", "answers", "answers")
        rota = places.rota()
        await rota.ask("asking", places.attempt)
        assert now_s() == pytest.approx(0.75)
        for _ in range(10):
            await rota.ask("asking", places.attempt)
        assert now_s() == pytest.approx(0.75)

    run(test)


@pytest.mark.parametrize("behaviour", ["hangs", "refuses"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_call_ends_within_two_timeouts_and_says_what_each_did(behaviour: str, count: int) -> None:
    async def test(now_s: Callable[[], float]) -> None:
        places = Places(now_s, *([behaviour] * count))
        rota = places.rota(Random(count).random)
        for _ in range(20):
            started_s = now_s()
            with pytest.raises(
                LeadershipUnavailable, match="refused" if behaviour == "refuses" else "750 ms"
            ):
                await rota.ask("asking", places.attempt)
            assert now_s() - started_s <= 1.5 + 1e-6
        assert {index for _, index in places.asked} == set(range(count)), "each gets its turn"
        places.behaviours = ["answers"] * count
        await rota.ask("asking", places.attempt)

    run(test)


def test_other_errors_are_answers() -> None:
    async def test(now_s: Callable[[], float]) -> None:
        places = Places(now_s, "answers", "answers")

        async def attempt(index: int) -> int:
            await places.attempt(index)
            raise ValueError

        rota = places.rota()
        for _ in range(2):
            with pytest.raises(ValueError):
                await rota.ask("asking", attempt)
        assert [index for _, index in places.asked] == [0, 0]

    run(test)


def attempts_per_tenth(chance_of: Callable[[int], Callable[[], float]]) -> Counter[int]:
    """Of a hundred that lost the same server for 20 s at one moment and ask in step."""
    attempts: Counter[int] = Counter()

    async def test(now_s: Callable[[], float]) -> None:
        async def one(number: int) -> None:
            places = Places(now_s, "refuses")
            rota = places.rota(chance_of(number))
            while now_s() < 20:
                with pytest.raises(LeadershipUnavailable):
                    await rota.ask("asking", places.attempt)
            attempts.update(int(at_s * 10) for at_s, _ in places.asked if 2 <= at_s < 20)

        waiting: list[Awaitable[None]] = [one(number) for number in range(100)]
        await asyncio.gather(*waiting)

    run(test)
    return attempts


def test_c9_a_hundred_that_lost_the_same_server_do_not_come_back_in_step(seed: int) -> None:
    spread = attempts_per_tenth(lambda number: Random(seed * 1_000 + number).random)
    mean = sum(spread.values()) / 180
    assert 20 < mean < 35, "each rests 0.19 to 0.56 s between two attempts"
    assert max(spread.values()) < 2 * mean
    assert len(spread) == 180
    in_step = attempts_per_tenth(lambda number: lambda: 0.5)
    assert max(in_step.values()) == 100, "without chance they would"
