"""Virtual time: a heap of what happens when, and clocks that drift and jump against it.

Nothing of the simulated cluster reads another clock. `now_ms` is the true time, which no part of the cluster
knows; each part has a `Clock` of its own.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[..., None]

Entry = list[Any]
"""[when, number, action or None, its arguments]"""

DRIFT_PERMILLE = 2
"""How much faster or slower a clock may run, in thousandths."""


def cancel(entry: Entry) -> None:
    """What was to happen does not."""
    entry[2] = None


class Heap:
    """What happens when. Of two things at one time the one that was asked for first comes first."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._heap: list[Entry] = []
        self._serial = 0

    def after(self, delay_ms: int, action: Action, *arguments: Any) -> Entry:
        """Call `action(*arguments)` so much later, unless `cancel` is called on what this returns."""
        self._serial += 1
        entry = [self.now_ms + delay_ms, self._serial, action, arguments]
        heappush(self._heap, entry)
        return entry

    def run(self, until_ms: int) -> None:
        """Let everything happen that is due by then."""
        heap = self._heap
        while heap and heap[0][0] <= until_ms:
            self.now_ms, _, action, arguments = heappop(heap)
            if action is not None:
                action(*arguments)
        self.now_ms = until_ms


class Clock:
    """What one process believes the time to be.

    `mono_ms` never jumps and drifts a little; `wall_ms` may be hours away and step either way.
    """

    def __init__(self, heap: Heap, drift_permille: float = 0.0, ahead_ms: int = 0) -> None:
        self._heap = heap
        self._rate = 1 + drift_permille / 1000
        self._start_ms = 1_000_000
        self.ahead_ms = ahead_ms
        """How far the wall clock is from the true time. A step changes it."""

    @property
    def mono_ms(self) -> int:
        """The monotonic clock."""
        return self._start_ms + int(self._heap.now_ms * self._rate)

    @property
    def wall_ms(self) -> int:
        """The wall clock."""
        return 10**9 + self._heap.now_ms + self.ahead_ms
