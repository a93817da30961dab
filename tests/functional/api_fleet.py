"""Several real replicas in the test's own loop, each behind a real socket: one journal in memory that all
of them read, and an elector in memory.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

import httpx
import msgspec

from metaservice.api.app import build_app
from metaservice.api.peers import Peers
from metaservice.api.settings import ApiSettings
from metaservice.clock import ShardClock, monotonic_s
from metaservice.core.model import Limits
from metaservice.journal.memory import MemoryJournal, MemoryStore
from metaservice.journal.port import OpenReport
from metaservice.leadership.memory import MemoryElector, MemoryLeadership
from metaservice.replica.election import Pace
from metaservice.replica.node import Replica
from metaservice.replica.shard import Clock, Hooks, Shard
from metaservice.telemetry.metrics import Metrics
from metaservice.telemetry.tracing import open_tracer
from tests.functional.api_house import FINGERPRINT, LIMITS, House, listening

CALM = Pace(ttl_ms=5_000, renew_ms=500, margin_ms=200, look_ms=30, handover_ms=1_000)
"""Leases that are not lost because the machine is busy with others."""
QUICK = Pace(ttl_ms=1_000, renew_ms=200, margin_ms=100, look_ms=30, handover_ms=500)
"""Leases that run out while a test waits for it."""
_lives = count(1)


class SharedMemoryJournal(MemoryJournal):
    """A journal that many have open, as PostgreSQL's; the epoch alone is the fence."""

    def open(self) -> OpenReport:
        self._kept.holder = None
        return super().open()


class Member(House):
    """One replica of a fleet; all that a House can."""

    async def end(self) -> None:
        """As on SIGTERM: readiness falls, what is led here is handed over, then requests drain."""
        self.app.begin_drain()
        await self.replica.leave()
        self.server.request_stop()


class Fleet:
    """The replicas by id, and what they share."""

    def __init__(self, shards: int, settings: ApiSettings, limits: Limits, pace: Pace) -> None:
        self.shards = shards
        self.settings = settings
        self.limits = limits
        self.store = MemoryStore()
        self.pace = pace
        self.elector = MemoryElector(shards, pace.ttl_ms)
        self.members: dict[str, Member] = {}

    def __getitem__(self, id: str) -> Member:
        return self.members[id]

    def leader(self, shard: int = 0) -> Member:
        """Who leads a shard; fails when nobody does."""
        (leader,) = [one for one in self.members.values() if one.replica.leads(shard)]
        return leader

    def follower(self, shard: int = 0) -> Member:
        """Somebody who does not lead a shard."""
        return next(one for one in self.members.values() if not one.replica.leads(shard))

    async def led(self, seconds: float = 5.0) -> None:
        """Return once every shard is led by one, and everybody knows by whom."""
        for _ in range(int(seconds / 0.01)):
            led = [
                sum(one.replica.leads(shard) for one in self.members.values()) == 1
                and all(one.replica.leader_url(shard) for one in self.members.values())
                for shard in range(self.shards)
            ]
            if all(led):
                return
            await asyncio.sleep(0.01)
        raise TimeoutError([one.replica.cluster_status() for one in self.members.values()])

    def make_replica(self, id: str, url: str, metrics: Metrics, peers: Peers) -> Replica:
        def make_shards(hooks: Hooks) -> list[Shard]:
            return [
                Shard(
                    number,
                    SharedMemoryJournal(self.store, number),
                    self.limits,
                    self._clock(),
                    metrics,
                    lambda: "cluster1",
                    shards=self.shards,
                    hooks=hooks,
                    poll_ms=20,
                )
                for number in range(self.shards)
            ]

        def now_ms() -> int:
            return int(monotonic_s() * 1000)

        return Replica(
            id,
            url,
            make_shards,
            MemoryLeadership(self.elector, id, url, f"life-{next(_lives)}", now_ms),
            self.limits,
            metrics,
            monotonic_s,
            pace=self.pace,
            alone=False,
            courier=peers.errand,
        )

    @staticmethod
    def _clock() -> Clock:
        clock = ShardClock()
        return Clock(clock.start, clock.now_ms, monotonic_s)

    @asynccontextmanager
    async def member(self, id: str, port: int) -> AsyncIterator[Member]:
        """One more replica, until its block ends."""
        metrics, peers, url = Metrics(monotonic_s), Peers(id, self.settings), f"http://127.0.0.1:{port}"
        replica = self.make_replica(id, url, metrics, peers)
        app = build_app(replica, metrics, open_tracer(False), self.settings, peers)
        async with (
            listening(app, self.settings, port) as server,
            httpx.AsyncClient(base_url=url, timeout=20.0, trust_env=False, verify=False) as http,
        ):
            await replica.start()
            self.members[id] = member = Member(replica, app, server, http)
            try:
                yield member
            finally:
                del self.members[id]
                await replica.stop()
                await peers.close()


@asynccontextmanager
async def open_fleet(
    free_port: Callable[[], int],
    *ids: str,
    shards: int = 1,
    settings: ApiSettings | None = None,
    limits: Limits = LIMITS,
    pace: Pace = CALM,
) -> AsyncIterator[Fleet]:
    """Replicas of these ids; all shards are led when this begins."""
    fleet = Fleet(shards, settings or ApiSettings(), limits, pace)
    async with AsyncExitStack() as stack:
        for id in ids:
            await stack.enter_async_context(fleet.member(id, free_port()))
        await fleet.led()
        yield fleet


def decoded(reply: httpx.Response, status: int = 200) -> Any:
    """The JSON body of a reply that must have this status."""
    assert reply.status_code == status, reply.text[:500]
    return msgspec.json.decode(reply.content)


async def furnish(house: House, shards: int) -> None:
    """What `House.furnish` makes, and an instance `i<shard>` in each shard."""
    await house.furnish()
    for shard in range(shards):
        await house.put(
            f"/v1/instances/i{shard}", {"group": "chat", "fingerprint": FINGERPRINT, "shard": shard}
        )
