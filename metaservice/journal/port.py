"""What a journal promises, whatever keeps it.

One object is one shard's journal in one process. Its methods block; the caller runs them in one dedicated
thread. Seqs count from 1 without a hole; a batch holds `first_seq..last_seq`; head 0 means empty.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from metaservice.journal.snapshots import SnapshotFault, SnapshotStore


@dataclass(frozen=True, slots=True)
class Batch:
    """One append, as it was written and verified when read."""

    first_seq: int
    last_seq: int
    epoch: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class CutReport:
    """What `open()` cut off. Operators must hear of it: what was cut may have been acknowledged."""

    first_seq_cut: int
    batches_cut: int
    """Damaged batches removed; 0 when batches that the head promised were not there at all."""
    reason: str


@dataclass(frozen=True, slots=True)
class OpenReport:
    """The state that `open()` found, after the cut if there was one."""

    head_seq: int
    epoch: int
    """The largest epoch ever claimed; 0 when none was."""
    last_cut: CutReport | None
    snapshot_faults: tuple[SnapshotFault, ...]
    """Snapshots that were passed over because they are damaged."""


@dataclass(frozen=True, slots=True)
class JournalSize:
    """What the journal holds behind its snapshots: batches, and the bytes of their payloads."""

    batches: int
    bytes: int


class JournalReader(Protocol):
    """The half that another process may use while the owner appends."""

    @property
    def snapshots(self) -> SnapshotStore:
        """The snapshots of this shard. Its methods may be called from any thread."""
        ...

    def head(self) -> int:
        """The seq of the last durable event."""
        ...

    def read(self, after_seq: int) -> Iterator[Batch]:
        """Every batch after `after_seq`, in order, up to the head at the time that the iterator gets there.

        `after_seq` is 0, a snapshot's seq, or the `last_seq` of a batch (else ValueError). Each batch is
        checked for contiguity and checksum: CorruptJournal names the seq. JournalTrimmed when what is asked
        for was trimmed, also midway, unless the store had read it ahead. JournalRegressed when the journal
        ends before `after_seq`. JournalUnavailable when the store cannot be asked. Appends and trims may go
        on between two batches.
        """
        ...

    def report_follower(self, replica: str, applied_seq: int) -> None:
        """A replica follows, and has applied so much: trimming waits for it, as long as it goes on reporting.
        Nothing to do where no other process follows.
        """
        ...

    def size(self) -> JournalSize:
        """Cheap enough for a metric: it scans nothing."""
        ...

    def close(self) -> None:
        """Lets go of everything, the lock too. May be called twice."""
        ...


class Journal(JournalReader, Protocol):
    """A shard's journal, held by its one writer."""

    def open(self) -> OpenReport:
        """Takes the writer lock, verifies every batch and the snapshots, and cuts a damaged tail. A store
        that replicas share takes no lock, for `claim()` is the fence there, and scans nothing: whoever reads
        finds damage, and nothing is cut.

        Raises JournalLocked, CorruptJournal (damage that a cut would not mend), UnsupportedVersion or
        JournalUnavailable; the journal is then closed and unchanged.
        """
        ...

    def claim(self) -> int:
        """A new epoch: durable, and larger than any that this journal, its batches or its snapshots ever saw.

        From its return on, appends of every older epoch are fenced.
        """
        ...

    def append(self, first_seq: int, last_seq: int, epoch: int, payload: bytes) -> None:
        """One batch, durable when this returns. `payload` is a sealed frame (`codec.encode_batch`).

        Raises Fenced unless `epoch` is the newest claimed and `first_seq` is head + 1; JournalFull,
        JournalBusy and JournalUnavailable (not written, try again); JournalRegressed (not written either);
        FateUnknown, after which every append raises it until `resolve()` has answered; ValueError for
        `last_seq < first_seq` or a payload that is no frame.
        """
        ...

    def resolve(self, first_seq: int, payload: bytes) -> bool:
        """After FateUnknown: whether that very batch is in, durably. False is final too: it can no longer
        get in.

        Raises FateUnknown as long as the store cannot say.
        """
        ...

    def trim(self, upto_seq: int) -> int:
        """Removes whole batches up to `upto_seq`, and returns the seq up to which the journal is trimmed now.

        Never past `snapshots.trim_limit()`, so that a damaged newest snapshot can still be replaced by the
        one before it and the journal; nor, where replicas share the store, past the slowest live follower.
        Call `snapshots.latest()` in another thread first: verifying a large snapshot here would hold the
        appends up. May raise JournalFull, having trimmed a part.
        """
        ...
