"""Replicas in one process: real shards, a real PostgreSQL journal, an elector in memory that the test can
make forget, and an append that the test can hold up. What a test does here to one replica, no other feels."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from metaservice import clock
from metaservice.core.model import Limits
from metaservice.journal.port import Batch
from metaservice.journal.postgres import PostgresJournal
from metaservice.journal.postgres_migrate import check_cluster, migrate
from metaservice.journal.postgres_settings import PostgresSettings
from metaservice.leadership.memory import MemoryElector, MemoryLeadership
from metaservice.replica.election import Pace
from metaservice.replica.errors import NotLeader
from metaservice.replica.node import Replica
from metaservice.replica.shard import Clock, Hooks, Shard
from metaservice.replica.snapshot import SnapshotKeeper
from tests.unit.replica_house import Told

TTL_MS = 2_000
PACE = Pace(
    ttl_ms=TTL_MS, renew_ms=100, margin_ms=100, look_ms=20, drain_ms=1_000, handover_ms=300, stall_ms=2_500
)
WAIT_S = 20.0
LIMITS = Limits(lease_ms_max=1_000, reclaim_delay_ms=200, late_write_ms=200)


class HeldJournal(PostgresJournal):
    """Its appends can be held up, as by a network that swallows them."""

    def __init__(self, settings: PostgresSettings, shard: int, holder: str) -> None:
        super().__init__(settings, shard, holder)
        self.free = threading.Event()
        self.free.set()
        self.deaf = False
        """It hears nothing new, as a follower that is far too slow."""

    def read(self, after_seq: int) -> Iterator[Batch]:
        return iter(()) if self.deaf else super().read(after_seq)

    def append(self, first_seq: int, last_seq: int, epoch: int, payload: bytes) -> None:
        assert self.free.wait(WAIT_S), "the test left an append held"
        super().append(first_seq, last_seq, epoch, payload)


class One:
    """A replica and what the test holds of it."""

    def __init__(self, house: "House", name: str) -> None:
        self.name = name
        self.told = Told()
        self.leadership = MemoryLeadership(
            house.elector, name, f"http://{name}", f"{name}-{house.lives}", house.now_ms
        )
        self.life = f"{name}-{house.lives}"
        house.lives += 1
        self.journals = [HeldJournal(house.settings, number, name) for number in range(house.shards)]
        self._house = house
        self.replica = Replica(
            name, f"http://{name}", self._shards, self.leadership, LIMITS, self.told, clock.lease_s,
            pace=PACE,
            alone=False,
            spread=house.spread,
            courier=house.carry,
            keepers=[
                SnapshotKeeper(
                    [
                        *("-m", "metaservice.replica.cut", "postgres", "ucm"),
                        *(str(number), str(house.shards), "2000", "direct"),
                    ],
                    environment={"UCM_POSTGRES_DSN": house.settings.dsn},
                    batches_max=house.snapshot_batches,
                    check_s=0.2,
                )
                for number in range(house.shards)
            ]
            if house.snapshot_batches
            else [],
        )  # fmt: skip

    def _shards(self, hooks: Hooks) -> Sequence[Shard]:
        found = []
        for number, journal in enumerate(self.journals):
            own = clock.ShardClock(250)
            found.append(
                Shard(
                    number, journal, LIMITS, Clock(own.start, own.now_ms, clock.lease_s), self.told,
                    lambda: self._house.cluster,
                    shards=self._house.shards, hooks=hooks, poll_ms=20,
                )
            )  # fmt: skip
        return found

    def shard(self, number: int = 0) -> Shard:
        return self.replica.shard(number)


class House:
    """A cluster of replicas `a`, `b`, `c`... over one database."""

    def __init__(self, dsn: str, *, shards: int = 1, spread: bool = False, snapshot_batches: int = 0) -> None:
        self.settings = PostgresSettings(dsn, timeout_ms=1_000)
        self.shards = shards
        self.spread = spread
        self.snapshot_batches = snapshot_batches
        self.elector = MemoryElector(shards, TTL_MS)
        self.lives = 0
        self.cluster = ""
        self.ones: dict[str, One] = {}

    @staticmethod
    def now_ms() -> int:
        return int(clock.lease_s() * 1000)

    async def carry(self, url: str, body: bytes) -> bytes:
        """Errands, from replica to replica."""
        return await self.ones[url.removeprefix("http://")].replica.settle(body)

    @asynccontextmanager
    async def running(self, names: str = "abc") -> AsyncIterator["House"]:
        """All of them started; `a` first, so that it leads where nothing is spread."""
        await asyncio.to_thread(migrate, self.settings)
        self.cluster = await asyncio.to_thread(check_cluster, self.settings, self.shards)
        try:
            for name in names:
                await self.start(name)
                await self.leader()
            yield self
        finally:
            for one in self.ones.values():
                for journal in one.journals:
                    journal.free.set()
            for one in list(self.ones.values()):
                await asyncio.wait_for(one.replica.stop(), WAIT_S)

    async def start(self, name: str) -> One:
        one = self.ones[name] = One(self, name)
        await one.replica.start()
        return one

    async def leader(self, shard: int = 0, but: str = "") -> One:
        """Who leads the shard, once somebody (other than `but`) does."""
        found: list[One] = []

        def look() -> bool:
            found[:] = [one for one in self.ones.values() if one.shard(shard).ready and one.name != but]
            return bool(found)

        await until(look, f"somebody leads shard {shard}")
        return found[0]

    def others(self, one: One) -> list[One]:
        return [other for other in self.ones.values() if other is not one]


async def until(condition: Callable[[], object], what: str, wait_s: float = WAIT_S) -> None:
    """Wait for what must happen by itself."""
    end_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end_s, f"it never happened: {what}"
        await asyncio.sleep(0.005)


async def refused(call: Callable[[], object]) -> NotLeader:
    """Why a shard does not answer as a leader."""
    try:
        answer = call()
        if asyncio.iscoroutine(answer):
            answer = await answer
    except NotLeader as error:
        return error
    raise AssertionError(f"it answered: {answer}")
