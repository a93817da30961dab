"""The hit rate that no cache could beat on the same requests in the same order.

Computed from what the blocks hold, as a tree of prefixes. It shares no code with the engines, which hash,
nor with the service, so that a mistake in either is a difference and not a shared belief."""

from collections.abc import Hashable, Sequence


class IdealCache:
    """An infinite cache with prefix semantics that has every block of a request as soon as the request is
    over."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, Hashable], int] = {}
        self.asked = 0
        self.hits = 0

    def serve(self, contents: Sequence[Hashable]) -> int:
        """Blocks of the longest prefix of `contents` that an earlier request had; then remember all of
        them."""
        node = 0
        hits = 0
        for content in contents:
            known = self._children.get((node, content))
            if known is None:
                known = self._children[node, content] = len(self._children) + 1
            else:
                hits += 1
            node = known
        self.asked += len(contents)
        self.hits += hits
        return hits

    @property
    def hit_rate(self) -> float:
        """Blocks hit / blocks asked; 0 before anything was asked."""
        return self.hits / self.asked if self.asked else 0.0

    @property
    def blocks(self) -> int:
        """Different blocks seen: what an infinite cache would hold."""
        return len(self._children)
