"""A short run of the simulator: some histories, seeds that once found something, and every planted bug."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim import cluster_histories, cluster_planted, planted, planted_events
from tests.sim.histories import caught_by, failure, regressions, report
from tests.sim.operators import plan

BATCH = 20
PLANTED = planted.PLANTED | planted_events.PLANTED


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


def test_failing_history_is_told_with_its_seed_and_shortened() -> None:
    seed = 1
    steps = plan(seed)
    with PLANTED["retry_not_remembered"]():
        text = report(seed, steps)
    assert text.startswith(f"seed={seed} commit=")
    acts = text.splitlines()[1].split()[1:]
    assert 2 <= len(acts) <= len(steps) // 3
    assert "retry" in acts and "StartWrite" in text


@pytest.mark.slow
def test_command_line_ends_with_one_json_object() -> None:
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--seeds", "9"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    result = json.loads(run.stdout.splitlines()[-1])
    known = len(regressions()) + len(cluster_histories.regressions())
    assert result["histories"] == 9 + known and result["violations"] == 0
    assert result["core"]["histories"] == 8 + len(regressions())
    bugs = len(PLANTED) + len(cluster_planted.PLANTED)
    assert result["planted"] == result["planted_caught"] == bugs
    assert run.stderr == "", "progress is for terminals only"
