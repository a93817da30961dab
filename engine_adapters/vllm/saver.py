"""Stores what the engine computed, beside the engine's steps.

    submit (engine's thread) -> one thread copies pages to buffers -> writers store them and make them serve

The engine's memory is only touched by the copying thread, a page at a time, each under the lock of its save:
once a save is cancelled no page of it is copied any more, and its blocks may be overwritten.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from threading import Condition, Event, Thread

from dataplane.pages import Pages
from engine_adapters.vllm import saves
from engine_adapters.vllm.audit import Audit
from engine_adapters.vllm.buffers import Buffers, pages_in
from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.mover import Mover
from engine_adapters.vllm.orders import NO_BLOCK, Identity, Saved, SaveOrder
from engine_adapters.vllm.rank import RankParts
from engine_adapters.vllm.saves import Batch, Ledger, Row, Save
from engine_adapters.vllm.settings import Settings
from engine_adapters.vllm.writer import Writer

log = logging.getLogger("ucm.vllm")

BATCH_BLOCKS_MAX = 64
"""Blocks of one write session."""
GIVEN_UP_MAX = 256
"""Batches of which nothing was copied, whose sessions are to be given up for the other ranks' sake. More are
left to their deadline."""
URGENT_WAIT_S = 1.0
STOP_WAIT_S = 1.5
_NOBODY = Identity("", "", "")


class Saver:
    """One worker process's. Public methods belong to the engine's thread; none waits but `copy_urgent`, for
    copies only, and `stop`."""

    def __init__(
        self, settings: Settings, rank: RankParts, pages: Pages, mover: Mover, counts: Counts, audit: Audit
    ) -> None:
        """Raises ValueError when `save_buffer_bytes` holds no block."""
        self._settings = settings
        self._rank = rank
        self._pages = pages
        self._sizes = [group.page_bytes for group in pages.groups]
        self._counts = counts
        self._audit = audit
        page_bytes, width = max(self._sizes), len(self._sizes)
        room = pages_in(settings.save_buffer_bytes, page_bytes, width, "save_buffer_bytes")
        self._buffers = Buffers(pages.allocate, page_bytes, room)
        self._batch_blocks = max(1, min(BATCH_BLOCKS_MAX, room // (2 * width)))
        self._ledger = Ledger()
        self._identity: Identity | None = None
        self._stopping = Event()
        self._changed = Condition()
        """Guards the queues. A batch leaves the queue that it is copied from when it is wholly copied."""
        self._urgent: deque[Batch] = deque()
        self._ordinary: deque[Batch] = deque()
        self._writes: deque[Batch] = deque()
        self._given_up: deque[Batch] = deque()
        self._hurried = False
        self._writer = Writer(
            settings, rank, pages, mover, self._buffers, self._ledger, counts, audit,
            lambda: self._identity, self._stopping,
        )  # fmt: skip
        self._threads = [Thread(target=self._copy_all, name="ucm-copy", daemon=True)] + [
            Thread(target=self._write_all, name=f"ucm-save-{number}", daemon=True)
            for number in range(settings.save_threads)
        ]
        for thread in self._threads:
            thread.start()

    # ----------------------------------------------------------------------------------- the engine's side

    def act_as(self, identity: Identity | None) -> None:
        """As whom the engine is registered from now on: what was ordered before is dropped."""
        if identity != self._identity:
            self._identity = identity
            self._cancel(self._ledger.uncopied(), saves.IDENTITY)

    def submit(self, orders: Sequence[SaveOrder], *, tainted: bool) -> None:
        """Save these; with `tainted` all are dropped, since they were computed from garbage."""
        chosen: dict[tuple[bool, str, str, str], list[Row]] = {}
        for order in orders:
            rows = self._opened(order, tainted)
            together = (order.urgent, order.instance, order.lora, order.salt)
            chosen.setdefault(together, []).extend(rows)
        until_s = time.monotonic() + self._settings.save_wait_ms / 1_000
        identity = self._identity or _NOBODY
        with self._changed:
            for (urgent, *_), rows in chosen.items():
                queue = self._urgent if urgent else self._ordinary
                for at in range(0, len(rows), self._batch_blocks):
                    # Named after its first row, so that no two batches have a name in common.
                    name = f"{rows[at].save.order.save}.{rows[at].number}"
                    batch = Batch(name, identity, rows[at : at + self._batch_blocks], until_s)
                    if all(row.over for row in batch.rows):
                        self._hand_on(batch)
                    else:
                        queue.append(batch)
            self._changed.notify_all()
        self._counts.top("save_queue_blocks_max", self._ledger.rows_uncopied)

    def _opened(self, order: SaveOrder, tainted: bool) -> list[Row]:
        """The rows of an order; they are over already when it is not to be done."""
        save = Save(order, len(order.keys))
        parents = [order.parent, *order.keys[:-1]]
        columns = zip(order.keys, parents, zip(*order.blocks, strict=True), strict=True)
        rows = [Row(save, number, *row) for number, row in enumerate(columns)]
        if tainted:
            reason = saves.TAINTED
        elif self._identity is None:
            reason = saves.IDENTITY
        elif self._ledger.rows_uncopied + len(rows) > self._settings.save_queue_blocks_max:
            reason = saves.QUEUE_FULL
        else:
            reason = ""
        self._ledger.open(save)
        if reason:
            for row in rows:
                self._given(row, reason)
        return rows

    def cancel(self, requests: Iterable[str]) -> None:
        """The engine takes these requests' blocks back: when this returns no page of them is copied, nor ever
        will be. Waits for a copy of one page that has begun."""
        self._cancel(self._ledger.uncopied(requests), saves.PREEMPTED)

    def _cancel(self, chosen: Iterable[Save], reason: str) -> None:
        for save in chosen:
            save.cancel(reason)

    def copy_urgent(self) -> None:
        """Return when no block of an urgent save is to be copied any more: all are, or were given up because
        there was no room for them. Waits for copies, and for nothing else."""
        began_ns = time.monotonic_ns()
        with self._changed:
            if not self._urgent:
                return
            self._hurried = True
            self._buffers.wake()
            done = self._changed.wait_for(lambda: not self._urgent, URGENT_WAIT_S)
            self._hurried = False
            left = [row.save for batch in self._urgent for row in batch.rows]
        if not done:
            self._cancel(left, saves.LATE)
        self._counts.add("urgent_wait_us", (time.monotonic_ns() - began_ns) // 1_000)

    def copying(self, request: str) -> bool:
        """Whether blocks of a request may still be copied."""
        return self._ledger.copying(request)

    def take(self) -> tuple[dict[str, int], list[Saved]]:
        """See Ledger.take."""
        return self._ledger.take()

    def stop(self) -> None:
        """Copy nothing more, and end: what is being written is finished or given up. Bounded."""
        until_s = time.monotonic() + STOP_WAIT_S
        self._stopping.set()
        for save in self._ledger.uncopied():
            save.forbid(saves.STOPPED)  # waiting for nothing: a device may hang
        with self._changed:
            self._changed.notify_all()
        self._buffers.wake()
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    # -------------------------------------------------------------------------------------------- copying

    def _copy_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._ordinary or self._stopping.is_set())
                queue = self._urgent or self._ordinary
                if not queue:
                    return
                batch = queue[0]
            try:
                if not self._copy(batch):
                    continue
            except Exception:
                log.exception("pages of %d blocks could not be copied", len(batch.rows))
                for row in batch.rows[batch.at :]:
                    if not row.over:
                        self._given(row, saves.INTERNAL)
            with self._changed:
                queue.popleft()
                self._hand_on(batch)
                self._changed.notify_all()

    def _hand_on(self, batch: Batch) -> None:
        if self._stopping.is_set():
            self._discard(batch)
        elif any(row.pages is not None for row in batch.rows):
            self._writes.append(batch)
        elif self._rank.world > 1 and batch.identity is not _NOBODY and len(self._given_up) < GIVEN_UP_MAX:
            self._given_up.append(batch)

    def _discard(self, batch: Batch) -> None:
        """A copied batch that nobody will write."""
        for row in batch.copied:
            self._buffers.give(row.pages or ())
            row.pages = None
            self._ledger.dropped(row, saves.STOPPED)

    def _copy(self, batch: Batch) -> bool:
        """Copy the rows of a batch; False when it is to go on later, after something urgent."""
        while batch.at < len(batch.rows):
            if self._urgent and not batch.urgent:
                return False
            row = batch.rows[batch.at]
            if row.over:
                batch.at += 1
                continue
            reason = row.save.cancelled or (saves.NO_BLOCK_GIVEN if NO_BLOCK in row.blocks else "")
            if not reason:
                pages = self._buffers.take(len(self._sizes), batch.until_s, lambda: self._in_the_way(batch))
                if pages is None and self._urgent and not batch.urgent:
                    return False
                reason = saves.NO_BUFFER if pages is None else self._copy_row(row, pages)
            batch.at += 1
            self._given(row, reason)
        return True

    def _in_the_way(self, batch: Batch) -> bool:
        """Whether this batch must not wait for buffers now: a step waits for it, or for another behind it."""
        return self._stopping.is_set() or (self._hurried if batch.urgent else bool(self._urgent))

    def _copy_row(self, row: Row, pages: list[memoryview]) -> str:
        """Why it could not be copied; empty when it was."""
        began_ns = time.monotonic_ns()
        save = row.save
        try:
            for group, (block, page) in enumerate(zip(row.blocks, pages, strict=True)):
                with save.lock:
                    if save.cancelled:
                        break
                    self._pages.gather(group, block, page)
        except BaseException:
            self._buffers.give(pages)
            raise
        if save.cancelled:
            # Also when only now: whether the last page came before that is not worth finding out.
            self._buffers.give(pages)
            return save.cancelled
        row.pages = pages
        self._counts.add("copied_pages", len(pages))
        self._counts.add("copied_bytes", sum(self._sizes))
        self._counts.add("copy_us", (time.monotonic_ns() - began_ns) // 1_000)
        self._counts.top("save_buffer_bytes_max", self._buffers.used * max(self._sizes))
        return ""

    def _given(self, row: Row, reason: str) -> None:
        """The engine's block is done with: the row was copied, or dropped for `reason`."""
        if reason:
            self._ledger.dropped(row, reason)
        elif self._audit.on and row.pages is not None:
            for part, size, page in zip(self._rank.parts, self._sizes, row.pages, strict=True):
                self._audit.note("copied", row.key, part, request=row.save.order.request, data=page[:size])
        self._ledger.copied(row)

    # -------------------------------------------------------------------------------------------- writing

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._writes or self._given_up or self._stopping.is_set())
                if self._stopping.is_set():
                    while self._writes:
                        self._discard(self._writes.popleft())
                    return
                batch = (self._writes or self._given_up).popleft()
            self._writer.publish(batch)
