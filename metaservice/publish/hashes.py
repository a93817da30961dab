"""Names of blocks: the one in an engine's events, those that an engine or a router would make of token ids,
and one that is the same for all engines.
"""

import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b, sha256
from struct import Struct as Layout

import xxhash

from metaservice.wire.tokens import unpack_tokens

EVENT_HASH_MIN = 2**32
"""llm-d's decoder takes no smaller number for a hash, and drops the whole batch."""

TAIL64 = "tail64"
HEAD64 = "head64"

TOKEN_KEY_BYTES = 16

DYNAMO_SEED = 1337

DYNAMO_SALT = "dynamo-cache-salt:"

VLLM_SEED = "vllm-none-hash"
"""What vLLM begins its chains with when nothing else was given to it."""

_SEED_DIGEST_MIN = 16
_SEED_NUMBERS = 1024

_U64 = 2**64 - 1


# ---------------------------------------------------------------- in events


def event_hash(key: bytes, hash_of: str) -> int:
    """The number by which an engine's events name the block `key`: its last 8 bytes (`tail64`, vLLM) or its
    first (`head64`, SGLang), unsigned big-endian. ValueError for a key of less than 8 bytes, or any other
    `hash_of`. A number below EVENT_HASH_MIN is never to be published."""
    return event_hashes(key, len(key), hash_of)[0]


def event_hashes(keys: bytes, key_length: int, hash_of: str) -> tuple[int, ...]:
    """`event_hash` of each of these packed keys. ValueError as there, or when they are no whole number."""
    if key_length < 8:
        raise ValueError(f"a key of {key_length} bytes has no event hash: it takes 8")
    count, rest = divmod(len(keys), key_length)
    if rest:
        raise ValueError(f"{len(keys)} bytes are no whole number of {key_length}-byte keys")
    hashes: tuple[int, ...] = _layout(count, key_length, hash_of).unpack(keys)
    return hashes


@lru_cache(maxsize=256)
def _layout(count: int, key_length: int, hash_of: str) -> Layout:
    """How `count` packed keys are read as their event hashes."""
    rest = f"{key_length - 8}x" if key_length > 8 else ""
    if hash_of == TAIL64:
        return Layout(">" + (rest + "Q") * count)
    if hash_of == HEAD64:
        return Layout(">" + ("Q" + rest) * count)
    raise ValueError(f"{hash_of!r} is no way to make an event hash of a key: {TAIL64} or {HEAD64}")


# ---------------------------------------------------------------- by content


@lru_cache(maxsize=4096)
def token_root(lora: str = "", salt: str = "") -> bytes:
    """The token key that stands for the parent of a first block. Everything that hangs on it has this adapter
    and this salt: the same ids under another of either have other token keys from the first block on."""
    realm = b"%d:%s%s" % (len(lora.encode()), lora.encode(), salt.encode())
    return blake2b(realm, digest_size=TOKEN_KEY_BYTES, person=b"root").digest()


def token_key(parent: bytes, tokens: bytes) -> bytes:
    """A block by its content and all before it, TOKEN_KEY_BYTES long: engines that hash differently agree on
    it. `parent` is the token key of the block before, `token_root` for the first; `tokens` is packed
    (`wire.tokens`: each list of ids has one form)."""
    return blake2b(parent + tokens, digest_size=TOKEN_KEY_BYTES).digest()


def token_keys(parent: bytes, tokens: Iterable[bytes]) -> list[bytes]:
    """`token_key` of each of these packed blocks, which follow each other from `parent` on."""
    keys = []
    for packed in tokens:
        parent = token_key(parent, packed)
        keys.append(parent)
    return keys


# ---------------------------------------------------------------- as an engine would


def block_keys(
    scheme: str, seed: str, tokens: Sequence[int], block_size_tokens: int, lora: str = "", salt: str = ""
) -> list[bytes] | None:
    """The keys of the whole blocks in `tokens` as vLLM makes them by `scheme`, root first.

    None where it cannot be known: another scheme than `sha256` or `sha256_cbor`, a `seed` that is only a
    digest of one that is not usual, or an adapter, of which vLLM hashes a path that only the engine knows.
    Nobody should guess instead: wrong keys are a miss for blocks that are there.
    """
    spell = _SCHEMES.get(scheme)
    start = _seed(seed)
    if spell is None or start is None or lora or block_size_tokens < 1:
        return None
    parent = sha256(spell(start)).digest()
    extra: tuple[tuple[str, str], ...] | None = (("cache_salt", salt),) if salt else None
    keys = []
    for at in range(0, len(tokens) - block_size_tokens + 1, block_size_tokens):
        parent = sha256(spell((parent, tuple(tokens[at : at + block_size_tokens]), extra))).digest()
        keys.append(parent)
        extra = None
    return keys


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: object) -> bytes:
    """The shortest CBOR (RFC 8949, core deterministic) of what a block's hash is made of."""
    parts: list[bytes] = []
    _write_cbor(value, parts.append)
    return b"".join(parts)


def _write_cbor(value: object, write: Callable[[bytes], None]) -> None:
    match value:
        case None:
            write(b"\xf6")
        case int():
            write(_cbor_head(0, value))
        case bytes():
            write(_cbor_head(2, len(value)) + value)
        case str():
            text = value.encode()
            write(_cbor_head(3, len(text)) + text)
        case tuple():
            write(_cbor_head(4, len(value)))
            for item in value:
                _write_cbor(item, write)
        case _:
            raise AssertionError(f"no part of a block's hash: {value!r}")


def _cbor_head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes((major << 5 | value,))
    for more, size in enumerate((1, 2, 4, 8)):
        if value < 1 << 8 * size:
            return bytes((major << 5 | 24 + more,)) + value.to_bytes(size, "big")
    raise AssertionError(f"not in 64 bits: {value}")


_SCHEMES: dict[str, Callable[[object], bytes]] = {"sha256": _pickled, "sha256_cbor": _cbor}


@lru_cache(maxsize=256)
def _seed(told: str) -> str | None:
    """The seed itself, vLLM's own for "". An instance may have registered the beginning of its SHA-256
    instead, in hex: then the usual seeds are tried, and None is said when none of them is it."""
    if len(told) < _SEED_DIGEST_MIN or not set(told) <= set("0123456789abcdef"):
        return told or VLLM_SEED
    usual = (VLLM_SEED, *map(str, range(_SEED_NUMBERS)))
    return next((seed for seed in usual if sha256(seed.encode()).hexdigest().startswith(told)), None)


# ---------------------------------------------------------------- as a router would


def cache_namespace(salt: str) -> str:
    """A salt as Dynamo's router knows it. Its workers hand an engine more than that, with DYNAMO_SALT before
    it."""
    return salt.removeprefix(DYNAMO_SALT) or salt


@lru_cache(maxsize=4096)
def dynamo_seed(lora: str = "", salt: str = "") -> int:
    """What `dynamo_local_hash` begins with, for blocks of this adapter and with this salt, as the engine has
    it ("": none)."""
    seed = DYNAMO_SEED
    if lora:
        seed += xxhash.xxh3_64_intdigest(lora.encode())
    if salt:
        seed += xxhash.xxh3_64_intdigest(cache_namespace(salt).encode(), seed=1)
    return seed & _U64


def dynamo_local_hash(tokens: bytes, seed: int = DYNAMO_SEED) -> int:
    """By what Dynamo knows a block's own tokens (packed here), whatever is before them. `seed` as of
    `dynamo_seed`. ValueError as `unpack_tokens`."""
    return xxhash.xxh3_64_intdigest(id_bytes(tokens), seed=seed)


# ---------------------------------------------------------------- as SGLang would


def page_key(before: bytes, tokens: bytes) -> bytes:
    """SGLang's key of a page: `tokens` is packed, `before` the key of the page before, b"" for the first.
    ValueError as `unpack_tokens`."""
    return sha256(before + id_bytes(tokens)).digest()


def id_bytes(tokens: bytes) -> bytes:
    """A packed block's ids as 4 bytes each, little-endian. ValueError as `unpack_tokens`."""
    ids = unpack_tokens(tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
