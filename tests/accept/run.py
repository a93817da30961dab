"""`make accept-vllm`: three vLLM engines share a cache through three replicas of the service, engines and
replicas are killed, and every token has to be the one that an engine without any cache gives.

Its last line is one JSON object, `ledger.Figures`. Exit status 0: everything was as it has to be; 1: not
everything, and the lines above say what; 2: it could not be carried through; 130: it was interrupted.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from metaservice.cli.local.ending import end_in_order
from metaservice.cli.local.places import keep, temporary_folder
from metaservice.cli.local.process import LocalFailed
from metaservice.client import ClientError
from tests.accept import audit, ledger, scenes
from tests.accept.documents import Documents, tokenizer_of
from tests.accept.fleet import Fleet
from tests.accept.handle import ENVIRONMENT
from tests.accept.ledger import Figures
from tests.accept.messages import EngineOptions
from tests.accept.plan import TooFew, plan
from tests.accept.site import Site

EXIT_SHORT = 1
EXIT_FAILED = 2
PLAIN = "engine-plain"


class Clock:
    """Progress lines with the time since the start."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def __call__(self, text: str) -> None:
        """Print one."""
        print(f"[{time.monotonic() - self._began_s:5.1f}] {text}", flush=True)


def run(folder: Path, seed: int) -> bool:
    """Everything; whether all was as it has to be. Raises LocalFailed, ClientError, TooFew, OSError."""
    note = Clock()
    model = _model(folder)
    documents = Documents(tokenizer_of(model), seed)
    asked = plan(documents)
    note(f"a tiny model and {sum(1 for _ in asked)} requests about the standard library are ready")
    with Site(folder) as site, closing(Fleet(folder)) as fleet:
        stage = scenes.Stage(site=site, fleet=fleet, plan=asked, model=model, note=note)
        _start(stage, folder)
        sensitive = scenes.oracle(stage)
        fleet.stop(scenes.SPOILED)
        fleet.launch(scenes.ENGINES[2], stage.options(scenes.ENGINES[2]))
        cold_ms, hit_ms = scenes.first_tokens(stage)
        fleet.await_ready(*scenes.ENGINES)
        note("three engines share the cache")
        scenes.steady(stage)
        scenes.kill_engine(stage)
        scenes.kill_leader(stage)
        fleet.launch(scenes.VICTIM, stage.options(scenes.VICTIM))
        scenes.restart(stage)
        scenes.bypass(stage)
        scenes.outage(stage)
        scenes.damage(stage)
        leases = scenes.leases_left(stage)
        idle_ms, busy_ms = scenes.steps_ms(stage)
        fleet.stop(*scenes.ENGINES)
        found = audit.judge(audit.read(site.audit_of(name) for name in scenes.ENGINES), stage.killed)
    note(f"{found.pages} loaded pages were checked against the records of those who stored them")
    for sentence in found.dirty:
        note(f"dirty read: {sentence}")
    figures = _figures(stage, sensitive, found, (cold_ms, hit_ms), (idle_ms, busy_ms), leases, folder)
    shown = [*stage.shown, *ledger.verdicts(figures)]
    for passed, what in shown[len(stage.shown) :]:
        note(("ok    " if passed else "FAILED ") + what)
    for passed, what in shown:
        if not passed:
            sys.stderr.write(f"not as it has to be: {what}\n")
    print(json.dumps(msgspec.to_builtins(figures)), flush=True)
    return all(passed for passed, _ in shown)


def _model(folder: Path) -> Path:
    """Made in a process of its own: this one is to stay small. Raises LocalFailed."""
    model = folder / "model"
    command = [sys.executable, "-m", "tests.accept.model", str(model)]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise LocalFailed(f"no model could be made:\n{done.stderr}")
    return model


def _start(stage: scenes.Stage, folder: Path) -> None:
    """The service and two engines come up while the baseline is made; then the spoiled engine does."""
    note, fleet = stage.note, stage.fleet
    with closing(Fleet(folder)) as plain:
        plain.launch(PLAIN, EngineOptions(model=str(stage.model), arguments={"enable_prefix_caching": False}))
        stage.site.launch()
        stage.site.await_ready()
        note("three replicas on PostgreSQL and three etcd answer; a worker for the disk, one for memory")
        for name in scenes.ENGINES[:2]:
            fleet.launch(name, stage.options(name))
        plain.await_ready(PLAIN)
        scenes.baseline(stage, plain)
        plain.stop(PLAIN)
    fleet.launch(scenes.SPOILED, stage.options(scenes.SPOILED, spoiled=True))
    fleet.await_ready(*scenes.ENGINES[:2], scenes.SPOILED)


def _figures(
    stage: scenes.Stage,
    sensitive: bool,
    found: audit.Found,
    first_ms: tuple[list[float], list[float]],
    added_ms: tuple[list[float], list[float]],
    leases: int,
    folder: Path,
) -> Figures:
    rows = stage.fleet.rows
    (folder / "rows.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    wrong = ledger.wrong(rows, stage.baseline)
    for row in wrong:
        stage.note(f"wrong: {row.phase}, {row.request.id} on {row.engine}, {row.loaded} blocks loaded")
    counts = stage.fleet.counts()
    stage.note("counters: " + json.dumps({name: round(value) for name, value in sorted(counts.items())}))

    def rate(*phases: str) -> float:
        return ledger.hit_rate(row for row in rows if row.phase in phases)

    before = ["steady"]
    calm = rate(*before)
    engine, leader = rate("after-engine-kill"), rate("after-leader-kill")
    drops = calm - engine, rate("steady", "after-engine-kill") - leader
    return Figures(
        requests=len(rows),
        wrong_outputs=len(wrong),
        hit_rate_steady=round(calm, 4),
        hit_rate_after_engine_kill=round(engine, 4),
        hit_rate_after_leader_kill=round(leader, 4),
        hit_rate_drop_max=round(max(drops), 4),
        dirty_reads=len(found.dirty) + sum(row.loaded > 0 for row in wrong),
        engine_errors=sum(row.answer.finish != "length" for row in rows) + _tracebacks(folder),
        oracle_sensitive=sensitive,
        added_step_p99_ms=round(max(ledger.p99(added_ms[0]), ledger.p99(added_ms[1])), 3),
        ttft_cold_p50_ms=round(ledger.p50(first_ms[0]), 1),
        ttft_hit_p50_ms=round(ledger.p50(first_ms[1]), 1),
        lookups_per_request=round(counts.get("lookups", 0) / max(1, counts.get("requests", 0)), 3),
        leases_left=leases,
    )


def _tracebacks(folder: Path) -> int:
    """Exceptions that engines wrote down."""
    logs = [folder / f"{name}.log" for name in scenes.ENGINES]
    return sum(log.read_text(encoding="utf-8", errors="replace").count("Traceback (most") for log in logs)


def main(argv: Sequence[str] | None = None) -> int:
    """From a command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="make accept-vllm ACCEPT_ARGS=...",
        description="The acceptance of the whole.",
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=1, help="of the questions and their order (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the temporary folder behind")
    options = parser.parse_args(argv)
    end_in_order()
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        stay = True
        try:
            good = run(folder, options.seed)
            stay = options.keep or not good
        except (LocalFailed, ClientError, TooFew, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            return EXIT_FAILED
        except SystemExit:
            stay = options.keep
            raise
        finally:
            if stay:
                keep(folder)
                sys.stderr.write(f"seed {options.seed}; data and logs are in {folder}\n")
    return 0 if good else EXIT_SHORT


if __name__ == "__main__":
    sys.exit(main())
