"""The header in front of every stored payload, and the one place that decides whether stored bytes may be
used.

A stored object is `HEADER_BYTES` of header followed by the payload. The header repeats everything that the
service says about the place, so that bytes under the wrong name, of an earlier use of the location, of
another block, cut short or rotten are told from the right ones by the bytes themselves. Verification is pure:
stored bytes in, ReadRefused or nothing out, whatever the bytes are.

    offset  size  field (little-endian)
         0     8  magic
         8     2  version
        10     2  header length
        12     4  generation
        16     8  location
        24     8  payload length
        32     8  xxh3_64 of the payload
        40     1  length of the cluster name, then 128 bytes of it
       169     1  length of the part name, then 128 bytes of it
       298     1  length of the key, then 64 bytes of it
       363   141  zeros
       504     8  xxh3_64 of the 504 bytes before
"""

import re
from functools import lru_cache
from struct import Struct

from xxhash import xxh3_64_intdigest

from dataplane.port import GENERATION_MAX, LOCATION_MAX, Buffer, Place, ReadReason, ReadRefused
from metaservice.wire.schemas import NAME_PATTERN

HEADER_BYTES = 512
"""One sector: small beside a block, and payloads stay aligned for direct I/O."""

MAGIC = b"UCMBLOCK"
VERSION = 1

_FIELDS = Struct("<8sHHIQQQB128sB128sB64s141x")
_SEAL = Struct("<Q")
assert _FIELDS.size + _SEAL.size == HEADER_BYTES

_SEALED_BYTES = _FIELDS.size
_CHECKSUM_AT = 32
_KEY_BYTES_MAX = 64
_CLUSTER = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_PART = re.compile(NAME_PATTERN)


class BadPlace(ValueError):
    """A place that cannot be: the message names the field. Backends turn it into their own typed errors."""


def check_place(place: Place) -> None:
    """Raise BadPlace unless the place can be named in a path or header: integers in range, names of plain
    characters.

    This is what keeps a hostile or mistaken part name ("../x", NUL) from leaving the storage's own folder.
    """
    if type(place.location) is not int or not 0 <= place.location <= LOCATION_MAX:
        raise BadPlace(f"location {place.location!r} is not an integer in 0..{LOCATION_MAX}")
    if type(place.generation) is not int or not 1 <= place.generation <= GENERATION_MAX:
        raise BadPlace(f"generation {place.generation!r} is not an integer in 1..{GENERATION_MAX}")
    try:
        check_names(place.cluster, place.part)
    except TypeError:
        raise BadPlace("cluster and part are text") from None


@lru_cache(maxsize=1024)
def check_names(cluster: str, part: str) -> None:
    """Raise BadPlace unless both are names of plain characters. Cached: a process sees few, and each many
    times."""
    if not _CLUSTER.match(cluster):
        raise BadPlace(f"cluster {cluster!r} is not a name of 1 to 128 letters, digits or any of '._-'")
    if not _PART.match(part):
        raise BadPlace(f"part {part!r} is not a name of 1 to 128 letters, digits or any of '._:@+-'")


def check_content(place: Place) -> None:
    """Raise BadPlace unless `place` says what a payload must be: at least one byte, under a key of 1 to 64
    bytes."""
    if type(place.size_bytes) is not int or not 1 <= place.size_bytes <= LOCATION_MAX:
        raise BadPlace(f"size_bytes {place.size_bytes!r} is not an integer of 1 or more")
    if type(place.key) is not bytes or not 1 <= len(place.key) <= _KEY_BYTES_MAX:
        raise BadPlace(f"the key is not 1 to {_KEY_BYTES_MAX} bytes")


def checksum_of(payload: Buffer) -> int:
    """The xxh3_64 of a payload: what headers hold, what a finish reports, what a lookup hands to readers."""
    return xxh3_64_intdigest(payload)


def encode_header(place: Place, checksum: int) -> bytes:
    """The `HEADER_BYTES` that go before the payload of `place`. Raises BadPlace."""
    check_place(place)
    check_content(place)
    cluster, part = place.cluster.encode(), place.part.encode()
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        place.generation,
        place.location,
        place.size_bytes,
        checksum,
        len(cluster),
        cluster,
        len(part),
        part,
        len(place.key),
        place.key,
    )
    return fields + _SEAL.pack(xxh3_64_intdigest(fields))


def verify_header(place: Place, header: Buffer, checksum: int | None = None) -> int:
    """Refuse a header that is not that of `place`; returns the checksum that its payload must have.

    `header` is what stands in the first `HEADER_BYTES` of the object, shorter when the object is. `checksum`
    is the one the service holds: what was finished, not only what was stored. Raises ReadRefused only.
    """
    if len(header) < HEADER_BYTES:
        raise ReadRefused("truncated", place, f"{len(header)} of {HEADER_BYTES} header bytes")
    stored: int = _SEAL.unpack_from(header, _CHECKSUM_AT)[0]
    try:
        expected = encode_header(place, stored)
    except BadPlace as error:
        raise ReadRefused("bad_place", place, str(error)) from None
    if header != expected:
        raise _refusal(place, header)
    if checksum is not None and checksum != stored:
        raise ReadRefused("bad_checksum", place, "the service holds another")
    return stored


def _refusal(place: Place, header: Buffer) -> ReadRefused:
    """Why `header`, which is not the one of `place`, is to be refused."""
    sealed = memoryview(header)[:_SEALED_BYTES]
    magic, version, length, generation, location, size_bytes, _, *names = _FIELDS.unpack(sealed)
    if (magic, version, length) != (MAGIC, VERSION, HEADER_BYTES):
        return ReadRefused("malformed", place, "not a header of this format")
    if _SEAL.unpack_from(header, _SEALED_BYTES) != (xxh3_64_intdigest(sealed),):
        return ReadRefused("bad_checksum", place, "of the header")
    cluster, part, key = (names[at + 1][: names[at]] for at in (0, 2, 4))
    claims: tuple[tuple[ReadReason, object, object], ...] = (
        ("wrong_cluster", cluster, place.cluster.encode()),
        ("wrong_location", location, place.location),
        ("wrong_generation", generation, place.generation),
        ("wrong_part", part, place.part.encode()),
        ("wrong_key", key, place.key),
        ("wrong_length", size_bytes, place.size_bytes),
    )
    for reason, found, expected in claims:
        if found != expected:
            return ReadRefused(reason, place, f"found {found.hex() if isinstance(found, bytes) else found}")
    return ReadRefused("malformed", place, "a sealed header with bytes where none belong")


def verify_length(place: Place, object_bytes: int) -> None:
    """Refuse an object of `object_bytes`, header included, that cannot hold just the payload. Raises
    ReadRefused only.

    To be called after `verify_header`, so that an object cut short is told from an object of another block.
    """
    payload_bytes = object_bytes - HEADER_BYTES
    if payload_bytes < place.size_bytes:
        raise ReadRefused("truncated", place, f"{payload_bytes} of {place.size_bytes} payload bytes")
    if payload_bytes > place.size_bytes:
        raise ReadRefused(
            "wrong_length", place, f"{payload_bytes} payload bytes instead of {place.size_bytes}"
        )


def verify_payload(place: Place, payload: Buffer, stored: int) -> None:
    """Refuse a payload, of the right length, whose checksum is not `stored`: what `verify_header`
    returned."""
    if xxh3_64_intdigest(payload) != stored:
        raise ReadRefused("bad_checksum", place, "of the payload")


def verify(place: Place, whole: Buffer, checksum: int | None = None) -> memoryview:
    """The payload inside a whole stored object, verified against `place`. Raises ReadRefused only."""
    view = memoryview(whole)
    stored = verify_header(place, view[:HEADER_BYTES], checksum)
    verify_length(place, len(view))
    verify_payload(place, view[HEADER_BYTES:], stored)
    return view[HEADER_BYTES:]
