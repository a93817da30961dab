"""Names of blocks, against numbers that the engines' and routers' own programs gave."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaservice.publish.hashes import (
    block_keys,
    dynamo_local_hash,
    dynamo_seed,
    event_hash,
    event_hashes,
    token_key,
    token_keys,
    token_root,
)
from metaservice.wire.tokens import pack_tokens

TOKENS = list(range(100, 116))
VLLM = {
    "sha256_cbor": [2075310216342196106, 17438879670614067321, 16736202047628721110, 5526965471597387741],
    "sha256": [11368576285790098258, 4792304319162787800, 6650736115905410957, 15147405929235592947],
}
"""vLLM 0.32's event hashes of TOKENS in blocks of 4, with its own seed."""

WIDTHS = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1]
"""Ids at every bound of a serialisation's widths."""


# ---------------------------------------------------------------- event hashes


def test_event_hash_is_the_tail_for_vllm_and_the_head_for_sglang() -> None:
    key = bytes(range(1, 33))
    assert event_hash(key, "tail64") == 0x191A1B1C1D1E1F20
    assert event_hash(key, "head64") == 0x0102030405060708


@given(
    st.integers(8, 64).flatmap(
        lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=1, max_size=20)
    ),
    st.sampled_from(["tail64", "head64"]),
)
def test_packed_keys_have_the_hashes_of_each(keys: list[bytes], hash_of: str) -> None:
    each = tuple(event_hash(key, hash_of) for key in keys)
    ends = (slice(-8, None), slice(0, 8))[hash_of == "head64"]
    assert each == tuple(int.from_bytes(key[ends], "big") for key in keys)
    assert event_hashes(b"".join(keys), len(keys[0]), hash_of) == each


def test_no_keys_have_no_hashes() -> None:
    assert event_hashes(b"", 32, "tail64") == ()


@pytest.mark.parametrize(
    ("keys", "length", "hash_of"),
    [(b"1234567", 7, "tail64"), (b"x" * 33, 32, "tail64"), (b"x" * 32, 32, "middle"), (b"", 0, "tail64")],
)
def test_what_has_no_event_hash_is_refused(keys: bytes, length: int, hash_of: str) -> None:
    with pytest.raises(ValueError, match=r"hash|whole number"):
        event_hashes(keys, length, hash_of)


# ---------------------------------------------------------------- by content


def chain(tokens: list[int], size: int, lora: str = "", salt: str = "") -> list[bytes]:
    packed = [pack_tokens(tokens[at : at + size]) for at in range(0, len(tokens) - size + 1, size)]
    return token_keys(token_root(lora, salt), packed)


def test_token_keys_chain() -> None:
    packed = [pack_tokens([1, 2]), pack_tokens([3, 4])]
    first = token_key(token_root(), packed[0])
    assert token_keys(token_root(), packed) == [first, token_key(first, packed[1])]
    assert {len(key) for key in (first, token_root())} == {16}


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    assert chain([1, 2, 9, 9], 2)[1] != chain([3, 4, 9, 9], 2)[1]


def test_row_19_base_and_two_adapters_are_three_blocks() -> None:
    assert len({tuple(chain(TOKENS, 4, lora=lora)) for lora in ("", "a", "b")}) == 3
    assert not set(chain(TOKENS, 4)) & set(chain(TOKENS, 4, lora="a"))


def test_row_20_two_salts_share_no_block() -> None:
    plain, one, other = (set(chain(TOKENS, 4, salt=salt)) for salt in ("", "tenant-a", "tenant-b"))
    assert not plain & one and not plain & other and not one & other


def test_an_adapter_and_a_salt_are_not_mistaken_for_each_other() -> None:
    realms = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc", ""),
        ("", "abc"),
        ("3:abc", ""),
        ("", ""),
        ("é", "x"),
        ("e", "x"),
    ]
    assert len({token_root(*realm) for realm in realms}) == len(realms)


# ---------------------------------------------------------------- as vLLM


@pytest.mark.parametrize("scheme", sorted(VLLM))
@pytest.mark.parametrize(
    "seed",
    ["", "vllm-none-hash", sha256(b"vllm-none-hash").hexdigest()[:32]],
    ids=["none", "itself", "digest"],
)
def test_block_keys_are_vllms(scheme: str, seed: str) -> None:
    keys = block_keys(scheme, seed, TOKENS, 4)
    assert keys is not None
    assert [event_hash(key, "tail64") for key in keys] == VLLM[scheme]


def hashes_as_vllm(scheme: str, tokens: list[int], salt: str = "") -> list[int]:
    keys = block_keys(scheme, "", tokens, 4, salt=salt)
    assert keys is not None
    return [event_hash(key, "tail64") for key in keys]


def test_salted_keys_are_vllms() -> None:
    assert hashes_as_vllm("sha256", TOKENS, "tenant-a") == [
        13313455522186597342,
        9677541058455162342,
        11812177954300442340,
        11876555130713805962,
    ]
    assert hashes_as_vllm("sha256_cbor", TOKENS, "tenant-a") == [
        15539888983423818746,
        8945372270629320014,
        15049562099882309463,
        15403226328828191734,
    ]


def test_keys_of_ids_of_every_width_are_vllms() -> None:
    assert hashes_as_vllm("sha256", WIDTHS) == [16487019528802631751, 15943528467544304989]
    assert hashes_as_vllm("sha256_cbor", WIDTHS) == [12570889259931117794, 3315146814522465802]


def test_a_salt_is_in_the_first_block_and_so_in_all() -> None:
    plain, salted = block_keys("sha256", "", TOKENS, 4), block_keys("sha256", "", TOKENS, 4, salt="tenant-a")
    assert plain is not None and salted is not None
    assert not set(plain) & set(salted)


def test_a_part_of_a_block_has_no_key() -> None:
    assert block_keys("sha256", "", TOKENS[:7], 4) == (block_keys("sha256", "", TOKENS, 4) or [])[:1]
    assert block_keys("sha256", "", TOKENS[:3], 4) == []


def test_a_digest_of_a_number_is_that_seed() -> None:
    digest = sha256(b"42").hexdigest()[:32]
    assert block_keys("sha256_cbor", digest, TOKENS, 4) == block_keys("sha256_cbor", "42", TOKENS, 4)
    assert block_keys("sha256_cbor", "42", TOKENS, 4) != block_keys("sha256_cbor", "", TOKENS, 4)


@pytest.mark.parametrize(
    ("scheme", "seed", "lora"),
    [
        ("xxhash", "7", ""),
        ("sglang", "", ""),
        ("sha256", sha256(b"nobody guesses this one").hexdigest()[:32], ""),
        ("sha256", "", "adapter"),
    ],
    ids=["not-sha256", "unknown", "secret-seed", "adapter"],
)
def test_what_cannot_be_known_is_not_guessed(scheme: str, seed: str, lora: str) -> None:
    assert block_keys(scheme, seed, TOKENS, 4, lora=lora) is None


# ---------------------------------------------------------------- as Dynamo


@pytest.mark.parametrize(
    ("lora", "salt", "hashes"),
    [
        ("", "", [14054138925946121321, 6404824029841797909]),
        ("adapter-a", "", [4937911255529010124, 14134298358384424398]),
        ("", "tenant-a", [2459644305745921723, 12976456330909618075]),
        ("adapter-a", "tenant-a", [6533629176612766906, 5472262812130445438]),
        ("ä", "ß", [11211035139597939805, 8404697547843418254]),
    ],
)
def test_local_hashes_are_dynamos(lora: str, salt: str, hashes: list[int]) -> None:
    """What ai-dynamo-runtime 1.6.1 makes of the same ids."""
    seed = dynamo_seed(lora, salt)
    assert [dynamo_local_hash(pack_tokens(WIDTHS[at : at + 4]), seed) for at in (0, 4)] == hashes


def test_the_reference_local_hashes_of_plain_blocks() -> None:
    assert dynamo_local_hash(pack_tokens([0, 1, 2, 3])) == 9143094415614847814
    assert dynamo_local_hash(pack_tokens([4, 5, 6, 7])) == 12124091508212882195
