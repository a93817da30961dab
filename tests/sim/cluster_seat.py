"""One shard in one replica: follows the journal, or leads through the pipeline. What `replica/shard.py` does
with tasks and threads, done with calls and timers of virtual time; `Tail`, `Pipeline` and `Judge` are the
real ones."""

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from metaservice.core import commands as cmd
from metaservice.core.machine import Machine
from metaservice.journal.errors import CorruptJournal
from metaservice.journal.port import Batch
from metaservice.replica.pipeline import Pipeline
from metaservice.replica.role import Role, Turn, turned
from metaservice.replica.tail import Tail

from .cluster_net import SILENCE, Answer
from .cluster_setting import POLL_MS, TICK_MS, TIMEOUT_MS
from .cluster_store import Read, Refused, Snapshot

if TYPE_CHECKING:
    from .cluster_replica import Replica

APPEND_MS_MAX = 300
"""After so long the fate of an append is unknown."""
RETRY_MS = 60
BATCH_MAX = 16
CLUSTER = "c0ffee"
READS = (cmd.Lookup, cmd.RenewLeases, cmd.ReleaseLeases, cmd.Heartbeat, cmd.TakeTasks, cmd.Unknown)


class Answered(NamedTuple):
    """A reply with where it comes from: `epoch` 0 is a follower's, true as of `seq`, `staleness_ms` ago."""

    reply: Any
    replica: str
    shard: int
    epoch: int
    seq: int
    staleness_ms: int = 0


class Elsewhere(NamedTuple):
    """Not here: perhaps there."""

    leader: str


class Unavailable(NamedTuple):
    """Not now."""

    reason: str


class ShardTime:
    """A shard's clock (see `metaservice.clock.ShardClock`) over a simulated one."""

    STEP_MS_MAX = 250

    def __init__(self, replica: "Replica") -> None:
        self._clock = replica.clock
        self._now_ms = 0
        self._read_ms = self._clock.mono_ms

    def start(self, journaled_ms: int) -> None:
        """Begin after everything that was journaled."""
        self._now_ms = max(self._clock.wall_ms, journaled_ms + 1, self._now_ms)
        self._read_ms = self._clock.mono_ms

    def now_ms(self) -> int:
        """The shard's time."""
        read_ms = self._clock.mono_ms
        self._now_ms += min(read_ms - self._read_ms, self.STEP_MS_MAX)
        self._read_ms = read_ms
        return self._now_ms


class Seat:
    """See the module."""

    def __init__(self, replica: "Replica", shard: int) -> None:
        self.replica = replica
        self.world = replica.world
        self.shard = shard
        self.role = Role.FOLLOWER
        self.tail: Tail | None = None
        self.pipeline: Pipeline | None = None
        self.handing: str | None = None
        """To whom the shard is being given, "" for anybody."""
        self.lease_until_ms = 0
        self.journal_ok = True
        self.stalled_since_ms: int | None = None
        self.time = ShardTime(replica)
        self._turn = 0
        """Counts changes: what was begun before one is forgotten."""
        self._reading = 0
        """The read that is under way, 0 for none."""
        self._reads = 0
        self._fresh_ms = 0
        """When, by our own clock, we stood at the head of the journal."""
        self._epoch = 0
        self._queue: deque[tuple[cmd.Command, Answer]] = deque()
        self._waiting: deque[tuple[int, Any, Answer]] = deque()
        """(seq, reply, to whom): true once that seq is durable."""
        self._tick_ms = 0
        self._calls = 0
        self._load()
        self._poll()

    # ------------------------------------------------------------ following

    def _load(self) -> None:
        """Begin with nothing; the journal brings everything, or says that a snapshot has to."""
        self.tail = Tail(self.world.fresh(self.shard))
        self._fresh_ms = 0
        self.replica.rebuilt(self.shard)
        self._read()

    def _poll(self) -> None:
        self._read()
        self.replica.after(4 * POLL_MS if self.world.closing else self.replica.poll_ms, self._poll)

    def hint(self) -> None:
        """Something may be new."""
        self._read()

    def _read(self) -> None:
        if self._reading or self.tail is None:
            return
        self._reads += 1
        self._reading = number = self._reads
        after_seq, sent_ms = self.tail.applied_seq, self.replica.clock.mono_ms
        store = self.world.store
        self.world.net.call(
            self.replica,
            store,
            lambda answer: answer(store.read(self.shard, after_seq, self.world.page)),
            lambda result: self._took(result, sent_ms, number),
            TIMEOUT_MS,
        )

    def _took(self, result: Any, sent_ms: int, number: int) -> None:
        if number != self._reading:
            return
        self._reading = 0
        self.journal_ok = result is not SILENCE
        if result is SILENCE or self.tail is None:
            return
        assert isinstance(result, Read)
        if result.trimmed:
            self._bootstrap(result)
            return
        tail = self.tail
        try:
            for batch in result.batches:
                self.replica.followed(self.shard, tail.take(batch), tail.applied_seq)
                self.world.inspect(self.shard, tail.machine, self.replica.name)
        except CorruptJournal as error:
            self.world.tell(f"{self.replica.name}: shard {self.shard} starts anew: {error}")
            self._turn += 1
            self._load()
            return
        if tail.applied_seq >= result.head_seq:
            self._fresh_ms = sent_ms
            if self.role is Role.PROMOTING and self._epoch:
                self._begin()
        elif result.batches:
            self._read()

    def _bootstrap(self, result: Read) -> None:
        snapshot = result.snapshot
        assert snapshot is not None, "trimmed without a snapshot"
        machine = self.world.restore(snapshot.chunks, self.shard)
        assert machine.digest() == snapshot.digest, "the snapshot restores to another digest"
        self.tail = Tail(machine)
        self.replica.rebuilt(self.shard)
        self._read()

    def cut(self) -> None:
        """A follower cuts a snapshot."""
        if self.tail is None or self.pipeline is not None or not self.tail.applied_seq:
            return
        machine = self.tail.machine
        snapshot = Snapshot(machine.seq, machine.state.epoch, machine.digest(), tuple(machine.capture()))
        store = self.world.store
        self.world.net.send(self.replica, store, store.save, self.shard, snapshot)
        self.replica.after(40, self.world.net.send, self.replica, store, store.trim, self.shard)

    # ------------------------------------------------------------ promoting

    @property
    def warm(self) -> bool:
        """Whether the state stands close enough to the head to take over."""
        return self._fresh_ms > 0 and self.tail is not None

    def acquired(self) -> None:
        """The lease is ours."""
        self.role = turned(self.role, Turn.ACQUIRED)
        self._turn += 1
        self._reading = 0
        self._epoch = 0
        self._claim(self._turn)

    def _claim(self, turn: int) -> None:
        if turn == self._turn:
            store = self.world.store
            self.world.net.call(
                self.replica,
                store,
                lambda answer: answer(store.claim(self.shard)),
                lambda result: self._claimed(result, turn),
                TIMEOUT_MS,
            )

    def _claimed(self, result: Any, turn: int) -> None:
        if turn != self._turn:
            return
        if result is SILENCE:
            self._claim(turn)
            return
        self._epoch = result
        self._reading = 0
        self._read()

    def _begin(self) -> None:
        """The state is the journal's: the first command of the epoch."""
        assert self.tail is not None
        machine, self.tail = self.tail.machine, None
        self._turn += 1
        self.time.start(machine.state.now_ms)
        self.pipeline = Pipeline(machine, self._epoch)
        self.pipeline.take_over(CLUSTER, self.time.now_ms())
        self._tick_ms = self.replica.clock.mono_ms
        self._seal()
        self._beat(self._turn)

    # ------------------------------------------------------------ leading

    @property
    def leading(self) -> bool:
        """Whether it may answer: the take-over is durable and the lease is good."""
        pipeline = self.pipeline
        return pipeline is not None and pipeline.led and self.replica.clock.mono_ms < self.lease_until_ms

    @property
    def machine(self) -> Machine | None:
        """The state, whatever the role; None while there is none."""
        if self.pipeline is not None:
            return self.pipeline.machine
        return None if self.tail is None else self.tail.machine

    @property
    def applied_seq(self) -> int:
        """Up to where the state knows the journal to be."""
        if self.pipeline is not None:
            return self.pipeline.durable_seq
        return 0 if self.tail is None else self.tail.applied_seq

    @property
    def settled(self) -> bool:
        """Whether the state says exactly what the journal says."""
        return self.tail is not None if self.pipeline is None else self.pipeline.clean

    @property
    def leases(self) -> int:
        """Read leases that the leader holds."""
        return 0 if self.pipeline is None else len(self.pipeline.machine.memory.leases)

    def ask(self, command: cmd.Command, answer: Answer) -> None:
        """A command for the leader."""
        if not self.leading or self.handing is not None:
            answer(Elsewhere(self.handing or self.replica.leader(self.shard)))
            return
        pipeline = self.pipeline
        assert pipeline is not None
        if isinstance(command, READS):
            reply = pipeline.machine.read(command, self.time.now_ms())
            self.world.answered(self, command, reply)
            answer(self._stamped(reply))
        elif isinstance(command, cmd.StartWrite) and pipeline.machine.short(command):
            self.replica.spread.ask_for_room(self, lambda: self._submit(command, answer))
        else:
            self._submit(command, answer)

    def _submit(self, command: cmd.Command, answer: Answer) -> None:
        pipeline = self.pipeline
        if pipeline is None or not self.leading or self.handing is not None:
            answer(Elsewhere(""))
            return
        if self.world.eager:
            self._decide(pipeline, command, answer)
        else:
            self._queue.append((command, answer))
        self._seal()

    def look(self, command: cmd.Lookup, staleness_ms_max: int, answer: Answer) -> None:
        """A lookup that a follower may answer."""
        if not follower_may(command):
            answer(Unavailable("the leader alone grants leases"))
            return
        if self.pipeline is not None or self.tail is None or not self._fresh_ms:
            answer(Unavailable("nothing to look at"))
            return
        staleness_ms = self.replica.clock.mono_ms - self._fresh_ms
        if staleness_ms > staleness_ms_max:
            answer(Unavailable("too stale"))
            return
        machine = self.tail.machine
        reply = machine.read(command, machine.state.now_ms)  # a follower has no clock of its own
        answer(Answered(reply, self.replica.name, self.shard, 0, self.tail.applied_seq, staleness_ms))

    def _stamped(self, reply: Any) -> Answered:
        pipeline = self.pipeline
        assert pipeline is not None
        return Answered(reply, self.replica.name, self.shard, pipeline.epoch, pipeline.durable_seq)

    def _decide(self, pipeline: Pipeline, command: cmd.Command, answer: Answer) -> None:
        reply = pipeline.decide(command, self.time.now_ms())
        self._waiting.append((pipeline.machine.seq, reply, answer))

    def _beat(self, turn: int) -> None:
        """The sequencer's own rhythm."""
        if turn == self._turn and self.pipeline is not None:
            self._seal()
            self.replica.after(2 * TICK_MS if self.world.closing else TICK_MS, self._beat, turn)

    def _seal(self) -> None:
        """Decide what waits and send it to the journal, unless a batch is on its way."""
        pipeline = self.pipeline
        if pipeline is None or pipeline.in_flight is not None:
            return
        for _ in range(min(BATCH_MAX, len(self._queue))):
            self._decide(pipeline, *self._queue.popleft())
        now_ms = self.replica.clock.mono_ms
        if now_ms - self._tick_ms >= TICK_MS and pipeline.led and not self._queue:
            self._tick_ms = now_ms
            pipeline.decide(cmd.Tick(), self.time.now_ms())
        if pipeline.led and not self.world.silent and pipeline.machine.announces(self.time.now_ms()):
            pipeline.decide(cmd.Announce(), self.time.now_ms())
        sealed = pipeline.seal()
        if sealed is None:
            self._release()
            return
        batch = Batch(sealed.first_seq, sealed.last_seq, sealed.epoch, sealed.payload)
        self.stalled_since_ms = now_ms
        self._append(batch, self._turn)

    def _append(self, batch: Batch, turn: int) -> None:
        if turn != self._turn:
            return
        self._calls += 1
        call, who, store = self._calls, f"{self.replica.name}/{self.replica.life}", self.world.store

        def serve(answer: Answer) -> None:
            wait_ms = self.world.commit_ms(self.shard)
            store.after(wait_ms, lambda: answer(store.append(self.shard, batch, who, call)))

        self.world.net.call(
            self.replica, store, serve, lambda result: self._appended(result, batch, turn), APPEND_MS_MAX
        )

    def _appended(self, result: Any, batch: Batch, turn: int) -> None:
        if turn != self._turn:
            return
        self.journal_ok = result is None
        if result is SILENCE:
            self._resolve(batch, turn)
        elif result is None:
            self._committed()
        elif isinstance(result, Refused) and result.why == "full":
            self.replica.after(RETRY_MS, self._append, batch, turn)
        else:
            self.let_go(f"append refused: {result.why}")
            self.replica.resign(self.shard, "")

    def _resolve(self, batch: Batch, turn: int) -> None:
        if turn != self._turn:
            return
        call, who, store = self._calls, f"{self.replica.name}/{self.replica.life}", self.world.store
        self.world.net.call(
            self.replica,
            store,
            lambda answer: answer((store.resolve(self.shard, batch, who, call),)),
            lambda result: self._resolved(result, batch, turn),
            APPEND_MS_MAX,
        )

    def _resolved(self, result: Any, batch: Batch, turn: int) -> None:
        if turn != self._turn:
            return
        if result is SILENCE:
            self._resolve(batch, turn)
        elif result[0] is None:
            self.let_go("the fate of an append is unknown")
            self.replica.resign(self.shard, "")
        elif result[0]:
            self._committed()
        else:
            self.replica.after(RETRY_MS, self._append, batch, turn)

    def _committed(self) -> None:
        pipeline = self.pipeline
        assert pipeline is not None and pipeline.in_flight is not None
        first, events = not pipeline.led, pipeline.in_flight.events
        pipeline.committed(self.time.now_ms())
        self.stalled_since_ms = None
        self.journal_ok = True
        if first:
            self.role = turned(self.role, Turn.TOOK_OVER)
        self.replica.followed(self.shard, events, pipeline.durable_seq)
        self.world.inspect_leader(self)
        self._release()
        self._seal()

    def _release(self) -> None:
        """Everybody whose answer is durable gets it."""
        pipeline = self.pipeline
        assert pipeline is not None
        while self._waiting and self._waiting[0][0] <= pipeline.durable_seq:
            _, reply, answer = self._waiting.popleft()
            answer(self._stamped(reply))
        if self.handing is not None and not self._waiting and not self._queue and pipeline.clean:
            self._give()

    # ------------------------------------------------------------ letting go

    def hand_over(self, successor: str) -> None:
        """Make durable what was taken, then give the lease away."""
        if self.handing is None:
            self.handing = successor
            self.replica.after(TIMEOUT_MS * 3, self._give_up_waiting, self._turn)
            if self.pipeline is not None and self.pipeline.clean:
                self._release()

    def _give_up_waiting(self, turn: int) -> None:
        if turn == self._turn and self.handing is not None:
            self._give()

    def _give(self) -> None:
        successor = self.handing or ""
        self.let_go(f"handed over to {successor or 'anybody'}")
        self.replica.resign(self.shard, successor)

    def let_go(self, why: str) -> None:
        """Stop leading at once. A state that the journal does not have is thrown away."""
        if self.role is Role.FOLLOWER:
            return
        self.world.tell(f"{self.replica.name}: lets go of shard {self.shard}: {why}")
        self.role = turned(turned(self.role, Turn.LET_GO), Turn.RELEASED)
        self._turn += 1
        self._reading = 0
        pipeline, self.pipeline = self.pipeline, None
        waiting = [*(answer for _, _, answer in self._waiting), *(answer for _, answer in self._queue)]
        self._waiting.clear()
        self._queue.clear()
        self.handing = None
        self.lease_until_ms = 0
        self.stalled_since_ms = None
        for answer in waiting:
            answer(Unavailable(why))
        if pipeline is None:
            self._read()
        elif pipeline.clean:
            pipeline.machine.stand_down()
            self.tail = Tail(pipeline.machine)
            self.replica.rebuilt(self.shard)
            self._read()
        else:
            self._load()


def follower_may(command: cmd.Lookup) -> bool:
    """Whether a follower may answer: it grants nothing and knows no engine."""
    return not command.lease_ms and not command.engine
