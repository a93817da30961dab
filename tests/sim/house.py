"""A machine with its journal, with time, durability and crashes in a test's hands."""

from array import array
from typing import Any

from metaservice.core.commands import Command, TakeOver
from metaservice.core.ids import location_base
from metaservice.core.machine import Machine
from metaservice.core.model import Limits
from metaservice.core.rejections import Rejection

CLUSTER = "c0ffee"


class House:
    """One shard's machine, the events it gave, and how many of them are durable.

    `auto`: every answer is durable before the next command, as it is when nobody waits behind a slow disk.
    """

    def __init__(
        self, limits: Limits | None = None, *, now_ms: int = 1_000_000, auto: bool = True, shard: int = 0
    ) -> None:
        self.limits = limits or Limits()
        self.shard = shard
        self.now_ms = now_ms
        self.auto = auto
        self.epoch = 0
        self.events: list[Any] = []
        self.durable = 0
        self.last = 0
        """How many events there were before the last command."""
        self.captured: tuple[int, list[bytes]] | None = None
        self.machine = self.fresh()
        self.take_over()

    def fresh(self) -> Machine:
        """A machine with nothing in it."""
        return self.made(Machine(shard=self.shard, limits=self.limits))

    def made(self, machine: Machine) -> Machine:
        """What is to be done with each new machine."""
        return machine

    def take_over(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.send(TakeOver(epoch=self.epoch, cluster=CLUSTER))

    def send(self, command: Command) -> Any:
        """Decide and apply `command`; its reply, or the Rejection."""
        self.last = len(self.events)
        reply, events = self.machine.execute(command, self.now_ms)
        assert not (events and isinstance(reply, Rejection)), f"{command} was rejected and changed something"
        self.events += events
        assert self.machine.seq == len(self.events), "each event is one seq"
        if self.auto:
            self.flush()
        return reply

    def ask(self, command: Command) -> Any:
        """Answer a read or a leader-memory command."""
        return self.machine.read(command, self.now_ms)

    def flush(self, seq: int | None = None) -> None:
        """The journal acknowledges everything up to `seq` (default: all)."""
        self.durable = len(self.events) if seq is None else seq
        self.machine.mark_durable(self.durable)

    def capture(self) -> None:
        """Take a snapshot, as of now, that later crashes may start from once it is durable."""
        self.captured = (len(self.events), self.machine.capture())

    def locations(self, slots: bytes) -> list[int]:
        """The location ids of an event's slot column."""
        return [location_base(self.shard) + slot for slot in array("I", slots)]

    def replayed(self, upto: int | None = None) -> Machine:
        """Another machine that got every event up to `upto` (default: all) and nothing else."""
        machine = self.fresh()
        for event in self.events[:upto]:
            machine.apply(event)
        return machine

    def restored(self) -> Machine | None:
        """Another machine, from the snapshot and the events after it; None without a snapshot."""
        if self.captured is None:
            return None
        at, chunks = self.captured
        machine = self.made(Machine.restore(chunks, shard=self.shard, limits=self.limits))
        for event in self.events[at:]:
            machine.apply(event)
        return machine

    def crash(self, *, from_capture: bool = False) -> None:
        """Lose the machine and all that was not durable, replay the journal, and lead again."""
        del self.events[self.durable :]
        if self.captured is not None and self.captured[0] > self.durable:
            self.captured = None
        self.machine = (self.restored() if from_capture else None) or self.replayed()
        self.machine.mark_durable(self.durable)
        self.take_over()
