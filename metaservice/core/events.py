"""What happened: the journal's, the followers' and (later) the routers' vocabulary.

Events are columnar: one a request, N blocks as packed little-endian columns, never one event a block. They
carry every decision that was taken (slots, storages, deadlines), so that `apply` decides nothing and replay
does not depend on which version's rules decided. The tag is the wire name and, with the order of fields, a
promise: fields are only ever appended.
"""

from msgspec import Struct

from .model import Endpoints, EvictionPolicy, Fingerprint, Publication, Quota, SwitchMode, SwitchScope


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
    reach: str = ""


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
    """`tables`: one table number per attention group, in the fingerprint's order. `shard`: where its blocks
    live."""

    instance: str
    group: str
    fingerprint: Fingerprint
    quota: Quota
    tables: tuple[int, ...]
    shard: int = 0
    publication: Publication | None = None


class InstanceRetired(_Base, frozen=True, array_like=True, tag="instance_retired"):
    instance: str


class InstanceGone(_Base, frozen=True, array_like=True, tag="instance_gone"):
    instance: str


class BudgetGranted(_Base, frozen=True, array_like=True, tag="budget_granted"):
    """A limit that one shard holds alone is this shard's to use, all of it: admission looks at what was
    granted only. `grant` makes it idempotent. Limits that span shards are granted by `SliceGranted`."""

    grant: int
    scope: SwitchScope
    id: str
    bytes: int | None
    blocks: int | None


class SliceGranted(_Base, frozen=True, array_like=True, tag="slice_granted"):
    """The catalogue adds to what `shard` may use of a limit that spans shards (0: nothing of that
    dimension). Usable there once this is durable here. `grant` makes it happen once."""

    grant: int
    shard: int
    scope: SwitchScope
    id: str
    bytes: int
    blocks: int


class SliceReturned(_Base, frozen=True, array_like=True, tag="slice_returned"):
    """A data shard gives up budget: usable here no longer, usable elsewhere once the catalogue took it
    (`ReturnTaken`). `kept`: instead of giving up amounts, the shard binds itself to them, because a limit was
    set where none was; a dimension that is None is not concerned. `version`: what the shard knew of the
    catalogue: the catalogue takes nothing that was given up under an older limit. `number` counts from 1 in
    each data shard; 0 on the catalogue shard, which needs nobody to take what it gives up."""

    number: int
    scope: SwitchScope
    id: str
    bytes: int | None
    blocks: int | None
    kept: bool
    version: int


class ReturnTaken(_Base, frozen=True, array_like=True, tag="return_taken"):
    """The catalogue took return `number` of `shard`: the amounts are free again (`kept`: are what the shard
    holds). None: that dimension is not concerned, or the return was made under an older limit."""

    shard: int
    number: int
    scope: SwitchScope
    id: str
    bytes: int | None
    blocks: int | None
    kept: bool


class SliceSet(_Base, frozen=True, array_like=True, tag="slice_set"):
    """A data shard that took the catalogue by difference holds exactly this much of a limit (None:
    unlimited)."""

    scope: SwitchScope
    id: str
    bytes: int | None
    blocks: int | None


class CatalogueTaken(_Base, frozen=True, array_like=True, tag="catalogue_taken"):
    """A data shard now knows the catalogue as of its seq `version`. Copies of its events, which came just
    before, and this are one batch. `cluster`: the cluster's id when it was told, else ''."""

    version: int
    cluster: str
    grant_next: int


class SwitchSet(_Base, frozen=True, array_like=True, tag="switch_set"):
    scope: SwitchScope
    id: str
    mode: SwitchMode
    reason: str


# ---------------------------------------------------------------- membership


class EngineRegistered(_Base, frozen=True, array_like=True, tag="engine_registered"):
    """`pool_channel` and `local_channel`: the numbers of the streams that tell routers of blocks that every
    engine of the instance (and rank) reaches, and of those of its node (-1: it has none)."""

    engine: str
    incarnation: str
    instance: str
    rank: int
    endpoints: Endpoints = Endpoints()
    pool_channel: int = -1
    local_channel: int = -1


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


class PoolChanged(_Base, frozen=True, array_like=True, tag="pool_changed"):
    """A volatile storage has another pool from now on, that of a worker's new life ('' and '': none).
    Everything that was in it is gone in this step: which locations those are, every shard knows of itself."""

    storage: str
    worker: str
    incarnation: str


# ---------------------------------------------------------------- blocks


class WriteStarted(_Base, frozen=True, array_like=True, tag="write_started"):
    """`slots`, `generations`, `storages` and `keys` have one row a block to write. The other columns are the
    reply, one row a requested key: `rows` (u32) leads from a requested row to its written row (`ids.NONE`:
    not written); empty: row i of the `write` outcomes is written row i. Parents: a chain when `parents` is
    None (first row's: `parent`). `tokens`: the packed ids of each block to write (b"": not to be announced),
    None when the writer sent none; `lora` and `salt` are what they were computed under."""

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
    tokens: tuple[bytes, ...] | None = None
    lora: str = ""
    salt: str = ""


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


class Announced(_Base, frozen=True, array_like=True, tag="announced"):
    """What routers are told next, in this order. `number` is the seq that every stream of the shard gives it.
    `dropped`: announced blocks that are to be no longer; then what went by itself is told as removed, at most
    `removed` blocks (the leader's setting: another replica may have another one); then `again` tombstones;
    then `restated`, told as removed and stored; then `stored`. Of the columns of slots, what does not fit the
    state (it went meanwhile) is passed over."""

    number: int
    stored: bytes
    restated: bytes
    dropped: bytes
    again: int
    removed: int = 4_096


class StateChecked(_Base, frozen=True, array_like=True, tag="state_checked"):
    """What the leader's state adds up to. A replica that comes to something else is wrong and must not
    lead."""

    summary: bytes


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
    | SliceGranted
    | SliceReturned
    | ReturnTaken
    | SliceSet
    | CatalogueTaken
    | SwitchSet
    | EngineRegistered
    | WorkerRegistered
    | MemberExpired
    | MemberLeft
    | PoolChanged
    | WriteStarted
    | WriteFinished
    | SessionRenewed
    | SessionEnded
    | BlocksRemoved
    | LocationsGone
    | HotBlocks
    | Announced
    | StateChecked
)

SPREAD = frozenset(
    (
        TookOver, TenantPut, TenantDeleted, StoragePut, StorageDeleted, GroupPut, GroupDeleted, InstancePut,
        InstanceRetired, InstanceGone, BudgetGranted, SliceGranted, ReturnTaken, SwitchSet, EngineRegistered,
        WorkerRegistered, MemberExpired, MemberLeft, PoolChanged,
    )
)  # fmt: skip
"""Events of the catalogue that data shards take copies of (of a take-over, only the cluster's id)."""
