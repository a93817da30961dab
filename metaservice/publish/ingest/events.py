"""What an engine's events mean for what is known of its caches."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from metaservice.publish.feed import InstanceUp
from metaservice.publish.hashes import EVENT_HASH_MIN, HEAD64
from metaservice.publish.holdings import CPU, EXTERNAL, GPU, STORAGE, Member
from metaservice.publish.packing import pack_windows, raw_ids, root_of

from .dialect import Batch, Cleared, Hash, Removed, Stored
from .limits import IngestLimits

TIER_OF_MEDIUM = {
    "": GPU,
    "GPU": GPU,
    "DEVICE": GPU,
    "CPU": CPU,
    "CPU_PINNED": CPU,
    "CPU_TIER1": CPU,
    "CPU_TIER2": STORAGE,
    "DISK": STORAGE,
    "NVME": STORAGE,
    "STORAGE": STORAGE,
    "FS": STORAGE,
    "OBJ": EXTERNAL,
    "EXTERNAL": EXTERNAL,
    "NETWORK": EXTERNAL,
    "REMOTE": EXTERNAL,
    "SHARED": EXTERNAL,
}
"""In upper case: some producers write them small."""
MAIN_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Attention of which a prefix of blocks is a prefix of the prompt. What other groups hold makes no hit."""

_U64 = 2**64 - 1
_OPAQUE = b"opaque"


class _Left(Exception):
    """An event, or the rest of it, is left out, for this reason."""


class EngineEvents:
    """Takes in the events of one engine. Not for several tasks at a time."""

    def __init__(
        self,
        member: Member,
        instance: InstanceUp,
        limits: IngestLimits,
        tally: Counter[str],
        bad: Counter[str],
        cleared: Callable[[str, str], None],
    ) -> None:
        """Counts in `tally` what was taken (`stored`, `removed`, `cleared`, in blocks or times), and in `bad`
        events that were left out, by reason."""
        self._member = member
        self._instance = instance
        self._limits = limits
        self._tally = tally
        self._bad = bad
        self._cleared = cleared
        self._group: int | None = None
        """The first attention group whose blocks are prefixes, once one was told."""

    async def take(self, batch: Batch) -> None:
        """Everything in this batch that can be used. It gives the loop back every so many blocks."""
        if batch.rank is not None and batch.rank != self._member.up.rank:
            self._bad["rank"] += 1
            return
        done = 0
        for event in batch.events:
            try:
                if isinstance(event, Stored):
                    done += await self._store(event)
                elif isinstance(event, Removed):
                    done += self._remove(event)
                else:
                    self._clear(event)
            except _Left as left:
                self._bad[str(left)] += 1
            if done >= self._limits.slice_blocks:
                done = 0
                await asyncio.sleep(0)

    # ------------------------------------------------------------ one event

    async def _store(self, event: Stored) -> int:
        if event.locality is not None and event.locality != "LOCAL":
            raise _Left("locality")
        self._choose_group(event.group_idx, event.kv_cache_spec_kind)
        tier = _tier(event.medium)
        hashes = self._hashes(event.block_hashes)
        parent = self._parent(event.parent_block_hash)
        if parent in hashes or len(set(hashes)) != len(hashes):
            raise _Left("loop")
        tokens = self._tokens(event, hashes)
        root = self._root(event, parent, tokens)
        if tokens is not None and len(tokens) < len(hashes):
            self._bad["token_span"] += 1
            hashes = hashes[: len(tokens)]
        step = self._limits.slice_blocks
        own = self._member.own
        for at in range(0, len(hashes), step):
            if at:
                await asyncio.sleep(0)
                parent = hashes[at - 1]
            own.store(
                tier, parent, hashes[at : at + step], None if tokens is None else tokens[at : at + step], root
            )
        self._tally["stored"] += len(hashes)
        return len(hashes) % step

    def _remove(self, event: Removed) -> int:
        if event.locality is not None and event.locality != "LOCAL":
            raise _Left("locality")
        if event.group_idx is not None and event.group_idx != (self._group or 0):
            raise _Left("group")
        hashes = self._hashes(event.block_hashes)
        self._tally["removed"] += self._member.own.remove(_tier(event.medium), hashes)
        return len(hashes)

    def _clear(self, _: Cleared) -> None:
        self._member.own.clear()
        self._tally["cleared"] += 1
        self._cleared(self._member.up.instance, self._member.up.engine)

    # ------------------------------------------------------------ its fields

    def _choose_group(self, group: int | None, kind: str | None) -> None:
        """Of several groups only the first that has prefixes counts, whole models being told once a group."""
        if kind is not None and kind not in MAIN_KINDS:
            raise _Left("group")
        if group is None:
            return
        if kind is None and group != 0:
            raise _Left("group")
        if self._group is None or group < self._group:
            if self._group is not None:
                self._member.own.clear()
            self._group = group
        elif group > self._group:
            raise _Left("group")

    def _hashes(self, told: list[Hash]) -> list[int]:
        """As u64; SGLang's are signed, and either engine can send whole digests."""
        if not told:
            raise _Left("hash")
        if len(told) > self._limits.event_blocks_max:
            raise _Left("too_large")
        try:
            if min(told) >= EVENT_HASH_MIN:  # type: ignore[operator]
                return told  # type: ignore[return-value]
        except TypeError:
            pass
        found = [self._hash(one) for one in told]
        if min(found) < EVENT_HASH_MIN:
            raise _Left("hash")
        return found

    def _hash(self, told: Hash) -> int:
        if isinstance(told, int):
            return told & _U64
        part = told[:8] if self._instance.hash_of == HEAD64 else told[-8:]
        return int.from_bytes(part, "big")

    def _parent(self, told: Hash | None) -> int | None:
        """Some producers say 0 for none."""
        return None if told is None else self._hash(told) or None

    def _tokens(self, event: Stored, hashes: list[int]) -> list[bytes] | None:
        """Packed ids of each block, of fewer blocks when there are too few ids; None when none were told."""
        told, size = event.token_ids, self._instance.block_size_tokens
        if not told:
            if event.block_size not in {0, size}:
                raise _Left("block_size")
            return None
        if event.block_size != size:
            raise _Left("block_size")
        count = min(len(told) // size, len(hashes))
        if len(told) > len(hashes) * size or not count:
            raise _Left("token_span")
        try:
            if not isinstance(told[0], int):
                return self._pairs(told[: count * size], count, size)
            return pack_windows(raw_ids(told), size, size, count)
        except ValueError:
            raise _Left("token") from None

    def _pairs(self, told: Sequence[Any], count: int, size: int) -> list[bytes]:
        """Pairs of an id and the one after it: what a block is made of takes in the next block's first."""
        if any(not isinstance(pair, list) or len(pair) != 2 for pair in told):
            raise _Left("token")
        if any(before[1] != after[0] for before, after in pairwise(told)):
            raise _Left("token")
        self._member.overlap = 1
        ids = [pair[0] for pair in told]
        ids.append(told[-1][1])
        return pack_windows(raw_ids(ids), size + 1, size, count)

    def _root(self, event: Stored, parent: int | None, tokens: list[bytes] | None) -> bytes:
        """What a first block hangs on: the adapter and the salt. Whatever else the blocks depend on (images,
        embeddings, what this reader does not know) is added to their `tokens`, so that nobody who asks with
        token ids alone meets them."""
        if tokens is None:
            return root_of("", "")
        if event.opaque:
            tokens[0] += _OPAQUE
        lora = event.lora_name or ""
        if not lora and event.lora_id is not None:
            lora = f"\0{event.lora_id}"
        salt = event.cache_salt or ""
        if event.extra_keys:
            salt = self._extras(event, parent, tokens) or salt
        return root_of(lora, salt)

    def _extras(self, event: Stored, parent: int | None, tokens: list[bytes]) -> str:
        """vLLM's extra keys, by block: the adapter's name, images as (id, offset), the salt (a prompt's first
        block), digests of embeddings. Returns the salt."""
        salt = ""
        keys = event.extra_keys
        if not isinstance(keys, list) or len(keys) < len(tokens):
            tokens[0] += _OPAQUE
            return salt
        for row, extra in enumerate(keys[: len(tokens)]):
            if extra is None:
                continue
            rest = list(extra) if isinstance(extra, list) else [extra]
            if rest and event.lora_name and rest[0] == event.lora_name:
                rest.pop(0)
            if row == 0 and parent is None:
                salts = [one for one in rest if isinstance(one, str)]
                if len(salts) == 1:
                    salt = salts[0]
                    rest.remove(salt)
            if rest:
                tokens[row] += _OPAQUE + msgspec.msgpack.encode(rest)
        return salt


def _tier(medium: str | None) -> int:
    tier = TIER_OF_MEDIUM.get((medium or "").upper())
    if tier is None:
        raise _Left("medium")
    return tier
