"""Names and offsets of a pool: which file and which bytes of it a place is, and the label of a slot.

Pure: checked integers and plain names in, numbers and bytes out. A pool is one folder,
`<dir>/ucm-<cluster>@<pool>`, with one sparse file for each shard and part, `<shard>.<part>`. The slot number
that the service's core gave a location is its slot in that file, so where a part lies follows from its place
alone, and two ranks that write different parts of one block are never in the same file.

A slot is one page in front and then the payload, on a page boundary:

    offset  size  what
         0   512  header (`dataplane.integrity`); zeros while nothing is published
       512    48  label: who is at the slot, under which generation
      4096     -  payload

The label is what writers and deleters go by; readers go by the header alone.

    offset  size  field of the label (little-endian)
         0     8  magic
         8     1  state: 1 a write is under way or was cut off, 2 published
         9     3  zeros
        12     4  generation
        16     8  payload length
        24     8  when it was written, ns since 1970 by this machine's clock
        32     4  process that wrote it
        36     4  zeros
        40     8  xxh3_64 of the 40 bytes before
"""

import re
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from dataplane.integrity import HEADER_BYTES, BadPlace, check_names
from dataplane.port import GENERATION_MAX, Place
from metaservice.client.calls import shard_of_location

PAGE_BYTES = 4096
"""What a slot is a multiple of, so that emptying one gives whole pages back and touches no other."""
FRONT_BYTES = PAGE_BYTES
"""The page before the payload."""
LABELLED_BYTES = HEADER_BYTES + 48
"""Header and label: what is read and written of the front page."""

ABOUT = "about"
"""The file of a pool's folder that says what it is."""

_SLOTS = 1 << 44
"""Locations of a shard; their lower bits are the slot."""
_OFFSET_MAX = (1 << 63) - 1
_SHARDS_MAX = 256
_MAGIC = b"UCMLABEL"
_WRITING, _PUBLISHED = 1, 2
_FIELDS = Struct("<8sB3xIQQI4x")
_SEAL = Struct("<Q")
assert HEADER_BYTES + _FIELDS.size + _SEAL.size == LABELLED_BYTES

_FOLDER = re.compile(r"\A(?P<hidden>\.?)ucm-(?P<cluster>[A-Za-z0-9][A-Za-z0-9._-]*)@(?P<pool>[^/\0]+)\Z")
_PART_FILE = re.compile(r"\A(?P<shard>0|[1-9][0-9]{0,2})\.(?P<part>.+)\Z", re.DOTALL)
_POOL = re.compile(r"\A[A-Za-z0-9._:@+-]{1,64}\Z")


class Label(NamedTuple):
    """What stands at a slot: a published payload, or a write that is under way or was cut off."""

    published: bool
    generation: int
    size_bytes: int
    written_ns: int
    writer: int


class Folder(NamedTuple):
    """What a pool's folder is called after. `hidden`: it is being made or removed."""

    cluster: str
    pool: str
    hidden: bool


def is_cluster(name: str) -> bool:
    """Whether a cluster can be called so."""
    return _checked(name, "any")


def is_pool(pool: str) -> bool:
    """Whether this can be the name of a pool: the incarnation of a worker."""
    return _POOL.match(pool) is not None


def folder_of(directory: str, cluster: str, pool: str, hidden: bool = False) -> str:
    """The folder of a pool. A hidden one is not found by readers and writers."""
    return f"{directory}/{'.' if hidden else ''}ucm-{cluster}@{pool}"


def parse_folder(name: str) -> Folder | None:
    """What a folder is called after, None for a foreign one."""
    match = _FOLDER.match(name)
    if match is None or not is_pool(match["pool"]) or not _checked(match["cluster"], "any"):
        return None
    return Folder(match["cluster"], match["pool"], bool(match["hidden"]))


def stride_of(slot_bytes: int) -> int:
    """Bytes from slot to slot, where the largest part is of `slot_bytes`."""
    return FRONT_BYTES + -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES


def file_of(place: Place) -> str:
    """The file, inside the folder of its pool, of a checked place. Raises BadPlace for a shard that cannot
    be."""
    shard = shard_of_location(place.location)
    if shard >= _SHARDS_MAX:
        raise BadPlace(f"location {place.location} is of shard {shard}, of at most {_SHARDS_MAX}")
    return f"{shard}.{place.part}"


def offset_of(place: Place, stride: int) -> int:
    """Where the slot of a checked place begins in its file. Raises BadPlace beyond what a file can be."""
    offset = place.location % _SLOTS * stride
    if offset + stride > _OFFSET_MAX:
        raise BadPlace(f"location {place.location} is beyond the end of any file")
    return offset


def parse_file(name: str) -> tuple[int, str] | None:
    """(shard, part) that a file of a pool is named after, None for a foreign one."""
    match = _PART_FILE.match(name)
    if match is None or int(match["shard"]) >= _SHARDS_MAX or not _checked("any", match["part"]):
        return None
    return int(match["shard"]), match["part"]


def location_of(shard: int, slot: int) -> int:
    """The location that a slot of a shard's file is."""
    return shard * _SLOTS + slot


def encode_label(label: Label) -> bytes:
    """The bytes of a label, behind the header in the front page."""
    state = _PUBLISHED if label.published else _WRITING
    fields = _FIELDS.pack(
        _MAGIC, state, label.generation, label.size_bytes, label.written_ns, label.writer & 0xFFFF_FFFF
    )
    return fields + _SEAL.pack(xxh3_64_intdigest(fields))


def decode_label(front: bytes) -> Label | None:
    """The label in the first `LABELLED_BYTES` of a slot; None when there is no whole one."""
    if len(front) < LABELLED_BYTES:
        return None
    fields = front[HEADER_BYTES : HEADER_BYTES + _FIELDS.size]
    magic, state, generation, size_bytes, written_ns, writer = _FIELDS.unpack(fields)
    (seal,) = _SEAL.unpack_from(front, HEADER_BYTES + _FIELDS.size)
    if magic != _MAGIC or state not in (_WRITING, _PUBLISHED) or seal != xxh3_64_intdigest(fields):
        return None
    if not 1 <= generation <= GENERATION_MAX:
        return None
    return Label(state == _PUBLISHED, generation, size_bytes, written_ns, writer)


def _checked(cluster: str, part: str) -> bool:
    try:
        check_names(cluster, part)
    except BadPlace:
        return False
    return True
