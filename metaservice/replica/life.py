"""The life of one shard in one replica: a state that follows the journal, and, while it leads, the sequencer
that decides.

Who leads is not decided here (`role.py`, `election.py`): `promote` and `demote` carry it out. What cannot be
trusted is thrown away and built anew from the journal; there is no undo.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from metaservice.core import commands as cmd
from metaservice.core.events import Event
from metaservice.core.machine import Machine
from metaservice.core.model import Limits
from metaservice.journal.errors import JournalError, JournalRegressed, JournalUnavailable
from metaservice.journal.port import Batch, Journal, OpenReport

from .errors import ShardUnavailable
from .observer import Observer
from .replay import replay
from .role import Role, Turn, turned
from .sequencer import SLICE_MS, Diverged, Sequencer
from .tail import Tail
from .thread import JournalThread

log = logging.getLogger(__name__)

REBUILD_PAUSE_MS = 200
REBUILD_PAUSE_MS_MAX = 5_000
BATCHES_PER_READ_MAX = 64
BYTES_PER_READ_MAX = 4 * 1024 * 1024
LEADERLESS = ("", "")
SILENT_S = 1.0
"""A journal that does not answer for so long is not well."""


class Clock:
    """Time as a shard needs it (see `metaservice.clock.ShardClock`), handed in by main."""

    def __init__(
        self,
        start: Callable[[int], None],
        now_ms: Callable[[], int],
        now_s: Callable[[], float],
    ) -> None:
        self.start = start
        self.now_ms = now_ms
        self.now_s = now_s


class Hooks:
    """What a shard asks of its replica, and tells it."""

    def leader(self, shard: int) -> tuple[str, str]:
        """(replica, URL) of the leader as far as known; ("", "") when it is not."""
        return LEADERLESS

    def applied(self, shard: int, events: Sequence[Event], seq: int) -> None:
        """These events are durable and applied, up to this seq."""

    def restarted(self, shard: int) -> None:
        """The state was built anew: what was told before may not be continuous with what comes."""

    def fallen(self, shard: int) -> None:
        """It stopped leading by itself: its state could not be trusted any more."""

    def leading(self, shard: int, epoch: int, until_s: float) -> None:
        """It leads in this epoch, and nobody else can before `until_s` of the clock of leases; 0.0: it does
        not lead any more. Also at each renewal."""

    async def before_write(self, shard: int, command: cmd.StartWrite) -> None:
        """A write may need more room than this shard's slice of a limit gives."""


class ShardLife:
    """Follows the journal; leads it while told to."""

    def __init__(
        self,
        number: int,
        journal: Journal,
        limits: Limits,
        clock: Clock,
        observer: Observer,
        new_cluster: Callable[[], str],
        *,
        shards: int = 1,
        hooks: Hooks | None = None,
        poll_ms: int = 100,
        call_timeout_ms: int = 5_000,
        announces: bool = False,
    ) -> None:
        """`new_cluster` gives the name for a journal that has none, "" while it is not known. `announces`:
        whether it decides what routers are told while it leads."""
        self.number = number
        self.limits = limits
        self.role = Role.FOLLOWER
        self.reason = "not started yet"
        self.opened: OpenReport | None = None
        self._lease_until_s = 0.0
        self._last_word_good = False
        self._asking_s: list[float] = []
        """When the calls of the journal began that have not ended."""
        self.fault: Exception | None = None
        """What the last attempt to take over failed with."""
        self._said = ""
        self.rebuilds = 0
        self._journal = journal
        self._clock = clock
        self._observer = observer
        self._new_cluster = new_cluster
        self._shards = shards
        self._hooks = hooks or Hooks()
        self._poll_s = poll_ms / 1000
        self._call_timeout_s = call_timeout_ms / 1000
        self._announces = announces
        self._thread = JournalThread(f"journal-{number}")
        self._tail: Tail | None = None
        self._sequencer: Sequencer | None = None
        self._running: asyncio.Task[None] | None = None
        self._diverged = False
        self._turning = asyncio.Lock()
        self._hint = asyncio.Event()
        self._stopping = False
        self._closed = False
        self._opened = False
        self._fresh_s: float | None = None
        self._epoch_seen = 0
        self._pause_ms = REBUILD_PAUSE_MS
        self._retry_at_s = 0.0

    # ------------------------------------------------------------ the state

    @property
    def warm(self) -> bool:
        """Whether there is a state that stood at the journal's head not long ago."""
        return self._tail is not None and self._fresh_s is not None

    @property
    def has_state(self) -> bool:
        """Whether there is any state to answer from."""
        return self._tail is not None

    @property
    def status(self) -> str:
        """starting | following | promoting | leading | demoting | rebuilding | stopping | stopped."""
        if self._closed:
            return "stopped"
        if self._stopping:
            return "stopping"
        if self.role is Role.FOLLOWER:
            if self._tail is not None:
                return "following"
            return "rebuilding" if self.rebuilds else "starting"
        return "leading" if self.role is Role.LEADER else str(self.role)

    async def load(self) -> None:
        """Open the journal and build the state, as a follower. Raises JournalError."""
        async with self._turning:
            if self._tail is None and not self._stopping:
                await self._load()

    async def _load(self) -> None:
        if not self._opened:
            self.opened = await self._call(self._journal.open)
            self._opened = True
            self._tell_opened(self.opened)
        gc.unfreeze()  # of a state that was thrown away before
        read_s = self._clock.now_s()
        machine: Machine = await self._call(replay, self._journal, self.number, self.limits, self._shards)
        self._forget()
        self._tail = Tail(machine)
        self._epoch_seen = max(self._epoch_seen, machine.state.epoch)
        self._fresh_s = read_s
        self._hooks.restarted(self.number)
        # The block table is large and lives long: keep the collector from walking it again and again.
        gc.collect()
        gc.freeze()

    @staticmethod
    def _tell_opened(opened: OpenReport) -> None:
        if opened.last_cut is not None:
            cut = opened.last_cut
            log.error(
                "the journal's tail was damaged and cut: %d batches from seq %d (%s)",
                cut.batches_cut, cut.first_seq_cut, cut.reason,
            )  # fmt: skip
        for fault in opened.snapshot_faults:
            log.error("snapshot %s was passed over: %s", fault.location, fault.reason)

    def _forget(self) -> None:
        """Let go of whatever was derived from the state."""

    def _discard(self, reason: str) -> None:
        """Throw the state away; the next turn of `live` builds it anew."""
        self._forget()
        self._tail = None
        self._fresh_s = None
        self._sequencer = None
        self.rebuilds += 1
        self.reason = reason
        self._observer.rebuilt(reason)
        self._retry_at_s = self._clock.now_s() + self._pause_ms / 1000
        self._pause_ms = min(2 * self._pause_ms, REBUILD_PAUSE_MS_MAX)
        log.error("shard %d: state thrown away, rebuilding from the journal: %s", self.number, reason)

    async def _call(self, what: Callable[..., Any], *args: Any) -> Any:
        """A call of the journal, and what it says about the journal's health."""
        began_s = self._clock.now_s()
        self._asking_s.append(began_s)
        try:
            result = await self._thread.call(what, *args)
        except JournalUnavailable:
            self._last_word_good = False
            raise
        finally:
            self._asking_s.remove(began_s)
        self._last_word_good = True
        return result

    @property
    def journal_ok(self) -> bool:
        """Whether the last word with the journal was a good one, and it does not leave us waiting for the
        next: what hangs must be known to hang long before its deadline, or leaders would hand over to those
        who have not noticed yet."""
        if not self._last_word_good:
            return False
        sequencer = self._sequencer
        waiting_s = max(
            self._clock.now_s() - min(self._asking_s) if self._asking_s else 0.0,
            0.0 if sequencer is None else sequencer.stalled_s,
        )
        return waiting_s < SILENT_S

    # ------------------------------------------------------------ following

    async def live(self) -> None:
        """Follow the journal whenever this shard does not lead, and rebuild what was thrown away. For
        ever."""
        while not self._stopping:
            self._hint.clear()  # before reading: what a hint tells of meanwhile may not be in what is read
            try:
                if self.role is Role.FOLLOWER:
                    wait_s = self._retry_at_s - self._clock.now_s()
                    if self._tail is None and wait_s > 0:
                        await asyncio.sleep(min(wait_s, 0.1))
                        continue
                    await self.catch_up()
            except JournalUnavailable as error:
                self.reason = str(error)
                self._retry_at_s = self._clock.now_s() + self._pause_ms / 1000
            except Exception as error:
                log.exception("shard %d: following the journal failed", self.number)
                self.reason = f"rebuilding failed: {error}"
                self._observer.rebuilt(self.reason)
                self._retry_at_s = self._clock.now_s() + self._pause_ms / 1000
                self._pause_ms = min(2 * self._pause_ms, REBUILD_PAUSE_MS_MAX)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._hint.wait()

    def hint(self) -> None:
        """There may be something new in the journal."""
        self._hint.set()

    async def catch_up(self) -> bool:
        """As a follower: apply all that the journal has. Returns whether there was anything. Nothing happens
        on a leader. Raises JournalUnavailable; other faults end the state."""
        async with self._turning:
            if self.role is not Role.FOLLOWER or self._stopping:
                return False
            if self._tail is None:
                await self._load()
                return True
            return await self._follow()

    async def _follow(self) -> bool:
        """Up to the head. Holds the lock."""
        tail = self._tail
        assert tail is not None
        moved = False
        try:
            while True:
                read_s = self._clock.now_s()
                batches, at_head = await self._call(_read_some, self._journal, tail.applied_seq)
                for batch in batches:
                    await self._apply(tail, batch)
                    moved = True
                if at_head:
                    self._fresh_s = read_s
                    return moved
        except JournalUnavailable:
            raise
        except JournalRegressed as error:
            self._discard(f"the journal went backwards, acknowledged writes may be lost: {error}")
        except Exception as error:
            # trimmed below us, a batch that does not follow, a state that contradicts the events
            if not isinstance(error, JournalError):
                log.exception("shard %d: a batch could not be applied", self.number)
            self._discard(f"the journal cannot be followed from here: {error}")
        return True

    async def _apply(self, tail: Tail, batch: Batch) -> None:
        applied: list[Event] = []
        slice_s = self._clock.now_s()
        for event in tail.steps(batch):
            applied.append(event)
            if (self._clock.now_s() - slice_s) * 1000 > SLICE_MS:
                await asyncio.sleep(0)
                slice_s = self._clock.now_s()
        self._epoch_seen = max(self._epoch_seen, batch.epoch)
        self._hooks.applied(self.number, applied, tail.applied_seq)

    # ------------------------------------------------------------ leading

    async def promote(self) -> bool:
        """Take over: a new epoch, the rest of the journal, the take-over itself durable. The lease is ours
        already. False: it did not work out (see `reason`), and the lease should be given back."""
        self.role = turned(self.role, Turn.ACQUIRED)
        self.reason = "taking over"
        self.fault = None
        async with self._turning:
            try:
                if self._tail is None:
                    await self._load()
                await self._take_over()
            except Exception as error:
                if not isinstance(error, JournalError | ShardUnavailable | Diverged):
                    log.exception("shard %d: taking over failed", self.number)
                self.fault = error
                self.reason = f"taking over failed: {error}"
                if self.reason != self._said:  # it is tried again and again
                    self._said = self.reason
                    log.error("shard %d: %s", self.number, self.reason)
            else:
                if self._clock.now_s() < self.lease_until_s and not self._stopping:
                    self.role = turned(self.role, Turn.TOOK_OVER)
                    self.reason = "answering everybody"
                    return True
                self.reason = "the lease was over before the take-over was done"
            self.role = turned(self.role, Turn.LET_GO)
            self._tell_lease()
            await self._let_go(1.0)
            self.role = turned(self.role, Turn.RELEASED)
            return False

    async def _take_over(self) -> None:
        epoch = await self._call(self._journal.claim)
        while epoch <= self._epoch_seen:
            # a journal that lost its newest history may give a number that was used before
            epoch = await self._call(self._journal.claim)
        # From here on nobody else can append: what is read now is all there is.
        moved = await self._follow()
        tail = self._tail
        if tail is None:
            raise Diverged(self.reason)
        log.info("shard %d: epoch %d from seq %d%s", self.number, epoch, tail.applied_seq, " (tail)" * moved)
        machine = tail.machine
        cluster = machine.state.cluster or self._new_cluster()
        if not cluster:
            raise ShardUnavailable("not_ready", "the catalogue has not named the cluster yet")
        self._clock.start(machine.state.now_ms)
        sequencer = self._sequencer = Sequencer(
            machine, self._journal, epoch, self._clock.now_ms, self._clock.now_s, self._thread,
            self._observer, cluster=cluster,
            on_durable=self._durable, announces=self._announces,
        )  # fmt: skip
        self._epoch_seen = epoch
        self._diverged = False
        running = self._running = asyncio.create_task(self._run(sequencer), name=f"shard-{self.number}")
        while not sequencer.led:
            if running.done() or self._clock.now_s() >= self.lease_until_s:
                raise Diverged(self.reason if running.done() else "the take-over was not durable in time")
            await asyncio.sleep(0.002)
        if running.done():
            raise Diverged(self.reason)

    def _durable(self, events: Sequence[Event], seq: int) -> None:
        self._last_word_good = True
        self._tell_lease()
        if self._sequencer is not None and self._sequencer.progressed:
            self._pause_ms = REBUILD_PAUSE_MS  # rebuilding had helped
        self._hooks.applied(self.number, events, seq)

    async def _run(self, sequencer: Sequencer) -> None:
        try:
            await sequencer.run()
        except Diverged as error:
            self.reason = str(error)
            self._diverged = True
            if self.role is Role.LEADER:
                self.role = turned(self.role, Turn.LET_GO)
                self._tell_lease()
                self._discard(str(error))
                self.role = turned(self.role, Turn.RELEASED)
                self._hooks.fallen(self.number)

    async def demote(self, drain_s: float = 0.0) -> None:
        """Stop leading. With time to drain, what is queued is made durable first. A state that says exactly
        what the journal says goes on as a follower's; any other is thrown away."""
        if self.role not in (Role.LEADER, Role.PROMOTING):
            return
        if self.role is Role.PROMOTING:
            async with self._turning:
                pass  # it finds out by itself that its lease is over
            if not self.led_here:
                return
        self.role = turned(self.role, Turn.LET_GO)
        self._tell_lease()
        async with self._turning:
            await self._let_go(drain_s)
            self.role = turned(self.role, Turn.RELEASED)

    async def _let_go(self, drain_s: float) -> None:
        sequencer, running = self._sequencer, self._running
        self._sequencer = self._running = None
        if sequencer is None or running is None:
            return
        sequencer.stop()
        await asyncio.wait([running], timeout=max(drain_s, 0.05))
        running.cancel()
        await asyncio.wait([running])
        self._fresh_s = None
        if self._stopping:
            return
        if self._tail is None:
            return
        reason = "it holds what may not be in the journal"
        if sequencer.led and sequencer.pipeline.clean and not self._diverged:
            try:
                sequencer.machine.stand_down()
            except Exception as error:
                log.exception("shard %d: its state cannot go on as a follower's", self.number)
                reason = f"standing down failed: {error}"
            else:
                self._tail = Tail(sequencer.machine)
                self._hooks.restarted(self.number)
                return
        self._discard(reason)

    async def close(self) -> None:
        """Let go of everything. May be called in any state, and twice."""
        self._stopping = True
        self.hint()
        if self.role in (Role.LEADER, Role.PROMOTING):
            await self.demote(self._call_timeout_s)
        async with self._turning:
            if self._running is not None:  # what was cancelled on its way to leading
                await self._let_go(0.0)
            if not self._closed:
                self._closed = True
                await self._thread.call(self._journal.close)
                self._thread.stop()
                self._tail = None

    @property
    def lease_until_s(self) -> float:
        """By our own clock. Set by the replica; before it is over we lead, if we do."""
        return self._lease_until_s

    @lease_until_s.setter
    def lease_until_s(self, until_s: float) -> None:
        self._lease_until_s = until_s
        self._tell_lease()

    def _tell_lease(self) -> None:
        """Whether we lead, from the moment on at which the take-over is durable."""
        sequencer = self._sequencer
        leads = sequencer is not None and sequencer.led and self.role in (Role.PROMOTING, Role.LEADER)
        self._hooks.leading(self.number, self._epoch_seen, self._lease_until_s if leads else 0.0)

    @property
    def led_here(self) -> bool:
        """Whether this replica is the leader, whatever its lease says."""
        return self.role is Role.LEADER

    @property
    def durable_seq(self) -> int:
        """Up to where its answers know the journal."""
        if self._sequencer is not None:
            return self._sequencer.durable_seq
        return 0 if self._tail is None else self._tail.applied_seq


def _read_some(journal: Journal, after_seq: int) -> tuple[list[Batch], bool]:
    """Some batches after a seq, and whether these were all."""
    batches: list[Batch] = []
    size = 0
    for batch in journal.read(after_seq):
        batches.append(batch)
        size += len(batch.payload)
        if len(batches) >= BATCHES_PER_READ_MAX or size >= BYTES_PER_READ_MAX:
            return batches, False
    return batches, True
