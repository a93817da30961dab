"""What a worker remembers of the saves it was told to do, row by row, and what it says of them."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from threading import Lock

from engine_adapters.vllm.orders import Identity, Saved, SaveOrder
from metaservice.wire.tokens import pack_tokens

TAINTED = "tainted"
"""Computed in a step whose synchronous load had failed: from garbage, perhaps."""
PREEMPTED = "preempted"
IDENTITY = "identity"
"""Ordered when the engine was registered otherwise, or not at all."""
QUEUE_FULL = "queue_full"
NO_BUFFER = "no_buffer"
NO_BLOCK_GIVEN = "no_block"
LATE = "late"
"""Not copied before the step in which the engine may take the block back."""
STOPPED = "stopped"
IN_PROGRESS = "in_progress"
"""Another engine is writing that block."""
REFUSED = "refused"
START_FAILED = "start_failed"
WRITE_FAILED = "write_failed"
FINISH_FAILED = "finish_failed"
REMOVED = "removed"
"""Taken away by the service before it served: another rank gave it up, or the session's time was over."""
INTERNAL = "internal"
"""A fault of this module, or of the engine's memory; it was logged with its traceback."""


class Save:
    """One order. `lock` is held while one page of it is copied, unless `cancelled` says that none may be."""

    __slots__ = (
        "began_ns", "cancelled", "dropped", "left", "lock", "order", "present", "published", "reason",
        "size_bytes", "tier", "uncopied",
    )  # fmt: skip

    def __init__(self, order: SaveOrder, rows: int) -> None:
        self.order = order
        self.lock = Lock()
        self.cancelled = ""
        self.uncopied = rows
        self.left = rows
        self.published: set[bytes] = set()
        self.present: set[bytes] = set()
        self.dropped = 0
        self.size_bytes = 0
        self.reason = ""
        self.tier = ""
        self.began_ns = time.time_ns()

    def forbid(self, reason: str) -> None:
        """Begin to copy no page of it any more."""
        self.cancelled = self.cancelled or reason

    def cancel(self, reason: str) -> None:
        """Copy nothing of it any more. Waits for the copy of one page that has begun, and for no other: the
        copier cannot begin the next, however often it gets the lock before us."""
        self.forbid(reason)
        with self.lock:
            pass


class Row:
    """One block of a save, the `number`th. `pages` once it was copied: a buffer for each KV cache group;
    `over` once the ledger knows what became of it."""

    __slots__ = ("blocks", "key", "number", "over", "pages", "parent", "save")

    def __init__(
        self, save: Save, number: int, key: bytes, parent: bytes | None, blocks: tuple[int, ...]
    ) -> None:
        self.save = save
        self.number = number
        self.key = key
        self.parent = parent
        self.blocks = blocks
        self.pages: list[memoryview] | None = None
        self.over = False

    def packed_tokens(self) -> bytes:
        """The block's token ids for routers; empty when they are to be told nothing of it."""
        order = self.save.order
        if order.tokens is None:
            return b""
        size = len(order.tokens) // len(order.keys)
        return pack_tokens(order.tokens[self.number * size : (self.number + 1) * size])


class Batch:
    """Rows that are written in one session, `name` being the request id under which every rank starts it. All
    have one instance, adapter and salt.

    What is in a batch follows from the orders alone, so that it is the same on every rank; rows that this
    rank cannot deliver stay in it, and are told as failed.
    """

    __slots__ = (
        "at", "identity", "instance", "lora", "name", "rows", "salt", "traceparent", "until_s", "urgent",
    )  # fmt: skip

    def __init__(self, name: str, identity: Identity, rows: Sequence[Row], until_s: float) -> None:
        order = rows[0].save.order
        self.name = name
        self.identity = identity
        self.instance = order.instance
        self.lora = order.lora
        self.salt = order.salt
        self.traceparent = order.traceparent
        self.urgent = order.urgent
        self.rows = rows
        self.until_s = until_s
        self.at = 0
        """How many rows are copied, or never will be."""

    @property
    def copied(self) -> list[Row]:
        """The rows whose pages are in our hands."""
        return [row for row in self.rows if row.pages is not None]


class Ledger:
    """Adds up what becomes of each save's rows. Thread safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._uncopied: dict[str, set[Save]] = {}
        """By request: its saves that are not wholly copied or given up."""
        self._rows = 0
        self._gathered: deque[str] = deque()
        self._saved: deque[Saved] = deque()

    @property
    def rows_uncopied(self) -> int:
        """Blocks waiting to be copied."""
        with self._lock:
            return self._rows

    def open(self, save: Save) -> None:
        """A save was ordered."""
        with self._lock:
            if save.uncopied:
                self._uncopied.setdefault(save.order.request, set()).add(save)
                self._rows += save.uncopied
            else:
                self._gathered.append(save.order.save)
                self._end(save)

    def copying(self, request: str) -> bool:
        """Whether pages of a request may still be copied."""
        with self._lock:
            return request in self._uncopied

    def uncopied(self, requests: Iterable[str] | None = None) -> list[Save]:
        """The saves of these requests, or all, that are not wholly copied."""
        with self._lock:
            names = list(self._uncopied) if requests is None else requests
            return [save for name in names for save in self._uncopied.get(name, ())]

    def copied(self, row: Row) -> None:
        """A row is copied, or never will be: the engine's block is not touched any more."""
        save = row.save
        with self._lock:
            save.uncopied -= 1
            self._rows -= 1
            if save.uncopied:
                return
            self._gathered.append(save.order.save)
            others = self._uncopied[save.order.request]
            others.discard(save)
            if not others:
                del self._uncopied[save.order.request]

    def written(self, row: Row, size_bytes: int, tier: str, *, serves: bool) -> None:
        """Our parts of it are in; the block serves, unless other ranks' parts are still to come."""
        with self._lock:
            if self._over(row):
                if serves:
                    row.save.published.add(row.key)
                row.save.size_bytes += size_bytes
                row.save.tier = row.save.tier or tier
                self._end_of(row.save)

    def present(self, row: Row) -> None:
        """Others had stored it."""
        with self._lock:
            if self._over(row):
                row.save.present.add(row.key)
                self._end_of(row.save)

    def dropped(self, row: Row, reason: str) -> None:
        """It came to nothing, unless it is known already what became of it."""
        with self._lock:
            if self._over(row):
                row.save.dropped += 1
                row.save.reason = row.save.reason or reason
                self._end_of(row.save)

    def _over(self, row: Row) -> bool:
        """Whether what becomes of a row is told now, for the first time."""
        first, row.over = not row.over, True
        row.save.left -= first
        return first

    def _end_of(self, save: Save) -> None:
        if not save.left:
            self._end(save)

    def _end(self, save: Save) -> None:
        self._saved.append(
            Saved(
                save.order.save,
                save.order.request,
                published=tuple(filter(save.published.__contains__, save.order.keys)),
                present=tuple(filter(save.present.__contains__, save.order.keys)),
                dropped=save.dropped,
                size_bytes=save.size_bytes,
                reason=save.reason,
                began_ns=save.began_ns,
                ended_ns=time.time_ns(),
                tier=save.tier,
            )
        )

    def take(self) -> tuple[dict[str, int], list[Saved]]:
        """Saves whose pages are copied, or never will be, and saves that are over; each once."""
        with self._lock:
            gathered = dict.fromkeys(self._gathered, 1)
            saved = list(self._saved)
            self._gathered.clear()
            self._saved.clear()
        return gathered, saved
