"""`python -m metaservice.cli.local.topology`: PostgreSQL, three etcd and three replicas on this machine, and
the demo on them. Its last line is the demo's, one JSON object; its exit status is the demo's."""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from metaservice.cli.local.cluster import LocalCluster
from metaservice.cli.local.ending import EXIT_INTERRUPTED, end_in_order
from metaservice.cli.local.places import keep, temporary_folder
from metaservice.cli.local.process import LocalFailed, launch_command
from metaservice.cli.local.replicas import LocalReplica

RESTART_PAUSE_S = 3.0
"""A replica that died comes back so much later, as with an orchestrator: the others have to do without."""
TEND_EVERY_S = 0.1
DEMO_STOP_TIMEOUT_S = 30.0
EXIT_FAILED = 2

TTL_MS = 5_000
LIMITS = {
    "write_ttl_ms": 2 * TTL_MS,
    "late_write_ms": 1_500,
    "lease_ms_max": 5_000,
    "reclaim_delay_ms": TTL_MS + 1_000,
}
"""Shorter than a fleet would have them, for the end of a run waits for all of them."""
SETTINGS = {
    "lead_ttl_ms": TTL_MS,
    "staleness_ms_max": LIMITS["reclaim_delay_ms"] - TTL_MS,
    "write_ttl_ms_min": LIMITS["write_ttl_ms"],
    "write_ttl_ms_default": LIMITS["write_ttl_ms"],
    "late_write_ms": LIMITS["late_write_ms"],
    "lease_ms_max": LIMITS["lease_ms_max"],
    "reclaim_delay_ms": LIMITS["reclaim_delay_ms"],
    "task_ttl_ms": 5_000,
}


class Keeper:
    """Starts replicas again that died, and keeps the description of the cluster up to date."""

    def __init__(self, cluster: LocalCluster, file: Path, note: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._file = file
        self._note = note
        self._died_s: dict[str, float] = {}
        self.describe()

    def describe(self) -> None:
        """Write the file that the demo reads."""
        folder = self._cluster.folder / "storage"
        self._cluster.describe(self._file, storage_root=str(folder), ttl_ms=TTL_MS, limits=LIMITS)

    def tend(self, now_s: float) -> None:
        """One look at everything. Raises `LocalFailed` when a replica cannot be started."""
        for replica in self._cluster.replicas:
            if not replica.running:
                self._revive(replica, now_s)

    def _revive(self, replica: LocalReplica, now_s: float) -> None:
        died_s = self._died_s.get(replica.name)
        if died_s is None:
            self._died_s[replica.name] = now_s
            self._note(f"replica {replica.name} is gone; it starts again in {RESTART_PAUSE_S:g} s")
            self.describe()
        elif now_s - died_s >= RESTART_PAUSE_S:
            del self._died_s[replica.name]
            replica.launch()
            self._note(f"replica {replica.name} starts again, as process {replica.pid}")
            self.describe()


def run(folder: Path, demo_arguments: Sequence[str]) -> int:
    """Start everything, run the demo, end everything; the demo's exit status. Raises `LocalFailed`."""
    started_s = time.monotonic()

    def note(text: str) -> None:
        print(text, flush=True)

    with closing(LocalCluster(folder, settings=SETTINGS)) as cluster:
        note("PostgreSQL and three etcd start on the loopback address")
        cluster.start_stores()
        note("three replicas of the service start")
        cluster.launch_replicas()
        cluster.await_ready()
        took_s = time.monotonic() - started_s
        for shard in range(cluster.shards):
            leader = cluster.leader(shard)
            note(f"shard {shard} is led by {leader.name + ' at ' + leader.url if leader else 'nobody yet'}")
        note(f"the cluster answers after {took_s:.1f} s; logs are in {folder}")
        file = folder / "cluster.json"
        keeper = Keeper(cluster, file, note)
        program = "from metaservice.cli.app import main; main()"
        command = [sys.executable, "-c", program, "demo", "--cluster", str(file), *demo_arguments]
        with subprocess.Popen(launch_command(command)) as demo:
            try:
                while demo.poll() is None:
                    keeper.tend(time.monotonic())
                    time.sleep(TEND_EVERY_S)
            finally:
                _end(demo)
            return demo.returncode


def _end(demo: "subprocess.Popen[bytes]") -> None:
    """The demo stops what it started before it goes."""
    demo.terminate()
    try:
        demo.wait(DEMO_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        demo.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """From a command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="make cluster CLUSTER_ARGS=...",
        description="A cluster on this machine and the demo on it. Other options go to the demo.",
        allow_abbrev=False,
    )
    parser.add_argument("--dir", type=Path, help="new or empty folder for data and logs; it stays")
    parser.add_argument("--keep", action="store_true", help="leave the temporary folder behind")
    options, demo_arguments = parser.parse_known_args(argv)
    end_in_order()
    try:
        with ExitStack() as stack:
            folder = _own(options.dir) if options.dir else stack.enter_context(temporary_folder())
            stay = True
            try:
                status = run(folder, demo_arguments)
                stay = status not in (0, EXIT_INTERRUPTED)
            except SystemExit:
                stay = False
                raise
            finally:
                if options.dir or options.keep or stay:
                    keep(folder)
                    sys.stderr.write(f"data and logs are in {folder}\n")
    except (LocalFailed, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    return status


def _own(folder: Path) -> Path:
    """Raises OSError when it cannot be made, or holds something already."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise OSError(f"--dir: {folder} is not empty")
    return folder.resolve()


if __name__ == "__main__":
    sys.exit(main())
