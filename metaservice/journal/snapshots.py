"""Snapshots of a shard's state: the port, and the store that keeps them in memory.

A snapshot stands for every event up to `seq`. Two are kept: when the newest is damaged the one before it
and the journal behind it still give the same state.
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from metaservice.journal.errors import CorruptSnapshot

KEPT = 2
"""Whole snapshots that stay after a save."""

CHUNK_BYTES_MAX = 64 * 1024 * 1024
"""A bound on what one step of a load allocates."""

DIGEST_BYTES_MAX = 64


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A whole, verified snapshot."""

    seq: int
    epoch: int
    digest: bytes
    """The digest of the state, as its maker gave it; whoever loads compares it with the digest of what was
    rebuilt.
    """
    chunks: int
    size_bytes: int
    """The sum of its chunks."""
    location: str
    """Where it is, for messages."""


@dataclass(frozen=True, slots=True)
class SnapshotFault:
    """A snapshot that was passed over, and why."""

    location: str
    reason: str


class SnapshotStore(Protocol):
    """The snapshots of one shard. Every method may be called from any thread, and from another process than
    the journal's owner where the store is a shared one.
    """

    @property
    def faults(self) -> tuple[SnapshotFault, ...]:
        """What the last look at the snapshots had to pass over."""
        ...

    def save(self, seq: int, epoch: int, digest: bytes, chunks: Iterable[bytes]) -> SnapshotInfo:
        """Keeps a snapshot; it is durable and was read back when this returns, and older ones than `KEPT`
        are gone.

        No chunk at all is a snapshot of an empty state. Raises JournalFull (earlier snapshots are
        untouched), JournalFailed, JournalLocked (another save is going on), CorruptSnapshot (what was read
        back is not what was written), ValueError for a negative seq, an overlong digest or chunk. What
        `chunks` raises passes through; nothing is kept.
        """
        ...

    def latest(self) -> SnapshotInfo | None:
        """The newest whole snapshot; damaged ones are passed over and named in `faults`."""
        ...

    def list(self) -> tuple[SnapshotInfo, ...]:
        """All whole snapshots, newest first."""
        ...

    def load(self, info: SnapshotInfo) -> Iterator[bytes]:
        """The chunks, each checked before it is given. Raises CorruptSnapshot, also midway: drop what was
        built.
        """
        ...

    def trim_limit(self) -> int:
        """How far the journal may be trimmed: the seq of the second newest whole snapshot, 0 when there are
        not two.
        """
        ...


def chunk_crc(index: int, chunk: bytes) -> int:
    """The checksum of a chunk at its place."""
    return zlib.crc32(chunk, index)


def check_save(seq: int, epoch: int, digest: bytes) -> None:
    """ValueError for a snapshot that could not be read again."""
    if seq < 0 or epoch < 0:
        raise ValueError(f"a snapshot has a seq and an epoch, not {seq} and {epoch}")
    if len(digest) > DIGEST_BYTES_MAX:
        raise ValueError(f"a digest has {DIGEST_BYTES_MAX} bytes at most, not {len(digest)}")


def check_chunk(chunk: bytes) -> None:
    """ValueError for a chunk that a load would refuse."""
    if len(chunk) > CHUNK_BYTES_MAX:
        raise ValueError(f"a chunk has {CHUNK_BYTES_MAX} bytes at most, not {len(chunk)}")


@dataclass(slots=True)
class StoredSnapshot:
    """A snapshot in memory: chunks with their checksums, so that a test can damage one and see it found."""

    info: SnapshotInfo
    chunks: list[tuple[int, bytes]] = field(default_factory=list)


class MemorySnapshotStore:
    """Snapshots in a dict that outlives the journal object, as a disk would."""

    def __init__(self, kept: dict[int, StoredSnapshot], where: str) -> None:
        self._kept = kept
        self._where = where
        self._faults: tuple[SnapshotFault, ...] = ()

    @property
    def faults(self) -> tuple[SnapshotFault, ...]:
        """See SnapshotStore."""
        return self._faults

    def save(self, seq: int, epoch: int, digest: bytes, chunks: Iterable[bytes]) -> SnapshotInfo:
        """See SnapshotStore."""
        check_save(seq, epoch, digest)
        stored: list[tuple[int, bytes]] = []
        for index, chunk in enumerate(chunks):
            check_chunk(chunk)
            stored.append((chunk_crc(index, chunk), bytes(chunk)))
        size = sum(len(chunk) for _, chunk in stored)
        info = SnapshotInfo(seq, epoch, bytes(digest), len(stored), size, f"{self._where} snapshot {seq}")
        self._kept[seq] = StoredSnapshot(info, stored)
        whole = self.list()
        for old in [seq for seq in self._kept if len(whole) >= KEPT and seq < whole[KEPT - 1].seq]:
            del self._kept[old]
        return info

    def latest(self) -> SnapshotInfo | None:
        """See SnapshotStore."""
        return next(iter(self.list()), None)

    def list(self) -> tuple[SnapshotInfo, ...]:
        """See SnapshotStore."""
        whole: list[SnapshotInfo] = []
        faults: list[SnapshotFault] = []
        kept = list(self._kept.values())  # a copy: another thread may save meanwhile
        for stored in sorted(kept, key=lambda one: one.info.seq, reverse=True):
            try:
                for _ in self.load(stored.info):
                    pass
            except CorruptSnapshot as error:
                faults.append(SnapshotFault(stored.info.location, error.reason))
            else:
                whole.append(stored.info)
        self._faults = tuple(faults)
        return tuple(whole)

    def load(self, info: SnapshotInfo) -> Iterator[bytes]:
        """See SnapshotStore."""
        stored = self._kept.get(info.seq)
        if stored is None or stored.info != info:
            raise CorruptSnapshot(info.location, "it was removed or replaced")
        return self._chunks(stored)

    def trim_limit(self) -> int:
        """See SnapshotStore."""
        whole = self.list()
        return whole[KEPT - 1].seq if len(whole) >= KEPT else 0

    @staticmethod
    def _chunks(stored: StoredSnapshot) -> Iterator[bytes]:
        for index, (crc, chunk) in enumerate(list(stored.chunks)):
            if chunk_crc(index, chunk) != crc:
                raise CorruptSnapshot(stored.info.location, f"the checksum of chunk {index} does not match")
            yield chunk
