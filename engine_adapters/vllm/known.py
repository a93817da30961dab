"""Keys that need not be saved again soon: bounded, and forgotten by age."""

from collections.abc import Iterable, Sequence

KEYS_MAX = 65_536
_TTL_NS = 30_000_000_000
"""A block that was stored may be evicted: after this long it is offered again, and costs a question."""


class KnownKeys:
    """Which blocks this engine has just ordered to be saved, or knows to be stored, by instance."""

    def __init__(self) -> None:
        self._until_ns: dict[tuple[str, bytes], int] = {}

    def add(self, instance: str, keys: Iterable[bytes], now_ns: int) -> None:
        """These need no saving for a while."""
        until_ns = now_ns + _TTL_NS
        known = self._until_ns
        for key in keys:
            known.pop((instance, key), None)
            known[instance, key] = until_ns
        while len(known) > KEYS_MAX:
            del known[next(iter(known))]

    def discard(self, instance: str, keys: Iterable[bytes]) -> None:
        """These came to nothing."""
        for key in keys:
            self._until_ns.pop((instance, key), None)

    def leading(self, instance: str, keys: Sequence[bytes], now_ns: int) -> int:
        """How many of `keys` from the first on are known."""
        known = self._until_ns
        for row, key in enumerate(keys):
            if known.get((instance, key), 0) <= now_ns:
                return row
        return len(keys)

    def clear(self) -> None:
        """Forget everything: the cache was reset."""
        self._until_ns.clear()
