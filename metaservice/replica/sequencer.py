"""The only caller of the core: a bounded queue, natural batching, one append in flight, replies once they are
durable.

While one batch is being made durable the next one gathers. The journal's blocking calls run in one thread of
their own; the machine is touched by the event loop only. What cannot be appended is never undone: either the
same bytes get in later, or the state is thrown away and built anew from the journal.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from metaservice.core import commands as cmd
from metaservice.core.events import BlocksRemoved, Event, MemberExpired, SessionEnded
from metaservice.core.machine import Machine
from metaservice.journal.errors import (
    FateUnknown,
    JournalBusy,
    JournalError,
    JournalFull,
    JournalUnavailable,
)
from metaservice.journal.port import Journal

from .errors import NotLeader, ShardUnavailable
from .observer import Observer
from .pipeline import Pipeline, Sealed
from .thread import JournalThread

log = logging.getLogger(__name__)

COMMANDS_PER_BATCH_MAX = 1_024
KEYS_PER_BATCH_MAX = 65_536
TOKEN_BYTES_PER_BATCH_MAX = 16 * 1024 * 1024
"""Of what routers are to know blocks by: a few hundred keys of large blocks are megabytes."""
QUEUE_MAX = 8_192
TICK_MS = 100
TICK_LATE_MS_MAX = 1_000
ANNOUNCE_MS = 5
"""Between two steps of what routers are told: each is a part of a batch."""
RETRY_MS = 500
FOR_EVER_S = float("inf")
SLICE_MS = 5.0
"""Deciding longer than this at a stretch would hold up lookups and the renewal of the lease: others run in
between."""

_TOLD = {SessionEnded, MemberExpired, BlocksRemoved}
"""Events that observers hear of; most batches have none."""

Waiting = tuple[cmd.Command, "asyncio.Future[Any]"]


class Diverged(Exception):
    """The machine in memory is not what the journal says, or cannot be told to be: throw it away and
    rebuild."""


class Sequencer:
    """Runs one shard's machine over one journal, in one epoch, until stopped or diverged."""

    def __init__(
        self,
        machine: Machine,
        journal: Journal,
        epoch: int,
        now_ms: Callable[[], int],
        now_s: Callable[[], float],
        thread: JournalThread,
        observer: Observer,
        *,
        cluster: str = "",
        on_durable: Callable[[Sequence[Event], int], None] | None = None,
        announces: bool = False,
    ) -> None:
        """`cluster` names a journal without a name. `on_durable(events, seq)` hears of every batch, at a
        moment when the machine says exactly what the journal says. `announces`: what routers are told is
        decided here."""
        self.pipeline = Pipeline(machine, epoch)
        self.progressed = False
        """Whether anything became durable after the take-over."""
        self.stuck = ""
        """Why writes are refused now ('' when they are not)."""
        self._journal = journal
        self._now_ms = now_ms
        self._now_s = now_s
        self._thread = thread
        self._observer = observer
        self._cluster = cluster
        self._on_durable = on_durable
        self._announces = announces
        self._announced_s = 0.0
        self._queue: deque[Waiting] = deque()
        self._looks: list[tuple[Callable[[Machine], Any], asyncio.Future[Any]]] = []
        self._in_flight: Sequence[Waiting] = ()
        self._wake = asyncio.Event()
        self._stopping = False
        self._appending_s: float | None = None
        self._full = False
        self._leases_expired = 0
        self._tasks_expired = 0

    @property
    def machine(self) -> Machine:
        """The machine that this epoch decides with."""
        return self.pipeline.machine

    @property
    def durable_seq(self) -> int:
        """Up to where the journal has it."""
        return self.pipeline.durable_seq

    @property
    def led(self) -> bool:
        """Whether the take-over is durable: before that nobody is answered."""
        return self.pipeline.led

    @property
    def stalled_s(self) -> float:
        """For how long the append in flight has not come through; 0 when there is none, and when the journal
        answers that it is full: it would be as full for any other replica."""
        if self._appending_s is None or self._full:
            return 0.0
        return self._now_s() - self._appending_s

    # ------------------------------------------------------------ callers

    def submit(self, command: cmd.Command) -> "asyncio.Future[Any]":
        """Queue a command; the future resolves with its reply once its events are durable."""
        if self._stopping:
            raise NotLeader(self.machine.state.shard, "this replica is letting go of the shard")
        if self.stuck:
            raise ShardUnavailable("journal_unavailable", self.stuck, 2 * RETRY_MS)
        if len(self._queue) >= QUEUE_MAX:
            raise ShardUnavailable("overloaded", f"{QUEUE_MAX} commands wait already")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append((command, future))
        self._wake.set()
        return future

    def at_rest(self, look: Callable[[Machine], Any]) -> "asyncio.Future[Any]":
        """What `look` sees once the batch in flight is durable, before another command is decided: under load
        there is no other moment at which nothing is in flight."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._looks.append((look, future))
        self._wake.set()
        return future

    def _look(self) -> None:
        looks, self._looks = self._looks, []
        for look, future in looks:
            if future.done():
                continue
            try:
                future.set_result(look(self.machine))
            except Exception as error:  # a fault of who looks: nothing was changed
                future.set_exception(error)

    def stop(self) -> None:
        """Take no more commands; `run` returns once what is queued is durable."""
        self._stopping = True
        self._wake.set()

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Until `stop`. Raises Diverged when the machine has to be thrown away; every waiting caller is then
        told."""
        batch: list[Waiting] = []
        try:
            self.pipeline.take_over(self._cluster, self._now_ms())
            await self._commit()
            tick_s = self._now_s()
            while True:
                wait_s = min(tick_s + TICK_MS / 1000, self._announce_s()) - self._now_s()
                if not self._queue and not self._stopping and wait_s > 0:
                    await self._sleep(wait_s)
                batch = self._gather()
                late_ms = (self._now_s() - tick_s) * 1000 - TICK_MS
                # renewals that wait behind a slow append come before the tick that would expire sessions
                ticking = late_ms >= 0 and (not self._queue or late_ms > TICK_LATE_MS_MAX)
                if ticking:
                    tick_s = self._now_s()
                if batch or ticking or self._now_s() >= self._announce_s():
                    await self._run_batch(batch, ticking)
                elif self._stopping:
                    return
        except Diverged:
            self._fail(batch)
            raise
        except asyncio.CancelledError:
            self._fail(batch)
            raise
        except Exception as error:
            log.exception("the core failed; its state is thrown away")
            self._fail(batch)
            raise Diverged(f"the core failed: {error!r}") from error

    def _announce_s(self) -> float:
        """When there is a next step of what routers are told, if there is anything to say."""
        if not self._announces or not self.machine.announces(self._now_ms()):
            return FOR_EVER_S
        return self._announced_s + ANNOUNCE_MS / 1000

    def beat(self) -> None:
        """Somebody joined: have the next step soon, if an empty one."""
        self.machine.beat()
        self._wake.set()

    async def _sleep(self, seconds: float) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _gather(self) -> list[Waiting]:
        batch: list[Waiting] = []
        keys = token_bytes = 0
        queue = self._queue
        while (
            queue
            and len(batch) < COMMANDS_PER_BATCH_MAX
            and keys < KEYS_PER_BATCH_MAX
            and token_bytes < TOKEN_BYTES_PER_BATCH_MAX
        ):
            command, future = queue.popleft()
            if future.cancelled():
                continue  # its caller is gone before anything was decided
            batch.append((command, future))
            keys += len(getattr(command, "keys", ())) + len(getattr(command, "locations", None) or ())
            if type(command) is cmd.StartWrite and command.tokens:
                token_bytes += sum(map(len, command.tokens))
        return batch

    async def _run_batch(self, batch: list[Waiting], ticking: bool) -> None:
        now_ms = self._now_ms()
        decide = self.pipeline.decide
        replies: list[Any] = []
        slice_s = self._now_s()
        for command, _ in batch:
            replies.append(decide(command, now_ms))
            if (self._now_s() - slice_s) * 1000 > SLICE_MS:
                await asyncio.sleep(0)
                slice_s = self._now_s()
        if ticking:
            decide(cmd.Tick(), now_ms)
            self._count_expired()
        if self._now_s() >= self._announce_s():
            self._announced_s = self._now_s()
            decide(cmd.Announce(), now_ms)
        self._in_flight = batch
        await self._commit(len(batch))
        for (_, future), reply in zip(batch, replies, strict=True):
            if not future.done():
                future.set_result(reply)

    # ------------------------------------------------------------ durability

    async def _commit(self, commands: int = 0) -> None:
        """Make durable what was decided."""
        sealed = self.pipeline.seal()
        if sealed is None:
            return
        self._count(sealed.events)
        started_s = self._appending_s = self._now_s()
        await self._append(sealed)
        self._appending_s, self._full = None, False
        self.progressed = self.led
        self.pipeline.committed(self._now_ms())
        if self._on_durable is not None:
            self._on_durable(sealed.events, sealed.last_seq)
        self._look()
        append_ms = (self._now_s() - started_s) * 1000
        self._observer.batch(
            commands=commands,
            events=len(sealed.events),
            payload_bytes=len(sealed.payload),
            append_ms=append_ms,
            queued=len(self._queue),
        )

    async def _append(self, sealed: Sealed) -> None:
        """Get exactly these bytes in. A journal that cannot take them now (full, busy, out of reach) is tried
        until it can; meanwhile lookups go on and writes are refused with the reason."""
        journal = self._journal
        while True:
            try:
                await self._thread.call(
                    journal.append, sealed.first_seq, sealed.last_seq, sealed.epoch, sealed.payload
                )
            except (JournalFull, JournalBusy) as error:
                self._full = isinstance(error, JournalFull)
                self._refuse_waiting(str(error))
            except JournalUnavailable as error:
                self._full = False
                # it may be gone for hours: whoever is in the batch asks again, and finds the first answer
                self._refuse_waiting(str(error), self._in_flight)
            except FateUnknown as error:
                if await self._resolve(sealed.first_seq, sealed.payload, error):
                    break
            except JournalError as error:
                raise Diverged(str(error)) from error
            else:
                break
            if self._stopping:
                raise Diverged("stopped while the journal could not be written")
            await asyncio.sleep(RETRY_MS / 1000)
        if self.stuck:
            log.warning("the journal takes writes again")
            self.stuck = ""

    async def _resolve(self, first_seq: int, payload: bytes, error: FateUnknown) -> bool:
        """Whether the batch is in: read back, never guessed."""
        log.warning("%s", error)
        try:
            written: bool = await self._thread.call(self._journal.resolve, first_seq, payload)
            return written
        except (FateUnknown, JournalUnavailable) as still:
            self._refuse_waiting(str(still), self._in_flight)
            return False

    def _refuse_waiting(self, reason: str, batch: Sequence[Waiting] = ()) -> None:
        if not self.stuck:
            log.error("writes are refused: %s", reason)
        self.stuck = reason
        self._fail(batch, "journal_unavailable", reason)

    def _fail(
        self,
        batch: Sequence[Waiting],
        code: str = "not_ready",
        message: str = "the state is being rebuilt",
    ) -> None:
        waiting = [*batch, *self._queue]
        waiting += [(cmd.Tick(), future) for _, future in self._looks]
        self._looks.clear()
        self._queue.clear()
        for _, future in waiting:
            if not future.done():
                future.set_exception(ShardUnavailable(code, message))

    # ------------------------------------------------------------ what is told to observers

    def _count(self, events: Sequence[Event]) -> None:
        if _TOLD.isdisjoint(map(type, events)):
            return
        index = self.machine.state.index
        expired: Counter[str] = Counter()
        for event in events:
            if isinstance(event, SessionEnded):
                expired["session"] += event.expired
            elif isinstance(event, MemberExpired):
                expired[event.kind] += 1
            elif isinstance(event, BlocksRemoved) and event.why != "removed":
                slots = memoryview(event.slots).cast("I")
                size = sum(index.tables[index.table[slot]].size_bytes for slot in slots)
                self._observer.evicted(event.why, len(slots), size)
        for kind, count in expired.items():
            if count:
                self._observer.expired(kind, count)

    def _count_expired(self) -> None:
        memory = self.machine.memory
        leases, tasks = memory.leases.expired, memory.deletions.timeouts
        if leases != self._leases_expired:
            self._observer.expired("lease", leases - self._leases_expired)
        if tasks != self._tasks_expired:
            self._observer.expired("task", tasks - self._tasks_expired)
        self._leases_expired, self._tasks_expired = leases, tasks
