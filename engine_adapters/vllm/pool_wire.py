"""What the service's streams of cache events say, as it comes over the wire: vLLM's own dialect.

Token ids stay as they came until the engine publishes them: what waits costs its bytes, and no more.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw, Struct

END = b"\xff" * 8
"""The number that ends a replay; sent to everybody it says that the numbers begin anew."""
NUMBER_BYTES = 8
REMOVED_BLOCKS_MAX = 64
"""Blocks in an event that is made here."""


class _Event(Struct, tag_field="type", gc=False):
    """Its size on the wire is what it takes while it waits."""


class Stored(_Event, tag="BlockStored"):
    """Blocks that follow each other below `parent_block_hash`. `token_ids`: encoded, of all of them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Raw
    block_size: int
    medium: str
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_keys: list[list[Any] | None] | None = None


class Removed(_Event, tag="BlockRemoved"):
    """Blocks that are no longer there."""

    block_hashes: list[int]
    medium: str


Told = Stored | Removed


class _Batch(Struct, array_like=True, gc=False):
    ts: float
    events: list[Raw]
    data_parallel_rank: int | None = None


_batches = msgspec.msgpack.Decoder(_Batch)
_events = msgspec.msgpack.Decoder(Told)
_tokens = msgspec.msgpack.Decoder(list[int])


def events_of(payload: bytes) -> Iterator[tuple[Told, int] | None]:
    """The events of a batch, each with its size in bytes; None for each that is not what it should be: the
    others count all the same."""
    try:
        batch = _batches.decode(payload)
    except msgspec.MsgspecError:
        yield None
        return
    for raw in batch.events:
        try:
            yield _events.decode(raw), len(memoryview(raw))
        except msgspec.MsgspecError:
            yield None


def tokens_of(event: Stored) -> list[int] | None:
    """Its token ids; None when they are not those of so many whole blocks."""
    try:
        tokens = _tokens.decode(event.token_ids)
    except msgspec.MsgspecError:
        return None
    return tokens if len(tokens) == len(event.block_hashes) * event.block_size else None
