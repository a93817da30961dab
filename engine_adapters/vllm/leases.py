"""Every read lease that the engine obtained, until it is known to be over. Bookkeeping only: nobody is asked
here."""

from collections.abc import Callable
from threading import Lock

RELEASES_A_CALL = 1_000


class Leases:
    """Thread safe. A lease is *held* from its lookup on, *leaving* once its blocks are no longer needed, and
    over when the service said so or cannot remember it any more."""

    def __init__(self, lease_ms: int, margin_ms: int, clock: Callable[[], int]) -> None:
        """`lease_ms`: how long a lease holds after a renewal. `margin_ms`: how long a renewal that was on its
        way may still arrive."""
        self._lease_ms = lease_ms
        self._margin_ms = margin_ms
        self._clock = clock
        self._lock = Lock()
        self._held_since_ms: dict[str, int] = {}
        self._gone_at_ms: dict[str, int] = {}

    def took(self, lease: str) -> None:
        """A lookup came with this lease."""
        with self._lock:
            self._held_since_ms[lease] = self._clock()

    def let_go(self, lease: str) -> None:
        """Nothing is read under it any more: it is to be released. Any number of times."""
        with self._lock:
            if self._held_since_ms.pop(lease, None) is not None:
                # Nobody renews it from the first try to release it on.
                self._gone_at_ms[lease] = self._clock() + self._lease_ms + self._margin_ms

    def let_all_go(self) -> None:
        """The engine goes, or its weights are others."""
        for lease in list(self._held_since_ms):
            self.let_go(lease)

    def leaving(self) -> list[str]:
        """Some that are to be released now, the oldest first."""
        with self._lock:
            return list(self._gone_at_ms)[:RELEASES_A_CALL]

    def released(self, leases: list[str]) -> None:
        """The service knows that they are over."""
        with self._lock:
            for lease in leases:
                self._gone_at_ms.pop(lease, None)

    def sweep(self, held: Callable[[str], bool]) -> int:
        """Forget those that ran out: `held` says whether a lease is still renewed. Returns how many."""
        with self._lock:
            now = self._clock()
            gone = [lease for lease, at_ms in self._gone_at_ms.items() if at_ms <= now]
            lost = [
                lease
                for lease, since_ms in self._held_since_ms.items()
                if since_ms + self._lease_ms < now and not held(lease)
            ]
            for lease in gone:
                del self._gone_at_ms[lease]
            for lease in lost:
                del self._held_since_ms[lease]
            return len(gone) + len(lost)

    def __len__(self) -> int:
        return len(self._held_since_ms) + len(self._gone_at_ms)
