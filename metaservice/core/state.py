"""The replicated state of a shard: what the journal says, and nothing else. Only `apply` changes it.

Recency, read leases, tasks and heartbeats are leader memory (`memory.Memory`): they may be lost at any moment
without making a replica differ.
"""

from array import array
from collections import OrderedDict, deque
from functools import lru_cache

from msgspec import Struct

from .events import BlocksRemoved, WriteFinished, WriteStarted
from .index import BlockIndex, Table
from .model import (
    RETIRED_INCARNATIONS,
    VOLATILE_KINDS,
    Endpoints,
    EvictionPolicy,
    Fingerprint,
    GroupKind,
    Publication,
    Quota,
    SwitchMode,
    SwitchScope,
)
from .replies import Returned, Switched
from .windows import CPU, EXTERNAL, STORAGE

ScopeKey = tuple[SwitchScope, str]
WINDOW_FIRST = 1 << 20
"""Room below the first window, for those who want to be told of a whole state in numbers."""
Pair = tuple[int | None, int | None]
"""(bytes, blocks); None: no limit, or not concerned."""

Remembered = WriteStarted | WriteFinished | BlocksRemoved


class Usage:
    """What a scope holds. `bytes`/`blocks` count writing and serving; `deleting_*` waits for its bytes to be
    deleted.

    `budget_*` is the slice of the hard limit that this shard may use (None: unlimited): admission never
    exceeds it.
    """

    __slots__ = (
        "blocks",
        "budget_blocks",
        "budget_bytes",
        "bytes",
        "deleting_blocks",
        "deleting_bytes",
        "id",
        "scope",
    )

    def __init__(self, scope: SwitchScope, id: str) -> None:
        self.scope = scope
        self.id = id
        self.bytes = 0
        self.blocks = 0
        self.deleting_bytes = 0
        self.deleting_blocks = 0
        self.budget_bytes: int | None = None
        self.budget_blocks: int | None = None

    def over(self, permille: int) -> bool:
        """Whether use is above that many thousandths of a limit."""
        return self.excess_bytes(permille) > 0 or self.excess_blocks(permille) > 0

    def excess_bytes(self, permille: int) -> int:
        """Bytes above that many thousandths of the limit (0 or less: none)."""
        return 0 if self.budget_bytes is None else self.bytes - self.budget_bytes * permille // 1000

    def excess_blocks(self, permille: int) -> int:
        """Blocks above that many thousandths of the limit (0 or less: none)."""
        return 0 if self.budget_blocks is None else self.blocks - self.budget_blocks * permille // 1000


class Tenant:
    """Who pays. `quota` is what the operator set; the usage holds the slice granted to this shard."""

    __slots__ = ("id", "quota", "switch", "usage")

    def __init__(self, id: str) -> None:
        self.id = id
        self.quota = Quota()
        self.switch = SwitchMode.normal
        self.usage = Usage(SwitchScope.tenant, id)


class Pool(Struct, frozen=True, array_like=True):
    """The memory in which the bytes of a volatile storage lie: one worker's in one life, and gone with it.
    `session_first`: write sessions of this shard from that number on are in it."""

    worker: str
    incarnation: str
    session_first: int


@lru_cache(maxsize=65_536)
def place_of(kind: str, reach: str, fault_domain: str) -> tuple[str, str]:
    """What routers know a storage as, and whose engines reach it ("" for all). What no engine can be known
    to reach, because it is one node's and does not say which, has no medium either."""
    volatile = kind in VOLATILE_KINDS
    if reach == "pool" or (not reach and not volatile):
        return EXTERNAL, ""
    if not fault_domain:
        return "", ""
    return (CPU if volatile else STORAGE), fault_domain


class Storage:
    """One storage system. Its capacity is physical: bytes whose deletion is overdue count against it (see
    `admission`)."""

    __slots__ = (
        "capacity_bytes", "fault_domain", "id", "kind", "left_seq", "number", "options", "pool", "reach",
        "spent", "switch", "usage",
    )  # fmt: skip

    def __init__(self, id: str, number: int, kind: str, options: dict[str, str]) -> None:
        self.id = id
        self.number = number
        self.kind = kind
        self.options = options
        self.capacity_bytes: int | None = None
        self.fault_domain = ""
        self.reach = ""
        self.switch = SwitchMode.normal
        self.usage = Usage(SwitchScope.storage, id)
        self.left_seq = 0
        """With several shards: when a group last ceased to name it. What shards say of its use counts from
        there on."""
        self.pool: Pool | None = None
        """Of a volatile storage, while its worker lives."""
        self.spent: tuple[str, ...] = ()
        """Incarnations whose pools are gone, the newest so many: none of them gets a pool again."""

    @property
    def local(self) -> bool:
        """Whether only the engines of one node reach it."""
        return self.place()[0] != EXTERNAL

    @property
    def medium(self) -> str:
        """What routers know such a place as."""
        return self.place()[0]

    @property
    def node(self) -> str:
        """Whose engines reach it, "" for all."""
        return self.place()[1]

    def place(self) -> tuple[str, str]:
        """(medium, node), see `place_of`."""
        return place_of(self.kind, self.reach, self.fault_domain)

    @property
    def volatile(self) -> bool:
        """Whether its bytes are gone with the worker that holds them."""
        return self.kind in VOLATILE_KINDS

    @property
    def open(self) -> bool:
        """Whether there is anything that new blocks could be written to."""
        return self.pool is not None or self.kind not in VOLATILE_KINDS

    def told(self) -> dict[str, str]:
        """`options` for who reads and writes: with the pool of a volatile storage ('' while it has none)."""
        if not self.volatile:
            return self.options
        return {**self.options, "pool": self.pool.incarnation if self.pool is not None else ""}

    def change_pool(self, pool: Pool | None) -> None:
        """Another pool, or none, instead of the one before."""
        if self.pool is not None:
            self.spent = (*self.spent[-(RETIRED_INCARNATIONS - 1) :], self.pool.incarnation)
        self.pool = pool


class Group:
    """InstanceGroup: quota and policy shared by its instances."""

    __slots__ = (
        "eviction", "high_permille", "id", "low_permille", "quota", "storages", "switch", "tenant", "usage",
    )  # fmt: skip

    def __init__(self, id: str, tenant: Tenant) -> None:
        self.id = id
        self.tenant = tenant
        self.storages: tuple[str, ...] = ()
        self.quota = Quota()
        self.high_permille = 0
        self.low_permille = 0
        self.eviction = EvictionPolicy.lru
        self.switch = SwitchMode.normal
        self.usage = Usage(SwitchScope.group, id)


class Instance:
    """One immutable model deployment. `tables` has one key table per attention group, in the fingerprint's
    order."""

    __slots__ = (
        "announced", "effective", "fingerprint", "group", "id", "primary", "publication", "quota", "retiring",
        "shard", "switch", "tables", "usage",
    )  # fmt: skip

    def __init__(self, id: str, group: Group, fingerprint: Fingerprint, shard: int) -> None:
        self.id = id
        self.group = group
        self.fingerprint = fingerprint
        self.shard = shard
        self.quota = Quota()
        self.switch = SwitchMode.normal
        self.retiring = False
        self.tables: dict[str, Table] = {}
        self.primary: Table
        self.usage = Usage(SwitchScope.instance, id)
        self.publication: Publication | None = None
        self.announced = 0
        """How many of its blocks routers are told of; derived."""
        self.effective: Switched | None = None
        """The strictest switch on the path, None when all are normal. Derived; kept because every lookup
        asks."""

    def first(self, kind: GroupKind) -> Table | None:
        """The first table of an attention kind."""
        return next((table for table in self.tables.values() if table.group.kind == kind), None)


class Session:
    """An open write session. Rows are its locations in the order they were given; `status` is FinishStatus a
    row."""

    __slots__ = (
        "deadline_ms", "engine", "generations", "incarnation", "number", "open", "row_of", "slots", "status",
        "table", "ttl_ms",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        engine: str,
        incarnation: str,
        table: Table,
        ttl_ms: int,
        deadline_ms: int,
        slots: "array[int]",
        generations: "array[int]",
        status: bytearray,
    ) -> None:
        self.number = number
        self.engine = engine
        self.incarnation = incarnation
        self.table = table
        self.ttl_ms = ttl_ms
        self.deadline_ms = deadline_ms
        self.slots = slots
        self.generations = generations
        self.status = status
        self.open = status.count(1)
        self.row_of: dict[int, int] = {}

    def rows(self) -> dict[int, int]:
        """slot -> row, made when first needed."""
        if not self.row_of:
            self.row_of = {slot: row for row, slot in enumerate(self.slots)}
        return self.row_of


class Ended(Struct, frozen=True, array_like=True):
    """What is remembered of a session that is over. `state`: SessionState; `freed`: locations that its end
    freed; columns as in Session, packed."""

    number: int
    state: int
    freed: int
    engine: str
    incarnation: str
    slots: bytes
    generations: bytes
    status: bytes


class Member(Struct, array_like=True):
    """A registered engine or worker. `retired`: incarnations that were replaced under this id and cannot come
    back."""

    id: str
    incarnation: str
    registered_ms: int
    expired_ms: int = 0
    retired: list[str] = []
    instance: str = ""
    rank: int = 0
    storages: tuple[str, ...] = ()
    endpoints: Endpoints = Endpoints()
    pool_channel: int = -1
    local_channel: int = -1


class Told(Struct, frozen=True, array_like=True):
    """A block as routers were told of it. `times`: how often it was told as removed."""

    instance: str
    medium: str
    node: str
    key: bytes
    times: int = 0


class Held:
    """What the other shards were granted of one limit, as the catalogue says. `since`: the seqs at which the
    (bytes, blocks) limits came to be where there had been none. `slices`: [bytes, blocks] of shard 1 and on;
    None: unlimited (still)."""

    __slots__ = ("made_seq", "since", "slices")

    def __init__(self, made_seq: int, since: list[int], slices: list[list[int | None]]) -> None:
        self.made_seq = made_seq
        self.since = since
        self.slices = slices


class State:
    """Everything that the journal of one shard says. `shards`: how many there are, for good."""

    def __init__(self, shard: int, shards: int = 1) -> None:
        assert shards == 1 or shard < shards, f"shard {shard} of {shards}"
        self.shard = shard
        self.shards = shards
        self.seq = 0
        self.epoch = 0
        self.cluster = ""
        self.now_ms = 0
        self.takeover_ms = 0
        self.index = BlockIndex()
        self.tenants: dict[str, Tenant] = {}
        self.storages: dict[str, Storage] = {}
        self.storage_of: dict[int, Storage] = {}
        self.volatile: set[int] = set()
        """Numbers of the volatile storages; derived."""
        self.groups: dict[str, Group] = {}
        self.instances: dict[str, Instance] = {}
        self.switch = SwitchMode.normal
        self.switch_reasons: dict[tuple[SwitchScope, str], str] = {}
        self.engines: dict[str, Member] = {}
        self.workers: dict[str, Member] = {}
        self.sessions: dict[int, Session] = {}
        self.sessions_of: dict[str, set[int]] = {}
        """engine id -> its open sessions; derived."""
        self.ended: OrderedDict[int, Ended] = OrderedDict()
        self.deleting: dict[int, int] = {}
        """slot -> `not_before_ms` of every deleting location."""
        self.remembered: OrderedDict[tuple[str, str], Remembered] = OrderedDict()
        self.retiring: dict[str, None] = {}
        """Instances being removed, in the order asked."""
        self.window = WINDOW_FIRST
        """Number of the last step of what routers were told."""
        self.announced = 0
        """How many blocks routers are told of, of all instances; derived."""
        self.published: set[str] = set()
        """Instances that this shard tells routers of; derived."""
        self.untold: dict[Told, None] = {}
        """What is not there any more and routers still know, in the order in which it went."""
        self.doomed: deque[int] = deque()
        """Announced blocks that are to be withdrawn in the next steps: what they hung on was."""
        self.untold_of: dict[str, int] = {}
        """How much of it is of which instance; derived."""
        self.tombstones: deque[Told] = deque()
        """What routers were told as removed; some of them may have missed it."""
        self.session_next = 1
        self.table_next = 1
        self.grant_next = 1
        # Several shards only, see `escrow`:
        self.catalogue_version = 0
        """A data shard has what the catalogue said up to this seq of it."""
        self.return_next = 1
        self.outstanding: dict[int, Returned] = {}
        """What a data shard gave up and does not know to be taken, by number."""
        self.held: dict[ScopeKey, Held] = {}
        """The catalogue: who was granted what."""
        self.returns_taken = [0] * shards
        """The catalogue: the last return that it took of each shard."""

    @property
    def leads_catalogue(self) -> bool:
        """Whether what is registered is decided here, not copied from the catalogue shard."""
        return self.shards == 1 or not self.shard

    def members(self, kind: str) -> dict[str, Member]:
        """The registry of `engine` or `worker`."""
        return self.engines if kind == "engine" else self.workers

    def scopes(self, instance: Instance) -> tuple[Usage, Usage, Usage]:
        """The usages a block of the instance counts in, narrowest first (its storage's comes on top)."""
        return instance.usage, instance.group.usage, instance.group.tenant.usage

    def effective_switch(self, instance: Instance) -> Switched | None:
        """The strictest switch on the path (the widest scope wins a tie), None when all are normal."""
        group = instance.group
        path = (
            (SwitchScope.cluster, "", self.switch),
            (SwitchScope.tenant, group.tenant.id, group.tenant.switch),
            (SwitchScope.group, group.id, group.switch),
            (SwitchScope.instance, instance.id, instance.switch),
        )
        scope, id, mode = max(path, key=lambda step: step[2])
        return None if mode is SwitchMode.normal else Switched(scope, id, mode)
