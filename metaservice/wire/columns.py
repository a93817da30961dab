"""Columns on the wire: checked once, unpacked once, packed once.

A column comes as a list (JSON, or a msgpack client that does not care) or as packed little-endian bytes
(connectors). Every function raises `ColumnError` naming the field and the row, never anything else, whatever
it is given.
"""

import struct
import sys
from array import array
from binascii import unhexlify
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any, Literal, NoReturn

from .tokens import pack_tokens, token_count

Kind = Literal["Q", "I", "H", "B"]
"""u64, u32, u16, u8 as `array` type codes."""

_SIZE = {"Q": 8, "I": 4, "H": 2, "B": 1}
assert all(array(kind).itemsize == size for kind, size in _SIZE.items()), (
    "this platform's C integer sizes are unusual"
)
_SWAP = sys.byteorder == "big"


class ColumnError(ValueError):
    """A column is not what it has to be. `code` is a problem code, `field` names the column (and row) at
    fault."""

    def __init__(self, code: str, field: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.message = message


def keys_of(value: Any, key_length: int, field: str, count_max: int) -> list[bytes]:
    """The block keys of a request column, each exactly `key_length` bytes."""
    if isinstance(value, bytes):
        if len(value) % key_length:
            raise ColumnError(
                "key_length", field, f"{len(value)} packed bytes are not a multiple of {key_length}"
            )
        if len(value) // key_length > count_max:
            raise ColumnError(
                "too_many_keys", field, f"{len(value) // key_length} keys; at most {count_max} in one request"
            )
        return list(struct.unpack(f"{key_length}s" * (len(value) // key_length), value))
    if not isinstance(value, list):
        raise ColumnError("invalid_key", field, f"expected a list of keys, got {_kind(value)}")
    if len(value) > count_max:
        raise ColumnError("too_many_keys", field, f"{len(value)} keys; at most {count_max} in one request")
    if not value:
        return []
    if set(map(type, value)) == {bytes} and set(map(len, value)) == {key_length}:
        return value
    if set(map(type, value)) == {str} and set(map(len, value)) == {2 * key_length}:
        with suppress(ValueError):
            return list(map(unhexlify, value))
    return [key_of(key, key_length, f"{field}[{row}]") for row, key in enumerate(value)]


def key_of(value: Any, key_length: int, field: str) -> bytes:
    """One block key from hex text or bytes."""
    if isinstance(value, str):
        if len(value) != 2 * key_length:
            raise ColumnError(
                "key_length", field, f"{len(value)} hex digits; keys of this instance have {2 * key_length}"
            )
        try:
            return unhexlify(value)  # bytes.fromhex would accept white space
        except ValueError:
            raise ColumnError("invalid_key", field, "not hex text") from None
    if isinstance(value, bytes):
        if len(value) != key_length:
            raise ColumnError(
                "key_length", field, f"{len(value)} bytes; keys of this instance have {key_length}"
            )
        return value
    raise ColumnError("invalid_key", field, f"expected hex text or bytes, got {_kind(value)}")


def numbers_of(value: Any, kind: Kind, field: str, count_max: int) -> "array[int]":
    """A number column as an array of the given kind."""
    if isinstance(value, bytes):
        if len(value) % _SIZE[kind]:
            raise ColumnError(
                "column_length", field, f"{len(value)} packed bytes are not a multiple of {_SIZE[kind]}"
            )
        if len(value) // _SIZE[kind] > count_max:
            raise ColumnError(
                "column_length", field, f"{len(value) // _SIZE[kind]} rows; at most {count_max}"
            )
        column = array(kind, value)
        if _SWAP:
            column.byteswap()
        return column
    if not isinstance(value, list):
        raise ColumnError("invalid_field", field, f"expected a list of integers, got {_kind(value)}")
    if len(value) > count_max:
        raise ColumnError("column_length", field, f"{len(value)} rows; at most {count_max}")
    if not all(map(isinstance, value, repeat(int))) or any(map(isinstance, value, repeat(bool))):
        row = next(row for row, item in enumerate(value) if type(item) is not int)
        raise ColumnError("invalid_field", f"{field}[{row}]", f"expected an integer, got {_kind(value[row])}")
    try:
        return array(kind, value)
    except OverflowError:
        top = 2 ** (8 * _SIZE[kind]) - 1
        row = next(row for row, item in enumerate(value) if not 0 <= item <= top)
        raise ColumnError("invalid_field", f"{field}[{row}]", f"outside 0..{top}") from None


def u64(value: int, field: str) -> int:
    """A number that may be as large as a u64 but no larger."""
    if value >= 2**64:
        raise ColumnError("invalid_field", field, f"outside 0..{2**64 - 1}")
    return value


def flags_of(value: Any, field: str, count_max: int) -> bytes:
    """A column of booleans as bytes of 0 and 1."""
    if isinstance(value, list):
        if len(value) > count_max:
            raise ColumnError("column_length", field, f"{len(value)} rows; at most {count_max}")
        if value and set(map(type, value)) != {bool}:
            row = next(row for row, item in enumerate(value) if type(item) is not bool)
            raise ColumnError(
                "invalid_field", f"{field}[{row}]", f"expected a boolean, got {_kind(value[row])}"
            )
        return bytes(value)
    if not isinstance(value, bytes):
        raise ColumnError("invalid_field", field, f"expected a list of booleans, got {_kind(value)}")
    if len(value) > count_max:
        raise ColumnError("column_length", field, f"{len(value)} rows; at most {count_max}")
    if value.translate(None, b"\x00\x01"):
        raise ColumnError("invalid_field", field, "packed booleans are bytes of 0 and 1")
    return value


def token_rows(
    value: Sequence[bytes | list[int] | None], field: str, rows: int, block_size: int
) -> list[bytes]:
    """Token ids of each of `rows` blocks, packed (`wire.tokens`); b"" where none are given. Each has exactly
    `block_size` ids: a shorter span would be another block to every router."""
    if len(value) != rows:
        raise ColumnError("column_length", field, f"{len(value)} rows for {rows} keys; give one a key")
    found = [item if type(item) is bytes else _packed_row(item, field, row) for row, item in enumerate(value)]
    zeros = bytes(block_size)
    for row, item in enumerate(found):
        # What `token_count` looks at, in one line: this is done for every block that is written.
        if item and not (
            1 <= (width := item[0]) <= 4
            and len(item) == 1 + width * block_size
            and (width == 1 or not item.endswith(zeros))
        ):
            _refuse_row(item, f"{field}[{row}]", block_size)
    return found


def _refuse_row(item: bytes, field: str, block_size: int) -> NoReturn:
    try:
        count = token_count(item)
    except ValueError as failure:
        raise ColumnError("invalid_field", field, str(failure)) from None
    raise ColumnError("invalid_field", field, f"{count} token ids; a block has {block_size}")


def _packed_row(item: Any, field: str, row: int) -> bytes:
    if item is None:
        return b""
    try:
        return pack_tokens(item)
    except ValueError as failure:
        raise ColumnError("invalid_field", f"{field}[{row}]", str(failure)) from None


def packed(kind: Kind, values: Sequence[int]) -> bytes:
    """Little-endian bytes of a number column."""
    column = array(kind, values)
    if _SWAP:
        column.byteswap()
    return column.tobytes()


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
