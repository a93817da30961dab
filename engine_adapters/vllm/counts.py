"""Numbers that several threads count."""

from threading import Lock


class Counts:
    """Counters by name. Thread safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers: dict[str, int] = {}

    def add(self, name: str, by: int = 1) -> None:
        """Count `by` more."""
        if by:
            with self._lock:
                self._numbers[name] = self._numbers.get(name, 0) + by

    def top(self, name: str, value: int) -> None:
        """Keep the largest of all values."""
        with self._lock:
            self._numbers[name] = max(self._numbers.get(name, 0), value)

    def drain(self) -> dict[str, int]:
        """What was counted since the last call; only names that were."""
        with self._lock:
            numbers, self._numbers = self._numbers, {}
            return numbers
