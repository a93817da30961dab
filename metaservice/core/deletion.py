"""Deletion of bytes: when a deleting location may lose them, and who does it.

Leader memory: a queue per storage of what waits for its time, tasks handed to workers with a time limit, and
what is overdue. A worker deletes by (location, generation), a place that is never used again, so doing it
twice or late does no harm.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from heapq import heappop, heappush

from .ids import location_base, task_name
from .index import DELETING, BlockIndex
from .model import Limits
from .replies import Task
from .state import State


class Handed:
    """A task in a worker's hands, or one that was: `open` until confirmed or out of time."""

    __slots__ = ("answer", "deadline_ms", "generations", "name", "slots", "storage", "worker")

    def __init__(
        self,
        name: str,
        worker: str,
        storage: int,
        slots: "array[int]",
        generations: "array[int]",
        deadline_ms: int,
    ) -> None:
        self.name = name
        self.worker = worker
        self.storage = storage
        self.slots = slots
        self.generations = generations
        self.deadline_ms = deadline_ms
        self.answer: tuple[int, int] | None = None


class Deletions:
    """What waits for deletion, per storage number."""

    def __init__(self, index: BlockIndex, limits: Limits, shard: int) -> None:
        self._index = index
        self._limits = limits
        self._shard = shard
        self._queue: dict[int, list[tuple[int, int]]] = {}
        self._waiting: dict[int, int] = {}
        """slot -> when its bytes may go. A heap entry that says otherwise is of an earlier use or an earlier
        try."""
        self._leased: set[int] = set()
        self._open: OrderedDict[str, Handed] = OrderedDict()
        self._ended: OrderedDict[str, Handed] = OrderedDict()
        self._next = 1
        self._overdue: dict[int, int] = {}
        self.overdue_bytes: dict[int, int] = {}
        """Per storage: bytes whose deletion a worker did not confirm in time. They count against the
        capacity."""
        self.timeouts = 0

    def queue(self, slots: Iterable[int], ready_ms: int) -> None:
        """Durably deleting; the bytes may go at `ready_ms`."""
        storage = self._index.storage
        for slot in slots:
            self._waiting[slot] = ready_ms
            heappush(self._queue.setdefault(storage[slot], []), (ready_ms, slot))

    def unpinned(self, slots: list[int]) -> None:
        """The last lease over these deleting slots ended."""
        waiting = [slot for slot in slots if slot in self._leased]
        self._leased.difference_update(waiting)
        self.queue(waiting, 0)

    def take(self, state: State, worker: str, storages: list[int], limit: int, now_ms: int) -> list[Task]:
        """Hand out up to `limit` locations in tasks of one table and storage each."""
        limits = self._limits
        # The leases of the leader before are unknown, and its clock may have been behind: what it promised to
        # readers and late writers is waited for anew.
        settled_ms = max(limits.lease_ms_max, limits.late_write_ms, limits.reclaim_delay_ms)
        if now_ms < state.takeover_ms + settled_ms:
            return []
        tasks: list[Task] = []
        for number in storages:
            by_table: dict[int, list[int]] = {}
            queue = self._queue.get(number, [])
            while queue and queue[0][0] <= now_ms and limit > 0:
                ready_ms, slot = heappop(queue)
                if self._waiting.get(slot) != ready_ms or self._index.storage[slot] != number:
                    continue
                del self._waiting[slot]
                if self._index.pins[slot]:
                    self._leased.add(slot)
                    continue
                by_table.setdefault(self._index.table[slot], []).append(slot)
                limit -= 1
            tasks += [
                self._hand(state, worker, number, table, slots, now_ms) for table, slots in by_table.items()
            ]
        return tasks

    def find(self, name: str) -> Handed | None:
        """The task of that name: open, confirmed or out of time."""
        return self._open.get(name) or self._ended.get(name)

    def done(self, task: Handed, failed: "array[int]", now_ms: int) -> None:
        """The task is answered; what failed is offered again a little later. Of a task that is out of time
        everything was offered again already."""
        if self._open.pop(task.name, None) is not None:
            self._keep(task)
            self.queue(failed, now_ms + self._limits.task_retry_ms)

    def gone(self, slots: Iterable[int]) -> None:
        """The locations are gone: nothing of them is overdue or leased any more."""
        for slot in slots:
            late = self._overdue.pop(slot, None)
            if late is not None:
                self.overdue_bytes[self._index.storage[slot]] -= late
            self._leased.discard(slot)
            self._waiting.pop(slot, None)

    def lost(self, storage: int, deleting: Iterable[int]) -> None:
        """The storage's bytes are gone, and with them these locations: there is nothing left to delete in it.
        Who still has a task of it is answered as if all of that were done."""
        self.gone(deleting)
        self._queue.pop(storage, None)
        for task in [task for task in self._open.values() if task.storage == storage]:
            del self._open[task.name]
            self._keep(task)

    def expire(self, now_ms: int) -> int:
        """Take back what was not confirmed in time, so that another worker gets it. Returns how many
        tasks."""
        late = [task for task in self._open.values() if task.deadline_ms <= now_ms]
        index = self._index
        for task in late:
            del self._open[task.name]
            self._keep(task)
            again = [
                slot
                for slot, generation in zip(task.slots, task.generations, strict=True)
                if index.state[slot] == DELETING and index.generation[slot] == generation
            ]
            for slot in again:
                if slot not in self._overdue:
                    size = index.tables[index.table[slot]].size_bytes
                    self._overdue[slot] = size
                    self.overdue_bytes[task.storage] = self.overdue_bytes.get(task.storage, 0) + size
            self.queue(again, now_ms)
        self.timeouts += len(late)
        return len(late)

    def take_back(self) -> None:
        """Forget who has which task and what a lease held up: all that is deleting waits again."""
        open_slots = [slot for task in self._open.values() for slot in task.slots]
        index = self._index
        waiting = [slot for slot in (*open_slots, *self._leased) if index.state[slot] == DELETING]
        self._open.clear()
        self._ended.clear()
        self._leased.clear()
        self._overdue.clear()
        self.overdue_bytes.clear()
        self.queue(waiting, 0)

    def _hand(
        self, state: State, worker: str, storage: int, table: int, slots: list[int], now_ms: int
    ) -> Task:
        name = task_name(self._shard, state.epoch, self._next)
        self._next += 1
        column = array("I", slots)
        generations = array("I", [self._index.generation[slot] for slot in slots])
        ttl_ms = self._limits.task_ttl_ms
        self._open[name] = Handed(name, worker, storage, column, generations, now_ms + ttl_ms)
        base = location_base(self._shard)
        kept = state.storage_of[storage]
        return Task(
            name,
            kept.id,
            tuple(part.name for part in self._index.tables[table].parts),
            array("Q", [base + slot for slot in slots]),
            generations,
            ttl_ms,
            kept.pool.incarnation if kept.pool is not None else "",
        )

    def _keep(self, task: Handed) -> None:
        self._ended[task.name] = task
        if len(self._ended) > self._limits.ended_tasks_max:
            self._ended.popitem(last=False)
