"""What every backend must do, whatever it stores bytes in. A new backend joins by one row in `STORAGES`."""

import random
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane import Backend, DeleteFailed, Place, ReadRefused, WriteFailed
from dataplane.integrity import HEADER_BYTES, checksum_of, encode_header
from tests.contract.backend_storages import DATA, PLACE, STORAGES, Storage

SIZES = (1, 4_096, 4_097, 65_537, 1 << 20)
KEY = PLACE.key


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest) -> Storage:
    return STORAGES[request.param]


@pytest.fixture
def backend(storage: Storage, tmp_path: Path) -> Iterator[Backend]:
    opened = storage.open(tmp_path)
    yield opened
    opened.close()


def refused(backend: Backend, place: Place, checksum: int | None = None) -> str:
    """Why a read of `place` is refused, by every way there is to read it; none gives a byte."""
    with pytest.raises(ReadRefused) as read:
        backend.read(place, checksum)
    before = b"\xa5" * place.size_bytes
    buffer = bytearray(before)
    with pytest.raises(ReadRefused) as read_into:
        backend.read_into(place, buffer, checksum)
    assert buffer in (before, bytes(len(before))), "bytes that failed verification were left in the buffer"
    good = Place("c1", 1, 1, "good", 3, KEY)
    if isinstance(backend.read_many([good])[0], ReadRefused):
        backend.write(good, b"yes")
    checksums = None if checksum is None else [checksum_of(b"yes"), checksum, checksum_of(b"yes")]
    first, many, last = backend.read_many([good, place, good], checksums)
    assert (first, last) == (b"yes", b"yes"), "one bad block took its batch with it"
    assert isinstance(many, ReadRefused)
    buffers = [bytearray(3), bytearray(before), bytearray(3)]
    first_into, many_into, last_into = backend.read_many_into([good, place, good], buffers, checksums)
    assert first_into is None and last_into is None
    assert buffers[0] == buffers[2] == b"yes"
    assert isinstance(many_into, ReadRefused)
    assert buffers[1] in (before, bytes(len(before)))
    assert read.value.reason == read_into.value.reason == many.reason == many_into.reason
    assert read.value.place == place
    return read.value.reason


# --- round trip ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", SIZES)
def test_what_was_written_is_read(backend: Backend, size_bytes: int, seed: int) -> None:
    data = random.Random(seed).randbytes(size_bytes)
    place = PLACE._replace(size_bytes=size_bytes)
    checksum = backend.write(place, data)
    assert checksum == checksum_of(data)
    assert backend.read(place) == data
    assert backend.read(place, checksum) == data
    buffer = bytearray(size_bytes)
    backend.read_into(place, buffer, checksum)
    assert buffer == data


def test_buffers_of_any_kind_are_their_bytes(backend: Backend) -> None:
    numbers = array("I", range(2_500))
    kinds: list[bytearray | memoryview] = [bytearray(DATA), memoryview(DATA), memoryview(numbers)]
    for part, data in enumerate(kinds):
        place = PLACE._replace(part=f"p{part}")
        backend.write(place, data)
        assert backend.read(place) == bytes(data)
    read = array("I", bytes(10_000))
    backend.read_into(PLACE._replace(part="p2"), memoryview(read))
    assert read == numbers


def test_another_process_reads_what_was_written(storage: Storage, backend: Backend, tmp_path: Path) -> None:
    checksum = backend.write(PLACE, DATA)
    other = storage.open(tmp_path)
    assert other.read(PLACE, checksum) == DATA
    other.close()


def test_many_at_a_time_answer_in_order(backend: Backend) -> None:
    places = [PLACE._replace(location=number, size_bytes=100 + number) for number in range(300)]
    data = [random.Random(place.location).randbytes(place.size_bytes) for place in places]
    checksums = backend.write_many(places, data)
    assert checksums == [checksum_of(row) for row in data]
    assert backend.read_many(places) == data
    assert backend.read_many(places, [int(row) for row in checksums if isinstance(row, int)]) == data
    buffers = [bytearray(place.size_bytes) for place in places]
    assert backend.read_many_into(places, buffers) == [None] * 300
    assert buffers == data
    assert backend.delete_many(places[::2]) == [True] * 150
    assert backend.delete_many(places) == [False, True] * 150
    assert all(isinstance(row, ReadRefused) for row in backend.read_many(places))
    assert not (backend.write_many([], []) or backend.read_many([]) or backend.delete_many([]))
    assert backend.read_many_into([], []) == []


def test_in_a_batch_only_the_bad_rows_fail(backend: Backend) -> None:
    good = [PLACE._replace(location=number) for number in range(9)]
    bad = PLACE._replace(part="../x")
    results = backend.write_many([*good[:4], bad, *good[4:]], [DATA] * 10)
    assert isinstance(results[4], WriteFailed)
    assert [row for row in results if isinstance(row, int)] == [checksum_of(DATA)] * 9
    deleted = backend.delete_many([*good, bad])
    assert deleted[:9] == [True] * 9
    assert isinstance(deleted[9], DeleteFailed)


# --- what is not accepted ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "data", "reason"),
    [
        (PLACE._replace(size_bytes=0), b"", "bad_place"),
        (PLACE, b"", "wrong_length"),
        (PLACE, DATA[:-1], "wrong_length"),
        (PLACE, DATA + b"x", "wrong_length"),
        (PLACE, memoryview(DATA * 2)[::2], "bad_buffer"),
        (PLACE, "text", "bad_buffer"),
        (PLACE._replace(key=b""), DATA, "bad_place"),
        (PLACE._replace(key=b"k" * 65), DATA, "bad_place"),
    ],
)
def test_a_write_that_cannot_be_right_is_refused(
    backend: Backend, place: Place, data: bytes, reason: str
) -> None:
    with pytest.raises(WriteFailed) as failed:
        backend.write(place, data)
    assert failed.value.reason == reason
    assert list(backend.scan()) == []


@pytest.mark.parametrize(
    "part", ["", ".", "..", "../../x", "/x", "a/b", "a\0b", "a\n", "a b", "p" * 129, "é"]
)
@pytest.mark.parametrize("field", ["part", "cluster"])
def test_no_name_leaves_the_storage(backend: Backend, tmp_path: Path, field: str, part: str) -> None:
    place = PLACE._replace(**{field: part})  # type: ignore[arg-type]
    before = sorted(tmp_path.parent.rglob("*"))
    with pytest.raises(WriteFailed) as write:
        backend.write(place, DATA)
    with pytest.raises(ReadRefused) as read:
        backend.read(place)
    with pytest.raises(DeleteFailed) as delete:
        backend.delete(place)
    assert {write.value.reason, read.value.reason, delete.value.reason} == {"bad_place"}
    assert sorted(tmp_path.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "buffer", [bytearray(9_999), bytearray(10_001), memoryview(DATA), memoryview(bytearray(20_000))[::2]]
)
def test_a_buffer_that_cannot_take_the_block_is_refused(backend: Backend, buffer: bytearray) -> None:
    backend.write(PLACE, DATA)
    with pytest.raises(ReadRefused) as read:
        backend.read_into(PLACE, buffer)
    assert read.value.reason == "bad_buffer"


# --- verification --------------------------------------------------------------------------------------


def test_nothing_there_is_missing(backend: Backend) -> None:
    assert refused(backend, PLACE) == "missing"
    backend.write(PLACE, DATA)
    assert refused(backend, PLACE._replace(generation=4)) == "missing"
    assert refused(backend, PLACE._replace(part="tp1")) == "missing"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cluster": "c2"}, "wrong_cluster"),
        ({"location": 77}, "wrong_location"),
        ({"generation": 4}, "wrong_generation"),
        ({"part": "tp1"}, "wrong_part"),
        ({"key": bytes(32)}, "wrong_key"),
        ({"size_bytes": 9_999}, "wrong_length"),
    ],
)
def test_bytes_of_another_place_are_refused_whatever_they_are_called(
    storage: Storage, backend: Backend, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    """Mooncake 4153 (wrong KV reused): the bytes say what they are, so a poisoned or reused slot is seen."""
    backend.write(PLACE, DATA)
    other = PLACE._replace(**change)  # type: ignore[arg-type]
    storage.object_of(tmp_path, other).take(storage.object_of(tmp_path, PLACE))
    # A slot that is at another generation was given to another block since: nothing is wrong with that.
    ordinary = storage.slots and reason == "wrong_generation"
    assert refused(backend, other) == ("missing" if ordinary else reason)


def test_bytes_that_the_service_does_not_hold_the_checksum_of_are_refused(backend: Backend) -> None:
    checksum = backend.write(PLACE, DATA)
    assert refused(backend, PLACE, checksum ^ 1) == "bad_checksum"


def test_a_truncated_object_is_refused_at_any_length(
    storage: Storage, backend: Backend, tmp_path: Path, seed: int
) -> None:
    backend.write(PLACE, DATA)
    stored = storage.object_of(tmp_path, PLACE)
    assert DATA[-1] != 0, "a lost last byte would not be seen where losing is zeroing"
    whole = HEADER_BYTES + PLACE.size_bytes
    lengths = {0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, whole - 1}
    lengths |= set(random.Random(seed).sample(range(whole), 20))
    for length in sorted(lengths, reverse=True):
        stored.truncate(length)
        assert refused(backend, PLACE) in storage.cut_short(length), length


def test_an_object_that_goes_on_is_refused(storage: Storage, backend: Backend, tmp_path: Path) -> None:
    backend.write(PLACE, DATA)
    storage.object_of(tmp_path, PLACE).append(b"x")
    if storage.slots:
        assert backend.read(PLACE) == DATA, "what lies behind a block is no part of it"
    else:
        assert refused(backend, PLACE) == "wrong_length"


@pytest.mark.parametrize("stored", [PLACE.size_bytes, 1 << 60])
def test_a_length_beyond_all_memory_is_refused(
    storage: Storage, backend: Backend, tmp_path: Path, stored: int
) -> None:
    """Neither the caller's word nor the header's makes a read allocate what the object cannot hold."""
    huge = PLACE._replace(size_bytes=1 << 60)
    backend.write(PLACE, DATA)
    header = encode_header(PLACE._replace(size_bytes=stored), checksum_of(DATA))
    storage.object_of(tmp_path, PLACE).write(header + DATA)
    with pytest.raises(ReadRefused) as read:
        backend.read(huge)
    assert read.value.reason == ("truncated" if stored == huge.size_bytes else "wrong_length")


def test_a_flipped_bit_is_refused(storage: Storage, backend: Backend, tmp_path: Path, seed: int) -> None:
    checksum = backend.write(PLACE, DATA)
    stored = storage.object_of(tmp_path, PLACE)
    whole = stored.read()
    chance = random.Random(seed)
    for at in [*range(0, HEADER_BYTES, 9), *chance.sample(range(HEADER_BYTES, len(whole)), 30)]:
        bad = bytearray(whole)
        bad[at] ^= 1 << chance.randrange(8)
        stored.write(bytes(bad))
        assert refused(backend, PLACE, checksum) == ("malformed" if at < 12 else "bad_checksum"), at
    stored.write(whole)
    assert backend.read(PLACE, checksum) == DATA


# --- a place is never overwritten ----------------------------------------------------------------------


def test_a_place_is_never_overwritten(backend: Backend) -> None:
    """Mooncake hides this and keeps the old bytes: success must mean that these very bytes are there."""
    checksum = backend.write(PLACE, DATA)
    with pytest.raises(WriteFailed) as failed:
        backend.write(PLACE, bytes(10_000))
    assert failed.value.reason == "exists"
    with pytest.raises(WriteFailed) as failed:
        backend.write(PLACE._replace(key=bytes(32)), DATA)
    assert failed.value.reason == "exists"
    assert backend.read(PLACE, checksum) == DATA
    assert [found.state for found in backend.scan()] == ["published"]


def test_writing_the_same_again_is_success(backend: Backend) -> None:
    assert backend.write(PLACE, DATA) == backend.write(PLACE, DATA) == checksum_of(DATA)
    assert backend.read(PLACE) == DATA
    assert [found.state for found in backend.scan()] == ["published"]


def test_a_damaged_object_is_not_overwritten_either(
    storage: Storage, backend: Backend, tmp_path: Path
) -> None:
    backend.write(PLACE, DATA)
    storage.object_of(tmp_path, PLACE).truncate(700)
    with pytest.raises(WriteFailed) as failed:
        backend.write(PLACE, DATA)
    assert failed.value.reason == "exists"
    assert refused(backend, PLACE) in storage.cut_short(700)


# --- delete and scan -----------------------------------------------------------------------------------


def test_delete_is_idempotent_and_takes_one_place_only(storage: Storage, backend: Backend) -> None:
    others = [PLACE._replace(part="tp1"), PLACE._replace(cluster="c2")]
    if not storage.slots:
        others.append(PLACE._replace(generation=4))
    for place in (PLACE, *others):
        backend.write(place, DATA)
    bare = Place(PLACE.cluster, PLACE.location, PLACE.generation, PLACE.part)
    assert [backend.delete(bare), backend.delete(bare), backend.delete(PLACE)] == [True, False, False]
    assert refused(backend, PLACE) == "missing"
    assert backend.read_many(others) == [DATA] * len(others)


def test_a_late_delete_leaves_the_next_use_of_the_location_alone(backend: Backend) -> None:
    """A task that timed out was given to another worker; the first comes back to it much later."""
    backend.write(PLACE, DATA)
    backend.delete(PLACE)
    later = PLACE._replace(generation=PLACE.generation + 1, key=bytes(32))
    checksum = backend.write(later, DATA)
    assert not backend.delete(PLACE)
    assert backend.read(later, checksum) == DATA


def test_scan_finds_what_is_stored_of_one_cluster_or_of_all(backend: Backend) -> None:
    assert list(backend.scan()) == list(backend.scan("c1")) == []
    places = {PLACE._replace(location=number, cluster=f"c{number % 2}") for number in range(600)}
    for place in places:
        backend.write(place, DATA)
    bare = {place._replace(size_bytes=0, key=b"") for place in places}
    assert {found.place for found in backend.scan()} == bare
    assert {found.place for found in backend.scan("c1")} == {place for place in bare if place.cluster == "c1"}
    assert list(backend.scan("c3")) == []
    for found in backend.scan():
        assert found.state == "published"
        assert found.size_bytes >= PLACE.size_bytes
        assert 0 <= found.age_ms < 60_000


def test_scan_goes_on_while_files_vanish(backend: Backend) -> None:
    places = [PLACE._replace(location=number << 8) for number in range(300)]  # side by side in most storages
    for place in places:
        backend.write(place, DATA)
    met = 0
    for found in backend.scan("c1"):
        met += 1
        assert found.place is not None
        for place in places[found.place.location >> 8 :: 7]:
            backend.delete(place)
    assert 7 <= met < 300


def test_discard_takes_only_the_very_same_that_was_found(backend: Backend) -> None:
    backend.write(PLACE, DATA)
    (found,) = backend.scan()
    backend.delete(PLACE)
    assert not backend.discard(found), "gone already"
    time.sleep(0.02)  # a coarse file system clock
    backend.write(PLACE, DATA)
    assert not backend.discard(found), "another one under the same name"
    assert backend.read(PLACE) == DATA
    (again,) = backend.scan()
    assert backend.discard(again)
    assert refused(backend, PLACE) == "missing"
