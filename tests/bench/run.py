"""`make bench`: measures the service over the wire and prints a table. `--help` lists the options.

Nothing is judged here: aims stand beside the figures. Everything runs on this machine, in a temporary
directory, in processes that end with this one.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.bench_bare import BareServer
from tests.bench.bench_clients import Cell, Figures, Fleet
from tests.bench.bench_failover import failover_facts
from tests.bench.bench_lag import loop_lag
from tests.bench.bench_postgres import postgres_facts
from tests.bench.bench_report import CallRow, Fact, Report
from tests.bench.bench_sdk import sdk_cost
from tests.bench.bench_service import CHAIN_KEYS, NEVER_SNAPSHOT, BenchError, Service, machine_of, set_up
from tests.bench.bench_store import Filled, fill, replayed, restart_s

PARTS = ("lookup", "miss", "write", "store", "sdk", "lag")
LONG_KEYS = 7_400
SECONDS_MAX = 600
REPEAT_UNTIL_S = 110.0
"""Past this, what is left is measured once: on a busy machine the run still ends within its time."""
_BEGAN_S = time.monotonic()


class Plan(msgspec.Struct, frozen=True):
    """How much is measured."""

    parts: tuple[str, ...]
    quick: bool
    blocks: int
    clients: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: float
    repeats: int
    sdk_calls: int
    huge_lookups: int

    def cells(self, what: str) -> list[Cell]:
        """The cells of one kind of call."""
        return [
            Cell(what=what, keys=keys, clients=clients, seconds=self.seconds, blocks=self.blocks)
            for clients in self.clients
            for keys in self.sizes
            if what in self.parts
        ]


def plan_of(quick: bool, only: str | None) -> Plan:
    """A run without `store` needs no large store."""
    parts = PARTS if only is None else (only,)
    chains = 64 if quick or "store" not in parts else 977
    return Plan(
        parts=parts,
        quick=quick,
        blocks=chains * CHAIN_KEYS,
        clients=(1, 4),
        sizes=(1, 256) if quick else (1, 32, 256, 1024),
        seconds=0.2 if quick else 0.4,
        repeats=1 if quick else 3,
        sdk_calls=300 if quick else 2_000,
        huge_lookups=3 if quick else 15,
    )


def measure(plan: Plan, directory: Path, say: "Progress") -> Report:
    """The whole run. Writes come last: for everything else the store has its planned size."""
    report = Report(
        machine=machine_of(directory), quick=plan.quick, repeats=plan.repeats, blocks=plan.blocks, calls=[],
        facts=[],
    )  # fmt: skip
    data = directory / "data"
    with ExitStack() as stack:
        bare = None
        if {"lookup", "miss", "write"}.intersection(plan.parts):
            bare = stack.enter_context(BareServer(directory, plan.blocks))
        with Service(data, *NEVER_SNAPSHOT) as service:
            set_up(service.port)
            say(f"writing {plan.blocks:,} blocks")
            filled = fill(service, plan.blocks, LONG_KEYS)
            report.calls += call_rows(plan, ("lookup", "miss"), service, bare, say)
            if "sdk" in plan.parts:
                say("the SDK by itself")
                for keys in (1, 256):
                    report.facts += sdk_facts(service.port, keys, plan)
            if "lag" in plan.parts:
                say(f"beside lookups of {LONG_KEYS:,} keys in JSON")
                report.facts += lag_facts(service.port, plan)
        if "store" in plan.parts:
            report.facts[:0] = store_facts(data, service, filled, plan.repeats, say)
        if "write" in plan.parts:
            with Service(data, *NEVER_SNAPSHOT) as service:
                report.calls += call_rows(plan, ("write",), service, bare, say)
    return report


def measure_backend(plan: Plan, directory: Path, say: "Progress") -> Report:
    """Only what a shared journal and other replicas change."""
    facts = postgres_facts(directory, 3 * plan.seconds, plan.repeats, say)
    facts += failover_facts(plan.blocks, say)
    return Report(
        machine=machine_of(directory), quick=plan.quick, repeats=plan.repeats, blocks=0, calls=[], facts=facts
    )


def turns(repeats: int) -> Iterator[int]:
    """One turn, and the others while there is time."""
    for turn in range(repeats):
        if not turn or time.monotonic() < _BEGAN_S + REPEAT_UNTIL_S:
            yield turn


def call_rows(
    plan: Plan, kinds: tuple[str, ...], service: Service, bare: BareServer | None, say: "Progress"
) -> Iterator[CallRow]:
    """Each cell and its bare counterpart, turn by turn, so that a busy moment of the machine meets both."""
    cells = [cell for what in kinds for cell in plan.cells(what)]
    if not cells:
        return
    assert bare is not None
    with Fleet(max(plan.clients), service, bare) as fleet:
        for cell in cells:
            say(f"{cell.what}: {cell.clients} clients, {cell.keys} keys a call")
            ours: list[Figures] = []
            theirs: list[Figures] = []
            for _ in turns(plan.repeats):
                ours.append(fleet.measure(cell, bare=False))
                theirs.append(fleet.measure(cell, bare=True))
            yield CallRow(cell=cell, service=_best(ours), bare=_best(theirs))


def _best(figures: list[Figures]) -> Figures:
    return max(figures, key=lambda one: one.keys_per_s)


def sdk_facts(port: int, keys: int, plan: Plan) -> Iterator[Fact]:
    """What the SDK costs."""
    cost = sdk_cost(port, keys, plan.sdk_calls, 3)
    yield Fact(
        name=f"SDK's own cost, lookup of {keys}",
        value=cost.own_us,
        unit="us/call",
        aim="< 100",
        note=f"processor time {cost.cpu_us:.0f}, of it moving the bytes {cost.socket_cpu_us:.0f}; "
        f"median call {cost.wall_us:.0f} against a canned answer",
    )


def lag_facts(port: int, plan: Plan) -> Iterator[Fact]:
    """How long a huge JSON lookup takes, and how long others wait for it."""
    lag = loop_lag(port, LONG_KEYS, plan.huge_lookups)
    yield Fact(
        name=f"lookup of {lag.keys:,} keys in JSON",
        value=lag.huge_ms,
        unit="ms",
        note="median; with the text of every place",
    )
    yield Fact(
        name="slowest lookup of 1 beside it",
        value=lag.beside_worst_ms,
        unit="ms",
        note=f"median over {plan.huge_lookups} of them, p99 {lag.beside_p99_us / 1000:,.1f}; alone the "
        f"slowest took {lag.alone_worst_ms:.1f}, p99 {lag.alone_p99_us / 1000:,.1f}",
    )


def store_facts(data: Path, ended: Service, filled: Filled, repeats: int, say: "Progress") -> Iterator[Fact]:
    """What the blocks cost, once the service that wrote them has ended. Leaves a snapshot behind."""
    blocks = filled.blocks
    before_mib, after_mib = filled.rss_before_bytes / 2**20, filled.rss_after_bytes / 2**20
    yield Fact(
        name="memory of the service",
        value=(filled.rss_after_bytes - filled.rss_before_bytes) / blocks,
        unit="bytes/block",
        aim="<= 450",
        note=f"resident, from {before_mib:.0f} to {after_mib:.0f} MiB by {blocks:,} blocks",
    )
    yield Fact(
        name=f"filling, 1 client, {CHAIN_KEYS:,} keys a call",
        value=blocks / filled.seconds,
        unit="blocks/s",
        note=f"server cpu {filled.cpu_us_per_block:.1f} us, journal {filled.journal_bytes / blocks:.0f} bytes"
        " a block",
    )
    say("restart from the journal")
    from_journal_s = min(restart_s(data) for _ in turns(repeats))
    say("replay and snapshot")
    found = replayed(ended.journal, len(list(turns(repeats))))
    say("restart from a snapshot")
    from_snapshot_s = min(restart_s(data) for _ in turns(repeats))
    yield Fact(
        name="journal replay",
        value=found.blocks / found.replay_s,
        unit="blocks/s",
        aim=">= 300k",
        note=f"{found.blocks:,} blocks in {found.replay_s:.1f} s, processor time {found.replay_cpu_s:.1f}",
    )
    yield Fact(
        name="restart from the journal",
        value=from_journal_s,
        unit="s",
        note=f"{found.blocks:,} blocks; without any it takes {ended.started_s:.1f}",
    )
    yield Fact(
        name="restart from a snapshot",
        value=from_snapshot_s,
        unit="s",
        note=f"{found.blocks:,} blocks, {found.snapshot_bytes / 2**20:.0f} MiB",
    )
    yield Fact(
        name="snapshot, cut and saved",
        value=found.save_s,
        unit="s",
        note="beside the service, in a process of its own; replay not counted",
    )
    yield Fact(
        name="snapshot, loaded and proved",
        value=found.load_s,
        unit="s",
        note=f"processor time {found.load_cpu_s:.1f}; its digest is the state's",
    )


class Progress:
    """One line that is written over, and nothing where nobody looks."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def __call__(self, doing: str) -> None:
        if self._shown:
            sys.stderr.write(f"\r\x1b[K{doing}")
            sys.stderr.flush()


def _give_up(number: int, frame: FrameType | None) -> None:
    raise SystemExit("bench: took too long" if number == signal.SIGALRM else 128 + number)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="run.py", description="Measure the service over the wire.", allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="a small store, fewer sizes, measured once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--only", choices=PARTS, help="measure this part only")
    parser.add_argument(
        "--backend", choices=("sqlite", "postgres"), default="sqlite",
        help="postgres: durable writes on PostgreSQL beside SQLite, and where the time goes",
    )  # fmt: skip
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _give_up)
    signal.alarm(SECONDS_MAX)
    say = Progress()
    try:
        with tempfile.TemporaryDirectory(prefix="ucm-bench-") as directory:
            plan = plan_of(arguments.quick, arguments.only)
            if arguments.backend == "postgres":
                report = measure_backend(plan, Path(directory), say)
            else:
                report = measure(plan, Path(directory), say)
    except BenchError as error:
        say("")
        sys.stderr.write(f"bench: {error}\n")
        return 1
    report.load_after = os.getloadavg()[0]
    report.seconds = time.monotonic() - _BEGAN_S
    say("")
    sys.stdout.write(report.text() + "\n")
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
