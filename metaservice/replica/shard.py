"""One shard as the API asks it. The leader answers from memory what it may, and decides the rest through the
journal; a replica that does not lead answers views and lookups without a lease, with their age.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from metaservice.core import commands as cmd
from metaservice.core.events import Event, InstanceGone, InstancePut, InstanceRetired, SwitchSet
from metaservice.core.index import Table
from metaservice.core.machine import Machine
from metaservice.core.model import Fingerprint, SwitchMode
from metaservice.core.rejections import Rejection
from metaservice.core.replies import BlockDetail, Errands, Switched, Tasks

from .bell import Bell
from .errors import NotLeader, ShardUnavailable
from .life import LEADERLESS, Clock, Hooks, ShardLife
from .role import Role
from .sequencer import TICK_MS, Sequencer
from .snapshot import SnapshotKeeper

__all__ = ["LEADERLESS", "Clock", "Hooks", "InstanceInfo", "Shard", "StorageInfo"]

T = TypeVar("T")
UNKNOWN_MS = 1 << 53
"""A staleness that no bound allows."""
_SWITCHING = {SwitchSet, InstancePut, InstanceRetired, InstanceGone}
"""Events after which another switch may hold on an instance."""


class InstanceInfo(Struct, frozen=True):
    """What a request about an instance needs before it is a command. `groups`: attention group -> its key
    table."""

    fingerprint: Fingerprint
    key_length: int
    groups: dict[str, Table]


class StorageInfo(Struct, frozen=True):
    """A storage, as replies name it; `options` of a volatile one with its pool."""

    name: str
    kind: str
    options: dict[str, str]


class Shard(ShardLife):
    """What may be asked, by role."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._infos: dict[str, InstanceInfo] = {}
        self._switching = Bell()

    def _forget(self) -> None:
        self._infos.clear()  # they hold tables of the state that goes
        self._switching.ring()

    def _durable(self, events: Sequence[Event], seq: int) -> None:
        super()._durable(events, seq)
        if not _SWITCHING.isdisjoint(map(type, events)):
            self._switching.ring()

    async def _let_go(self, drain_s: float) -> None:
        self._switching.ring()  # whoever waits is sent to the next leader at once
        await super()._let_go(drain_s)

    # ------------------------------------------------------------ asking the leader

    @property
    def ready(self) -> bool:
        """Whether it leads and may answer for the shard now, by its own clock."""
        return self.role is Role.LEADER and self._clock.now_s() < self.lease_until_s and not self._stopping

    def _leading(self) -> Sequencer:
        sequencer = self._sequencer
        if sequencer is None or self.role is not Role.LEADER or self._stopping:
            raise self._not_leader()
        if self._clock.now_s() >= self.lease_until_s:
            raise NotLeader(self.number, "our lease is over; another may lead already")
        return sequencer

    def _not_leader(self) -> NotLeader:
        leader, url = self._hooks.leader(self.number)
        if url:
            return NotLeader(self.number, f"replica {leader} leads shard {self.number}", leader, url)
        return NotLeader(self.number, f"{self.status}: {self.reason}")

    @property
    def machine(self) -> Machine:
        """The machine of the leader. Raises NotLeader when this is not it."""
        return self._leading().machine

    @property
    def loaded(self) -> Machine | None:
        """The machine in any role; None while there is none."""
        return None if self._tail is None else self._tail.machine

    def beat(self) -> None:
        """As the leader: tell routers something soon, if only that we are there."""
        if self._sequencer is not None and self.ready:
            self._sequencer.beat()

    @property
    def stuck(self) -> str:
        """Why writes are refused now, '' when they are not."""
        sequencer = self._sequencer
        return "" if sequencer is None else sequencer.stuck

    @property
    def stalled_s(self) -> float:
        """For how long our append has not come through."""
        sequencer = self._sequencer
        return 0.0 if sequencer is None else sequencer.stalled_s

    def read(self, command: cmd.Command) -> Any:
        """Answer at once from durable state (and leader memory). Leader only: the lease is looked at before
        and after, so that a process that stood still meanwhile answers nothing."""
        sequencer, clock = self._sequencer, self._clock
        if sequencer is None or self.role is not Role.LEADER or clock.now_s() >= self.lease_until_s:
            self._leading()  # says why not
            raise self._not_leader()
        reply = sequencer.pipeline.machine.read(command, clock.now_ms())
        if clock.now_s() >= self.lease_until_s:
            raise NotLeader(self.number, "our lease ended while the answer was made")
        return reply

    async def submit(self, command: cmd.Command) -> Any:
        """Decide through the journal; what is returned is durable. Leader only."""
        if (
            self._shards > 1
            and isinstance(command, cmd.StartWrite)
            and self._leading().machine.short(command)
        ):
            await self._hooks.before_write(self.number, command)
        return await self._leading().submit(command)

    async def take_tasks(self, command: cmd.TakeTasks, wait_ms: int) -> Tasks | Rejection:
        """Long poll: at once when there is work (or a refusal), else when there is some, or empty after
        `wait_ms`."""
        deadline_s = self._clock.now_s() + wait_ms / 1000
        while True:
            reply: Tasks | Rejection = self.read(command)
            left_s = deadline_s - self._clock.now_s()
            if isinstance(reply, Rejection) or reply.tasks or left_s <= 0 or self._stopping:
                return reply
            await asyncio.sleep(min(TICK_MS / 1000, left_s))

    async def watch_switch(
        self, instance: str, known: SwitchMode | None, wait_ms: int
    ) -> Switched | Rejection | None:
        """Long poll: the strictest switch on the instance (None: normal), at once when its mode is not
        `known`, else when it changes, or after `wait_ms`. Leader only, all the while."""
        until_s = self._clock.now_s() + wait_ms / 1000
        while True:
            found = self._leading().machine.state.instances.get(instance)
            if found is None:
                return Rejection("instance_unknown", "no instance of this name is registered", "instance")
            held = found.effective
            mode = SwitchMode.normal if held is None else held.mode
            now_s = self._clock.now_s()
            if mode is not known or now_s >= until_s:
                return held
            await self._switching.wait(min(until_s, self.lease_until_s) - now_s)

    def errands(self) -> Errands | None:
        """What the catalogue has to be told now. Leader only."""
        return self._leading().machine.errands(self._clock.now_ms())

    async def at_rest(self, look: Callable[[Machine], T]) -> T:
        """What `look` sees of the machine at a moment when it says exactly what the journal says. Leader or
        follower."""
        sequencer = self._sequencer
        if sequencer is None or sequencer.pipeline.clean:
            return look(self.state)
        seen: T = await sequencer.at_rest(look)
        return seen

    # ------------------------------------------------------------ views, in every role

    @property
    def state(self) -> Machine:
        """The machine, whatever the role. Raises ShardUnavailable when there is none now."""
        if self._tail is None or self._closed:
            raise ShardUnavailable("not_ready", f"{self.status}: {self.reason}")
        return self._tail.machine

    @property
    def staleness_ms(self) -> int:
        """How old at most what is told here is; 0 for the leader, UNKNOWN_MS when nobody can say."""
        if self.ready:
            return 0
        if self._fresh_s is None:
            return UNKNOWN_MS
        return int((self._clock.now_s() - self._fresh_s) * 1000)

    @property
    def cluster(self) -> str:
        """The cluster's id, "" while it is not known."""
        return "" if self._tail is None else self._tail.machine.state.cluster

    @property
    def epoch(self) -> int:
        """Of the state that it has now, 0 without one."""
        return 0 if self._tail is None else self._tail.machine.state.epoch

    def look(self, command: cmd.Lookup) -> Any:
        """A lookup without a lease, from durable state, in any role. Raises ShardUnavailable when there is no
        state."""
        assert not command.lease_ms and not command.engine, "only the leader gives leases"
        return self.state.read(command, self._view_ms())

    def home(self, instance: str) -> int | None:
        """The shard where an instance lives, by this state; None: it knows no such instance."""
        known = None if self._tail is None else self._tail.machine.state.instances.get(instance)
        return None if known is None else known.shard

    def instance(self, name: str) -> InstanceInfo | None:
        """What a request about the instance needs, None when there is none."""
        instance = self.state.state.instances.get(name)
        if instance is None:
            return None
        info = self._infos.get(name)
        if info is None or info.fingerprint is not instance.fingerprint:
            fingerprint = instance.fingerprint
            info = self._infos[name] = InstanceInfo(fingerprint, fingerprint.key_length, instance.tables)
        return info

    def storage(self, number: int) -> StorageInfo:
        """The storage of that number."""
        storage = self.state.state.storage_of[number]
        return StorageInfo(storage.id, storage.kind, storage.told())

    def describe(self, kind: str, after: str = "", limit: int | None = None) -> list[Struct]:
        """Views of the registered things of a kind by id: at most `limit` behind `after`."""
        return self.state.describe(kind, self._view_ms(), after, limit)

    def describe_one(self, kind: str, id: str) -> Struct | None:
        """View of one registered thing."""
        return self.state.describe_one(kind, id, self._view_ms())

    def _view_ms(self) -> int:
        # a follower has no clock of its own: it tells how things stood at the last event
        return self._clock.now_ms() if self._sequencer is not None else self.state.state.now_ms

    def usages(self, kind: str) -> list[tuple[str, tuple[int, int, int, int]]]:
        """(id, (bytes, blocks, deleting bytes, deleting blocks)) of all tenants, groups, instances or
        storages."""
        return self.state.usages(kind)

    def block(self, instance: str, group: str | None, key: bytes) -> BlockDetail | Rejection:
        """Everything known of one block."""
        return self.state.block(instance, group, key)

    def gauges(self) -> dict[str, float]:
        """Numbers of now, for a scrape; also while it may not serve."""
        ready = self.ready
        tail = self._tail
        told = {
            "leads": float(ready),
            "epoch": float(self.epoch),
            "durable_seq": float(self.durable_seq),
            "writes_refused": float(bool(self.stuck)),
            "staleness_ms": float(self.staleness_ms),
            "append_stalled_ms": self.stalled_s * 1000,
            "rebuilds": float(self.rebuilds),
        }
        if ready and tail is not None:
            told.update(tail.machine.gauges())
        return told

    # ------------------------------------------------------------ snapshots

    async def report(self, replica: str) -> None:
        """Tell the journal how far this replica is."""
        if self._tail is not None and not self._closed:
            await self._call(self._journal.report_follower, replica, self.durable_seq)

    async def keep_snapshots(self, keeper: SnapshotKeeper) -> None:
        """Cut a snapshot when it is time, and trim the journal behind the ones before. Raises what goes
        wrong; the journal then grows until the next attempt."""
        size = await self._call(self._journal.size)
        if not keeper.due(size):
            return
        upto_seq = await keeper.cut(self._journal.snapshots)
        if upto_seq:
            await self._call(self._journal.trim, upto_seq)
        keeper.trimmed(await self._call(self._journal.size))
