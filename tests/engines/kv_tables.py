"""The fake engine's KV cache manager: block tables of each group, prefix hits, windows that move on."""

from collections.abc import Sequence

from tests.engines.engine_request import FakeRequest
from tests.engines.kv_pool import Block, Pool, evictable
from tests.engines.oracle import Shape


def _up(count: int, size: int) -> int:
    return -(-count // size)


class GroupTables:
    """Block tables of one KV cache group. `window` tokens, or 0 for full attention."""

    def __init__(self, pool: Pool, group: int, size: int, window: int) -> None:
        self.pool = pool
        self.group = group
        self.size = size
        self.window = window
        self.tables: dict[str, list[Block]] = {}
        self._cached: dict[str, int] = {}

    def skipped(self, computed: int) -> int:
        """Blocks from the first on that no later token attends to."""
        return max(0, computed - self.window + 1) // self.size if self.window else 0

    def hit(self, keys: Sequence[bytes], blocks_max: int) -> list[Block]:
        """Cached blocks of the longest prefix that can be used, null where the window has passed."""
        keys = keys[:blocks_max]
        if not self.window:
            found = []
            for key in keys:
                block = self.pool.cached(key, self.group)
                if block is None:
                    break
                found.append(block)
            return found
        row: list[Block] = [self.pool.null] * len(keys)
        together = 0
        for index in range(len(keys) - 1, -1, -1):
            block = self.pool.cached(keys[index], self.group)
            if block is None:
                together = 0
                continue
            row[index] = block
            together += 1
            if together >= _up(self.window - 1, self.size):
                return row[: index + together]
        return row[:together]

    def wanted(self, request: str, tokens: int, hits: Sequence[Block], computed: int, cap: int = 0) -> int:
        """How many free blocks it takes to hold `tokens`."""
        required = _up(tokens, self.size)
        if cap and self.window:
            required = min(required, _up(self.window - 1 + cap, self.size) + 1)
        held = len(self.tables.get(request, ()))
        if request in self._cached:
            return max(required - held, 0)
        skipped = self.skipped(computed)
        fresh = max(required - max(skipped, len(hits) + held), 0)
        return fresh + evictable(hits[max(0, skipped - held) :], self.pool.null)

    def adopt(self, request: str, hits: Sequence[Block], computed: int) -> None:
        """The request begins with these cached blocks."""
        table = self.tables.setdefault(request, [])
        assert not table
        skipped = self.skipped(computed)
        kept = hits[skipped:]
        self.pool.touch(kept)
        table.extend([self.pool.null] * skipped)
        table.extend(kept)
        self._cached[request] = len(table)

    def grow(self, request: str, tokens: int) -> None:
        """New blocks until `tokens` fit."""
        table = self.tables.setdefault(request, [])
        table.extend(self.pool.take(max(0, _up(tokens, self.size) - len(table))))

    def cache(self, request: FakeRequest, tokens: int) -> None:
        """Blocks full within the first `tokens` are found by others from now on."""
        known = self._cached.get(request.request_id, 0)
        full = tokens // self.size
        if known < full:
            table = self.tables[request.request_id]
            for index in range(known, full):
                self.pool.cache(table[index], request.block_hashes[index], self.group)
            self._cached[request.request_id] = full

    def move_on(self, request: str, computed: int) -> None:
        """Give back what has left the window."""
        table = self.tables.get(request)
        if table is None:
            return
        freed = []
        for index in range(min(self.skipped(computed), len(table)) - 1, -1, -1):
            if table[index] is self.pool.null:
                break
            freed.append(table[index])
            table[index] = self.pool.null
        self.pool.give(freed)

    def drop(self, request: str) -> list[Block]:
        """The request's blocks, which the caller gives back."""
        self._cached.pop(request, None)
        return self.tables.pop(request, [])


class Tables:
    """All groups together."""

    def __init__(self, shape: Shape, blocks: int, *, in_flight_tokens_max: int, caching: bool = True) -> None:
        self.pool = Pool(blocks)
        self.block_tokens = shape.block_tokens
        self._cap = in_flight_tokens_max
        self._caching = caching
        self.groups = [
            GroupTables(self.pool, group, shape.block_tokens, window)
            for group, window in enumerate(shape.windows)
        ]

    def hits(self, request: FakeRequest) -> tuple[list[list[Block]], int]:
        """Cached blocks of each group and the tokens they hold: never all of the request's."""
        nothing: list[list[Block]] = [[] for _ in self.groups]
        if not self._caching:
            return nothing, 0
        size = self.block_tokens
        length = (request.num_tokens - 1) // size
        found = nothing
        while True:
            before = length
            for group in self.groups:
                found[group.group] = group.hit(request.block_hashes, length)
                length = len(found[group.group])
            if length == before:
                break
        return [row[:length] for row in found], length * size

    def allocate(
        self,
        request: FakeRequest,
        new_tokens: int,
        *,
        hits: Sequence[Sequence[Block]] | None = None,
        local: int = 0,
        external: int = 0,
        delay_cache: bool = False,
        whole: bool = False,
        reserved: int = 0,
    ) -> bool:
        """Slots for `new_tokens` behind what is computed, hit and loaded. False when there is no room."""
        name = request.request_id
        local += request.num_computed_tokens
        computed = local + external
        rows = hits or [[] for _ in self.groups]
        if whole:
            need = sum(
                group.wanted(name, request.num_tokens, row, computed, self._cap)
                for group, row in zip(self.groups, rows, strict=True)
            )
            if need > self.pool.free_blocks:
                return False
        for group in self.groups:
            group.move_on(name, max(0, computed - request.num_in_flight_tokens))
        tokens = computed + new_tokens
        need = sum(
            group.wanted(name, tokens, row, computed) for group, row in zip(self.groups, rows, strict=True)
        )
        if need > self.pool.free_blocks - reserved:
            return False
        if hits is not None:
            for group, row in zip(self.groups, rows, strict=True):
                group.adopt(name, row, computed)
        for group in self.groups:
            group.grow(name, tokens)
        if self._caching and not delay_cache:
            self.cache(request, min(tokens, request.num_tokens))
        return True

    def cache(self, request: FakeRequest, tokens: int) -> None:
        if self._caching:
            for group in self.groups:
                group.cache(request, tokens)

    def remaining(self, request: FakeRequest) -> int:
        """Free blocks that the request still needs to be computed whole."""
        computed = request.num_computed_tokens
        return sum(
            group.wanted(request.request_id, request.num_tokens, (), computed, self._cap)
            for group in self.groups
        )

    def move_on(self, request: FakeRequest) -> None:
        computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        for group in self.groups:
            group.move_on(request.request_id, computed)

    def ids(self, request: str) -> tuple[list[int], ...]:
        """The engine blocks of a request, a list for each group."""
        return tuple([block.id for block in group.tables.get(request, ())] for group in self.groups)

    def drop(self, request: str) -> list[Block]:
        """The request's blocks in the order in which they are to be given back: the tail first."""
        return [block for group in self.groups for block in reversed(group.drop(request))]
