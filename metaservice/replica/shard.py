"""One shard of the service: its journal, its sequencer and what the API may ask of it."""

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from metaservice.core import commands as cmd
from metaservice.core.index import Table
from metaservice.core.machine import Machine
from metaservice.core.model import Fingerprint, Limits
from metaservice.core.rejections import Rejection
from metaservice.core.replies import BlockDetail, Tasks
from metaservice.journal.port import Journal, OpenReport

from .errors import ShardUnavailable
from .observer import Observer
from .replay import replay
from .sequencer import TICK_MS, Diverged, Sequencer
from .snapshot import SnapshotKeeper
from .thread import JournalThread

log = logging.getLogger(__name__)

REBUILD_PAUSE_MS = 200
REBUILD_PAUSE_MS_MAX = 5_000


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


class InstanceInfo(Struct, frozen=True):
    """What a request about an instance needs before it is a command. `groups`: attention group -> its key
    table."""

    fingerprint: Fingerprint
    key_length: int
    groups: dict[str, Table]


class StorageInfo(Struct, frozen=True):
    """A storage, as replies name it."""

    name: str
    kind: str
    options: dict[str, str]


class Shard:
    """Serves from memory, decides through the sequencer, rebuilds itself from the journal when the two
    disagree."""

    def __init__(
        self,
        number: int,
        journal: Journal,
        limits: Limits,
        clock: Clock,
        observer: Observer,
        new_cluster: Callable[[], str],
        snapshots: SnapshotKeeper | None = None,
    ) -> None:
        self.number = number
        self.limits = limits
        self.status = "starting"
        self.reason = "not started yet"
        self.opened: OpenReport | None = None
        self._journal = journal
        self._clock = clock
        self._observer = observer
        self._new_cluster = new_cluster
        self._snapshots = snapshots
        self._thread = JournalThread(f"journal-{number}")
        self._sequencer: Sequencer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._closed = False
        self._instances: dict[str, InstanceInfo] = {}

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the journal, rebuild the state, take over a new epoch. Raises JournalError when that cannot be
        done."""
        self.opened = await self._in_thread(self._journal.open)
        if self.opened.last_cut is not None:
            cut = self.opened.last_cut
            log.error(
                "the journal's tail was damaged and cut: %d batches from seq %d (%s)",
                cut.batches_cut, cut.first_seq_cut, cut.reason,
            )  # fmt: skip
        for fault in self.opened.snapshot_faults:
            log.error("snapshot %s was passed over: %s", fault.location, fault.reason)
        await self._build()
        self._tasks.append(asyncio.create_task(self._lead(), name=f"shard-{self.number}"))
        self._tasks.append(asyncio.create_task(self._watch_loop()))
        if self._snapshots is not None:
            self._tasks.append(asyncio.create_task(self._keep_snapshots(self._snapshots)))
        while not self.ready:
            if self._tasks[0].done():
                self._tasks[0].result()
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Finish what is queued, then let go of the journal. May be called in any state."""
        self._stopping.set()
        self.status, self.reason = "stopping", "shutting down"
        if self._sequencer is not None:
            self._sequencer.stop()
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._closed:
            self._closed = True
            await self._in_thread(self._journal.close)
            self._thread.stop()
        self.status, self.reason = "stopped", "shut down"

    async def _in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        return await self._thread.call(call, *args)

    async def _build(self) -> None:
        gc.unfreeze()  # of a state that was thrown away before
        machine: Machine = await self._in_thread(replay, self._journal, self.number, self.limits)
        if not machine.state.cluster:
            machine.state.cluster = self._new_cluster()
        epoch = await self._in_thread(self._journal.claim)
        self._clock.start(machine.state.now_ms)
        self._instances.clear()
        self._sequencer = Sequencer(
            machine, self._journal, epoch, self._clock.now_ms, self._clock.now_s, self._thread, self._observer
        )
        # The block table is large and lives long: keep the collector from walking it again and again.
        gc.collect()
        gc.freeze()

    async def _lead(self) -> None:
        pause_ms = REBUILD_PAUSE_MS
        while not self._stopping.is_set():
            sequencer = self._sequencer
            try:
                if sequencer is None:
                    await self._build()
                    continue
                self.status, self.reason = "leading", "answering everybody"
                await sequencer.run()
                return
            except Diverged as error:
                reason = str(error)
            except Exception as error:
                log.exception("rebuilding from the journal failed")
                reason = f"rebuilding failed: {error}"
            self._sequencer = None
            if self._stopping.is_set():
                return
            if sequencer is not None and sequencer.progressed:
                pause_ms = REBUILD_PAUSE_MS  # rebuilding had helped
            self.status, self.reason = "rebuilding", reason
            self._observer.rebuilt(reason)
            log.error("state thrown away, rebuilding from the journal: %s", reason)
            await self._pause(pause_ms)
            pause_ms = min(2 * pause_ms, REBUILD_PAUSE_MS_MAX)

    async def _pause(self, pause_ms: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_ms / 1000):
                await self._stopping.wait()

    async def _watch_loop(self) -> None:
        while True:
            started_s = self._clock.now_s()
            await asyncio.sleep(TICK_MS / 1000)
            self._observer.loop_lag((self._clock.now_s() - started_s) * 1000 - TICK_MS)

    async def _keep_snapshots(self, keeper: SnapshotKeeper) -> None:
        while True:
            await asyncio.sleep(keeper.check_s)
            try:
                size = await self._in_thread(self._journal.size)
                if keeper.due(size):
                    upto_seq = await keeper.cut(self._journal.snapshots)
                    if upto_seq:
                        await self._in_thread(self._journal.trim, upto_seq)
                    keeper.trimmed(await self._in_thread(self._journal.size))
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("no snapshot was cut; the journal grows until the next attempt")

    # ------------------------------------------------------------ asking

    @property
    def ready(self) -> bool:
        """Whether it may serve: leading, with its take-over durable, and not on its way out."""
        sequencer = self._sequencer
        return sequencer is not None and sequencer.led and not self._stopping.is_set()

    @property
    def machine(self) -> Machine:
        """The machine, while it may be asked: never after `stop`, when another process may lead already."""
        sequencer = self._sequencer
        if sequencer is None or not sequencer.led or self._stopping.is_set():
            raise ShardUnavailable("not_ready", f"{self.status}: {self.reason}")
        return sequencer.machine

    @property
    def cluster(self) -> str:
        return self.machine.state.cluster

    @property
    def epoch(self) -> int:
        return self.machine.state.epoch

    @property
    def durable_seq(self) -> int:
        sequencer = self._sequencer
        return 0 if sequencer is None else sequencer.durable_seq

    @property
    def stuck(self) -> str:
        """Why writes are refused now, '' when they are not."""
        sequencer = self._sequencer
        return "" if sequencer is None else sequencer.stuck

    def read(self, command: cmd.Command) -> Any:
        """Answer at once from durable state (and leader memory)."""
        return self.machine.read(command, self._clock.now_ms())

    async def submit(self, command: cmd.Command) -> Any:
        """Decide through the journal; what is returned is durable."""
        sequencer = self._sequencer
        if sequencer is None or not sequencer.led:
            raise ShardUnavailable("not_ready", f"{self.status}: {self.reason}")
        return await sequencer.submit(command)

    async def take_tasks(self, command: cmd.TakeTasks, wait_ms: int) -> Tasks | Rejection:
        """Long poll: at once when there is work (or a refusal), else when there is some, or empty after
        `wait_ms`."""
        deadline_s = self._clock.now_s() + wait_ms / 1000
        while True:
            reply: Tasks | Rejection = self.read(command)
            left_s = deadline_s - self._clock.now_s()
            if isinstance(reply, Rejection) or reply.tasks or left_s <= 0 or self._stopping.is_set():
                return reply
            await asyncio.sleep(min(TICK_MS / 1000, left_s))

    # ------------------------------------------------------------ views

    def instance(self, name: str) -> InstanceInfo | None:
        """What a request about the instance needs, None when there is none."""
        instance = self.machine.state.instances.get(name)
        if instance is None:
            return None
        info = self._instances.get(name)
        if info is None or info.fingerprint is not instance.fingerprint:
            fingerprint = instance.fingerprint
            info = self._instances[name] = InstanceInfo(fingerprint, fingerprint.key_length, instance.tables)
        return info

    def storage(self, number: int) -> StorageInfo:
        """The storage of that number."""
        storage = self.machine.state.storage_of[number]
        return StorageInfo(storage.id, storage.kind, storage.options)

    def describe(self, kind: str, after: str = "", limit: int | None = None) -> list[Struct]:
        """Views of the registered things of a kind by id: at most `limit` behind `after`."""
        return self.machine.describe(kind, self._clock.now_ms(), after, limit)

    def usages(self, kind: str) -> list[tuple[str, tuple[int, int, int, int]]]:
        """(id, (bytes, blocks, deleting bytes, deleting blocks)) of all tenants, groups, instances or
        storages."""
        return self.machine.usages(kind)

    def gauges(self) -> dict[str, float]:
        """Numbers of now, for a scrape; also while it may not serve."""
        sequencer = self._sequencer
        if sequencer is None or not self.ready:
            return {"ready": 0, "epoch": 0, "durable_seq": self.durable_seq, "writes_refused": 1}
        return {
            "ready": 1,
            "epoch": sequencer.machine.state.epoch,
            "durable_seq": sequencer.durable_seq,
            "writes_refused": float(bool(sequencer.stuck)),
            **sequencer.machine.gauges(),
        }

    def describe_one(self, kind: str, id: str) -> Struct | None:
        """View of one registered thing."""
        return self.machine.describe_one(kind, id, self._clock.now_ms())

    def block(self, instance: str, group: str | None, key: bytes) -> BlockDetail | Rejection:
        """Everything known of one block."""
        return self.machine.block(instance, group, key)
