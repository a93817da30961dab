"""What every store does alike: check a stored batch, decide what to cut at the start, read in order."""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from metaservice.journal.errors import CorruptBatch, CorruptJournal, JournalRegressed, JournalTrimmed
from metaservice.journal.frame import BATCH_BYTES_MAX, check_shape, check_version
from metaservice.journal.port import Batch, CutReport
from metaservice.journal.snapshots import SnapshotInfo

_PLACE = struct.Struct(">qqqq")


@dataclass(frozen=True, slots=True)
class Record:
    """A batch with its place, as a store keeps it. `crc` binds the place to the payload."""

    first_seq: int
    last_seq: int
    epoch: int
    payload: bytes
    crc: int

    def batch(self) -> Batch:
        """The same without its checksum."""
        return Batch(self.first_seq, self.last_seq, self.epoch, self.payload)


@dataclass(frozen=True, slots=True)
class Marks:
    """What a store remembers beside its records."""

    epoch: int
    head_seq: int
    trimmed_seq: int


@dataclass(frozen=True, slots=True)
class Place:
    """One consistent look into a store: its marks, and the record that begins at the seq asked for."""

    marks: Marks
    record: Record | None


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the start makes of a journal: records from `keep_below` on are removed."""

    marks: Marks
    keep_below: int
    batches: int
    payload_bytes: int
    cut: CutReport | None


def record_crc(shard: int, first_seq: int, last_seq: int, epoch: int, payload: bytes) -> int:
    """The checksum of a record: a batch moved to another shard, seq or epoch does not pass."""
    return zlib.crc32(payload, zlib.crc32(_PLACE.pack(shard, first_seq, last_seq, epoch)))


def check_append(first_seq: int, last_seq: int, payload: bytes) -> None:
    """ValueError for what no journal takes, so that whatever was appended can be read again."""
    if not 1 <= first_seq <= last_seq:
        raise ValueError(f"a batch of seq {first_seq} to {last_seq} holds nothing")
    if len(payload) > BATCH_BYTES_MAX:
        raise ValueError(f"a batch has {BATCH_BYTES_MAX} bytes at most, not {len(payload)}")
    try:
        check_shape(payload)
    except CorruptBatch as error:
        raise ValueError(f"the payload is not a sealed batch: {error.reason}") from error


def damage(where: str, shard: int, record: Record) -> str | None:
    """What is wrong with a record taken for itself, or None. UnsupportedVersion for a whole one of a newer
    release.
    """
    if record_crc(shard, record.first_seq, record.last_seq, record.epoch, record.payload) != record.crc:
        return "its checksum does not match"
    try:
        check_shape(record.payload)
    except CorruptBatch as error:
        return error.reason
    check_version(record.payload, f"the batch at seq {record.first_seq} of {where}")
    return None


def recover(
    where: str,
    shard: int,
    records: Iterable[Record],
    stored: Marks,
    snapshot: SnapshotInfo | None,
) -> Recovery:
    """Decides the start: `records` in order of first_seq, `stored` marks, the newest whole snapshot.

    Damage is cut only where nothing whole comes after it; else CorruptJournal, for a cut would then drop
    batches that are good, and skipping would serve a state that never was.
    """
    head, epoch, batches, payload_bytes = stored.trimmed_seq, 0, 0, 0
    fault: str | None = None
    cut_batches = 0
    for record in records:
        wrong = damage(where, shard, record)
        if wrong is not None:
            fault = fault or wrong
            cut_batches += 1
        elif fault is not None:
            raise CorruptJournal(where, head + 1, f"{fault}, and whole batches follow")
        elif record.first_seq != head + 1:
            raise CorruptJournal(where, head + 1, f"the next batch begins at seq {record.first_seq}")
        elif record.epoch < epoch:
            raise CorruptJournal(where, head + 1, f"its epoch fell from {epoch} to {record.epoch}")
        else:
            head, epoch = record.last_seq, record.epoch
            batches += 1
            payload_bytes += len(record.payload)
    covered = snapshot.seq if snapshot is not None else 0
    if stored.trimmed_seq > covered:
        raise CorruptJournal(
            where, 1, f"it is trimmed up to seq {stored.trimmed_seq} and no whole snapshot reaches that far"
        )
    epoch = max(epoch, stored.epoch, snapshot.epoch if snapshot is not None else 0)
    if fault is None and stored.head_seq != head:
        fault = f"the head says seq {stored.head_seq}, the last whole batch ends at seq {head}"
    if fault is None and covered > head:
        raise CorruptJournal(
            where,
            head + 1,
            f"a snapshot of seq {covered} exists: the journal is an older copy than its snapshots",
        )
    if fault is not None and covered > head:
        # Cut below the snapshot: its state is whole and further on, so the journal goes on from there.
        reason = f"{fault}; the journal goes on from the snapshot of seq {covered}"
        return Recovery(Marks(epoch, covered, covered), 0, 0, 0, CutReport(covered + 1, cut_batches, reason))
    cut = CutReport(head + 1, cut_batches, fault) if fault is not None else None
    return Recovery(Marks(epoch, head, stored.trimmed_seq), head + 1, batches, payload_bytes, cut)


def read_batches(
    where: str, shard: int, look: Callable[[int], Place], inside: Callable[[int], bool], after_seq: int
) -> Iterator[Batch]:
    """`JournalReader.read` over a store: `look(seq)` is one consistent look, `inside(seq)` whether a batch
    spans it.
    """
    if after_seq < 0:
        raise ValueError(f"after_seq is a seq, not {after_seq}")
    seq, epoch = after_seq + 1, 0
    while True:
        place = look(seq)
        marks, record = place.marks, place.record
        if seq <= marks.trimmed_seq:
            raise JournalTrimmed(where, seq - 1, marks.trimmed_seq)
        if seq == marks.head_seq + 1:
            return
        if seq > marks.head_seq:
            raise JournalRegressed(where, marks.head_seq, seq - 1)
        if record is None:
            if seq == after_seq + 1 and inside(seq):
                raise ValueError(f"seq {after_seq} is inside a batch of {where}, not at the end of one")
            raise CorruptJournal(where, seq, "no batch begins here")
        wrong = damage(where, shard, record)
        if wrong is None and record.epoch < epoch:
            wrong = f"its epoch fell from {epoch} to {record.epoch}"
        if wrong is not None:
            raise CorruptJournal(where, seq, wrong)
        yield record.batch()
        seq, epoch = record.last_seq + 1, record.epoch
