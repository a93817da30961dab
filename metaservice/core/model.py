"""The things of the domain as plain data. They hold no rule; `decide` and `apply` do.

Everything here that is registered (tenants, storages, groups, instances, switches) belongs to the catalogue:
with one shard it lives beside the blocks, with several it will be tailed by every shard.
"""

from enum import IntEnum

from msgspec import Struct


class GroupKind(IntEnum):
    """Attention kinds that decide how a prefix may be reused."""

    full = 0
    sliding_window = 1
    state = 2


class AttentionGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that are cached alike. `window_blocks`: how many trailing blocks a sliding window needs (0
    otherwise)."""

    name: str
    kind: GroupKind = GroupKind.full
    window_blocks: int = 0


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """The piece of a block that one rank holds in one attention group, `bytes` long in every block."""

    name: str
    bytes: int
    group: str = "full"


class Fingerprint(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that must be equal for two engines to share blocks. Another value anywhere is another
    instance."""

    model: str
    revision: str
    kv_dtype: str
    block_size_tokens: int
    key_length: int
    hash_scheme: str
    hash_seed: str
    parts: tuple[Part, ...]
    groups: tuple[AttentionGroup, ...] = (AttentionGroup("full"),)
    canary: str = ""
    extra: dict[str, str] = {}


class Quota(Struct, frozen=True, forbid_unknown_fields=True):
    """A hard limit; None is no limit. Bytes and blocks of what is being written or serves."""

    bytes: int | None = None
    blocks: int | None = None


class Publication(Struct, frozen=True, forbid_unknown_fields=True):
    """How an instance's blocks are announced to routers. `model`: the name that routers know the model by.
    `routing_group`: instances that share it are told apart by no router ("": the model); they must name
    blocks alike. `lora`: the adapter all of the instance's blocks are for. `hash_of`: which 8 bytes of a key
    are the engine's own event hash: `tail64` (vLLM) or `head64` (SGLang), big-endian. `entries_max`: at most
    so many blocks are announced at a time, those used last. `base`: the instance whose engines use this one's
    blocks too, and in whose streams they are told ("": its own); so it is with an adapter's."""

    model: str
    routing_group: str = ""
    lora: str = ""
    hash_of: str = "tail64"
    entries_max: int = 50_000
    base: str = ""

    @property
    def group(self) -> str:
        """The routing group it is in."""
        return self.routing_group or self.model


class Endpoints(Struct, frozen=True, forbid_unknown_fields=True):
    """Where an engine is, for routers and for the service. `node`: whose local storages it reaches (a
    storage's fault domain). `address`: `ip:port` as routers know it. `worker_id`: its number in Dynamo (0:
    made from its id). `events`/`replay`: where it publishes its own cache events, "" when it does not;
    `dialect`: `vllm` or `sglang`."""

    node: str = ""
    address: str = ""
    worker_id: int = 0
    events: str = ""
    replay: str = ""
    dialect: str = "vllm"


class SwitchMode(IntEnum):
    """Degradation switch, ordered by strictness: the strictest on the path holds."""

    normal = 0
    read_only = 1
    bypass = 2


class SwitchScope(IntEnum):
    """Where a switch is set, from the widest to the narrowest."""

    cluster = 0
    tenant = 1
    group = 2
    instance = 3
    storage = 4


class EvictionPolicy(IntEnum):
    """What an over-quota write meets: `lru` makes room by evicting leaf-first, `reject` refuses the write."""

    lru = 0
    reject = 1


class LocationState(IntEnum):
    """States of a CacheLocation; `gone` is a free slot."""

    gone = 0
    writing = 1
    serving = 2
    deleting = 3


class SessionState(IntEnum):
    """States of a WriteSession."""

    open = 0
    finished = 1
    expired = 2
    aborted = 3


class LeaseState(IntEnum):
    """States of a ReadLease."""

    held = 0
    released = 1
    expired = 2


REACHES = ("", "pool", "node")
VOLATILE_KINDS = frozenset({"shm"})
"""Kinds of storage whose bytes are gone with the worker that holds them."""
TOMBSTONES = 65_536
"""Removals that are told again: the newest so many."""
REMEMBERED_REQUESTS = 4_096
"""Replies kept for retries (invariant I7): the newest so many."""
ENDED_SESSIONS = 4_096
RETIRED_INCARNATIONS = 32
"""What a state remembers is no setting: replicas that were configured differently would no longer be equal
(I6)."""


class Limits(Struct, frozen=True, kw_only=True):
    """Every bound and duration of the core. Asserted together by `config` (the timing laws)."""

    keys_per_request_max: int = 16_384
    write_ttl_ms_min: int = 1_000
    write_ttl_ms_default: int = 30_000
    write_ttl_ms_max: int = 1_800_000
    lease_ms_min: int = 100
    lease_ms_max: int = 60_000
    reclaim_delay_ms: int = 1_000
    """From the end of a block's service to the deletion of its bytes, for readers that hold no lease."""
    late_write_ms: int = 5_000
    """How long after its session ended a writer may still be writing: its place is not deleted before."""
    task_ttl_ms: int = 30_000
    heartbeat_ms: int = 2_000
    suspect_ms: int = 6_000
    expire_ms: int = 15_000
    sessions_max: int = 100_000
    leases_max: int = 200_000
    registered_max: int = 100_000
    """Tenants, storages, groups, instances, engines, workers: at most so many of each."""
    ended_leases_max: int = 4_096
    ended_tasks_max: int = 4_096
    forget_ms: int = 600_000
    """An expired engine or worker is forgotten after this long."""
    hot_summary_ms: int = 5_000
    hot_summary_max: int = 4_096
    """Every so often the most recently used blocks (at most so many) ride the journal, for the next leader's
    eviction."""
    errand_ms: int = 500
    """With several shards: how often a shard without news tells the catalogue how it is, and hears what
    others need."""
    high_permille: int = 950
    low_permille: int = 900
    """Watermarks of tenants and storages; groups bring their own."""
    task_retry_ms: int = 1_000
    parts_max: int = 64
    groups_max: int = 16
    evict_batch_max: int = 4_096
    window_blocks_max: int = 256
    """Blocks stored, and as many restated, in one step of what routers are told."""
    window_removed_max: int = 4_096
    beat_ms: int = 900
    """Every stream sends a batch so often at least, if an empty one."""
    restate_ms: int = 600_000
    """In this time routers are told again of everything that is announced."""
    retire_batch_max: int = 4_096
