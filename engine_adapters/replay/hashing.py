"""Block keys: what makes two blocks of two processes the same block.

A key is a digest of the block's tokens and of its parent's key, so it names the whole prefix that ends with
the block. It depends on nothing else: not on the process, its address space, `PYTHONHASHSEED` or the
platform's byte order. Keys from builtin `hash()` would differ from process to process, and no engine would
ever hit what another one wrote."""

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_SCHEME = "blake2b-chain-u32le"
"""Name of this way of hashing in an instance's fingerprint. Change the name whenever a key would change."""

KEY_LENGTH_MIN = 16
KEY_LENGTH_MAX = 64
TOKEN_BYTES = 4

CANARY_TOKENS = tuple((7919 * i) % 50_257 for i in range(1, 1025))
"""A fixed token run. Two processes that hash it to the same key hash everything to the same keys."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32. Raises `ValueError` for an id outside 0..2**32-1."""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error as error:
        raise ValueError(f"token ids are integers from 0 to 2**32-1: {error}") from None


def chain(tokens: bytes, *, block_size_tokens: int, seed: str, key_length: int = 32) -> list[bytes]:
    """Keys of the whole blocks of `tokens` (as `pack_tokens` gives them), root first; a shorter tail has no
    key.

    A tail that got a key would be a hit for a prompt that goes on differently: wrong output.
    Raises `ValueError` for a block of no tokens, a key length outside 16..64, and a torn token.
    """
    if block_size_tokens < 1:
        raise ValueError(f"block_size_tokens is {block_size_tokens}, and a block has at least one token")
    if not KEY_LENGTH_MIN <= key_length <= KEY_LENGTH_MAX:
        raise ValueError(
            f"key_length is {key_length}, and a key has {KEY_LENGTH_MIN} to {KEY_LENGTH_MAX} bytes"
        )
    if len(tokens) % TOKEN_BYTES:
        raise ValueError(f"{len(tokens)} bytes are not a whole number of {TOKEN_BYTES}-byte tokens")
    step = block_size_tokens * TOKEN_BYTES
    parent = root(seed, key_length)
    keys = []
    for start in range(0, len(tokens) - step + 1, step):
        parent = blake2b(parent + tokens[start : start + step], digest_size=key_length).digest()
        keys.append(parent)
    return keys


def root(seed: str, key_length: int) -> bytes:
    """What stands in for the parent of a root block: another seed gives other keys throughout."""
    return blake2b(seed.encode(), digest_size=key_length, person=b"ucm-root").digest()


def canary(*, block_size_tokens: int, seed: str, key_length: int = 32) -> str:
    """Hex key of a fixed token run, for the fingerprint: an engine that hashes otherwise is refused at
    registration and not noticed later by a hit rate of 0. Blocks too long for the run are probed by the run
    repeated."""
    repeats = -(-block_size_tokens // len(CANARY_TOKENS)) + 1
    keys = chain(
        pack_tokens(CANARY_TOKENS * repeats),
        block_size_tokens=block_size_tokens,
        seed=seed,
        key_length=key_length,
    )
    return keys[-1].hex()
