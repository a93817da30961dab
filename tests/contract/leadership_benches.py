"""The electors that keep the leadership contract, each with what a test needs of it beside the port."""

import asyncio
from collections.abc import Callable
from itertools import count
from math import ceil
from random import Random
from typing import Protocol

import httpx

from metaservice.clock import monotonic_s
from metaservice.journal.postgres_migrate import migrate
from metaservice.journal.postgres_settings import PostgresSettings
from metaservice.leadership.etcd import EtcdLeadership, EtcdSettings
from metaservice.leadership.memory import MemoryElector, MemoryLeadership
from metaservice.leadership.port import Leadership, Report
from metaservice.leadership.sql_lease import SqlLeadership, SqlLeaseSettings

SHARDS = 4
TTL_MS = 5_000
TIMEOUT_MS = 750
REPORT = Report(ready=True)

_numbers = count(1)


def new_life() -> str:
    """A token that no process had before."""
    return f"life{next(_numbers)}"


class Bench(Protocol):
    """One elector and the replicas that use it."""

    def replica(self, name: str, life: str = "") -> Leadership:
        """Another process's access: a new life unless named."""
        ...

    async def lapse(self, replica: Leadership) -> None:
        """The lease of this life runs out unrenewed, while those of all others are renewed."""
        ...

    async def close(self) -> None:
        """Lets go of everything."""
        ...


class MemoryBench:
    """All replicas share one elector object."""

    def __init__(self) -> None:
        self.elector = MemoryElector(SHARDS, TTL_MS)
        self.now_ms = 0
        self._lives: dict[Leadership, str] = {}

    def replica(self, name: str, life: str = "") -> Leadership:
        life = life or new_life()
        made = MemoryLeadership(self.elector, name, f"http://{name}", life, lambda: self.now_ms)
        self._lives[made] = life
        return made

    async def lapse(self, replica: Leadership) -> None:
        for _ in range(TTL_MS // 1_000):
            self.now_ms += 1_000
            for other, life in self._lives.items():
                if other is not replica and self.elector.holds_lease(life, self.now_ms):
                    await other.renew(REPORT)

    async def close(self) -> None:
        pass


class ShiftedClock:
    """The monotonic clock, which a test can set forward; each replica has one that started elsewhere."""

    def __init__(self, shift_s: float) -> None:
        self.shift_s = shift_s

    def __call__(self) -> float:
        return monotonic_s() + self.shift_s


class SqlBench:
    """A schema in a real PostgreSQL. Time passes by setting the replicas' own clocks forward."""

    def __init__(self, *dsns: str, schema: str = "ucm") -> None:
        self.settings = SqlLeaseSettings(dsns, schema)
        self.made: dict[SqlLeadership, ShiftedClock] = {}

    def replica(self, name: str, life: str = "") -> SqlLeadership:
        clock = ShiftedClock(next(_numbers) * 3_600.0)
        made = SqlLeadership(
            self.settings,
            replica=name,
            url=f"http://{name}",
            life=life or new_life(),
            shards=SHARDS,
            ttl_ms=TTL_MS,
            timeout_ms=TIMEOUT_MS,
            now_s=clock,
            chance=Random(1).random,
        )
        self.made[made] = clock
        return made

    async def lapse(self, replica: Leadership) -> None:
        await self.pass_s(TTL_MS / 1_000, but=replica)

    async def pass_s(self, seconds: float, but: Leadership | None = None) -> None:
        """Time passes for all replicas except one, which is stopped; who has renewed before goes on so."""
        others = [made for made in self.made if made is not but]
        steps = ceil(seconds * 1_000 / (TTL_MS / 2))
        for step in range(steps + 1):
            for other in others:
                self.made[other].shift_s += seconds / steps if step else 0.0
                if other.registered:
                    await other.renew(REPORT)
        for other in others:
            await other.look()

    async def close(self) -> None:
        for replica in self.made:
            await replica.close()


class EtcdBench:
    """A prefix in a real etcd. A lease is made to run out by revoking it: what happens to its keys is the
    same, and etcd waits two seconds at least."""

    def __init__(self, settings: EtcdSettings, now_s: Callable[[], float] = monotonic_s) -> None:
        self.settings = settings
        self._now_s = now_s
        self.made: list[EtcdLeadership] = []

    def replica(self, name: str, life: str = "") -> EtcdLeadership:
        made = EtcdLeadership(
            self.settings,
            replica=name,
            url=f"http://{name}",
            life=life or new_life(),
            shards=SHARDS,
            ttl_ms=TTL_MS,
            timeout_ms=TIMEOUT_MS,
            now_s=self._now_s,
            chance=Random(len(self.made)).random,
        )
        self.made.append(made)
        return made

    async def lapse(self, replica: Leadership) -> None:
        assert isinstance(replica, EtcdLeadership)
        await self.post("/v3/lease/revoke", {"ID": str(replica.lease)})

    async def post(self, path: str, body: object) -> httpx.Response:
        """A call of the gateway by hand."""
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            return await client.post(self.settings.endpoints[0] + path, json=body)

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self.made))


async def make_tables(dsn: str, schema: str = "ucm") -> None:
    """Migrates an empty database."""
    await asyncio.to_thread(migrate, PostgresSettings(dsn, schema))
