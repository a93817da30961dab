"""The block table: every CacheLocation of a shard in columns, and the key tables that lead to them.

A batch interface: callers hand over runs of keys or slots, never one at a time. This is the reference
implementation in plain Python; a native one may replace it behind the same tests. It keeps facts and
maintains links; what may happen when is decided elsewhere, and the transition table is asserted here.

Columns are indexed by slot. `children[slot]` counts the blocks that depend on the block in that slot: for the
primary attention group of an instance the children in the prefix tree, plus the blocks of the other groups
under the same key. Dependents of a block that is not there are counted in `Table.pending` and adopted when it
arrives.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import compress, repeat

from .ids import NONE, location_base
from .model import AttentionGroup, LocationState, Part
from .transitions import sources

GONE, WRITING, SERVING, DELETING = (
    int(LocationState.gone),
    int(LocationState.writing),
    int(LocationState.serving),
    int(LocationState.deleting),
)
_FROM_STARTED = sources("started")
_FROM_FINISHED = sources("last part finished")
_FROM_REMOVED = sources("removed") | sources("evicted") | sources("part failed") | sources("session ended")
_FROM_DELETED = sources("bytes deleted")
_FROM_LOST = sources("pool gone")

Label = tuple[str, str]
"""(adapter's name, cache salt) that a block was computed under."""


class Table:
    """The key table of one (instance, attention group). `slots`: key -> slot of the writing or serving
    location.

    `dependency`: the table in which a block's dependency lives: its own for the primary group (under the
    parent's key), the primary one for every other group (under the block's own key).
    """

    __slots__ = (
        "below", "blocks_deleting", "dependency", "full_mask", "group", "heap", "hot", "instance", "number",
        "parts", "pending", "primary", "size_bytes", "slots",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        instance: str,
        group: AttentionGroup,
        parts: tuple[Part, ...],
        primary: "Table | None",
    ) -> None:
        self.number = number
        self.instance = instance
        self.group = group
        self.parts = parts
        self.primary = primary is None
        self.dependency: Table = primary if primary is not None else self
        self.size_bytes = sum(part.bytes for part in parts)
        self.full_mask = (1 << len(parts)) - 1
        self.slots: dict[bytes, int] = {}
        self.pending: dict[bytes, int] = {}
        self.blocks_deleting = 0
        self.heap: list[int] = []
        """Eviction candidates, see `eviction`: leader memory."""
        self.below: dict[bytes, int | set[int]] = {}
        """Parent's key -> the announced slots that hang on it (one, or several); derived."""
        self.hot: list[int] = []
        """Announced blocks with none below them, as in `heap`: leader memory, see `announcing`."""


class BlockIndex:
    """All locations of one shard. Slots are dense; `free` holds the gone ones, last freed first used."""

    def __init__(self) -> None:
        self.tables: dict[int, Table] = {}
        self.key: list[bytes] = []
        self.parent: list[bytes | None] = []
        self.table = array("I")
        self.state = bytearray()
        self.generation = array("I")
        self.storage = array("H")
        self.done = array("Q")
        self.sums: list[bytes] = []
        self.children = array("I")
        self.session = array("Q")
        self.free: list[int] = []
        self.deleting_count = 0
        self.tokens: list[bytes] = []
        """Packed ids for routers, b"" where the writer sent none."""
        self.label: list[Label | None] = []
        self.announced = bytearray()
        """1: routers are told of it."""
        # Leader memory, no part of the replicated state:
        self.visible = bytearray()
        self.used_ms = array("Q")
        self.pins = array("I")

    def __len__(self) -> int:
        """Slots ever used."""
        return len(self.key)

    # ------------------------------------------------------------ reads

    def is_deleting(self, slot: int) -> bool:
        """Whether the location in this slot waits for the deletion of its bytes."""
        return self.state[slot] == DELETING

    def find(self, table: Table, keys: Iterable[bytes]) -> list[int | None]:
        """The slot of each key's writing or serving location, None for absent keys."""
        return list(map(table.slots.get, keys))

    def visible_of(self, table: Table, keys: Sequence[bytes]) -> tuple[list[int | None], bytes]:
        """Slots and a 0/1 column: which keys are readable (serving, and the publishing event is durable)."""
        found = self.find(table, keys)
        visible = self.visible
        return found, bytes([0 if slot is None else visible[slot] for slot in found])

    def visible_prefix(
        self, table: Table, keys: Sequence[bytes], parent: bytes | None
    ) -> tuple[list[int], tuple[int, int] | None]:
        """Slots of the longest readable run from `keys[0]` whose recorded parents are the keys before them,
        and their span when they lie in one run."""
        found = list(map(table.slots.get, keys))
        try:
            count = found.index(None)
        except ValueError:
            count = len(found)
        run: list[int] = found[:count] if count < len(found) else found  # type: ignore[assignment]
        if not run:
            return run, None
        span = span_of(run)
        visible = self.visible
        flags = visible[slice(*span)] if span is not None else bytes(map(visible.__getitem__, run))
        hidden = flags.find(0)
        if hidden >= 0:
            run = run[:hidden]
            span = (run[0], run[0] + hidden) if span is not None and run else None
        recorded = self.parent[slice(*span)] if span is not None else list(map(self.parent.__getitem__, run))
        expected: list[bytes | None] = [parent, *keys[: len(run) - 1]] if run else []
        if recorded != expected:
            for row, (one, other) in enumerate(zip(recorded, expected, strict=True)):
                if one != other:
                    return run[:row], (span[0], span[0] + row) if span is not None and row else None
        return run, span

    def places(
        self, slots: Sequence[int], span: tuple[int, int] | None = None
    ) -> "tuple[array[int], array[int], bytes]":
        """Generations, storage numbers and checksums (u64, slot-major over the parts) of the slots, which may
        be known to be one run."""
        if span is not None:
            run = slice(*span)
            return self.generation[run], self.storage[run], b"".join(self.sums[run])
        return (
            array("I", map(self.generation.__getitem__, slots)),
            array("H", map(self.storage.__getitem__, slots)),
            b"".join(map(self.sums.__getitem__, slots)),
        )

    def in_storage(self, storage: int) -> "array[int]":
        """The slots of all locations in a storage, whatever their state, ascending. O(slots ever used)."""
        found = compress(range(len(self.storage)), map(storage.__eq__, self.storage))
        return array("I", [slot for slot in found if self.state[slot] != GONE])

    def free_slots(self, count: int) -> "array[int]":
        """The next `count` slots a reservation would use: freed ones (last freed first), then fresh ones."""
        reused = self.free[-1 : -count - 1 : -1] if self.free else []
        slots = array("I", reused)
        fresh = count - len(slots)
        if fresh:
            slots.extend(range(len(self.key), len(self.key) + fresh))
        return slots

    def next_generations(self, slots: "array[int]") -> "array[int]":
        """The generation each slot gets with its next use."""
        known = len(self.key)
        generation = self.generation
        return array("I", [generation[slot] + 1 if slot < known else 1 for slot in slots])

    # ------------------------------------------------------------ writes

    def reserve(
        self,
        table: Table,
        slots: "array[int]",
        generations: "array[int]",
        storages: "array[int]",
        keys: list[bytes],
        parents: list[bytes | None],
        session: int,
    ) -> None:
        """Gone -> writing, for new blocks of one table. `slots` must come from `free_slots`."""
        count = len(slots)
        if not self.free and slots[0] == len(self.key):
            self._append(table.number, generations, storages, keys, parents, session)
        else:
            self._claim(slots)
            for row, slot in enumerate(slots):
                self.key[slot] = keys[row]
                self.parent[slot] = parents[row]
                self.table[slot] = table.number
                self.state[slot] = WRITING
                self.generation[slot] = generations[row]
                self.storage[slot] = storages[row]
                self.done[slot] = 0
                self.children[slot] = 0
                self.session[slot] = session
        assert len(keys) == len(parents) == len(generations) == len(storages) == count, (
            "columns differ in length"
        )
        assert table.slots.keys().isdisjoint(keys), "a key is reserved that has a live location"
        table.slots.update(zip(keys, slots, strict=True))
        self._link(table, slots, keys, parents)

    def publish(self, slots: "array[int]") -> None:
        """Writing -> serving: the last part is in. Readers see it when `reveal` follows, once that is
        durable."""
        run = span_of(slots)
        self._assert_from(slots, _FROM_FINISHED, run)
        if run is not None:
            at, end = run
            self.state[at:end] = bytes((SERVING,)) * len(slots)
            self.session[at:end] = array("Q", (0,)) * len(slots)
        else:
            for slot in slots:
                self.state[slot] = SERVING
                self.session[slot] = 0

    def reveal(self, slots: "array[int]") -> None:
        """Make those of the slots visible that still serve."""
        state, visible = self.state, self.visible
        run = span_of(slots)
        if run is not None and state.count(SERVING, *run) == len(slots):
            visible[run[0] : run[1]] = b"\x01" * len(slots)
            return
        for slot in slots:
            if state[slot] == SERVING:
                visible[slot] = 1

    def retire(self, slots: "array[int]") -> list[int]:
        """Writing or serving -> deleting: hidden at once, the keys are free for other writers, links are
        undone.

        Returns the slots of blocks that lost their last dependent by this (candidates for eviction now).
        """
        self._assert_from(slots, _FROM_REMOVED)
        leaves: list[int] = []
        tables, table_of, keys, parents = self.tables, self.table, self.key, self.parent
        state, visible, session, children = self.state, self.visible, self.session, self.children
        used_ms = self.used_ms
        self.deleting_count += len(slots)
        for slot in slots:
            table = tables[table_of[slot]]
            key = keys[slot]
            state[slot] = DELETING
            visible[slot] = 0
            session[slot] = 0
            holder = table.slots.pop(key)
            assert holder == slot, "a deleting location had the key"
            table.blocks_deleting += 1
            if children[slot]:
                table.pending[key] = children[slot]
                children[slot] = 0
            needed = parents[slot] if table.primary else key
            if needed is None:
                continue
            home = table.dependency
            upper = home.slots.get(needed)
            if upper is None:
                left = home.pending[needed] - 1
                if left:
                    home.pending[needed] = left
                else:
                    del home.pending[needed]
                continue
            children[upper] -= 1
            used_ms[upper] = max(used_ms[upper], used_ms[slot])
            if not children[upper]:
                leaves.append(upper)
        return leaves

    def release(self, slots: "array[int]") -> None:
        """Deleting -> gone: the bytes are deleted, the slots may be used again (with the next generation)."""
        self._assert_from(slots, _FROM_DELETED)
        tables, table_of, keys, parents = self.tables, self.table, self.key, self.parent
        state, sums, done = self.state, self.sums, self.done
        tokens, label = self.tokens, self.label
        self.deleting_count -= len(slots)
        for slot in slots:
            tables[table_of[slot]].blocks_deleting -= 1
            state[slot] = GONE
            keys[slot] = b""
            parents[slot] = None
            sums[slot] = b""
            tokens[slot] = b""
            label[slot] = None
            done[slot] = 0
        self.free += slots

    def drop(self, slots: "array[int]") -> list[int]:
        """Any state -> gone: the bytes are lost already, so nobody has to delete them. Returns what `retire`
        does."""
        self._assert_from(slots, _FROM_LOST)
        leaves = self.retire(array("I", [slot for slot in slots if self.state[slot] != DELETING]))
        self.release(slots)
        return [leaf for leaf in leaves if self.state[leaf] != GONE]

    def record_parts(
        self, slots: "array[int]", masks: "array[int] | None", checksums: bytes, table: Table
    ) -> None:
        """Add newly written parts and their checksums (u64, slot-major over all parts of the table)."""
        width = 8 * len(table.parts)
        rows = split(checksums, width)
        if masks is None:
            full, sums, done = table.full_mask, self.sums, self.done
            run = span_of(slots)
            if run is not None:
                sums[run[0] : run[1]] = rows
                done[run[0] : run[1]] = array("Q", (full,)) * len(slots)
                return
            for slot, row in zip(slots, rows, strict=True):
                sums[slot] = row
                done[slot] = full
            return
        for slot, mask, row in zip(slots, masks, rows, strict=True):
            merged = bytearray(self.sums[slot] or bytes(width))
            for part in range(len(table.parts)):
                if mask >> part & 1:
                    merged[8 * part : 8 * part + 8] = row[8 * part : 8 * part + 8]
            self.sums[slot] = bytes(merged)
            self.done[slot] |= mask

    def record_tokens(self, slots: "array[int]", tokens: Sequence[bytes], label: Label | None) -> None:
        """What routers are to know the new blocks by."""
        run = span_of(slots)
        if run is not None:
            self.tokens[slice(*run)] = tokens
            self.label[slice(*run)] = [label] * len(slots)
            return
        for slot, packed in zip(slots, tokens, strict=True):
            self.tokens[slot] = packed
            self.label[slot] = label

    # ------------------------------------------------------------ inner

    def _append(
        self,
        table: int,
        generations: "array[int]",
        storages: "array[int]",
        keys: list[bytes],
        parents: list[bytes | None],
        session: int,
    ) -> None:
        """Fresh slots behind all others."""
        count = len(keys)
        self.key += keys
        self.parent += parents
        self.sums.extend(repeat(b"", count))
        self.tokens.extend(repeat(b"", count))
        self.label.extend(repeat(None, count))
        self.announced += bytes(count)
        self.table += array("I", (table,)) * count
        self.state += bytes((WRITING,)) * count
        self.generation += generations
        self.storage += storages
        self.session += array("Q", (session,)) * count
        for column in (self.done, self.children, self.used_ms, self.pins):
            column.frombytes(bytes(count * column.itemsize))
        self.visible += bytes(count)

    def _claim(self, slots: "array[int]") -> None:
        """Take the slots off the free list and make sure the columns reach them."""
        reused = min(len(self.free), len(slots))
        if reused:
            assert self.free[-1 : -reused - 1 : -1] == slots[:reused].tolist(), "slots are not the free ones"
            del self.free[-reused:]
        fresh = len(slots) - reused
        if not fresh:
            self._assert_from(slots, _FROM_STARTED)
            return
        assert slots[reused] == len(self.key), "fresh slots are not the next ones"
        zeros = bytes(fresh)
        self.key.extend(repeat(b"", fresh))
        self.parent.extend(repeat(None, fresh))
        self.sums.extend(repeat(b"", fresh))
        self.tokens.extend(repeat(b"", fresh))
        self.label.extend(repeat(None, fresh))
        self.announced += zeros
        for column in (self.table, self.generation, self.storage, self.done, self.children, self.session):
            column.frombytes(bytes(fresh * column.itemsize))
        for volatile in (self.used_ms, self.pins):
            volatile.frombytes(bytes(fresh * volatile.itemsize))
        self.state.extend(zeros)
        self.visible.extend(zeros)

    def _link(
        self, table: Table, slots: "array[int]", keys: list[bytes], parents: list[bytes | None]
    ) -> None:
        """Count the new blocks at what they depend on, and adopt the dependents that were waiting for
        them."""
        home = table.dependency
        get, pending, children = home.slots.get, home.pending, self.children
        for needed in parents if table.primary else keys:
            if needed is None:
                continue
            upper = get(needed)
            if upper is None:
                pending[needed] = pending.get(needed, 0) + 1
            else:
                children[upper] += 1
        if table.pending:
            for key, slot in zip(keys, slots, strict=True):
                waiting = table.pending.get(key)
                if waiting is not None:
                    del table.pending[key]
                    children[slot] += waiting

    def _assert_from(
        self, slots: "array[int]", allowed: frozenset[int], span: tuple[int, int] | None = None
    ) -> None:
        if span is not None and any(self.state.count(state, *span) == len(slots) for state in allowed):
            return
        found = set(map(self.state.__getitem__, slots))
        assert found <= allowed, f"transition from {[LocationState(state).name for state in found - allowed]}"


def span_of(slots: Sequence[int]) -> tuple[int, int] | None:
    """(first, end) when the slots are one ascending run, which columns answer by slices; else None.

    Blocks that were written together lie together, so this is the usual case.
    """
    count = len(slots)
    if not count:
        return None
    first = slots[0]
    if slots[-1] - first != count - 1:
        return None
    run = range(first, first + count)
    if count > 2 and slots != (list(run) if isinstance(slots, list) else array("I", run)):
        return None
    return first, first + count


def locations_of(shard: int, slots: Sequence[int], span: tuple[int, int] | None = None) -> "array[int]":
    """The location ids of a shard's slots; `span` when they are known to be one run."""
    base = location_base(shard)
    if not base:
        return array("Q", slots)
    run = span or span_of(slots)
    if run is not None:
        return array("Q", range(base + run[0], base + run[1]))
    return array("Q", [base + slot for slot in slots])


def split(packed: bytes, width: int) -> list[bytes]:
    """The rows of a packed column of `width` bytes each (one call in C, however many rows)."""
    return list(struct.unpack(f"{width}s" * (len(packed) // width), packed))


def packed_slots(slots: Iterable[int]) -> bytes:
    """u32 column for events."""
    return array("I", slots).tobytes()


def unpacked_slots(column: bytes) -> "array[int]":
    """The slots of an event's u32 column."""
    return array("I", column)


def live_of(index: BlockIndex, slots: Iterable[int], generations: Iterable[int]) -> bytes:
    """1 where the slot is still used with that generation (in any state but gone)."""
    known = len(index)
    state, generation = index.state, index.generation
    return bytes(
        1 if slot < known and slot != NONE and state[slot] != GONE and generation[slot] == wanted else 0
        for slot, wanted in zip(slots, generations, strict=True)
    )
