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
from .admission import watermarks
from .eviction import offer
from .ids import caller_name
from .index import Table, packed_slots, split, unpacked_slots
from .memory import Memory
from .model import (
    ENDED_SESSIONS,
    REMEMBERED_REQUESTS,
    RETIRED_INCARNATIONS,
    SessionState,
    SwitchMode,
    SwitchScope,
)  # fmt: skip
from .outcomes import FinishStatus
from .state import Ended, Group, Instance, Member, Session, State, Storage, Tenant, Usage

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
    _APPLY[type(event)](state, memory, event)


# ---------------------------------------------------------------- epoch


def _took_over(state: State, memory: Memory, event: ev.TookOver) -> None:
    assert event.epoch > state.epoch, f"epoch {event.epoch} after {state.epoch}"
    state.epoch = event.epoch
    state.cluster = event.cluster
    state.takeover_ms = event.now_ms
    for session in state.sessions.values():
        session.deadline_ms = max(session.deadline_ms, event.now_ms + session.ttl_ms)
        memory.watch_session(session.number, session.deadline_ms)
    for kind in ("engine", "worker"):
        for id in state.members(kind):
            memory.beats[kind, id] = event.now_ms


# ---------------------------------------------------------------- catalogue


def _tenant_put(state: State, memory: Memory, event: ev.TenantPut) -> None:
    tenant = state.tenants.setdefault(event.tenant, Tenant(event.tenant))
    tenant.quota = event.quota


def _tenant_deleted(state: State, memory: Memory, event: ev.TenantDeleted) -> None:
    memory.pressed.discard(state.tenants.pop(event.tenant).usage)
    state.switch_reasons.pop((SwitchScope.tenant, event.tenant), None)


def _storage_put(state: State, memory: Memory, event: ev.StoragePut) -> None:
    storage = state.storages.get(event.storage)
    if storage is None:
        storage = Storage(event.storage, event.number, event.kind, event.options)
        state.storages[event.storage] = storage
        state.storage_of[event.number] = storage
    storage.kind, storage.options = event.kind, event.options
    storage.fault_domain = event.fault_domain
    storage.capacity_bytes = event.capacity_bytes
    storage.usage.budget_bytes = event.capacity_bytes
    _press(state, memory, storage.usage)


def _storage_deleted(state: State, memory: Memory, event: ev.StorageDeleted) -> None:
    storage = state.storages.pop(event.storage)
    del state.storage_of[storage.number]
    memory.pressed.discard(storage.usage)
    state.switch_reasons.pop((SwitchScope.storage, event.storage), None)


def _group_put(state: State, memory: Memory, event: ev.GroupPut) -> None:
    group = state.groups.get(event.group)
    if group is None:
        group = state.groups[event.group] = Group(event.group, state.tenants[event.tenant])
    group.storages = event.storages
    group.quota = event.quota
    group.high_permille, group.low_permille = event.high_permille, event.low_permille
    group.eviction = event.eviction
    _press(state, memory, group.usage)
    for instance in state.instances.values():
        if instance.group is group:
            _press(state, memory, instance.usage)


def _group_deleted(state: State, memory: Memory, event: ev.GroupDeleted) -> None:
    memory.pressed.discard(state.groups.pop(event.group).usage)
    state.switch_reasons.pop((SwitchScope.group, event.group), None)


def _instance_put(state: State, memory: Memory, event: ev.InstancePut) -> None:
    instance = state.instances.get(event.instance)
    if instance is None:
        instance = make_instance(
            state, event.instance, state.groups[event.group], event.fingerprint, event.tables
        )
        state.table_next = max(state.table_next, *(number + 1 for number in event.tables))
        instance.effective = state.effective_switch(instance)
    instance.quota = event.quota


def make_instance(state: State, id: str, group: Group, fingerprint: Any, tables: tuple[int, ...]) -> Instance:
    """The instance with its key tables: the first full group (else the first) is the primary one."""
    instance = Instance(id, group, fingerprint)
    numbers = dict(zip((one.name for one in fingerprint.groups), tables, strict=True))
    first = min(fingerprint.groups, key=lambda one: one.kind != 0)
    made: dict[str, Table] = {}
    for one in (first, *(other for other in fingerprint.groups if other is not first)):
        parts = tuple(part for part in fingerprint.parts if part.group == one.name)
        primary = made.get(first.name)
        made[one.name] = Table(numbers[one.name], id, one, parts, primary)
    instance.primary = made[first.name]
    for one in fingerprint.groups:
        table = made[one.name]
        instance.tables[one.name] = table
        state.index.tables[table.number] = table
    state.instances[id] = instance
    return instance


def _instance_retired(state: State, memory: Memory, event: ev.InstanceRetired) -> None:
    state.instances[event.instance].retiring = True
    state.retiring[event.instance] = None


def _instance_gone(state: State, memory: Memory, event: ev.InstanceGone) -> None:
    instance = state.instances.pop(event.instance)
    del state.retiring[event.instance]
    for table in instance.tables.values():
        assert not table.slots and not table.blocks_deleting, "an instance goes that still has locations"
        del state.index.tables[table.number]
    memory.pressed.discard(instance.usage)
    state.switch_reasons.pop((SwitchScope.instance, event.instance), None)


def _budget_granted(state: State, memory: Memory, event: ev.BudgetGranted) -> None:
    if event.grant < state.grant_next:
        return  # this grant was taken before
    state.grant_next = event.grant + 1
    usage = _usage_of(state, event.scope, event.id)
    usage.budget_bytes, usage.budget_blocks = event.bytes, event.blocks
    _press(state, memory, usage)


def _usage_of(state: State, scope: SwitchScope, id: str) -> Usage:
    if scope is SwitchScope.tenant:
        return state.tenants[id].usage
    if scope is SwitchScope.group:
        return state.groups[id].usage
    return state.instances[id].usage


def _switch_set(state: State, memory: Memory, event: ev.SwitchSet) -> None:
    if event.scope is SwitchScope.cluster:
        state.switch = event.mode
    elif event.scope is SwitchScope.tenant:
        state.tenants[event.id].switch = event.mode
    elif event.scope is SwitchScope.group:
        state.groups[event.id].switch = event.mode
    elif event.scope is SwitchScope.instance:
        state.instances[event.id].switch = event.mode
    else:
        state.storages[event.id].switch = event.mode
    if event.mode is SwitchMode.normal:
        state.switch_reasons.pop((event.scope, event.id), None)
    else:
        state.switch_reasons[event.scope, event.id] = event.reason
    for instance in state.instances.values():
        instance.effective = state.effective_switch(instance)


# ---------------------------------------------------------------- membership


def _engine_registered(state: State, memory: Memory, event: ev.EngineRegistered) -> None:
    member = _registered(state.engines, event.engine, event.incarnation, event.now_ms)
    member.instance, member.rank = event.instance, event.rank


def _worker_registered(state: State, memory: Memory, event: ev.WorkerRegistered) -> None:
    member = _registered(state.workers, event.worker, event.incarnation, event.now_ms)
    member.storages = event.storages


def _registered(registry: dict[str, Member], id: str, incarnation: str, now_ms: int) -> Member:
    member = registry.get(id)
    if member is None:
        member = registry[id] = Member(id, incarnation, now_ms, retired=[])
    if member.incarnation != incarnation:
        keep = RETIRED_INCARNATIONS - 1
        member.retired = [*member.retired[-keep:], member.incarnation]
        member.incarnation = incarnation
    member.registered_ms = now_ms
    member.expired_ms = 0
    return member


def _member_expired(state: State, memory: Memory, event: ev.MemberExpired) -> None:
    state.members(event.kind)[event.id].expired_ms = event.now_ms
    memory.beats.pop((event.kind, event.id), None)


def _member_left(state: State, memory: Memory, event: ev.MemberLeft) -> None:
    del state.members(event.kind)[event.id]
    memory.beats.pop((event.kind, event.id), None)


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
    state.session_next = max(state.session_next, event.session + 1)
    state.sessions[event.session] = session
    state.sessions_of.setdefault(event.engine, set()).add(event.session)
    memory.watch_session(session.number, session.deadline_ms)
    _count(state, memory, instance, table, len(slots))
    for number in set(storages):
        _count_storage(state, memory, state.storage_of[number], table, storages.count(number))
    if event.request_id:
        caller = caller_name(event.engine, event.incarnation)
        _remember(state, caller, event.request_id, replace(event, keys=b"", parents=None))


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
    index = state.index
    slots = unpacked_slots(event.slots)
    hit: dict[int, list[int]] = {}
    for slot in slots:
        number = index.session[slot]
        if number:
            hit.setdefault(number, []).append(slot)
    _retire(state, memory, slots, event.not_before_ms)
    for number, lost in hit.items():
        session = state.sessions[number]
        rows = session.rows()
        for slot in lost:
            session.status[rows[slot]] = REMOVED
        session.open -= len(lost)
        if not session.open:
            _end(state, session, SessionState.finished, 0)
    if event.client and event.request_id:
        _remember(state, event.client, event.request_id, event)


def _retire(state: State, memory: Memory, slots: "array[int]", not_before_ms: int) -> None:
    """Writing or serving -> deleting, in the index, the usages and the deletion queue."""
    index = state.index
    for leaf in index.retire(slots):
        table = index.tables[index.table[leaf]]
        if table.slots.get(index.key[leaf]) == leaf and not index.session[leaf]:
            offer(index, table, (leaf,))
    for slot in slots:
        state.deleting[slot] = not_before_ms
    memory.undeleted.append((state.seq, slots, not_before_ms))
    for table, storage, count in _by_table_and_storage(state, slots):
        for usage in (*state.scopes(state.instances[table.instance]), storage.usage):
            usage.bytes -= count * table.size_bytes
            usage.blocks -= count
            usage.deleting_bytes += count * table.size_bytes
            usage.deleting_blocks += count


def _locations_gone(state: State, memory: Memory, event: ev.LocationsGone) -> None:
    slots = unpacked_slots(event.slots)
    memory.deletions.gone(slots)
    for table, storage, count in _by_table_and_storage(state, slots):
        for usage in (*state.scopes(state.instances[table.instance]), storage.usage):
            usage.deleting_bytes -= count * table.size_bytes
            usage.deleting_blocks -= count
    state.index.release(slots)
    for slot in slots:
        del state.deleting[slot]


def _hot_blocks(state: State, memory: Memory, event: ev.HotBlocks) -> None:
    used = state.index.used_ms
    for slot, at_ms in zip(unpacked_slots(event.slots), array("Q", event.used_ms), strict=True):
        used[slot] = max(used[slot], at_ms)


def _by_table_and_storage(state: State, slots: "array[int]") -> list[tuple[Table, Storage, int]]:
    index = state.index
    counts: dict[tuple[int, int], int] = {}
    for slot in slots:
        at = (index.table[slot], index.storage[slot])
        counts[at] = counts.get(at, 0) + 1
    return [
        (index.tables[table], state.storage_of[storage], count) for (table, storage), count in counts.items()
    ]


def _count(state: State, memory: Memory, instance: Instance, table: Table, count: int) -> None:
    for usage in state.scopes(instance):
        usage.bytes += count * table.size_bytes
        usage.blocks += count
        _press(state, memory, usage)


def _count_storage(state: State, memory: Memory, storage: Storage, table: Table, count: int) -> None:
    storage.usage.bytes += count * table.size_bytes
    storage.usage.blocks += count
    _press(state, memory, storage.usage)


def _press(state: State, memory: Memory, usage: Usage) -> None:
    if (usage.budget_bytes is not None or usage.budget_blocks is not None) and usage.over(
        watermarks(state, memory.limits, usage)[0]
    ):
        memory.pressed.add(usage)


def _remember(state: State, client: str, request_id: str, event: Any) -> None:
    state.remembered[client, request_id] = event
    if len(state.remembered) > REMEMBERED_REQUESTS:
        state.remembered.popitem(last=False)


_APPLY: dict[type, Callable[[State, Memory, Any], None]] = {
    ev.TookOver: _took_over,
    ev.TenantPut: _tenant_put,
    ev.TenantDeleted: _tenant_deleted,
    ev.StoragePut: _storage_put,
    ev.StorageDeleted: _storage_deleted,
    ev.GroupPut: _group_put,
    ev.GroupDeleted: _group_deleted,
    ev.InstancePut: _instance_put,
    ev.InstanceRetired: _instance_retired,
    ev.InstanceGone: _instance_gone,
    ev.BudgetGranted: _budget_granted,
    ev.SwitchSet: _switch_set,
    ev.EngineRegistered: _engine_registered,
    ev.WorkerRegistered: _worker_registered,
    ev.MemberExpired: _member_expired,
    ev.MemberLeft: _member_left,
    ev.WriteStarted: _write_started,
    ev.WriteFinished: _write_finished,
    ev.SessionRenewed: _session_renewed,
    ev.SessionEnded: _session_ended,
    ev.BlocksRemoved: _blocks_removed,
    ev.LocationsGone: _locations_gone,
    ev.HotBlocks: _hot_blocks,
}
