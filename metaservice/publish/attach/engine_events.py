"""An engine's own events, as they may go on in a stream of ours: read, checked, and spelled anew.

What routers choke on is left out and counted: one such event would cost them the whole batch, and the pool's
events in it. Of an engine with several attention groups only the main one is told, of which a prefix of
blocks is a prefix of the prompt.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Raw, Struct

from metaservice.core.windows import CPU, EXTERNAL, STORAGE
from metaservice.publish.feed import EngineUp, InstanceUp
from metaservice.publish.hashes import HEAD64
from metaservice.publish.ingest.dialect import Cleared, DialectReader, Hash, Removed, Stored
from metaservice.publish.ingest.events import MAIN_KINDS, TIER_OF_MEDIUM

MEDIA = ("GPU", CPU, STORAGE, EXTERNAL)
"""By tier."""
TOKEN_MAX = 2**32 - 1
_U64 = 2**64 - 1
_HASH_BYTES = 8


class _Left(Exception):
    """An event is left out, for this reason."""


class _Stored(Struct, frozen=True, tag_field="type", tag="BlockStored", omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    cache_salt: str | None = None
    extra_keys: object = None


class _Removed(Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str


class _Cleared(Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    pass


_encode = msgspec.msgpack.Encoder().encode
CLEARED = Raw(_encode(_Cleared()))
"""Everything that is known of this engine, in all tiers, is void. Only for a stream that is its only one."""


class EngineEvents:
    """Of one engine, since it is followed."""

    def __init__(self, up: EngineUp, instance: InstanceUp, bad: Counter[str]) -> None:
        """What is left out is counted in `bad`, by reason."""
        self._rank = up.rank
        self._block_size = instance.block_size_tokens
        self._head = instance.hash_of == HEAD64
        self._bad = bad
        self._reader = DialectReader(up.dialect, bad)
        self._group: int | None = None

    def read(self, payload: bytes) -> tuple[int, list[Raw]]:
        """When the batch was made, in ms, and its good events; CLEARED itself where all was cleared. No
        events for what is no batch, or another rank's."""
        batch = self._reader.read(payload)
        if batch is None:
            return 0, []
        if batch.rank is not None and batch.rank != self._rank:
            self._bad["rank"] += 1
            return 0, []
        return int(batch.ts * 1000), list(self._good(batch.events))

    def _good(self, events: Sequence[Stored | Removed | Cleared]) -> Iterator[Raw]:
        for event in events:
            try:
                match event:
                    case Stored():
                        yield Raw(_encode(self._stored(event)))
                    case Removed():
                        yield Raw(_encode(self._removed(event)))
                    case Cleared():
                        yield CLEARED
            except _Left as left:
                self._bad[str(left)] += 1

    def _stored(self, event: Stored) -> _Stored:
        if event.opaque:
            raise _Left("opaque")
        if event.block_size != self._block_size:
            raise _Left("block_size")
        self._place(event.locality, event.group_idx, event.kv_cache_spec_kind)
        hashes = self._hashes(event.block_hashes)
        parent = None if event.parent_block_hash is None else self._hash(event.parent_block_hash)
        count = min(len(hashes), len(event.token_ids) // self._block_size)
        if not count:
            raise _Left("token_span")
        hashes, tokens = hashes[:count], event.token_ids[: count * self._block_size]
        if len(set(hashes)) != count or parent in hashes:
            raise _Left("loop")
        if not all(token.__class__ is int and 0 <= token <= TOKEN_MAX for token in tokens):
            raise _Left("token")
        return _Stored(
            hashes,
            parent,
            tokens,
            self._block_size,
            None,
            self._medium(event.medium),
            event.lora_name,
            event.cache_salt,
            event.extra_keys,
        )

    def _removed(self, event: Removed) -> _Removed:
        self._place(event.locality, event.group_idx, None)
        return _Removed(self._hashes(event.block_hashes), self._medium(event.medium))

    def _place(self, locality: str | None, group: int | None, kind: str | None) -> None:
        """Whether it is of this engine, and of its main group: the first whose kind is one."""
        if locality not in (None, "LOCAL"):
            raise _Left("locality")
        if kind is not None and kind not in MAIN_KINDS:
            raise _Left("group")
        if group is not None:
            if self._group is None and (kind is not None or group == 0):
                self._group = group
            if group != self._group:
                raise _Left("group")

    @staticmethod
    def _medium(medium: str | None) -> str:
        tier = TIER_OF_MEDIUM.get((medium or "").upper())
        if tier is None:
            raise _Left("medium")
        return MEDIA[tier]

    def _hashes(self, hashes: Sequence[Hash]) -> list[int]:
        if not hashes:
            raise _Left("hash")
        return [self._hash(one) for one in hashes]

    def _hash(self, one: Hash) -> int:
        """As the engine's events have it, unsigned."""
        if isinstance(one, int):
            return one & _U64
        if len(one) < _HASH_BYTES:
            raise _Left("hash")
        return int.from_bytes(one[:_HASH_BYTES] if self._head else one[-_HASH_BYTES:], "big")
