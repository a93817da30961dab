"""KV cache events for those who follow this engine's: what it stored in the service, and what is gone.

vLLM publishes them with its own. A block is announced once, however often it is stored: followers count, or
take a second announcement for a second copy. What is announced is remembered up to ANNOUNCED_MAX blocks;
beyond that the oldest are told as removed, since nobody would tell it later. That and no more is promised:
an engine hears of no block that the service evicts.
"""

from collections.abc import Iterable, Iterator, Sequence

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from engine_adapters.vllm.pool_wire import Removed, Told, tokens_of
from engine_adapters.vllm.requests import Published

ANNOUNCED_MAX = 1 << 17
MEDIA = {"shm": MEDIUM_CPU}
"""Storage kind -> where a follower is told that the block is; all others are MEDIUM_STORAGE."""


class Teller:
    """Makes events of blocks of `block_size_tokens` tokens. One thread's."""

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size = block_size_tokens
        self._announced: dict[bytes, str] = {}
        """Key -> medium, the oldest first."""

    def events(self, published: Iterable[Published], removed: Sequence[bytes] = ()) -> list[KVCacheEvent]:
        """Events for what began to serve and, before it, for keys that no longer do. A chain whose tokens do
        not fit its keys is not announced: followers would take it for another text."""
        told: list[KVCacheEvent] = list(self._gone([key for key in removed if key in self._announced]))
        for chain in published:
            if len(chain.tokens) == len(chain.keys) * self._block_size:
                told += self._stored(chain)
        over = len(self._announced) - ANNOUNCED_MAX
        if over > 0:
            told += self._gone([key for key, _ in zip(self._announced, range(over), strict=False)])
        return told

    def forget(self) -> None:
        """vLLM's caches were reset, and it told followers itself that all is gone."""
        self._announced.clear()

    def _stored(self, chain: Published) -> Iterator[KVCacheEvent]:
        """An event for each run of blocks that were not announced before."""
        medium = MEDIA.get(chain.tier, MEDIUM_STORAGE)
        start = 0
        while start < len(chain.keys):
            end = start
            while end < len(chain.keys) and chain.keys[end] not in self._announced:
                self._announced[chain.keys[end]] = medium
                end += 1
            if end > start:
                parent = chain.keys[start - 1] if start else chain.parent
                yield BlockStored(
                    block_hashes=[_told(key) for key in chain.keys[start:end]],
                    parent_block_hash=None if parent is None else _told(parent),
                    token_ids=chain.tokens[start * self._block_size : end * self._block_size],
                    block_size=self._block_size,
                    lora_id=None,
                    medium=medium,
                    lora_name=None if chain.adapter is None else chain.adapter[0],
                )
            start = end + 1

    def _gone(self, keys: Sequence[bytes]) -> Iterator[KVCacheEvent]:
        by_medium: dict[str, list[bytes]] = {}
        for key in dict.fromkeys(keys):
            by_medium.setdefault(self._announced.pop(key), []).append(key)
        for medium, gone in by_medium.items():
            yield BlockRemoved(block_hashes=[_told(key) for key in gone], medium=medium)


def _told(key: bytes) -> bytes | int:
    """A key as vLLM's own events have it."""
    told: bytes | int = maybe_convert_block_hash(BlockHash(key))
    return told


class SaltedBlockStored(BlockStored, tag="BlockStored"):  # type: ignore[call-arg]
    """With the salt that all its blocks were computed with: vLLM's own says that of a prompt's first block
    only, where some routers do not look for it, and would take the block for everybody's."""

    cache_salt: str | None = None


def pool_event(told: Told, block_size_tokens: int) -> KVCacheEvent | None:
    """An event of the service's as vLLM publishes its own; None for one that is not of this engine's
    blocks."""
    if isinstance(told, Removed):
        return BlockRemoved(block_hashes=told.block_hashes, medium=told.medium)
    tokens = tokens_of(told)
    if tokens is None or told.block_size != block_size_tokens:
        return None
    return SaltedBlockStored(
        block_hashes=told.block_hashes,
        parent_block_hash=told.parent_block_hash,
        token_ids=tokens,
        block_size=told.block_size,
        lora_id=None,
        medium=told.medium,
        lora_name=told.lora_name,
        extra_keys=None if told.extra_keys is None else [one and tuple(one) for one in told.extra_keys],
        cache_salt=told.cache_salt,
    )


class Clears:
    """Notices that vLLM has emptied its own prefix cache, of which it says nothing to a connector. It has
    told its followers that all blocks are gone, and they forget those of the pool as well."""

    def __init__(self) -> None:
        self._table: object = None

    def seen(self, pool: BlockPool) -> bool:
        """Whether it was emptied since the last call: it has another table of its blocks then."""
        before, self._table = self._table, pool.cached_block_hash_to_block
        return before is not None and before is not self._table
