"""The fake engine's block pool: reference counts, a prefix cache, reuse of what was used longest ago."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from tests.engines.oracle import NULL, EngineBroken


class Block:
    """One engine block. With a `label` (key and group) it can be found in the prefix cache."""

    __slots__ = ("id", "label", "references")

    def __init__(self, number: int) -> None:
        self.id = number
        self.references = 0
        self.label: tuple[bytes, int] | None = None


class Pool:
    """Blocks 1 to `blocks - 1`; block 0 is the null block, which is nobody's."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.null = Block(NULL)
        self._free: OrderedDict[int, Block] = OrderedDict()
        self._cached: dict[tuple[bytes, int], dict[int, Block]] = {}
        self._all = [self.null, *(Block(number) for number in range(1, blocks))]
        for block in self._all[1:]:
            self._free[block.id] = block

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def leaked(self) -> int:
        """Blocks that somebody still holds."""
        return self.blocks - 1 - len(self._free)

    def take(self, count: int) -> list[Block]:
        """New blocks; what they cached is forgotten."""
        if count > len(self._free):
            raise EngineBroken(f"{count} blocks are wanted and {len(self._free)} are free")
        taken = []
        for _ in range(count):
            _, block = self._free.popitem(last=False)
            self.forget(block)
            block.references = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """One reference more to each."""
        for block in blocks:
            if block is self.null:
                continue
            if block.references == 0:
                del self._free[block.id]
            block.references += 1

    def give(self, blocks: Iterable[Block]) -> None:
        """One reference less to each; the first are the first to be reused."""
        for block in blocks:
            if block is self.null:
                continue
            if block.references < 1:
                raise EngineBroken(f"block {block.id} is given back twice")
            block.references -= 1
            if block.references == 0:
                self._free[block.id] = block

    def cache(self, block: Block, key: bytes, group: int) -> None:
        """From now on the block is found under its key."""
        if block is self.null or block.label is not None:
            return
        block.label = (key, group)
        self._cached.setdefault(block.label, {})[block.id] = block

    def cached(self, key: bytes, group: int) -> Block | None:
        found = self._cached.get((key, group))
        return next(iter(found.values())) if found else None

    def forget(self, block: Block) -> None:
        """The block is no longer found under its key."""
        if block.label is not None:
            same = self._cached[block.label]
            del same[block.id]
            if not same:
                del self._cached[block.label]
            block.label = None

    def forget_free(self) -> None:
        """Forget all that nobody uses now, as much other work would make it."""
        for block in self._free.values():
            self.forget(block)

    def evict(self, numbers: Iterable[int]) -> None:
        """`forget`, by number: what a connector may do through the pool it was bound to."""
        for number in numbers:
            self.forget(self._all[number])

    def reset(self) -> bool:
        """Forget the whole prefix cache; False when blocks are in use."""
        if self.leaked:
            return False
        for block in self._all:
            self.forget(block)
        return True


def evictable(blocks: Sequence[Block], null: Block) -> int:
    """How many of `blocks` are free now and would not be after a touch."""
    return sum(block.references == 0 and block is not null for block in blocks)
