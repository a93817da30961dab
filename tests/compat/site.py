"""The service under test, two replicas on PostgreSQL of our own, and the indexers that follow it."""

import random
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any, Self

from metaservice.cli.local.cluster import DATABASE, LocalCluster
from metaservice.cli.local.places import HOST
from metaservice.cli.local.process import LocalFailed, title, until
from metaservice.cli.local.replicas import LocalReplica, Settings
from metaservice.client import Client, ClientConfig, ClientError
from tests.compat.indexer import Indexer

LEASE_MS = 3_000
RING_WINDOWS = 1_000
"""Few, so that a subscriber that was away for long has to be told a snapshot."""
SUBSCRIBER_HWM = 100
"""Few, so that a slow one misses some soon."""
CHANNELS_MAX = 400
CHANNEL_PORTS = range(10_000, 15_000)
"""Below those that `free_port` gives away, and those that the kernel does."""
RESTATE_MS = 30_000
RETRY_MS = 30_000
NEW_LEADER_TIMEOUT_S = 30.0
EVENTS_TIMEOUT_S = 10.0
REPLICAS = 2
ATTACHMENT_POLL_MS = 500
MERGED = ("merged-0", "merged-1")
"""Engines for which the replicas serve merged streams."""
STORAGE = "pool"
TENANT = "t"

TIMES: Settings = {
    "lead_ttl_ms": LEASE_MS,
    "lead_renew_ms": 500,
    "lead_timeout_ms": 400,
    "lead_margin_ms": 300,
    "poll_ms": 50,
    "staleness_ms_max": 1_000,
    "late_write_ms": 500,
    "lease_ms_max": 2_000,
    "postgres_timeout_ms": 1_000,
    "heartbeat_ms": 1_000,
    "suspect_ms": 3_000,
    "expire_ms": 6_500,
    "restate_ms": RESTATE_MS,
}


class Site:
    """Starts what a case asks for, once, and ends all of it. A context manager."""

    def __init__(
        self, folder: Path, dynamo: Path, chance: random.Random, note: Callable[[str], None]
    ) -> None:
        """`dynamo`: the interpreter of the environment that Dynamo is installed in."""
        self.folder = folder
        self.dynamo = dynamo
        self.note = note
        self.chance = chance
        self._stack = ExitStack()
        self.attached = Indexer(dynamo, folder, "indexer-attached")
        """The service registers its streams here by itself."""
        self.plain = Indexer(dynamo, folder, "indexer-plain")
        """Here only the harness does, through whatever is in between."""
        self._cluster: LocalCluster | None = None
        self._operator: Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def cluster(self) -> LocalCluster:
        """The running cluster."""
        if self._cluster is None:
            self._start()
        assert self._cluster is not None
        return self._cluster

    def _start(self) -> None:
        for indexer in (self.attached, self.plain):
            self._stack.callback(indexer.close)
            indexer.start()
        settings: Settings = {
            **TIMES,
            "events_ring_windows": RING_WINDOWS,
            "events_subscriber_hwm": SUBSCRIBER_HWM,
            "events_channels_max": CHANNELS_MAX,
        }
        each = 2 * CHANNELS_MAX + 2 * len(MERGED)
        ports = _ports(REPLICAS * each)

        def own(number: int) -> Settings:
            first = ports[(number - 1) * each]
            merge = f"merge port_base={first + 2 * CHANNELS_MAX} engines={';'.join(MERGED)}"
            indexer = f"dynamo-indexer url={self.attached.url} poll_ms={ATTACHMENT_POLL_MS}"
            return {"events_port_base": first, "events_attachments": [indexer, merge]}

        cluster = LocalCluster(
            self.folder / "cluster",
            replicas=REPLICAS,
            shards=1,
            leadership="sql_lease",
            settings=settings,
            own=own,
        )
        self._cluster = cluster
        self._stack.callback(cluster.close)
        cluster.start()
        self._operator = Client(ClientConfig(url=cluster.urls, admin_timeout_ms=RETRY_MS))
        self._stack.callback(self._operator.close)
        self._found(self._operator)

    def _found(self, operator: Client) -> None:
        """What all fleets share."""
        operator.put_tenant(TENANT)
        operator.put_storage(STORAGE, "posix", {"root": "/nowhere"}, reach="pool")

    @property
    def operator(self) -> Client:
        """Speaks for an operator; its calls raise ClientError."""
        assert self.cluster and self._operator is not None
        return self._operator

    def client(self, **changes: Any) -> Client:
        """A client for one engine or worker, which goes on through a failover; closed with the site."""
        wanted = {"url": self.cluster.urls, "timeout_ms": RETRY_MS, "retry_ms": RETRY_MS, **changes}
        client = Client(ClientConfig(**wanted))
        self._stack.callback(client.close, cut=True)
        return client

    @property
    def leader(self) -> LocalReplica:
        """Who leads. Raises LocalFailed when nobody does for long."""
        for _ in until(monotonic() + NEW_LEADER_TIMEOUT_S):
            found = self.cluster.leader(0)
            if found is not None:
                return found
        raise LocalFailed("nobody leads")

    @property
    def standby(self) -> LocalReplica:
        """Who does not lead, and runs."""
        leader = self.leader
        return next(one for one in self.cluster.replicas if one is not leader and one.running)

    def kill_leader(self, then: Callable[[], None]) -> tuple[LocalReplica, float]:
        """SIGKILL it, and do `then` at once; the new leader, and the time (monotonic, s) at which it was seen
        to lead first. The old one stays down."""
        before = self.leader
        before.crash()
        then()
        while True:
            after = self.leader
            if after is not before:
                return after, monotonic()

    def revive(self) -> None:
        """Start replicas that do not run; returns once all are ready."""
        for replica in self.cluster.replicas:
            if not replica.running:
                replica.launch()
        self.cluster.await_ready()

    def mend(self) -> None:
        """What a case that failed may have left: everything runs again. Raises LocalFailed."""
        if self._cluster is not None:
            for indexer in (self.attached, self.plain):
                indexer.mend()
            self.revive()

    def lose_journal(self) -> None:
        """All replicas end, and what they knew is lost; others start with nothing, at the same ports."""
        cluster = self.cluster
        for replica in cluster.replicas:
            replica.stop()
        cluster.postgres.drop_database(DATABASE)
        cluster.postgres.create_database(DATABASE)
        self.revive()
        self._found(self.operator)

    def events(self, replica: LocalReplica, instance: str = "") -> dict[str, Any]:
        """What one replica says of its streams. Raises ClientError when its publisher is away for long."""
        path = f"/v1/events?instance={instance}" if instance else "/v1/events"
        until_s = monotonic() + EVENTS_TIMEOUT_S
        with Client(ClientConfig(url=replica.url)) as asker:
            while True:
                try:
                    said: dict[str, Any] = asker.get_json(path)
                except ClientError as error:
                    if "events_unavailable" not in str(error) or monotonic() > until_s:
                        raise
                else:
                    return said

    def publisher_of(self, replica: LocalReplica) -> int:
        """The process id of a replica's publisher. Raises LocalFailed when it has none."""
        for pid in children(replica.pid):
            if "publisher" in title(pid):
                return pid
        raise LocalFailed(f"{replica.name} has no publisher process")


def children(pid: int) -> list[int]:
    """The processes that a process started, threads' ones too."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def _ports(count: int) -> range:
    """Ports that follow each other and that nobody listens on now."""
    chance = random.SystemRandom()
    for _ in range(1_000):
        first = chance.randrange(CHANNEL_PORTS.start, CHANNEL_PORTS.stop - count)
        if all(_free(port) for port in range(first, first + count)):
            return range(first, first + count)
    raise OSError(f"no {count} free ports in a row in {CHANNEL_PORTS}")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
