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
from metaservice.api.server import ApiServer, RemoteRefused, check_host
from metaservice.api.settings import ApiSettings
from metaservice.config import CLOCK_STEP_MS, Config, ConfigError, parse
from metaservice.journal.errors import JournalError
from metaservice.journal.memory import MemoryJournal, MemoryStore
from metaservice.journal.port import Journal
from metaservice.journal.sqlite import SqliteJournal
from metaservice.replica.shard import Clock, Shard
from metaservice.replica.snapshot import SnapshotKeeper
from metaservice.telemetry.metrics import Metrics
from metaservice.telemetry.tracing import open_tracer

log = logging.getLogger("metaservice")

_BIND_ERRORS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
SHARD = 0
"""One shard owns everything until shards are spread over replicas."""


def make_journal(config: Config) -> tuple[Journal, SnapshotKeeper | None]:
    """The configured journal, and what keeps it short."""
    if config.journal == "memory":
        return MemoryJournal(MemoryStore(), SHARD), None
    config.data.mkdir(parents=True, exist_ok=True)
    path = config.data / "journal.sqlite"
    keeper = SnapshotKeeper(
        ["-m", "metaservice.replica.cut", str(path), str(SHARD)],
        batches_max=config.snapshot_batches,
        bytes_max=config.snapshot_bytes,
    )
    return SqliteJournal(path, SHARD), keeper


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises JournalError, RemoteRefused or OSError when it cannot
    start."""
    check_host(config.host, config.allow_remote)
    metrics = Metrics(clock.monotonic_s)
    journal, keeper = make_journal(config)
    shard_clock = clock.ShardClock(CLOCK_STEP_MS)
    shard = Shard(
        SHARD,
        journal,
        config.limits,
        Clock(shard_clock.start, shard_clock.now_ms, clock.monotonic_s),
        metrics,
        clock.new_cluster_id,
        keeper,
    )
    tracer = open_tracer(bool(config.otlp_endpoint), endpoint=config.otlp_endpoint, ratio=config.trace_ratio)
    settings = ApiSettings(drain_delay_ms=config.drain_ms, graceful_timeout_ms=config.grace_ms)
    server = ApiServer(
        build_app(shard, metrics, tracer, settings),
        config.host,
        config.port,
        settings,
        allow_remote=config.allow_remote,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.request_stop)
    started = asyncio.create_task(shard.start())
    try:
        await started
        await server.run_until_stopped(_announce(config, shard))
    finally:
        try:
            async with asyncio.timeout(config.grace_ms / 1000):
                await shard.stop()
        except TimeoutError:
            # What hangs was not acknowledged; the next start finds the journal as the disk has it.
            log.error("the journal did not end its last write in %d ms; leaving it", config.grace_ms)
        tracer.close()


def _announce(config: Config, shard: Shard) -> Callable[[int], None]:
    def announce(port: int) -> None:
        log.info(
            "serving on http://%s:%d (cluster %s, epoch %d, seq %d)",
            config.host, port, shard.cluster, shard.epoch, shard.durable_seq,
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
