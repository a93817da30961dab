"""What "computing" a block gives: bytes that follow from its key, so that every loaded byte can be
checked."""

from hashlib import shake_128


def compute(key: bytes, part: str, size_bytes: int) -> bytes:
    """The content of one part of the block `key`, `size_bytes` long. Another key or part gives other bytes
    throughout, so a block that is torn, mixed up with another, or left over from an earlier use of its
    place shows."""
    return shake_128(key + part.encode()).digest(size_bytes)
