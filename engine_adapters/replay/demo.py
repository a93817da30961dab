"""The demo: engines share a cache through the service; an engine and the service are killed on the way. In
a cluster that is there already it is the replica that leads.

`python -m engine_adapters.replay.demo` runs it. Its last line is one JSON object. Exit status 0: everything
that it has to show was shown; 1: not everything; 2: it could not be carried through; 130: it was
interrupted.
"""

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from dataplane import DataPlaneError, open_backend
from engine_adapters.replay import hashing
from engine_adapters.replay.audit import Auditor
from engine_adapters.replay.children import ChildFailed, Children
from engine_adapters.replay.deployment import INSTANCE, KEY_LENGTH, PART, Sizing
from engine_adapters.replay.dispatch import Dispatcher, Hooks, OnPhase
from engine_adapters.replay.engine_handle import EngineHandle
from engine_adapters.replay.ledger import Ledger
from engine_adapters.replay.plan import Plan
from engine_adapters.replay.replicas import ClusterFailed, Description
from engine_adapters.replay.report import (
    EventTeller,
    Fault,
    Note,
    Progress,
    Result,
    Teller,
    TextTeller,
    Verdict,
    engines_table,
    figures_table,
)
from engine_adapters.replay.requests import Request
from engine_adapters.replay.scenes import Cluster, OwnService, Scene
from engine_adapters.replay.sources import SourcesError
from engine_adapters.replay.trace import Trace, TraceError
from engine_adapters.replay.workload import Workload
from metaservice.client import ClientError

REQUESTS_DEFAULT = 1_000
TEXT_BLOCK_SIZE_TOKENS = 128
TEXT_BLOCK_BYTES = 4_096
TRACE_BLOCK_BYTES = 2_048

FAILURES = (ChildFailed, ClientError, ClusterFailed, DataPlaneError, SourcesError, TraceError, OSError)
"""What can stop a run that is nobody's mistake in this program."""

FILE_OVERHEAD_BYTES = 4_608
"""What a block takes on a disk besides its bytes, at most: a header, and the rest of its last page."""


def arguments() -> argparse.ArgumentParser:
    """The command line of the demo."""
    parser = argparse.ArgumentParser(
        prog="ucm-meta demo", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="replay this Mooncake-format trace (.jsonl, .jsonl.gz)")
    add("--limit", type=_positive, metavar="N", help="of the trace, only the first N requests")
    add("--requests", type=_positive, metavar="N", help=f"without a trace, so many ({REQUESTS_DEFAULT})")
    add("--engines", type=_positive, default=3, metavar="N", help="engine processes (3)")
    add("--seed", type=int, default=1, metavar="N", help="seed of the workload and of the keys (1)")
    sizes = f"{TEXT_BLOCK_BYTES}, of a trace {TRACE_BLOCK_BYTES}"
    add("--block-bytes", type=_positive, metavar="N", help=f"bytes of a block ({sizes})")
    add("--cluster", type=Path, metavar="FILE", help="run in the cluster that this file describes (JSON)")
    add("--url", metavar="URL,...", help="run in a cluster with replicas here, none of which is killed")
    add("--storage-root", type=Path, metavar="DIR", help="with --url, where engines and workers keep blocks")
    add("--no-worker", action="store_true", help="with --url, a worker for demo-disk is there already")
    add("--dir", type=Path, help="new or empty folder for data and logs; it stays (a temporary one)")
    add("--keep", action="store_true", help="leave the temporary folder behind")
    add("--events", action="store_true", help="tell all as JSON lines, for a program that draws it")
    return parser


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return value


class Demo:
    """One run."""

    def __init__(self, options: argparse.Namespace, folder: Path, teller: Teller) -> None:
        self._options = options
        self._folder = folder
        self._teller = teller
        self._ledger = Ledger()
        self._engines = [f"engine-{number}" for number in range(options.engines)]

    def plan(self) -> Plan:
        """The requests to serve. Raises `TraceError` and `SourcesError`."""
        options = self._options
        if options.trace is None:
            workload = Workload(requests=options.requests or REQUESTS_DEFAULT, seed=options.seed)
            plan = Plan.of(workload, TEXT_BLOCK_SIZE_TOKENS)
            source = "the Python standard library's source files"
        else:
            trace = Trace(options.trace, limit=options.limit)
            plan = Plan.of(trace, trace.block_size_tokens)
            source = str(options.trace)
            if trace.rechained:
                self._note(f"{trace.rechained} ids come under another parent than before: chained anew")
        self._note(
            f"{plan.count:,} requests from {source}: {plan.blocks_asked:,} blocks of"
            f" {plan.block_size_tokens} tokens, {plan.blocks_unique:,} different ones;"
            f" an ideal cache hits {plan.ideal_hit_rate:.1%}"
        )
        return plan

    async def run(self) -> bool:
        """Run it and tell all about it; whether everything was shown. Raises `FAILURES`, also in groups."""
        started = time.monotonic()
        plan = await asyncio.to_thread(self.plan)
        text = self._options.trace is None
        sizing = Sizing(
            block_size_tokens=plan.block_size_tokens,
            part_bytes=self._options.block_bytes or (TEXT_BLOCK_BYTES if text else TRACE_BLOCK_BYTES),
            blocks=plan.blocks_unique,
        )
        async with Children(self._folder) as children:
            scene = self._scene(children, sizing)
            plan.engine_kill_share, plan.service_kill_share = scene.kill_shares
            _require_space(scene.site.storage_root, sizing)
            worker = await scene.open()
            self._note(f"the service answers at {scene.site.url}; {len(self._engines)} engines start")
            await Dispatcher(plan, self._ledger, self._hooks(plan, children, scene)).run(self._engines)
            if worker is not None and not worker.running:
                raise worker.failure(f"ended with status {worker.process.returncode}")
            self._note("all requests are answered; sessions expire, the worker deletes and sweeps")
            keys = await asyncio.to_thread(_all_keys, plan, scene.site.hash_seed)
            backend = open_backend("posix", scene.site.storage_options)
            async with scene.site.client() as client:
                auditor = Auditor(client, backend, INSTANCE, PART)
                audit = await auditor.settled(keys, scene.settle_timeout_s)
            backend.close()
        self._note(audit.text())
        figures = scene.figures(self._ledger, plan.ideal_hit_rate, audit, time.monotonic() - started)
        self._teller.tell(engines_table(self._ledger, self._engines))
        self._teller.tell(figures_table(figures))
        shown = scene.verdicts(self._ledger, figures, plan.count, audit)
        for passed, what in shown:
            self._teller.tell(Verdict(passed, what))
        self._teller.tell(Result(figures))
        return all(passed for passed, _ in shown)

    def _scene(self, children: Children, sizing: Sizing) -> Scene:
        """Raises ClusterFailed."""
        options = self._options
        if options.cluster is None and options.url is None:
            return OwnService(children, self._folder, sizing, options.seed, self._note)

        def describe() -> Description:
            if options.cluster is not None:
                return Description.read(options.cluster)
            return Description.at(options.url.split(","), options.storage_root)

        with_worker = not options.no_worker
        return Cluster(children, describe, sizing, options.seed, self._note, with_worker=with_worker)

    def _hooks(self, plan: Plan, children: Children, scene: Scene) -> Hooks:
        async def start_engine(name: str, on_phase: OnPhase) -> EngineHandle:
            child = await children.start(name, scene.site.engine_command(name), pipes=True)
            engine = EngineHandle(name, child, on_phase)
            await engine.ready()
            return engine

        def on_answer() -> None:
            ledger = self._ledger
            self._teller.tell(Progress(len(ledger.rows), plan.count, ledger.asked, ledger.hits))

        kill_service = scene.kill_service if scene.killable else None
        return Hooks(start_engine, kill_service, scene.restored, scene.arrival_s, on_answer, self._note)

    def _note(self, text: str) -> None:
        self._teller.tell(Note(text))


def _all_keys(plan: Plan, hash_seed: str) -> list[bytes]:
    """Every key that the run can have written, each once."""
    keys: dict[bytes, None] = {}
    for request in plan:
        keys.update(dict.fromkeys(request.keys or _keys_of(request, plan.block_size_tokens, hash_seed)))
    return list(keys)


def _keys_of(request: Request, block_size_tokens: int, hash_seed: str) -> Iterable[bytes]:
    return hashing.chain(
        request.tokens, block_size_tokens=block_size_tokens, seed=hash_seed, key_length=KEY_LENGTH
    )


def _require_space(folder: Path, sizing: Sizing) -> None:
    """Raises `OSError` rather than fill somebody's disk. `folder` may be still to be made."""
    while not folder.exists():
        folder = folder.parent
    needed = sizing.blocks * (sizing.part_bytes + FILE_OVERHEAD_BYTES) * 3 // 2
    free = shutil.disk_usage(folder).free
    if free < needed:
        megabytes = f"{needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free in {folder}"
        raise OSError(f"blocks and journal need about {megabytes}: use --dir, --limit or --block-bytes")


def _reason(error: BaseException) -> str:
    """The first of `FAILURES` in an error or group of errors, as text. Raises what is none of them."""
    while isinstance(error, BaseExceptionGroup):
        named = [inner for inner in error.exceptions if not isinstance(inner, asyncio.CancelledError)]
        error = named[0]
    if not isinstance(error, FAILURES):
        raise error
    return str(error)


async def _interruptible(demo: Demo) -> bool:
    """Run it so that SIGINT, SIGTERM and SIGHUP end it in order, however often they come."""
    running = asyncio.create_task(demo.run())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: None if running.cancelling() else running.cancel()
        )
    return await running


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo from a command line; the exit status."""
    parser = arguments()
    options = parser.parse_args(argv)
    if options.trace is None and options.limit is not None:
        parser.error("--limit is about a trace: give --trace, or --requests")
    if options.trace is not None and options.requests is not None:
        parser.error("--requests is about the text workload: with --trace use --limit")
    if options.url is not None and (options.cluster is not None or options.storage_root is None):
        parser.error("--url goes with --storage-root, and without --cluster")
    if options.url is None and (options.storage_root is not None or options.no_worker):
        parser.error("--storage-root and --no-worker are about --url")
    teller: Teller = EventTeller(sys.stdout) if options.events else TextTeller(sys.stdout, sys.stderr)
    try:
        folder = _folder(options.dir)
    except OSError as error:
        parser.error(f"--dir: {error}")
    keep = options.keep or options.dir is not None
    try:
        shown = asyncio.run(_interruptible(Demo(options, folder, teller)))
        keep = keep or not shown
        return 0 if shown else 1
    except asyncio.CancelledError:
        with suppress(OSError):
            teller.tell(Fault("interrupted; everything that was started has been stopped"))
        return 130
    except Exception as error:
        keep = True
        with suppress(BrokenPipeError):
            teller.tell(Fault(_reason(error)))
        return 2
    finally:
        if keep:
            sys.stderr.write(f"data and logs are in {folder}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _folder(wanted: Path | None) -> Path:
    """The folder of the run. Raises `OSError` when it cannot be made, or holds something already."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="ucm-demo-"))
    wanted.mkdir(parents=True, exist_ok=True)
    if any(wanted.iterdir()):
        raise OSError(f"{wanted} is not empty")
    return wanted.resolve()


if __name__ == "__main__":
    sys.exit(main())
