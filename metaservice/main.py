"""The composition root: the only file that knows every room. `python -m metaservice.main serve`."""

import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import uvloop

from metaservice import clock
from metaservice.api.app import build_app
from metaservice.api.peers import Peers
from metaservice.api.server import ApiServer, RemoteRefused, check_host
from metaservice.api.settings import ApiSettings
from metaservice.config import CLOCK_STEP_MS, Config, ConfigError, parse
from metaservice.config.events import publish_config
from metaservice.journal.errors import JournalError, JournalUnavailable
from metaservice.journal.memory import MemoryJournal, MemoryStore
from metaservice.journal.port import Journal
from metaservice.journal.postgres import PostgresJournal
from metaservice.journal.postgres_hints import PostgresHints
from metaservice.journal.postgres_migrate import check_cluster, durability_warning, migrate
from metaservice.journal.postgres_settings import PostgresSettings
from metaservice.journal.sqlite import SqliteJournal
from metaservice.leadership.errors import LeadershipError
from metaservice.leadership.etcd import EtcdLeadership
from metaservice.leadership.etcd_gateway import EtcdSettings
from metaservice.leadership.port import Leadership
from metaservice.leadership.single import SingleLeadership
from metaservice.leadership.sql_lease import SqlLeadership, SqlLeaseSettings
from metaservice.publish.host import Publisher
from metaservice.publish.settings import PublishRefused
from metaservice.replica.cut import DSN_VARIABLE
from metaservice.replica.election import Pace
from metaservice.replica.errand import Courier
from metaservice.replica.node import Replica
from metaservice.replica.routers import Routers
from metaservice.replica.shard import Clock, Hooks, Shard
from metaservice.replica.snapshot import SnapshotKeeper
from metaservice.telemetry.metrics import Metrics
from metaservice.telemetry.tracing import open_tracer

log = logging.getLogger("metaservice")

PREPARE_AGAIN_S = 1.0
STALL_BASE_MS = 2_000
"""And a renewal: by then everybody whose journal hangs has noticed and said so."""
_BIND_ERRORS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


class Stores(NamedTuple):
    """The journals, one a shard, and what goes with them."""

    journals: list[Journal]
    keepers: list[SnapshotKeeper]
    """What keeps the journals short, one a shard; none: they grow."""
    settings: PostgresSettings | None


def make_stores(config: Config) -> Stores:
    """The configured journals. Nothing is opened yet."""
    if config.journal == "memory":
        store = MemoryStore()
        return Stores([MemoryJournal(store, number) for number in range(config.shards)], [], None)
    if config.journal == "sqlite":
        config.data.mkdir(parents=True, exist_ok=True)
        path = config.data / "journal.sqlite"
        keeper = _snapshot_keeper(config, ["sqlite", str(path), "0", "1"], {})
        return Stores([SqliteJournal(path, 0)], [keeper], None)
    settings = PostgresSettings(
        config.postgres_dsn,
        config.postgres_schema,
        config.postgres_timeout_ms,
        pooler=config.postgres_pooler,
        notify=config.postgres_notify,
    )
    secret = {DSN_VARIABLE: config.postgres_dsn}
    way = [str(settings.timeout_ms), "pooler" if settings.pooler else "direct"]
    numbers = range(config.shards)
    return Stores(
        [PostgresJournal(settings, number, config.replica) for number in numbers],
        [
            _snapshot_keeper(
                config, ["postgres", settings.schema, str(number), str(config.shards), *way], secret
            )
            for number in numbers
        ],
        settings,
    )


def _snapshot_keeper(config: Config, arguments: list[str], environment: dict[str, str]) -> SnapshotKeeper:
    return SnapshotKeeper(
        ["-m", "metaservice.replica.cut", *arguments],
        environment=environment,
        batches_max=config.snapshot_batches,
        bytes_max=config.snapshot_bytes,
        check_s=config.snapshot_check_ms / 1000,
    )


def make_leadership(config: Config, url: str, life: str, database: PostgresSettings | None) -> Leadership:
    """The configured elector. `life` tells this process from others of the same name, before and after it."""
    if config.leadership == "single" or database is None:
        return SingleLeadership(config.replica, url, config.shards)
    common: dict[str, Any] = {
        "replica": config.replica,
        "url": url,
        "life": life,
        "shards": config.shards,
        "ttl_ms": config.lead_ttl_ms,
        "timeout_ms": config.lead_timeout_ms,
        "now_s": clock.lease_s,
        "chance": clock.chance,
    }
    if config.leadership == "sql_lease":
        return SqlLeadership(SqlLeaseSettings(database.host_dsns(), database.schema), **common)
    settings = EtcdSettings(
        config.etcd_endpoints,
        config.etcd_prefix,
        ca=str(config.etcd_ca or ""),
        cert=str(config.etcd_cert or ""),
        key=str(config.etcd_key or ""),
        username=config.etcd_user,
        password=config.etcd_password,
    )
    return EtcdLeadership(settings, **common)


class Cluster:
    """The cluster's id: of a shared journal, the one that its database has; else made for a new journal."""

    def __init__(self, settings: PostgresSettings | None, shards: int) -> None:
        self._settings = settings
        self._shards = shards
        self._id = "" if settings is not None else clock.new_cluster_id()

    def id(self) -> str:
        """Empty while it is not known."""
        return self._id

    async def prepare(self) -> None:
        """Bring the shared journal's schema to this release, and see that it is of a cluster like ours. Tries
        as long as the database cannot be reached; raises JournalFailed for what will not mend itself."""
        settings = self._settings
        if settings is None:
            return
        said = ""
        while not self._id:
            try:
                await asyncio.to_thread(migrate, settings)
                cluster = await asyncio.to_thread(check_cluster, settings, self._shards)
                warning = await asyncio.to_thread(durability_warning, settings)
            except JournalUnavailable as error:
                if str(error) != said:
                    log.error("waiting for the journal: %s", error)
                    said = str(error)
                await asyncio.sleep(PREPARE_AGAIN_S)
            else:
                if warning:
                    log.warning("%s", warning)
                self._id = cluster


def make_replica(
    config: Config,
    stores: Stores,
    cluster: Cluster,
    leadership: Leadership,
    url: str,
    metrics: Metrics,
    courier: Courier,
    publisher: Publisher | None = None,
) -> Replica:
    """All shards of this process over the configured journals and elector. `publisher`: who tells
    routers."""

    def make_shards(hooks: Hooks) -> list[Shard]:
        shards: list[Shard] = []
        for number, journal in enumerate(stores.journals):
            shard_clock = clock.ShardClock(CLOCK_STEP_MS)
            shards.append(
                Shard(
                    number,
                    journal,
                    config.limits,
                    Clock(shard_clock.start, shard_clock.now_ms, clock.lease_s),
                    metrics,
                    cluster.id,
                    shards=config.shards,
                    hooks=hooks,
                    poll_ms=config.poll_ms,
                    call_timeout_ms=config.grace_ms,
                    announces=publisher is not None,
                )
            )
        return shards

    return Replica(
        config.replica,
        url,
        make_shards,
        leadership,
        config.limits,
        metrics,
        clock.lease_s,
        pace=Pace(
            ttl_ms=config.lead_ttl_ms,
            renew_ms=config.lead_renew_ms,
            margin_ms=config.lead_margin_ms,
            handover_ms=config.handover_ms,
            stall_ms=STALL_BASE_MS + config.lead_renew_ms,
        ),
        alone=not config.replicated,
        spread=config.spread,
        courier=courier,
        keepers=stores.keepers,
        routers=Routers(publisher) if publisher is not None else None,
    )


def make_publisher(config: Config) -> Publisher | None:
    """Who tells routers; None: nobody does. Not started yet."""
    settings = publish_config(config)
    return None if settings is None else Publisher(settings, clock.lease_s)


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then hand over and drain. Raises JournalError, LeadershipError,
    RemoteRefused, PublishRefused or OSError when it cannot start or go on."""
    check_host(config.host, config.allow_remote)
    metrics = Metrics(clock.monotonic_s)
    url = config.advertise or f"http://{config.host}:{config.port}"
    settings = ApiSettings(
        drain_delay_ms=config.drain_ms,
        graceful_timeout_ms=config.grace_ms,
        staleness_ms_max=config.staleness_ms_max,
        leader_wait_ms=config.handover_ms,
    )
    peers = Peers(config.replica, settings)
    stores = make_stores(config)
    cluster = Cluster(stores.settings, config.shards)
    token = clock.new_life()
    leadership = make_leadership(config, url, token, stores.settings)
    publisher = make_publisher(config)
    if publisher is not None:
        metrics.watch_events(lambda: publisher.stats)
    replica = make_replica(config, stores, cluster, leadership, url, metrics, peers.errand, publisher)
    hints = (
        PostgresHints(stores.settings, replica.hint) if stores.settings and config.postgres_notify else None
    )
    # Made here, in the process that serves and inside its loop: the exporter's thread and locks would not
    # survive a fork, and spans of a child would be lost in silence. Every start is an instance of its own.
    tracer = open_tracer(
        bool(config.otlp_endpoint),
        endpoint=config.otlp_endpoint,
        ratio=config.trace_ratio,
        instance=f"{config.replica}/{token}",
    )
    app = build_app(replica, metrics, tracer, settings, peers, publisher)
    server = ApiServer(app, config.host, config.port, settings, allow_remote=config.allow_remote)

    async def start() -> None:
        await cluster.prepare()
        if publisher is not None:
            await publisher.start()
        await replica.start()
        if hints is not None:
            hints.start()

    starting = asyncio.create_task(start(), name="start")

    async def life() -> None:
        """Ends with what ends this replica's part in the cluster."""
        await asyncio.shield(starting)
        await replica.failed()

    async def leave() -> None:
        app.begin_drain()
        try:
            await replica.leave()
        finally:
            starting.cancel()
            server.request_stop()

    leaving: list[asyncio.Task[None]] = []

    def stop() -> None:
        if not leaving:
            leaving.append(asyncio.create_task(leave(), name="leave"))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    living = asyncio.create_task(life(), name="replica")
    try:
        if not config.replicated:
            # Alone, nobody can be told anything before it leads, and what is wrong with the journal is wrong
            # with the start. With others it answers at once: it knows, or will know, who leads.
            await asyncio.wait([starting])
            if starting.cancelled():
                return
            starting.result()
        living.add_done_callback(lambda _: server.request_stop())
        await server.run_until_stopped(_announce(config, replica))
    finally:
        await _wind_up(config, replica, hints, peers, [living, starting])
        if publisher is not None:
            await publisher.close()
        tracer.close()
    if not living.cancelled():
        living.result()


async def _wind_up(
    config: Config,
    replica: Replica,
    hints: PostgresHints | None,
    peers: Peers,
    tasks: "list[asyncio.Task[None]]",
) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    if hints is not None:
        await hints.close()
    try:
        async with asyncio.timeout(config.grace_ms / 1000):
            await replica.stop()
    except TimeoutError:
        # What hangs was not acknowledged; the next start finds the journal as the disk has it.
        log.error("the journal did not end its last write in %d ms; leaving it", config.grace_ms)
    await peers.close()


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
    for chatty in ("httpx", "alembic"):  # a line for every look at etcd tells nobody anything
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        uvloop.run(run(config))
    except OSError as error:
        where = (
            f"cannot listen on {config.host}:{config.port}" if error.errno in _BIND_ERRORS else "cannot start"
        )
        sys.stderr.write(f"ucm-meta serve: {where}: {error.strerror or error}\n")
        return 1
    except (RemoteRefused, PublishRefused, JournalError, LeadershipError) as error:
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
