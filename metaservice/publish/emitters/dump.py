"""What Dynamo's indexer reads once at its start from a peer, `GET /dump`: everything that is announced, as
JSON.

A stream brings an indexer up to date too, but no faster than it is sent. A peer's answer needs no token ids:
each block has the hash that Dynamo itself would make of them.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import Raw, Struct

from metaservice.core.windows import CPU, EXTERNAL, STORAGE, Run
from metaservice.publish.emitters.port import Stream
from metaservice.publish.emitters.spans import Checks
from metaservice.publish.hashes import dynamo_local_hash, dynamo_seed

TIERS = {CPU: "host_pinned", STORAGE: "disk", EXTERNAL: "external"}


class Held(Struct, frozen=True):
    """What the workers of `stream` have of `runs` (which come parents first). `workers`: (id in Dynamo,
    rank)."""

    stream: Stream
    routing_group: str
    workers: Sequence[tuple[int, int]]
    runs: Iterable[Run]


class Block(Struct, frozen=True):
    block_hash: int
    tokens_hash: int
    mm_extra_info: None = None


class Stored(Struct, frozen=True):
    parent_hash: int | None
    start_position: None
    blocks: list[Block]


class Event(Struct, frozen=True):
    event_id: int
    data: dict[str, Raw]
    dp_rank: int


class Entry(Struct, frozen=True):
    worker_id: int
    storage_tier: str
    event: Event
    residency_domain: str


def dump(parts: Iterable[Held], checks: Checks) -> Iterator[bytes]:
    """The answer's body in pieces, each the events of one span at most. Instances of a model and routing
    group have one block size: the service sees to that."""
    groups: dict[str, list[Held]] = {}
    for held in parts:
        groups.setdefault(f"{held.stream.model}:{held.routing_group}", []).append(held)
    encode = msgspec.json.Encoder().encode
    opening = b"{"
    for name, members in groups.items():
        size = members[0].stream.block_size_tokens
        yield opening + encode(name) + b':{"block_size":%d,"events":[' % size
        comma = b""
        for entries in _entries(members, checks):
            yield comma + b",".join(map(encode, entries))
            comma = b","
        opening = b"]},"
    yield b"]}}" if groups else b"{}"


def _entries(members: Sequence[Held], checks: Checks) -> Iterator[list[Entry]]:
    """What each worker has of each span; the blocks are encoded once for all of them."""
    encode = msgspec.json.Encoder().encode
    number = 0
    for held in members:
        if not held.workers:
            continue
        for run in held.runs:
            seed = dynamo_seed(run.lora or held.stream.lora, run.salt)
            for span in checks.spans(held.stream, run):
                blocks = [
                    Block(name, dynamo_local_hash(packed, seed))
                    for name, packed in zip(span.hashes, span.tokens, strict=True)
                ]
                data = {"stored": Raw(encode(Stored(span.parent, None, blocks)))}
                yield [
                    Entry(worker, TIERS[run.medium], Event(number + at, data, rank), "worker")
                    for at, (worker, rank) in enumerate(held.workers)
                ]
                number += len(held.workers)
