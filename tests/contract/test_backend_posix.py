"""What only files can do wrong: full disks, failing disks, missing mounts, strange files, and what is flushed
when."""

import errno
import os
import random
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataplane import Backend, DeleteFailed, Place, ReadRefused, ScanFailed, WriteFailed, open_backend
from dataplane.backends import posix_layout as layout
from dataplane.integrity import HEADER_BYTES, checksum_of

PLACE = Place("c1", 0x0012_3456, 3, "tp0", 10_000, bytes(range(32)))
DATA = random.Random(4).randbytes(PLACE.size_bytes)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def backend(root: Path) -> Iterator[Backend]:
    opened = open_backend("posix", {"root": str(root)})
    yield opened
    opened.close()


def file_of(root: Path, place: Place = PLACE) -> Path:
    return Path(layout.path_of(str(root), place))


def files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if not path.is_dir())


# --- the layout that others rely on --------------------------------------------------------------------


def test_the_file_is_where_the_documentation_says(backend: Backend, root: Path) -> None:
    backend.write(PLACE, DATA)
    path = root / "c1" / "56" / "0000000000123456-3.tp0"
    assert path.read_bytes()[HEADER_BYTES:] == DATA
    assert path.stat().st_nlink == 1
    assert path.stat().st_mode & 0o007 == 0, "blocks hold what users wrote; they are not for everybody"
    assert files(root) == [path.name]


# --- full and failing disks ----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB. Skips where this user may not mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("fsync", ["none", "full"])
def test_a_full_disk_is_a_typed_failure_and_leaves_nothing(small_disk: Path, fsync: str) -> None:
    backend = open_backend("posix", {"root": str(small_disk), "fsync": fsync})
    place = PLACE._replace(size_bytes=60_000)
    outcomes = backend.write_many(
        [place._replace(location=number) for number in range(10)], [bytes(60_000)] * 10
    )
    failed = [row for row in outcomes if isinstance(row, WriteFailed)]
    written = [row for row in outcomes if isinstance(row, int)]
    assert written and failed
    assert {row.reason for row in failed} == {"no_space"}
    assert [found.state for found in backend.scan()] == ["published"] * len(written)
    for number, row in enumerate(outcomes):
        if isinstance(row, int):
            assert backend.read(place._replace(location=number), row) == bytes(60_000)
            assert backend.delete(place._replace(location=number))
    assert backend.write(place, bytes(60_000)) == checksum_of(bytes(60_000)), "space is usable again"
    backend.close()


def test_a_full_disk_can_be_scanned_and_swept(small_disk: Path) -> None:
    backend = open_backend("posix", {"root": str(small_disk)})
    backend.write(PLACE, DATA)
    filler = os.open(small_disk / "filler", os.O_CREAT | os.O_WRONLY)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        while True:
            os.write(filler, bytes(4_096))
    os.close(filler)
    found = next(found for found in backend.scan("c1") if found.state == "published")
    assert backend.discard(found)
    backend.close()


def test_a_disk_that_turned_read_only_is_named(small_disk: Path) -> None:
    backend = open_backend("posix", {"root": str(small_disk)})
    backend.write(PLACE, DATA)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(WriteFailed) as write:
        backend.write(PLACE._replace(generation=9), DATA)
    with pytest.raises(DeleteFailed) as delete:
        backend.delete(PLACE)
    assert (write.value.reason, delete.value.reason) == ("read_only", "read_only")
    with pytest.raises(ScanFailed):  # what cannot be touched has no age, and nothing could be swept anyway
        list(backend.scan("c1"))
    assert backend.read(PLACE) == DATA
    backend.close()


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "close"])
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.EIO, "io_error"),
        (errno.ENOSPC, "no_space"),
        (errno.EDQUOT, "no_space"),
        (errno.EROFS, "read_only"),
        (errno.EACCES, "denied"),
    ],
)
def test_a_failing_disk_is_a_typed_failure_at_every_step(
    backend: Backend, root: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, reason: str
) -> None:
    """NFS tells of a full server only when a file is flushed or closed."""
    real: Callable[..., int] = getattr(os, call)

    def failing(*arguments: object) -> int:
        if call == "close":
            real(*arguments)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        with pytest.raises(WriteFailed) as failed:
            backend.write(PLACE, DATA)
    assert failed.value.reason == reason
    assert files(root) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_file_system_without_hard_links_is_renamed_on(
    backend: Backend, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def failing(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", failing)
    checksum = backend.write(PLACE, DATA)
    assert backend.read(PLACE, checksum) == DATA
    assert backend.write(PLACE, DATA) == checksum
    with pytest.raises(WriteFailed) as failed:
        backend.write(PLACE, bytes(len(DATA)))
    assert failed.value.reason == "exists"
    assert backend.read(PLACE, checksum) == DATA
    assert len(files(root)) == 1


def test_another_failure_of_publishing_is_named(
    backend: Backend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", failing)
    with pytest.raises(WriteFailed) as failed:
        backend.write(PLACE, DATA)
    assert failed.value.reason == "io_error"
    assert files(root) == []


def test_writes_cut_short_are_carried_on(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    real = os.pwritev
    chance = random.Random(seed)

    def short(descriptor: int, buffers: list[bytes], offset: int) -> int:
        joined = b"".join(buffers)
        return real(descriptor, [joined[: chance.choice((1, 100, 600, 5_000))]], offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", short)
        checksum = backend.write(PLACE, DATA)
    assert backend.read(PLACE, checksum) == DATA


def test_reads_cut_short_are_carried_on(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    checksum = backend.write(PLACE, DATA)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 777), at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:777]], at))
    assert backend.read(PLACE, checksum) == DATA
    buffer = bytearray(10_000)
    backend.read_into(PLACE, buffer, checksum)
    assert buffer == DATA


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.EIO, "io_error"), (errno.ESTALE, "missing"), (errno.EACCES, "io_error")]
)
def test_a_failing_read_is_refused(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    backend.write(PLACE, DATA)

    def failing(*_: object) -> bytes:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pread", failing)
    for read in (lambda: backend.read(PLACE), lambda: backend.read_into(PLACE, bytearray(10_000))):
        with pytest.raises(ReadRefused) as refused:
            read()
        assert refused.value.reason == reason


# --- roots and mounts ----------------------------------------------------------------------------------


def test_nothing_is_written_or_called_gone_while_the_root_is_away(backend: Backend, root: Path) -> None:
    """A mount that went away hides the bytes; taking that for a deletion would leak them all."""
    backend.write(PLACE, DATA)
    root.rename(root.with_name("away"))
    with pytest.raises(WriteFailed) as write:
        backend.write(PLACE._replace(location=9), DATA)
    with pytest.raises(ReadRefused) as read:
        backend.read(PLACE)
    with pytest.raises(DeleteFailed) as delete:
        backend.delete(PLACE)
    assert (write.value.reason, read.value.reason) == ("root_missing", "missing")
    assert delete.value.reason == "root_missing"
    for cluster in (None, "c1"):
        with pytest.raises(ScanFailed):
            list(backend.scan(cluster))
    assert not root.exists()
    root.with_name("away").rename(root)
    assert backend.read(PLACE) == DATA


def test_a_folder_that_may_not_be_written_is_denied() -> None:
    """In a child that is not root, to whom nothing is denied."""
    with tempfile.TemporaryDirectory() as folder:
        backend = open_backend("posix", {"root": folder})
        backend.write(PLACE, DATA)
        for path in (folder, f"{folder}/c1", layout.folder_of(folder, PLACE)):
            os.chmod(path, 0o555)
        child = os.fork()
        if child == 0:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65_534)
                os.setuid(65_534)
            reasons = []
            calls: list[Callable[[], object]] = [
                lambda: backend.write(PLACE._replace(generation=9), DATA),
                lambda: backend.delete(PLACE),
            ]
            for call in calls:
                try:
                    call()
                except (WriteFailed, DeleteFailed) as failed:
                    reasons.append(failed.reason)
            os._exit(0 if reasons == ["denied", "denied"] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for path in (folder, f"{folder}/c1", layout.folder_of(folder, PLACE)):
            os.chmod(path, 0o755)
        assert backend.read(PLACE) == DATA
        backend.close()


def test_writers_that_make_the_first_folders_together_all_succeed(root: Path) -> None:
    backends = [open_backend("posix", {"root": str(root), "fsync": "full"}) for _ in range(8)]
    together = threading.Barrier(8, timeout=30)
    written: list[int] = []

    def write(number: int) -> None:
        together.wait()
        written.append(backends[number].write(PLACE._replace(location=number * layout.FANOUT), DATA))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written == [checksum_of(DATA)] * 8


# --- strange files under our names ---------------------------------------------------------------------


def test_what_is_not_a_plain_file_is_refused_without_waiting(backend: Backend, root: Path) -> None:
    secret = root.with_name("secret")
    secret.write_bytes(b"secret")
    path = file_of(root)
    path.parent.mkdir(parents=True)
    makers: list[Callable[[], None]] = [
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(secret),
    ]
    for make in makers:
        make()
        with pytest.raises(ReadRefused) as read:
            backend.read(PLACE)
        assert read.value.reason == "malformed"
        with pytest.raises(WriteFailed) as write:
            backend.write(PLACE, DATA)
        assert write.value.reason == "exists"
        path.rmdir() if path.is_dir() else path.unlink()
    assert secret.read_bytes() == b"secret"


def test_a_link_whose_answer_was_lost_is_success(
    backend: Backend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats a request whose answer was lost, and then says that the name exists: it is ours."""
    real = os.link

    def repeated(source: str, target: str) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", repeated)
    assert backend.write(PLACE, DATA) == checksum_of(DATA)
    assert files(root) == [file_of(root).name]


def test_a_writer_whose_unfinished_file_was_swept_does_not_publish(
    backend: Backend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fdatasync

    def slow(descriptor: int) -> None:
        real(descriptor)
        (found,) = backend.scan()
        assert found.state == "temporary"
        assert found.place == Place("c1", PLACE.location, PLACE.generation, "")
        assert backend.discard(found)

    monkeypatch.setattr(os, "fdatasync", slow)
    with pytest.raises(WriteFailed) as write:
        backend.write(PLACE, DATA)
    assert write.value.reason == "removed"
    assert files(root) == []


# --- scan ----------------------------------------------------------------------------------------------


def test_foreign_files_are_reported_and_never_deleted(backend: Backend, root: Path) -> None:
    backend.write(PLACE, DATA)
    folder = file_of(root).parent
    foreign = [
        root / "README",
        root / "lost+found",
        root / "c1" / "notes.txt",
        root / "c1" / "zz",
        folder / ".nfs000000000000000100000001",
        folder / "0000000000123457-3.tp0",
        folder / "0000000000123456-3.tp0~",
    ]
    for path in foreign:
        path.touch()
    (folder / "0000000000123456-4.tp0").mkdir()
    (folder / "0000000000123456-5.tp0").symlink_to(root / "README")
    names = {str(path.relative_to(root)) for path in foreign}
    names |= {"c1/56/0000000000123456-4.tp0", "c1/56/0000000000123456-5.tp0"}
    found = list(backend.scan())
    assert {one.name for one in found if one.state == "foreign"} == names
    assert [one.place for one in found if one.state == "published"] == [PLACE._replace(size_bytes=0, key=b"")]
    for one in found:
        if one.state == "foreign":
            with pytest.raises(DeleteFailed) as failed:
                backend.discard(one)
            assert failed.value.reason == "foreign"
    assert all(path.exists() for path in foreign)
    assert {one.name for one in backend.scan("c1") if one.state == "foreign"} == {
        name for name in names if name.startswith("c1/")
    }


@pytest.mark.parametrize(("aged_s", "age_ms"), [(0, 0), (90, 90_000), (-90, 0)])
def test_ages_are_by_the_clock_of_the_file_system(
    backend: Backend, root: Path, monkeypatch: pytest.MonkeyPatch, aged_s: int, age_ms: int
) -> None:
    backend.write(PLACE, DATA)
    status = file_of(root).stat()
    os.utime(file_of(root), ns=(status.st_atime_ns, status.st_mtime_ns - aged_s * 1_000_000_000))
    for clock in ("time", "time_ns"):  # this machine's clock is a year ahead
        monkeypatch.setattr(f"time.{clock}", lambda: 1 << 62)
    (found,) = backend.scan("c1")
    assert age_ms <= found.age_ms < age_ms + 20_000


def test_a_name_that_is_no_cluster_cannot_be_scanned(backend: Backend) -> None:
    for name in ("..", "", "a/b", "a\0"):
        with pytest.raises(ScanFailed):
            list(backend.scan(name))


# --- what is flushed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fsync", "first", "second"),
    [
        ("none", [], []),
        ("data", ["fdatasync file"], ["fdatasync file"]),
        ("full", ["fsync root", "fsync c1", "fsync file", "fsync 56"], ["fsync file", "fsync 56"]),
    ],
)
def test_each_policy_flushes_what_it_promises(
    root: Path, monkeypatch: pytest.MonkeyPatch, fsync: str, first: list[str], second: list[str]
) -> None:
    """In this order: the bytes before the name, the name before the answer; folders when they are new."""
    seen: list[str] = []
    names = SimpleNamespace(fsync=os.fsync, fdatasync=os.fdatasync)

    def spy(call: str) -> Callable[[int], None]:
        def flush(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            published = file_of(root).exists()
            seen.append(f"{call} {path.name if path.is_dir() else 'file'}")
            assert published == (path.name == "56"), "flushed in the wrong order"
            getattr(names, call)(descriptor)

        return flush

    backend = open_backend("posix", {"root": str(root), "fsync": fsync})
    for call in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, call, spy(call))
    backend.write(PLACE, DATA)
    assert seen == first
    seen.clear()
    backend.delete(PLACE)
    backend.write(PLACE, DATA)
    assert seen == second
    backend.close()
