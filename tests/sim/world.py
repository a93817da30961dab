"""A world around one machine: clients' knowledge, bytes on disks, a journal that may lag, crashes.

The machine's every answer is checked against the naive model. What the model cannot see is checked
physically: bytes lie in a dict, and a read that finds none, or a deletion under a reader, is a violation
whatever the machine says.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from itertools import filterfalse
from random import Random
from typing import Any, NamedTuple

from metaservice.core.commands import (
    Announce,
    Command,
    ConfirmTask,
    Deregister,
    PutGroup,
    PutInstance,
    PutStorage,
    PutTenant,
    RegisterWorker,
    StartWrite,
    TakeTasks,
    Tick,
    Unknown,
)
from metaservice.core.events import Announced, BlocksRemoved, InstanceGone, StoragePut
from metaservice.core.machine import Machine
from metaservice.core.model import LocationState
from metaservice.core.rejections import Rejection
from metaservice.core.replies import Looked
from metaservice.core.windows import Run

from .announced import PATIENCE_WINDOWS, Judge
from .house import House
from .model import Model, Observed
from .probe import compare
from .rows import Violation
from .setting import Deployment, Setting

Place = tuple[int, int]
"""(location, generation)"""
CHECK_EVERY = 20
VOLATILE_PART = 0.35
"""Of the histories, so many have a volatile storage."""
PUBLISHED_PART = 0.7
"""Of the histories, in so many routers are told of blocks."""
USERS = (StartWrite, PutTenant, PutGroup, PutInstance, PutStorage)


class Write(NamedTuple):
    """A write session as its engine knows it."""

    session: int
    engine: str
    incarnation: str
    deployment: Deployment
    group: str
    places: tuple[Place, ...]
    seq: int
    pools: Mapping[Place, str]
    """Of its places in a volatile storage: the pool, as the reply named it."""


class Promise(NamedTuple):
    """Somebody may be reading these places until then (real time), under a lease or (None) without one."""

    lease: str | None
    places: frozenset[Place]
    until_ms: int


class World(House):
    """See the module. Everything raises Violation (or an AssertionError of the machine's own)."""

    def __init__(self, seed: int) -> None:
        rng = Random(seed)
        apart = Random(f"volatile {seed}")  # so that the other histories are what they were
        volatile = apart.choice(("s0", "s1", "s1")) if apart.random() < VOLATILE_PART else ""
        stacked = apart.random() < 0.4
        routers = Random(f"routers {seed}")
        self.setting = Setting(rng, volatile, stacked, routers if routers.random() < PUBLISHED_PART else None)
        self.model = Model(self.setting.limits)
        self.disk: dict[tuple[Place, str], tuple[str, str, bytes, str, str]] = {}
        """(place, part) -> (instance, group, key, storage, pool or '')"""
        self.dead: set[str] = set()
        """Incarnations of workers that are gone, and their pools with them, whatever the service knows."""
        self.late_until_ms: dict[Place, int] = {}
        """Until when, in real time, the writer of a place may still be writing."""
        self.promises: list[Promise] = []
        self.writes: list[Write] = []
        self.leases: list[str] = []
        self.tasks: list[tuple[str, str, Any]] = []
        """(worker, incarnation, task) in workers' hands"""
        self.requests: list[Command] = []
        self.incarnations: dict[str, list[str]] = {}
        self.boundaries: list[int] = []
        """The seqs at which a command's events end, from the durable one on: batches are whole commands."""
        self.steps = 0
        self.serial = 0
        self.behind_ms = 0
        """Real time minus the shard clock: a new leader's clock may be behind or ahead of the one before."""
        self.last_window_ms = 0
        """When the last window was made, durable or not."""
        self.trace: Callable[[str], None] | None = None
        """Where commands and answers are told to, for a report."""
        now_ms, shard = rng.randint(10**6, 10**12), rng.choice((0, 0, 0, 7))
        self.judge = Judge(shard, self.setting.limits)
        super().__init__(self.setting.limits, now_ms=now_ms, auto=False, shard=shard)
        for command in self.setting.catalogue:
            self.send(command)
        for member in ("e0", "e1", "e2", "k0", "k1"):
            self.incarnations[member] = [f"{member}.1"]
        self.flush()

    @property
    def real_ms(self) -> int:
        """The time of those who read and write bytes."""
        return self.now_ms + self.behind_ms

    def fresh_name(self, prefix: str) -> str:
        """A name never used before."""
        self.serial += 1
        return f"{prefix}{self.serial}"

    # ------------------------------------------------------------ commands

    def send(self, command: Command) -> Any:
        """Decide, compare with the model, follow it."""
        before = self.model.live_uses() if isinstance(command, USERS) else {}
        reply = super().send(command)
        if self.trace is not None:
            self.tell(f"{command} -> {reply}")
        new = self.events[self.last :]
        self.last_window_ms = next(
            (event.now_ms for event in reversed(new) if isinstance(event, Announced)), self.last_window_ms
        )
        self.model.step(command, self.now_ms, reply, self.observed(new))
        if new and isinstance(command, PutInstance | PutStorage):
            self.judge.changed(getattr(command, "instance", ""), self.machine.seq)
        if new:
            self.boundaries.append(len(self.events))
        for scope, (used_bytes, used_blocks) in self.model.live_uses().items() if before else ():
            quota = self.model.quota(scope)
            was_bytes, was_blocks = before.get(scope, (0, 0))
            if quota.bytes is not None and used_bytes > max(quota.bytes, was_bytes):
                raise Violation(f"I4: {scope} uses {used_bytes} bytes of {quota.bytes}")
            if quota.blocks is not None and used_blocks > max(quota.blocks, was_blocks):
                raise Violation(f"I4: {scope} uses {used_blocks} blocks of {quota.blocks}")
        self.after()
        return reply

    def ask(self, command: Command) -> Any:
        """Read, compare with the model, follow it."""
        seq = self.machine.seq
        reply = super().ask(command)
        if self.trace is not None:
            self.tell(f"{command} -> {reply}")
        if self.machine.seq != seq:
            raise Violation(f"{type(command).__name__} is no read: it moved the journal")
        self.model.step(command, self.now_ms, reply, Observed(seq))
        self.after()
        return reply

    def tell(self, text: str) -> None:
        """Add a line to the trace."""
        if self.trace is not None:
            self.trace(f"{self.now_ms} {text}")

    def after(self) -> None:
        """What is cheap enough to be checked often."""
        for place in self.model.unwritten:
            self.late_until_ms[place] = self.real_ms + self.limits.late_write_ms
        self.steps += 1
        if self.steps % CHECK_EVERY == 0:
            self.machine.check()
            compare(self.model, self.machine)

    def observed(self, events: list[Any]) -> Observed:
        """What the events of one step say about the machine's choices."""
        victims: list[int] = []
        retired: list[int] = []
        gone: list[str] = []
        for event in events:
            if isinstance(event, BlocksRemoved) and event.why in ("quota", "watermark"):
                victims += self.locations(event.slots)
            elif isinstance(event, BlocksRemoved) and event.why == "retired":
                retired += self.locations(event.slots)
            elif isinstance(event, InstanceGone):
                gone.append(event.instance)
            elif isinstance(event, StoragePut):
                self.model.numbers[event.number] = event.storage
        return Observed(self.machine.seq, len(events), tuple(victims), tuple(retired), tuple(gone))

    # ------------------------------------------------------------ journal

    def flush(self, seq: int | None = None) -> None:
        """The journal acknowledges."""
        super().flush(seq)
        self.hear(self.machine)
        self.tell(f"durable {self.durable}")
        self.model.mark_durable(self.durable)
        self.boundaries = [at for at in self.boundaries if at > self.durable]

    def crash(self, *, from_capture: bool = False, jump_ms: int = 0) -> None:
        """Lose the leader; what was never acknowledged may be lost, and nobody was told of it.

        The next leader's clock is off by `jump_ms`, but never before what the journal says.
        """
        self.tell(f"crash, {len(self.events) - self.durable} events lost, clock jumps {jump_ms} ms")
        journaled_ms = self.events[self.durable - 1].now_ms + 1
        before_ms = self.now_ms
        self.now_ms = max(journaled_ms, self.now_ms + jump_ms)
        self.behind_ms += before_ms - self.now_ms
        self.boundaries = []
        self.writes = [write for write in self.writes if write.seq <= self.durable]
        self.model.crash()
        self.judge.crash()
        self.last_window_ms = self.judge.windows[-1].now_ms if self.judge.windows else 0
        super().crash(from_capture=from_capture)
        self.machine.check()
        compare(self.model, self.machine)

    def known(self) -> list[Write]:
        """The sessions whose engines got an answer."""
        return [write for write in self.writes if write.seq <= self.durable]

    # ------------------------------------------------------------ bytes

    def put_bytes(self, write: Write, place: Place, part: str) -> bool:
        """An engine writes a part while it may believe that it holds the session. Whether it did."""
        location, generation = place
        pool = write.pools.get(place, "")
        if place in write.pools and (pool in self.dead or not self.model.has_pool(pool)):
            return False  # there is nothing to write to, or nothing that anybody will look into
        copy = self.model.state.copies.get(location)
        mine = copy is not None and copy.generation == generation
        late = self.real_ms < self.late_until_ms.get(place, 0)
        if late and not mine:
            raise Violation(f"A1: {place} was given up while a late write may land: {copy}")
        if copy is None or not mine:
            return False
        if copy.state == LocationState.writing or (late and copy.state == LocationState.deleting):
            self.disk[place, part] = (copy.instance, copy.group, copy.key, copy.storage, pool)
            return True
        return copy.state == LocationState.serving

    def unreachable(self, write: Write, place: Place) -> bool:
        """Whether the place is in a pool that is gone, as its writer finds out."""
        return write.pools.get(place, "") in self.dead or write.pools.get(place) == ""

    def restart(self, member: str) -> str:
        """The member's process is another one from now on; its new incarnation."""
        if member.startswith("k"):
            self.bury(self.incarnations[member][-1])
        self.incarnations[member].append(self.fresh_name(f"{member}."))
        return self.incarnations[member][-1]

    def bury(self, incarnation: str) -> None:
        """That life of a worker is over, and its pools are gone."""
        self.dead.add(incarnation)
        for at in [at for at, value in self.disk.items() if value[4] == incarnation]:
            del self.disk[at]

    def drop_bytes(self, places: Iterable[Place]) -> None:
        """A worker deletes bytes."""
        gone = set(places)
        self.promises = [promise for promise in self.promises if promise.until_ms > self.real_ms]
        for promise in self.promises:
            if under := gone & promise.places:
                raise Violation(f"I3: bytes of {sorted(under)} are deleted under {promise}")
        for place, part in [key for key in self.disk if key[0] in gone]:
            del self.disk[place, part]

    def read_bytes(self, deployment: Deployment, keys: list[bytes], reply: Looked) -> None:
        """A reader gets every block it was told of, whole; and may go on reading until its time is over."""
        places: set[Place] = set()
        for located, group in ((reply.located, reply.group), (reply.state, reply.state_group)):
            if located is None:
                continue
            rows = zip(located.locations, located.generations, located.storages, strict=True)
            for location, generation, storage in rows:
                place = (location, generation)
                pool = self.machine.state.storage_of[storage].told().get("pool")
                if pool in self.dead:
                    continue  # it cannot be opened: a miss
                places.add(place)
                for part in deployment.parts(group):
                    found = self.disk.get((place, part))
                    if found is None or found[:2] != (deployment.name, group) or found[2] not in keys:
                        raise Violation(f"I2: dirty read of {place} {part}: {found}")
        if places:
            wait_ms = reply.lease_ms if reply.lease else self.limits.reclaim_delay_ms
            self.promises.append(Promise(reply.lease, frozenset(places), self.real_ms + wait_ms))

    # ------------------------------------------------------------ the end

    def finish(self) -> None:
        """Everybody is gone: what was promised ends by itself, and nothing is left over."""
        self.flush()
        if self.setting.volatile:
            if (last := self.model.state.workers.get("k1")) is not None:
                self.send(Deregister(kind="worker", id="k1", incarnation=last.incarnation))
            for life in self.incarnations["k1"]:  # also of one that everybody has forgotten
                self.bury(life)
        for _ in range(4):
            self.now_ms += 9_000
            self.send(Tick())
            self.flush()
            self.clean_up()
            self.send(Tick())
            self.flush()
        state = self.model.state
        left = [c for c in state.copies.values() if c.state != LocationState.serving]
        if left or any(session.open for session in state.sessions.values()) or self.retiring():
            raise Violation(f"I8: left over: {left} {self.retiring()}")
        self.sweep("k0", self.incarnations["k0"][-1])
        want = {
            ((copy.location, copy.generation), part)
            for copy in state.copies.values()
            for part in self.deployment(copy.instance).parts(copy.group)
        }
        if want != self.disk.keys():
            raise Violation(f"bytes and blocks differ: {want ^ self.disk.keys()}")
        self.machine.check()
        compare(self.model, self.machine)
        self.hear_everything()
        self.compare_replay(self.replayed(), "the replay of all events")
        restored = self.restored()
        if restored is not None:
            self.compare_replay(restored, "a snapshot and the events after it")
        self.compare_announced(self.machine)
        for upto in (len(self.events) // 3, len(self.events) * 2 // 3):
            self.replayed(upto).check()  # a journal may end after any event

    def compare_replay(self, machine: Machine, what: str) -> None:
        """I6: what applied the same events is the same and told routers the same."""
        if machine.digest() != self.machine.digest():
            raise Violation(f"I6: {what}: differs from the live machine")
        machine.mark_durable(self.durable)
        self.hear(machine)
        self.compare_announced(machine)

    # ------------------------------------------------------------ routers

    def made(self, machine: Machine) -> Machine:
        """Every machine keeps what is to be told to routers."""
        machine.collect_windows()
        return machine

    def hear(self, machine: Machine) -> None:
        """What routers are told now goes to the judge."""
        for window in (windows := machine.take_windows()):
            self.tell(f"told {window}")
        self.judge.released(windows, self.durable, self.model.at)

    def hear_everything(self) -> None:
        """Windows until there is nothing left to tell."""
        for _ in range(2 * PATIENCE_WINDOWS):
            self.now_ms += self.limits.beat_ms
            self.send(Announce())
            self.flush()

    def compare_announced(self, machine: Machine) -> None:
        """What a machine says is announced is what routers were told."""
        runs: list[Run] = []
        first: int | None = 0
        while first is not None:
            some, first = machine.standing(first, 5)
            runs += some
        self.judge.standing(runs, machine.tombstones())

    def retiring(self) -> list[str]:
        """Instances that are still on their way out."""
        return [name for name, row in self.model.state.instances.items() if row.retiring]

    def clean_up(self) -> None:
        """A diligent worker deletes all that may be deleted."""
        name = self.restart("k0")
        storages = tuple(self.model.state.storages)
        self.send(RegisterWorker(worker="k0", incarnation=name, storages=storages))
        self.flush()
        while tasks := self.ask(TakeTasks(worker="k0", incarnation=name)).tasks:
            for task in tasks:
                self.drop_bytes(zip(task.locations, task.generations, strict=True))
                self.send(ConfirmTask(worker="k0", incarnation=name, task=task.task))
                self.flush()

    def sweep(self, worker: str, incarnation: str) -> None:
        """A worker deletes the bytes that no block has. Memory is not looked through: it goes with whoever
        holds it, and until then its readers have what they were promised."""
        for storage in filterfalse(self.model.volatile, self.model.state.storages):
            places = sorted({key[0] for key, value in self.disk.items() if value[3] == storage})
            locations = array("Q", [location for location, _ in places])
            generations = array("I", [generation for _, generation in places])
            reply = self.ask(
                Unknown(
                    worker=worker,
                    incarnation=incarnation,
                    storage=storage,
                    locations=locations,
                    generations=generations,
                )
            )
            if isinstance(reply, Rejection):
                return
            self.drop_bytes(p for p, unknown in zip(places, reply.unknown, strict=True) if unknown)

    def deployment(self, instance: str) -> Deployment:
        """The deployment of that name."""
        return next(each for each in self.setting.deployments if each.name == instance)
