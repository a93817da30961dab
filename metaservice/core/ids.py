"""Names and numbers that identify things.

Location, session and lease ids carry their shard in the top bits, so that any replica can route a call from
its id alone. All fit in 52 bits: a JSON reader with doubles keeps them exact.
"""

SHARD_BITS = 8
SLOT_BITS = 44
SHARDS_MAX = 1 << SHARD_BITS
SLOT_MASK = (1 << SLOT_BITS) - 1

KEY_LENGTH_MIN = 16
KEY_LENGTH_MAX = 64

NONE = (1 << 32) - 1
"""In u32 slot columns: no slot."""


def location_base(shard: int) -> int:
    """What to add to a slot of this shard to get its location id."""
    if not 0 <= shard < SHARDS_MAX:
        raise ValueError(f"shard {shard} outside 0..{SHARDS_MAX - 1}")
    return shard << SLOT_BITS


def shard_of(location: int) -> int:
    """The shard that a location id belongs to."""
    return location >> SLOT_BITS


def session_name(shard: int, number: int) -> str:
    """The id of a write session on the wire: `w-<shard>-<number>`."""
    return f"w-{shard}-{number}"


def lease_name(shard: int, epoch: int, number: int) -> str:
    """The id of a read lease on the wire. It names the epoch: leases live in leader memory and end with
    it."""
    return f"r-{shard}-{epoch}-{number}"


def task_name(shard: int, epoch: int, number: int) -> str:
    """The id of a deletion task on the wire."""
    return f"t-{shard}-{epoch}-{number}"


def caller_name(engine: str, incarnation: str) -> str:
    """Whose request ids these are: one life of an engine. The next life may count its requests from 1
    again."""
    return f"{engine}/{incarnation}"  # no name has a slash


def parse_name(name: str, kind: str, fields: int) -> tuple[int, ...] | None:
    """The numbers of an id of the given kind (`w`, `r`, `t`), or None when it is not one."""
    head, *rest = name.split("-")
    if head != kind or len(rest) != fields:
        return None
    if not all(part.isascii() and part.isdigit() and len(part) <= 16 for part in rest):
        return None
    return tuple(int(part) for part in rest)
