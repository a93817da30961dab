"""A "model" without weights: what it computes tells whether every byte it read was right.

The KV bytes of a token's position follow from the token and from what the *pages* of the positions before it
hold when it is computed, as attention reads them; the next token follows from the bytes of the last position.
So a page that is wrong, stale, torn or another block's changes every page after it and the tokens that come
out, as in a real engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from xxhash import xxh3_64_intdigest, xxh3_128

POSITION_BYTES = 16
"""KV bytes of one token in one KV cache group on one rank."""
NULL = 0
"""The engine block that stands for "not held": never read, never written."""


class EngineBroken(AssertionError):
    """The engine or its connector did what would crash or corrupt the real one."""


@dataclass(frozen=True)
class Shape:
    """Of a model. `windows` has an entry for each KV cache group: 0 for full attention, else how many tokens,
    its own included, a token attends to."""

    block_tokens: int = 4
    windows: tuple[int, ...] = (0,)
    ranks: int = 1
    vocabulary: int = 251

    @property
    def page_bytes(self) -> int:
        """Of one block, in one group, on one rank."""
        return self.block_tokens * POSITION_BYTES

    @property
    def groups(self) -> range:
        return range(len(self.windows))


def new_memory(shape: Shape, blocks: int) -> list[bytearray]:
    """The KV memory of each rank. All groups share it: an engine block belongs to one of them at a time."""
    return [bytearray(b"\xa5") * (blocks * shape.page_bytes) for _ in range(shape.ranks)]


def block_keys(
    shape: Shape,
    tokens: Sequence[int],
    salt: str = "",
    adapter: str = "",
    start: int = 0,
    parent: bytes = b"",
) -> list[bytes]:
    """Keys of the whole blocks in `tokens[start:]`, below `parent`: 32 bytes, chained, with the salt and the
    adapter's name in them as vLLM has."""
    keys = []
    size = shape.block_tokens
    for at in range(start, len(tokens) - size + 1, size):
        extra = f"{adapter}|{salt if at == 0 else ''}|{list(tokens[at : at + size])}"
        parent = sha256(parent + extra.encode()).digest()
        keys.append(parent)
    return keys


class _Reader:
    """Reads positions of one request out of the pages."""

    def __init__(self, shape: Shape, memory: Sequence[bytearray], tables: Sequence[Sequence[int]]) -> None:
        self._shape = shape
        self._memory = memory
        self._tables = tables

    def span(self, group: int, position: int) -> slice:
        """Where a position's bytes are, on every rank."""
        size = self._shape.block_tokens
        table = self._tables[group]
        index, offset = divmod(position, size)
        if index >= len(table) or table[index] == NULL:
            raise EngineBroken(f"position {position} of group {group} is not in memory")
        at = (table[index] * size + offset) * POSITION_BYTES
        return slice(at, at + POSITION_BYTES)

    def read(self, group: int, position: int) -> bytes:
        """A position's bytes on all ranks."""
        span = self.span(group, position)
        return b"".join([rank[span] for rank in self._memory])


def compute(
    shape: Shape,
    memory: Sequence[bytearray],
    tables: Sequence[Sequence[int]],
    tokens: Sequence[int],
    start: int,
    end: int,
    adapter: str = "",
) -> int:
    """The forward of `tokens[start:end]`: writes their KV into the pages, and returns the token that comes
    after `tokens[end - 1]`. `tables` has the engine blocks of each group."""
    reader = _Reader(shape, memory, tables)
    seen = xxh3_128(adapter.encode())
    full = [group for group in shape.groups if shape.windows[group] == 0]
    for position in range(start):
        for group in full:
            seen.update(reader.read(group, position))
    token = 0
    for position in range(start, end):
        state = seen.copy()
        for group, window in enumerate(shape.windows):
            for before in range(max(0, position - window + 1), position) if window else ():
                state.update(reader.read(group, before))
        state.update(tokens[position].to_bytes(4, "big"))
        hidden = state.digest()
        for group in shape.groups:
            span = reader.span(group, position)
            for rank, pages in enumerate(memory):
                pages[span] = xxh3_128(hidden + bytes((group, rank))).digest()
        for group in full:
            seen.update(reader.read(group, position))
        token = xxh3_64_intdigest(b"".join(reader.read(group, position) for group in shape.groups))
    return token % shape.vocabulary


@lru_cache(maxsize=4096)
def answer(shape: Shape, prompt: tuple[int, ...], outputs: int, adapter: str = "") -> tuple[int, ...]:
    """The output tokens of a prompt, computed without any engine: what is right."""
    blocks = -(-(len(prompt) + outputs) // shape.block_tokens)
    memory = new_memory(shape, 1 + blocks * len(shape.windows))
    tables = [range(1 + group * blocks, 1 + (group + 1) * blocks) for group in shape.groups]
    tokens = list(prompt)
    done = 0
    for _ in range(outputs):
        token = compute(shape, memory, tables, tokens, done, len(tokens), adapter)
        done = len(tokens)
        tokens.append(token)
    return tuple(tokens[len(prompt) :])


@lru_cache(maxsize=4096)
def true_pages(shape: Shape, tokens: tuple[int, ...], adapter: str = "") -> list[list[bytes]]:
    """What the pages of the whole blocks of `tokens` must hold: for each block its parts, rank by rank, of
    each rank group by group."""
    blocks = len(tokens) // shape.block_tokens
    memory = new_memory(shape, 1 + blocks * len(shape.windows))
    tables = [range(1 + group * blocks, 1 + (group + 1) * blocks) for group in shape.groups]
    compute(shape, memory, tables, tokens, 0, blocks * shape.block_tokens, adapter)
    size = shape.page_bytes
    return [
        [
            bytes(memory[rank][tables[group][block] * size : (tables[group][block] + 1) * size])
            for rank in range(shape.ranks)
            for group in shape.groups
        ]
        for block in range(blocks)
    ]
