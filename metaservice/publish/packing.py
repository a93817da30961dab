"""What token keys are made of: ids of many blocks, packed block by block (`wire.tokens`) in a few slices for
all of them, and what a first block hangs on."""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from metaservice.publish.hashes import TOKEN_KEY_BYTES, token_root
from metaservice.wire.tokens import TOKEN_MAX

_NAME_MAX = 256


def raw_ids(tokens: Sequence[int]) -> bytes:
    """Ids as little-endian u32. ValueError when one is none."""
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError):
        raise ValueError(f"a token id is not a whole number in 0..{TOKEN_MAX}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def pack_windows(raw: bytes, size_tokens: int, stride_tokens: int, count: int) -> list[bytes]:
    """`count` packed runs of `size_tokens` ids (little-endian u32 in `raw`), each beginning `stride_tokens`
    behind the one before. ValueError when there are not so many ids."""
    if count and len(raw) < 4 * ((count - 1) * stride_tokens + size_tokens):
        raise ValueError("there are fewer token ids than blocks need")
    total = len(raw) // 4
    planes = [raw[at : 4 * total : 4] for at in range(4)]
    while len(planes) > 1 and planes[-1].count(0) == total:
        planes.pop()
    packed = []
    for start in range(0, count * stride_tokens, stride_tokens):
        parts = [plane[start : start + size_tokens] for plane in planes]
        while len(parts) > 1 and parts[-1].count(0) == size_tokens:
            parts.pop()
        packed.append(_WIDTHS[len(parts)] + b"".join(parts))
    return packed


_WIDTHS = (b"", b"\x01", b"\x02", b"\x03", b"\x04")


def ids_of(raw: bytes) -> "array[int]":
    """Little-endian u32 as ids; bytes that are no whole one are left out."""
    ids = array("I", raw[: len(raw) // 4 * 4])
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def root_of(lora: str, salt: str) -> bytes:
    """`token_root`, which remembers what it is asked: names that are too long to be ones it never sees."""
    if len(lora) <= _NAME_MAX and len(salt) <= _NAME_MAX:
        return token_root(lora, salt)
    realm = f"{len(lora)}:{lora}{salt}".encode()
    return blake2b(realm, digest_size=TOKEN_KEY_BYTES, person=b"long").digest()
