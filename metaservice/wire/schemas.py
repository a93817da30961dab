"""What is said on the wire, once for both encodings and both sides.

One schema serves JSON (for people) and msgpack (for connectors):

* block keys are hex text in JSON; in msgpack a list of `bytes` or one packed `bytes` of `n * key_length`;
* number columns are lists of integers in JSON; in msgpack requests they are lists or packed little-endian
`bytes`
  (u64 for locations and checksums, u32 for generations and durations, u16 for storage indexes, u8 for codes
  and flags), in msgpack replies they are always packed;
* JSON replies carry, besides the columns, `uris`: the places as text.

Every request struct forbids unknown fields, so a misspelt field is an error and not a silent default.
"""

from enum import IntEnum
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

NAME_PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}\Z"
"""Names of tenants, storages, groups, instances, engines, workers, parts: no path, space or control
character."""

Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
Token = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:@+-]{1,64}\Z")]
"""Incarnations and request ids: opaque to the service."""
Text = Annotated[str, Meta(max_length=512, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
"""For people or other systems, opaque to the service: no control characters."""
Count = Annotated[int, Meta(ge=0, le=2**53 - 1)]
U64 = Annotated[int, Meta(ge=0)]
"""A u64; `wire.columns.u64` checks that it is not larger."""
TtlMs = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Keys = Any
"""Hex text list (JSON), list of bytes or one packed run of bytes (msgpack). `wire.columns.keys_of` checks
it."""
Key = Any
"""One block key: hex text (JSON) or bytes (msgpack). `wire.columns.key_of` checks it."""
Column = Any
"""A number column: list of integers or packed bytes. `wire.columns` checks and unpacks it."""
TokenRow = bytes | list[int] | None
"""Token ids of one block: packed as in `wire.tokens` (base64 in JSON) or a list. `wire.columns.token_rows`
checks it."""
Flags = Any
"""A column of booleans: list of bools or one byte each. `wire.columns.flags_of` checks it."""


class Request(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Base of all request bodies."""


class Reply(Struct, kw_only=True, omit_defaults=False):
    """Base of all reply bodies. Readers ignore fields they do not know."""


# ---------------------------------------------------------------- enumerations sent as u8 (msgpack) or names
# (JSON)


class WriteOutcome(IntEnum):
    """What start-write decided for one key."""

    write = 0
    present = 1
    in_progress = 2
    refused = 3


class RefusedReason(IntEnum):
    """Why a key was refused; `none` for every other outcome."""

    none = 0
    quota_tenant = 1
    quota_group = 2
    quota_instance = 3
    storage_full = 4
    deletion_backlog = 5
    switch = 6
    parent_mismatch = 7
    no_storage = 8


class FinishStatus(IntEnum):
    """What a location is after a finish, as seen by the session that wrote it."""

    serving = 0
    pending = 1
    freed = 2
    removed = 3


class RemoveOutcome(IntEnum):
    """What remove did with one key."""

    absent = 0
    removed = 1
    waiting_for_lease = 2


class LeaseOutcome(IntEnum):
    """What became of one lease in a renew or release call."""

    renewed = 0
    released = 1
    expired = 2
    unknown = 3


# ---------------------------------------------------------------- hot routes


class LookupRequest(Request, kw_only=True):
    """`POST /v1/instances/{id}/lookup`. `keys` in prefix order, root first.

    `parent` is the key just before `keys[0]`, when the caller already holds the prefix up to it; without
    it `keys[0]` must be a root. `lease_ms` > 0 asks for a ReadLease over exactly the returned blocks.
    `limit` bounds the blocks returned (0: only count what is there to return, no locations).
    `staleness_ms_max`: a replica that follows may answer from a state that is no older (never with a
    lease); without it the leader answers.
    """

    keys: Keys
    mode: str = "prefix"
    group: Name | None = None
    window_blocks: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    limit: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    parent: Key = None
    lease_ms: TtlMs = 0
    engine: Name | None = None
    incarnation: Token | None = None
    request_id: Token | None = None
    staleness_ms_max: TtlMs | None = None


class StorageRef(Reply, kw_only=True):
    """A storage as a reader or writer needs it: how to derive a place from (storage, location, generation,
    part). Of a volatile storage (`shm`) the service adds the option `pool`: the incarnation of the worker
    that holds the bytes ('': nobody does)."""

    name: str
    kind: str
    options: dict[str, str]


class PartRef(Reply, kw_only=True):
    """A part of every block of the attention group: its name and exact size in bytes."""

    name: str
    bytes: int


class SwitchRef(Reply, kw_only=True):
    """The switch that held: its scope (`cluster`, `tenant`, `group`, `instance`, `storage`), id and mode."""

    scope: str
    id: str
    mode: str


class Located(Reply, kw_only=True):
    """Places of n blocks, as columns. `checksums` has n * len(parts) rows, block-major; `storages` indexes
    the table."""

    locations: Column = b""
    generations: Column = b""
    storages: Column = b""
    checksums: Column = b""
    storage_table: list[StorageRef] = []
    parts: list[PartRef] = []
    cluster: str = ""
    uris: list[dict[str, str]] | UnsetType = UNSET


class LookupReply(Located, kw_only=True):
    """`hits` blocks from index `start` on are readable (mode `each`: where `hit` is 1); columns are in that
    order.

    `cut` says what ended the run: `none` (all asked blocks are hits), `miss`, `limit` or `switch`;
    `cut_at` is the index of the first key not returned. `lease` is null when none was asked for or there
    is nothing to lease. Only a follower adds `applied_seq`, the journal position that its answer is of,
    and `staleness_ms`, how old that may be.
    """

    mode: str
    asked: int
    hits: int
    start: int
    cut: str
    cut_at: int
    switch: SwitchRef | None = None
    hit: Flags = b""
    lease: str | None = None
    lease_ms: int = 0
    state: Located | None = None
    epoch: int = 0
    seq: int = 0
    applied_seq: int | UnsetType = UNSET
    staleness_ms: int | UnsetType = UNSET


class StartWriteRequest(Request, kw_only=True):
    """`POST /v1/instances/{id}/writes`. Without `parents` the keys are one chain: each is the child of the
    one before it and `keys[0]` the child of `parent` (null: a root). With `parents`, one entry a key (null: a
    root). `sizes`, when given, are the bytes of each part and must equal the fingerprint's. `ttl_ms` 0: the
    service's default.

    `tokens`, one row a key, are what routers know a block by: without them (or where a row is null) the block
    is stored and found as ever, but no router is told of it. `lora` and `salt` are what the engine's hashes
    of these blocks were made with, besides the tokens.
    """

    engine: Name
    incarnation: Token
    keys: Keys
    parents: list[Key] | None = None
    parent: Key = None
    group: Name | None = None
    sizes: list[Count] | None = None
    ttl_ms: TtlMs = 0
    request_id: Token | None = None
    tokens: list[TokenRow] | None = None
    lora: Text = ""
    salt: Text = ""


class StartWriteReply(Located, kw_only=True):
    """One row a requested key in every column. Rows whose outcome is not `write` have location 0 and
    generation 0.

    `outcomes` and `reasons` are WriteOutcome and RefusedReason; `wait_ms` is how long the other writer of an
    `in_progress` key still has. `session` is null when there is nothing to write.
    """

    session: str | None
    ttl_ms: int
    outcomes: Column
    reasons: Column
    wait_ms: Column = b""
    switch: SwitchRef | None = None
    evicted: int = 0


class FinishRequest(Request, kw_only=True):
    """`POST /v1/writes/{session}/finish`: the outcome of `parts` (default: all) of the named locations.

    `ok` and `checksums` have one row per (location, part), location-major; without `ok` all succeeded;
    `checksums` is needed where `ok` is true. `sizes`, when given, are the bytes written per part, and must
    equal the fingerprint's.
    """

    engine: Name
    incarnation: Token
    locations: Column
    generations: Column
    parts: list[Name] | None = None
    ok: Flags | None = None
    checksums: Column | None = None
    sizes: list[Count] | None = None
    request_id: Token | None = None


class FinishReply(Reply, kw_only=True):
    """`status` per location (FinishStatus); `published` blocks began to serve by this call; `open` are still
    unfinished."""

    status: Column
    published: int
    open: int


class RenewWriteRequest(Request, kw_only=True):
    """`POST /v1/writes/{session}/renew`."""

    engine: Name
    incarnation: Token
    ttl_ms: TtlMs = 0


class RenewWriteReply(Reply, kw_only=True):
    """The session holds for `ttl_ms` more, counted from before the call was sent."""

    ttl_ms: int


class AbortRequest(Request, kw_only=True):
    """`POST /v1/writes/{session}/abort`."""

    engine: Name
    incarnation: Token
    request_id: Token | None = None


class AbortReply(Reply, kw_only=True):
    """How many locations were freed."""

    freed: int


class LeaseRenewRequest(Request, kw_only=True):
    """`POST /v1/leases/{id}/renew`. `also` names more leases to renew in the same call. `locations` renews
    only those blocks of the lease (not with `also`); the others keep their deadline."""

    ttl_ms: TtlMs = 0
    also: list[Token] = []
    locations: Column | None = None


class LeaseReleaseRequest(Request, kw_only=True):
    """`POST /v1/leases/{id}/release`; `also` names more."""

    also: list[Token] = []


class LeaseReply(Reply, kw_only=True):
    """One row a named lease: `leases` in the order asked, `outcomes` (LeaseOutcome), `changed`: blocks of the
    lease that are no longer what was leased (only possible once it expired): data read under it must be
    thrown away."""

    leases: list[str]
    outcomes: Column
    changed: Column
    ttl_ms: int = 0
    switch: SwitchRef | None = None


class RemoveRequest(Request, kw_only=True):
    """`POST /v1/instances/{id}/remove`. `lease`: the caller's own read lease, released in the same step. A
    `request_id` is remembered for a caller that names its `engine` and `incarnation`."""

    keys: Keys
    group: Name | None = None
    lease: Token | None = None
    engine: Name | None = None
    incarnation: Token | None = None
    request_id: Token | None = None


class RemoveReply(Reply, kw_only=True):
    """Per requested key a RemoveOutcome; `removed` counts both kinds of removal."""

    outcomes: Column
    removed: int
