"""The canary: what an engine's hash makes of a fixed probe.

Engines of one instance name blocks alike only when hash function, seed, serialisation and Python agree. No
setting says so for certain, the keys of a probe do.
"""

from collections.abc import Callable, Sequence
from typing import Any

BlockHash = Callable[[bytes, Sequence[int], tuple[Any, ...] | None], bytes]
"""(parent's key, tokens, what else is hashed) -> key, as the engine hashes a block."""

TOKENS = 32
ROUNDS: tuple[tuple[Any, ...] | None, ...] = (
    None,
    (("cache_salt", "probe"),),
    (("lora", "probe", "/probe"), ("mm", "probe", 7)),
)
"""One block each, chained: plain, salted, with an adapter and an image."""


def canary(block_hash: BlockHash, root: bytes) -> str:
    """The key of the last probe block in hex; `root` is what stands for the parent of a first block.

    It is equal in two processes exactly when they name all blocks alike.
    """
    parent = root
    for row, extra in enumerate(ROUNDS):
        first = row * TOKENS
        parent = block_hash(parent, tuple(range(first, first + TOKENS)), extra)
    return parent.hex()
