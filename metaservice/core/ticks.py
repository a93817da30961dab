"""What time brings: every rule that fires by the clock, as steps. Each step is decided on the state that the
step before left.

Nothing here waits for a caller: expired sessions free their locations, silent members expire, leases end,
tasks go to another worker, watermarks are kept, retiring instances shrink, a summary of what is hot rides the
journal, and so does what the state adds up to, for replicas to compare.
"""

from array import array
from collections.abc import Iterator
from itertools import islice

from . import announcing
from .admission import watermark_victims
from .events import BlocksRemoved, Event, HotBlocks, InstanceGone, StateChecked
from .index import packed_slots
from .membership import expiries
from .memory import Memory
from .state import Instance, State
from .summary import summary
from .writes import session_end

_SESSIONS_PER_TICK = 4_096


def tick(state: State, memory: Memory, now_ms: int) -> Iterator[list[Event]]:
    """Lists of events; the caller applies each before it asks for the next."""
    memory.leases.sweep(now_ms)
    memory.deletions.expire(now_ms)
    yield [
        session_end(state.sessions[number], memory, True, "", now_ms)
        for number in memory.overdue_sessions(now_ms, _SESSIONS_PER_TICK)
    ]
    if state.leads_catalogue:
        yield expiries(state, memory, now_ms)
    if memory.pressed:
        victims = watermark_victims(state, memory, memory.limits.evict_batch_max)
        if victims:
            yield [_removed(memory, victims, "watermark", now_ms)]
    for id in list(state.retiring):
        instance = state.instances[id]
        if state.shards == 1 or instance.shard == state.shard:
            yield from _retire(state, memory, instance, now_ms)
    if memory.touched and now_ms - memory.hot_summary_at_ms >= memory.limits.hot_summary_ms:
        yield [_hot(state, memory, now_ms)]
    if state.seq > memory.checked_seq and now_ms - memory.checked_at_ms >= memory.limits.hot_summary_ms:
        yield [StateChecked(now_ms, summary(state))]


def _retire(state: State, memory: Memory, instance: Instance, now_ms: int) -> Iterator[list[Event]]:
    left = memory.limits.retire_batch_max
    slots: list[int] = []
    for table in instance.tables.values():
        slots += islice(table.slots.values(), left - len(slots))
    if slots:
        yield [_removed(memory, slots, "retired", now_ms)]
    elif not any(table.blocks_deleting for table in instance.tables.values()):
        if state.leads_catalogue:
            yield [InstanceGone(now_ms, instance.id)]
        else:
            memory.errander.drained.setdefault(instance.id, state.seq)  # the catalogue lets it go


def _removed(memory: Memory, slots: list[int], why: str, now_ms: int) -> BlocksRemoved:
    limits = memory.limits
    wait_ms = (
        limits.reclaim_delay_ms if why != "retired" else max(limits.reclaim_delay_ms, limits.late_write_ms)
    )
    return BlocksRemoved(now_ms, packed_slots(slots), why, now_ms + wait_ms, "", "", b"")


def _hot(state: State, memory: Memory, now_ms: int) -> HotBlocks:
    touched = memory.touched
    announcing.heated(state, memory, touched)
    event = HotBlocks(now_ms, packed_slots(touched), array("Q", touched.values()).tobytes())
    memory.touched = {}
    memory.hot_summary_at_ms = now_ms
    return event
