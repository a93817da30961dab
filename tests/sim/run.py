"""Seeded histories of the core against the naive model, and of a whole cluster in virtual time; and bugs
planted into each, which have to be noticed.

    python tests/sim/run.py --seeds 2000 [--only core|cluster] [--start S] [--jobs J] [--steps N]

A clustered history costs as much as three or four of the core: of the seeds, one in twenty is a cluster's
(`--only`: all). Prints each failing history, shortened, with its seed and the command that shows it again.
The last line is one JSON object with `histories`, `violations`, `planted` and `planted_caught`, and the same
for each simulator. Exit status 1 when there is a violation or a planted bug is not caught.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.sim import (
    cluster_histories,
    cluster_plan,
    cluster_planted,
    histories,
    operators,
    planted,
    planted_events,
)

REPORTS_MAX = 10
CHUNK = 10
CLUSTER_ONE_IN = 20
SIMULATORS = ("core", "cluster")
PLANTED = planted.PLANTED | planted_events.PLANTED


class Task(NamedTuple):
    """Some seeds of a simulator, or (`bug`) one planted bug."""

    simulator: str
    seeds: tuple[int, ...]
    bug: str = ""
    steps: int | None = None


class Result(NamedTuple):
    """What came of a task: `caught` is of a planted bug, `failed` are seeds."""

    task: Task
    failed: tuple[int, ...] = ()
    caught: bool = False


def prepare() -> None:
    """A process that runs histories makes garbage of one kind, which dies young."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def run(task: Task) -> Result:
    """Do one task, in a process of its own."""
    if task.bug:
        if task.simulator == "core":
            return Result(task, caught=histories.caught_by(PLANTED[task.bug]) is not None)
        bug = cluster_planted.PLANTED[task.bug]
        return Result(task, caught=cluster_histories.caught_by(task.bug, bug) is not None)
    return Result(task, tuple(seed for seed in task.seeds if fails(task, seed)))


def fails(task: Task, seed: int) -> bool:
    """Whether a history goes wrong."""
    if task.simulator == "core":
        return histories.failure(seed, operators.plan(seed, task.steps)) is not None
    return cluster_histories.failure(seed, cluster_plan.plan(seed)) is not None


def told(task: Task, seed: int) -> str:
    """A failing history for people."""
    if task.simulator == "core":
        return histories.report(seed, operators.plan(seed, task.steps))
    return cluster_histories.report(seed, cluster_plan.plan(seed))


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    """Everything there is to do, what takes longest first."""
    count = {"core": options.seeds, "cluster": options.seeds}
    if options.only is None:
        count["cluster"] = -(-options.seeds // CLUSTER_ONE_IN)
        count["core"] = options.seeds - count["cluster"]
    wanted = [options.only] if options.only else [*reversed(SIMULATORS)]
    bugs = {"core": PLANTED, "cluster": cluster_planted.PLANTED}
    known = {"core": histories.regressions(), "cluster": cluster_histories.regressions()}
    for simulator in wanted:
        for bug in bugs[simulator] if not options.no_planted else ():
            yield Task(simulator, (), bug)
    for simulator in wanted:
        seeds = [*known[simulator], *range(options.start, options.start + count[simulator])]
        for at in range(0, len(seeds), CHUNK):
            yield Task(simulator, tuple(seeds[at : at + CHUNK]), steps=options.steps)


def progress(text: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text:<70}")
        sys.stderr.flush()


def arguments() -> argparse.Namespace:
    """From the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2_000, help="how many histories (default 2000)")
    parser.add_argument("--start", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--only", choices=SIMULATORS, help="one simulator gets all the seeds")
    parser.add_argument("--no-planted", action="store_true", help="leave the planted bugs out")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)"
    )
    parser.add_argument(
        "--steps", type=int, default=None, help="acts of a core history (default: 60 to 200, by seed)"
    )
    return parser.parse_args()


def main() -> int:
    """Run the histories and the planted bugs."""
    options = arguments()
    started_s = time.monotonic()
    counts = {
        name: {"histories": 0, "violations": 0, "planted": 0, "planted_caught": 0} for name in SIMULATORS
    }
    todo = list(tasks(options))
    with get_context("fork").Pool(options.jobs, initializer=prepare) as pool:
        for done, result in enumerate(pool.imap_unordered(run, todo), 1):
            task, count = result.task, counts[result.task.simulator]
            if task.bug:
                count["planted"] += 1
                count["planted_caught"] += result.caught
                if not result.caught:
                    print(f"planted and not caught: {task.bug} ({task.simulator})", flush=True)
            count["histories"] += len(task.seeds)
            for seed in result.failed:
                count["violations"] += 1
                if sum(each["violations"] for each in counts.values()) <= REPORTS_MAX:
                    progress("")
                    print(told(task, seed), flush=True)
            progress(f"{done}/{len(todo)} tasks, {time.monotonic() - started_s:.0f} s")
    progress("")
    total = {key: sum(count[key] for count in counts.values()) for key in counts["core"]}
    seconds = time.monotonic() - started_s
    print(
        f"{counts['core']['histories']} histories of the core, {counts['cluster']['histories']} of clusters, "
        f"{total['planted_caught']} of {total['planted']} planted bugs caught, in {seconds:.0f} s "
        f"on {options.jobs} processes"
    )
    print(json.dumps(total | counts), flush=True)
    return 1 if total["violations"] or total["planted_caught"] < total["planted"] else 0


if __name__ == "__main__":
    sys.exit(main())
