"""Which piece of each block this worker process holds."""

from msgspec import Struct


class RankParts(Struct, frozen=True):
    """`parts`: the names of this rank's parts of a block, one for each KV cache group, in their order.
    `windows`: which groups are sliding windows; empty: none is."""

    rank: int
    world: int
    parts: tuple[str, ...]
    windows: tuple[bool, ...] = ()

    @property
    def by_block(self) -> bool:
        """Whether a failed load may be told block by block, so that what came before it is kept.

        vLLM takes that from models of one group only. Behind a hole in a sliding window nothing can be kept
        either: what is computed again at the hole would look back at blocks that were never loaded.
        """
        return len(self.parts) == 1 and not any(self.windows)
