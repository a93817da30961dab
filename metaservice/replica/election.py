"""Which shards this replica leads: one loop renews its lease with the elector and decides, shard by shard,
what to do (`role.py`), and carries it out.

It is the loop that serves, so that a process that cannot serve does not keep its leadership either. Leases
are judged by this process's own monotonic clock, counted from before the renewal was sent; a shard looks at
its lease with every answer, so a late loop makes nothing unsafe.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from metaservice.leadership.errors import LeadershipError, ReplicaSuperseded
from metaservice.leadership.port import Leadership, Report, View

from .role import Action, Decision, Facts, Judge, Role, Timing
from .shard import LEADERLESS, Shard

log = logging.getLogger(__name__)

LEAVE_STEP_S = 0.01
FOR_EVER = float("inf")


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
    """How long the others leave a shard to the replica that it was handed to."""
    stall_ms: int = 3_000
    """An append that takes longer is handed to a replica whose journal works, if there is one. Long enough
    for everybody who waits as well to have said so (`life.SILENT_S`, a renewal, a look)."""


class Election:
    """Carries out what is decided about the shards of one replica."""

    def __init__(
        self,
        replica: str,
        url: str,
        shards: Sequence[Shard],
        leadership: Leadership,
        now_s: Callable[[], float],
        pace: Pace,
        *,
        alone: bool,
        spread: bool,
        on_lead: Callable[[int], None],
    ) -> None:
        """`alone`: no other process can lead, and leases do not run out. `spread`: shards move so that all
        replicas lead about as many. `on_lead(shard)` hears of every shard that is led here from now on."""
        self.trouble = ""
        """Why the election cannot be asked, '' when it can."""
        self.loaded = False
        self.leaving = False
        self.said: dict[int, str] = {}
        """The last decision about each shard, in a sentence."""
        self._replica = replica
        self._url = url
        self._shards = shards
        self._leadership = leadership
        self._now_s = now_s
        self._pace = pace
        self._alone = alone
        self._on_lead = on_lead
        timing = Timing(stall_s=pace.stall_ms / 1000, successor_s=pace.handover_ms / 1000)
        self._judges = [Judge(one.number, replica, timing, spread=spread) for one in shards]
        self._view: View | None = None
        self._view_s = 0.0
        self._renewed_until_s = 0.0
        self._renew_s = 0.0
        self._reported: Report | None = None
        self._turns: dict[int, asyncio.Task[None]] = {}
        self._hand_to: dict[int, str] = {}
        self._wake = asyncio.Event()
        self._news: asyncio.Future[None] | None = None
        self._over = False
        self._refusal = ""

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Renew, look, decide; for ever. Raises ReplicaSuperseded."""
        try:
            await self._run()
        finally:
            self._over = True

    async def _run(self) -> None:
        while True:
            try:
                if self._now_s() >= self._renew_s or self._changed():
                    self._renew_s = self._now_s() + self._pace.renew_ms / 1000
                    await self._renew()
                elif not self._alone:
                    self._see(await self._leadership.look())
                self._say_trouble("")
            except ReplicaSuperseded:
                raise  # two processes of one name must not both go on
            except LeadershipError as error:
                self._say_trouble(str(error))
            except Exception as error:
                # A fault of a library on the way is no reason to die: leases run out by themselves.
                log.exception("asking the election failed")
                self._say_trouble(f"asking it failed: {error!r}")
            for shard in self._shards:
                await self._step(shard)
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pace.look_ms / 1000):
                    await self._wake.wait()

    async def close(self) -> None:
        """End what is under way, and let go of the lease."""
        self._tell()
        for turn in self._turns.values():
            turn.cancel()
        await asyncio.gather(*self._turns.values(), return_exceptions=True)

    async def resign_all(self) -> None:
        """Give the elector everything back at once."""
        await self._leadership.close()

    def wake(self) -> None:
        """Something changed that matters: decide now."""
        self._wake.set()

    async def _renew(self) -> None:
        sent_s = self._now_s()
        report = self._reported = self._report()
        view = await self._leadership.renew(report)
        self._see(view)
        good_s = (self._pace.ttl_ms - self._pace.margin_ms) / 1000
        self._renewed_until_s = FOR_EVER if self._alone else sent_s + good_s
        for shard in self._shards:
            holder = view.holders.get(shard.number)
            ours = holder is not None and holder.replica == self._replica
            shard.lease_until_s = self._renewed_until_s if ours else 0.0

    async def news(self, wait_s: float) -> None:
        """Wait, at most so long, until it may be known who leads what, and was not before. All who wait share
        one future: thousands that look by themselves would take the time that the election needs."""
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._news], timeout=wait_s)

    def _tell(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set_result(None)

    def _see(self, view: View) -> None:
        self._tell()
        self._view = view
        self._view_s = self._now_s()

    def _say_trouble(self, trouble: str) -> None:
        if trouble != self.trouble:
            if trouble:
                log.error("the election cannot be asked: %s", trouble)
            else:
                log.warning("the election answers again")
            self.trouble = trouble

    def _changed(self) -> bool:
        """Whether others should hear of us before the next renewal is due."""
        last, now = self._reported, self._report()
        return last is None or (last.journal_ok, last.ready) != (now.journal_ok, now.ready)

    def _report(self) -> Report:
        return Report(
            applied={one.number: one.durable_seq for one in self._shards},
            journal_ok=all(one.journal_ok and not one.stuck for one in self._shards),
            ready=self.loaded and not self.leaving and all(one.has_state for one in self._shards),
        )

    # ------------------------------------------------------------ one shard

    async def _step(self, shard: Shard) -> None:
        number = shard.number
        turn = self._turns.get(number)
        if turn is not None:
            if not turn.done():
                return
            del self._turns[number]
            if not turn.cancelled() and (fault := turn.exception()) is not None:
                log.error("shard %d: changing the role failed", number, exc_info=fault)
        decision = self._judges[number].decide(
            Facts(
                now_s=self._now_s(),
                role=shard.role,
                lease_until_s=shard.lease_until_s,
                view=self.view,
                warm=shard.warm,
                journal_ok=shard.journal_ok,
                stalled_s=shard.stalled_s,
                stopping=self.leaving and not self._alone,
                hand_to=self._hand_to.get(number),
            )
        )
        if self.said.get(number) != decision.sentence:
            self.said[number] = decision.sentence
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
            if str(error) != self._refusal:  # it is tried again with every look
                self._refusal = str(error)
                log.error("shard %d cannot be acquired: %s", shard.number, error)
            return
        self._refusal = ""
        shard.lease_until_s = self._renewed_until_s
        self._turns[shard.number] = asyncio.create_task(self._promote(shard))

    async def _promote(self, shard: Shard) -> None:
        started_s = self._now_s()
        if await shard.promote():
            took_ms = (self._now_s() - started_s) * 1000
            log.info("shard %d: leading in epoch %d after %.0f ms", shard.number, shard.epoch, took_ms)
            self._on_lead(shard.number)
            self._tell()
            return
        shard.lease_until_s = 0.0
        await self._resign(shard.number)
        await asyncio.sleep(self._pace.look_ms / 1000)

    async def _give_up(self, shard: Shard, decision: Decision) -> None:
        planned = decision.action is Action.HAND_OVER
        await shard.demote(self._pace.drain_ms / 1000 if planned else 0.0)
        shard.lease_until_s = 0.0
        self._hand_to.pop(shard.number, None)
        await self._resign(shard.number, decision.successor)
        self.wake()

    async def _resign(self, number: int, successor: str = "") -> None:
        try:
            await self._leadership.resign(number, successor)
        except LeadershipError as error:
            log.warning("shard %d: the lease was not given back, it will run out: %s", number, error)

    def fallen(self, number: int) -> None:
        """The shard stopped leading by itself: another may take it, or we again once it is rebuilt."""
        self._hand_to.pop(number, None)  # nobody would want that hours later, when we lead it again
        if not self._alone:
            self._shards[number].lease_until_s = 0.0
            self._turns[number] = asyncio.create_task(self._resign(number))
        self.wake()

    # ------------------------------------------------------------ who leads

    @property
    def view(self) -> View | None:
        """What the elector said last, while that is young enough to mean anything."""
        return self._view if self._now_s() - self._view_s < self._pace.ttl_ms / 1000 else None

    def leader(self, number: int) -> tuple[str, str]:
        """(replica, URL) of a shard's leader as far as known."""
        if self._shards[number].ready:
            return self._replica, self._url
        view = self.view
        holder = None if view is None else view.holders.get(number)
        if holder is None or not holder.replica or holder.replica == self._replica:
            return LEADERLESS
        return holder.replica, holder.url

    def able(self) -> list[str]:
        """The other replicas that could lead: alive, ready, with a working journal."""
        view = self.view
        members = {} if view is None else view.members
        return sorted(
            id
            for id, one in members.items()
            if id != self._replica and one.report.ready and one.report.journal_ok
        )

    def cuts(self, number: int) -> bool:
        """Whether it is on us to cut the snapshots of a shard: a follower does, one of them; the leader where
        there is none."""
        if self._alone:
            return True
        if self.view is None:
            return False
        leader, _ = self.leader(number)
        able = sorted([*self.able(), self._replica])
        followers = [id for id in able if id != leader]
        return (followers or able)[0] == self._replica

    def hand_over(self, number: int, to: str) -> None:
        """Give the shard to a replica, "" for any, as soon as may be."""
        self._hand_to[number] = to
        self.wake()

    def handing_over(self, number: int) -> bool:
        """Whether that is still to be done."""
        return number in self._hand_to

    def _left(self) -> bool:
        """Whether nothing is led here any more, and others lead where there are others."""
        if self._over:
            return True  # nobody changes any role any more
        if any(one.role is not Role.FOLLOWER for one in self._shards):
            return False
        return not self.able() or all(self.leader(one.number)[1] for one in self._shards)

    async def leave(self) -> None:
        """Hand over everything, and wait for it a bounded time: until others lead, where there are others."""
        first = not self.leaving
        self.leaving = True
        self._renew_s = 0.0  # tell everybody now that we are not to be handed anything
        self.wake()
        if not first or not self.loaded or self._alone:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout((self._pace.drain_ms + 2 * self._pace.handover_ms) / 1000):
                while not self._left():  # noqa: ASYNC110 - others change it, in other processes
                    await asyncio.sleep(LEAVE_STEP_S)
