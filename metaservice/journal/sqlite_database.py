"""One connection to a journal database: schema, statements, and SQLite's errors as ours."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from metaservice.journal.errors import (
    CorruptJournal,
    JournalBusy,
    JournalClosed,
    JournalError,
    JournalFailed,
    JournalFull,
    JournalMissing,
    UnsupportedVersion,
)
from metaservice.journal.port import JournalSize
from metaservice.journal.records import Marks, Place, Record

SCHEMA_VERSION = 1
APPLICATION_ID = 0x55434D4A  # "UCMJ"
BUSY_WAIT_MS = 5_000
WAL_BYTES_KEPT = 64 * 1024 * 1024

# One b-tree a table: no index that a damaged page could make disagree with its rows.
_SCHEMA = (
    """CREATE TABLE shard (
        id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, head_seq INTEGER NOT NULL,
        trimmed_seq INTEGER NOT NULL, batches INTEGER NOT NULL, payload_bytes INTEGER NOT NULL,
        settlings INTEGER NOT NULL
    )""",
    """CREATE TABLE journal (
        shard INTEGER NOT NULL, first_seq INTEGER NOT NULL, last_seq INTEGER NOT NULL, epoch INTEGER NOT NULL,
        payload BLOB NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (shard, first_seq)
    ) WITHOUT ROWID""",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_LOOK = """
    SELECT s.epoch, s.head_seq, s.trimmed_seq, j.first_seq, j.last_seq, j.epoch, j.payload, j.crc
    FROM shard AS s LEFT JOIN journal AS j ON j.shard = s.id AND j.first_seq = ? WHERE s.id = ?
"""
_RECORDS = "SELECT first_seq, last_seq, epoch, payload, crc FROM journal WHERE shard = ? ORDER BY first_seq"
_INSIDE = """
    SELECT last_seq >= ? FROM journal WHERE shard = ? AND first_seq < ? ORDER BY first_seq DESC LIMIT 1
"""

_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def translated(error: sqlite3.Error, where: str, doing: str) -> JournalError:
    """SQLite's error as one of ours, for statements that fail as a whole: a COMMIT needs more thought."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    primary = code & 0xFF
    if primary in _FULL or code in _FULL:
        return JournalFull(where, doing)
    if primary in _BUSY:
        return JournalBusy(where, BUSY_WAIT_MS)
    if primary in _CORRUPT:
        return CorruptJournal(where, None, f"SQLite says: {error}")
    return JournalFailed(where, doing, f"{error} ({getattr(error, 'sqlite_errorname', 'no code')})")


class SqliteDatabase:
    """A connection and what is said over it. Used by one thread at a time."""

    def __init__(self, path: Path, shard: int, where: str) -> None:
        self._path = path
        self._shard = shard
        self._where = where
        self._connection: sqlite3.Connection | None = None

    @property
    def connection(self) -> sqlite3.Connection:
        """The open connection, or JournalClosed."""
        if self._connection is None:
            raise JournalClosed(self._where)
        return self._connection

    def connect(self, *, reading: bool) -> None:
        """Opens the database: to write, making it when it is new, or only to read one that exists."""
        if reading and not self._path.exists():
            raise JournalMissing(self._where)
        # A reader opens for writing too, though it never writes: it may have to recover the log of a killed
        # writer.
        uri = f"{self._path.absolute().as_uri()}?mode={'rw' if reading else 'rwc'}"
        with self.translating("opening"):
            self._connection = sqlite3.connect(
                uri, uri=True, timeout=BUSY_WAIT_MS / 1000, isolation_level=None, check_same_thread=False
            )
            # A damaged row may hold text where bytes belong; it is to be found by checksum, not by a decoder.
            self._connection.text_factory = bytes
            self._check_identity(may_be_new=not reading)
            if reading:
                self._connection.execute("PRAGMA query_only = ON")
                return
            self._connection.execute("PRAGMA secure_delete = OFF")
            mode = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode not in ("wal", b"wal"):
                raise JournalFailed(self._where, "opening", "its file system cannot hold a write-ahead log")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
            with self.transaction("making the schema") as run:
                if not run.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    for statement in _SCHEMA:
                        run.execute(statement)
                run.execute("INSERT OR IGNORE INTO shard VALUES (?, 0, 0, 0, 0, 0, 0)", (self._shard,))

    def close(self) -> None:
        """Closes the connection; nothing happens when there is none."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with suppress(sqlite3.Error):
                connection.close()

    @contextmanager
    def translating(self, doing: str) -> Iterator[None]:
        """SQLite's errors inside become ours."""
        try:
            yield
        except sqlite3.Error as error:
            raise translated(error, self._where, doing) from error

    @contextmanager
    def transaction(self, doing: str) -> Iterator[sqlite3.Connection]:
        """BEGIN IMMEDIATE .. COMMIT; rolled back when anything inside raises."""
        connection = self.connection
        with self.translating(doing):
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                self.roll_back()
                raise

    def roll_back(self) -> None:
        """Leaves the open transaction, if SQLite has not done so itself."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def look(self, seq: int) -> Place:
        """Marks, and the record that begins at `seq`, in one statement and so of one moment."""
        with self.translating("reading"):
            row = self.connection.execute(_LOOK, (seq, self._shard)).fetchone()
        if row is None:
            raise JournalMissing(self._where)
        if not all(isinstance(mark, int) for mark in row[:3]):
            raise CorruptJournal(self._where, None, "the row of its head holds no numbers")
        return Place(Marks(*row[:3]), _record(row[3:]) if row[3] is not None else None)

    def inside(self, seq: int) -> bool:
        """Whether a batch begins before `seq` and holds it."""
        with self.translating("reading"):
            row = self.connection.execute(_INSIDE, (seq, self._shard, seq)).fetchone()
        return row is not None and bool(row[0])

    def records(self) -> Iterator[Record]:
        """All records of the shard in order of their first seq."""
        for row in self.connection.execute(_RECORDS, (self._shard,)):
            yield _record(row)

    def size(self) -> JournalSize:
        """From counters that move in the same transaction as the rows."""
        with self.translating("reading"):
            row = self.connection.execute(
                "SELECT batches, payload_bytes FROM shard WHERE id = ?", (self._shard,)
            ).fetchone()
        if row is None:
            raise JournalMissing(self._where)
        return JournalSize(*row)

    def check_pages(self) -> None:
        """CorruptJournal when SQLite finds a malformed page anywhere in the file."""
        with self.translating("verifying"):
            (verdict,) = self.connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict not in ("ok", b"ok"):
            text = verdict.decode(errors="replace") if isinstance(verdict, bytes) else str(verdict)
            raise CorruptJournal(self._where, None, f"SQLite says: {text}")

    def _check_identity(self, *, may_be_new: bool) -> None:
        run = self.connection
        tables = run.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        application = run.execute("PRAGMA application_id").fetchone()[0]
        version = run.execute("PRAGMA user_version").fetchone()[0]
        if not tables and not application:
            if not may_be_new:
                raise JournalMissing(self._where)
        elif application != APPLICATION_ID:
            raise CorruptJournal(self._where, None, "it is a database of another program")
        elif version > SCHEMA_VERSION:
            raise UnsupportedVersion(self._where, version, SCHEMA_VERSION)


def _record(row: tuple[object, ...]) -> Record:
    # SQLite keeps whatever type a damaged page pretends; such a row must fail its checksum, not raise.
    first_seq, last_seq, epoch, payload, crc = row
    numbers = [value if isinstance(value, int) else -1 for value in (first_seq, last_seq, epoch, crc)]
    return Record(
        numbers[0], numbers[1], numbers[2], payload if isinstance(payload, bytes) else b"", numbers[3]
    )
