"""A cluster for tests and a load on it: writers whose blocks must not be lost once they were acknowledged."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from metaservice.cli.local.cluster import LocalCluster
from metaservice.cli.local.replicas import LocalReplica, Settings
from metaservice.client import AsyncClient, ClientConfig, LookupResult

TTL_S = 2.0
FAST: Settings = {
    "lead_ttl_ms": int(TTL_S * 1_000),
    "poll_ms": 50,
    "staleness_ms_max": 1_000,
    "late_write_ms": 500,
    "lease_ms_max": 2_000,
    "postgres_timeout_ms": 1_000,
}
"""Leases as short as etcd's can be: a test waits for several of them."""

KEY_LENGTH = 16
CHAIN_BLOCKS = 4
RETRY_MS = 15_000
ANSWER_WITHIN_S = 10.0
FINGERPRINT: dict[str, Any] = {
    "model": "m",
    "revision": "r",
    "kv_dtype": "bf16",
    "block_size_tokens": 16,
    "key_length": KEY_LENGTH,
    "hash_scheme": "test",
    "hash_seed": "0",
    "groups": [{"name": "full", "kind": "full"}],
    "parts": [{"name": "kv", "bytes": 100, "group": "full"}],
}


def instance_of(shard: int) -> str:
    """The instance of a shard, after `set_up`."""
    return f"model-{shard}"


def client(cluster: LocalCluster, **changes: Any) -> AsyncClient:
    """A client that knows all replicas. Calls of operators raise their errors, those of engines tell them."""
    wanted = {"url": ",".join(cluster.urls), "timeout_ms": 2_000, **changes}
    return AsyncClient(ClientConfig(**wanted))


async def set_up(cluster: LocalCluster) -> None:
    """An instance in every shard: `instance_of`."""
    async with client(cluster, admin_timeout_ms=20_000) as operator:
        await operator.put_tenant("t")
        await operator.put_storage("s", "posix", {"root": "/nowhere"})
        await operator.put_group("g", "t", ["s"])
        for shard in range(cluster.shards):
            await operator.put_instance(instance_of(shard), "g", FINGERPRINT)
            placed = await operator.get_json(f"/v1/instances/{instance_of(shard)}")
            assert placed["shard"] == shard, "new instances go where the fewest are, lowest number first"


class WriteFailed(Exception):
    """A write was not acknowledged although the client tried again for long."""


_engines = count(1)


@asynccontextmanager
async def engine(cluster: LocalCluster, instance: str, **changes: Any) -> AsyncIterator[AsyncClient]:
    """A client that is registered as an engine of its own; its heartbeats go on in the background."""
    async with client(cluster, **changes) as speaker:
        name = f"engine-{next(_engines)}"
        while (await speaker.register_engine(name, instance=instance)).failure is not None:
            await asyncio.sleep(0.1)
        yield speaker


@dataclass(slots=True)
class Load:
    """What a load did. Times are of the monotonic clock."""

    acked: dict[str, list[list[bytes]]] = field(default_factory=dict)
    """By instance, the chains whose finish was acknowledged."""
    failures: list[str] = field(default_factory=list)
    """Calls that failed although the client retries."""
    missing: list[str] = field(default_factory=list)
    """Lookups that were answered, and lacked blocks that were acknowledged before they were asked."""
    lookups: int = 0
    unanswered: int = 0
    """Lookups that were not answered; they are misses to an engine, which goes on."""
    gaps_s: dict[str, float] = field(default_factory=dict)
    """By instance, the longest time between two acknowledged finishes."""

    @property
    def commits(self) -> int:
        """Acknowledged chains."""
        return sum(map(len, self.acked.values()))


class Writers:
    """Several writers an instance, each with one chain at a time, and lookups of what all of them wrote."""

    def __init__(self, cluster: LocalCluster, instances: Sequence[str], seed: int) -> None:
        self.load = Load(acked={name: [] for name in instances}, gaps_s=dict.fromkeys(instances, 0.0))
        self._cluster = cluster
        self._chance = random.Random(seed)
        self._last_s = dict.fromkeys(instances, time.monotonic())
        self._stopping = False

    @asynccontextmanager
    async def running(self, writers: int) -> AsyncIterator[Load]:
        """Run `writers` an instance; leaving the context ends each after the chain that it is at."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            for name in self.load.acked:
                settings = {"retry_ms": RETRY_MS, "timeout_ms": RETRY_MS}
                speaker = await stack.enter_async_context(engine(self._cluster, name, **settings))
                for _ in range(writers):
                    group.create_task(self._write_on(speaker, name))
            self._last_s = dict.fromkeys(self._last_s, time.monotonic())
            try:
                yield self.load
            except Exception as error:
                error.add_note(f"the load: {self.load.commits} commits; {self.load.failures[-5:]}")
                raise
            finally:
                self._stopping = True

    async def _write_on(self, shared: AsyncClient, instance: str) -> None:
        while not self._stopping:
            keys = [os.urandom(KEY_LENGTH) for _ in range(CHAIN_BLOCKS)]
            try:
                await self._write(shared, instance, keys)
                await self._check(shared, instance)
            except WriteFailed as error:
                self.load.failures.append(f"{instance}: {error}")
            await asyncio.sleep(0.01)

    async def _write(self, shared: AsyncClient, instance: str, keys: list[bytes]) -> None:
        started = await shared.start_write(instance, keys)
        if started.failure is not None or len(started.writable) != len(keys):
            raise WriteFailed(f"start: {started.failure}: {started.detail} {started.outcomes!r}")
        finished = await shared.finish(
            started, started.locations, started.generations, checksums=range(len(keys))
        )
        if finished.failure is not None or finished.published != len(keys):
            raise WriteFailed(f"finish: {finished.failure}: {finished.detail} {finished.status!r}")
        self.load.acked[instance].append(keys)
        now_s = time.monotonic()
        gap_s = now_s - self._last_s[instance]
        self.load.gaps_s[instance] = max(self.load.gaps_s[instance], gap_s)
        self._last_s[instance] = now_s

    async def _check(self, shared: AsyncClient, instance: str) -> None:
        keys = self._chance.choice(self.load.acked[instance])
        found = await shared.lookup(instance, keys)
        self.load.lookups += 1
        if found.failure is not None:
            self.load.unanswered += 1
        elif found.hits != len(keys):
            self.load.missing.append(f"{instance}: {found.hits} of {len(keys)} blocks of {keys[0].hex()}")


async def lost(cluster: LocalCluster, load: Load) -> list[str]:
    """Acknowledged chains that a lookup does not find whole. Lookups that nobody answered are asked again: a
    planned handover may be under way."""
    gone = []
    async with client(cluster, timeout_ms=5_000) as reader:
        for instance, chains in load.acked.items():
            for keys in chains:
                found = await _answered(reader, instance, keys)
                if found.failure is not None or found.hits != len(keys):
                    gone.append(f"{instance}: {keys[0].hex()}: {found.failure or found.hits}")
    return gone


async def _answered(reader: AsyncClient, instance: str, keys: list[bytes]) -> LookupResult:
    until_s = time.monotonic() + ANSWER_WITHIN_S
    while True:
        found = await reader.lookup(instance, keys)
        if found.failure is None or time.monotonic() > until_s:
            return found
        await asyncio.sleep(0.05)


async def eventually(check: Callable[[], bool], within_s: float) -> float:
    """Wait until `check` is true; after how many seconds it was."""
    started_s = time.monotonic()
    while not await asyncio.to_thread(check):
        assert time.monotonic() - started_s < within_s, "it did not happen in time"
        await asyncio.sleep(0.05)
    return time.monotonic() - started_s


async def writable_again(cluster: LocalCluster, shard: int, within_s: float) -> float:
    """Wait until a block of a shard can be written; after how many seconds it was."""
    started_s = time.monotonic()
    async with engine(cluster, instance_of(shard), timeout_ms=500) as prober:
        while True:
            if await _written(prober, instance_of(shard)):
                return time.monotonic() - started_s
            assert time.monotonic() - started_s < within_s, f"shard {shard} takes no write"
            await asyncio.sleep(0.02)


async def _written(prober: AsyncClient, instance: str) -> bool:
    started = await prober.start_write(instance, [os.urandom(KEY_LENGTH)])
    if started.failure is not None or not started.writable:
        return False
    finished = await prober.finish(started, started.locations, started.generations, checksums=range(1))
    return finished.failure is None and finished.published == 1


def led(cluster: LocalCluster) -> dict[int, str]:
    """Shard -> the replica that leads it; absent when nobody does."""
    leaders = {shard: cluster.leader(shard) for shard in range(cluster.shards)}
    return {shard: leader.name for shard, leader in leaders.items() if leader is not None}


def epochs(cluster: LocalCluster) -> dict[int, int]:
    """Shard -> its newest epoch that any replica knows."""
    newest: dict[int, int] = {}
    for replica in cluster.replicas:
        for row in (replica.status() or {"shards": []})["shards"]:
            newest[row["shard"]] = max(newest.get(row["shard"], 0), row["epoch"])
    return newest


async def restart(replica: LocalReplica, *, within_s: float = 20.0) -> None:
    """SIGTERM, wait for its end, start it again and wait until it is ready. Nothing here blocks the loop that
    the load runs on."""
    replica.ask_to_end()
    await eventually(lambda: not replica.running, within_s)
    replica.launch()
    await eventually(replica.ready, within_s)
