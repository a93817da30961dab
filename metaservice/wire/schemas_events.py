"""What is said on the wire about routers: who holds which prefix, what an engine reports of its own caches,
and where the streams of cache events are.

Four tiers of an engine, the nearest first: `gpu`, `cpu`, `storage` (its node's), `external` (the shared
pool). Blocks are known here by the engine's own event hash (u64) or by their token ids, since that is what
engines and routers have in common.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct, field

from .schemas import U64, Column, Count, Keys, Name, Reply, Request, Text, Token, TtlMs

TIERS = ("gpu", "cpu", "storage", "external")
"""In the order in which they are near to an engine."""
REPORTED_TIERS = ("gpu", "cpu", "storage")
"""What an engine can report of itself: what is in the pool the service knows by itself."""
REPORT_ITEMS_MAX = 4_096
"""Items (`stored` and `removed` together) of one report."""
REPORT_BLOCKS_MAX = 65_536
"""Blocks that all items of one report name together."""
REPORT_TOKENS_MAX = 2**21
"""Token ids of one item: a request's body holds no more."""


class ReportOutcome(StrEnum):
    """What became of one item of a report.

    `taken`: it counts. `held`: its parent is not known yet; it counts as soon as that is reported. All
    others were left out: `tier` is none that an engine has, `hashes` are empty, twice in the item, below
    2**32 or their own parent, `tokens` are no block size for each hash, and `full`: this replica knows as
    many blocks as it may.
    """

    taken = "taken"
    held = "held"
    tier = "tier"
    hashes = "hashes"
    tokens = "tokens"
    full = "full"


# ---------------------------------------------------------------- route


class RouteRequest(Request, kw_only=True):
    """`POST /v1/instances/{id}/route`: which engine holds how much of this prompt? Any replica answers, from
    what it has.

    Exactly one of `keys` (block keys, root first) and `token_ids` (of the whole prompt; a last block that is
    not full is left out; in msgpack a list or packed u32). `lora` and `salt` as the blocks were stored with.
    `top_k`: only so many engines, the best (0: all that hold anything). `staleness_ms_max`: a replica whose
    own state is older passes the request on to the leader.
    """

    keys: Keys = None
    token_ids: Column = None
    lora: Text = ""
    salt: Text = ""
    top_k: Annotated[int, Meta(ge=0, le=100_000)] = 0
    staleness_ms_max: TtlMs | None = None


class TierBlocks(Reply, kw_only=True):
    """Blocks from the prompt's first on that are there without a gap, when that tier and all nearer ones are
    taken together: never fewer than the tier before."""

    gpu: int = 0
    cpu: int = 0
    storage: int = 0
    external: int = 0


class EngineRoute(Reply, kw_only=True):
    """How much of the prompt one engine (one rank of it) has. `blocks` is the longest prefix over all tiers,
    `tokens` that in token ids.

    `staleness_ms`: since the engine was last heard of, by its events or reports (-1: never, only what is
    announced for it is known). `visible`: not silent for too long; of one that is not, its own tiers count
    for nothing.
    """

    engine: str
    instance: str
    rank: int
    address: str
    worker_id: int
    node: str
    tiers: TierBlocks
    blocks: int
    tokens: int
    staleness_ms: int
    visible: bool


class PoolRoute(Reply, kw_only=True):
    """How much of the prompt is in the pool, whoever asks. `blocks`: readable, by a lookup without lease in
    the state of the replica that answered (-1: the keys of these token ids cannot be computed here);
    `announced`: how many of the first of them routers are told of.

    `applied_seq` is the journal position of that state, `staleness_ms` how old it may be (0: the leader's).
    """

    blocks: int
    announced: int
    applied_seq: int
    staleness_ms: int


class RouteReply(Reply, kw_only=True):
    """`engines`: the best first: most blocks, then most in the nearest tiers, then by name. `asked`: blocks
    of the prompt."""

    asked: int
    block_size_tokens: int
    engines: list[EngineRoute]
    pool: PoolRoute


class RouteAsk(Struct, array_like=True):
    """A route request as the publisher is asked it (`feed.Ask`, `route`): checked, and always packed.
    `token_ids`: little-endian u32; empty when `keys` are given."""

    instance: str
    keys: list[bytes]
    token_ids: bytes
    lora: str
    salt: str
    top_k: int


class RouteAnswer(Struct, array_like=True):
    """What the publisher knows. `keys`: those of the token ids, where the instance's hash scheme can be
    computed (else empty). `instance`: the one that has such blocks; the adapter's, where the base model's was
    asked for an adapter."""

    asked: int
    block_size_tokens: int
    announced: int
    engines: list[EngineRoute]
    keys: list[bytes]
    instance: str


# ---------------------------------------------------------------- reports of engines


class StoredItem(Request, kw_only=True):
    """Blocks that follow each other and are in `tier` now. `parent`: the event hash before the first (null: a
    prompt begins here). `hashes`: the engine's own event hashes, u64. `token_ids`: of all these blocks, u32
    (none: known to the service already, from another tier or report)."""

    tier: Annotated[str, Meta(max_length=16)]
    hashes: Column
    parent: U64 | None = None
    token_ids: Column = b""
    lora: Text = ""
    salt: Text = ""


class RemovedItem(Request, kw_only=True):
    """Blocks that are not in `tier` any more."""

    tier: Annotated[str, Meta(max_length=16)]
    hashes: Column


class ReportRequest(Request, kw_only=True):
    """`POST /v1/engines/{id}/cache`: what an engine holds in its own tiers, told to this one replica: each
    keeps its own knowledge, so tell all that you know.

    Reports of an incarnation are numbered. `base` is the number of the report that this one goes on from;
    null: it is a snapshot, all that there is, and what was reported before is forgotten. In this order:
    `cleared` (all tiers are empty), `removed`, `stored`. A report that was taken already (of this or a
    smaller number) changes nothing. One without items whose `number` and `base` are the last number is a
    heartbeat: without one the engine's entries are hidden after some seconds, and dropped later.
    """

    incarnation: Token
    number: Count
    base: Count | None = None
    cleared: bool = False
    stored: list[StoredItem] = field(default_factory=list)
    removed: list[RemovedItem] = field(default_factory=list)


class ReportReply(Reply, kw_only=True):
    """`stored` and `removed`: a ReportOutcome an item, in the order sent; none when nothing of it was taken,
    for one of the next two reasons. `want`: `snapshot` when this replica has not what the report goes on
    from: send all there is; else empty. `number`: of the last report that was taken from this incarnation (0:
    none); when that is a later one, go on above it, with a snapshot. `visible_ms`: the next report or
    heartbeat has to come within this time."""

    stored: list[str]
    removed: list[str]
    want: str
    visible_ms: int
    number: int = 0


class StoredAsk(Struct, array_like=True):
    """A StoredItem, packed: u64 hashes, u32 token ids, little-endian."""

    tier: str
    parent: int | None
    hashes: bytes
    token_ids: bytes
    lora: str
    salt: str


class RemovedAsk(Struct, array_like=True):
    """A RemovedItem, packed."""

    tier: str
    hashes: bytes


class ReportAsk(Struct, array_like=True):
    """A report as the publisher is asked it (`feed.Ask`, `report`): columns checked and packed. Its answer is
    a ReportReply."""

    engine: str
    incarnation: str
    number: int
    base: int | None
    cleared: bool
    stored: list[StoredAsk]
    removed: list[RemovedAsk]


# ---------------------------------------------------------------- streams


class EventsRequest(Request, kw_only=True):
    """`GET /v1/events`: the streams of cache events as the asked replica serves them. `instance`: only what
    concerns this one."""

    instance: Name | None = None


class StreamView(Reply, kw_only=True):
    """One stream: subscribe to `endpoint`, ask `replay` for what was missed. `kind`: `shared` (beside the
    engines' own streams; of the pool where `node` is empty, else of that node's tiers) or `merged` (an
    engine's own events and the pool's in one; `engine` says whose).

    `number`: of the newest batch. `live`: this replica sends it now; otherwise connect to the one that leads
    `shard` (GET /v1/cluster). `lag_ms`: how long ago the newest batch's clock was.
    """

    channel: int
    shard: int
    kind: str
    instance: str
    model: str
    node: str
    rank: int
    topic: str
    endpoint: str
    replay: str
    live: bool
    number: int
    block_size_tokens: int
    announced: int
    subscribers: int = 0
    lag_ms: int = 0
    engine: str = ""


class EngineView(Reply, kw_only=True):
    """One engine: as it registered, its channels (-1: none), and what of its own caches is known. `state`:
    `none` (it publishes nothing and reports nothing), `connecting`, `following`, `reported`, `silent` or
    `expired`; `blocks` by tier."""

    engine: str
    incarnation: str
    instance: str
    rank: int
    node: str
    address: str
    worker_id: int
    events: str
    replay: str
    dialect: str
    pool_channel: int
    local_channel: int
    state: str = "none"
    staleness_ms: int = -1
    blocks: dict[str, int] = field(default_factory=dict)


class AttachmentView(Reply, kw_only=True):
    """One consumer that is attached by configuration: its `kind` and where it is, `ok` or not and why
    (`detail`), and how many engines it was told of."""

    name: str
    kind: str
    target: str
    ok: bool
    detail: str
    engines: int = 0


class EventsReply(Reply, kw_only=True):
    """The streams, engines and attachments of one replica. Each list is empty when there is none. Answer of
    `feed.Ask`, `status`, too."""

    replica: str = ""
    streams: list[StreamView] = field(default_factory=list)
    engines: list[EngineView] = field(default_factory=list)
    attachments: list[AttachmentView] = field(default_factory=list)


# ---------------------------------------------------------------- tell it again


class RestateRequest(Request, kw_only=True):
    """`POST /v1/instances/{id}/restate`: routers are told again, as removed and stored, all that is announced
    of the instance; its shard's leader does it, bit by bit."""


class RestateReply(Reply, kw_only=True):
    """`blocks`: how many will be told again."""

    blocks: int
