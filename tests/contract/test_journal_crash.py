"""The SQLite journal in processes: killed, locked out, without space, on a disk that will not sync."""

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from metaservice.journal import frame
from metaservice.journal.errors import Fenced, JournalFull, JournalLocked
from metaservice.journal.sqlite import SqliteJournal, open_reader
from tests.contract.journal_child import payload_of

ROOT = Path(__file__).resolve().parent.parent.parent
DIGEST = b"d" * 16


@contextmanager
def child(*words: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A journal_child; killed at the end, unless it is gone."""
    script = Path(__file__).with_name("journal_child.py")
    process = subprocess.Popen(
        [sys.executable, str(script), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def heard(process: subprocess.Popen[str]) -> list[str]:
    """The next line that the child said, in words."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        assert process.stderr is not None
        pytest.fail(f"the child ended: {process.stderr.read()}")
    return line.split()


def killed_while_appending(path: Path, seconds: float) -> tuple[list[str], list[int]]:
    """Lets a child append, kills it, and returns its first line and every last seq that it acknowledged."""
    with child("append", path) as process:
        first = heard(process)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        said, _ = process.communicate()
    # A line that the kill cut off was not heard.
    return first, [int(line.split()[1]) for line in said.split("\n")[:-1] if line]


def test_every_acknowledged_batch_survives_sigkill(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "journal.db"
    acknowledged, epochs = 0, []
    for _ in range(6):
        opened, heard_seqs = killed_while_appending(path, rng.uniform(0.02, 0.25))
        assert opened[0] == "open"
        assert opened[3] == "None"  # a kill is no damage: nothing is cut
        assert int(opened[1]) >= acknowledged
        epochs.append(int(opened[2]))
        acknowledged = max([acknowledged, *heard_seqs])
    assert epochs == sorted(set(epochs))
    assert acknowledged > 100
    journal = SqliteJournal(path, 0)
    report = journal.open()
    assert report.last_cut is None
    assert report.head_seq >= acknowledged
    head, epoch, count, size = 0, 0, 0, 0
    for batch in journal.read(0):
        assert batch.first_seq == head + 1
        assert batch.epoch >= epoch
        assert batch.payload == payload_of(batch.first_seq, batch.last_seq)
        head, epoch, count, size = batch.last_seq, batch.epoch, count + 1, size + len(batch.payload)
    assert head == report.head_seq
    assert (journal.size().batches, journal.size().bytes) == (count, size)
    journal.close()


def test_a_reader_in_another_process_follows_the_writer_over_its_death(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with child("append", path) as process:
        heard(process)
        reader = open_reader(path, 0)
        seq, deadline = 0, time.monotonic() + 20
        while seq < 200 and time.monotonic() < deadline:
            for batch in reader.read(seq):
                assert batch.payload == payload_of(batch.first_seq, batch.last_seq)
                seq = batch.last_seq
        assert seq >= 200
        process.send_signal(signal.SIGKILL)
        said, _ = process.communicate()
    acknowledged = int(said.split("\n")[:-1][-1].split()[1])
    for batch in reader.read(seq):
        seq = batch.last_seq
    assert seq >= acknowledged
    reader.close()
    late = open_reader(path, 0)  # nobody else is there: the reader recovers the log
    assert late.head() == seq
    late.close()


# ---------------------------------------------------------------- the lock


def test_the_lock_names_its_holder_and_is_free_when_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path, 0)
    with child("hold", path) as process:
        heard(process)
        with pytest.raises(JournalLocked) as caught:
            journal.open()
        assert caught.value.holder_pid == process.pid
        assert str(path) in str(caught.value)
        process.kill()
        process.wait()
        journal.open()
    journal.close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.db", 0)
    journal.open()
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writes)
        os.read(reads, 1)
        os._exit(0)
    try:
        journal.close()
        second = SqliteJournal(tmp_path / "journal.db", 0)
        second.open()
        second.close()
    finally:
        os.close(writes)
        os.close(reads)
        os.waitpid(pid, 0)


def test_a_lock_file_removed_while_it_was_being_locked_protects_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.db"
    lock_file = Path(f"{path}.0.lock")
    flock, removals = fcntl.flock, [lock_file]

    def removed_meanwhile(fd: int, operation: int) -> None:
        flock(fd, operation)
        if removals:
            removals.pop().unlink()

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    first = SqliteJournal(path, 0)
    first.open()
    with pytest.raises(JournalLocked):
        SqliteJournal(path, 0).open()
    first.close()


def test_a_removed_lock_file_cannot_make_two_writers(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    first = SqliteJournal(path, 0)
    first.open()
    old = first.claim()
    first.append(1, 1, old, payload_of(1, 1))
    Path(f"{path}.0.lock").unlink()
    second = SqliteJournal(path, 0)
    second.open()
    new = second.claim()
    with pytest.raises(Fenced):
        first.append(2, 2, old, payload_of(2, 2))
    second.append(2, 2, new, payload_of(2, 2))
    first.close()
    with pytest.raises(JournalLocked):  # closing the first took nothing from the second
        first.open()
    second.close()


# ---------------------------------------------------------------- snapshots beside a running service


def test_another_process_saves_a_snapshot_while_the_service_appends(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path, 0)
    journal.open()
    epoch = journal.claim()
    for seq in range(1, 11):
        journal.append(seq, seq, epoch, payload_of(seq, seq))
    for seq in (4, 9):
        with child("snapshot", path, seq) as process:
            assert heard(process) == [str(seq)]
            process.wait()
    latest = journal.snapshots.latest()
    assert latest is not None
    assert (latest.seq, b"".join(journal.snapshots.load(latest))) == (9, b"a" * 10 + b"bc")
    assert journal.trim(10) == 4
    journal.close()


def test_a_saver_killed_midway_leaves_nothing_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path, 0)
    journal.open()
    epoch = journal.claim()
    for seq in range(1, 4):
        journal.append(seq, seq, epoch, payload_of(seq, seq))
    old = journal.snapshots.save(1, epoch, DIGEST, [b"one"])
    directory = Path(old.location).parent
    with child("half-snapshot", path, 2) as process:
        assert heard(process) == ["half"]
        with pytest.raises(JournalLocked) as caught:
            journal.snapshots.save(3, epoch, DIGEST, [b"three"])
        assert caught.value.holder_pid == process.pid
        process.kill()
        process.wait()
    assert len(list(directory.glob("*.writing"))) == 1
    assert journal.snapshots.list() == (old,)
    journal.snapshots.save(3, epoch, DIGEST, [b"three"])
    assert [info.seq for info in journal.snapshots.list()] == [3, 1]
    assert not list(directory.glob("*.writing"))
    journal.close()


# ---------------------------------------------------------------- disks that fail


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB. Skipped where this process may not mount one."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if os.geteuid() != 0 or mount is None or umount is None:
        pytest.skip("needs the right to mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run([umount, str(place)], check=True)


def test_a_full_disk_refuses_and_recovers_unaided(small_disk: Path) -> None:
    journal = SqliteJournal(small_disk / "journal.db", 0)
    journal.open()
    epoch = journal.claim()
    kept = journal.snapshots.save(0, epoch, DIGEST, [b"empty"])
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2_000_000))
    seq = 0
    with pytest.raises(JournalFull):
        while True:
            journal.append(seq + 1, seq + 1, epoch, payload_of(seq + 1, seq + 1))
            seq += 1
    assert seq > 10
    large = frame.seal(bytes(600_000))
    for _ in range(5):
        with pytest.raises(JournalFull):
            journal.append(seq + 1, seq + 1, epoch, large)
        with pytest.raises(JournalFull):
            journal.snapshots.save(seq, epoch, DIGEST, [bytes(3_000_000)])
        assert journal.head() == seq
    assert journal.snapshots.list() == (kept,)
    ballast.unlink()
    journal.append(seq + 1, seq + 1, epoch, large)
    journal.snapshots.save(seq + 1, epoch, DIGEST, [b"state"])
    journal.close()
    report = journal.open()
    assert (report.head_seq, report.last_cut) == (seq + 1, None)
    assert [batch.payload == large for batch in journal.read(0)] == [False] * seq + [True]
    journal.close()


def test_a_start_on_a_full_disk_is_typed_and_works_once_there_is_space(small_disk: Path) -> None:
    path = small_disk / "journal.db"
    journal = SqliteJournal(path, 0)
    journal.open()
    epoch = journal.claim()
    journal.append(1, 1, epoch, payload_of(1, 1))
    journal.close()
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    with pytest.raises(JournalFull):
        journal.open()
        journal.claim()
    journal.close()
    ballast.unlink()
    assert journal.open().head_seq == 1
    assert journal.claim() > epoch
    journal.close()


def test_a_write_that_fails_at_the_commit_is_settled(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with child("limit", path) as process:
        said, errors = process.communicate(timeout=60)
    lines = [line.split() for line in said.splitlines()]
    assert not errors
    assert lines[-2][0] in ("FateUnknown", "JournalFull")
    failed = int(lines[-2][1])
    assert failed > 3
    assert lines[-1] == ["then", str(failed)]
    journal = SqliteJournal(path, 0)
    report = journal.open()
    assert (report.head_seq, report.last_cut) == (failed, None)
    assert [batch.payload for batch in journal.read(0)] == [payload_of(n, n) for n in range(1, failed + 1)]
    journal.close()


FAILING_SYNC = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
static int failing(void) { const char *flag = getenv("SYNC_FAILS"); return flag && !access(flag, F_OK); }
int fsync(int fd) {
    if (failing()) { errno = EIO; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
int fdatasync(int fd) {
    if (failing()) { errno = EIO; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
"""


@pytest.mark.parametrize("beside", ["alone", "reader"])
def test_a_failed_sync_leaves_the_fate_open_until_it_is_settled_for_good(tmp_path: Path, beside: str) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler to make syncs fail")
    source, library, flag = tmp_path / "sync.c", tmp_path / "sync.so", tmp_path / "flag"
    source.write_text(FAILING_SYNC)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, capture_output=True
    )
    path = tmp_path / "journal.db"
    with child("sync", path, flag, beside, LD_PRELOAD=str(library), SYNC_FAILS=str(flag)) as process:
        assert heard(process) == ["FateUnknown", "2"]
        assert heard(process) == ["FateUnknown", "2"]
        assert heard(process) == ["unsettled", "2"]
        settled, answer = heard(process)
        assert settled == "settled"
        process.send_signal(signal.SIGKILL)
        process.wait()
    # What was said before the kill holds after it: a batch that is not in cannot come in by recovery.
    journal = SqliteJournal(path, 0)
    report = journal.open()
    assert report.head_seq == (2 if answer == "True" else 1)
    assert report.last_cut is None
    journal.close()
