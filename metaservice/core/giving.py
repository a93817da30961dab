"""A shard gives budget up: what it does not use, and what it evicts for others that have less than their
share."""

from .admission import Freed, tables_of
from .commands import GiveBudget
from .escrow import find_usage
from .events import BlocksRemoved, Event, SliceReturned
from .eviction import Plan
from .index import packed_slots
from .memory import Memory
from .model import SwitchScope
from .replies import Done, Give
from .state import State, Usage

Decision = tuple[object, list[Event]]


def give_budget(state: State, memory: Memory, command: GiveBudget, now_ms: int) -> Decision:
    """Hear the catalogue's answer. It may come late: what is given is looked at anew, and never what is in
    use."""
    memory.errander.heard(command.settled)
    plan = Plan(state.index)
    freed = Freed(state)
    given: list[tuple[Usage, int, int]] = []
    for give in command.settled.give:
        usage = find_usage(state, give.scope, give.id)
        if usage is None or usage.scope is SwitchScope.instance:
            continue
        if give.evict:
            _make_room(state, memory, plan, freed, usage, give)
        amounts = (
            min(asked, max(0, free)) if free is not None else 0
            for asked, free in zip((give.bytes, give.blocks), _free(memory, usage, freed), strict=True)
        )
        given.append((usage, *amounts))  # type: ignore[arg-type]
    plan.close()
    events: list[Event] = []
    if plan.victims:
        wait_ms = memory.limits.reclaim_delay_ms
        slots = packed_slots(plan.victims)
        events.append(BlocksRemoved(now_ms, slots, "quota", now_ms + wait_ms, "", "", b""))
    number = state.return_next if state.shard else 0
    for usage, size_bytes, blocks in given:
        if size_bytes or blocks:
            events.append(
                SliceReturned(
                    now_ms, number, usage.scope, usage.id, size_bytes or None, blocks or None, False,
                    state.catalogue_version,
                )
            )  # fmt: skip
            number += 1 if number else 0
    return Done(), events


def _free(memory: Memory, usage: Usage, freed: Freed) -> tuple[int | None, int | None]:
    """(bytes, blocks) of the slice that are not in use once the victims are gone; None: no limit."""
    used_bytes, used_blocks = memory.errander.used(usage)
    free_bytes = None if usage.budget_bytes is None else usage.budget_bytes - used_bytes + freed.bytes(usage)
    free_blocks = (
        None if usage.budget_blocks is None else usage.budget_blocks - used_blocks + freed.blocks(usage)
    )
    return free_bytes, free_blocks


def _make_room(state: State, memory: Memory, plan: Plan, freed: Freed, usage: Usage, give: Give) -> None:
    """Evict in the scope until what is asked for is free, as far as its groups' policies allow."""
    tables = list(tables_of(state, usage))
    storage = state.storages[usage.id].number if usage.scope is SwitchScope.storage else None
    while len(plan.victims) < memory.limits.evict_batch_max:
        free_bytes, free_blocks = _free(memory, usage, freed)
        lacks_bytes = free_bytes is not None and free_bytes < give.bytes
        lacks_blocks = free_blocks is not None and free_blocks < give.blocks
        if not (lacks_bytes or lacks_blocks):
            break
        victim = plan.pick(tables, storage)
        if victim is None:
            break
        freed.add(victim)
    plan.close()
