"""Token ids of a block, packed: one form for each list of ids, and nothing else passes for one."""

import random

import pytest

from metaservice.wire.tokens import TOKEN_MAX, pack_tokens, token_count, unpack_tokens


@pytest.mark.parametrize(
    ("tokens", "packed"),
    [
        ([], b"\x01"),
        ([0], b"\x01\x00"),
        ([1, 255], b"\x01\x01\xff"),
        ([1, 256], b"\x02\x01\x00\x00\x01"),
        ([0x010203], b"\x03\x03\x02\x01"),
        ([0x01020304, 5], b"\x04\x04\x05\x03\x00\x02\x00\x01\x00"),
        ([TOKEN_MAX], b"\x04\xff\xff\xff\xff"),
    ],
)
def test_the_form_is_the_documented_one(tokens: list[int], packed: bytes) -> None:
    assert pack_tokens(tokens) == packed
    assert token_count(packed) == len(tokens)
    assert unpack_tokens(packed).tolist() == tokens


def test_any_ids_come_back_and_have_one_form() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(300):
        top = 2 ** chance.choice((1, 7, 8, 9, 15, 16, 17, 24, 25, 32))
        tokens = [chance.randrange(top) for _ in range(chance.choice((1, 2, 16, 128)))]
        packed = pack_tokens(tokens)
        assert unpack_tokens(packed).tolist() == tokens, f"seed {seed}"
        assert packed[0] == max(1, (max(tokens).bit_length() + 7) // 8), f"seed {seed}"
        assert pack_tokens(unpack_tokens(packed)) == packed, f"seed {seed}"


@pytest.mark.parametrize("token", [-1, TOKEN_MAX + 1, 2**64])
def test_an_id_that_is_no_u32_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match=r"not in 0\.\.4294967295"):
        pack_tokens([1, token])


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (b"", "begin with their width"),
        (b"\x00\x01", "begin with their width"),
        (b"\x05\x01\x01\x01\x01\x01", "begin with their width"),
        (b"\x02\x01", "whole number"),
        (b"\x04\x01\x01\x01", "whole number"),
        (b"\x02\x01\x00", "fewer than 2 bytes"),
        (b"\x04\x01\x01\x01\x00", "fewer than 4 bytes"),
        (b"\x02", "fewer than 2 bytes"),
    ],
)
def test_other_bytes_are_no_packed_block(packed: bytes, why: str) -> None:
    for reader in (token_count, unpack_tokens):
        with pytest.raises(ValueError, match=why):
            reader(packed)


def test_random_bytes_never_raise_anything_else() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    taken = 0
    for _ in range(2_000):
        packed = bytes((chance.randrange(6),)) + chance.randbytes(chance.randrange(9))
        try:
            tokens = unpack_tokens(packed)
        except ValueError:
            continue
        taken += 1
        assert pack_tokens(tokens) == packed, f"seed {seed}"
    assert taken, f"seed {seed}"
