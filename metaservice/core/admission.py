"""How many new blocks of a request get in, and into which storages: hard limits, eviction to make room.

Limits hold for what is being written or serves; blocks whose deletion was decided count as freed. A storage's
capacity is physical: deletions that a worker did not confirm in time count against it until they are done.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from .eviction import Plan
from .index import Table
from .memory import Memory
from .model import EvictionPolicy, Limits, SwitchMode, SwitchScope
from .outcomes import RefusedReason
from .state import Group, Instance, State, Storage, Usage

_REASON = {
    SwitchScope.tenant: RefusedReason.quota_tenant,
    SwitchScope.group: RefusedReason.quota_group,
    SwitchScope.instance: RefusedReason.quota_instance,
}


class Admission(Struct):
    """`count` blocks get in, `placed` in (storage, blocks) order; `reason` is why no more did; `victims` go
    for them."""

    count: int
    placed: list[tuple[Storage, int]]
    reason: RefusedReason
    victims: list[int]


class Freed:
    """Room that the victims chosen so far will give, per usage."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._blocks: dict[Usage, int] = {}
        self._bytes: dict[Usage, int] = {}

    def add(self, slot: int) -> None:
        index = self._state.index
        table = index.tables[index.table[slot]]
        instance = self._state.instances[table.instance]
        storage = self._state.storage_of[index.storage[slot]]
        for usage in (*self._state.scopes(instance), storage.usage):
            self._blocks[usage] = self._blocks.get(usage, 0) + 1
            self._bytes[usage] = self._bytes.get(usage, 0) + table.size_bytes

    def blocks(self, usage: Usage) -> int:
        """Blocks that the victims free in the usage."""
        return self._blocks.get(usage, 0)

    def bytes(self, usage: Usage) -> int:
        """Bytes that the victims free in the usage."""
        return self._bytes.get(usage, 0)

    def room(self, usage: Usage, size_bytes: int) -> int | None:
        """How many more blocks of `size_bytes` the budget takes with the victims gone; None: no limit."""
        rooms = []
        if usage.budget_bytes is not None:
            rooms.append((usage.budget_bytes - usage.bytes + self._bytes.get(usage, 0)) // size_bytes)
        if usage.budget_blocks is not None:
            rooms.append(usage.budget_blocks - usage.blocks + self._blocks.get(usage, 0))
        return max(0, min(rooms)) if rooms else None

    def storage_room(self, storage: Storage, size_bytes: int, overdue_bytes: int) -> int | None:
        """How many more blocks the storage takes, None for no limit."""
        budget_bytes = storage.usage.budget_bytes
        if budget_bytes is None:
            return None
        held = storage.usage.bytes - self._bytes.get(storage.usage, 0) + overdue_bytes
        return max(0, (budget_bytes - held) // size_bytes)


def admit(
    state: State, memory: Memory, instance: Instance, table: Table, wanted: int, protected: Iterable[int]
) -> Admission:
    """Room for `wanted` new blocks of the table. `protected` slots are needed by the request itself."""
    usable = [
        storage
        for name in instance.group.storages
        if (storage := state.storages[name]).switch is SwitchMode.normal and storage.open
    ]
    if not usable:
        return Admission(0, [], RefusedReason.no_storage, [])
    plan = Plan(state.index, protected)
    freed = Freed(state)
    evicting = instance.group.eviction is EvictionPolicy.lru
    size = table.size_bytes
    count, reason = wanted, RefusedReason.none
    for usage in state.scopes(instance):
        room = freed.room(usage, size)
        if memory.spans and room is not None and room < wanted:
            memory.errander.ask(usage, wanted * size, wanted, more=False)
        if evicting and room is not None and room < count:
            tables = list(tables_of(state, usage))
            while room is not None and room < count:
                victim = plan.pick(tables)
                if victim is None:
                    break
                freed.add(victim)
                room = freed.room(usage, size)
        if room is not None and room < count:
            count, reason = room, _REASON[usage.scope]
    placed, short = _place(state, memory, usable, count, size, plan if evicting else None, freed)
    if short is not RefusedReason.none:
        count, reason = sum(blocks for _, blocks in placed), short
    plan.close()
    return Admission(count, placed, reason, plan.victims)


def _place(
    state: State,
    memory: Memory,
    usable: list[Storage],
    count: int,
    size: int,
    plan: Plan | None,
    freed: Freed,
) -> tuple[list[tuple[Storage, int]], RefusedReason]:
    """Fill the storages in the group's order; then make room in them, in the same order."""
    placed: dict[Storage, int] = {}
    left = count
    overdue = memory.deletions.overdue_bytes
    for storage in usable:
        if memory.spans:
            memory.errander.ask(storage.usage, left * size, left, more=False)
        room = freed.storage_room(storage, size, overdue.get(storage.number, 0))
        take = left if room is None else min(left, room)
        if take:
            placed[storage] = take
            left -= take
        if not left:
            return list(placed.items()), RefusedReason.none
    for storage in usable if plan is not None else ():
        tables = list(tables_of(state, storage.usage))
        while left and plan is not None:
            victim = plan.pick(tables, storage.number)
            if victim is None:
                break
            freed.add(victim)
            room = freed.storage_room(storage, size, overdue.get(storage.number, 0))
            took = placed.get(storage, 0)
            if room is not None and room > took:
                extra = min(left, room - took)
                placed[storage] = took + extra
                left -= extra
        if plan is not None:
            plan.close()
    if not left:
        return list(placed.items()), RefusedReason.none
    backlog = any(overdue.get(storage.number) for storage in usable)
    return list(placed.items()), RefusedReason.deletion_backlog if backlog else RefusedReason.storage_full


def tables_of(state: State, usage: Usage) -> Iterator[Table]:
    """The tables whose blocks count in a usage and may be evicted (their group's policy allows it)."""
    one = usage.scope is SwitchScope.instance
    for instance in (state.instances[usage.id],) if one else state.instances.values():
        group = instance.group
        if group.eviction is EvictionPolicy.lru and _counts_in(instance, group, usage, state):
            yield from instance.tables.values()


def _counts_in(instance: Instance, group: Group, usage: Usage, state: State) -> bool:
    if usage.scope is SwitchScope.storage:
        return True  # a group's storages may have changed since: the picker looks at each block's own storage
    return usage in state.scopes(instance)


def watermark_victims(state: State, memory: Memory, count_max: int) -> list[int]:
    """Victims that bring every pressed scope from above its high watermark to its low one (at most
    `count_max` now)."""
    plan = Plan(state.index)
    freed = Freed(state)
    for usage in list(memory.pressed):
        high, low = watermarks(state, memory.limits, usage)
        if not usage.over(high):
            memory.pressed.discard(usage)
            continue
        may_grow = memory.errander.may_grow(usage) if memory.spans else (False, False)
        over_bytes = not may_grow[0] and usage.excess_bytes(high) > 0
        over_blocks = not may_grow[1] and usage.excess_blocks(high) > 0
        if not (over_bytes or over_blocks):
            continue  # its slice is nearly full, the limit is not
        if usage.scope is SwitchScope.storage and _spills(state, memory, state.storages[usage.id]):
            continue  # what is new goes to the next one: nothing has to go for it
        tables = list(tables_of(state, usage))
        storage = state.storages[usage.id].number if usage.scope is SwitchScope.storage else None
        blocks = 0 if may_grow[1] else usage.excess_blocks(low) - freed.blocks(usage)
        size = 0 if may_grow[0] else usage.excess_bytes(low) - freed.bytes(usage)
        while len(plan.victims) < count_max and (blocks > 0 or size > 0):
            victim = plan.pick(tables, storage)
            if victim is None:
                break
            blocks -= 1
            size -= state.index.tables[state.index.table[victim]].size_bytes
            freed.add(victim)
        plan.close()
    return plan.victims


def _spills(state: State, memory: Memory, storage: Storage) -> bool:
    """Whether everybody who fills this storage has another behind it that has room. A small fast storage
    before a large one stays full then, and nothing is evicted while the large one is empty."""
    orders = [group.storages for group in state.groups.values() if storage.id in group.storages]
    return bool(orders) and all(
        any(_has_room(state, memory, state.storages[name]) for name in order[order.index(storage.id) + 1 :])
        for order in orders
    )


def _has_room(state: State, memory: Memory, storage: Storage) -> bool:
    if storage.switch is not SwitchMode.normal or not storage.open:
        return False
    if memory.spans and any(memory.errander.may_grow(storage.usage)):
        return True
    usage, (high, _) = storage.usage, watermarks(state, memory.limits, storage.usage)
    return usage.budget_bytes is None or usage.excess_bytes(high) < 0


def press(state: State, memory: Memory, usage: Usage) -> None:
    """The use of a scope, or its limit, changed: ticks look at it when it is above its high watermark."""
    if (usage.budget_bytes is not None or usage.budget_blocks is not None) and usage.over(
        watermarks(state, memory.limits, usage)[0]
    ):
        memory.pressed.add(usage)


def watermarks(state: State, limits: Limits, usage: Usage) -> tuple[int, int]:
    """(high, low) in thousandths of the scope's limit: the group's own for groups and instances."""
    if usage.scope is SwitchScope.group:
        group = state.groups[usage.id]
    elif usage.scope is SwitchScope.instance:
        group = state.instances[usage.id].group
    else:
        return limits.high_permille, limits.low_permille
    return group.high_permille, group.low_permille
