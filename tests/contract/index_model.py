"""A naive block table: one dict row a location, everything else counted anew from the rows.

It says what the batch interface of `metaservice.core.index` means, so that whatever implements that
interface can be held against it.
"""

from dataclasses import dataclass, field

from metaservice.core.model import AttentionGroup, GroupKind, LocationState, Part

WRITING, SERVING, DELETING = LocationState.writing, LocationState.serving, LocationState.deleting


@dataclass
class ModelTable:
    """One key table; `home` is where its dependencies live (itself for the primary one)."""

    number: int
    group: AttentionGroup
    parts: tuple[Part, ...]
    primary: "ModelTable | None"

    @property
    def home(self) -> "ModelTable":
        return self.primary or self


@dataclass
class Row:
    """One location that is not gone."""

    table: ModelTable
    key: bytes
    parent: bytes | None
    storage: int
    session: int
    state: LocationState = WRITING
    visible: bool = False
    sums: dict[int, int] = field(default_factory=dict)
    """part -> checksum"""

    def needs(self) -> bytes | None:
        """The key, in `table.home`, that this block depends on."""
        return self.parent if self.table.primary is None else self.key


class ModelIndex:
    """All locations in a dict."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.generations: list[int] = []
        self.free: list[int] = []

    # -- what is there

    def live(self, table: ModelTable, key: bytes) -> int | None:
        """The slot of the key's writing or serving location."""
        for slot, row in self.rows.items():
            if row.table is table and row.key == key and row.state is not DELETING:
                return slot
        return None

    def visible(self, table: ModelTable, key: bytes) -> int | None:
        slot = self.live(table, key)
        return slot if slot is not None and self.rows[slot].visible else None

    def prefix(self, table: ModelTable, keys: list[bytes], parent: bytes | None) -> list[int]:
        """The longest run of visible blocks each of which names the key before it as its parent."""
        run: list[int] = []
        for key in keys:
            slot = self.visible(table, key)
            if slot is None or self.rows[slot].parent != parent:
                break
            run.append(slot)
            parent = key
        return run

    def dependents(self, table: ModelTable, key: bytes) -> int:
        """How many live blocks depend on this key of this table, whether it is there or not."""
        return sum(
            row.state is not DELETING and row.table.home is table and row.needs() == key
            for row in self.rows.values()
        )

    def children(self, slot: int) -> int:
        row = self.rows[slot]
        return self.dependents(row.table, row.key) if row.state is not DELETING else 0

    def pending(self, table: ModelTable) -> dict[bytes, int]:
        """Absent keys that blocks depend on, and how many do."""
        needed = {
            row.needs() for row in self.rows.values() if row.state is not DELETING and row.table.home is table
        }
        return {
            key: self.dependents(table, key)
            for key in needed
            if key is not None and self.live(table, key) is None
        }

    def deleting(self, table: ModelTable) -> int:
        return sum(row.table is table and row.state is DELETING for row in self.rows.values())

    # -- what is done

    def next_slots(self, count: int) -> list[int]:
        """Freed slots, the last freed first, then fresh ones."""
        reused = self.free[::-1][:count]
        return reused + list(range(len(self.generations), len(self.generations) + count - len(reused)))

    def next_generation(self, slot: int) -> int:
        return self.generations[slot] + 1 if slot < len(self.generations) else 1

    def reserve(
        self,
        table: ModelTable,
        slots: list[int],
        storages: list[int],
        keys: list[bytes],
        parents: list[bytes | None],
        session: int,
    ) -> None:
        for slot, storage, key, parent in zip(slots, storages, keys, parents, strict=True):
            if slot < len(self.generations):
                self.free.remove(slot)
                self.generations[slot] += 1
            else:
                self.generations.append(1)
            self.rows[slot] = Row(table, key, parent, storage, session)

    def record(self, slot: int, part: int, checksum: int) -> None:
        self.rows[slot].sums[part] = checksum

    def publish(self, slots: list[int]) -> None:
        for slot in slots:
            self.rows[slot].state, self.rows[slot].session = SERVING, 0

    def reveal(self, slots: list[int]) -> None:
        for slot in slots:
            row = self.rows.get(slot)
            if row is not None and row.state is SERVING:
                row.visible = True

    def retire(self, slots: list[int]) -> set[int]:
        """Returns the live blocks that had dependents before and have none after."""
        before = {
            slot for slot, row in self.rows.items() if row.state is not DELETING and self.children(slot)
        }
        for slot in slots:
            row = self.rows[slot]
            row.state, row.visible, row.session = DELETING, False, 0
        return {slot for slot in before - set(slots) if not self.children(slot)}

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            del self.rows[slot]
            self.free.append(slot)

    def in_storage(self, storage: int) -> list[int]:
        return sorted(slot for slot, row in self.rows.items() if row.storage == storage)

    def drop(self, slots: list[int]) -> set[int]:
        """Returns what `retire` does."""
        leaves = self.retire([slot for slot in slots if self.rows[slot].state is not DELETING])
        self.release(slots)
        return leaves - set(slots)


FULL = AttentionGroup("full")
WINDOW = AttentionGroup("swa", GroupKind.sliding_window, 2)
STATE = AttentionGroup("ssm", GroupKind.state)


def model_tables() -> list[ModelTable]:
    """The tables of two instances: one with three attention groups, one with a single one."""
    full = ModelTable(1, FULL, (Part("tp0", 100), Part("tp1", 100)), None)
    window = ModelTable(2, WINDOW, (Part("w0", 10, "swa"), Part("w1", 30, "swa"), Part("w2", 5, "swa")), full)
    state = ModelTable(3, STATE, (Part("s0", 7, "ssm"),), full)
    return [full, window, state, ModelTable(4, FULL, (Part("tp0", 50),), None)]
