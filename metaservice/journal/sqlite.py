"""The embedded journal: one SQLite file, its head and its batches moved in one transaction.

WAL with synchronous=FULL: a COMMIT that returned is on the disk. Snapshots lie in a directory beside the
file, one a shard. The writer lock is a file beside it too, one a shard, freed by the kernel when its holder
dies.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from metaservice.journal.errors import FateUnknown, Fenced, JournalClosed, JournalError, JournalFailed
from metaservice.journal.lock import FileLock
from metaservice.journal.port import Batch, JournalSize, OpenReport
from metaservice.journal.records import check_append, read_batches, record_crc, recover
from metaservice.journal.snapshot_files import FileSnapshotStore
from metaservice.journal.sqlite_database import SqliteDatabase, translated

TRIM_BATCHES = 1_000
"""Batches removed in one transaction: it bounds how far the write-ahead log grows."""

_MOVE_HEAD = """
    UPDATE shard SET head_seq = ?, batches = batches + 1, payload_bytes = payload_bytes + ?
    WHERE id = ? AND epoch = ? AND head_seq = ?
"""
_INSERT = "INSERT INTO journal (shard, first_seq, last_seq, epoch, payload, crc) VALUES (?, ?, ?, ?, ?, ?)"
_SETTLE = "UPDATE shard SET settlings = settlings + 1 WHERE id = ?"
_RECOVER = """
    UPDATE shard SET epoch = ?, head_seq = ?, trimmed_seq = ?, batches = ?, payload_bytes = ? WHERE id = ?
"""
_OLDEST = """
    SELECT count(*), coalesce(sum(length(payload)), 0), max(last_seq) FROM (
        SELECT last_seq, payload FROM journal WHERE shard = ? AND first_seq <= ? AND last_seq <= ?
        ORDER BY first_seq LIMIT ?
    )
"""
_TRIM = """
    UPDATE shard SET trimmed_seq = ?, batches = batches - ?, payload_bytes = payload_bytes - ? WHERE id = ?
"""


class SqliteReader:
    """`JournalReader` on a file that another process may be appending to. See `open_reader`."""

    def __init__(self, path: Path, shard: int) -> None:
        self._path = Path(path)
        self._shard = shard
        self._where = f"journal {self._path} shard {shard}"
        self._database = SqliteDatabase(self._path, shard, self._where)
        directory = self._path.with_name(self._path.name + ".snapshots")
        self._snapshots = FileSnapshotStore(directory / f"shard-{shard}")

    @property
    def snapshots(self) -> FileSnapshotStore:
        """See JournalReader."""
        return self._snapshots

    def head(self) -> int:
        """See JournalReader."""
        return self._database.look(0).marks.head_seq

    def read(self, after_seq: int) -> Iterator[Batch]:
        """See JournalReader."""
        return read_batches(self._where, self._shard, self._database.look, self._database.inside, after_seq)

    def report_follower(self, replica: str, applied_seq: int) -> None:
        """See JournalReader: nobody else follows."""

    def size(self) -> JournalSize:
        """See JournalReader."""
        return self._database.size()

    def close(self) -> None:
        """See JournalReader."""
        self._database.close()


def open_reader(path: Path, shard: int) -> SqliteReader:
    """Opens a journal to read, without its lock.

    Raises JournalMissing, CorruptJournal or UnsupportedVersion.
    """
    reader = SqliteReader(path, shard)
    try:
        reader._database.connect(reading=True)
        reader.head()
    except BaseException:
        reader.close()
        raise
    return reader


class SqliteJournal(SqliteReader):
    """`Journal` in the SQLite file at `path`; its directory is made when missing."""

    def __init__(self, path: Path, shard: int) -> None:
        super().__init__(path, shard)
        self._lock = FileLock(self._path.with_name(f"{self._path.name}.{shard}.lock"))
        self._is_open = False
        self._unknown: FateUnknown | None = None

    def open(self) -> OpenReport:
        """See Journal."""
        if self._is_open:
            raise JournalFailed(self._where, "opening", "it is open already")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(self._where)
        except OSError as error:
            raise JournalFailed(self._where, "opening", error.strerror or str(error)) from error
        try:
            self._database.connect(reading=False)
            self._database.check_pages()
            report = self._recover()
        except BaseException:
            self.close()
            raise
        self._is_open = True
        self._unknown = None
        return report

    def close(self) -> None:
        """See Journal."""
        self._is_open = False
        super().close()
        self._lock.release()

    def claim(self) -> int:
        """See Journal."""
        self._need_open()
        with self._database.transaction("claiming an epoch") as run:
            run.execute("UPDATE shard SET epoch = epoch + 1 WHERE id = ?", (self._shard,))
            (epoch,) = run.execute("SELECT epoch FROM shard WHERE id = ?", (self._shard,)).fetchone()
        return int(epoch)

    def append(self, first_seq: int, last_seq: int, epoch: int, payload: bytes) -> None:
        """See Journal."""
        self._need_open()
        if self._unknown is not None:
            raise self._unknown
        check_append(first_seq, last_seq, payload)
        row = (self._shard, first_seq, last_seq, epoch, payload)
        crc = record_crc(*row)
        run = self._database.connection
        try:
            run.execute("BEGIN IMMEDIATE")
            moved = run.execute(
                _MOVE_HEAD, (last_seq, len(payload), self._shard, epoch, first_seq - 1)
            ).rowcount
            if moved:
                run.execute(_INSERT, (*row, crc))
                self._commit(run)
                return
            self._database.roll_back()
        except sqlite3.Error as error:
            raise self._failed_append(error, first_seq) from error
        marks = self._database.look(0).marks
        raise Fenced(self._where, first_seq, epoch, marks.epoch, marks.head_seq)

    def resolve(self, first_seq: int, payload: bytes) -> bool:
        """See Journal."""
        self._need_open()
        try:
            # A failed sync may have left a whole commit in the log that only a later recovery would find. A
            # new connection sees what recovery sees; a commit of our own over it makes that final; the
            # checkpoint writes it to the database file, for a page whose sync failed may never be synced.
            self._database.close()
            self._database.connect(reading=False)
            with self._database.transaction("settling") as run:
                run.execute(_SETTLE, (self._shard,))
            with self._database.translating("settling"):
                (busy, _, _) = run.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
            if busy:
                raise FateUnknown(self._where, first_seq, "a reader holds the write-ahead log")
            place = self._database.look(first_seq)
        except JournalError as error:
            self._unknown = FateUnknown(self._where, first_seq, f"it cannot be settled yet: {error}")
            raise self._unknown from error
        if first_seq <= place.marks.trimmed_seq:
            raise FateUnknown(self._where, first_seq, "it would have been trimmed meanwhile")
        self._unknown = None
        return place.record is not None and place.record.payload == payload

    def trim(self, upto_seq: int) -> int:
        """See Journal."""
        self._need_open()
        limit = min(upto_seq, self._snapshots.trim_limit())
        while True:
            with self._database.transaction("trimming") as run:
                batches, payload_bytes, last_seq = run.execute(
                    _OLDEST, (self._shard, limit, limit, TRIM_BATCHES)
                ).fetchone()
                if batches:
                    run.execute(
                        "DELETE FROM journal WHERE shard = ? AND first_seq <= ?", (self._shard, last_seq)
                    )
                    run.execute(_TRIM, (last_seq, batches, payload_bytes, self._shard))
            if batches < TRIM_BATCHES:
                return self._database.look(0).marks.trimmed_seq

    def _recover(self) -> OpenReport:
        snapshot = self._snapshots.latest()
        faults = self._snapshots.faults
        stored = self._database.look(0).marks
        with self._database.translating("verifying"):
            found = recover(self._where, self._shard, self._database.records(), stored, snapshot)
        marks = found.marks
        with self._database.transaction("cutting the tail") as run:
            run.execute(
                "DELETE FROM journal WHERE shard = ? AND first_seq >= ?", (self._shard, found.keep_below)
            )
            run.execute(
                _RECOVER,
                (
                    marks.epoch,
                    marks.head_seq,
                    marks.trimmed_seq,
                    found.batches,
                    found.payload_bytes,
                    self._shard,
                ),
            )
        return OpenReport(marks.head_seq, marks.epoch, found.cut, faults)

    def _commit(self, run: sqlite3.Connection) -> None:
        run.execute("COMMIT")

    def _failed_append(self, error: sqlite3.Error, first_seq: int) -> JournalError:
        """Only what is known not to be written may say so: no space and busy, with a look at the head to be
        sure.
        """
        known = translated(error, self._where, "appending")
        with suppress(sqlite3.Error, JournalError):
            self._database.roll_back()
            in_place = self._database.look(0).marks.head_seq < first_seq
            if in_place and not isinstance(known, JournalFailed):
                return known
        self._unknown = FateUnknown(self._where, first_seq, str(error))
        return self._unknown

    def _need_open(self) -> None:
        if not self._is_open:
            raise JournalClosed(self._where)
