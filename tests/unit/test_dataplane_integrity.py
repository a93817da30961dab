"""The header: what it says comes back, and nothing else is ever accepted, whatever the bytes."""

import random
from struct import pack_into

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from dataplane.integrity import (
    HEADER_BYTES,
    BadPlace,
    check_place,
    checksum_of,
    encode_header,
    verify,
    verify_header,
)
from dataplane.port import Place, ReadRefused

PAYLOAD = bytes(range(97))
PLACE = Place("c0ffee", 0x00AB_0000_0000_1234, 7, "tp0", len(PAYLOAD), bytes(range(32)))
OBJECT = encode_header(PLACE, checksum_of(PAYLOAD)) + PAYLOAD

names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}\Z")
places = st.builds(
    Place,
    cluster=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z"),
    location=st.integers(0, 2**64 - 1),
    generation=st.integers(1, 2**32 - 1),
    part=names,
    size_bytes=st.just(len(PAYLOAD)),
    key=st.binary(min_size=1, max_size=64),
)


def reason(whole: bytes, place: Place = PLACE, checksum: int | None = None) -> str:
    """Why `whole` is refused. Fails when it is not, or when anything but ReadRefused is raised."""
    with pytest.raises(ReadRefused) as refused:
        verify(place, whole, checksum)
    assert refused.value.place == place
    return refused.value.reason


@given(places)
def test_what_was_encoded_verifies_as_itself(place: Place) -> None:
    header = encode_header(place, checksum_of(PAYLOAD))
    assert len(header) == HEADER_BYTES
    assert verify(place, header + PAYLOAD, checksum_of(PAYLOAD)) == PAYLOAD


@given(places, places)
def test_an_object_of_another_place_is_refused_naming_the_first_field_that_differs(
    a: Place, b: Place
) -> None:
    fields = ("cluster", "location", "generation", "part", "key")
    differing = [field for field in fields if getattr(a, field) != getattr(b, field)]
    whole = encode_header(a, checksum_of(PAYLOAD)) + PAYLOAD
    if differing:
        assert reason(whole, b) == f"wrong_{differing[0]}"
    else:
        assert verify(b, whole) == PAYLOAD


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"cluster": "c0ffef"}, "wrong_cluster"),
        ({"location": PLACE.location + 1}, "wrong_location"),
        ({"generation": PLACE.generation + 1}, "wrong_generation"),
        ({"part": "tp1"}, "wrong_part"),
        ({"part": "tp"}, "wrong_part"),
        ({"key": bytes(32)}, "wrong_key"),
        ({"key": PLACE.key[:31]}, "wrong_key"),
        ({"size_bytes": len(PAYLOAD) + 1}, "wrong_length"),
        ({"size_bytes": len(PAYLOAD) - 1}, "wrong_length"),
    ],
)
def test_every_field_is_compared(change: dict[str, object], expected: str) -> None:
    assert reason(OBJECT, PLACE._replace(**change)) == expected  # type: ignore[arg-type]


def test_the_checksum_that_the_service_holds_is_compared() -> None:
    assert verify(PLACE, OBJECT, checksum_of(PAYLOAD)) == PAYLOAD
    assert reason(OBJECT, checksum=checksum_of(PAYLOAD) ^ 1) == "bad_checksum"


def test_every_single_flipped_bit_is_refused_with_its_reason() -> None:
    for at in range(len(OBJECT)):
        for bit in range(8):
            whole = bytearray(OBJECT)
            whole[at] ^= 1 << bit
            assert reason(bytes(whole)) == ("malformed" if at < 12 else "bad_checksum"), (at, bit)


def test_every_truncation_is_refused_as_truncated() -> None:
    for length in range(len(OBJECT)):
        assert reason(OBJECT[:length]) == "truncated", length


@pytest.mark.parametrize("more", [1, 512, 10_000])
def test_bytes_behind_the_payload_are_refused(more: int) -> None:
    assert reason(OBJECT + bytes(more)) == "wrong_length"


def test_a_run_of_zeros_as_a_power_cut_leaves_it_is_refused() -> None:
    assert reason(bytes(len(OBJECT))) == "malformed"
    assert reason(OBJECT[:HEADER_BYTES] + bytes(len(PAYLOAD))) == "bad_checksum"


def test_a_header_sealed_anew_over_bytes_that_do_not_belong_is_refused() -> None:
    """Somebody else's idea of this format: all claims right and the seal too, yet not what we write."""
    header = bytearray(OBJECT[:HEADER_BYTES])
    header[400] = 1
    pack_into("<Q", header, 504, xxh3_64_intdigest(bytes(header[:504])))
    assert reason(bytes(header) + PAYLOAD) == "malformed"


@pytest.mark.parametrize("length_at", [40, 169, 298])
def test_name_lengths_beyond_their_fields_are_refused(length_at: int) -> None:
    header = bytearray(OBJECT[:HEADER_BYTES])
    header[length_at] = 255
    pack_into("<Q", header, 504, xxh3_64_intdigest(bytes(header[:504])))
    assert reason(bytes(header) + PAYLOAD).startswith("wrong_")


def test_random_damage_never_passes_nor_raises_anything_else(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(3_000):
        whole = bytearray(OBJECT)
        for _ in range(chance.randint(1, 8)):
            at = chance.randrange(len(whole))
            end = min(len(whole), at + chance.randint(1, 64))
            match chance.randrange(4):
                case 0:
                    whole[at:end] = chance.randbytes(end - at)
                case 1:
                    del whole[at:end]
                case 2:
                    whole[at:at] = chance.randbytes(end - at)
                case 3:
                    whole[at:end] = bytes(end - at)
            if len(whole) == 0:
                break
        if whole != OBJECT:
            reason(bytes(whole))


@given(st.binary(max_size=2_000))
def test_any_bytes_are_refused(whole: bytes) -> None:
    assert reason(whole) == ("truncated" if len(whole) < HEADER_BYTES else "malformed")


@pytest.mark.parametrize(
    "change",
    [
        {"cluster": ""},
        {"cluster": ".."},
        {"cluster": "a/b"},
        {"cluster": "a\0b"},
        {"cluster": "a\n"},
        {"cluster": "é"},
        {"cluster": "c" * 129},
        {"cluster": None},
        {"part": ""},
        {"part": "."},
        {"part": ".."},
        {"part": "../../etc/passwd"},
        {"part": "/etc/passwd"},
        {"part": "tp0\0"},
        {"part": "tp0\n"},
        {"part": "tp 0"},
        {"part": "٣"},
        {"part": "p" * 129},
        {"part": 5},
        {"location": -1},
        {"location": 2**64},
        {"location": 1.0},
        {"location": True},
        {"location": "1"},
        {"generation": 0},
        {"generation": -1},
        {"generation": 2**32},
        {"generation": None},
        {"key": b""},
        {"key": b"k" * 65},
        {"key": "text"},
        {"size_bytes": 0},
        {"size_bytes": -1},
        {"size_bytes": 1.5},
        {"size_bytes": 2**64},
    ],
)
def test_a_place_that_cannot_be_is_never_named(change: dict[str, object]) -> None:
    place = PLACE._replace(**change)  # type: ignore[arg-type]
    with pytest.raises(BadPlace):
        encode_header(place, 1)
    if not change.keys() & {"key", "size_bytes"}:
        with pytest.raises(BadPlace):
            check_place(place)
    with pytest.raises(ReadRefused) as refused:
        verify_header(place, OBJECT[:HEADER_BYTES])
    assert refused.value.reason == "bad_place"
