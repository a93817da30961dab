"""Keys that need not be saved again just now: bounded, and forgotten by age and by better knowledge."""

from collections.abc import Iterable, Sequence

KEYS_MAX = 65_536
_TTL_NS = 30_000_000_000
_NEVER = -(1 << 63)
_UNDER_WAY = 1 << 63
"""In the place of when a block was stored: its save is still under way."""

_Key = tuple[str, bytes]


class KnownKeys:
    """Which blocks this engine is saving, or has stored a moment ago, by instance.

    Many requests with one prefix come at a time, and asked before the first of them had stored it. Times are
    of `time.time_ns`.
    """

    def __init__(self) -> None:
        self._since_ns: dict[_Key, int] = {}

    def saving(self, instance: str, keys: Iterable[bytes]) -> None:
        """These are ordered to be saved."""
        since = self._since_ns
        for key in keys:
            since.pop((instance, key), None)
            since[instance, key] = _UNDER_WAY
        while len(since) > KEYS_MAX:
            del since[next(iter(since))]

    def saved(self, instance: str, keys: Iterable[bytes], now_ns: int) -> None:
        """These are stored now, by us or by others."""
        since = self._since_ns
        for key in keys:
            if (instance, key) in since:
                since[instance, key] = now_ns

    def discard(self, instance: str, keys: Iterable[bytes]) -> None:
        """These came to nothing, or are there no more."""
        for key in keys:
            self._since_ns.pop((instance, key), None)

    def missed(self, instance: str, keys: Sequence[bytes], asked_ns: int) -> None:
        """A lookup that went out at `asked_ns` did not find these: what was stored before is gone again."""
        since = self._since_ns
        for key in keys:
            if since.get((instance, key), _UNDER_WAY) < asked_ns:
                del since[instance, key]

    def leading(self, instance: str, keys: Sequence[bytes], now_ns: int) -> int:
        """How many of `keys` from the first on need no saving."""
        since = self._since_ns
        for row, key in enumerate(keys):
            if since.get((instance, key), _NEVER) <= now_ns - _TTL_NS:
                return row
        return len(keys)

    def clear(self) -> None:
        """Forget everything: the cache was reset."""
        self._since_ns.clear()
