"""A machine that follows a journal: batches in order, each checked, nothing decided.

Replay at the start, followers and the simulator use it. What does not fit ends it: the state is thrown away
and built anew, never patched.
"""

from collections.abc import Iterator

from metaservice.core.events import Event
from metaservice.core.machine import Machine
from metaservice.journal.codec import decode_batch
from metaservice.journal.errors import CorruptJournal
from metaservice.journal.port import Batch


class Tail:
    """Everything that it applied is durable, so its readers see all of it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.epoch = machine.state.epoch

    @property
    def applied_seq(self) -> int:
        """The seq up to which the machine stands."""
        return self.machine.seq

    def take(self, batch: Batch) -> list[Event]:
        """Apply a whole batch; returns its events. Raises CorruptJournal when it does not follow."""
        events = list(self.steps(batch))
        return events

    def steps(self, batch: Batch) -> Iterator[Event]:
        """The same, one event at a time: what was yielded is applied. The caller may let others run between
        two, and has to finish the batch before it takes another."""
        events = self.checked(batch)
        machine = self.machine
        for event in events:
            machine.apply(event)
            machine.mark_durable(machine.seq)
            yield event

    def checked(self, batch: Batch) -> list[Event]:
        """The events of a batch that follows: contiguous, of no older epoch. Raises CorruptJournal."""
        seq = self.machine.seq
        if batch.epoch < self.epoch:
            raise CorruptJournal(
                "journal", batch.first_seq, f"its epoch fell from {self.epoch} to {batch.epoch}"
            )
        events: list[Event] = decode_batch(batch.payload)
        if batch.first_seq != seq + 1 or batch.last_seq != seq + len(events):
            raise CorruptJournal(
                "journal",
                batch.first_seq,
                f"the batch of seq {batch.first_seq} to {batch.last_seq} does not follow seq {seq} "
                f"with {len(events)} events",
            )
        self.epoch = batch.epoch
        return events
