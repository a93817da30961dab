"""Which blocks go when room is needed: least recently used, leaf first.

A block is a candidate when it serves (durably), nothing depends on it, nobody leases it and the request in
hand does not need it. A lookup touches the blocks it returns; when a block goes, its recency passes to the
block it depended on, so that a prefix that callers hold themselves, and that lookups therefore do not name,
is as recent as what hangs on it.

Each table has a heap of `used_ms << 32 | slot`. Entries are checked when they come up: stale ones are dropped
or moved. The heap is leader memory; what was chosen is an event.
"""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from .index import SERVING, BlockIndex, Table

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


def offer(index: BlockIndex, table: Table, slots: Iterable[int]) -> None:
    """These blocks of the table serve and have no dependents (as far as known now): they are candidates."""
    heap, used, children = table.heap, index.used_ms, index.children
    for slot in slots:
        if not children[slot]:
            heappush(heap, used[slot] << _SLOT_BITS | slot)
    if len(heap) > 4 * len(table.slots) + 1024:
        rebuild(index, table)


def rebuild(index: BlockIndex, table: Table) -> None:
    """Make the heap from the table: after a restart, or when stale entries outnumber live ones."""
    state, children, used = index.state, index.children, index.used_ms
    table.heap = [
        used[slot] << _SLOT_BITS | slot
        for slot in table.slots.values()
        if state[slot] == SERVING and not children[slot]
    ]
    heapify(table.heap)


class Plan:
    """Victims chosen for one command. Nothing is changed but the heaps; the victims become an event."""

    def __init__(self, index: BlockIndex, protected: Iterable[int] = ()) -> None:
        self._index = index
        self._protected = frozenset(protected)
        self._aside: list[tuple[Table, int]] = []
        self._fewer: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._gone: set[int] = set()
        self._scope: Sequence[Table] | None = None
        self._storage: int | None = None
        self._places: dict[int, int] = {}
        self._heads: list[tuple[int, int]] = []
        self.victims: list[int] = []

    def pick(self, tables: Sequence[Table], storage: int | None = None) -> int | None:
        """The least recently used candidate among the tables (and in the storage, if given); or None.

        Picking on from the same tables costs the logarithm of their number.
        """
        if self._scope is not tables or self._storage != storage:
            self._look_at(tables, storage)
        heads = self._heads
        while heads:
            entry, at = heads[0]
            current = self._top(tables[at], storage)
            if current == entry:
                break
            if current is None:
                heappop(heads)
            else:
                heapreplace(heads, (current, at))
        else:
            return None
        table = tables[at]
        heappop(table.heap)
        slot = entry & _SLOT_MASK
        self.victims.append(slot)
        self._gone.add(slot)
        self._pass_on(table, slot, entry >> _SLOT_BITS)
        for changed in {table, table.dependency}:
            place = self._places.get(changed.number)
            top = self._top(changed, storage) if place is not None else None
            if place is not None and top is not None:
                heappush(heads, (top, place))
        return slot

    def _look_at(self, tables: Sequence[Table], storage: int | None) -> None:
        """Make the heap of the tables' best candidates: (entry, row of its table)."""
        self._scope, self._storage = tables, storage
        self._places = {table.number: row for row, table in enumerate(tables)}
        self._heads = [
            (top, row) for row, table in enumerate(tables) if (top := self._top(table, storage)) is not None
        ]
        heapify(self._heads)

    def close(self) -> None:
        """Put candidates back that were looked at but may not go now. Call when no more is picked, and before
        picking from other tables or another storage: what may not go there may go here."""
        for table, entry in self._aside:
            heappush(table.heap, entry)
        self._aside.clear()
        self._scope = None

    def _top(self, table: Table, storage: int | None) -> int | None:
        index, heap = self._index, table.heap
        while heap:
            entry = heap[0]
            slot = entry & _SLOT_MASK
            if (
                slot in self._gone
                or index.table[slot] != table.number
                or index.state[slot] != SERVING
                or index.children[slot] - self._fewer.get(slot, 0)
            ):
                heappop(heap)
                continue
            used = max(index.used_ms[slot], self._used.get(slot, 0))
            if used != entry >> _SLOT_BITS:
                heapreplace(heap, used << _SLOT_BITS | slot)
                continue
            if (
                index.pins[slot]
                or not index.visible[slot]
                or slot in self._protected
                or (storage is not None and index.storage[slot] != storage)
            ):
                heappop(heap)
                self._aside.append((table, entry))
                continue
            return entry
        return None

    def _pass_on(self, table: Table, slot: int, used: int) -> None:
        """The block depended on inherits the recency, and may be the next candidate."""
        index = self._index
        needed = index.parent[slot] if table.primary else index.key[slot]
        if needed is None:
            return
        upper = table.dependency.slots.get(needed)
        if upper is None:
            return
        self._fewer[upper] = self._fewer.get(upper, 0) + 1
        inherited = max(used, self._used.get(upper, 0), index.used_ms[upper])
        self._used[upper] = inherited
        if index.state[upper] == SERVING and index.children[upper] == self._fewer[upper]:
            heappush(table.dependency.heap, inherited << _SLOT_BITS | upper)
