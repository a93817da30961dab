"""Snapshots as rows: each save writes rows of its own, and one statement makes them count.

Every call has a connection of its own for as long as it lasts, so that a long save or load holds nothing else
up, and an idle shard keeps none.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from uuid import UUID

import asyncpg

from metaservice.journal.errors import CorruptSnapshot, JournalError, JournalFailed
from metaservice.journal.postgres_errors import Unanswered
from metaservice.journal.postgres_session import PostgresSession, one_row
from metaservice.journal.postgres_settings import PostgresSettings
from metaservice.journal.postgres_statements import SAVE_IDLE_S, statements_of
from metaservice.journal.snapshots import (
    CHUNK_BYTES_MAX,
    KEPT,
    SnapshotFault,
    SnapshotInfo,
    check_chunk,
    check_save,
    chunk_crc,
)


class PostgresSnapshotStore:
    """`SnapshotStore` of one shard. Savers do not disturb each other; of two with the same seq the later one
    stays."""

    def __init__(self, settings: PostgresSettings, shard: int) -> None:
        self._settings = settings
        self._shard = shard
        self._where = f"journal {settings.place} shard {shard}"
        self._sql = statements_of(settings.schema)
        self._faults: tuple[SnapshotFault, ...] = ()
        self._lock = threading.Lock()
        # A snapshot that was read whole once is not read again: its rows never change.
        self._verified: dict[UUID, SnapshotInfo] = {}

    @property
    def faults(self) -> tuple[SnapshotFault, ...]:
        """See SnapshotStore."""
        return self._faults

    def save(self, seq: int, epoch: int, digest: bytes, chunks: Iterable[bytes]) -> SnapshotInfo:
        """See SnapshotStore. What a saver that was killed has left is removed by a later save."""
        check_save(seq, epoch, digest)
        with closing(self._session()) as session:
            values = {"shard": self._shard, "seq": seq, "epoch": epoch, "digest": digest}
            (row,) = session.fetch("saving a snapshot", self._sql.begin_save, values)
            try:
                info = self._write(session, row["id"], seq, epoch, digest, chunks)
            except BaseException:
                with suppress(JournalError):
                    session.fetch("dropping a snapshot", self._sql.drop_save, {"id": row["id"]})
                raise
            with self._lock:
                self._verified[row["id"]] = info
            self._clean(session)
        return info

    def latest(self) -> SnapshotInfo | None:
        """See SnapshotStore. The first look at a snapshot reads it whole; later ones do not."""
        return next(iter(self._newest(1)), None)

    def list(self) -> tuple[SnapshotInfo, ...]:
        """See SnapshotStore."""
        return tuple(self._newest(None))

    def load(self, info: SnapshotInfo) -> Iterator[bytes]:
        """See SnapshotStore. JournalUnavailable when the database cannot be asked, also midway."""
        save = UUID(info.location.rsplit(" ", 1)[1])
        with closing(self._session()) as session:
            rows = session.fetch("loading a snapshot", self._sql.snapshot, {"id": save})
            if not rows or self._info(rows[0]) != info:
                raise CorruptSnapshot(info.location, "it was removed or replaced")
            yield from self._chunks(session, save, info)

    def trim_limit(self) -> int:
        """See SnapshotStore."""
        whole = self._newest(KEPT)
        return whole[KEPT - 1].seq if len(whole) >= KEPT else 0

    def forget(self) -> None:
        """Whatever was verified is verified anew when it is looked at next."""
        with self._lock:
            self._verified.clear()

    def _session(self) -> PostgresSession:
        return PostgresSession(self._settings, self._where)

    def _info(self, row: asyncpg.Record) -> SnapshotInfo:
        location = f"{self._where} snapshot {row['seq']} id {row['id']}"
        return SnapshotInfo(
            row["seq"], row["epoch"], row["digest"], row["chunks"], row["size_bytes"], location
        )

    def _write(
        self,
        session: PostgresSession,
        save: UUID,
        seq: int,
        epoch: int,
        digest: bytes,
        chunks: Iterable[bytes],
    ) -> SnapshotInfo:
        count = size = 0
        for chunk in chunks:
            check_chunk(chunk)
            values = {"id": save, "number": count, "crc": chunk_crc(count, chunk), "payload": chunk}
            if not session.fetch("saving a snapshot", self._sql.save_chunk, values, len(chunk)):
                raise self._abandoned()
            count += 1
            size += len(chunk)
        location = f"{self._where} snapshot {seq} id {save}"
        info = SnapshotInfo(seq, epoch, bytes(digest), count, size, location)
        for _ in self._chunks(session, save, info):
            pass
        values = {"id": save, "chunks": count, "size_bytes": size}
        try:
            rows = session.fetch("saving a snapshot", self._sql.end_save, values)
        except Unanswered:
            rows = session.fetch("saving a snapshot", self._sql.snapshot, {"id": save})
        if not rows:
            raise self._abandoned()
        return info

    def _abandoned(self) -> JournalFailed:
        reason = f"nothing was written for {SAVE_IDLE_S} s, and another save removed it"
        return JournalFailed(self._where, "saving a snapshot", reason)

    def _clean(self, session: PostgresSession) -> None:
        """Removes what newer snapshots have made superfluous. The snapshot is saved whatever happens here,
        and the next save tries again."""
        whole = self._newest(KEPT, session)
        below_seq = whole[KEPT - 1].seq if len(whole) >= KEPT else 0
        values = {"shard": self._shard, "below_seq": below_seq, "idle_s": SAVE_IDLE_S}
        with suppress(JournalError):
            session.fetch("removing old snapshots", self._sql.drop_replaced, {"shard": self._shard})
            session.fetch("removing old snapshots", self._sql.drop_old, values)

    def _newest(self, count: int | None, session: PostgresSession | None = None) -> Sequence[SnapshotInfo]:
        if session is None:
            with closing(self._session()) as own:
                return self._newest(count, own)
        whole: list[SnapshotInfo] = []
        faults: list[SnapshotFault] = []
        for row in session.fetch("looking for snapshots", self._sql.snapshots, {"shard": self._shard}):
            one_row([row], self._where, "looking for snapshots")
            if count is not None and len(whole) >= count:
                break
            info = self._info(row)
            if any(info.seq == other.seq for other in whole):
                continue  # saved again: the later one stands first
            try:
                self._verify(session, row["id"], info)
            except CorruptSnapshot as error:
                faults.append(SnapshotFault(info.location, error.reason))
            else:
                whole.append(info)
        self._faults = tuple(faults)
        return whole

    def _verify(self, session: PostgresSession, save: UUID, info: SnapshotInfo) -> None:
        with self._lock:
            if self._verified.get(save) == info:
                return
        for _ in self._chunks(session, save, info):
            pass
        with self._lock:
            self._verified[save] = info

    def _chunks(self, session: PostgresSession, save: UUID, info: SnapshotInfo) -> Iterator[bytes]:
        size, bytes_max = 0, min(CHUNK_BYTES_MAX, info.size_bytes)
        for number in range(info.chunks):
            values = {"id": save, "number": number}
            rows = session.fetch("loading a snapshot", self._sql.chunk, values, bytes_max)
            if not rows:
                raise CorruptSnapshot(info.location, f"chunk {number} is not there")
            chunk: bytes = rows[0]["payload"]
            if chunk_crc(number, chunk) != rows[0]["crc"]:
                raise CorruptSnapshot(info.location, f"the checksum of chunk {number} does not match")
            size += len(chunk)
            yield chunk
        if size != info.size_bytes:
            raise CorruptSnapshot(info.location, "its chunks are not as many bytes as it should have")
