"""The batch codec: what went in comes out, and no bytes whatever raise anything but its two errors."""

import random
import struct
import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaservice.core.events import (
    EngineRegistered,
    Event,
    LocationsGone,
    SessionRenewed,
    TenantPut,
    TookOver,
    WriteFinished,
    WriteStarted,
)
from metaservice.core.model import Quota
from metaservice.journal import frame
from metaservice.journal.codec import BatchCodec, decode_batch, encode_batch
from metaservice.journal.errors import CorruptBatch, UnsupportedVersion

big = st.integers(0, 2**62)
text = st.text(max_size=20)
column = st.binary(max_size=200)

EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(TookOver, now_ms=big, epoch=big, cluster=text),
    st.builds(
        TenantPut, now_ms=big, tenant=text, quota=st.builds(Quota, bytes=st.none() | big, blocks=st.none())
    ),
    st.builds(
        EngineRegistered, now_ms=big, engine=text, incarnation=text, instance=text, rank=st.integers(0, 64)
    ),
    st.builds(
        WriteStarted,
        now_ms=big,
        session=big,
        engine=text,
        incarnation=text,
        table=big,
        ttl_ms=big,
        deadline_ms=big,
        keys=column,
        parent=st.none() | column,
        parents=st.none() | st.lists(st.none() | column, max_size=3).map(tuple),
        slots=column,
        generations=column,
        storages=column,
        outcomes=column,
        reasons=column,
        rows=column,
        wait_ms=column,
        evicted=big,
        request_id=text,
    ),
    st.builds(
        WriteFinished,
        now_ms=big,
        session=big,
        slots=column,
        status=column,
        masks=column,
        checksums=column,
        not_before_ms=big,
        published=big,
        open=big,
        request_id=text,
    ),
    st.builds(SessionRenewed, now_ms=big, session=big, deadline_ms=big),
    st.builds(LocationsGone, now_ms=big, slots=column),
)

SAMPLE: list[Event] = [
    TookOver(now_ms=1, epoch=7, cluster="c"),
    LocationsGone(now_ms=2, slots=bytes(range(256))),
    SessionRenewed(now_ms=3, session=9, deadline_ms=60_000),
]


@given(st.lists(EVENTS, min_size=1, max_size=5))
def test_what_went_in_comes_out_in_order(events: list[Event]) -> None:
    payload = encode_batch(events)
    back = decode_batch(payload)
    assert back == events
    assert [type(event) for event in back] == [type(event) for event in events]


def test_the_frame_on_the_disk_is_the_documented_one() -> None:
    body = b"body"
    prefix = b"UCMB" + bytes([1, 0, 0, 0]) + struct.pack(">I", 4)
    assert frame.seal(body) == prefix + struct.pack(">I", zlib.crc32(prefix + body)) + body


def test_every_flipped_bit_is_found() -> None:
    payload = encode_batch(SAMPLE)
    for bit in range(len(payload) * 8):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(CorruptBatch):
            decode_batch(bytes(flipped))


def test_every_truncation_and_every_longer_tail_is_found() -> None:
    payload = encode_batch(SAMPLE)
    for length in range(len(payload)):
        with pytest.raises(CorruptBatch):
            decode_batch(payload[:length])
    with pytest.raises(CorruptBatch):
        decode_batch(payload + b"\0")
    with pytest.raises(CorruptBatch):
        decode_batch(payload + payload)


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_no_bytes_raise_another_error(junk: bytes) -> None:
    with pytest.raises(CorruptBatch):
        decode_batch(junk)


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_no_body_behind_a_good_checksum_raises_another_error(body: bytes) -> None:
    payload = frame.seal(body)
    try:
        events = decode_batch(payload)
    except CorruptBatch:
        return
    assert decode_batch(encode_batch(events)) == events


def test_mutated_bodies_behind_a_good_checksum_raise_no_other_error() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    body = bytes(frame.unseal(encode_batch(SAMPLE)))
    for _ in range(3_000):
        mutated = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        try:
            decode_batch(frame.seal(bytes(mutated)))
        except CorruptBatch:
            continue
        except Exception as error:
            pytest.fail(f"seed {seed}: {mutated.hex()} raised {error!r}")


def test_a_body_nested_beyond_reason_is_corrupt() -> None:
    with pytest.raises(CorruptBatch):
        decode_batch(frame.seal(b"\x91" * 100_000))


@pytest.mark.parametrize("version", [frame.BODY_VERSION + 1, 255])
def test_a_whole_batch_of_a_newer_release_is_told_from_a_damaged_one(version: int) -> None:
    payload = frame.seal(b"whatever a later release means by it", version)
    with pytest.raises(UnsupportedVersion) as caught:
        decode_batch(payload)
    assert caught.value.found == version
    assert str(frame.BODY_VERSION) in str(caught.value)
    damaged = payload[:-1] + bytes([payload[-1] ^ 1])
    with pytest.raises(CorruptBatch):
        decode_batch(damaged)


def test_an_empty_batch_is_neither_written_nor_read() -> None:
    with pytest.raises(ValueError, match="one event"):
        encode_batch([])
    with pytest.raises(CorruptBatch):
        decode_batch(frame.seal(msgspec.msgpack.encode([])))


def test_a_batch_beyond_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "BATCH_BYTES_MAX", 100)
    assert len(frame.seal(bytes(100 - frame.HEADER_BYTES))) == 100
    with pytest.raises(ValueError, match="100 bytes"):
        frame.seal(bytes(101 - frame.HEADER_BYTES))


class Old(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    a: int


class New(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    a: int
    b: bytes = b""


class Unknown(msgspec.Struct, frozen=True, array_like=True, tag="unknown"):
    a: int


def test_a_field_added_at_the_end_leaves_old_batches_readable() -> None:
    old: BatchCodec[Old | Unknown] = BatchCodec(Old | Unknown)
    new: BatchCodec[New] = BatchCodec(New)
    assert new.decode(old.encode([Old(a=5)])) == [New(a=5, b=b"")]
    with pytest.raises(CorruptBatch, match="known events"):
        new.decode(old.encode([Unknown(a=1)]))
