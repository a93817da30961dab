"""A replica: every shard of the cluster in one process, led here or followed.

One loop renews this replica's lease with the elector and decides, shard by shard, what to do (`role.py`); it
is the loop that serves, so that a process that cannot serve does not keep its leadership either. Beside it run
the followers, the feed of the catalogue to data shards, errands to the catalogue, and the snapshots.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from metaservice.core import commands as cmd
from metaservice.core.events import Event
from metaservice.core.model import Limits
from metaservice.journal.errors import JournalError, JournalUnavailable
from metaservice.leadership.errors import LeadershipError
from metaservice.leadership.port import Leadership, Report, View

from .errors import NotLeader, ShardUnavailable
from .errand import Courier, run_errands, settle
from .feed import CatalogueLog, feed
from .observer import Observer
from .role import Action, Decision, Facts, Judge, Role, Timing
from .shard import LEADERLESS, Hooks, Shard
from .snapshot import SnapshotKeeper

log = logging.getLogger(__name__)

CATALOGUE = 0
LAG_MS = 100
WAITERS_MAX = 4_096
WAIT_STEP_S = 0.01
ERRAND_S = 0.2
SHORT_WAIT_S = 0.3
REPORT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often and how long, in milliseconds. `config` checks the laws between them."""

    ttl_ms: int = 5_000
    renew_ms: int = 1_000
    margin_ms: int = 500
    look_ms: int = 200
    drain_ms: int = 2_000
    """How long a planned handover may take to make durable what is queued."""
    handover_ms: int = 1_000
    stall_ms: int = 2_500


class Replica(Hooks):
    """What the API asks (`api.port.ReplicaPort`), and what holds the shards together."""

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
        courier: Courier | None = None,
        keepers: Sequence[SnapshotKeeper] = (),
    ) -> None:
        """`alone`: no other process can lead; leases do not run out then. `keepers`: one a shard, none: no
        snapshots are cut."""
        self.id = id
        self.url = url
        self.limits = limits
        self._shards = list(make_shards(self))
        self._leadership = leadership
        self._observer = observer
        self._now_s = now_s
        self._pace = pace
        self._alone = alone
        self._courier = courier
        self._keepers = keepers
        timing = Timing(stall_s=pace.stall_ms / 1000, successor_s=pace.handover_ms / 1000)
        self._judges = [Judge(one.number, id, timing, spread=spread) for one in self._shards]
        self._said: dict[int, str] = {}
        self._view: View | None = None
        self._view_s = 0.0
        self._renewed_until_s = 0.0
        self._trouble = ""
        self._log = CatalogueLog()
        self._turns: dict[int, asyncio.Task[None]] = {}
        self._hand_to: dict[int, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._fed = asyncio.Event()
        self._errand_soon = {one.number: asyncio.Event() for one in self._shards}
        self._starved: dict[int, Any] = {}
        self._refreshing: asyncio.Task[bool] | None = None
        self._feeding = [asyncio.Lock() for _ in self._shards]
        self._waiters = 0
        self._loaded = False
        self._stopping = False
        self._stopped = False

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Load every shard and begin to take part. Alone: returns when it leads, and raises JournalError when
        the journal cannot be used. With others: returns once everything is loaded, however long the journal
        cannot be reached."""
        for shard in self._shards:
            await self._load(shard)
        self._loaded = True
        self._tasks = [
            asyncio.create_task(self._elect(), name="elect"),
            asyncio.create_task(self._watch_loop(), name="loop-lag"),
            *(asyncio.create_task(one.live(), name=f"follow-{one.number}") for one in self._shards),
        ]
        self._tasks += [
            asyncio.create_task(self._keep_snapshots(one, keeper), name=f"snapshots-{one.number}")
            for one, keeper in zip(self._shards, self._keepers, strict=False)
        ]
        if self.shards > 1:
            self._tasks.append(asyncio.create_task(self._feed_for_ever(), name="feed"))
            self._tasks += [asyncio.create_task(self._errands(one), name="errands") for one in self._shards]
        while self._alone and not self._stopping and not all(one.ready for one in self._shards):
            if self._tasks[0].done():
                self._tasks[0].result()
            await asyncio.sleep(0.005)

    async def _load(self, shard: Shard) -> None:
        while not self._stopping:
            try:
                await shard.load()
            except JournalUnavailable as error:
                if self._alone:
                    raise
                if shard.reason != str(error):
                    shard.reason = str(error)
                    log.error("shard %d: %s", shard.number, error)
                await asyncio.sleep(0.5)
            else:
                return

    async def leave(self) -> None:
        """Hand over what is led here, and wait until others lead it, for a bounded time. It goes on answering
        what it can."""
        self._stopping = True
        self._wake.set()
        if not self._loaded or self._alone:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout((self._pace.drain_ms + 2 * self._pace.handover_ms) / 1000):
                while any(one.role is not Role.FOLLOWER for one in self._shards):
                    await asyncio.sleep(WAIT_STEP_S)
                view = self._seen()
                others = view is not None and any(id != self.id for id in view.members)
                while others and not all(self.leader_url(one.number) for one in self._shards):
                    await asyncio.sleep(WAIT_STEP_S)

    async def stop(self) -> None:
        """Leave, finish what is queued, let go of everything. In any state, and more than once."""
        if self._stopped:
            return
        await self.leave()
        for task in (*self._tasks, *self._turns.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._turns.values(), return_exceptions=True)
        await asyncio.gather(*(one.close() for one in self._shards))
        await self._leadership.close()
        self._stopped = True

    async def _keep_snapshots(self, shard: Shard, keeper: SnapshotKeeper) -> None:
        while True:
            await asyncio.sleep(keeper.check_s)
            try:
                if shard.has_state and self._cuts(shard.number):
                    await shard.keep_snapshots(keeper)
            except Exception:
                log.exception(
                    "shard %d: no snapshot was cut; the journal grows until the next attempt", shard.number
                )

    def _cuts(self, shard: int) -> bool:
        """Whether it is on us to cut the snapshots of a shard: a follower does, one of them; the leader where
        there is none."""
        if self._alone:
            return True
        view = self._seen()
        if view is None:
            return False
        holder = view.holders.get(shard)
        leader = "" if holder is None else holder.replica
        able = sorted(id for id, one in view.members.items() if one.report.ready and one.report.journal_ok)
        followers = [id for id in able if id != leader]
        return (followers or able)[:1] == [self.id]

    async def _watch_loop(self) -> None:
        while True:
            started_s = self._now_s()
            await asyncio.sleep(LAG_MS / 1000)
            self._observer.loop_lag((self._now_s() - started_s) * 1000 - LAG_MS)

    # ------------------------------------------------------------ election

    async def _elect(self) -> None:
        """Renew, look, decide; for ever."""
        renew_s = -1.0
        while True:
            try:
                if self._now_s() >= renew_s:
                    renew_s = self._now_s() + self._pace.renew_ms / 1000
                    await self._renew()
                elif not self._alone:
                    self._see(await self._leadership.look())
                self._say_trouble("")
            except LeadershipError as error:
                self._say_trouble(str(error))
            for shard in self._shards:
                await self._step(shard)
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pace.look_ms / 1000):
                    await self._wake.wait()

    async def _renew(self) -> None:
        sent_s = self._now_s()
        view = await self._leadership.renew(self._report())
        self._see(view)
        ttl_s = (self._pace.ttl_ms - self._pace.margin_ms) / 1000
        self._renewed_until_s = float("inf") if self._alone else sent_s + ttl_s
        for shard in self._shards:
            holder = view.holders.get(shard.number)
            if holder is not None and holder.replica == self.id:
                shard.lease_until_s = self._renewed_until_s
            elif shard.number not in self._turns or shard.role is Role.LEADER:
                shard.lease_until_s = 0.0

    def _see(self, view: View) -> None:
        self._view = view
        self._view_s = self._now_s()

    def _seen(self) -> View | None:
        """The view, while it is young enough to say anything."""
        return self._view if self._now_s() - self._view_s < self._pace.ttl_ms / 1000 else None

    def _say_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            if trouble:
                log.error("the election cannot be asked: %s", trouble)
            else:
                log.warning("the election answers again")
            self._trouble = trouble

    def _report(self) -> Report:
        return Report(
            applied={one.number: one.durable_seq for one in self._shards},
            journal_ok=all(one.journal_ok and not one.stuck for one in self._shards),
            ready=self._loaded and not self._stopping and all(one.has_state for one in self._shards),
        )

    async def _step(self, shard: Shard) -> None:
        number = shard.number
        turn = self._turns.get(number)
        if turn is not None:
            if not turn.done():
                return
            del self._turns[number]
        decision = self._judges[number].decide(
            Facts(
                now_s=self._now_s(),
                role=shard.role,
                lease_until_s=shard.lease_until_s,
                view=self._seen(),
                warm=shard.warm,
                journal_ok=shard.journal_ok,
                stalled_s=shard.stalled_s,
                stopping=self._stopping,
                hand_to=self._hand_to.get(number),
            )
        )
        if self._said.get(number) != decision.sentence:
            self._said[number] = decision.sentence
            log.info("shard %d, %s: %s", number, shard.role, decision.sentence)
        if decision.action is Action.CAMPAIGN:
            await self._campaign(shard)
        elif decision.action is not Action.STAY:
            self._turns[number] = asyncio.create_task(self._give_up(shard, decision))

    async def _campaign(self, shard: Shard) -> None:
        if self._now_s() >= self._renewed_until_s:
            return
        try:
            if not await self._leadership.acquire(shard.number):
                return
        except LeadershipError as error:
            self._say_trouble(str(error))
            return
        shard.lease_until_s = self._renewed_until_s
        self._turns[shard.number] = asyncio.create_task(self._promote(shard))

    async def _promote(self, shard: Shard) -> None:
        started_s = self._now_s()
        if await shard.promote():
            took_ms = (self._now_s() - started_s) * 1000
            log.info("shard %d: leading in epoch %d after %.0f ms", shard.number, shard.epoch, took_ms)
            self._fed.set()
            return
        shard.lease_until_s = 0.0
        await self._resign(shard.number)
        await asyncio.sleep(self._pace.look_ms / 1000)

    async def _give_up(self, shard: Shard, decision: Decision) -> None:
        graceful = decision.action is Action.HAND_OVER
        await shard.demote(self._pace.drain_ms / 1000 if graceful else 0.0)
        shard.lease_until_s = 0.0
        self._hand_to.pop(shard.number, None)
        await self._resign(shard.number, decision.successor)
        self._wake.set()

    async def _resign(self, number: int, successor: str = "") -> None:
        try:
            await self._leadership.resign(number, successor)
        except LeadershipError as error:
            log.warning("shard %d: the lease was not given back, it will run out: %s", number, error)

    # ------------------------------------------------------------ what shards ask and tell

    def leader(self, shard: int) -> tuple[str, str]:
        """See Hooks."""
        if self._shards[shard].ready:
            return self.id, self.url
        view = self._seen()
        holder = None if view is None else view.holders.get(shard)
        if holder is None or not holder.replica or holder.replica == self.id:
            return LEADERLESS
        return holder.replica, holder.url

    def applied(self, shard: int, events: Sequence[Event], seq: int) -> None:
        """See Hooks."""
        if shard == CATALOGUE and self.shards > 1 and self._log.add(events, seq):
            self._fed.set()

    def restarted(self, shard: int) -> None:
        """See Hooks."""
        if shard == CATALOGUE and self.shards > 1:
            self._log.restart(self._shards[CATALOGUE].durable_seq)
            self._fed.set()

    def fallen(self, shard: int) -> None:
        """See Hooks."""
        if not self._alone:
            self._shards[shard].lease_until_s = 0.0
            self._turns[shard] = asyncio.create_task(self._resign(shard))
        self._wake.set()

    async def before_write(self, shard: int, command: cmd.StartWrite) -> None:
        """See Hooks: ask the catalogue for room, and wait a little for its answer."""
        with suppress(ShardUnavailable, TimeoutError):
            async with asyncio.timeout(SHORT_WAIT_S):
                await self._run_errands(self._shards[shard])

    # ------------------------------------------------------------ catalogue and errands

    async def _feed_for_ever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._fed.wait()
            self._fed.clear()
            with suppress(ShardUnavailable):
                await self._feed_all()

    async def _feed_all(self) -> bool:
        learned = False
        for shard in self._shards[1:]:
            if shard.ready:
                async with self._feeding[shard.number]:
                    learned |= await feed(self._log, self._shards[CATALOGUE], shard)
        return learned

    async def refresh(self) -> bool:
        """Catch up with the catalogue's journal, and bring the data shards led here up to it; whether
        anything was learned. Calls that come meanwhile share one, but not one that began before them."""
        before = self._refreshing
        if before is not None and not before.done():
            await asyncio.wait([before])
        if self._refreshing is before or self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())
        return await asyncio.shield(self._refreshing)

    async def _refresh(self) -> bool:
        try:
            learned = await self._shards[CATALOGUE].catch_up()
        except JournalError as error:
            raise ShardUnavailable("journal_unavailable", str(error)) from error
        return await self._feed_all() or learned

    async def _errands(self, shard: Shard) -> None:
        soon = self._errand_soon[shard.number]
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ERRAND_S):
                    await soon.wait()
            soon.clear()
            if not shard.ready:
                continue
            try:
                await self._run_errands(shard)
            except ShardUnavailable as error:
                log.debug("shard %d: errands wait: %s", shard.number, error)
            except Exception:
                log.exception("shard %d: errands failed", shard.number)

    async def _run_errands(self, shard: Shard) -> None:
        _, url = self.leader(CATALOGUE)
        courier = self._courier
        assert courier is not None, "several shards need a courier"
        settled = await run_errands(shard, self._shards[CATALOGUE], url, courier)
        if settled is None:
            return
        if settled.version > shard.machine.state.catalogue_version:
            await self.refresh()
        starved = tuple(settled.starved)
        if settled.give or starved != self._starved.get(shard.number, ()):
            await shard.submit(cmd.GiveBudget(give=settled.give, starved=settled.starved))
            self._starved[shard.number] = starved

    async def settle(self, errands: bytes) -> bytes:
        """Errands of another replica's data shard, for the catalogue that is led here."""
        return await settle(self._shards[CATALOGUE], errands)

    # ------------------------------------------------------------ what the API asks

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
        """Whether it may be sent requests: everything is loaded, and for every shard it leads or knows who
        does."""
        if not self._loaded or self._stopping:
            return False
        if self._alone:
            return all(one.ready for one in self._shards)
        return all(one.has_state for one in self._shards)

    @property
    def status(self) -> str:
        """One word for all shards: the least ready one's."""
        if self._stopped:
            return "stopped"
        if self._stopping:
            return "stopping"
        return self._worst.status

    @property
    def reason(self) -> str:
        """Why it is in that status."""
        if self._stopping:
            return "shutting down"
        worst = self._worst
        return (
            worst.reason
            if worst.role is not Role.FOLLOWER or not worst.has_state
            else self._said.get(worst.number, worst.reason)
        )

    @property
    def _worst(self) -> Shard:
        ranked = ("starting", "rebuilding", "demoting", "promoting", "following", "leading")
        return min(self._shards, key=lambda one: ranked.index(one.status) if one.status in ranked else 0)

    @property
    def catalogue(self) -> Shard:
        """Shard 0."""
        return self._shards[CATALOGUE]

    def shard(self, number: int) -> Shard:
        """The shard of that number."""
        return self._shards[number]

    def home(self, instance: str) -> int | None:
        """The shard of an instance by the local copy of the catalogue."""
        return self._shards[CATALOGUE].home(instance)

    def leads(self, number: int) -> bool:
        """Whether the shard is led here."""
        return self._shards[number].ready

    def leader_url(self, number: int) -> str:
        """Where the leader of a shard is, as far as known."""
        return self.leader(number)[1]

    async def await_leader(self, number: int, wait_ms: int) -> str:
        """`leader_url` once it is known, "" when it is not within `wait_ms`."""
        url = self.leader_url(number)
        if url or wait_ms <= 0:
            return url
        if self._waiters >= WAITERS_MAX:
            raise ShardUnavailable("overloaded", f"{WAITERS_MAX} requests wait for a leader already")
        self._waiters += 1
        try:
            deadline_s = self._now_s() + wait_ms / 1000
            while not url and self._now_s() < deadline_s and not self._stopped:
                await asyncio.sleep(WAIT_STEP_S)
                url = self.leader_url(number)
        finally:
            self._waiters -= 1
        return url

    async def handover(self, number: int, to: str = "") -> str:
        """Give a shard that is led here to another replica; the id of the one that leads then."""
        shard = self._shards[number]
        shard.machine  # noqa: B018 - raises NotLeader
        view = self._seen()
        able = [] if view is None else [
            id for id, one in view.members.items() if id != self.id and one.report.ready and one.report.journal_ok
        ]  # fmt: skip
        if not able or (to and to not in able):
            whom = f"replica {to!r}" if to else "no other replica"
            raise ShardUnavailable(
                "not_ready", f"{whom} is alive, ready and has a working journal ({', '.join(able) or 'none'} are)"
                if to else "no other replica is alive, ready and has a working journal",
            )  # fmt: skip
        self._hand_to[number] = to
        self._wake.set()
        deadline_s = self._now_s() + (self._pace.drain_ms + 2 * self._pace.handover_ms) / 1000
        while self._now_s() < deadline_s:
            await asyncio.sleep(WAIT_STEP_S)
            leader, _ = self.leader(number)
            if leader and (leader != self.id or number not in self._hand_to):
                return leader
        raise ShardUnavailable("not_ready", "the handover has not come to an end yet")

    def cluster_status(self) -> dict[str, Any]:
        """What GET /v1/cluster shows."""
        view = self._seen()
        members = {} if view is None else view.members
        return {
            "replica": self.id,
            "url": self.url,
            "cluster": self.cluster,
            "status": self.status,
            "reason": self._trouble or self.reason,
            "ready": self.ready,
            "members": [
                {
                    "replica": id,
                    "url": one.url,
                    "ready": one.report.ready,
                    "journal_ok": one.report.journal_ok,
                    "applied": {str(shard): seq for shard, seq in one.report.applied.items()},
                }
                for id, one in sorted(members.items())
            ],
            "shards": [self._shard_status(one, view) for one in self._shards],
        }

    def _shard_status(self, shard: Shard, view: View | None) -> dict[str, Any]:
        leader, url = self.leader(shard.number)
        heads = (
            [] if view is None else [one.report.applied.get(shard.number, 0) for one in view.members.values()]
        )
        left_s = shard.lease_until_s - self._now_s()
        return {
            "shard": shard.number,
            "role": str(shard.role),
            "status": shard.status,
            "reason": self._said.get(shard.number, shard.reason),
            "ready": shard.ready,
            "leader": leader,
            "leader_url": url,
            "epoch": shard.epoch,
            "seq": shard.durable_seq,
            "lag": max(0, max(heads, default=0) - shard.durable_seq),
            "staleness_ms": shard.staleness_ms,
            "lease_left_ms": 0 if self._alone or not shard.ready else max(0, int(left_s * 1000)),
        }

    def gauges(self) -> dict[str, float]:
        """Numbers of now, over all shards, for a scrape."""
        told: dict[str, float] = {}
        for shard in self._shards:
            for name, value in shard.gauges().items():
                if name == "ready":
                    told[name] = min(told.get(name, 1.0), value)
                elif name in ("epoch", "durable_seq", "staleness_ms", "append_stalled_ms"):
                    told[name] = max(told.get(name, 0.0), value)
                elif name == "writes_refused":
                    told[name] = max(told.get(name, 0.0), value)
                else:
                    told[name] = told.get(name, 0.0) + value
        return told
