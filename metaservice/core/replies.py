"""What the core answers. Columns are arrays or bytes; the API turns them into either encoding."""

from array import array

from msgspec import Struct

from .events import Event
from .model import SwitchMode, SwitchScope


class Switched(Struct, frozen=True):
    """The strictest switch on the path, when it is not `normal`."""

    scope: SwitchScope
    id: str
    mode: SwitchMode


class Done(Struct, frozen=True):
    """A command without a more telling reply. `created` is True when the thing was new."""

    created: bool = False


class InstanceRegistered(Struct, frozen=True):
    """`storages`: names of the group's storages in order. `shard`: where its blocks live."""

    created: bool
    storages: tuple[str, ...]
    shard: int = 0


class Registered(Struct, frozen=True):
    """Engine or worker registration; `fenced` is the incarnation that was replaced ('' for none)."""

    id: str
    incarnation: str
    fenced: str = ""


class Beat(Struct, frozen=True):
    """Heartbeat accepted. `switch` is the strictest on the engine's instance (None: normal)."""

    status: str
    switch: Switched | None = None


class Located(Struct):
    """Places of n blocks in columns; `storages` holds storage numbers; `checksums` is packed u64,
    block-major."""

    locations: "array[int]"
    generations: "array[int]"
    storages: "array[int]"
    checksums: bytes


class Looked(Struct):
    """Reply to Lookup; the fields mean what `wire.schemas.LookupReply` says. `group` is the group that was
    searched."""

    mode: str
    asked: int
    hits: int
    start: int
    cut: str
    cut_at: int
    group: str
    switch: Switched | None = None
    hit: bytes = b""
    lease: str | None = None
    lease_ms: int = 0
    located: Located | None = None
    state_group: str = ""
    state: Located | None = None
    span: tuple[int, int] | None = None
    """(first, end) when the slots of `located` are known to be one run; of no use outside the core."""


class Started(Struct):
    """Reply to StartWrite; one row a requested key. Outcome and reason codes are those of `core.outcomes`.
    `pools`: of the volatile storages in `storages`, the pool in which the places are ('': it is gone)."""

    session: int | None
    ttl_ms: int
    group: str
    outcomes: bytes
    reasons: bytes
    locations: "array[int]"
    generations: "array[int]"
    storages: "array[int]"
    wait_ms: "array[int]"
    switch: Switched | None = None
    evicted: int = 0
    pools: dict[int, str] = {}


class Finished(Struct):
    """Reply to Finish: FinishStatus per location."""

    status: bytes
    published: int
    open: int


class Renewed(Struct, frozen=True):
    """Reply to RenewWrite."""

    ttl_ms: int


class Aborted(Struct, frozen=True):
    """Reply to Abort."""

    freed: int


class LeasesAnswered(Struct):
    """Reply to RenewLeases and ReleaseLeases: LeaseOutcome and changed blocks per lease."""

    leases: tuple[str, ...]
    outcomes: bytes
    changed: "array[int]"
    ttl_ms: int = 0
    switch: Switched | None = None


class Removed(Struct):
    """Reply to Remove: RemoveOutcome per requested key."""

    outcomes: bytes
    removed: int


class Task(Struct, frozen=True):
    """A deletion task handed to a worker; `storage` is the storage's name, `parts` the names to delete of
    each location, `pool` the pool of a volatile storage in which they are."""

    task: str
    storage: str
    parts: tuple[str, ...]
    locations: "array[int]"
    generations: "array[int]"
    ttl_ms: int
    pool: str = ""


class Tasks(Struct):
    """Reply to TakeTasks."""

    tasks: list[Task]


class Confirmed(Struct, frozen=True):
    """Reply to ConfirmTask."""

    gone: int
    again: int


class UnknownPlaces(Struct, frozen=True):
    """Reply to Unknown: 1 where no block has that place."""

    unknown: bytes


class BlockDetail(Struct, frozen=True):
    """One block for people: everything known of it."""

    key: bytes
    parent: bytes | None
    instance: str
    group: str
    state: str
    visible: bool
    location: int
    generation: int
    storage: str
    size_bytes: int
    parts: dict[str, str]
    checksums: dict[str, int]
    children: int
    leases: int
    session: str
    last_used_ms: int


class Usage(Struct, frozen=True):
    """What a scope uses now. `deleting_*` waits for its bytes to be deleted and is not part of the others."""

    bytes: int
    blocks: int
    deleting_bytes: int = 0
    deleting_blocks: int = 0
    bytes_max: int | None = None
    blocks_max: int | None = None


# ---------------------------------------------------------------- between shards


class Returned(Struct, frozen=True, array_like=True):
    """Budget that a data shard gave up and that the catalogue has not taken yet, as far as the shard knows;
    see `events.SliceReturned`. It keeps its place when its scope goes meanwhile."""

    number: int
    scope: SwitchScope
    id: str
    bytes: int | None
    blocks: int | None
    kept: bool
    version: int


class Want(Struct, frozen=True, array_like=True):
    """The slice that a shard could use, all of it (not what is missing): said twice it means the same.
    `urgent`: a write was short of it; otherwise it is only to be there in time."""

    scope: SwitchScope
    id: str
    bytes: int
    blocks: int
    urgent: bool


class Used(Struct, frozen=True, array_like=True):
    """What a scope uses in one shard. `overdue_bytes` (storages): deletions that no worker confirmed in
    time."""

    scope: SwitchScope
    id: str
    bytes: int
    blocks: int
    deleting_bytes: int
    deleting_blocks: int
    overdue_bytes: int = 0


class Drained(Struct, frozen=True, array_like=True):
    """A retiring instance that has no location left. `table`: its first table's number, which no other
    instance ever has."""

    instance: str
    table: int


class Errands(Struct, frozen=True):
    """What a shard has to tell the catalogue; durable facts, and wishes.

    (`epoch`, `number`) orders the errands of a shard. `version`: the catalogue version that is durable there.
    `used` has the rows that changed since the last report that the catalogue's leader of epoch `base`
    acknowledged; `base` 0: all rows that are not zero."""

    shard: int
    epoch: int
    number: int
    version: int
    base: int
    returns: tuple[Returned, ...]
    wants: tuple[Want, ...]
    drained: tuple[Drained, ...]
    used: tuple[Used, ...]


class Give(Struct, frozen=True, array_like=True):
    """Budget that a shard is asked to give up because others need it more. `evict`: and to evict for it."""

    scope: SwitchScope
    id: str
    bytes: int
    blocks: int
    evict: bool


class Settled(Struct, frozen=True):
    """Reply to Settle. `of_epoch` and `number` are the errands', `epoch` the catalogue's. `version`: once the
    shard has taken it, it has what was granted here. `starved`: scopes of which there is no more to be had
    now."""

    of_epoch: int
    number: int
    epoch: int
    version: int
    starved: tuple[tuple[SwitchScope, str], ...] = ()
    give: tuple[Give, ...] = ()


class Slices(Struct, frozen=True, array_like=True):
    """What each shard was granted of a limit, as (bytes, blocks) by shard (None: unlimited); the seqs at
    which the scope was made and at which its limits came to be where there was none."""

    scope: SwitchScope
    id: str
    made_seq: int
    bytes_seq: int
    blocks_seq: int
    granted: tuple[tuple[int | None, int | None], ...]


class CatalogueView(Struct, frozen=True):
    """The whole catalogue as of seq `version`, all of it durable. `events` would make it out of nothing."""

    version: int
    cluster: str
    grant_next: int
    events: tuple[Event, ...]
    slices: tuple[Slices, ...]
    returns_taken: tuple[int, ...]
