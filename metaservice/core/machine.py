"""The core as one object: commands and time in, reply and events out. Deterministic; knows no clock, no
thread, no disk.

The sequencer is its only caller. `execute` decides and applies; what it published becomes visible when
`mark_durable` says that the journal has it. `read` answers what needs no event. Replay and followers call
`apply` and nothing else.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec import Struct

from . import (
    announcing,
    blocks,
    capture,
    catalogue,
    checks,
    giving,
    membership,
    pools,
    publishing,
    settle,
    shortage,
    spread,
    starts,
    ticks,
    told,
    views,
    writes,
)
from . import commands as cmd
from .apply import apply
from .events import Event, TookOver
from .ids import NONE, SLOT_MASK, shard_of
from .leases import Leases
from .lookup import lookup
from .memory import Memory
from .model import Limits
from .outcomes import LeaseOutcome
from .rejections import Rejection
from .replies import BlockDetail, CatalogueView, Done, Errands, LeasesAnswered
from .state import State
from .windows import Announcement, EngineAt, Gone, Run, Window

Decide = Callable[[State, Memory, Any, int], tuple[object, list[Event]]]

_DECIDE: dict[type, Decide] = {
    cmd.PutTenant: catalogue.put_tenant,
    cmd.DeleteTenant: catalogue.delete_tenant,
    cmd.PutStorage: catalogue.put_storage,
    cmd.DeleteStorage: catalogue.delete_storage,
    cmd.PutGroup: catalogue.put_group,
    cmd.DeleteGroup: catalogue.delete_group,
    cmd.PutInstance: catalogue.put_instance,
    cmd.DeleteInstance: catalogue.delete_instance,
    cmd.SetSwitch: catalogue.set_switch,
    cmd.RegisterEngine: membership.register_engine,
    cmd.RegisterWorker: membership.register_worker,
    cmd.Deregister: membership.deregister,
    cmd.StartWrite: starts.start_write,
    cmd.Finish: writes.finish,
    cmd.RenewWrite: writes.renew_write,
    cmd.Abort: writes.abort,
    cmd.Remove: blocks.remove,
    cmd.ConfirmTask: blocks.confirm_task,
    cmd.Settle: settle.settle,
    cmd.GiveBudget: giving.give_budget,
    cmd.Announce: announcing.announce,
    cmd.Restate: announcing.restate,
}

Steps = Callable[[State, Memory, Any, int], Iterator[list[Event]]]

_STEPS: dict[type, Steps] = {
    cmd.TakeCatalogue: spread.take_catalogue,
    cmd.SyncCatalogue: spread.sync_catalogue,
}
"""Decided step by step: each on the state that the steps before left."""

_OF_THE_CATALOGUE = (
    cmd.PutTenant, cmd.DeleteTenant, cmd.PutStorage, cmd.DeleteStorage, cmd.PutGroup, cmd.DeleteGroup,
    cmd.PutInstance, cmd.DeleteInstance, cmd.SetSwitch, cmd.RegisterEngine, cmd.RegisterWorker,
    cmd.Deregister,
)  # fmt: skip


class Machine:
    """One shard's core: replicated state plus leader memory."""

    def __init__(self, shard: int, limits: Limits, shards: int = 1) -> None:
        """`shards`: how many there are, for good. With one, nothing is spread."""
        self.limits = limits
        self.state = State(shard, shards)
        self.memory = Memory(self.state, limits)

    @classmethod
    def restore(cls, chunks: Iterable[bytes], shard: int, limits: Limits, shards: int = 1) -> "Machine":
        """The machine that `capture` wrote down; everything in it counts as durable."""
        machine = cls(shard, limits, shards)
        machine.state, machine.memory = capture.restore(chunks, limits, shards)
        if machine.state.shard != shard:
            raise ValueError(f"the snapshot is of shard {machine.state.shard}, not {shard}")
        return machine

    @property
    def seq(self) -> int:
        """Events applied so far."""
        return self.state.seq

    # ------------------------------------------------------------ commands

    def execute(self, command: cmd.Command, now_ms: int) -> tuple[Any, list[Event]]:
        """Decide and apply one command. Returns the reply (or a Rejection, with no events) and its events in
        order."""
        self._advance(now_ms)
        if isinstance(command, cmd.Tick):
            return Done(), list(self._run(ticks.tick(self.state, self.memory, now_ms)))
        if isinstance(command, cmd.TakeOver):
            return Done(), self._take_over(command, now_ms)
        steps = _STEPS.get(type(command))
        if steps is not None:
            return Done(), list(self._run(steps(self.state, self.memory, command, now_ms)))
        assert self.state.leads_catalogue or not isinstance(command, _OF_THE_CATALOGUE), (
            f"{type(command).__name__} is for the catalogue"
        )
        reply, events = _DECIDE[type(command)](self.state, self.memory, command, now_ms)
        for event in events:
            apply(self.state, self.memory, event)
        self._collect()
        return reply, events

    def apply(self, event: Event) -> None:
        """Replay one durable event."""
        apply(self.state, self.memory, event)

    def mark_durable(self, seq: int, now_ms: int | None = None) -> None:
        """Everything up to this seq is in the journal: readers may see it. A leader says when that came to
        be (`now_ms`); a replay does not know."""
        self.memory.reveal(seq, now_ms)

    def stand_down(self) -> None:
        """The epoch is over by plan, and the machine says exactly what the journal says: it goes on as a
        follower's. What only a leader knows is forgotten; the next one waits for all that was promised."""
        assert not self.memory.unrevealed and not self.memory.undeleted, "not all of it is durable"
        self.memory.stand_down()

    def _take_over(self, command: cmd.TakeOver, now_ms: int) -> list[Event]:
        cluster = self.state.cluster or command.cluster
        events: list[Event] = [TookOver(now_ms, command.epoch, cluster), *pools.orphans(self.state, now_ms)]
        for event in events:
            apply(self.state, self.memory, event)
        self.memory.telling.rest()  # it begins when somebody asks what to announce
        return events

    def _run(self, steps: Iterator[list[Event]]) -> Iterator[Event]:
        for step in steps:
            for event in step:
                apply(self.state, self.memory, event)
                yield event
        self._collect()

    # ------------------------------------------------------------ reads

    def read(self, command: cmd.Command, now_ms: int) -> Any:
        """Answer what changes leader memory at most. Never makes an event."""
        self._advance(now_ms)
        if isinstance(command, cmd.Lookup):
            return lookup(self.state, self.memory, command, now_ms)
        if isinstance(command, cmd.RenewLeases):
            return self._renew_leases(command, now_ms)
        if isinstance(command, cmd.ReleaseLeases):
            answers = [self.memory.leases.release(name) for name in command.leases]
            self._collect()
            return _leases_reply(command.leases, answers, 0)
        if isinstance(command, cmd.Heartbeat):
            assert self.state.leads_catalogue, "heartbeats are for the catalogue"
            return membership.heartbeat(self.state, self.memory, command, now_ms)
        if isinstance(command, cmd.TakeTasks):
            return blocks.take_tasks(self.state, self.memory, command, now_ms)
        assert isinstance(command, cmd.Unknown), f"{type(command).__name__} is not a read"
        return blocks.unknown(self.state, command)

    def _renew_leases(self, command: cmd.RenewLeases, now_ms: int) -> LeasesAnswered | Rejection:
        limits = self.limits
        ttl_ms = command.ttl_ms or limits.lease_ms_max // 2
        if not limits.lease_ms_min <= ttl_ms <= limits.lease_ms_max:
            return Rejection(
                "ttl_out_of_range",
                f"expected {limits.lease_ms_min}..{limits.lease_ms_max} ms, or 0",
                "ttl_ms",
            )
        if not command.leases:
            return Rejection("empty_batch", "name at least one lease", "leases")
        if command.locations is not None and len(command.leases) > 1:
            return Rejection("invalid_field", "locations go with one lease only", "locations")
        leases: Leases = self.memory.leases
        only = None
        if command.locations is not None:
            shard = self.state.shard
            only = [at & SLOT_MASK if shard_of(at) == shard else NONE for at in command.locations]
            row = leases.foreign(command.leases[0], only)
            if row is not None:
                return Rejection(
                    "foreign_location",
                    f"location {command.locations[row]} is not part of the lease",
                    f"locations[{row}]",
                )
        answers = [leases.renew(name, now_ms + ttl_ms, only) for name in command.leases]
        self._collect()
        return _leases_reply(command.leases, answers, ttl_ms)

    def _advance(self, now_ms: int) -> None:
        """Leases end by the clock, whoever calls."""
        if self.memory.leases.sweep(now_ms):
            self._collect()

    def _collect(self) -> None:
        leases = self.memory.leases
        if leases.unpinned:
            self.memory.deletions.unpinned(leases.unpinned)
            leases.unpinned = []

    # ------------------------------------------------------------ routers

    def announces(self, now_ms: int) -> bool:
        """Whether `Announce` would have something to do now. Ask often."""
        return announcing.due(self.state, self.memory, now_ms)

    def collect_windows(self) -> None:
        """From now on what routers are to be told is kept until `take_windows` asks for it."""
        if self.memory.windows is None:
            self.memory.windows = deque()

    @property
    def settled(self) -> bool:
        """Whether all that is applied is durable."""
        return self.memory.durable_seq == self.state.seq

    @property
    def window(self) -> int:
        """Number of the last window."""
        return self.state.window

    def untold(self, instance: str) -> bool:
        """Whether routers have still to be told that blocks of the instance went."""
        known = self.state.instances.get(instance)
        return instance in self.state.untold_of or (known is not None and known.announced > 0)

    def knows_engine(self, engine: str) -> bool:
        """Whether the engine is registered, expired or not."""
        return engine in self.state.engines

    def beat(self) -> None:
        """Make the next window at once, if an empty one."""
        self.memory.telling.told_ms = 0

    def take_windows(self) -> list[Window]:
        """The durable windows since the last time, in order."""
        windows, durable = self.memory.windows, self.memory.durable_seq
        taken: list[Window] = []
        while windows and windows[0].seq <= durable:
            taken.append(windows.popleft())
        return taken

    def standing(self, first: int, count: int) -> tuple[list[Run], int | None]:
        """What is announced now, in steps: see `told.standing`."""
        return told.standing(self.state, first, count)

    def tombstones(self) -> list[Gone]:
        """What routers were told as removed lately."""
        return told.tombstones(self.state)

    def publications(self) -> list[Announcement]:
        """The instances whose blocks routers are told of by this shard."""
        return publishing.announcements(self.state)

    def announced_engines(self) -> list[EngineAt]:
        """The live engines of this shard's instances."""
        return publishing.engines(self.state)

    # ------------------------------------------------------------ several shards

    def short(self, command: cmd.StartWrite) -> bool:
        """Whether the write would meet a slice of a limit that is too small for it and may still grow: run
        the shard's errands first, wait a little for their answer, then submit. Never with one shard."""
        return self.memory.spans and shortage.short(self.state, self.memory, command)

    def errands(self, now_ms: int) -> Errands | None:
        """What there is to tell the catalogue now, None when nothing is due; ask often. Submit the errands to
        the catalogue (`Settle`), see that this shard takes the catalogue up to the answer's version, and
        submit the answer here (`GiveBudget`)."""
        return self.memory.errander.errands(now_ms) if self.memory.spans else None

    def catalogue_view(self) -> CatalogueView:
        """The whole catalogue, of shard 0, for a shard that cannot be brought up to date by events. Ask at a
        moment when the machine says exactly what the journal says."""
        return spread.view(self.state, self.memory)

    # ------------------------------------------------------------ the whole state

    def capture(self) -> list[bytes]:
        """The state in chunks, for a snapshot."""
        return list(capture.capture(self.state))

    def digest(self) -> bytes:
        """Equal for replicas that applied the same events."""
        return capture.digest(self.state)

    def check(self) -> None:
        """Raises AssertionError when a counter or link disagrees with the rows."""
        checks.check(self.state)

    def describe(
        self, kind: str, now_ms: int | None = None, after: str = "", limit: int | None = None
    ) -> list[Struct]:
        """Views of the registered things of a kind (`views.KINDS`) by id: at most `limit` behind `after`."""
        when_ms = self.state.now_ms if now_ms is None else now_ms
        return views.describe(self.state, self.memory, kind, when_ms, after, limit)

    def usages(self, kind: str) -> list[tuple[str, tuple[int, int, int, int]]]:
        """Use of all tenants, groups, instances or storages, in numbers (see `views.usages`)."""
        return views.usages(self.state, self.memory, kind)

    def gauges(self) -> dict[str, float]:
        """How much there is of what comes and goes."""
        memory = self.memory
        return {
            "sessions_open": len(self.state.sessions),
            "leases_held": len(memory.leases),
            "locations_deleting": self.state.index.deleting_count,
            "deletions_overdue_bytes": sum(memory.deletions.overdue_bytes.values()),
        }

    def describe_one(self, kind: str, id: str, now_ms: int) -> Struct | None:
        """View of one registered thing."""
        return views.describe_one(self.state, self.memory, kind, id, now_ms)

    def block(self, instance: str, group: str | None, key: bytes) -> BlockDetail | Rejection:
        """Everything known of one block."""
        return views.block(self.state, instance, group, key)


def _leases_reply(
    names: tuple[str, ...], answers: list[tuple[LeaseOutcome, int]], ttl_ms: int
) -> LeasesAnswered:
    return LeasesAnswered(
        names,
        bytes(outcome for outcome, _ in answers),
        array("I", [changed for _, changed in answers]),
        ttl_ms,
    )
