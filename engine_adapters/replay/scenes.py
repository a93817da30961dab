"""Where a run takes place: with a service of its own, or in a cluster that is there. A scene says which part
of the service is killed, when the engines reach it again, and what the run has to show."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from engine_adapters.replay.audit import Audit
from engine_adapters.replay.children import Child, Children
from engine_adapters.replay.deployment import Deployment, Site, Sizing
from engine_adapters.replay.engine import BREAKER_PAUSE_MS_MAX
from engine_adapters.replay.ledger import (
    ClusterFigures,
    Figures,
    Ledger,
    ServiceFigures,
    Verdicts,
    cluster_verdicts,
    verdicts,
)
from engine_adapters.replay.plan import (
    CLUSTER_ENGINE_KILL_AT,
    ENGINE_KILL_AT,
    LEADER_KILL_AT,
    SERVICE_KILL_AT,
)
from engine_adapters.replay.replicas import ClusterSite, Description

ARRIVAL_S = 0.12
"""From the leader's kill on, requests arrive so often, with a leader and without: engines without a model
would hurry through all that is left while nobody leads, or wait and miss nothing; either figure would say
nothing."""

Note = Callable[[str], None]


class Scene(ABC):
    """One place to run in."""

    settle_timeout_s = 60.0
    """How long the end of a run is waited for, when nothing may be left over."""
    arrival_s: float | None = None
    """How often a request arrives from the kill on; None: they wait until the service is back."""
    kill_shares = (ENGINE_KILL_AT, SERVICE_KILL_AT)
    """Shares of the requests handed out when an engine is killed, and when a part of the service is."""

    def __init__(self, site: Site, note: Note) -> None:
        self.site = site
        self.note = note
        self.service_killed = False

    @property
    def killable(self) -> bool:
        """Whether a part of the service is killed on the way."""
        return True

    @abstractmethod
    async def open(self) -> Child | None:
        """Make all ready for the engines; the worker, if it is a process of this run."""

    @abstractmethod
    async def kill_service(self) -> None:
        """SIGKILL to the part of the service that the engines need."""

    @abstractmethod
    async def restored(self) -> None:
        """Return when the engines reach the service again."""

    @abstractmethod
    def figures(self, ledger: Ledger, ideal_hit_rate: float, audit: Audit, seconds: float) -> Figures:
        """What came of it."""

    @abstractmethod
    def verdicts(self, ledger: Ledger, figures: Figures, requests: int, audit: Audit) -> Verdicts:
        """What the run must have shown, each with whether it did."""


class OwnService(Scene):
    """A service of one process, which is killed and started again on its data."""

    site: Deployment

    def __init__(self, children: Children, folder: Path, sizing: Sizing, seed: int, note: Note) -> None:
        super().__init__(Deployment(children, folder, sizing, seed), note)

    async def open(self) -> Child:
        await self.site.start_service()
        await self.site.set_up()
        return await self.site.start_worker()

    async def kill_service(self) -> None:
        self.site.kill_service()
        self.service_killed = True
        self.note("the service was killed (SIGKILL)")

    async def restored(self) -> None:
        killed = time.monotonic()
        await self.site.service_gone()
        await self.site.start_service()
        # Engines that were failed by the service stay away from it for so long at most.
        await asyncio.sleep(BREAKER_PAUSE_MS_MAX / 1_000)
        self.note(f"the service is back on the same data after {time.monotonic() - killed:.1f} s")

    def figures(self, ledger: Ledger, ideal_hit_rate: float, audit: Audit, seconds: float) -> Figures:
        return ledger.figures(ideal_hit_rate, audit.orphans, seconds)

    def verdicts(self, ledger: Ledger, figures: Figures, requests: int, audit: Audit) -> Verdicts:
        assert isinstance(figures, ServiceFigures)
        return verdicts(
            figures,
            requests=requests,
            engine_killed=ledger.engine_killed_at is not None,
            service_killed=self.service_killed,
            absent_files=audit.absent_files,
        )


class Cluster(Scene):
    """Replicas that somebody else runs; the one that leads the instance's shard is killed."""

    site: ClusterSite
    settle_timeout_s = 120.0
    arrival_s = ARRIVAL_S
    kill_shares = (CLUSTER_ENGINE_KILL_AT, LEADER_KILL_AT)

    def __init__(
        self,
        children: Children,
        describe: Callable[[], Description],
        sizing: Sizing,
        seed: int,
        note: Note,
        *,
        with_worker: bool,
    ) -> None:
        """`with_worker`: the run starts a worker; else one is there."""
        super().__init__(ClusterSite(children, describe, sizing, seed), note)
        self._with_worker = with_worker
        self._unavailable_ms = 0

    @property
    def killable(self) -> bool:
        return self.site.killable

    async def open(self) -> Child | None:
        await self.site.set_up()
        self.note(f"the instance's shard is led by {await self.site.leader()}")
        return await self.site.start_worker() if self._with_worker else None

    async def kill_service(self) -> None:
        name = await self.site.kill_leader()
        self.service_killed = True
        self.note(f"{name}, which led the instance's shard, was killed (SIGKILL)")

    async def restored(self) -> None:
        self._unavailable_ms = await self.site.unavailable_ms()
        self.note(
            f"{await self.site.leader()} took over; lookups failed for {self._unavailable_ms} ms,"
            f" with a request each {ARRIVAL_S * 1_000:.0f} ms from the kill on"
        )
        await asyncio.sleep(BREAKER_PAUSE_MS_MAX / 1_000)

    def figures(self, ledger: Ledger, ideal_hit_rate: float, audit: Audit, seconds: float) -> Figures:
        return ledger.cluster_figures(ideal_hit_rate, audit.orphans, seconds, self._unavailable_ms)

    def verdicts(self, ledger: Ledger, figures: Figures, requests: int, audit: Audit) -> Verdicts:
        assert isinstance(figures, ClusterFigures)
        return cluster_verdicts(
            figures,
            requests=requests,
            engine_killed=ledger.engine_killed_at is not None,
            leader_killed=self.service_killed if self.killable else None,
            absent_files=audit.absent_files,
        )
