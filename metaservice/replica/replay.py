"""From a journal to a machine: the newest good snapshot, then every batch behind it."""

import logging

from metaservice.core.machine import Machine
from metaservice.core.model import Limits
from metaservice.journal.codec import decode_batch
from metaservice.journal.errors import CorruptJournal
from metaservice.journal.port import JournalReader

log = logging.getLogger(__name__)


def replay(journal: JournalReader, shard: int, limits: Limits) -> Machine:
    """The machine at the journal's head; everything in it is durable, and so visible.

    Raises CorruptJournal when a snapshot's contents are not the state that its digest names, or a batch does
    not follow.
    """
    info = journal.snapshots.latest()
    if info is None:
        machine = Machine(shard, limits)
    else:
        machine = Machine.restore(journal.snapshots.load(info), shard, limits)
        if machine.digest() != info.digest:
            raise CorruptJournal(
                info.location, info.seq, "the snapshot restores to another digest than it was cut with"
            )
        log.info("restored snapshot at seq %d (%d bytes)", info.seq, info.size_bytes)
    for batch in journal.read(machine.seq):
        events = decode_batch(batch.payload)
        if batch.first_seq != machine.seq + 1 or batch.last_seq != machine.seq + len(events):
            raise CorruptJournal(
                "journal",
                batch.first_seq,
                f"the batch does not follow seq {machine.seq} with {len(events)} events",
            )
        for event in events:
            machine.apply(event)
        machine.mark_durable(machine.seq)
    return machine
