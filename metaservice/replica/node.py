"""A replica: every shard of the cluster in one process, led here or followed. What the API asks is asked
here."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from metaservice.core import commands as cmd
from metaservice.core.events import Event
from metaservice.core.model import Limits
from metaservice.journal.errors import JournalError, JournalUnavailable
from metaservice.leadership.port import Leadership

from . import errand, status
from .election import Election, Pace
from .errors import NotLeader, ShardUnavailable
from .observer import Observer
from .role import Role
from .routers import Routers
from .shard import Hooks, Shard
from .snapshot import SnapshotKeeper
from .spread import Spread

log = logging.getLogger(__name__)

CATALOGUE = 0
LAG_MS = 100
LOAD_AGAIN_S = 0.5
REPORT_S = 5.0
WAITERS_MAX = 4_096
WAIT_STEP_S = 0.01
_WORST_FIRST = ("starting", "rebuilding", "demoting", "promoting", "following", "leading")


class Replica(Hooks):
    """Implements `api.port.ReplicaPort`, and holds together the shards, the election, the feed of the
    catalogue and the snapshots."""

    def __init__(
        self,
        id: str,
        url: str,
        make_shards: Callable[[Hooks], Sequence[Shard]],
        leadership: Leadership,
        limits: Limits,
        observer: Observer,
        now_s: Callable[[], float],
        *,
        pace: Pace,
        alone: bool = True,
        spread: bool = True,
        courier: errand.Courier | None = None,
        keepers: Sequence[SnapshotKeeper] = (),
        routers: Routers | None = None,
    ) -> None:
        """`alone`: no other process can lead; leases do not run out then. `courier` carries errands to other
        replicas. `keepers`: one a shard; none: no snapshots are cut. `routers`: who tells routers; none:
        nobody."""
        self.id = id
        self.url = url
        self.limits = limits
        self._shards = list(make_shards(self))
        self._routers = routers
        if routers is not None:
            routers.attach(self._shards)
        self._observer = observer
        self._now_s = now_s
        self._pace = pace
        self._alone = alone
        self._keepers = keepers
        self._election = Election(
            id, url, self._shards, leadership, now_s, pace, alone=alone, spread=spread, on_lead=self._leads
        )
        self._spread: Spread | None = None
        if len(self._shards) > 1:
            assert courier is not None, "several shards need a courier"
            self._spread = Spread(self._shards, courier, lambda: self.leader_url(CATALOGUE))
        self._tasks: list[asyncio.Task[None]] = []
        self._waiters = 0
        self._stopping = False
        self._stopped = False

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Load every shard and begin to take part, however long the journal cannot be reached. Alone it
        returns when it leads. Raises JournalError when the journal cannot be used."""
        for shard in self._shards:
            await self._load(shard)
        self._election.loaded = True
        election = asyncio.create_task(self._election.run(), name="election")
        self._tasks = [
            election,
            asyncio.create_task(self._watch_loop(), name="loop-lag"),
            asyncio.create_task(self._report(), name="report"),
            *(asyncio.create_task(one.live(), name=f"follow-{one.number}") for one in self._shards),
            *(
                asyncio.create_task(self._keep_snapshots(one, keeper), name=f"snapshots-{one.number}")
                for one, keeper in zip(self._shards, self._keepers, strict=False)
            ),
            *(self._spread.tasks() if self._spread is not None else ()),
        ]
        while self._alone and not self._stopping and not all(one.ready for one in self._shards):
            if election.done():
                election.result()
            for shard in self._shards:
                # Alone, what is wrong with the journal is wrong with the start: nobody else can lead.
                if isinstance(shard.fault, JournalError) and not isinstance(shard.fault, JournalUnavailable):
                    raise shard.fault
            await asyncio.sleep(0.005)

    async def _load(self, shard: Shard) -> None:
        while not self._stopping:
            try:
                await shard.load()
            except JournalUnavailable as error:
                if shard.reason != str(error):
                    shard.reason = str(error)
                    log.error("shard %d: %s", shard.number, error)
                await asyncio.sleep(LOAD_AGAIN_S)
            else:
                return

    async def failed(self) -> None:
        """Waits for what ends this replica's part in the cluster, and raises it."""
        await asyncio.shield(self._tasks[0])

    def hint(self, shard: int) -> None:
        """There may be something new in a shard's journal."""
        if shard < len(self._shards):
            self._shards[shard].hint()

    async def leave(self) -> None:
        """Hand over what is led here, and wait until others lead it, for a bounded time. Requests that come
        meanwhile are still answered or sent on."""
        await self._election.leave()

    async def stop(self) -> None:
        """Leave, finish what is queued, let go of everything. In any state, and more than once."""
        if self._stopped:
            return
        await self.leave()
        self._stopping = True
        if self._routers is not None:
            self._routers.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._election.close()
        await asyncio.gather(*(one.close() for one in self._shards))
        await self._election.resign_all()
        self._stopped = True

    async def _watch_loop(self) -> None:
        while True:
            started_s = self._now_s()
            await asyncio.sleep(LAG_MS / 1000)
            self._observer.loop_lag((self._now_s() - started_s) * 1000 - LAG_MS)

    async def _report(self) -> None:
        """Tell the journals how far we are, so that nothing is trimmed that we still need."""
        while True:
            for shard in self._shards:
                try:
                    await shard.report(self.id)
                except JournalError as error:
                    log.debug("shard %d: not reported: %s", shard.number, error)
                except Exception:
                    log.exception("shard %d: not reported", shard.number)
            await asyncio.sleep(REPORT_S)

    async def _keep_snapshots(self, shard: Shard, keeper: SnapshotKeeper) -> None:
        while True:
            await asyncio.sleep(keeper.check_s)
            try:
                if shard.has_state and self._election.cuts(shard.number):
                    await shard.keep_snapshots(keeper)
            except (JournalError, RuntimeError) as error:
                log.error(
                    "shard %d: no snapshot was cut, the journal grows meanwhile: %s", shard.number, error
                )
            except Exception:
                log.exception("shard %d: no snapshot was cut; the journal grows meanwhile", shard.number)

    # ------------------------------------------------------------ what shards ask and tell

    def leader(self, shard: int) -> tuple[str, str]:
        """See Hooks."""
        return self._election.leader(shard)

    def applied(self, shard: int, events: Sequence[Event], seq: int) -> None:
        """See Hooks."""
        if self._routers is not None:
            self._routers.applied(shard, events)
        if shard == CATALOGUE and self._spread is not None:
            self._spread.applied(events, seq)

    def leading(self, shard: int, epoch: int, until_s: float) -> None:
        """See Hooks."""
        if self._routers is not None:
            self._routers.leading(shard, epoch, until_s)

    def restarted(self, shard: int) -> None:
        """See Hooks."""
        if self._routers is not None:
            self._routers.restarted(shard)
        if shard == CATALOGUE and self._spread is not None:
            self._spread.restarted()

    def fallen(self, shard: int) -> None:
        """See Hooks."""
        self._election.fallen(shard)

    async def before_write(self, shard: int, command: cmd.StartWrite) -> None:
        """See Hooks."""
        if self._spread is not None:
            await self._spread.ask_for_room(self._shards[shard])

    def _leads(self, shard: int) -> None:
        if self._spread is not None:
            self._spread.look_after()

    # ------------------------------------------------------------ the replica

    @property
    def shards(self) -> int:
        """How many there are."""
        return len(self._shards)

    @property
    def cluster(self) -> str:
        """The cluster's id, "" while it is not known."""
        return self._shards[CATALOGUE].cluster

    @property
    def ready(self) -> bool:
        """Whether it may be sent requests: everything is loaded, whoever leads."""
        if not self._election.loaded or self._election.leaving:
            return False
        return all(one.ready if self._alone else one.has_state for one in self._shards)

    @property
    def status(self) -> str:
        """One word for all shards: that of the one which is furthest from leading."""
        if self._stopped:
            return "stopped"
        if self._election.leaving:
            return "stopping"
        return self._worst.status

    @property
    def reason(self) -> str:
        """Why it is in that status."""
        if self._election.leaving:
            return "shutting down"
        worst = self._worst
        following = worst.role is Role.FOLLOWER and worst.has_state
        return self._election.said.get(worst.number, worst.reason) if following else worst.reason

    @property
    def _worst(self) -> Shard:
        return min(self._shards, key=lambda one: _WORST_FIRST.index(one.status))

    def gauges(self) -> dict[str, float]:
        """Numbers of now over all shards, for a scrape. `ready`: may be sent requests, whoever leads."""
        return {**status.gauges(self._shards), "ready": float(self.ready)}

    def cluster_status(self) -> dict[str, Any]:
        """What GET /v1/cluster shows."""
        return {
            "replica": self.id,
            "url": self.url,
            "cluster": self.cluster,
            "status": self.status,
            "reason": self._election.trouble or self.reason,
            "ready": self.ready,
            "members": status.members(self._election),
            "shards": status.shards(self._election, self._shards, self._now_s()),
        }

    # ------------------------------------------------------------ shards and leaders

    def shard(self, number: int) -> Shard:
        """The shard of that number."""
        return self._shards[number]

    def home(self, instance: str) -> int | None:
        """The shard of an instance by the local copy of the catalogue; None: it has no such instance."""
        return self._shards[CATALOGUE].home(instance)

    def leads(self, number: int) -> bool:
        """Whether the shard is led here."""
        return self._shards[number].ready

    def leader_url(self, number: int) -> str:
        """Where the leader of a shard is, as far as known; "" when it is not."""
        return self._election.leader(number)[1]

    async def await_leader(self, number: int, wait_ms: int) -> str:
        """`leader_url` once it is known, "" when it is not within `wait_ms`. Raises ShardUnavailable when too
        many wait."""
        url = self.leader_url(number)
        if url or wait_ms <= 0:
            return url
        if self._waiters >= WAITERS_MAX:
            raise ShardUnavailable("overloaded", f"{WAITERS_MAX} requests wait for a leader already")
        self._waiters += 1
        try:
            deadline_s = self._now_s() + wait_ms / 1000
            while not url and (left_s := deadline_s - self._now_s()) > 0 and not self._stopped:
                await self._election.news(left_s)
                url = self.leader_url(number)
        finally:
            self._waiters -= 1
        return url

    async def refresh(self) -> bool:
        """Catch up with the catalogue. Whether it is worth to ask again what was refused before: always with
        several shards (what was missing may have come by itself meanwhile), never with one."""
        if self._spread is None:
            return False
        await self._spread.refresh()
        return True

    async def settle(self, errands: bytes) -> bytes:
        """Errands of another replica's data shard, for the catalogue that is led here."""
        return await errand.settle(self._shards[CATALOGUE], errands)

    async def handover(self, number: int, to: str = "") -> str:
        """Give a shard that is led here to another replica; the id of the one that leads then. Raises
        NotLeader, or ShardUnavailable when nobody can take it."""
        if not self._shards[number].ready:
            leader, url = self.leader(number)
            raise NotLeader(number, f"shard {number} is not led here", leader, url)
        able = self._election.able()
        if not able or (to and to not in able):
            whom = f"replica {to!r} is not" if to else "no other replica is"
            others = f"; {', '.join(able)} could" if able else ""
            raise ShardUnavailable("not_ready", f"{whom} alive, ready and with a working journal{others}")
        self._election.hand_over(number, to)
        deadline_s = self._now_s() + (self._pace.drain_ms + 2 * self._pace.handover_ms) / 1000
        while self._now_s() < deadline_s:
            await asyncio.sleep(WAIT_STEP_S)
            leader, _ = self.leader(number)
            if leader and not self._election.handing_over(number):
                return leader
        raise ShardUnavailable("not_ready", "the handover has not come to an end yet")
