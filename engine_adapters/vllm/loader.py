"""Brings stored blocks into the engine's memory, beside the engine's steps or while a step waits.

Bytes are read and verified in buffers of our own, and only then copied into the engine's pages, each under
the lock of its load: once a load is over, for whatever reason, no page of it is touched any more, and the
engine may use its blocks for something else.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from threading import Condition, Lock, Thread
from typing import NamedTuple, get_args

from dataplane.pages import Pages
from dataplane.port import ReadReason
from engine_adapters.vllm.audit import Audit
from engine_adapters.vllm.buffers import pages_in
from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.mover import Mover
from engine_adapters.vllm.orders import NO_BLOCK, Loaded, LoadOrder
from engine_adapters.vllm.rank import RankParts
from engine_adapters.vllm.settings import Settings
from metaservice.client import PlaceRef

log = logging.getLogger("ucm.vllm")

LATE = "late"
"""Not there within `load_wait_ms`."""
ABORTED = "aborted"
"""The request ended meanwhile."""
SUPERSEDED = "superseded"
"""Another load of the same request began."""
BAD_ORDER = "bad_order"
"""Places and blocks do not fit together, or with this rank's parts."""
STUCK = "stuck"
"""All threads hang in loads that were given up: the storage does not answer."""
INTERNAL = "internal"

FOR_GOOD = frozenset(get_args(ReadReason)) - {"io_error", "bad_place", "bad_buffer"}
"""Refusals that another try, here or elsewhere, would meet too."""
_STOP_WAIT_S = 0.2


class Load:
    """One order. `lock` is held while one page is copied into the engine's memory, unless the load is
    `ending` or `over`, and to end it."""

    __slots__ = (
        "bad", "began_ns", "blocks", "deadline_s", "ended_ns", "ending", "lock", "order", "over", "reason",
        "size_bytes",
    )  # fmt: skip

    def __init__(self, order: LoadOrder, deadline_s: float) -> None:
        self.order = order
        self.deadline_s = deadline_s
        self.lock = Lock()
        self.ending = False
        """Somebody is about to end it: no page is copied any more."""
        self.over = False
        self.blocks = 0
        """Leading rows that are wholly in the engine's memory; said when it is over."""
        self.size_bytes = 0
        self.reason = ""
        self.bad: list[bytes] = []
        self.began_ns = time.time_ns()
        self.ended_ns = 0

    @property
    def asked(self) -> int:
        """Rows in all."""
        return len(self.order.blocks[0])

    def done(self) -> bool:
        """Whether no page may be copied any more."""
        return self.over or self.ending

    def loaded(self) -> Loaded:
        """What is told of it when it is over."""
        return Loaded(
            self.order.request, self.order.ticket, self.blocks, self.asked, self.size_bytes, self.reason,
            tuple(self.bad), self.began_ns, self.ended_ns,
        )  # fmt: skip


class Loader:
    """One worker process's. Public methods belong to the engine's thread; none waits but `wait`."""

    def __init__(
        self, settings: Settings, rank: RankParts, pages: Pages, mover: Mover, counts: Counts, audit: Audit
    ) -> None:
        """Raises ValueError when `load_buffer_bytes` holds no block."""
        self._rank = rank
        self._pages = pages
        self._sizes = [group.page_bytes for group in pages.groups]
        self._mover = mover
        self._counts = counts
        self._audit = audit
        self._wait_s = settings.load_wait_ms / 1_000
        width = len(self._sizes)
        room = pages_in(settings.load_buffer_bytes, max(self._sizes), width, "load_buffer_bytes")
        threads = min(settings.load_threads, room // width)
        self._batch_pages = max(width, min(settings.load_batch_blocks * width, room // threads))
        self._changed = Condition()
        """Guards the queues and what each thread is doing."""
        self._sync: deque[Load] = deque()
        self._async: deque[Load] = deque()
        self._running: list[Load | None] = [None] * threads
        self._open: dict[str, Load] = {}
        """By ticket: loads that are not over. The engine's thread alone changes it."""
        self._ended: deque[Load] = deque()
        self._stopping = False
        self._threads = [
            Thread(target=self._load_all, args=(number,), name=f"ucm-load-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    # ----------------------------------------------------------------------------------- the engine's side

    def start(self, order: LoadOrder) -> Load:
        """Begin a load, and give up the one of the same request that may still be under way."""
        for load in list(self._open.values()):
            if load.order.request == order.request:
                self._end(load, SUPERSEDED)
        load = Load(order, time.monotonic() + self._wait_s)
        self._open[order.ticket] = load
        with self._changed:
            if all(map(_hangs, self._running)):
                reason = STUCK
            elif not self._fits(order):
                reason = BAD_ORDER
            else:
                reason = ""
                (self._sync if order.sync else self._async).append(load)
                self._changed.notify_all()
        if reason:
            self._end(load, reason)
        return load

    def _fits(self, order: LoadOrder) -> bool:
        """Whether the order makes sense on this rank: a lying service must not get past this."""
        rows = len(order.places.keys)
        parts = {part.name: part.bytes for part in order.places.parts}
        return (
            rows > 0
            and len(order.blocks) == len(self._sizes)
            and all(len(column) == rows for column in order.blocks)
            and len(order.places.locations) == rows
            and all(order.places.generations)
            and len(order.places.checksums) == rows * len(parts)
            and all(parts.get(name) == size for name, size in zip(self._rank.parts, self._sizes, strict=True))
        )

    def wait(self, loads: Sequence[Load]) -> None:
        """Return when all of them are over; none outlives its deadline."""
        while left := [load for load in loads if not load.over]:
            left_s = min(load.deadline_s for load in left) - time.monotonic()
            if left_s <= 0:
                self.expire()
                continue
            with self._changed:
                self._changed.wait_for(lambda: all(load.over for load in left), left_s)

    def expire(self) -> None:
        """Give up every load whose time is over."""
        now_s = time.monotonic()
        for load in list(self._open.values()):
            if now_s >= load.deadline_s:
                self._end(load, LATE)

    def abort(self, requests: set[str]) -> None:
        """Give up the loads of requests that have ended."""
        for load in list(self._open.values()):
            if load.order.request in requests:
                self._end(load, ABORTED)

    def take(self) -> list[Load]:
        """Loads that are over, each once."""
        loads = []
        while self._ended:
            load = self._ended.popleft()
            self._open.pop(load.order.ticket, None)
            loads.append(load)
        return loads

    def stop(self) -> None:
        """Copy nothing more; bounded. What is under way is not told any more."""
        for load in self._open.values():
            load.ending = True  # waiting for nothing: a device may hang
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        until_s = time.monotonic() + _STOP_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _end(self, load: Load, reason: str) -> None:
        """Give the load up: nothing of it counts. Waits for the copy of one page that has begun, and for no
        other."""
        load.ending = True
        with load.lock:
            if load.over:
                return
            load.reason = reason
            self._close(load)
        with self._changed:
            self._changed.notify_all()

    def _close(self, load: Load) -> None:
        """Under the load's lock."""
        load.ended_ns = time.time_ns()
        self._ended.append(load)  # first: who sees that it is over takes it from there
        load.over = True

    # -------------------------------------------------------------------------------------------- loading

    def _load_all(self, number: int) -> None:
        buffers: list[memoryview] = []
        while True:
            with self._changed:
                self._running[number] = None
                self._changed.wait_for(lambda: self._sync or self._async or self._stopping)
                if self._stopping:
                    return
                load = (self._sync or self._async).popleft()
                self._running[number] = load
            if load.over:
                continue
            try:
                self._run(load, buffers)
            except Exception:
                log.exception("a load of %d blocks failed", load.asked)
                self._end(load, INTERNAL)

    def _run(self, load: Load, buffers: list[memoryview]) -> None:
        refused: _Refused | None = None
        for pages in self._batches(load):
            refused = self._load_pages(load, pages, buffers)
            if refused is not None or load.done():
                break
        with load.lock:
            if load.done():
                return  # whoever ends it says what became of it
            load.blocks = load.asked if refused is None else refused.row
            if refused is not None:
                load.reason, load.bad = refused.reason, refused.bad
            self._close(load)
        with self._changed:
            self._changed.notify_all()

    def _batches(self, load: Load) -> Iterator[list[tuple[int, int, int]]]:
        """(row, group, block) of all pages to load, in the order of rows, in batches of whole rows."""
        batch: list[tuple[int, int, int]] = []
        for row, blocks in enumerate(zip(*load.order.blocks, strict=True)):
            pages = [(row, group, block) for group, block in enumerate(blocks) if block != NO_BLOCK]
            if len(batch) + len(pages) > self._batch_pages:
                yield batch
                batch = []
            batch += pages
        if batch:
            yield batch

    def _load_pages(
        self, load: Load, pages: Sequence[tuple[int, int, int]], buffers: list[memoryview]
    ) -> "_Refused | None":
        """Load a batch, up to the first row of which a page is refused."""
        if load.done():
            return None
        while len(buffers) < len(pages):
            buffers.append(self._pages.allocate(max(self._sizes)))
        refs = [load.order.places.place(row, self._rank.parts[group]) for row, group, _ in pages]
        views = [buffer[: self._sizes[group]] for buffer, (_, group, _) in zip(buffers, pages, strict=False)]
        began_ns = time.monotonic_ns()
        answers = self._mover.read(refs, views)
        self._counts.add("read_us", (time.monotonic_ns() - began_ns) // 1_000)
        refused = self._refused(pages, refs, answers)
        for (row, group, block), ref, view in zip(pages, refs, views, strict=True):
            if refused is not None and row >= refused.row:
                break
            with load.lock:
                if load.done():
                    return None
                self._pages.scatter(group, block, view)
                load.size_bytes += len(view)
            self._counts.add("read_pages")
            self._counts.add("read_bytes", len(view))
            if self._audit.on:
                self._audit.note(
                    "loaded", ref.key, ref.part, request=load.order.request, data=view,
                    location=ref.location, generation=ref.generation,
                )  # fmt: skip
        return refused

    def _refused(
        self, pages: Sequence[tuple[int, int, int]], refs: Sequence[PlaceRef], answers: Sequence[str]
    ) -> "_Refused | None":
        """What was refused of a batch, if anything was."""
        first: tuple[int, str] | None = None
        bad: dict[bytes, None] = {}
        for (row, _, _), ref, reason in zip(pages, refs, answers, strict=True):
            if not reason:
                continue
            self._counts.add(f"read_refused_{reason}")
            first = first or (row, reason)  # pages come in the order of rows
            if reason in FOR_GOOD:
                bad[ref.key] = None
        return None if first is None else _Refused(*first, list(bad))


class _Refused(NamedTuple):
    """The first row that was refused, which ends the load, and why; and all keys refused for good."""

    row: int
    reason: str
    bad: list[bytes]


def _hangs(load: Load | None) -> bool:
    """Whether a thread is still busy with a load whose time is over."""
    return load is not None and load.over and load.reason == LATE
