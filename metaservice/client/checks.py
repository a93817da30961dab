"""Nothing that the service says is believed before it was held against what was asked.

A wrong answer that looks right would be a false hit, so every column is checked for length and range
here, before any result exists. All functions raise CallFailed(protocol).
"""

import re
import sys
from array import array
from functools import lru_cache
from typing import Any

from metaservice.wire.schemas import NAME_PATTERN, Located, PartRef, StorageRef

from .errors import PROTOCOL, CallFailed
from .results import Places

NAME = re.compile(NAME_PATTERN)
TOKEN = re.compile(r"\A[A-Za-z0-9._:@+-]{1,64}\Z")

_SWAP = sys.byteorder == "big"
_SIZE = {"Q": 8, "I": 4, "H": 2}
_LOCATION_BYTE_6 = bytes(range(16))
"""Locations fit in 52 bits: of their 8 little-endian bytes the last is 0 and the one before is below 16."""


@lru_cache(maxsize=4096)
def is_name(value: str) -> bool:
    """Whether it is a name as the service makes them; it may then stand in a path or a file's name."""
    return bool(NAME.match(value))


def lying(what: str) -> CallFailed:
    return CallFailed(PROTOCOL, what)


def numbers(value: Any, kind: str, rows: int, field: str) -> "array[int]":
    """A packed column of exactly `rows` rows."""
    if type(value) is not bytes or len(value) != rows * _SIZE[kind]:
        raise lying(f"{field}: not {rows} packed rows")
    column = array(kind, value)
    if _SWAP:
        column.byteswap()
    return column


def codes(value: Any, rows: int, top: int, field: str) -> bytes:
    """A u8 column of exactly `rows` rows, none larger than `top`."""
    if type(value) is not bytes or len(value) != rows or (rows and max(value) > top):
        raise lying(f"{field}: not {rows} packed codes of 0..{top}")
    return value


def between(value: int, low: int, high: int, field: str) -> int:
    """A number within bounds, both included."""
    if not low <= value <= high:
        raise lying(f"{field}: {value} outside {low}..{high}")
    return value


def token(value: str, field: str) -> str:
    """An id that may stand in a path of ours."""
    if not TOKEN.match(value):
        raise lying(f"{field}: not an id")
    return value


def locations(value: Any, rows: int, field: str = "locations") -> "array[int]":
    """Location ids; 52 bits."""
    column = numbers(value, "Q", rows, field)
    if value[7::8].strip(b"\0") or value[6::8].translate(None, _LOCATION_BYTE_6):
        raise lying(f"{field}: larger than a location can be")
    return column


def generations(value: Any, rows: int, field: str = "generations") -> "array[int]":
    """Generations, all from 1."""
    column = numbers(value, "I", rows, field)
    if b"\0" in value[0::4] and 0 in column:  # the first test is much cheaper and nearly always enough
        raise lying(f"{field}: 0 is no generation")
    return column


def parts(value: list[PartRef]) -> list[PartRef]:
    """Parts of a block: at least one, names that may stand in a file name, at least a byte each."""
    if not value:
        raise lying("parts: none")
    for part in value:
        if not is_name(part.name) or part.bytes < 1:
            raise lying("parts: not a name, or without bytes")
    return value


def storage(value: StorageRef) -> StorageRef:
    """A storage with a name and a kind."""
    if not is_name(value.name) or not is_name(value.kind):
        raise lying("storage: not a name")
    return value


def cluster(value: str) -> str:
    """The cluster's name, which stands in places."""
    if not is_name(value):
        raise lying("cluster: not a name")
    return value


def storages(value: Any, rows: int, table: list[StorageRef]) -> "array[int]":
    """Indexes into the table of storages."""
    column = numbers(value, "H", rows, "storages")
    # Nearly always it is one storage; that is seen at once.
    if rows and not (table and not value.strip(b"\0")) and max(column) >= len(table):
        raise lying("storages: an index outside the table")
    for row in table:
        storage(row)
    return column


def places(reply: Located, rows: int, keys: list[bytes]) -> Places:
    """`rows` places of readable blocks, one for each of `keys`."""
    if not rows:
        if reply.locations or reply.generations:
            raise lying("locations: more than hits")
        return Places()
    return Places(
        keys=keys,
        locations=locations(reply.locations, rows),
        generations=generations(reply.generations, rows),
        storages=storages(reply.storages, rows, reply.storage_table),
        checksums=numbers(reply.checksums, "Q", rows * len(parts(reply.parts)), "checksums"),
        storage_table=reply.storage_table,
        parts=reply.parts,
        cluster=cluster(reply.cluster),
    )
