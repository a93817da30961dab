"""Writers that die, stop or come too late, and pools that come and go."""

import errno
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataplane import Backend, DeleteFailed, OpenFailed, Place, ReadRefused, ScanFailed, open_backend
from dataplane.backends import shm_layout as layout
from dataplane.backends import shm_pool as pools
from dataplane.backends import shm_slots as slots
from dataplane.integrity import checksum_of
from tests.contract.shm_house import (
    DATA,
    NEXT,
    PLACE,
    POOL,
    SIZE_BYTES,
    STRIDE,
    StoppedWriter,
    file_of,
    held_bytes,
    reason_of_read,
    reason_of_write,
)

# --- writers that die, stop, or come too late ----------------------------------------------------------


@pytest.fixture
def stopped(shm: Backend, shm_options: dict[str, str]) -> Iterator[StoppedWriter]:
    writer = StoppedWriter(shm_options, PLACE, 1)
    yield writer
    writer.end()


def test_a1_writer_killed_in_the_middle_of_its_payload_is_never_read(
    shm: Backend, shm_directory: Path, stopped: StoppedWriter
) -> None:
    assert reason_of_read(shm) == "missing"
    stopped.end()
    assert reason_of_read(shm) == "missing"
    (found,) = shm.scan()
    assert (found.state, found.place) == ("temporary", Place("c1", 7, 3, ""))
    assert held_bytes(shm_directory) > 0
    assert shm.delete(PLACE), "the service deletes what a dead engine was writing, by its place"
    assert held_bytes(shm_directory) == 0


def test_a1_a_killed_writers_slot_is_free_for_the_same_block_and_the_next(
    shm: Backend, shm_options: dict[str, str], stopped: StoppedWriter
) -> None:
    """The kernel takes a dead process's lock back; what it left is not taken for anything."""
    stopped.end()
    checksum = shm.write(PLACE, DATA)
    assert shm.read(PLACE, checksum) == DATA
    again = StoppedWriter(shm_options, NEXT, 1)
    again.end()
    later = NEXT._replace(generation=NEXT.generation + 1)
    checksum = shm.write(later, DATA)
    assert shm.read(later, checksum) == DATA
    assert [found.state for found in shm.scan()] == ["published"]


def test_a_stopped_writer_keeps_others_out_and_is_told_from_them(
    shm: Backend, monkeypatch: pytest.MonkeyPatch, stopped: StoppedWriter
) -> None:
    """A zombie (SIGSTOP, a hanging machine): the next block is not stored, and no wrong byte is read."""
    monkeypatch.setattr(slots, "LOCK_MS", 50)
    assert reason_of_write(shm, NEXT) == "io_error"
    with pytest.raises(DeleteFailed) as failed:
        shm.delete(PLACE)
    assert failed.value.reason == "io_error", "its bytes are not called gone"
    assert stopped.go_on() == "written"
    assert shm.read(PLACE) == bytes([1]) * SIZE_BYTES
    assert shm.write(NEXT, DATA) == checksum_of(DATA)
    assert (shm.read(NEXT), reason_of_read(shm)) == (DATA, "missing")


def test_a_writer_of_an_earlier_generation_comes_too_late(shm: Backend) -> None:
    shm.write(PLACE, DATA)
    shm.delete(PLACE)
    checksum = shm.write(NEXT, DATA)
    assert reason_of_write(shm, PLACE, bytes(SIZE_BYTES)) == "removed"
    assert shm.read(NEXT, checksum) == DATA


def test_a_zombie_that_gets_to_an_empty_slot_is_pushed_out(shm: Backend) -> None:
    """Its block was deleted, the slot not yet used again: what it writes nobody asks for."""
    shm.write(PLACE, DATA)
    shm.delete(PLACE)
    shm.write(PLACE, bytes(SIZE_BYTES))
    assert reason_of_read(shm, NEXT) == "missing", "the reader of the next block does not get it"
    checksum = shm.write(NEXT, DATA)
    assert shm.read(NEXT, checksum) == DATA
    assert reason_of_read(shm) == "missing"


def test_a_write_that_ignores_all_rules_causes_refusals_only(shm: Backend, shm_directory: Path) -> None:
    """Somebody stores through a mapping of its own, without lock or label, while readers read."""
    checksum = shm.write(PLACE, DATA)
    begun, over = threading.Event(), threading.Event()

    def scribble() -> None:
        chance = random.Random(1)
        with file_of(shm_directory).open("r+b", buffering=0) as file:
            while not over.is_set():
                at = PLACE.location * STRIDE + chance.randrange(4_096 + SIZE_BYTES - 100)
                os.pwrite(file.fileno(), chance.randbytes(100), at)
                begun.set()
                time.sleep(0)

    thread = threading.Thread(target=scribble)
    thread.start()
    assert begun.wait(10)
    refused, end = 0, time.monotonic() + 10
    while refused < 100 and time.monotonic() < end:
        try:
            assert shm.read(PLACE, checksum) == DATA
        except ReadRefused:
            refused += 1
    over.set()
    thread.join()
    assert refused == 100
    assert reason_of_write(shm) == "exists", "and nothing is written over what nobody can explain"
    assert shm.delete(PLACE)
    assert shm.write(PLACE, DATA) == checksum


def test_what_changes_under_a_reader_is_looked_at_again(
    shm: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted and written anew between header and payload: missing or right, never called damaged."""
    checksum = shm.write(PLACE, DATA)
    real = slots.read_payload
    changes: list[Callable[[], object]] = [
        lambda: shm.delete(PLACE),
        lambda: (shm.delete(PLACE), shm.write(NEXT, bytes(SIZE_BYTES))),
    ]
    for change in changes:
        pending = [change]

        def changed(
            descriptor: int, offset: int, size_bytes: int, pending: list[Callable[[], object]] = pending
        ) -> bytes:
            if pending:
                pending.pop()()
            return real(descriptor, offset, size_bytes)

        with monkeypatch.context() as patched:
            patched.setattr(slots, "read_payload", changed)
            with pytest.raises(ReadRefused) as refused:
                shm.read(PLACE, checksum)
        assert refused.value.reason == "missing"
        shm.delete(NEXT)
        shm.write(PLACE, DATA)


# --- pools that come and go ----------------------------------------------------------------------------


def test_only_an_owner_makes_a_pool(shm_directory: Path, shm_options: dict[str, str]) -> None:
    for pool, says in (("", "no worker owns it"), (POOL, "another machine"), ("../x", "not the name")):
        with pytest.raises(OpenFailed) as failed:
            open_backend("shm", {**shm_options, "pool": pool})
        assert failed.value.field == "options.pool"
        assert says in failed.value.detail
    assert list(shm_directory.iterdir()) == []
    pools.make(shm_options, "c1", "s1")
    assert not pools.make(shm_options, "c1", "s1"), "it is there"
    open_backend("shm", shm_options).close()


def test_a_removed_pool_is_gone_for_those_who_have_it_open(
    shm: Backend, shm_directory: Path, shm_options: dict[str, str]
) -> None:
    checksum = shm.write(PLACE, DATA)
    with file_of(shm_directory).open("rb") as kept_open:
        assert pools.remove({**shm_options, "pool": ""}, "c1", "s1") == 1
        assert os.fstat(kept_open.fileno()).st_blocks == 0, "memory that an engine keeps open is free too"
    assert list(shm_directory.iterdir()) == []
    assert reason_of_read(shm) == "missing"
    assert reason_of_write(shm) == "root_missing"
    assert not shm.delete(PLACE)
    with pytest.raises(ScanFailed):
        list(shm.scan())
    assert list(shm_directory.iterdir()) == [], "nobody but its owner makes it again"
    other = {**shm_options, "pool": "cafe"}
    pools.make(other, "c1", "s1")
    assert reason_of_read(shm) == "missing", "another pool is not this one"
    renewed = open_backend("shm", other)
    assert reason_of_read(renewed) == "missing"
    assert renewed.write(PLACE, DATA) == checksum


def test_a_pool_that_goes_during_a_write_is_not_written_to(
    shm: Backend, shm_options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = slots.fill

    def slow(descriptor: int, offset: int, payload: memoryview) -> None:
        pools.remove({**shm_options, "pool": ""}, "c1", "s1")
        real(descriptor, offset, payload)

    monkeypatch.setattr(slots, "fill", slow)
    assert reason_of_write(shm) == "root_missing"


def test_an_owner_removes_its_own_earlier_pools_and_no_others(
    shm_directory: Path, shm_options: dict[str, str]
) -> None:
    made = [
        ("c1", "s1", "a1"),
        ("c1", "s1", "a2"),
        ("c1", "s2", "b1"),
        ("c2", "s1", "d1"),
        ("c1", "s1", POOL),
    ]
    for cluster, storage, pool in made:
        pools.make({**shm_options, "pool": pool}, cluster, storage)
    hidden = Path(layout.folder_of(str(shm_directory), "c1", "a2", hidden=True))
    Path(layout.folder_of(str(shm_directory), "c1", "a2")).rename(hidden)  # a removal that was cut off
    strangers = [shm_directory / "ucm-notes", shm_directory / "sem.x"]
    for path in strangers:
        path.mkdir()
    assert pools.remove(shm_options, "c1", "s1") == 2
    left = {f"ucm-{cluster}@{pool}" for cluster, _, pool in made[2:]}
    assert {path.name for path in shm_directory.iterdir()} == left | {path.name for path in strangers}


def test_two_storages_of_one_owner_need_folders_of_their_own(shm_options: dict[str, str]) -> None:
    pools.make(shm_options, "c1", "s1")
    with pytest.raises(OpenFailed) as failed:
        pools.make(shm_options, "c1", "s2")
    assert failed.value.field == "options.dir"
    assert "s1" in failed.value.detail


def test_slots_are_as_far_apart_as_when_the_pool_was_made(shm: Backend, shm_options: dict[str, str]) -> None:
    """`slot_bytes` was changed at the service while the pool lives: what is there reads as before."""
    checksum = shm.write(PLACE, DATA)
    other = open_backend("shm", {**shm_options, "slot_bytes": "1000000"})
    assert other.read(PLACE, checksum) == DATA


def test_a_folder_that_everybody_may_use_is_no_pool(
    shm: Backend, shm_directory: Path, shm_options: dict[str, str]
) -> None:
    """Shared memory is everybody's: a stranger's folder by a pool's name gets no blocks of users."""
    folder = file_of(shm_directory).parent
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IRWXO)
    with pytest.raises(OpenFailed) as failed:
        open_backend("shm", shm_options)
    assert failed.value.field == "options.pool"


def test_a_folder_that_cannot_give_memory_back_is_refused(
    shm_options: dict[str, str], shm_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with monkeypatch.context() as patched:
        patched.setattr(slots, "empty", unsupported)
        with pytest.raises(OpenFailed) as failed:
            pools.make(shm_options, "c1", "s1")
    assert failed.value.field == "options.dir"
    assert pools.make(shm_options, "c1", "s1")
    assert [path.name for path in shm_directory.iterdir()] == [f"ucm-c1@{POOL}"]
