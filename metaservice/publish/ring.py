"""The newest windows of a shard, for replays: as they came, packed, and spelled again when somebody asks."""

from collections import deque
from typing import NamedTuple


class Kept(NamedTuple):
    """One window as it came through the pipe."""

    number: int
    frame: bytes


class RingBudget:
    """Bytes that the rings of all shards may hold together."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0


class Ring:
    """Windows with contiguous numbers, the oldest dropped first."""

    def __init__(self, windows_max: int, budget: RingBudget) -> None:
        self._windows_max = windows_max
        self._budget = budget
        self._kept: deque[Kept] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def oldest(self) -> int | None:
        """Number of the oldest window, None when there is none."""
        return self._kept[0].number if self._kept else None

    def add(self, number: int, frame: bytes) -> None:
        """The next window. One that does not follow the newest takes the place of all: a replay must never
        leave anything out."""
        if self._kept and number != self._kept[-1].number + 1:
            self.clear()
        self._kept.append(Kept(number, frame))
        self._budget.held_bytes += len(frame)
        while len(self._kept) > self._windows_max or (
            self._budget.held_bytes > self._budget.bytes_max and len(self._kept) > 1
        ):
            self._budget.held_bytes -= len(self._kept.popleft().frame)

    def get(self, number: int) -> bytes | None:
        """The window with this number, None when it is not here."""
        if not self._kept:
            return None
        at = number - self._kept[0].number
        return self._kept[at].frame if 0 <= at < len(self._kept) else None

    def clear(self) -> None:
        """Forget all."""
        self._budget.held_bytes -= sum(len(kept.frame) for kept in self._kept)
        self._kept.clear()
