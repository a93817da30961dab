"""What can be asked of the core. Plain data; block columns are packed or listed, never one object a block.

`now_ms` is not a field: the sequencer stamps every command when it decides it.
`client` is the engine id (or another caller's name) and `request_id` its name for this request: together they
make a retry recognisable. Both empty: the call is not remembered.
"""

from array import array

from msgspec import Struct

from .events import Event
from .model import Endpoints, EvictionPolicy, Fingerprint, Publication, Quota, SwitchMode, SwitchScope
from .replies import CatalogueView, Errands, Settled


class Command(Struct, frozen=True, kw_only=True):
    """Base of all commands."""


# ---------------------------------------------------------------- catalogue


class PutTenant(Command, kw_only=True, frozen=True):
    tenant: str
    quota: Quota = Quota()


class DeleteTenant(Command, kw_only=True, frozen=True):
    tenant: str


class PutStorage(Command, kw_only=True, frozen=True):
    """`capacity_bytes` None: unlimited. Kind and options cannot change while groups name it. `reach`:
    `pool` (every engine reaches it) or `node` (only engines whose node is its fault domain); "": as is usual
    for its kind."""

    storage: str
    kind: str
    options: dict[str, str]
    capacity_bytes: int | None = None
    fault_domain: str = ""
    reach: str = ""


class DeleteStorage(Command, kw_only=True, frozen=True):
    storage: str


class PutGroup(Command, kw_only=True, frozen=True):
    """`high`/`low`: fractions of the group's quota (and of its tenant's and instances') in parts per 1000."""

    group: str
    tenant: str
    storages: tuple[str, ...]
    quota: Quota = Quota()
    high_permille: int = 950
    low_permille: int = 900
    eviction: EvictionPolicy = EvictionPolicy.lru


class DeleteGroup(Command, kw_only=True, frozen=True):
    group: str


class PutInstance(Command, kw_only=True, frozen=True):
    """`shard`: where its blocks are to live; None: the catalogue chooses. It stays there for good.
    `publication`: how its blocks are announced to routers, None: not at all; may change, `hash_of` and `base`
    only by way of None."""

    instance: str
    group: str
    fingerprint: Fingerprint
    quota: Quota = Quota()
    shard: int | None = None
    publication: Publication | None = None


class DeleteInstance(Command, kw_only=True, frozen=True):
    """Retires the instance: it answers nobody from now on, its blocks go, then it goes by itself."""

    instance: str


class SetSwitch(Command, kw_only=True, frozen=True):
    """`id` is empty for the cluster scope."""

    scope: SwitchScope
    id: str
    mode: SwitchMode
    reason: str = ""


# ---------------------------------------------------------------- membership


class RegisterEngine(Command, kw_only=True, frozen=True):
    """`canary`: what this very process hashes the probe to; "" when it does not say."""

    engine: str
    incarnation: str
    instance: str = ""
    rank: int = 0
    endpoints: Endpoints = Endpoints()
    canary: str = ""


class RegisterWorker(Command, kw_only=True, frozen=True):
    worker: str
    incarnation: str
    storages: tuple[str, ...]


class Deregister(Command, kw_only=True, frozen=True):
    """An engine or worker leaves on purpose; kind is `engine` or `worker`. `incarnation` "": somebody clears
    up, and only what has expired may go."""

    kind: str
    id: str
    incarnation: str


class Heartbeat(Command, kw_only=True, frozen=True):
    """Leader memory only. kind is `engine` or `worker`."""

    kind: str
    id: str
    incarnation: str


# ---------------------------------------------------------------- blocks


class Lookup(Command, kw_only=True, frozen=True):
    """A read. `group` None: the instance's first group of the kind that `mode` needs."""

    instance: str
    keys: list[bytes]
    mode: str = "prefix"
    group: str | None = None
    window_blocks: int | None = None
    limit: int | None = None
    parent: bytes | None = None
    lease_ms: int = 0
    engine: str = ""
    incarnation: str = ""
    request_id: str = ""


class StartWrite(Command, kw_only=True, frozen=True):
    """`parents` None: a chain whose first key is the child of `parent`. Otherwise one entry a key, None for a
    root. `tokens`: packed ids, a row a key (b"": never announce this block); what they were computed under:
    the adapter's name and the cache salt."""

    instance: str
    engine: str
    incarnation: str
    keys: list[bytes]
    parents: list[bytes | None] | None = None
    parent: bytes | None = None
    group: str | None = None
    sizes: tuple[int, ...] | None = None
    ttl_ms: int = 0
    request_id: str = ""
    tokens: list[bytes] | None = None
    lora: str = ""
    salt: str = ""


class Finish(Command, kw_only=True, frozen=True):
    """`ok` and `checksums` are location-major over `parts` (None: all parts of the group)."""

    session: int
    engine: str
    incarnation: str
    locations: "array[int]"
    generations: "array[int]"
    parts: tuple[str, ...] | None = None
    ok: bytes | None = None
    checksums: "array[int] | None" = None
    sizes: tuple[int, ...] | None = None
    request_id: str = ""


class RenewWrite(Command, kw_only=True, frozen=True):
    session: int
    engine: str
    incarnation: str
    ttl_ms: int = 0


class Abort(Command, kw_only=True, frozen=True):
    session: int
    engine: str
    incarnation: str
    request_id: str = ""


class RenewLeases(Command, kw_only=True, frozen=True):
    """Leader memory only. `locations` (with one lease): renew only those blocks of it."""

    leases: tuple[str, ...]
    ttl_ms: int = 0
    locations: "array[int] | None" = None


class ReleaseLeases(Command, kw_only=True, frozen=True):
    """Leader memory only."""

    leases: tuple[str, ...]


class Remove(Command, kw_only=True, frozen=True):
    """`client` with `request_id` makes a retry recognisable; `lease`: the caller's own, released in the same
    step."""

    instance: str
    keys: list[bytes]
    group: str | None = None
    lease: str = ""
    client: str = ""
    request_id: str = ""


# ---------------------------------------------------------------- deletion tasks


class TakeTasks(Command, kw_only=True, frozen=True):
    """Leader memory only: hand deletion work to a worker, `limit` locations at most."""

    worker: str
    incarnation: str
    limit: int = 1024


class ConfirmTask(Command, kw_only=True, frozen=True):
    worker: str
    incarnation: str
    task: str
    ok: bytes | None = None


class Unknown(Command, kw_only=True, frozen=True):
    """A read: which of these places does no block have?"""

    worker: str
    incarnation: str
    storage: str
    locations: "array[int]"
    generations: "array[int]"


# ---------------------------------------------------------------- between shards


class TakeCatalogue(Command, kw_only=True, frozen=True):
    """To a data shard: what concerns it (`spread.concerns`) of the catalogue's durable events in the seqs
    `since` < seq <= `version`, all of it and in order. Nothing happens unless `since` is the version that the
    shard has: a message that comes twice, late or out of turn changes nothing."""

    since: int
    version: int
    events: tuple[Event, ...]


class SyncCatalogue(Command, kw_only=True, frozen=True):
    """To a data shard that is new or too far behind: the whole catalogue, taken by difference. Nothing
    happens when the shard has this version or a later one."""

    view: CatalogueView


class Settle(Command, kw_only=True, frozen=True):
    """To the catalogue: the errands of a shard, its own too. Doing them twice does no harm."""

    errands: Errands


class GiveBudget(Command, kw_only=True, frozen=True):
    """To the shard whose errands were settled: the catalogue's answer, always, also when it asks for
    nothing."""

    settled: Settled


# ---------------------------------------------------------------- routers


class Announce(Command, kw_only=True, frozen=True):
    """Given by the sequencer when the shard has something to announce (`Machine.announces`)."""


class Restate(Command, kw_only=True, frozen=True):
    """Routers are to be told again of all that is announced of an instance ("": of all instances)."""

    instance: str = ""


# ---------------------------------------------------------------- time


class Tick(Command, kw_only=True, frozen=True):
    """Given by the sequencer several times a second: expiry, eviction, retirement are its events."""


class TakeOver(Command, kw_only=True, frozen=True):
    """The first command of an epoch: extends every session once, forbids deletions until old leases have run
    out."""

    epoch: int
    cluster: str
