"""From a journal to a machine: the newest good snapshot, then every batch behind it."""

import logging

from metaservice.core.machine import Machine
from metaservice.core.model import Limits
from metaservice.journal.errors import CorruptJournal
from metaservice.journal.port import JournalReader

from .tail import Tail

log = logging.getLogger(__name__)


def replay(journal: JournalReader, shard: int, limits: Limits, shards: int = 1) -> Machine:
    """The machine at the journal's head; everything in it is durable, and so visible.

    Raises CorruptJournal when a snapshot's contents are not the state that its digest names, or a batch does
    not follow.
    """
    info = journal.snapshots.latest()
    if info is None:
        machine = Machine(shard, limits, shards)
    else:
        machine = Machine.restore(journal.snapshots.load(info), shard, limits, shards)
        if machine.digest() != info.digest:
            raise CorruptJournal(
                info.location, info.seq, "the snapshot restores to another digest than it was cut with"
            )
        log.info("restored snapshot at seq %d (%d bytes)", info.seq, info.size_bytes)
    tail = Tail(machine)
    for batch in journal.read(machine.seq):
        tail.take(batch)
    return machine
