"""A block table and the naive one side by side: the same calls to both, and every answer compared."""

import random
from array import array
from collections.abc import Callable

from metaservice.core.index import DELETING, GONE, SERVING, WRITING, BlockIndex, Table
from tests.contract.index_model import ModelIndex, ModelTable, model_tables

KEYS = [bytes([letter]) * 16 for letter in range(40)]
Factory = tuple[Callable[[], BlockIndex], type[Table]]


class Pair:
    """An index under test and the naive one, given the same calls; `compare` after each."""

    def __init__(self, factory: Factory) -> None:
        make_index, make_table = factory
        self.index = make_index()
        self.model = ModelIndex()
        self.models = model_tables()
        self.tables: dict[int, Table] = {}
        for one in self.models:
            primary = self.tables[one.primary.number] if one.primary is not None else None
            table = make_table(one.number, f"i{one.number // 4}", one.group, one.parts, primary)
            self.tables[one.number] = self.index.tables[one.number] = table
        self.used_ms = 1_000
        self.session = 0

    def table(self, model: ModelTable) -> Table:
        return self.tables[model.number]

    # -- calls

    def reserve(
        self,
        model: ModelTable,
        keys: list[bytes],
        parents: list[bytes | None],
        storages: list[int] | None = None,
    ) -> list[int]:
        self.session += 1
        storages = storages or [7] * len(keys)
        slots = self.index.free_slots(len(keys))
        assert slots.tolist() == self.model.next_slots(len(keys))
        generations = self.index.next_generations(slots)
        assert generations.tolist() == [self.model.next_generation(slot) for slot in slots]
        self.index.reserve(
            self.table(model), slots, generations, array("H", storages), keys, parents, self.session
        )
        self.model.reserve(model, slots.tolist(), storages, keys, parents, self.session)
        return slots.tolist()

    def record(self, model: ModelTable, parts_of: dict[int, set[int]], *, whole: bool) -> None:
        """Record parts of slots of one table; `whole`: all parts of all of them, by the short form."""
        count = len(model.parts)
        sums, masks = array("Q"), array("Q")
        for slot, parts in parts_of.items():
            wanted = range(count) if whole else parts
            sums.extend(slot * 100 + part + 1 if part in wanted else 0 for part in range(count))
            masks.append(sum(1 << part for part in wanted))
            for part in wanted:
                self.model.record(slot, part, slot * 100 + part + 1)
        slots = array("I", parts_of)
        self.index.record_parts(slots, None if whole else masks, sums.tobytes(), self.table(model))

    def publish(self, slots: list[int]) -> None:
        self.index.publish(array("I", slots))
        self.model.publish(slots)

    def reveal(self, slots: list[int]) -> None:
        self.index.reveal(array("I", slots))
        self.model.reveal(slots)

    def serve(self, slots: list[int]) -> None:
        self.publish(slots)
        self.reveal(slots)

    def retire(self, slots: list[int]) -> None:
        rows = {slot: self.model.rows[slot] for slot in slots}
        uppers = {slot: self.model.live(row.table.home, row.needs() or b"") for slot, row in rows.items()}
        leaves = self.index.retire(array("I", slots))
        expected = self.model.retire(slots)
        assert {slot for slot in leaves if self.index.state[slot] != DELETING} == expected
        for slot, upper in uppers.items():
            if upper is not None and upper not in rows:
                # A prefix was used when what hangs on it was: it must not look colder than that.
                assert self.index.used_ms[upper] >= self.index.used_ms[slot]

    def release(self, slots: list[int]) -> None:
        self.index.release(array("I", slots))
        self.model.release(slots)

    def drop(self, storage: int) -> None:
        """The storage lost all that it had."""
        slots = self.index.in_storage(storage)
        assert slots.tolist() == self.model.in_storage(storage)
        leaves = self.index.drop(slots)
        assert set(leaves) == self.model.drop(slots.tolist())
        assert not self.index.in_storage(storage)

    def gone(self) -> int:
        """A slot that was used and is free."""
        model = self.models[-1]
        (slot,) = self.reserve(model, [KEYS[-1]], [None])
        self.retire([slot])
        self.release([slot])
        return slot

    def touch(self, slot: int) -> None:
        self.used_ms += 1
        self.index.used_ms[slot] = self.used_ms

    # -- comparison

    def compare(self, rng: random.Random) -> None:
        index, model = self.index, self.model
        assert len(index) == len(model.generations)
        assert index.deleting_count == sum(model.deleting(table) for table in self.models)
        for slot, generation in enumerate(model.generations):
            assert index.generation[slot] == generation
            row = model.rows.get(slot)
            if row is None:
                assert index.state[slot] == GONE and not index.visible[slot]
                continue
            assert index.state[slot] == row.state
            assert index.is_deleting(slot) == (row.state == DELETING)
            assert (index.key[slot], index.parent[slot]) == (row.key, row.parent)
            assert (index.table[slot], index.storage[slot]) == (row.table.number, row.storage)
            assert (index.session[slot], bool(index.visible[slot])) == (row.session, row.visible)
            assert index.children[slot] == model.children(slot)
            assert index.done[slot] == sum(1 << part for part in row.sums)
            sums = index.sums[slot] or bytes(8 * len(row.table.parts))
            assert array("Q", sums).tolist() == [
                row.sums.get(part, 0) for part in range(len(row.table.parts))
            ]
        for one in self.models:
            self._compare_table(one, rng)

    def _compare_table(self, one: ModelTable, rng: random.Random) -> None:
        index, model, table = self.index, self.model, self.table(one)
        assert table.pending == model.pending(one)
        assert table.blocks_deleting == model.deleting(one)
        keys = rng.sample(KEYS, len(KEYS))
        found = index.find(table, keys)
        assert found == [model.live(one, key) for key in keys]
        assert table.slots == {key: slot for key, slot in zip(keys, found, strict=True) if slot is not None}
        slots, flags = index.visible_of(table, keys)
        assert slots == found
        assert [bool(flag) for flag in flags] == [model.visible(one, key) is not None for key in keys]
        for start in range(0, 30, 7):
            for parent in (None, KEYS[start - 1], b"x" * 16):
                run = KEYS[start : start + rng.randint(1, 10)]
                prefix, span = index.visible_prefix(table, run, parent)
                assert prefix == model.prefix(one, run, parent)
                assert span is None or prefix == list(range(*span))
                self._compare_places(prefix, span)

    def _compare_places(self, slots: list[int], span: tuple[int, int] | None) -> None:
        """The same whether or not the slots are known to be one run."""
        rows = [self.model.rows[slot] for slot in slots]
        sums = b"".join(self.index.sums[slot] for slot in slots)
        for known in {None, span}:
            generations, storages, checksums = self.index.places(slots, known)
            assert generations.tolist() == [self.model.generations[slot] for slot in slots]
            assert storages.tolist() == [row.storage for row in rows]
            assert checksums == sums


class Walk:
    """A random life of a pair."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.rng = random.Random(seed)

    def slots(self, *states: int, at_least: int = 1) -> list[int]:
        """Some slots in these states, in ascending or random order."""
        rows = self.pair.model.rows
        found = [slot for slot, row in rows.items() if row.state in states]
        if len(found) < at_least:
            return []
        picked = self.rng.sample(found, self.rng.randint(1, min(len(found), 12)))
        return sorted(picked) if self.rng.random() < 0.5 else picked

    def reserve(self) -> None:
        model = self.rng.choice(self.pair.models)
        start, count = self.rng.randrange(len(KEYS)), self.rng.randint(1, 9)
        keys = [key for key in KEYS[start : start + count] if self.pair.model.live(model, key) is None]
        if self.rng.random() < 0.3:
            keys = keys[:: self.rng.randint(1, 3)]
        if not keys:
            return
        parents: list[bytes | None] = [KEYS[at - 1] if (at := KEYS.index(key)) else None for key in keys]
        if self.rng.random() < 0.2:  # another tree over the same keys: children of something else
            parents = [None if self.rng.random() < 0.5 else self._elder(key) for key in keys]
        self.pair.reserve(model, keys, parents, [self.rng.randint(1, 3) for _ in keys])

    def _elder(self, key: bytes) -> bytes | None:
        at = KEYS.index(key)
        return KEYS[self.rng.randrange(at)] if at else None

    def record(self) -> None:
        slots = self.slots(WRITING)
        by_table: dict[int, list[int]] = {}
        for slot in slots:
            by_table.setdefault(self.pair.model.rows[slot].table.number, []).append(slot)
        for number, group in by_table.items():
            model = next(one for one in self.pair.models if one.number == number)
            parts = range(len(model.parts))
            fresh = not any(self.pair.model.rows[slot].sums for slot in group)
            wanted = {
                slot: {
                    part
                    for part in parts
                    if part not in self.pair.model.rows[slot].sums and self.rng.random() < 0.6
                }
                for slot in group
            }
            self.pair.record(model, wanted, whole=fresh and self.rng.random() < 0.5)

    def step(self) -> None:
        pair, rng = self.pair, self.rng
        act = rng.choice(("reserve", "reserve", "record", "publish", "reveal", "retire", "release", "touch"))
        if act == "reserve":
            self.reserve()
        elif act == "record":
            self.record()
        elif act == "publish":
            pair.publish(self.slots(WRITING))
        elif act == "reveal":
            pair.reveal(self.slots(SERVING, DELETING))
        elif act == "retire":
            pair.retire(self.slots(WRITING, SERVING))
        elif act == "release" and rng.random() < 0.2:
            pair.drop(rng.randint(1, 3))
        elif act == "release":
            pair.release(self.slots(DELETING))
        else:
            for slot in self.slots(SERVING):
                pair.touch(slot)
