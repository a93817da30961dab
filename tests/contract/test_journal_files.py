"""Damaged, foreign and newer files: a start is whole, says what it cut, or is refused with a typed error."""

import random
import sqlite3
import zlib
from pathlib import Path

import pytest

from metaservice.journal import sqlite_database
from metaservice.journal.errors import (
    CorruptJournal,
    CorruptSnapshot,
    JournalBusy,
    JournalError,
    JournalFailed,
    JournalMissing,
    UnsupportedVersion,
)
from metaservice.journal.snapshot_files import FileSnapshotStore
from metaservice.journal.sqlite import SqliteJournal, open_reader
from tests.contract.journal_child import payload_of

DIGEST = b"d" * 16


def filled(path: Path, batches: int) -> list[bytes]:
    """A closed journal with `batches`, and their payloads."""
    journal = SqliteJournal(path, 0)
    journal.open()
    epoch = journal.claim()
    for seq in range(1, batches + 1):
        journal.append(seq, seq, epoch, payload_of(seq, seq))
    journal.close()
    return [payload_of(seq, seq) for seq in range(1, batches + 1)]


@pytest.mark.parametrize(
    "content",
    [b"this is not a database", b"\0" * 8192, b"SQLite format 3\0" + b"\xff" * 8000],
    ids=["text", "zeros", "header"],
)
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(content)
    with pytest.raises(CorruptJournal) as caught:
        SqliteJournal(path, 0).open()
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content
    with pytest.raises(CorruptJournal):
        open_reader(path, 0)


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(CorruptJournal, match="another program"):
        SqliteJournal(path, 0).open()
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    filled(path, 2)
    newer = sqlite3.connect(path)
    newer.execute("PRAGMA user_version = 7")
    newer.close()
    for start in (SqliteJournal(path, 0).open, lambda: open_reader(path, 0)):
        with pytest.raises(UnsupportedVersion) as caught:
            start()
        assert caught.value.found == 7


def test_a_place_that_cannot_hold_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(JournalFailed, match="taken"):
        SqliteJournal(tmp_path / "taken", 0).open()
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalFailed, match="file"):
        SqliteJournal(tmp_path / "file" / "journal.db", 0).open()


def test_a_reader_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(JournalMissing):
        open_reader(tmp_path / "journal.db", 0)
    (tmp_path / "empty.db").touch()
    with pytest.raises(JournalMissing):
        open_reader(tmp_path / "empty.db", 0)
    filled(tmp_path / "journal.db", 1)
    with pytest.raises(JournalMissing):
        open_reader(tmp_path / "journal.db", 5)


def test_a_lost_database_beside_its_snapshots_does_not_start_empty(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    filled(path, 3)
    SqliteJournal(path, 0).snapshots.save(3, 1, DIGEST, [b"state"])
    path.unlink()
    with pytest.raises(CorruptJournal, match="older copy"):
        SqliteJournal(path, 0).open()


def outcome(path: Path, written: list[bytes]) -> str:
    """Opens a damaged journal: a typed refusal, or a prefix of what was written with the cut reported."""
    journal = SqliteJournal(path, 0)
    try:
        report = journal.open()
    except JournalError as error:
        return type(error).__name__
    try:
        found = [batch.payload for batch in journal.read(0)]
        assert found == written[: len(found)]
        assert report.head_seq == len(found)
        assert journal.size().batches == len(found)
        if len(found) < len(written):
            assert report.last_cut is not None
            assert report.last_cut.first_seq_cut == len(found) + 1
        journal.append(len(found) + 1, len(found) + 1, journal.claim(), payload_of(1, 1))
        return "opened"
    finally:
        journal.close()


@pytest.mark.parametrize("how", ["bit", "page", "truncated"])
def test_no_damage_to_the_file_passes_as_data_or_raises_another_error(
    tmp_path: Path, seed: int, how: str
) -> None:
    rng = random.Random(seed)
    path = tmp_path / "journal.db"
    written = filled(path, 12)
    whole = path.read_bytes()
    seen: dict[str, int] = {}
    for _ in range(60):
        damaged = bytearray(whole)
        if how == "bit":
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        elif how == "page":
            page = rng.randrange(len(damaged) // 4096)
            damaged[page * 4096 : page * 4096 + 4096] = rng.choice([bytes(4096), rng.randbytes(4096)])
        else:
            del damaged[rng.randrange(1, len(damaged)) :]
        for left in tmp_path.glob("journal.db*"):
            left.unlink()
        path.write_bytes(damaged)
        result = outcome(path, written)
        seen[result] = seen.get(result, 0) + 1
    assert seen.get("CorruptJournal", 0) > 10
    assert set(seen) <= {"opened", "CorruptJournal", "UnsupportedVersion", "JournalFailed"}


def test_a_malformed_page_that_no_batch_is_on_is_found_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    filled(path, 30)
    journal = SqliteJournal(path, 0)
    journal.open()
    for seq in (20, 30):
        journal.snapshots.save(seq, 1, DIGEST, [b"state"])
    assert journal.trim(30) == 20
    journal.close()
    damaged = bytearray(path.read_bytes())
    page = int.from_bytes(damaged[32:36], "big")  # the first page of SQLite's list of free ones
    assert page
    damaged[(page - 1) * 4096 : page * 4096] = b"\xee" * 4096
    path.write_bytes(damaged)
    with pytest.raises(CorruptJournal, match="SQLite says"):
        journal.open()


def test_a_torn_write_ahead_log_loses_only_what_was_not_whole(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path, 0)
    journal.open()
    epoch = journal.claim()
    written = [payload_of(seq, seq) for seq in range(1, 9)]
    for seq, payload in enumerate(written, 1):
        journal.append(seq, seq, epoch, payload)
    log = Path(f"{path}-wal").read_bytes()
    database = path.read_bytes()
    journal.close()
    for _ in range(25):
        for left in tmp_path.glob("journal.db*"):
            left.unlink()
        path.write_bytes(database)
        Path(f"{path}-wal").write_bytes(log[: rng.randrange(len(log))] + rng.randbytes(rng.randrange(3000)))
        torn = SqliteJournal(path, 0)
        report = torn.open()
        found = [batch.payload for batch in torn.read(0)]
        assert report.last_cut is None
        assert found == written[: report.head_seq]
        torn.close()


def test_a_database_that_another_program_holds_is_busy_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_database, "BUSY_WAIT_MS", 50)
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path, 0)
    journal.open()
    epoch = journal.claim()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalBusy, match="50 ms"):
        journal.append(1, 1, epoch, payload_of(1, 1))
    other.execute("ROLLBACK")
    other.close()
    journal.append(1, 1, epoch, payload_of(1, 1))
    journal.close()


# ---------------------------------------------------------------- snapshot files


def saved(directory: Path) -> tuple[FileSnapshotStore, Path]:
    store = FileSnapshotStore(directory)
    return store, Path(store.save(7, 3, DIGEST, [b"first chunk", b"", b"third"]).location)


def test_every_flipped_byte_and_every_truncation_of_a_snapshot_is_found(tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    whole = path.read_bytes()
    changed = [whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :] for at in range(len(whole))]
    changed += [whole[:length] for length in range(len(whole))] + [whole + b"\0"]
    for content in changed:
        path.write_bytes(content)
        store = FileSnapshotStore(tmp_path)
        assert store.latest() is None
        assert [fault.location for fault in store.faults] == [str(path)]
    path.write_bytes(whole)
    assert FileSnapshotStore(tmp_path).latest() is not None


def test_a_snapshot_of_a_newer_release_is_passed_over_and_named(tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[4] = 2
    fields = len(raw) - (8 + 11 + 8 + 8 + 5) - 4  # what is left of the chunks, and of the checksum itself
    raw[fields : fields + 4] = zlib.crc32(bytes(raw[:fields])).to_bytes(4, "big")
    path.write_bytes(raw)
    store = FileSnapshotStore(tmp_path)
    assert store.latest() is None
    assert "version 2" in store.faults[0].reason


def test_a_load_survives_the_removal_of_its_file(tmp_path: Path) -> None:
    store, _ = saved(tmp_path)
    info = store.latest()
    assert info is not None
    loading = store.load(info)
    for seq in (8, 9):
        store.save(seq, 3, DIGEST, [b"newer"])
    assert list(loading) == [b"first chunk", b"", b"third"]
    with pytest.raises(CorruptSnapshot):
        list(store.load(info))


def test_a_file_replaced_after_it_was_verified_is_verified_again(tmp_path: Path) -> None:
    store, path = saved(tmp_path)
    assert store.latest() is not None
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + b"?")
    assert store.latest() is None
    path.write_bytes(raw)
    assert store.latest() is not None


def test_other_files_in_the_directory_are_nobodys_snapshot(tmp_path: Path) -> None:
    store, _ = saved(tmp_path)
    for name in ("snapshot-1.ucm", "snapshot-00000000000000000099.ucm.writing", "notes.txt"):
        (tmp_path / name).write_bytes(b"?")
    assert [info.seq for info in store.list()] == [7]
    assert store.faults == ()
