"""The replicated journal: PostgreSQL holds it, and the shard's row there is the fence.

One statement checks epoch and head, moves the head and inserts the batch. No lock is taken and no session
state is used; who may append is decided by `claim()` alone. Seqs are given by the leader, never by the
database.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import asyncpg

from metaservice.journal.errors import (
    CorruptJournal,
    FateUnknown,
    Fenced,
    JournalClosed,
    JournalError,
    JournalFailed,
    JournalMissing,
    JournalRegressed,
    JournalUnavailable,
)
from metaservice.journal.port import Batch, JournalSize, OpenReport
from metaservice.journal.postgres_errors import QUEUE_FULL, NotMigrated, Unanswered, sqlstate
from metaservice.journal.postgres_session import PostgresSession, Rows, one_row
from metaservice.journal.postgres_settings import PostgresSettings
from metaservice.journal.postgres_snapshots import PostgresSnapshotStore
from metaservice.journal.postgres_statements import (
    PAGE_BYTES,
    PAGE_ROWS,
    TRIM_BATCHES,
    Statement,
    statements_of,
)
from metaservice.journal.records import Marks, Place, Record, check_append, read_batches, record_crc

NOTIFY_EVERY_S = 0.01
"""Hints are told one commit at a time in the whole database, so each append must not send one."""


class PostgresReader:
    """`JournalReader` on a shard whose leader may be appending; also reports and trims. See `open_reader`."""

    def __init__(self, settings: PostgresSettings, shard: int) -> None:
        self._settings = settings
        self._shard = shard
        self._where = f"journal {settings.place} shard {shard}"
        self._sql = statements_of(settings.schema)
        self._session = PostgresSession(settings, self._where)
        self._snapshots = PostgresSnapshotStore(settings, shard)
        self._is_open = False
        self._seen_seq = 0
        self._given: Record | None = None

    @property
    def snapshots(self) -> PostgresSnapshotStore:
        """See JournalReader."""
        return self._snapshots

    def head(self) -> int:
        """See JournalReader. JournalRegressed, once, when it is behind what was seen before."""
        return self._marks("asking for the head").head_seq

    def read(self, after_seq: int) -> Iterator[Batch]:
        """See JournalReader. Reads ahead by up to 4 MiB. When the last batch given ends at `after_seq`, it is
        compared with what is there now: JournalRegressed when another one has taken its place."""
        return read_batches(self._where, self._shard, _Pages(self).look, self._inside, after_seq)

    def size(self) -> JournalSize:
        """See JournalReader."""
        return JournalSize(*self._row("asking for the size", self._sql.size, {}))

    def report_follower(self, replica: str, applied_seq: int) -> None:
        """Tells how far a follower has got, so that nobody trims what it has not read.

        Stands for `follower_ms_max` of the database's time; a follower that stays silent longer may find
        JournalTrimmed and has to load a snapshot.
        """
        self._fetch(
            "reporting a follower", self._sql.report, {"replica": replica, "applied_seq": applied_seq}
        )

    def trim(self, upto_seq: int) -> int:
        """See Journal. A follower may call it too: whoever saved the snapshot."""
        limit = min(upto_seq, self._snapshots.trim_limit())
        slowest = self._row(
            "trimming", self._sql.slowest, {"follower_ms_max": self._settings.follower_ms_max}
        )["applied_seq"]
        if slowest is not None:
            limit = min(limit, slowest)
        batches = TRIM_BATCHES
        while batches >= TRIM_BATCHES:
            rows = self._fetch("trimming", self._sql.trim, {"upto_seq": limit, "rows": TRIM_BATCHES})
            batches = rows[0]["batches"] if rows else 0
        return self._marks("trimming").trimmed_seq

    def close(self) -> None:
        """See JournalReader."""
        self._is_open = False
        self._session.close()

    def _open_session(self) -> None:
        self._session.close()
        self._session = PostgresSession(self._settings, self._where)
        self._is_open = True

    def _fetch(self, doing: str, statement: Statement, values: dict[str, Any], size_bytes: int = 0) -> Rows:
        if not self._is_open:
            raise JournalClosed(self._where)
        return self._session.fetch(doing, statement, {"shard": self._shard, **values}, size_bytes)

    def _row(self, doing: str, statement: Statement, values: dict[str, Any]) -> asyncpg.Record:
        rows = self._fetch(doing, statement, values)
        if not rows:
            raise JournalMissing(self._where)
        return self._checked(doing, rows)

    def _checked(self, doing: str, rows: Rows) -> asyncpg.Record:
        try:
            return one_row(rows[:1], self._where, doing)
        except JournalUnavailable:
            self._session.drop()
            raise

    def _marks(self, doing: str) -> Marks:
        return self._seen(_marks_in(self._row(doing, self._sql.marks, {})))

    def _seen(self, marks: Marks) -> Marks:
        seen, self._seen_seq = self._seen_seq, marks.head_seq
        if marks.head_seq < seen:
            raise JournalRegressed(self._where, marks.head_seq, seen)
        return marks

    def _page(self, seq: int) -> tuple[Marks, deque[Record]]:
        """Marks and the records from `seq` on, up to the size of a page, of one moment."""
        given = self._given if self._given is not None and self._given.last_seq == seq - 1 else None
        rows = self._fetch(
            "reading",
            self._sql.page,
            {
                "from_seq": seq,
                "previous_seq": given.first_seq if given is not None else 0,
                "rows": PAGE_ROWS,
                "bytes": PAGE_BYTES,
            },
            PAGE_BYTES,
        )
        if not rows:
            raise JournalMissing(self._where)
        row = self._checked("reading", rows)
        marks = _marks_in(row)
        if given is not None and marks.head_seq >= given.last_seq > marks.trimmed_seq:
            found = (row["previous_epoch"], row["previous_crc"])
            if found != (given.epoch, given.crc):
                reason = f"another batch is in the place of seq {given.first_seq} to {given.last_seq}"
                self._given = None
                raise JournalRegressed(self._where, marks.head_seq, given.last_seq, reason)
        records = deque(
            Record(one["first_seq"], one["last_seq"], one["batch_epoch"], one["payload"], one["crc"])
            for one in rows
            if one["first_seq"] is not None
        )
        return marks, records

    def _inside(self, seq: int) -> bool:
        rows = self._fetch("reading", self._sql.inside, {"seq": seq})
        return bool(rows) and bool(rows[0]["inside"])


class _Pages:
    """`records.read_batches` looks at one place after the other; this answers from a page of them."""

    def __init__(self, reader: PostgresReader) -> None:
        self._reader = reader
        self._marks = Marks(0, 0, 0)
        self._records: deque[Record] = deque()

    def look(self, seq: int) -> Place:
        if not self._records or self._records[0].first_seq != seq:
            self._marks, self._records = self._reader._page(seq)
        if self._records and self._records[0].first_seq == seq:
            self._reader._given = record = self._records.popleft()
            return Place(self._marks, record)
        return Place(self._marks, None)


def open_reader(settings: PostgresSettings, shard: int) -> PostgresReader:
    """Opens a shard to read.

    Raises JournalMissing when no leader has opened it yet, JournalUnavailable or JournalFailed.
    """
    reader = PostgresReader(settings, shard)
    reader._is_open = True
    try:
        reader.head()
    except NotMigrated as error:
        reader.close()
        raise JournalMissing(reader._where) from error
    except BaseException:
        reader.close()
        raise
    return reader


class PostgresJournal(PostgresReader):
    """`Journal` in PostgreSQL. `holder` names the replica that claims, for people to read."""

    def __init__(self, settings: PostgresSettings, shard: int, holder: str) -> None:
        super().__init__(settings, shard)
        self._holder = holder
        self._token: UUID | None = None
        self._epoch = 0
        self._settlings = 0
        self._unknown: FateUnknown | None = None
        self._notify = settings.notify

    def open(self) -> OpenReport:
        """See Journal. Takes no lock and scans nothing: whoever claims last is the writer, and `read` checks
        what it gives. Makes the shard's row when it is missing."""
        if self._is_open:
            raise JournalFailed(self._where, "opening", "it is open already", "close it first")
        self._open_session()
        self._snapshots.forget()
        self._seen_seq = 0
        self._given = None
        self._unknown = None
        try:
            rows = self._fetch("opening", self._sql.opening, {})
            if not rows:
                self._fetch("opening", self._sql.make_shard, {})
                rows = self._fetch("opening", self._sql.opening, {})
            row = self._checked("opening", rows)
            self._check_marks(row)
        except BaseException:
            self.close()
            raise
        self._seen_seq = row["head_seq"]
        return OpenReport(row["head_seq"], row["epoch_seen"], None, ())

    def claim(self) -> int:
        """See Journal. After an error it may have happened, or may yet: then the epoch has moved on once
        more, and whoever appends is fenced and claims again."""
        row = self._row("claiming an epoch", self._sql.claim, {"holder": self._holder})
        self._epoch, self._token, self._settlings = row["epoch"], row["token"], 0
        # Another token: an append whose fate was open can no longer get in, and what is read from here on
        # says whether it did.
        self._unknown = None
        return self._epoch

    def append(self, first_seq: int, last_seq: int, epoch: int, payload: bytes) -> None:
        """See Journal."""
        if not self._is_open:
            raise JournalClosed(self._where)
        if self._unknown is not None:
            raise self._unknown
        check_append(first_seq, last_seq, payload)
        values = {
            "shard": self._shard,
            "first_seq": first_seq,
            "last_seq": last_seq,
            "before_seq": first_seq - 1,
            "epoch": epoch,
            "token": self._token,
            "settlings": self._settlings,
            "payload": payload,
            "payload_bytes": len(payload),
            "crc": record_crc(self._shard, first_seq, last_seq, epoch, payload),
        }
        try:
            rows = self._append(values, len(payload))
        except Unanswered as error:
            self._unknown = FateUnknown(self._where, first_seq, error.reason)
            raise self._unknown from error
        if not rows:
            marks = self._marks("appending")
            raise Fenced(self._where, first_seq, epoch, marks.epoch, marks.head_seq)
        self._seen_seq = last_seq

    def resolve(self, first_seq: int, payload: bytes) -> bool:
        """See Journal. Changes the shard's row first: that waits for an append which still holds it, and
        makes one that comes later miss its fence."""
        if not self._is_open:
            raise JournalClosed(self._where)
        try:
            self._session.drop()
            fence = {"epoch": self._epoch, "token": self._token, "settlings": self._settlings + 1}
            self._session.fetch("settling", self._sql.settle, {"shard": self._shard, **fence}, surely=True)
            self._settlings += 1
            marks, records = self._page(first_seq)
        except JournalError as error:
            self._unknown = FateUnknown(self._where, first_seq, f"it cannot be settled yet: {error}")
            raise self._unknown from error
        if first_seq <= marks.trimmed_seq:
            raise FateUnknown(self._where, first_seq, "it would have been trimmed meanwhile")
        self._unknown = None
        found = records[0] if records else None
        written = found is not None and found.first_seq == first_seq and found.payload == payload
        if written:
            assert found is not None
            self._seen_seq = max(self._seen_seq, found.last_seq)
        return written

    def _append(self, values: dict[str, Any], size_bytes: int) -> Rows:
        run, sql = self._session.fetch, self._sql
        if self._notify and self._session.rest(NOTIFY_EVERY_S):
            try:
                return run("appending", sql.append_and_notify, values, size_bytes, surely=True)
            except JournalError as error:
                if sqlstate(error.__cause__ or error) != QUEUE_FULL:
                    raise
                # A listener that reads no more fills the queue of the whole database. Followers poll anyway.
                self._notify = False
        return run("appending", sql.append, values, size_bytes, surely=True)

    def _check_marks(self, row: asyncpg.Record) -> None:
        head_seq, journal_seq, snapshot_seq = row["head_seq"], row["journal_seq"], row["snapshot_seq"]
        last_seq = row["trimmed_seq"] if journal_seq is None else journal_seq
        if last_seq != head_seq:
            raise CorruptJournal(
                self._where,
                min(last_seq, head_seq) + 1,
                f"the head says seq {head_seq}, the last batch ends at seq {last_seq}",
            )
        if snapshot_seq is not None and snapshot_seq > head_seq:
            raise CorruptJournal(
                self._where,
                head_seq + 1,
                f"a snapshot of seq {snapshot_seq} exists: the journal is an older copy than its snapshots",
            )


def _marks_in(row: asyncpg.Record) -> Marks:
    return Marks(row["epoch"], row["head_seq"], row["trimmed_seq"])
