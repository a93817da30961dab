"""A short run of the simulator: some histories, seeds that once found something, and every planted bug."""

import pytest

from tests.sim.histories import caught_by, failure, regressions, report
from tests.sim.operators import plan
from tests.sim.planted import PLANTED

BATCH = 20


def hold(seeds: list[int]) -> None:
    """No history of these seeds finds anything; else the first that does is shown, shortened."""
    for seed in seeds:
        steps = plan(seed)
        if failure(seed, steps) is not None:
            pytest.fail(report(seed, steps), pytrace=False)


@pytest.mark.parametrize("first", range(1, 61, BATCH))
def test_histories_keep_the_invariants(first: int) -> None:
    hold(list(range(first, first + BATCH)))


def test_seeds_that_once_found_something_stay_clean() -> None:
    hold(regressions())


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_caught(name: str) -> None:
    assert caught_by(PLANTED[name]) is not None, f"no history notices {name}"
