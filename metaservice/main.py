"""The composition root: the only file that knows every room. `python -m metaservice.main serve`."""

import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable

import msgspec
import uvloop

from metaservice import clock
from metaservice.api.app import build_app
from metaservice.api.peers import Peers
from metaservice.api.server import ApiServer, RemoteRefused, check_host
from metaservice.api.settings import ApiSettings
from metaservice.config import CLOCK_STEP_MS, Config, ConfigError, parse
from metaservice.journal.errors import JournalError
from metaservice.journal.memory import MemoryJournal, MemoryStore
from metaservice.journal.port import Journal
from metaservice.journal.sqlite import SqliteJournal
from metaservice.leadership.port import Leadership
from metaservice.leadership.single import SingleLeadership
from metaservice.replica.errand import Courier
from metaservice.replica.node import Pace, Replica
from metaservice.replica.shard import Clock, Hooks, Shard
from metaservice.replica.snapshot import SnapshotKeeper
from metaservice.telemetry.metrics import Metrics
from metaservice.telemetry.tracing import open_tracer

log = logging.getLogger("metaservice")

_BIND_ERRORS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


def sqlite_journals(config: Config) -> tuple[list[Journal], list[SnapshotKeeper]]:
    """The embedded journal."""
    config.data.mkdir(parents=True, exist_ok=True)
    path = config.data / "journal.sqlite"
    keeper = snapshot_keeper(config, ["sqlite", str(path), "0", "1"], {})
    return [SqliteJournal(path, 0)], [keeper]


def snapshot_keeper(config: Config, arguments: list[str], environment: dict[str, str]) -> SnapshotKeeper:
    """What cuts snapshots of one shard, in a process of its own."""
    return SnapshotKeeper(
        ["-m", "metaservice.replica.cut", *arguments],
        environment=environment,
        batches_max=config.snapshot_batches,
        bytes_max=config.snapshot_bytes,
        check_s=config.snapshot_check_ms / 1000,
    )


def make_journals(config: Config) -> tuple[list[Journal], list[SnapshotKeeper]]:
    """The configured journals, one a shard, and what keeps them short."""
    if config.journal == "memory":
        store = MemoryStore()
        return [MemoryJournal(store, number) for number in range(config.shards)], []
    return sqlite_journals(config)


def make_leadership(config: Config, url: str) -> Leadership:
    """The configured elector."""
    return SingleLeadership(config.replica, url, config.shards)


def make_replica(config: Config, url: str, metrics: Metrics, courier: Courier) -> Replica:
    """All shards of this process over the configured journals and elector."""
    journals, keepers = make_journals(config)
    replicas: list[Replica] = []

    def cluster() -> str:
        """Data shards take the name that the catalogue has."""
        return replicas[0].cluster if replicas else ""

    def make_shards(hooks: Hooks) -> list[Shard]:
        shards: list[Shard] = []
        for number, journal in enumerate(journals):
            shard_clock = clock.ShardClock(CLOCK_STEP_MS)
            shards.append(
                Shard(
                    number,
                    journal,
                    config.limits,
                    Clock(shard_clock.start, shard_clock.now_ms, clock.monotonic_s),
                    metrics,
                    cluster if number else clock.new_cluster_id,
                    shards=config.shards,
                    hooks=hooks,
                    poll_ms=config.poll_ms,
                    call_timeout_ms=config.grace_ms,
                )
            )
        return shards

    replica = Replica(
        config.replica,
        url,
        make_shards,
        make_leadership(config, url),
        config.limits,
        metrics,
        clock.monotonic_s,
        pace=Pace(
            ttl_ms=config.lead_ttl_ms,
            renew_ms=config.lead_renew_ms,
            margin_ms=config.lead_margin_ms,
            handover_ms=config.handover_ms,
            stall_ms=config.lead_ttl_ms // 2,
        ),
        alone=not config.replicated,
        spread=config.spread,
        courier=courier,
        keepers=keepers,
    )
    replicas.append(replica)
    return replica


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then hand over and drain. Raises JournalError, RemoteRefused or OSError
    when it cannot start."""
    check_host(config.host, config.allow_remote)
    metrics = Metrics(clock.monotonic_s)
    url = config.advertise or f"http://{config.host}:{config.port}"
    settings = ApiSettings(drain_delay_ms=config.drain_ms, graceful_timeout_ms=config.grace_ms)
    peers = Peers(config.replica, settings)
    replica = make_replica(config, url, metrics, peers.errand)
    tracer = open_tracer(bool(config.otlp_endpoint), endpoint=config.otlp_endpoint, ratio=config.trace_ratio)
    app = build_app(replica.shard(0), metrics, tracer, settings)
    server = ApiServer(app, config.host, config.port, settings, allow_remote=config.allow_remote)
    loop = asyncio.get_running_loop()
    started = asyncio.create_task(replica.start(), name="start")
    leaving: list[asyncio.Task[None]] = []

    async def leave() -> None:
        app.begin_drain()
        await replica.leave()
        server.request_stop()

    def stop() -> None:
        if not leaving:
            leaving.append(asyncio.create_task(leave(), name="leave"))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        if not config.replicated:
            await started
        await server.run_until_stopped(_announce(config, replica))
    finally:
        started.cancel()
        try:
            async with asyncio.timeout(config.grace_ms / 1000):
                await replica.stop()
        except TimeoutError:
            # What hangs was not acknowledged; the next start finds the journal as the disk has it.
            log.error("the journal did not end its last write in %d ms; leaving it", config.grace_ms)
        await peers.close()
        tracer.close()


def _announce(config: Config, replica: Replica) -> Callable[[int], None]:
    def announce(port: int) -> None:
        log.info(
            "replica %s serving on http://%s:%d (cluster %s, %s)",
            replica.id, config.host, port, replica.cluster or "not known yet", replica.status,
        )  # fmt: skip
        if config.ready_file is not None:
            ready = msgspec.json.encode({"host": config.host, "port": port, "pid": os.getpid()})
            partial = config.ready_file.with_name(config.ready_file.name + f".{os.getpid()}")
            partial.write_bytes(ready)
            partial.replace(config.ready_file)

    return announce


def serve(arguments: list[str]) -> int:
    """`serve` with its flags; returns the exit status: 0 after a stop, 2 for a wrong setting, 1 when it
    cannot run."""
    try:
        config = parse(arguments)
    except ConfigError as error:
        sys.stderr.write(f"ucm-meta serve: {error}\n")
        return 2
    logging.basicConfig(
        level=config.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        uvloop.run(run(config))
    except OSError as error:
        where = (
            f"cannot listen on {config.host}:{config.port}" if error.errno in _BIND_ERRORS else "cannot start"
        )
        sys.stderr.write(f"ucm-meta serve: {where}: {error.strerror or error}\n")
        return 1
    except (RemoteRefused, JournalError) as error:
        sys.stderr.write(f"ucm-meta serve: {error}\n")
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    """`serve` is the only command here; the others are in `metaservice.cli`."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] != "serve":
        sys.stderr.write("usage: python -m metaservice.main serve [--data DIR] [...]\n")
        return 2
    return serve(words[1:])


if __name__ == "__main__":
    sys.exit(main())
