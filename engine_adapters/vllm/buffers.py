"""Bounded host memory for pages on their way."""

import time
from collections.abc import Callable, Sequence
from threading import Condition


def pages_in(size_bytes: int, page_bytes: int, pages_a_block: int, setting: str) -> int:
    """How many pages fit. Raises ValueError when not even one block does: nothing could ever be moved."""
    pages = size_bytes // page_bytes
    if pages < pages_a_block:
        raise ValueError(
            f"kv_connector_extra_config.{setting}: {size_bytes} bytes hold no block; one block of this model "
            f"takes {page_bytes * pages_a_block} bytes on each rank"
        )
    return pages


class Buffers:
    """At most `pages` buffers of `page_bytes` each, made when they are first needed and used again and
    again. Thread safe."""

    def __init__(self, allocate: Callable[[int], memoryview], page_bytes: int, pages: int) -> None:
        self._allocate = allocate
        self._page_bytes = page_bytes
        self._changed = Condition()
        self._free: list[memoryview] = []
        self._unmade = pages
        self.pages = pages

    def take(self, count: int, until_s: float, give_up: Callable[[], bool]) -> list[memoryview] | None:
        """`count` buffers, all or none: None when they are not there by `until_s` of the monotonic clock, or
        when `give_up` says so (it is asked again at each `wake`)."""
        with self._changed:
            while self._unmade + len(self._free) < count:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or give_up():
                    return None
                self._changed.wait(left_s)
            split = max(0, len(self._free) - count)
            taken, self._free = self._free[split:], self._free[:split]
            missing = count - len(taken)
            self._unmade -= missing
        made: list[memoryview] = []
        try:
            # Outside the lock: pinning memory takes milliseconds.
            made += (self._allocate(self._page_bytes) for _ in range(missing))
        except MemoryError:
            with self._changed:
                self._unmade += missing - len(made)
            self.give([*taken, *made])
            return None
        return taken + made

    def give(self, buffers: Sequence[memoryview]) -> None:
        """They are not used any more."""
        with self._changed:
            self._free += buffers
            self._changed.notify_all()

    def wake(self) -> None:
        """Let those who wait ask again whether they should."""
        with self._changed:
            self._changed.notify_all()

    @property
    def used(self) -> int:
        """Buffers that are out."""
        with self._changed:
            return self.pages - self._unmade - len(self._free)
