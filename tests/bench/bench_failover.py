"""How long a replica needs to be there: from a snapshot and the rest of the journal, and from a warm follower
to the leader, with many blocks. Three processes that would be machines in a fleet share this one.
"""

import re
import time
from collections.abc import Callable
from contextlib import suppress

from metaservice.cli.local.cluster import LocalCluster
from metaservice.cli.local.replicas import LocalReplica
from metaservice.client import Client, ClientConfig
from tests.bench.bench_clients import write
from tests.bench.bench_report import Fact
from tests.bench.bench_service import CHAIN_KEYS, INSTANCE, BenchError, chain, set_up_with

TTL_MS = 5_000
WAIT_S = 180.0
_TOOK = re.compile(r"shard 0: leading in epoch \d+ after (\d+) ms")


def failover_facts(blocks: int, say: Callable[[str], None]) -> list[Fact]:
    """A cluster of two replicas over PostgreSQL and etcd, one shard."""
    # about the last half of what is written stays behind the snapshot at first, and is its tail
    batches = blocks // CHAIN_KEYS
    settings = {"lead_ttl_ms": TTL_MS, "snapshot_batches": batches, "snapshot_check_ms": 1_000}
    with LocalCluster(replicas=2, shards=1, etcd_members=1, settings=settings) as cluster:
        leader = _leader(cluster)
        [follower] = [one for one in cluster.replicas if one is not leader]
        with _client(cluster) as client:
            set_up_with(client)
            client.register_engine("bench-fill", instance=INSTANCE)
            say(f"writing {blocks:,} blocks")
            for number in range(blocks // CHAIN_KEYS):
                write(client, chain(number, CHAIN_KEYS))
            say("waiting for a snapshot")
            _until(lambda: _snapshots(cluster) > 0, "a snapshot")
            for number in range(20):  # a tail behind it
                write(client, chain(blocks + number, CHAIN_KEYS))
            head = _seq(leader)
            say("starting a replica")
            follower.stop()
            began_s = time.monotonic()
            follower.launch()
            _until(lambda: _seq(follower) >= head, "the follower stands at the head")
            started_s = time.monotonic() - began_s
            say("killing the leader")
            began_s = time.monotonic()
            leader.crash()
            _until(lambda: _answers(client, blocks), "the follower leads")
            back_s = time.monotonic() - began_s
        took = _TOOK.findall(follower.log.read_text())
    if not took:
        raise BenchError("the follower's log does not say how long its promotion took")
    return [
        Fact(
            name="start from snapshot and tail",
            value=started_s,
            unit="s",
            note=f"{blocks:,} blocks, until it stands at the journal's head; the leader works beside it",
        ),
        Fact(
            name="promotion of a warm follower",
            value=int(took[-1]) / 1000,
            unit="s",
            aim="<= 1",
            note=f"{blocks:,} blocks, from the acquired lease until it answers",
        ),
        Fact(
            name="back after kill -9 of the leader",
            value=back_s,
            unit="s",
            aim=f"<= {TTL_MS / 1000 + 3:.0f}",
            note=f"a lookup with a lease answers again; the lease alone is {TTL_MS / 1000:.0f} s",
        ),
    ]


def _client(cluster: LocalCluster) -> Client:
    return Client(
        ClientConfig(url=cluster.urls, timeout_ms=30_000, breaker_slow_ms=30_000, breaker_failures=1_000)
    )


def _leader(cluster: LocalCluster) -> LocalReplica:
    leader = cluster.leader(0)
    if leader is None:
        raise BenchError("nobody leads")
    return leader


def _seq(replica: LocalReplica) -> int:
    with suppress(Exception):  # not up yet
        status = replica.status()
        return -1 if status is None else int(status["shards"][0]["seq"])
    return -1


def _snapshots(cluster: LocalCluster) -> int:
    return int(cluster.postgres.execute("SELECT count(*) FROM ucm.snapshot WHERE whole", "ucm").strip())


def _answers(client: Client, blocks: int) -> bool:
    return client.lookup(INSTANCE, chain(blocks + 1, 8), lease_ms=500, timeout_ms=500).hits == 8


def _until(condition: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise BenchError(f"it never came: {what}")
        time.sleep(0.02)
