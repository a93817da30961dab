"""What happened: the journal's, the followers' and (later) the routers' vocabulary.

Events are columnar: one a request, N blocks as packed little-endian columns, never one event a block. They
carry every decision that was taken (slots, storages, deadlines), so that `apply` decides nothing and replay
does not depend on which version's rules decided. The tag is the wire name and, with the order of fields, a
promise: fields are only ever appended.
"""

from msgspec import Struct

from .model import EvictionPolicy, Fingerprint, Quota, SwitchMode, SwitchScope


class _Base(Struct, frozen=True, array_like=True):
    """Base of all events. `now_ms` is the shard clock when it was decided."""

    now_ms: int


# ---------------------------------------------------------------- epoch


class TookOver(_Base, frozen=True, array_like=True, tag="took_over"):
    epoch: int
    cluster: str


# ---------------------------------------------------------------- catalogue


class TenantPut(_Base, frozen=True, array_like=True, tag="tenant_put"):
    tenant: str
    quota: Quota


class TenantDeleted(_Base, frozen=True, array_like=True, tag="tenant_deleted"):
    tenant: str


class StoragePut(_Base, frozen=True, array_like=True, tag="storage_put"):
    storage: str
    number: int
    kind: str
    options: dict[str, str]
    capacity_bytes: int | None
    fault_domain: str


class StorageDeleted(_Base, frozen=True, array_like=True, tag="storage_deleted"):
    storage: str


class GroupPut(_Base, frozen=True, array_like=True, tag="group_put"):
    group: str
    tenant: str
    storages: tuple[str, ...]
    quota: Quota
    high_permille: int
    low_permille: int
    eviction: EvictionPolicy


class GroupDeleted(_Base, frozen=True, array_like=True, tag="group_deleted"):
    group: str


class InstancePut(_Base, frozen=True, array_like=True, tag="instance_put"):
    """`tables`: one table number per attention group, in the fingerprint's order."""

    instance: str
    group: str
    fingerprint: Fingerprint
    quota: Quota
    tables: tuple[int, ...]


class InstanceRetired(_Base, frozen=True, array_like=True, tag="instance_retired"):
    instance: str


class InstanceGone(_Base, frozen=True, array_like=True, tag="instance_gone"):
    instance: str


class BudgetGranted(_Base, frozen=True, array_like=True, tag="budget_granted"):
    """The catalogue grants this shard a slice of a hard limit; admission looks at the slice only. With one
    shard the slice is the whole quota. `grant` makes it idempotent."""

    grant: int
    scope: SwitchScope
    id: str
    bytes: int | None
    blocks: int | None


class SwitchSet(_Base, frozen=True, array_like=True, tag="switch_set"):
    scope: SwitchScope
    id: str
    mode: SwitchMode
    reason: str


# ---------------------------------------------------------------- membership


class EngineRegistered(_Base, frozen=True, array_like=True, tag="engine_registered"):
    engine: str
    incarnation: str
    instance: str
    rank: int


class WorkerRegistered(_Base, frozen=True, array_like=True, tag="worker_registered"):
    worker: str
    incarnation: str
    storages: tuple[str, ...]


class MemberExpired(_Base, frozen=True, array_like=True, tag="member_expired"):
    """kind: `engine` or `worker`. It stopped its heartbeats."""

    kind: str
    id: str
    incarnation: str


class MemberLeft(_Base, frozen=True, array_like=True, tag="member_left"):
    """It said goodbye, or was forgotten long after it expired."""

    kind: str
    id: str


# ---------------------------------------------------------------- blocks


class WriteStarted(_Base, frozen=True, array_like=True, tag="write_started"):
    """`slots`, `generations`, `storages` and `keys` have one row a block to write. The other columns are the
    reply, one row a requested key: `rows` (u32) leads from a requested row to its written row (`ids.NONE`:
    not written); empty: row i of the `write` outcomes is written row i. Parents: a chain when `parents` is
    None (first row's: `parent`)."""

    session: int
    engine: str
    incarnation: str
    table: int
    ttl_ms: int
    deadline_ms: int
    keys: bytes
    parent: bytes | None
    parents: tuple[bytes | None, ...] | None
    slots: bytes
    generations: bytes
    storages: bytes
    outcomes: bytes
    reasons: bytes
    rows: bytes
    wait_ms: bytes
    evicted: int
    request_id: str
    group: str


class WriteFinished(_Base, frozen=True, array_like=True, tag="write_finished"):
    """`status` is the FinishStatus of each of `slots` (those that changed) after this event. `masks` (u64):
    the parts that were newly written in each; empty: all parts of all slots. `checksums`: u64, slot-major
    over all parts, 0 where not newly written. `answer` is the reply, one status a requested location; empty:
    it equals `status`."""

    session: int
    slots: bytes
    status: bytes
    answer: bytes
    masks: bytes
    checksums: bytes
    not_before_ms: int
    published: int
    open: int
    request_id: str


class SessionRenewed(_Base, frozen=True, array_like=True, tag="session_renewed"):
    session: int
    deadline_ms: int


class SessionEnded(_Base, frozen=True, array_like=True, tag="session_ended"):
    """Expired, aborted or fenced with work open: its unfinished locations go, their bytes not before
    `not_before_ms`."""

    session: int
    expired: bool
    freed: int
    not_before_ms: int
    request_id: str


class BlocksRemoved(_Base, frozen=True, array_like=True, tag="blocks_removed"):
    """`why`: `removed`, `quota`, `watermark` or `retired`. The bytes go not before `not_before_ms`. With a
    client's `request_id`, `outcomes` is its reply."""

    slots: bytes
    why: str
    not_before_ms: int
    client: str
    request_id: str
    outcomes: bytes


class LocationsGone(_Base, frozen=True, array_like=True, tag="locations_gone"):
    """A worker confirmed that the bytes are deleted: the slots are free."""

    slots: bytes


class HotBlocks(_Base, frozen=True, array_like=True, tag="hot_blocks"):
    """Bounded summary of recency for the next leader. No part of the state's digest."""

    slots: bytes
    used_ms: bytes


Event = (
    TookOver
    | TenantPut
    | TenantDeleted
    | StoragePut
    | StorageDeleted
    | GroupPut
    | GroupDeleted
    | InstancePut
    | InstanceRetired
    | InstanceGone
    | BudgetGranted
    | SwitchSet
    | EngineRegistered
    | WorkerRegistered
    | MemberExpired
    | MemberLeft
    | WriteStarted
    | WriteFinished
    | SessionRenewed
    | SessionEnded
    | BlocksRemoved
    | LocationsGone
    | HotBlocks
)
