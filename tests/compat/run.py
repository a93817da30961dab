"""`make compat-dynamo`: the real consumers of Dynamo, an indexer and a frontend, follow a real service while
things go wrong, and in the end score what is true.

Its last line is one JSON object: `cases`, `passed`, `mismatched_scores` (those that were wrong when a case
ended) and `failover_recovery_p50_s` (from a new lease to exact scores; null when no leader was killed). Exit
status 0: all passed; 1: not all; 2: it could not be carried through; 130: it was interrupted.
"""

import argparse
import json
import logging
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from metaservice.cli.local.ending import end_in_order
from metaservice.cli.local.places import keep, temporary_folder
from metaservice.cli.local.process import LocalFailed
from tests.compat import cases_failover, cases_failures, cases_frontend, cases_overlay
from tests.compat.judge import CaseFailed
from tests.compat.site import Site
from tests.compat.stage import Case, Stage

EXIT_SHORT = 1
EXIT_FAILED = 2
RECOVERY_P50_S_MAX = 1.0
ENTRIES = 30_000

CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        cases_overlay.stores_and_removes,
        cases_overlay.row_10_duplicates,
        cases_overlay.row_12_cleared,
        cases_overlay.row_18_ranks,
        cases_overlay.rows_19_20_adapters_and_salts,
        cases_overlay.rows_6_27_mixed_hashes,
        cases_failures.row_8_late_join,
        cases_failures.row_11_worker_expiry,
        cases_failures.row_13_dropped_frames,
        cases_failures.row_22_frozen_subscriber,
        cases_failures.row_22_slow_subscriber,
        cases_failures.row_24_indexer_restarted,
        cases_failures.publisher_killed,
        cases_failures.row_14_lost_history,
        cases_failover.rows_1_9_26_replays,
        cases_failover.leader_killed,
        cases_frontend.frontend_follows,
    )
}


class Clock:
    """Progress lines with the time since the start."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def __call__(self, text: str) -> None:
        """Print one."""
        print(f"[{time.monotonic() - self._began_s:5.1f}] {text}", flush=True)


def run(folder: Path, dynamo: Path, names: Sequence[str], seed: int, entries: int) -> bool:
    """All cases, and the last line; whether all passed. Raises LocalFailed, OSError."""
    note = Clock()
    note(f"seed {seed}; {len(names)} cases")
    passed = mismatched = 0
    chance = random.Random(seed)
    with Site(folder, dynamo, chance, note) as site:
        stage = Stage(site, chance, note, entries)
        for name in names:
            chance.seed(f"{seed} {name}")
            try:
                site.mend()
                seen = CASES[name](stage)
            except CaseFailed as failed:
                mismatched += failed.mismatched
                note(f"FAILED {name}: {failed}")
            except Exception as failed:  # the other cases go on
                note(f"FAILED {name}: {type(failed).__name__}: {failed}")
            else:
                passed += 1
                note(f"passed {name}: {seen}")
    p50_s = round(median(stage.recoveries_s), 3) if stage.recoveries_s else None
    figures = {
        "cases": len(names),
        "passed": passed,
        "mismatched_scores": mismatched,
        "failover_recovery_p50_s": p50_s,
    }
    print(json.dumps(figures), flush=True)
    return passed == len(names) and (p50_s is None or p50_s < RECOVERY_P50_S_MAX)


def main(argv: Sequence[str] | None = None) -> int:
    """From a command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="make compat-dynamo COMPAT_ARGS=...", description="Dynamo's indexer and frontend on our events."
    )
    parser.add_argument("--dynamo", type=Path, required=True, help="its Python interpreter")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument(
        "--only", action="append", choices=list(CASES), metavar="CASE", help="just this one; may be repeated"
    )
    parser.add_argument(
        "--entries", type=int, default=ENTRIES, help="blocks that a restarted indexer has to get"
    )
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument("--keep", action="store_true", help="leave the temporary folder behind")
    options = parser.parse_args(argv)
    if options.list:
        for name, case in CASES.items():
            print(f"{name}: {' '.join((case.__doc__ or '').split())}")
        return 0
    logging.disable(logging.ERROR)  # of the clients, which say that replicas do not answer
    end_in_order()
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_folder())
            if options.keep:
                keep(folder)
                sys.stderr.write(f"data and logs are in {folder}\n")
            whole = run(folder, options.dynamo, options.only or list(CASES), options.seed, options.entries)
    except (LocalFailed, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    return 0 if whole else EXIT_SHORT


if __name__ == "__main__":
    sys.exit(main())
