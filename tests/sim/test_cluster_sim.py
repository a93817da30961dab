"""A short run of the cluster simulator: some histories, seeds that once found something, the planted bugs,
and the report of a failing history."""

import pytest

from tests.sim.cluster_histories import CAUGHT_BY, caught_by, failure, regressions, report
from tests.sim.cluster_plan import FAULTS, plan
from tests.sim.cluster_planted import PLANTED
from tests.sim.cluster_play import play

SEEDS_MAX = 40
"""A planted bug that needs more is tried with the seed that is known to catch it."""


def hold(seeds: list[int]) -> None:
    """No history of these seeds finds anything; else the first that does is shown, shortened."""
    for seed in seeds:
        acts = plan(seed)
        if failure(seed, acts) is not None:
            pytest.fail(report(seed, acts), pytrace=False)


@pytest.mark.parametrize("first", range(1, 25, 8))
def test_clustered_histories_keep_the_invariants(first: int) -> None:
    hold(list(range(first, first + 8)))


def test_clusters_that_once_found_something_stay_clean() -> None:
    hold(regressions())


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_of_a_cluster_is_caught(name: str) -> None:
    assert caught_by(name, PLANTED[name], SEEDS_MAX) is not None, f"no clustered history notices {name}"


def test_seeds_known_to_catch_a_bug_are_of_bugs_that_exist() -> None:
    assert CAUGHT_BY.keys() <= PLANTED.keys()


def test_every_kind_of_fault_happens() -> None:
    kinds = {act.kind for seed in range(1, 60) for act in plan(seed)}
    assert set(FAULTS) <= kinds


def test_a_history_is_the_same_every_time() -> None:
    worlds = [play(5, plan(5)) for _ in range(2)]
    first, second = ([(h.seq, h.epoch) for h in world.witness.histories] for world in worlds)
    assert first == second and worlds[0].commands == worlds[1].commands
    assert worlds[0].commands >= 200


def test_failing_cluster_is_told_with_its_seed_and_shortened() -> None:
    seed = 6
    acts = plan(seed)
    with PLANTED["fence_removed"]():
        text = report(seed, acts)
    head, again, kept = text.splitlines()[:3]
    assert head.startswith(f"cluster seed={seed} commit=") and "I5" in head
    assert f"--only cluster --start {seed} --seeds 1" in again
    assert 1 <= len(kept.split()) - 1 <= len(acts) // 2
