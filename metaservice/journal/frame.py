"""The frame around a batch: what makes its bytes recognisable, versioned and checked.

    magic "UCMB" (4) | body version (1) | zero (3) | body length (4) | crc32 (4) | body

Big endian. The checksum covers everything but itself, so no flipped bit passes as another version or
length. The frame never changes under this magic; the version speaks of the body only, so an old release can
still tell a whole batch of a newer one from a damaged one.
"""

import struct
import zlib

from metaservice.journal.errors import CorruptBatch, UnsupportedVersion

MAGIC = b"UCMB"
BODY_VERSION = 1
BATCH_BYTES_MAX = 256 * 1024 * 1024
"""Frame and body together. A bound on what one append writes and one read allocates."""

_PREFIX = struct.Struct(">4sB3xI")
_CRC = struct.Struct(">I")
HEADER_BYTES = _PREFIX.size + _CRC.size


def seal(body: bytes, version: int = BODY_VERSION) -> bytes:
    """Puts the frame around `body`. ValueError when the result would pass `BATCH_BYTES_MAX`."""
    if len(body) + HEADER_BYTES > BATCH_BYTES_MAX:
        raise ValueError(f"a batch has {BATCH_BYTES_MAX} bytes at most, not {len(body) + HEADER_BYTES}")
    prefix = _PREFIX.pack(MAGIC, version, len(body))
    return b"".join((prefix, _CRC.pack(zlib.crc32(body, zlib.crc32(prefix))), body))


def check_shape(payload: bytes) -> None:
    """Magic, padding and length, without reading the body. CorruptBatch says what is wrong."""
    if len(payload) < HEADER_BYTES:
        raise CorruptBatch(f"{len(payload)} bytes are fewer than a frame has")
    magic, _, length = _PREFIX.unpack_from(payload)
    if magic != MAGIC:
        raise CorruptBatch("it does not begin as a batch does")
    if length != len(payload) - HEADER_BYTES:
        raise CorruptBatch(f"its body should have {length} bytes and has {len(payload) - HEADER_BYTES}")


def check_version(payload: bytes, what: str = "a batch") -> None:
    """UnsupportedVersion about `what` when the body of a whole frame is of another version than this
    release reads.
    """
    version = payload[len(MAGIC)]
    if not 1 <= version <= BODY_VERSION:
        raise UnsupportedVersion(what, version, BODY_VERSION)


def unseal(payload: bytes) -> memoryview:
    """The body inside `payload`, not copied.

    Raises CorruptBatch for anything that is not a whole frame, and UnsupportedVersion for a whole frame
    from a newer release; never another error, whatever the bytes are.
    """
    check_shape(payload)
    view = memoryview(payload)
    (crc,) = _CRC.unpack_from(payload, _PREFIX.size)
    body = view[HEADER_BYTES:]
    if zlib.crc32(body, zlib.crc32(view[: _PREFIX.size])) != crc:
        raise CorruptBatch("its checksum does not match")
    check_version(payload)
    return body
