"""What a pool keeps where, full memory, and strange things in a pool."""

import errno
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataplane import Backend, DeleteFailed, OpenFailed, WriteFailed, open_backend
from dataplane.backends import shm_pool as pools
from dataplane.integrity import HEADER_BYTES, checksum_of
from tests.contract.shm_house import (
    DATA,
    PLACE,
    POOL,
    SIZE_BYTES,
    SLOT_BYTES,
    STRIDE,
    file_of,
    held_bytes,
    reason_of_read,
    reason_of_write,
)

# --- the layout that others rely on --------------------------------------------------------------------


def test_a_part_is_where_the_documentation_says(shm: Backend, shm_directory: Path) -> None:
    place = PLACE._replace(location=(3 << 44) + 5, part="g1.tp2")
    shm.write(place, DATA)
    path = shm_directory / f"ucm-c1@{POOL}" / "3.g1.tp2"
    whole = path.read_bytes()
    assert len(whole) == 5 * STRIDE + 4_096 + SIZE_BYTES
    assert whole[5 * STRIDE + 4_096 :] == DATA
    assert whole[5 * STRIDE : 5 * STRIDE + 8] == b"UCMBLOCK"
    assert path.stat().st_mode & 0o007 == path.parent.stat().st_mode & 0o007 == 0


def test_a_slot_takes_what_its_block_takes_and_gives_all_of_it_back(
    shm: Backend, shm_directory: Path
) -> None:
    places = [PLACE._replace(location=number * 1_000) for number in range(20)]
    shm.write_many(places, [DATA] * 20)
    pages = -(-SIZE_BYTES // 4_096) + 1
    assert held_bytes(shm_directory) == 20 * pages * 4_096
    assert shm.delete_many(places) == [True] * 20
    assert held_bytes(shm_directory) == 0


def test_ranks_that_write_parts_of_one_block_together_do_not_meet(shm: Backend) -> None:
    """Parts of other sizes, other ranks, the same slot, at the same time."""
    parts = [PLACE._replace(part=f"tp{rank}", size_bytes=10_000 + 5_000 * rank) for rank in range(8)]
    rows = [bytes([rank]) * part.size_bytes for rank, part in enumerate(parts)]
    together = threading.Barrier(8, timeout=30)

    def write(rank: int) -> None:
        together.wait()
        for generation in range(1, 20):
            shm.write(parts[rank]._replace(generation=generation), rows[rank])

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shm.read_many([part._replace(generation=19) for part in parts]) == rows


def test_a_slot_is_used_again_by_blocks_of_other_sizes(shm: Backend, shm_directory: Path) -> None:
    """Another instance's block comes to the slot, without a delete in between: smaller, larger, once more."""
    for generation, size_bytes in enumerate((SLOT_BYTES, 10, SLOT_BYTES - 1, 5_000), 1):
        place = PLACE._replace(generation=generation, size_bytes=size_bytes)
        data = random.Random(generation).randbytes(size_bytes)
        checksum = shm.write(place, data)
        assert shm.read(place, checksum) == data
        assert held_bytes(shm_directory) == (-(-size_bytes // 4_096) + 1) * 4_096, (
            "nothing of the one before is kept"
        )
        if generation > 1:
            assert reason_of_read(shm, PLACE._replace(generation=generation - 1)) == "missing"


def test_a_block_that_no_slot_takes_is_refused(shm: Backend) -> None:
    large = PLACE._replace(size_bytes=SLOT_BYTES + 1)
    assert reason_of_write(shm, large, bytes(SLOT_BYTES + 1)) == "wrong_length"
    shm.write(PLACE._replace(size_bytes=SLOT_BYTES), bytes(SLOT_BYTES))


@pytest.mark.parametrize("location", [256 << 44, (1 << 64) - 1, (1 << 44) - 1])
def test_a_location_that_no_file_has_is_refused(shm_options: dict[str, str], location: int) -> None:
    shm_options["slot_bytes"] = str(1 << 30)
    pools.make(shm_options, "c1", "s1")
    shm = open_backend("shm", shm_options)
    place = PLACE._replace(location=location)
    assert (reason_of_write(shm, place), reason_of_read(shm, place)) == ("bad_place", "bad_place")
    with pytest.raises(DeleteFailed) as failed:
        shm.delete(place)
    assert failed.value.reason == "bad_place"


# --- full memory ---------------------------------------------------------------------------------------


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """Shared memory of 256 KiB. Skips where this user may not mount it."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_memory_is_a_typed_failure_and_leaves_nothing(
    small_memory: Path, shm_options: dict[str, str]
) -> None:
    """Nor is it a SIGBUS of the engine, which is what a store to a mapping would be."""
    shm_options["dir"] = str(small_memory)
    pools.make(shm_options, "c1", "s1")
    shm = open_backend("shm", shm_options)
    places = [PLACE._replace(location=number) for number in range(8)]
    outcomes = shm.write_many(places, [DATA] * 8)
    written = [place for place, row in zip(places, outcomes, strict=True) if isinstance(row, int)]
    failed = [row for row in outcomes if isinstance(row, WriteFailed)]
    assert written and failed
    assert {row.reason for row in failed} == {"no_space"}
    assert {found.place for found in shm.scan()} == {
        place._replace(size_bytes=0, key=b"") for place in written
    }
    assert held_bytes(small_memory) == len(written) * 14 * 4_096
    assert shm.read_many(written) == [DATA] * len(written)
    assert shm.delete_many(written) == [True] * len(written), "a delete needs no memory"
    assert shm.write(places[-1], DATA) == checksum_of(DATA), "memory is usable again"
    shm.close()


def test_reads_of_what_is_not_there_take_no_memory(small_memory: Path, shm_options: dict[str, str]) -> None:
    """A load from a hole of a mapping makes a page, and kills where there is none to make."""
    shm_options["dir"] = str(small_memory)
    pools.make(shm_options, "c1", "s1")
    shm = open_backend("shm", shm_options)
    shm.write(PLACE._replace(location=1_000), DATA)
    held = held_bytes(small_memory)
    for number in range(500):
        assert reason_of_read(shm, PLACE._replace(location=number)) == "missing"
    assert held_bytes(small_memory) == held
    shm.close()


def test_a_pool_that_there_is_no_memory_for_is_not_made(
    small_memory: Path, shm_options: dict[str, str]
) -> None:
    shm_options["dir"] = str(small_memory)
    with (
        (small_memory / "filler").open("wb", buffering=0) as filler,
        pytest.raises(OSError, match="No space"),
    ):
        while filler.write(bytes(4_096)):
            pass
    with pytest.raises(OpenFailed) as failed:
        pools.make(shm_options, "c1", "s1")
    assert failed.value.field == "options.dir"
    (small_memory / "filler").unlink()
    assert pools.make(shm_options, "c1", "s1"), "what was cut off is carried on"


_LIMITED_WRITER = """
import json, resource, sys
from dataplane import Place, WriteFailed, open_backend
options, place = json.loads(sys.argv[1])
place = Place(*place[:5], bytes.fromhex(place[5]))
backend = open_backend("shm", options)
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
try:
    backend.write(place, bytes(place.size_bytes))
except WriteFailed as failed:
    print(failed.reason)
"""


def test_a_writer_that_may_not_write_so_much_is_told_and_lives(
    shm: Backend, shm_options: dict[str, str]
) -> None:
    place = PLACE._replace(location=0)
    arguments = json.dumps([shm_options, [*place[:5], place.key.hex()]])
    child = subprocess.run(
        [sys.executable, "-c", _LIMITED_WRITER, arguments], capture_output=True, text=True, check=True
    )
    assert child.stdout == "no_space\n"
    assert list(shm.scan()) == []
    shm.write(place, DATA)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSPC, "no_space"),
        (errno.ENOMEM, "no_space"),
        (errno.EIO, "io_error"),
        (errno.EROFS, "read_only"),
    ],
)
def test_a_write_that_fails_at_any_step_leaves_an_empty_slot(
    shm: Backend, shm_directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int, reason: str
) -> None:
    """Claim, payload, publication: the system call itself fails, after it has done half."""
    real, calls = os.pwrite, 0

    def failing(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls < number:
            return real(descriptor, data, offset)
        real(descriptor, data[: len(data) // 2], offset)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", failing)
        assert reason_of_write(shm) == reason
    assert calls == number
    assert held_bytes(shm_directory) == 0
    assert reason_of_read(shm) == "missing"
    assert shm.write(PLACE, DATA) == checksum_of(DATA)


def test_writes_and_reads_that_are_cut_short_are_carried_on(
    shm: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, pread, preadv = os.pwrite, os.pread, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7_777], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 7_777), at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7_777]], at))
    checksum = shm.write(PLACE, DATA)
    buffer = bytearray(SIZE_BYTES)
    shm.read_into(PLACE, buffer, checksum)
    assert buffer == DATA == shm.read(PLACE, checksum)


# --- strange things in a pool --------------------------------------------------------------------------


def test_what_is_not_a_plain_file_is_refused_without_waiting(shm: Backend, shm_directory: Path) -> None:
    secret = shm_directory / "secret"
    secret.write_bytes(DATA)
    path = file_of(shm_directory)
    makers: list[Callable[[], None]] = [path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to(secret)]
    for make in makers:
        make()
        assert reason_of_read(shm) in ("malformed", "io_error")
        assert reason_of_write(shm) == "io_error"
        path.rmdir() if path.is_dir() else path.unlink()
    assert secret.read_bytes() == DATA


def test_foreign_things_are_reported_and_never_deleted(shm: Backend, shm_directory: Path) -> None:
    shm.write(PLACE, DATA)
    damaged = PLACE._replace(location=9)
    shm.write(damaged, DATA)
    with file_of(shm_directory).open("r+b") as file:
        os.pwrite(file.fileno(), b"x", 9 * STRIDE + HEADER_BYTES)
    notes = file_of(shm_directory).with_name("notes")
    notes.touch()
    found = {one.name: one for one in shm.scan()}
    names = {f"ucm-c1@{POOL}/{name}" for name in ("notes", "0.tp0:9")}
    assert {name for name, one in found.items() if one.state == "foreign"} == names
    for name in names:
        with pytest.raises(DeleteFailed) as failed:
            shm.discard(found[name])
        assert failed.value.reason == "foreign"
    assert notes.exists()
    assert shm.read(damaged) == DATA, "the label is for writers; what is there reads as well as ever"
    assert shm.delete(damaged)


def test_open_files_do_not_pile_up(shm: Backend) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        shm.write(PLACE._replace(location=number), DATA)
        shm.read(PLACE._replace(location=number))
        reason_of_read(shm, PLACE._replace(location=number, part="tp1"))
        reason_of_write(shm, PLACE._replace(location=number), bytes(SIZE_BYTES))
        shm.delete(PLACE._replace(location=number))
    assert len(os.listdir("/proc/self/fd")) == before
