"""What a leader does with commands, without any waiting: decide a batch, seal it, make it visible once it is
durable.

The sequencer drives it with a real journal, the simulator with a virtual one. One batch is in flight at most;
commands may be decided while it is, and make up the next one. There is no undo: a batch that cannot become
durable ends the pipeline, and its machine is thrown away.
"""

from dataclasses import dataclass
from typing import Any

from metaservice.core import commands as cmd
from metaservice.core.events import Event
from metaservice.core.machine import Machine
from metaservice.journal.codec import encode_batch


@dataclass(frozen=True, slots=True)
class Sealed:
    """A batch on its way into the journal: exactly these bytes or none."""

    first_seq: int
    last_seq: int
    epoch: int
    events: tuple[Event, ...]
    payload: bytes


class Pipeline:
    """One machine in one epoch."""

    def __init__(self, machine: Machine, epoch: int) -> None:
        self.machine = machine
        self.epoch = epoch
        self.durable_seq = machine.seq
        self.led = False
        """Whether the take-over is durable: before that nobody is answered."""
        self.in_flight: Sealed | None = None
        self._events: list[Event] = []

    def take_over(self, cluster: str, now_ms: int) -> None:
        """The first command of the epoch. `cluster` names a journal that has no name yet."""
        name = self.machine.state.cluster or cluster
        self._events += self.machine.execute(cmd.TakeOver(epoch=self.epoch, cluster=name), now_ms)[1]

    def decide(self, command: cmd.Command, now_ms: int) -> Any:
        """Decide and apply one command as a part of the next batch; its reply is true once that is
        durable."""
        reply, events = self.machine.execute(command, now_ms)
        self._events += events
        return reply

    def seal(self) -> Sealed | None:
        """Everything decided since the last seal as one batch; None when nothing changed."""
        assert self.in_flight is None, "two appends in flight"
        events = self._events
        if not events:
            return None
        first_seq, last_seq = self.durable_seq + 1, self.durable_seq + len(events)
        assert last_seq == self.machine.seq, "events were applied that are not in the batch"
        self._events = []
        self.in_flight = Sealed(first_seq, last_seq, self.epoch, tuple(events), encode_batch(events))
        return self.in_flight

    def committed(self, now_ms: int) -> None:
        """The journal has the batch in flight, as of now: readers may see what it says, and what it removed
        is waited for from now on."""
        sealed = self.in_flight
        assert sealed is not None, "nothing was in flight"
        self.in_flight = None
        self.durable_seq = sealed.last_seq
        self.led = True
        self.machine.mark_durable(sealed.last_seq, now_ms)

    @property
    def clean(self) -> bool:
        """Whether the machine says nothing that the journal does not."""
        return self.in_flight is None and self.machine.seq == self.durable_seq
