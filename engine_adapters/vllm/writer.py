"""Writes one batch of copied pages to its storage and makes it serve.

Called from the saver's background threads, the only ones that wait for the service. Whatever goes wrong,
every row ends in the ledger exactly once, every buffer goes back, and nothing serves that is not whole.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from threading import Event
from typing import Protocol, TypeVar

from dataplane.pages import Pages
from engine_adapters.vllm import saves
from engine_adapters.vllm.audit import Audit
from engine_adapters.vllm.buffers import Buffers
from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.mover import Mover
from engine_adapters.vllm.orders import Identity
from engine_adapters.vllm.rank import RankParts
from engine_adapters.vllm.saves import Batch, Ledger, Row
from engine_adapters.vllm.settings import Settings
from metaservice.client import FinishResult, PlaceRef, WriteResult
from metaservice.client.errors import PASSING
from metaservice.client.results import now_ms
from metaservice.wire.schemas import FinishStatus, WriteOutcome

log = logging.getLogger("ucm.vllm")

ROWS_A_WRITE = 8
"""Blocks written between two looks at the session's deadline and at whether to stop."""
_PAUSE_S = 0.1


class _Answer(Protocol):
    @property
    def failure(self) -> str | None: ...

    @property
    def detail(self) -> str: ...


A = TypeVar("A", bound=_Answer)


class Writer:
    """Thread safe; one batch a thread."""

    def __init__(
        self,
        settings: Settings,
        rank: RankParts,
        pages: Pages,
        mover: Mover,
        buffers: Buffers,
        ledger: Ledger,
        counts: Counts,
        audit: Audit,
        current: Callable[[], Identity | None],
        stopping: Event,
    ) -> None:
        """`current` says as whom the engine is registered now; `stopping` is set when the engine ends."""
        self._ttl_ms = settings.write_ttl_ms
        self._rank = rank
        self._sizes = [group.page_bytes for group in pages.groups]
        self._mover = mover
        self._buffers = buffers
        self._ledger = ledger
        self._counts = counts
        self._audit = audit
        self._current = current
        self._stopping = stopping

    def publish(self, batch: Batch) -> None:
        """Write what was copied of `batch` and make it serve. With several ranks also a batch of which
        nothing was copied has to come here: its session is given up, so that the other ranks' parts wait for
        nothing."""
        rows = [row for row in batch.rows if row.pages is not None or self._rank.world > 1]
        try:
            self._publish(batch, rows)
        except Exception:
            log.exception("a save of %d blocks failed", len(rows))
            self._drop(rows, saves.INTERNAL)
        finally:
            for row in rows:
                self._free(row)

    def _publish(self, batch: Batch, rows: Sequence[Row]) -> None:
        if not self._still(batch):
            self._drop(rows, saves.IDENTITY)
            return
        started = self._start(batch, rows)
        if started is None:
            return
        places = self._places(started, rows)
        if started.session is None:
            return
        if not any(row.pages is not None for row in places.values()):
            self._abort(started)
            return
        checksums = self._write(batch, started, places)
        self._finish(batch, started, places, checksums)

    def _still(self, batch: Batch) -> bool:
        return batch.identity == self._current()

    # ----------------------------------------------------------------------------------------------- start

    def _start(self, batch: Batch, rows: Sequence[Row]) -> WriteResult | None:
        """Ask for places; None when there are none, and every row is accounted for. What is sent is the same
        on every rank."""
        tokens = [row.packed_tokens() for row in rows]
        started = self._asked(
            lambda: self._mover.start(
                batch.instance,
                [row.key for row in rows],
                [row.parent for row in rows],
                ttl_ms=self._ttl_ms,
                request_id=batch.name,
                traceparent=batch.traceparent,
                tokens=tokens if any(tokens) else None,
                lora=batch.lora,
                salt=batch.salt,
            ),
            until_ms=now_ms() + self._ttl_ms // 3,
            # Nobody waits for a batch that is only to be given up.
            patient=any(row.pages is not None for row in rows),
        )
        self._counts.add("sessions")
        if started.failure is not None:
            self._counts.add("start_failures")
            log.warning("start_write of %d blocks failed: %s %s", len(rows), started.failure, started.detail)
            self._drop(rows, saves.START_FAILED)
            return None
        return started

    def _places(self, started: WriteResult, rows: Sequence[Row]) -> dict[int, Row]:
        """The rows of `started` to write, or to tell as failed; the others are accounted for."""
        writable = set(started.writable)
        places = {}
        for index, (row, outcome) in enumerate(zip(rows, started.outcomes, strict=True)):
            if index in writable:
                places[index] = row
            elif outcome == WriteOutcome.present:
                self._ledger.present(row)
                self._free(row)
            elif outcome == WriteOutcome.refused:
                self._counts.add(f"refused_{started.reason(index)}")
                self._drop([row], saves.REFUSED)
            else:
                # Also a block that this very batch has twice: the first row writes it.
                self._drop([row], saves.IN_PROGRESS)
        return places

    # ----------------------------------------------------------------------------------------------- write

    def _write(self, batch: Batch, started: WriteResult, places: dict[int, Row]) -> dict[int, list[int]]:
        """The checksums of the parts of each row that is wholly written."""
        checksums: dict[int, list[int]] = {}
        todo = [index for index, row in places.items() if row.pages is not None]
        deadline_ms = started.deadline_ms
        for at in range(0, len(todo), ROWS_A_WRITE):
            if self._stopping.is_set() or not self._still(batch):
                break
            if now_ms() > deadline_ms - started.ttl_ms // 2:
                deadline_ms = self._mover.renew(started, self._ttl_ms).deadline_ms or deadline_ms
            chosen = todo[at : at + ROWS_A_WRITE]
            checksums |= self._write_some(started, {index: places[index] for index in chosen})
        return checksums

    def _write_some(self, started: WriteResult, places: dict[int, Row]) -> dict[int, list[int]]:
        began_ns = time.monotonic_ns()
        refs: list[PlaceRef] = []
        data: list[memoryview] = []
        for index, row in places.items():
            assert row.pages is not None
            for part, size, page in zip(self._rank.parts, self._sizes, row.pages, strict=True):
                refs.append(started.place(index, part))
                data.append(page[:size])
        outcomes = self._mover.write(refs, data)
        width = len(self._sizes)
        written: dict[int, list[int]] = {}
        for at, (index, row) in enumerate(places.items()):
            checksums = []
            for ref, outcome in zip(
                refs[at * width : (at + 1) * width], outcomes[at * width : (at + 1) * width], strict=True
            ):
                if isinstance(outcome, str):
                    self._counts.add(f"write_failures_{outcome}")
                    continue
                checksums.append(outcome)
                # Before the finish, after which it may serve whatever becomes of us.
                self._audit.note(
                    "written", ref.key, ref.part, request=row.save.order.request, checksum=outcome,
                    location=ref.location, generation=ref.generation,
                )  # fmt: skip
            if len(checksums) == width:
                written[index] = checksums
            self._free(row)
        self._counts.add("written_pages", len(written) * width)
        self._counts.add("written_bytes", len(written) * sum(self._sizes))
        self._counts.add("write_us", (time.monotonic_ns() - began_ns) // 1_000)
        return written

    # ---------------------------------------------------------------------------------------------- finish

    def _finish(
        self, batch: Batch, started: WriteResult, places: dict[int, Row], checksums: dict[int, list[int]]
    ) -> None:
        """Tell the service what is written and what is not, and the ledger what became of it."""
        if not self._still(batch):
            self._abort(started)
            self._drop(places.values(), saves.IDENTITY)
            return
        finished = self._finished(batch, started, list(places), checksums)
        if finished.failure is not None:
            self._counts.add("finish_failures")
            log.warning("finish of %d blocks failed: %s %s", len(places), finished.failure, finished.detail)
            # What serves all the same stays; the rest is free at once for others to write.
            self._abort(started)
            self._drop(places.values(), saves.FINISH_FAILED)
            return
        size_bytes = sum(self._sizes)
        for (index, row), status in zip(places.items(), finished.status, strict=True):
            if index not in checksums:
                self._drop([row], saves.STOPPED if self._stopping.is_set() else saves.WRITE_FAILED)
            elif status not in (FinishStatus.serving, FinishStatus.pending):
                self._drop([row], saves.REMOVED)
            else:
                serves = status == FinishStatus.serving
                tier = started.storage_table[started.storages[index]].kind
                self._ledger.written(row, size_bytes, tier, serves=serves)
                self._counts.add("pending_blocks", not serves)
                if serves:
                    self._note_published(started, index, row, checksums[index])

    def _finished(
        self, batch: Batch, started: WriteResult, rows: list[int], checksums: dict[int, list[int]]
    ) -> FinishResult:
        width = len(self._sizes)
        ok = [index in checksums for index in rows for _ in range(width)]
        sums = [one for index in rows for one in checksums.get(index, [0] * width)]
        request_id: str | None = None

        def ask() -> FinishResult:
            nonlocal request_id
            finished = self._mover.finish(
                started,
                rows,
                parts=list(self._rank.parts),
                ok=ok,
                checksums=sums,
                request_id=request_id,
                traceparent=batch.traceparent,
            )
            # Asked again it is the same request, and gets the answer that counts.
            request_id = finished.request_id or None
            return finished

        return self._asked(ask, until_ms=started.deadline_ms, patient=True)

    def _abort(self, started: WriteResult) -> None:
        """Give the session up. Tried once: by itself it ends at its deadline."""
        if started.session is not None:
            self._counts.add("sessions_aborted")
            self._mover.abort(started)

    # ---------------------------------------------------------------------------------------------- common

    def _asked(self, ask: Callable[[], A], *, until_ms: int, patient: bool) -> A:
        """The answer, asked for again while it may come later. The service may be away for a moment, and what
        was copied is not thrown away for that."""
        answer = ask()
        while patient and answer.failure in PASSING and now_ms() < until_ms:
            if self._stopping.wait(_PAUSE_S):
                break
            answer = ask()
        return answer

    def _drop(self, rows: Iterable[Row], reason: str) -> None:
        for row in rows:
            self._ledger.dropped(row, reason)
            self._free(row)

    def _free(self, row: Row) -> None:
        if row.pages is not None:
            pages, row.pages = row.pages, None
            self._buffers.give(pages)

    def _note_published(self, started: WriteResult, index: int, row: Row, checksums: Sequence[int]) -> None:
        if not self._audit.on:
            return
        for part, checksum in zip(self._rank.parts, checksums, strict=True):
            self._audit.note(
                "published", row.key, part, request=row.save.order.request, checksum=checksum,
                location=started.locations[index], generation=started.generations[index],
            )  # fmt: skip
