"""A journal in memory with the same promises: for tests of whoever embeds the service, and for trying it out.

The `MemoryStore` plays the disk: it outlives the journal objects that open it, is locked by one of them at
a time, can be full, and can leave the fate of an append open.
"""

import enum
import os
import threading
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from metaservice.journal.errors import (
    FateUnknown,
    Fenced,
    JournalClosed,
    JournalFailed,
    JournalFull,
    JournalLocked,
    JournalMissing,
)
from metaservice.journal.port import Batch, JournalSize, OpenReport
from metaservice.journal.records import Marks, Place, Record, check_append, read_batches, record_crc, recover
from metaservice.journal.snapshots import MemorySnapshotStore, StoredSnapshot


class AppendFault(enum.Enum):
    """How the fate of the next append is left open."""

    WRITTEN = "the batch is in, and the caller does not hear of it"
    LOST = "the batch is not in, and the caller does not hear of it"


@dataclass(slots=True)
class MemoryShard:
    """What is kept of one shard. Tests may damage `records` while no journal has it open."""

    marks: Marks = field(default_factory=lambda: Marks(0, 0, 0))
    records: list[Record] = field(default_factory=list)
    payload_bytes: int = 0
    snapshots: dict[int, StoredSnapshot] = field(default_factory=dict)
    holder: object | None = None
    made: bool = False
    """Whether a writer has opened it once; before that there is nothing to read."""


class MemoryStore:
    """What several `MemoryJournal` objects share, as processes share a disk."""

    def __init__(self, bytes_max: int | None = None) -> None:
        self.bytes_max = bytes_max
        """Payload bytes that fit, all shards together; None: no bound. May be changed at any time."""
        self.next_append: AppendFault | None = None
        """Set it to leave the fate of the next append open, once."""
        self.lock = threading.RLock()
        self.shards: dict[int, MemoryShard] = {}

    def payload_bytes(self) -> int:
        """Payload bytes of all shards."""
        return sum(shard.payload_bytes for shard in self.shards.values())


class MemoryReader:
    """`JournalReader` on a shard of a store that somebody may be appending to."""

    def __init__(self, store: MemoryStore, shard: int) -> None:
        self._store = store
        self._shard = shard
        self._where = f"memory journal shard {shard}"
        with store.lock:
            self._kept = store.shards.setdefault(shard, MemoryShard())
        self._snapshots = MemorySnapshotStore(self._kept.snapshots, self._where)
        self._is_open = False

    @property
    def snapshots(self) -> MemorySnapshotStore:
        """See JournalReader."""
        return self._snapshots

    def head(self) -> int:
        """See JournalReader."""
        return self._open_shard().marks.head_seq

    def read(self, after_seq: int) -> Iterator[Batch]:
        """See JournalReader."""
        return read_batches(self._where, self._shard, self._look, self._inside, after_seq)

    def report_follower(self, replica: str, applied_seq: int) -> None:
        """See JournalReader: nobody else follows."""

    def size(self) -> JournalSize:
        """See JournalReader."""
        kept = self._open_shard()
        with self._store.lock:
            return JournalSize(len(kept.records), kept.payload_bytes)

    def close(self) -> None:
        """See JournalReader."""
        self._is_open = False

    def _open_shard(self) -> MemoryShard:
        if not self._is_open:
            raise JournalClosed(self._where)
        return self._kept

    def _look(self, seq: int) -> Place:
        kept = self._open_shard()
        with self._store.lock:
            at = bisect_left(kept.records, seq, key=lambda record: record.first_seq)
            found = kept.records[at] if at < len(kept.records) else None
            return Place(kept.marks, found if found is not None and found.first_seq == seq else None)

    def _inside(self, seq: int) -> bool:
        with self._store.lock:
            return any(record.first_seq < seq <= record.last_seq for record in self._open_shard().records)


def open_reader(store: MemoryStore, shard: int) -> MemoryReader:
    """Opens a shard to read, without its lock. JournalMissing when no writer has made it."""
    reader = MemoryReader(store, shard)
    if not reader._kept.made:
        raise JournalMissing(reader._where)
    reader._is_open = True
    return reader


class MemoryJournal(MemoryReader):
    """`Journal` in a `MemoryStore`."""

    def __init__(self, store: MemoryStore, shard: int) -> None:
        super().__init__(store, shard)
        self._unknown: FateUnknown | None = None

    def open(self) -> OpenReport:
        """See Journal."""
        if self._is_open:
            raise JournalFailed(self._where, "opening", "it is open already")
        kept = self._kept
        with self._store.lock:
            if kept.holder is not None:
                raise JournalLocked(self._where, "in memory", os.getpid())
            snapshot = self._snapshots.latest()
            found = recover(self._where, self._shard, kept.records, kept.marks, snapshot)
            kept.records = [record for record in kept.records if record.first_seq < found.keep_below]
            kept.marks = found.marks
            kept.payload_bytes = found.payload_bytes
            kept.holder = self
            kept.made = True
        self._is_open = True
        self._unknown = None
        return OpenReport(found.marks.head_seq, found.marks.epoch, found.cut, self._snapshots.faults)

    def close(self) -> None:
        """See Journal."""
        if self._is_open:
            self._kept.holder = None
        super().close()

    def claim(self) -> int:
        """See Journal."""
        kept = self._open_shard()
        with self._store.lock:
            kept.marks = Marks(kept.marks.epoch + 1, kept.marks.head_seq, kept.marks.trimmed_seq)
            return kept.marks.epoch

    def append(self, first_seq: int, last_seq: int, epoch: int, payload: bytes) -> None:
        """See Journal."""
        kept = self._open_shard()
        if self._unknown is not None:
            raise self._unknown
        check_append(first_seq, last_seq, payload)
        with self._store.lock:
            marks = kept.marks
            if epoch != marks.epoch or first_seq != marks.head_seq + 1:
                raise Fenced(self._where, first_seq, epoch, marks.epoch, marks.head_seq)
            limit = self._store.bytes_max
            if limit is not None and self._store.payload_bytes() + len(payload) > limit:
                raise JournalFull(self._where, "appending")
            fault, self._store.next_append = self._store.next_append, None
            if fault is not AppendFault.LOST:
                crc = record_crc(self._shard, first_seq, last_seq, epoch, payload)
                kept.records.append(Record(first_seq, last_seq, epoch, bytes(payload), crc))
                kept.payload_bytes += len(payload)
                kept.marks = Marks(epoch, last_seq, marks.trimmed_seq)
        if fault is not None:
            self._unknown = FateUnknown(self._where, first_seq, "the store was told to leave it open")
            raise self._unknown

    def resolve(self, first_seq: int, payload: bytes) -> bool:
        """See Journal."""
        place = self._look(first_seq)
        if first_seq <= place.marks.trimmed_seq:
            raise FateUnknown(self._where, first_seq, "it would have been trimmed meanwhile")
        self._unknown = None
        return place.record is not None and place.record.payload == payload

    def trim(self, upto_seq: int) -> int:
        """See Journal."""
        kept = self._open_shard()
        limit = min(upto_seq, self._snapshots.trim_limit())
        with self._store.lock:
            removed = [record for record in kept.records if record.last_seq <= limit]
            if removed:
                kept.records = kept.records[len(removed) :]
                kept.payload_bytes -= sum(len(record.payload) for record in removed)
                kept.marks = Marks(kept.marks.epoch, kept.marks.head_seq, removed[-1].last_seq)
            return kept.marks.trimmed_seq
