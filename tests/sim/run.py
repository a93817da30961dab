"""Seeded histories of the core against the naive model, and the planted bugs.

    python tests/sim/run.py --seeds 2000 [--start S] [--steps N]

Prints each failing history, shortened; the last line is one JSON object with `histories`, `violations`,
`planted` and `planted_caught`. Exit status 1 when there is a violation or a planted bug is not caught.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.sim.histories import caught_by, failure, regressions, report
from tests.sim.operators import plan
from tests.sim.planted import PLANTED

REPORTS_MAX = 10


def progress(text: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text:<60}")
        sys.stderr.flush()


def main() -> int:
    """Run the histories, then the planted bugs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2_000, help="how many histories (default 2000)")
    parser.add_argument("--start", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument(
        "--steps", type=int, default=None, help="acts a history (default: 60 to 200, by seed)"
    )
    options = parser.parse_args()
    seeds = [*regressions(), *range(options.start, options.start + options.seeds)]
    violations = 0
    for done, seed in enumerate(seeds):
        if done % 10 == 0:
            progress(f"histories {done}/{len(seeds)}, violations {violations}")
        steps = plan(seed, options.steps)
        if failure(seed, steps) is None:
            continue
        violations += 1
        if violations <= REPORTS_MAX:
            progress("")
            print(report(seed, steps), flush=True)
    caught = 0
    for name, bug in PLANTED.items():
        progress(f"planted: {name}")
        if caught_by(bug) is None:
            print(f"planted and not caught: {name}", flush=True)
        else:
            caught += 1
    progress("")
    result = {
        "histories": len(seeds),
        "violations": violations,
        "planted": len(PLANTED),
        "planted_caught": caught,
    }
    print(json.dumps(result), flush=True)
    return 1 if violations or caught < len(PLANTED) else 0


if __name__ == "__main__":
    sys.exit(main())
