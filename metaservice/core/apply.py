"""The only mutator: takes an event into the state. Live, in replay and on followers it is the same call.

It decides nothing. What contradicts the state is a programmer's error and an assertion: a liveness bug is
better than a wrong answer. Beside the state it keeps leader memory in step (candidates for eviction,
deadlines, what awaits durability).
"""

from array import array
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from . import events as ev
from . import told
from .admission import press
from .apply_catalogue import APPLY
from .events import SPREAD
from .eviction import offer
from .ids import caller_name
from .index import DELETING, Table, packed_slots, split, unpacked_slots
from .memory import Memory
from .model import ENDED_SESSIONS, REMEMBERED_REQUESTS, SessionState
from .outcomes import FinishStatus
from .state import Ended, Instance, Pool, Session, State, Storage, Usage
from .summary import StateDiverged, summary

SERVES, PENDING, FREED, REMOVED = (
    int(FinishStatus.serving),
    int(FinishStatus.pending),
    int(FinishStatus.freed),
    int(FinishStatus.removed),
)


def apply(state: State, memory: Memory, event: ev.Event) -> None:
    """Take one event: seq + 1."""
    state.seq += 1
    state.now_ms = max(state.now_ms, event.now_ms)
    if type(event) in SPREAD:
        memory.spread_seq = state.seq
    _APPLY[type(event)](state, memory, event)


# ---------------------------------------------------------------- epoch


def _took_over(state: State, memory: Memory, event: ev.TookOver) -> None:
    assert event.epoch > state.epoch, f"epoch {event.epoch} after {state.epoch}"
    state.epoch = event.epoch
    state.cluster = event.cluster
    state.takeover_ms = event.now_ms
    memory.took_over()
    for session in state.sessions.values():
        session.deadline_ms = max(session.deadline_ms, event.now_ms + session.ttl_ms)
        memory.watch_session(session.number, session.deadline_ms)
    for kind in ("engine", "worker"):
        for id in state.members(kind):
            memory.beats[kind, id] = event.now_ms


# ---------------------------------------------------------------- writes


def _write_started(state: State, memory: Memory, event: ev.WriteStarted) -> None:
    index = state.index
    table = index.tables[event.table]
    instance = state.instances[table.instance]
    slots = unpacked_slots(event.slots)
    generations = array("I", event.generations)
    storages = array("H", event.storages)
    keys = split(event.keys, instance.fingerprint.key_length)
    parents = list(event.parents) if event.parents is not None else [event.parent, *keys[:-1]]
    index.reserve(table, slots, generations, storages, keys, parents, event.session)
    session = Session(
        event.session, event.engine, event.incarnation, table, event.ttl_ms, event.deadline_ms, slots,
        generations,
        bytearray((PENDING,)) * len(slots),
    )  # fmt: skip
    if event.tokens is not None:
        label = (event.lora, event.salt) if event.lora or event.salt else None
        index.record_tokens(slots, event.tokens, label)
    state.session_next = max(state.session_next, event.session + 1)
    state.sessions[event.session] = session
    state.sessions_of.setdefault(event.engine, set()).add(event.session)
    memory.watch_session(session.number, session.deadline_ms)
    _count(state, memory, instance, table, len(slots))
    for number in set(storages):
        _count_storage(state, memory, state.storage_of[number], table, storages.count(number))
    if event.request_id:
        caller = caller_name(event.engine, event.incarnation)
        _remember(state, caller, event.request_id, replace(event, keys=b"", parents=None, tokens=None))


def _write_finished(state: State, memory: Memory, event: ev.WriteFinished) -> None:
    index = state.index
    session = state.sessions[event.session]
    table = session.table
    slots = unpacked_slots(event.slots)
    masks = array("Q", event.masks) if event.masks else None
    index.record_parts(slots, masks, event.checksums, table)
    if event.status.count(SERVES) == len(slots):
        published, freed = slots, array("I")
    else:
        published = array("I", [slot for slot, at in zip(slots, event.status, strict=True) if at == SERVES])
        freed = array("I", [slot for slot, at in zip(slots, event.status, strict=True) if at == FREED])
    if published:
        index.publish(published)
        used = index.used_ms
        for slot in published:
            used[slot] = event.now_ms
        memory.unrevealed.append((state.seq, published))
        offer(index, table, published)
    if len(published) == len(session.slots):
        session.status[:] = event.status
    else:
        rows = session.rows()
        for slot, status in zip(slots, event.status, strict=True):
            session.status[rows[slot]] = status
    session.open -= len(published) + len(freed)
    if freed:
        _retire(state, memory, freed, event.not_before_ms)
    if event.request_id:
        caller = caller_name(session.engine, session.incarnation)
        _remember(state, caller, event.request_id, replace(event, checksums=b"", masks=b""))
    if not session.open:
        _end(state, session, SessionState.finished, 0)


def _session_renewed(state: State, memory: Memory, event: ev.SessionRenewed) -> None:
    session = state.sessions[event.session]
    session.deadline_ms = event.deadline_ms
    memory.watch_session(session.number, event.deadline_ms)


def _session_ended(state: State, memory: Memory, event: ev.SessionEnded) -> None:
    session = state.sessions[event.session]
    rows = [row for row, status in enumerate(session.status) if status == PENDING]
    for row in rows:
        session.status[row] = FREED
    assert len(rows) == event.freed, "a session's open count is wrong"
    _retire(state, memory, array("I", [session.slots[row] for row in rows]), event.not_before_ms)
    _end(state, session, SessionState.expired if event.expired else SessionState.aborted, event.freed)


def _end(state: State, session: Session, how: SessionState, freed: int) -> None:
    session.open = 0
    del state.sessions[session.number]
    of_engine = state.sessions_of[session.engine]
    of_engine.discard(session.number)
    if not of_engine:
        del state.sessions_of[session.engine]
    state.ended[session.number] = Ended(
        session.number, int(how), freed, session.engine, session.incarnation, packed_slots(session.slots),
        session.generations.tobytes(), bytes(session.status),
    )  # fmt: skip
    if len(state.ended) > ENDED_SESSIONS:
        state.ended.popitem(last=False)


# ---------------------------------------------------------------- blocks go


def _blocks_removed(state: State, memory: Memory, event: ev.BlocksRemoved) -> None:
    slots = unpacked_slots(event.slots)
    hit = _sessions_of(state, slots)
    _retire(state, memory, slots, event.not_before_ms)
    _rows_removed(state, hit)
    if event.client and event.request_id:
        _remember(state, event.client, event.request_id, event)


def _sessions_of(state: State, slots: "array[int]") -> dict[int, list[int]]:
    """Session -> which of the slots are being written under it."""
    session = state.index.session
    hit: dict[int, list[int]] = {}
    for slot in slots:
        number = session[slot]
        if number:
            hit.setdefault(number, []).append(slot)
    return hit


def _rows_removed(state: State, hit: dict[int, list[int]]) -> None:
    """Sessions lose these of their open locations."""
    for number, lost in hit.items():
        session = state.sessions[number]
        rows = session.rows()
        for slot in lost:
            session.status[rows[slot]] = REMOVED
        session.open -= len(lost)
        if not session.open:
            _end(state, session, SessionState.finished, 0)


def _retire(state: State, memory: Memory, slots: "array[int]", not_before_ms: int) -> None:
    """Writing or serving -> deleting, in the index, the usages and the deletion queue."""
    told.withdraw(state, memory, slots)
    _offer(state, state.index.retire(slots))
    for slot in slots:
        state.deleting[slot] = not_before_ms
    memory.undeleted.append((state.seq, slots, not_before_ms))
    for table, storage, count in _by_table_and_storage(state, slots):
        usages = (*state.scopes(state.instances[table.instance]), storage.usage)
        _changed(memory, usages)
        for usage in usages:
            usage.bytes -= count * table.size_bytes
            usage.blocks -= count
            usage.deleting_bytes += count * table.size_bytes
            usage.deleting_blocks += count


def _offer(state: State, leaves: list[int]) -> None:
    """These lost their last dependent: those that serve are candidates for eviction now."""
    index = state.index
    for leaf in leaves:
        table = index.tables[index.table[leaf]]
        if table.slots.get(index.key[leaf]) == leaf and not index.session[leaf]:
            offer(index, table, (leaf,))


def _pool_changed(state: State, memory: Memory, event: ev.PoolChanged) -> None:
    storage = state.storages[event.storage]
    if storage.usage.blocks or storage.usage.deleting_blocks:
        _lose(state, memory, storage)
    pool = Pool(event.worker, event.incarnation, state.session_next) if event.incarnation else None
    storage.change_pool(pool)


def _lose(state: State, memory: Memory, storage: Storage) -> None:
    """The bytes of the storage are gone, and so are its locations, in whatever state they were."""
    index = state.index
    slots = index.in_storage(storage.number)
    deleting = array("I", [slot for slot in slots if index.state[slot] == DELETING])
    live = array("I", [slot for slot in slots if index.state[slot] != DELETING])
    hit = _sessions_of(state, live)
    told.withdraw(state, memory, live)
    memory.lost(storage.number, slots, deleting)
    for table, _, count in _by_table_and_storage(state, live):
        usages = (*state.scopes(state.instances[table.instance]), storage.usage)
        _changed(memory, usages)
        for usage in usages:
            usage.bytes -= count * table.size_bytes
            usage.blocks -= count
    _deleted(state, memory, deleting)
    _offer(state, index.drop(slots))
    _rows_removed(state, hit)
    if memory.spans:
        memory.errander.emptied(storage.usage)


def _locations_gone(state: State, memory: Memory, event: ev.LocationsGone) -> None:
    slots = unpacked_slots(event.slots)
    memory.deletions.gone(slots)
    _deleted(state, memory, slots)
    state.index.release(slots)


def _deleted(state: State, memory: Memory, slots: "array[int]") -> None:
    """The usages and the deletion queue no longer have these deleting locations."""
    for table, storage, count in _by_table_and_storage(state, slots):
        usages = (*state.scopes(state.instances[table.instance]), storage.usage)
        _changed(memory, usages)
        for usage in usages:
            usage.deleting_bytes -= count * table.size_bytes
            usage.deleting_blocks -= count
        if memory.spans and not (storage.usage.blocks or storage.usage.deleting_blocks):
            memory.errander.emptied(storage.usage)
    for slot in slots:
        del state.deleting[slot]


def _hot_blocks(state: State, memory: Memory, event: ev.HotBlocks) -> None:
    used = state.index.used_ms
    for slot, at_ms in zip(unpacked_slots(event.slots), array("Q", event.used_ms), strict=True):
        used[slot] = max(used[slot], at_ms)


def _state_checked(state: State, memory: Memory, event: ev.StateChecked) -> None:
    found = summary(state)
    if found != event.summary:
        raise StateDiverged(f"seq {state.seq}: the leader's state added up to something else (I6)")
    memory.checked_seq = state.seq
    memory.checked_at_ms = event.now_ms


def _by_table_and_storage(state: State, slots: "array[int]") -> list[tuple[Table, Storage, int]]:
    index = state.index
    counts: dict[tuple[int, int], int] = {}
    for slot in slots:
        at = (index.table[slot], index.storage[slot])
        counts[at] = counts.get(at, 0) + 1
    return [
        (index.tables[table], state.storage_of[storage], count) for (table, storage), count in counts.items()
    ]


def _changed(memory: Memory, usages: tuple[Usage, ...]) -> None:
    if memory.spans:
        memory.errander.changed.update(usages)


def _count(state: State, memory: Memory, instance: Instance, table: Table, count: int) -> None:
    usages = state.scopes(instance)
    _changed(memory, usages)
    for usage in usages:
        usage.bytes += count * table.size_bytes
        usage.blocks += count
        press(state, memory, usage)


def _count_storage(state: State, memory: Memory, storage: Storage, table: Table, count: int) -> None:
    storage.usage.bytes += count * table.size_bytes
    storage.usage.blocks += count
    _changed(memory, (storage.usage,))
    press(state, memory, storage.usage)


def _remember(state: State, client: str, request_id: str, event: Any) -> None:
    state.remembered[client, request_id] = event
    if len(state.remembered) > REMEMBERED_REQUESTS:
        state.remembered.popitem(last=False)


_APPLY: dict[type, Callable[[State, Memory, Any], None]] = {
    ev.TookOver: _took_over,
    **APPLY,
    ev.WriteStarted: _write_started,
    ev.WriteFinished: _write_finished,
    ev.SessionRenewed: _session_renewed,
    ev.SessionEnded: _session_ended,
    ev.BlocksRemoved: _blocks_removed,
    ev.PoolChanged: _pool_changed,
    ev.LocationsGone: _locations_gone,
    ev.HotBlocks: _hot_blocks,
    ev.Announced: told.take,
    ev.StateChecked: _state_checked,
}
