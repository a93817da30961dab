"""What routers are told: plain data that `apply` makes of the journal, the same on every replica.

A *window* is one step of a shard's announcements. Every stream of the shard sends exactly one batch for it,
with the window's number as its seq, if only an empty one: so streams are contiguous, begin nowhere anew and
go on where they were whoever leads.
"""

from msgspec import Struct

from .model import Endpoints

CPU = "CPU"
STORAGE = "STORAGE"
EXTERNAL = "EXTERNAL"
"""Media by the names that all consumers treat alike: memory and storage of one node, and what every engine
reaches."""


class Run(Struct, frozen=True, array_like=True):
    """Blocks that follow each other: each one's parent is the key before it, the first one's is `parent`
    (None: the prompt begins with it). `keys` is packed, `key_length` bytes each; `tokens` has the packed ids
    (`wire.tokens`) of each block. `node` is "" for EXTERNAL, else whose memory or storage it is."""

    instance: str
    medium: str
    node: str
    lora: str
    salt: str
    parent: bytes | None
    key_length: int
    keys: bytes
    tokens: list[bytes]


class Gone(Struct, frozen=True, array_like=True):
    """Blocks that are no longer announced there. `keys` as in Run."""

    instance: str
    medium: str
    node: str
    key_length: int
    keys: bytes


class Window(Struct, frozen=True, array_like=True, tag="window"):
    """One step: in this order `removed` goes, `again` (removed a while ago, told once more for those who
    missed it), `restated` is told as removed and stored at once (it was announced before), `stored` is new.

    `seq` is the journal's, `now_ms` the shard's clock: both are in the journal, so that a batch has the same
    bytes on every replica.
    """

    shard: int
    seq: int
    number: int
    now_ms: int
    stored: list[Run]
    restated: list[Run]
    removed: list[Gone]
    again: list[Gone]


class Announcement(Struct, frozen=True, array_like=True):
    """How an instance's blocks are announced; see `model.Publication` and `Fingerprint`."""

    instance: str
    tenant: str
    model: str
    routing_group: str
    lora: str
    hash_of: str
    block_size_tokens: int
    key_length: int
    hash_scheme: str
    hash_seed: str
    canary: str
    base: str = ""


class EngineAt(Struct, frozen=True, array_like=True):
    """A live engine of an instance, and the streams that concern it; see `events.EngineRegistered`."""

    engine: str
    incarnation: str
    instance: str
    rank: int
    endpoints: Endpoints
    pool_channel: int
    local_channel: int
