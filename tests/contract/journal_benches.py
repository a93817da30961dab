"""The stores that the journal contract runs over, each with the tools to damage it as a disk would.

Another store joins by one class and one entry in the `bench` fixture of conftest.py.
"""

import dataclasses
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from metaservice.journal import frame, memory, sqlite
from metaservice.journal.memory import AppendFault, MemoryJournal, MemoryStore
from metaservice.journal.port import Batch, Journal, JournalReader
from metaservice.journal.sqlite import SqliteJournal


class JournalBench(ABC):
    """One store under test. Damage is done while no journal is open."""

    scans_at_open = True
    """Whether a start verifies every batch and snapshot, and so finds the damage that a reader would."""
    reads_ahead = False
    """Whether a read may give what was trimmed after it had begun."""

    @abstractmethod
    def journal(self, shard: int = 0) -> Journal:
        """Another object on the same store, not open."""

    @abstractmethod
    def reader(self, shard: int = 0) -> JournalReader:
        """An open reader."""

    @abstractmethod
    def change_record(self, first_seq: int, **values: object) -> None:
        """Overwrites columns of the stored record, as rot would."""

    @abstractmethod
    def drop_record(self, first_seq: int) -> None:
        """Loses one record."""

    @abstractmethod
    def payload(self, first_seq: int) -> bytes:
        """The stored payload."""

    @abstractmethod
    def set_mark(self, name: str, value: int) -> None:
        """Overwrites `epoch`, `head_seq` or `trimmed_seq`."""

    @abstractmethod
    def damage_snapshot(self, seq: int) -> None:
        """Flips one bit in the last chunk of a snapshot."""

    @abstractmethod
    def lose_snapshot(self, seq: int) -> None:
        """Removes a snapshot behind the store's back."""

    @abstractmethod
    def fill(self, journal: Journal) -> None:
        """No space is left for this open journal."""

    @abstractmethod
    def make_room(self, journal: Journal) -> None:
        """There is space again."""

    @abstractmethod
    def leave_fate_open(self, journal: Journal, fault: AppendFault) -> None:
        """The next append of this open journal raises FateUnknown."""


class MemoryBench(JournalBench):
    def __init__(self) -> None:
        self.store = MemoryStore()

    def journal(self, shard: int = 0) -> Journal:
        return MemoryJournal(self.store, shard)

    def reader(self, shard: int = 0) -> JournalReader:
        return memory.open_reader(self.store, shard)

    def _index(self, first_seq: int) -> int:
        return [record.first_seq for record in self.store.shards[0].records].index(first_seq)

    def change_record(self, first_seq: int, **values: object) -> None:
        records, at = self.store.shards[0].records, self._index(first_seq)
        records[at] = dataclasses.replace(records[at], **values)  # type: ignore[arg-type]

    def drop_record(self, first_seq: int) -> None:
        del self.store.shards[0].records[self._index(first_seq)]

    def payload(self, first_seq: int) -> bytes:
        return self.store.shards[0].records[self._index(first_seq)].payload

    def set_mark(self, name: str, value: int) -> None:
        kept = self.store.shards[0]
        kept.marks = dataclasses.replace(kept.marks, **{name: value})

    def damage_snapshot(self, seq: int) -> None:
        chunks = self.store.shards[0].snapshots[seq].chunks
        crc, chunk = chunks[-1]
        chunks[-1] = (crc, chunk[:-1] + bytes([chunk[-1] ^ 1]))

    def lose_snapshot(self, seq: int) -> None:
        del self.store.shards[0].snapshots[seq]

    def fill(self, journal: Journal) -> None:
        self.store.bytes_max = self.store.payload_bytes()

    def make_room(self, journal: Journal) -> None:
        self.store.bytes_max = None

    def leave_fate_open(self, journal: Journal, fault: AppendFault) -> None:
        self.store.next_append = fault


class SqliteBench(JournalBench):
    def __init__(self, directory: Path) -> None:
        self.path = directory / "journal.db"

    def journal(self, shard: int = 0) -> Journal:
        return SqliteJournal(self.path, shard)

    def reader(self, shard: int = 0) -> JournalReader:
        return sqlite.open_reader(self.path, shard)

    def _run(self, statement: str, *values: object) -> list[tuple[bytes]]:
        connection = sqlite3.connect(self.path, isolation_level=None)
        try:
            return connection.execute(statement, values).fetchall()
        finally:
            connection.close()

    def change_record(self, first_seq: int, **values: object) -> None:
        for name, value in values.items():
            self._run(f"UPDATE journal SET {name} = ? WHERE shard = 0 AND first_seq = ?", value, first_seq)

    def drop_record(self, first_seq: int) -> None:
        self._run("DELETE FROM journal WHERE shard = 0 AND first_seq = ?", first_seq)

    def payload(self, first_seq: int) -> bytes:
        return self._run("SELECT payload FROM journal WHERE shard = 0 AND first_seq = ?", first_seq)[0][0]

    def set_mark(self, name: str, value: int) -> None:
        self._run(f"UPDATE shard SET {name} = ? WHERE id = 0", value)

    def snapshot_path(self, seq: int) -> Path:
        return Path(f"{self.path}.snapshots") / "shard-0" / f"snapshot-{seq:020d}.ucm"

    def damage_snapshot(self, seq: int) -> None:
        raw = bytearray(self.snapshot_path(seq).read_bytes())
        raw[-1] ^= 1
        self.snapshot_path(seq).write_bytes(raw)

    def lose_snapshot(self, seq: int) -> None:
        self.snapshot_path(seq).unlink()

    def fill(self, journal: Journal) -> None:
        assert isinstance(journal, SqliteJournal)
        run = journal._database.connection
        run.execute("PRAGMA max_page_count = 1")  # SQLite takes what it has now

    def make_room(self, journal: Journal) -> None:
        assert isinstance(journal, SqliteJournal)
        journal._database.connection.execute("PRAGMA max_page_count = 1000000")

    def leave_fate_open(self, journal: Journal, fault: AppendFault) -> None:
        assert isinstance(journal, SqliteJournal)

        def commit(run: sqlite3.Connection) -> None:
            del journal._commit  # once only
            if fault is AppendFault.WRITTEN:
                run.execute("COMMIT")
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            error.sqlite_errorname = "SQLITE_IOERR_FSYNC"
            raise error

        journal._commit = commit  # type: ignore[method-assign]


DIGEST = b"d" * 16


def body(first_seq: int) -> bytes:
    """A sealed payload that tells its place."""
    return frame.seal(b"batch %d " % first_seq * 20)


def filled(bench: JournalBench, batches: int, width: int = 1) -> int:
    """Appends `batches` of `width` seqs each to a new journal, closes it, and returns the epoch used."""
    journal = bench.journal()
    journal.open()
    epoch = journal.claim()
    append_to(journal, epoch, 1, batches, width)
    journal.close()
    return epoch


def append_to(journal: Journal, epoch: int, first_seq: int, batches: int, width: int = 1) -> None:
    for first in range(first_seq, first_seq + batches * width, width):
        journal.append(first, first + width - 1, epoch, body(first))


def seqs(batches: Iterator[Batch]) -> list[int]:
    return [batch.first_seq for batch in batches]


def flipped(payload: bytes, at: int) -> bytes:
    return payload[:at] + bytes([payload[at] ^ 0x10]) + payload[at + 1 :]


DAMAGE = ["payload", "header", "short", "empty", "crc", "last_seq", "epoch"]


def damage(bench: JournalBench, first_seq: int, how: str) -> None:
    payload = bench.payload(first_seq)
    changes: dict[str, dict[str, object]] = {
        "payload": {"payload": flipped(payload, len(payload) - 3)},
        "header": {"payload": flipped(payload, 1)},
        "short": {"payload": payload[: len(payload) // 2]},
        "empty": {"payload": b""},
        "crc": {"crc": 12345},
        "last_seq": {"last_seq": first_seq + 7},
        "epoch": {"epoch": 99},
    }
    bench.change_record(first_seq, **changes[how])
