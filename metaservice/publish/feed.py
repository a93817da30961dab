"""What the replica tells its publisher process and hears from it: length-prefixed msgpack over a socket pair.

Everything about blocks comes from the journal, in its order. The publisher holds nothing that it could not
be told again: when it restarts, or fell behind, each shard begins anew with `Begin`.
"""

from msgspec import Struct

from metaservice.core.windows import Gone, Run, Window

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""A longer message is a programmer's error."""


class Message(Struct, frozen=True, array_like=True, kw_only=False):
    """Base of all messages: the tag is their name."""


# ---------------------------------------------------------------- replica -> publisher


class Begin(Message, frozen=True, array_like=True, tag="begin"):
    """Forget all of this shard. What follows up to `Ready` is how it stands; the next window has a number
    above `number`. Windows may come before `Ready`: they are newer than the chunks they come between."""

    shard: int
    number: int


class Ready(Message, frozen=True, array_like=True, tag="ready"):
    shard: int


class InstanceUp(Message, frozen=True, array_like=True, tag="instance_up"):
    """An instance that is announced, or how it is announced now. `kind` is the attention kind of the group
    whose blocks are announced (always the primary one, `full`)."""

    shard: int
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


class InstanceDown(Message, frozen=True, array_like=True, tag="instance_down"):
    """Announced no longer (its blocks were told as removed before)."""

    shard: int
    instance: str


class EngineUp(Message, frozen=True, array_like=True, tag="engine_up"):
    """An engine registered, or again with something else. `pool_channel`: the stream for blocks that every
    engine reaches; `local_channel` that of its node's (-1: it named no node)."""

    shard: int
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


class EngineDown(Message, frozen=True, array_like=True, tag="engine_down"):
    """`why`: `expired` or `left`."""

    shard: int
    engine: str
    why: str


class Standing(Message, frozen=True, array_like=True, tag="standing"):
    """A part of what is announced already."""

    shard: int
    runs: list[Run]


class Tombstones(Message, frozen=True, array_like=True, tag="tombstones"):
    """What was announced and is not any more, lately."""

    shard: int
    gone: list[Gone]


class Leads(Message, frozen=True, array_like=True, tag="leads"):
    """Whether this replica leads the shard now, and in which epoch: then its streams are served, from the
    next window on. Whether a batch may be sent is up to the fence (`fence`), each time; what was to be sent
    in one epoch is never sent in another one, for somebody else may have gone on meanwhile."""

    shard: int
    leads: bool
    epoch: int = 0


class Ask(Message, frozen=True, array_like=True, tag="ask"):
    """A request that the API passes on, answered by `Answer` with the same `id`. `what`: `route`, `report`
    or `status`; `body` is its msgpack."""

    id: int
    what: str
    body: bytes


class Stop(Message, frozen=True, array_like=True, tag="stop"):
    """Send what is queued, close everything, exit."""


# ---------------------------------------------------------------- publisher -> replica


class Answer(Message, frozen=True, array_like=True, tag="answer"):
    """`problem` "" when it went well, else a code of `wire.problems`, with `body` its text."""

    id: int
    problem: str
    body: bytes


class Restate(Message, frozen=True, array_like=True, tag="restate"):
    """A router lost what it was told of this instance: tell all of it again. `why`: `cleared` (an engine
    cleared its cache) or `joined` (a subscriber that cannot ask for a replay)."""

    shard: int
    instance: str
    why: str


class Beat(Message, frozen=True, array_like=True, tag="beat"):
    """Somebody joined: make a window now, if an empty one, so that it sees at once what it missed."""

    shard: int


class Stats(Message, frozen=True, array_like=True, tag="stats"):
    """Counters and gauges by metric name, about once a second. A name may carry labels:
    `subscribers{stream="3"}`."""

    values: dict[str, float]


class Said(Message, frozen=True, array_like=True, tag="said"):
    """A line for the log."""

    level: str
    text: str


ToPublisher = (
    Begin
    | Ready
    | InstanceUp
    | InstanceDown
    | EngineUp
    | EngineDown
    | Standing
    | Tombstones
    | Window
    | Leads
    | Ask
    | Stop
)
FromPublisher = Answer | Restate | Beat | Stats | Said


def framed(encoded: bytes) -> bytes:
    """With its length (u32 little-endian) before it."""
    assert len(encoded) <= FRAME_BYTES_MAX, "a message that nobody would take"
    return len(encoded).to_bytes(4, "little") + encoded
