"""Is a write about to meet a slice that is too small for it, though the limit is not reached?

Asked before a write is submitted, so that its shard can ask the catalogue first. Nothing depends on the
answer but which writes wait a moment: admission holds to the slice whatever was asked.
"""

from .commands import StartWrite
from .index import Table
from .memory import Memory
from .model import SwitchMode
from .state import Instance, State, Usage


def short(state: State, memory: Memory, command: StartWrite) -> bool:
    """Whether asking may help; what the write lacks is noted as wanted."""
    instance = state.instances.get(command.instance)
    if instance is None or instance.shard != state.shard:
        return False
    if instance.retiring or instance.effective is not None:
        return False
    table = instance.primary if command.group is None else instance.tables.get(command.group)
    if table is None:
        return False
    count = len(command.keys)
    if not _lacks(state, memory, instance, table, count):
        return False
    slots = table.slots
    count = sum(key not in slots for key in set(command.keys))
    if not count:
        return False
    helps = False
    for usage, blocks in _lacks(state, memory, instance, table, count):
        helps |= memory.errander.ask(usage, blocks * table.size_bytes, blocks, more=True)
    return helps


def _lacks(
    state: State, memory: Memory, instance: Instance, table: Table, count: int
) -> list[tuple[Usage, int]]:
    """Scopes whose slices do not take `count` more blocks, and how many are wanted of each."""
    size_bytes = count * table.size_bytes
    group = instance.group
    found = [
        (usage, count)
        for usage in (group.usage, group.tenant.usage)
        if (usage.budget_bytes is not None and usage.budget_bytes - usage.bytes < size_bytes)
        or (usage.budget_blocks is not None and usage.budget_blocks - usage.blocks < count)
    ]
    left = count
    overdue = memory.deletions.overdue_bytes
    for name in group.storages:
        storage = state.storages[name]
        budget_bytes = storage.usage.budget_bytes
        if storage.switch is not SwitchMode.normal or not storage.open:
            continue
        if budget_bytes is None:
            break
        free_bytes = budget_bytes - storage.usage.bytes - overdue.get(storage.number, 0)
        room = max(0, free_bytes) // table.size_bytes
        if room >= left:
            break
        found.append((storage.usage, left))
        if memory.errander.may_grow(storage.usage)[0]:
            break  # it comes first: what it may become is asked for before the next one is used
        left -= room
    return found
