"""Token ids of a block, packed: what routers need to know a block by, and what costs most of what is stored
for them.

A packed block is one byte `w` (1 to 4) and then `w` planes of one byte a token: all lowest bytes, all second
bytes, and so on. `w` is the smallest that holds every id, so that each list of ids has exactly one packed
form. Two or three bytes a token instead of four, and both ways are a few slices in C.
"""

import sys
from array import array
from collections.abc import Sequence

TOKEN_MAX = 2**32 - 1
"""Consumers decode ids as u32: one that is larger makes them drop the whole batch."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """One block's ids. ValueError when one is not in 0..TOKEN_MAX."""
    try:
        ids = array("I", tokens)
    except OverflowError:
        raise ValueError(f"a token id is not in 0..{TOKEN_MAX}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    raw = ids.tobytes()
    planes = [raw[at::4] for at in range(4)]
    while len(planes) > 1 and not any(planes[-1]):
        planes.pop()
    return bytes((len(planes),)) + b"".join(planes)


def token_count(packed: bytes) -> int:
    """How many ids a packed block has. ValueError when these bytes are no packed block, also when a smaller
    width would have held them."""
    width = packed[0] if packed else 0
    if not 1 <= width <= 4:
        raise ValueError("packed token ids begin with their width, 1 to 4")
    count, rest = divmod(len(packed) - 1, width)
    if rest:
        raise ValueError(f"{len(packed) - 1} bytes are no whole number of {width}-byte token ids")
    if width > 1 and not any(packed[1 + (width - 1) * count :]):
        raise ValueError(f"these token ids fit in fewer than {width} bytes")
    return count


def unpack_tokens(packed: bytes) -> "array[int]":
    """The ids (u32) of a packed block. ValueError as `token_count`."""
    count = token_count(packed)
    raw = bytearray(4 * count)
    for at in range(packed[0]):
        raw[at::4] = packed[1 + at * count : 1 + (at + 1) * count]
    ids = array("I", bytes(raw))
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
