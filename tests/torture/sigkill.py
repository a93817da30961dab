"""Kill the service again and again while engines write, and hold it against what they were told.

`python tests/torture/sigkill.py --kills 50`: the real service on SQLite, killed by SIGKILL at random moments.
After each restart and at the end: every acknowledged finish is found at its place, every unfinished write is
free again within its time, usage counters equal the sum of rows, epochs rise, leases from before are unknown,
no place is given out twice, and a repeated call gets its first answer. The last line is one JSON object; the
exit status is 1 when anything else was seen.
"""

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.torture.checks import Broken, Checker
from tests.torture.ledger import Ledger
from tests.torture.service_process import ServiceProcess
from tests.torture.writers import SETTINGS, Actor, Deleter, Writer, client_of, furnish, now_ms

PROBLEMS_SHOWN = 20
SAMPLE = 20_000
"""Blocks found before that are looked at again after each restart; at the end all are."""


@dataclass
class Outcome:
    """The last line of a run."""

    kills: int
    acked_finishes: int
    """Finish calls that were acknowledged."""
    lost: int
    """Acknowledged blocks that were not found afterwards."""
    unfinished: int
    """Write sessions that were left open and looked at after their time."""
    not_freed: int
    usage_mismatch: int
    epochs_increasing: bool
    violations: int
    """Everything that must not happen and did, the above included."""
    seconds: float
    seed: int


def run(
    directory: Path,
    *,
    kills: int,
    seed: int,
    between_s: tuple[float, float],
    writers: int,
    **settings: object,
) -> tuple[Outcome, Ledger]:
    """One run: `kills` kills, each after a random time out of `between_s`; `settings` are the service's."""
    began_s = time.monotonic()
    rng = random.Random(seed)
    ledger = Ledger()
    with ServiceProcess(directory, **{**SETTINGS, **settings}) as service:
        service.start()
        with client_of(service.url) as operator:
            furnish(operator)
        checker = Checker(service.url, ledger, seed)
        actors: list[Actor] = [Writer(number, service.url, ledger, seed) for number in range(writers)]
        deleter = Deleter(service.url, ledger)
        try:
            checker.begin()
            checker.epoch_rose(service.epoch())
            for actor in (*actors, deleter):
                actor.start()
            for _ in range(kills):
                time.sleep(rng.uniform(*between_s))
                kill_and_look(service, checker)
            time.sleep(rng.uniform(*between_s))
            for actor in actors:
                actor.stop()
            checker.settle()
            checker.nothing_is_deleting(20.0)
        except Broken as error:
            ledger.wrong(str(error))
        finally:
            for actor in (*actors, deleter):
                actor.halt.set()
            checker.close()
        if "Traceback" in service.log():
            ledger.wrong(f"the service had a fault: {service.log()[-2_000:]}")
    rising = all(later > earlier for earlier, later in zip(checker.epochs, checker.epochs[1:], strict=False))
    outcome = Outcome(
        kills=kills,
        acked_finishes=ledger.finishes,
        lost=checker.lost,
        unfinished=checker.checked,
        not_freed=checker.not_freed,
        usage_mismatch=checker.usage_mismatch,
        epochs_increasing=rising and len(checker.epochs) == kills + 1,
        violations=len(ledger.problems),
        seconds=round(time.monotonic() - began_s, 1),
        seed=seed,
    )
    return outcome, ledger


def kill_and_look(service: ServiceProcess, checker: Checker) -> None:
    """One kill in full flight, and what must hold after it."""
    lease = checker.take_lease()
    killed_ms = now_ms()
    service.kill()
    service.start()
    checker.ledger.restarted(killed_ms, now_ms())
    checker.epoch_rose(service.epoch())
    if lease is not None:
        checker.lease_is_unknown(lease)
    checker.all_found(SAMPLE)
    checker.due_are_free(alone=False)


def good(outcome: Outcome) -> bool:
    """Whether nothing was seen that must not happen, and there was something to see."""
    bad = outcome.lost + outcome.not_freed + outcome.usage_mismatch + outcome.violations
    return not bad and outcome.epochs_increasing and outcome.acked_finishes > 0 and outcome.unfinished > 0


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="Kill the service under write load, and check what it kept.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds-between", type=float, nargs=2, default=(0.3, 1.5), metavar=("MIN", "MAX"))
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--snapshot-batches", type=int, default=200)
    parser.add_argument("--data", type=Path, help="directory to work in (default: a temporary one)")
    args = parser.parse_args(arguments)
    logging.getLogger("metaservice.client").setLevel(
        logging.CRITICAL
    )  # its calls fail all the time, on purpose
    with tempfile.TemporaryDirectory(prefix="ucm-torture-") as temporary:
        outcome, ledger = run(
            args.data or Path(temporary),
            kills=args.kills,
            seed=args.seed,
            between_s=tuple(args.seconds_between),
            writers=args.writers,
            snapshot_batches=args.snapshot_batches,
        )
    for problem in ledger.problems[:PROBLEMS_SHOWN]:
        sys.stderr.write(problem + "\n")
    sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
    return 0 if good(outcome) else 1


if __name__ == "__main__":
    sys.exit(main())
