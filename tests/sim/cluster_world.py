"""A whole cluster in virtual time: replicas, database, elector, engines, workers, disks, and the judge of it
all."""

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from metaservice.core import commands as cmd
from metaservice.core.machine import Machine
from metaservice.core.model import LocationState
from metaservice.core.replies import Located, Looked
from metaservice.replica.role import Judge

from .cluster_bytes import Bytes
from .cluster_elector import Elector
from .cluster_engine import Engine
from .cluster_net import Net
from .cluster_operator import Operator
from .cluster_replica import Replica, judges
from .cluster_seat import Answered, Seat
from .cluster_setting import Setting, published, volatile_of
from .cluster_store import Store
from .cluster_time import DRIFT_PERMILLE, Clock, Heap
from .cluster_windows import Windows
from .cluster_witness import DELETING, GONE, SERVING, WRITING, Place, Witness
from .cluster_worker import Worker
from .rows import Violation

HOUR_MS = 3_600_000
START_MS_MAX = 4_000
STATES = {
    LocationState.writing: WRITING,
    LocationState.serving: SERVING,
    LocationState.deleting: DELETING,
    LocationState.gone: GONE,
}
CHECK_EVERY = 40
"""Every so many batches a machine's counters are checked against its rows."""
DIGEST_EVERY = 12


class World:
    """See the module. Everything raises Violation (or an AssertionError of the parts under test)."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = Random(seed)
        self.shards = rng.choice((1, 1, 1, 2, 3))
        self.setting = Setting(rng, self.shards, volatile_of(seed), published(seed))
        self.eager = rng.random() < 0.3
        """Commands are decided while a batch is on its way, not only when it is through."""
        self.page = rng.choice((2, 64, 64))
        """Batches that one read of the journal brings."""
        self.slow_ms = rng.choice((1, 1, 1, 30, 150))
        """How slow the database's disk is at most."""
        self.held_up_ms: dict[int, int] = {}
        """Shard -> how long something holds its appends up."""
        self.trace: Callable[[str], None] | None = None
        self.heap = Heap()
        self.net = Net(self.heap, Random(rng.getrandbits(64)))
        self.witness = Witness(self.shards)
        self.windows = Windows(self.shards, self.setting.limits.window_removed_max)
        self.silent = False
        """Routers are told nothing any more."""
        self.store = Store(self.heap, self.shards, self._told)
        self.elector = Elector(self.heap, self.shards, self._clock(rng))
        self.bytes = Bytes(self.heap)
        self.names = ["r0", "r1", "r2"]
        self.replicas = {name: Replica(self, name, self._clock(rng)) for name in self.names}
        self.storages = tuple(storage.storage for storage in self.setting.storages)
        self.deployments = self.setting.deployments
        self._judges: dict[str, list[Judge]] = {}
        self._hand_to: dict[int, str] = {}
        self._homes = {each.name: each.command.shard or 0 for each in self.deployments}
        self._leases: set[str] = set()
        self._inspected = 0
        self.operator = Operator(self, "op", Random(rng.getrandbits(64)))
        self.engines = [Engine(self, f"e{n}", Random(rng.getrandbits(64))) for n in range(3)]
        self.workers = [Worker(self, f"k{n}", Random(rng.getrandbits(64))) for n in range(2)]
        self.hints = True
        self.closing = False
        """Nothing new is begun: whoever looks about does it less often."""

    def _clock(self, rng: Random) -> Clock:
        ahead_ms = rng.choice((0, 0, -HOUR_MS, HOUR_MS, rng.randint(-5_000, 5_000)))
        return Clock(self.heap, rng.uniform(-DRIFT_PERMILLE, DRIFT_PERMILLE), ahead_ms)

    def start(self) -> None:
        """Everybody starts; the operator registers the catalogue, then the others come."""
        for replica in self.replicas.values():
            replica.start()
        self.operator.begin(self._open)
        while not self.operator.opened and self.heap.now_ms < START_MS_MAX:
            self.heap.run(self.heap.now_ms + 50)
        if not self.operator.opened:
            raise Violation("I8: a cluster without faults did not start")

    def _open(self) -> None:
        for engine in self.engines:
            engine.start()
        for worker in self.workers:
            worker.start()

    @property
    def commands(self) -> int:
        """Commands that clients sent."""
        callers = (self.operator, *self.engines, *self.workers)
        return sum(caller.commands for caller in callers)

    def tell(self, text: str) -> None:
        """A line for the trace."""
        if self.trace is not None:
            self.trace(f"{self.heap.now_ms} {text}")

    # ------------------------------------------------------------ for replicas

    def fresh(self, shard: int) -> Machine:
        """A machine with nothing in it."""
        machine = Machine(shard, self.setting.limits, self.shards)
        machine.collect_windows()
        return machine

    def restore(self, chunks: Iterable[bytes], shard: int) -> Machine:
        """A machine from a snapshot."""
        machine = Machine.restore(chunks, shard, self.setting.limits, self.shards)
        machine.collect_windows()
        return machine

    def started(self, replica: Replica) -> None:
        """A replica's new life."""
        self._judges[replica.name] = judges(replica.name, self.shards, True)

    def judge(self, replica: Replica, shard: int) -> Judge:
        """Who decides for this shard of this replica."""
        return self._judges[replica.name][shard]

    def asked(self, replica: Replica, shard: int) -> str | None:
        """To whom an operator wants the shard given, which this replica leads."""
        if shard not in self._hand_to or not replica.seats[shard].leading:
            return None
        return self._hand_to.pop(shard)

    def hand_over(self, shard: int, to: str) -> None:
        """An operator asks for a handover."""
        self._hand_to[shard] = to

    def home(self, instance: str) -> int:
        """The shard where an instance lives."""
        return int(instance[1:]) % self.shards if instance[0] == "p" else self._homes[instance]

    def commit_ms(self, shard: int) -> int:
        """How long the database takes over one append."""
        return int(self.rng.random() * self.slow_ms) + self.held_up_ms.get(shard, 0)

    def _told(self, shard: int, batch: Any) -> None:
        self.witness.told(shard, batch)
        if self.hints:
            for replica in self.replicas.values():
                if replica.seats and replica.seats[shard].pipeline is None:
                    self.net.send(self.store, replica, replica.hint, shard)

    def busy(self) -> bool:
        """Whether something is still on its way to its end."""
        return bool(
            self.witness.escrow.under_way()
            or any(True for _ in self.witness.open_sessions())
            or any(copy.state == DELETING for copy in self.witness.copies.values())
            or any(promise.until_ms > self.heap.now_ms for promise in self.bytes.promises)
            or any(seat.leases for replica in self.replicas.values() for seat in replica.seats)
        )

    # ------------------------------------------------------------ checks

    def answered(self, seat: Seat, command: cmd.Command, reply: Any) -> None:
        """A leader answered a read: what it names is readable now, in the journal. A repeated lookup gets its
        first answer for as long as the lease lives, whatever became of the blocks."""
        if not isinstance(command, cmd.Lookup) or not isinstance(reply, Looked) or reply.located is None:
            return
        if self.setting.volatile:
            self._told_of_pools(seat, reply.located)
        if reply.lease is not None and command.request_id:
            if reply.lease in self._leases:
                return
            self._leases.add(reply.lease)
        for place in zip(reply.located.locations, reply.located.generations, strict=True):
            copy = self.witness.copies.get(place)
            if copy is None or copy.state != SERVING:
                raise Violation(
                    f"I2: {seat.replica.name} leads shard {seat.shard} in epoch "
                    f"{seat.pipeline.epoch if seat.pipeline else 0} and names {place}: {copy}"
                )

    def _told_of_pools(self, seat: Seat, located: Located) -> None:
        """A place is named in the pool in which it was given, and in no other."""
        assert seat.pipeline is not None
        storages = seat.pipeline.machine.state.storage_of
        rows = zip(located.locations, located.generations, located.storages, strict=True)
        for location, generation, number in rows:
            told = storages[number].told().get("pool")
            known = self.bytes.pools.get((location, generation), told)
            if told != known:
                raise Violation(f"I2: {(location, generation)} is in pool {known}, not in {told!r}")

    def named(self, result: Answered, shard: int, keys: list[bytes], places: list[Place]) -> None:
        """A reader was told of these places for these keys: they were readable when the answer was true."""
        for key, place in zip(keys, places, strict=False):
            copy = self.witness.copies.get(place)
            leased = result.reply.lease is not None and copy is not None and copy.published_seq
            if copy is None or copy.key != key or not (leased or copy.served_at(result.seq)):
                raise Violation(
                    f"I2: {result.replica} (epoch {result.epoch}, seq {result.seq} of shard {shard}) "
                    f"named {place} for {key!r}: {copy}"
                )

    def acknowledged(self, place: Place, result: Answered) -> None:
        """A writer was told that its block is published."""
        copy = self.witness.copies.get(place)
        if copy is None or not copy.published_seq:
            raise Violation(f"I1: {result} acknowledged {place}, the journal says: {copy}")

    def inspect(self, shard: int, machine: Machine, who: str) -> None:
        """A machine took a batch: now and then look at all of it."""
        self.windows.heard(shard, machine.take_windows(), machine.seq, who)
        self._inspected += 1
        if machine.seq % DIGEST_EVERY == 0:
            self.witness.compare(shard, machine.seq, machine.digest(), who)
        if self._inspected % CHECK_EVERY == 0:
            machine.check()

    def inspect_leader(self, seat: Seat) -> None:
        """A leader's batch is durable."""
        pipeline = seat.pipeline
        assert pipeline is not None
        windows = pipeline.machine.take_windows()
        self.windows.heard(seat.shard, windows, pipeline.durable_seq, seat.replica.name)
        if pipeline.clean:
            self.inspect(seat.shard, pipeline.machine, seat.replica.name)

    def compare_blocks(self, shard: int, machine: Machine, who: str) -> None:
        """The machine has every block in the state that the journal gives it, and no other."""
        history = self.witness.histories[shard]
        index = machine.state.index
        for slot, copy in history.at.items():
            if copy.state == GONE:
                continue
            got = (STATES[LocationState(index.state[slot])], index.generation[slot], index.key[slot])
            want = (copy.state, copy.place[1], copy.key)
            if got != want:
                raise Violation(f"I1: {who} has slot {slot} of shard {shard} as {got}, the journal as {want}")
            if copy.state == SERVING and not index.visible[slot]:
                raise Violation(f"I1: {who} hides slot {slot} of shard {shard}: {copy}")
        live = sum(copy.state != GONE for copy in history.at.values())
        used = sum(state != LocationState.gone for state in index.state)
        if live != used:
            raise Violation(f"I1: {who} has {used} places of shard {shard} in use, the journal {live}")
        machine.check()
