"""The part of `apply` that takes what is registered: tenants, storages, groups, instances, switches, members,
and the slices of limits that span shards."""

from collections.abc import Callable, Iterable
from typing import Any

from . import events as ev
from . import told
from .admission import press
from .escrow import change_limit, find_usage, take_effect
from .index import Table
from .memory import Memory
from .model import RETIRED_INCARNATIONS, Fingerprint, Quota, SwitchMode, SwitchScope
from .replies import Returned
from .state import Group, Instance, Member, State, Storage, Tenant, place_of

# ---------------------------------------------------------------- catalogue


def _tenant_put(state: State, memory: Memory, event: ev.TenantPut) -> None:
    tenant = state.tenants.get(event.tenant)
    made = tenant is None
    if tenant is None:
        tenant = state.tenants[event.tenant] = Tenant(event.tenant)
    old, tenant.quota = tenant.quota, event.quota
    if state.shards > 1:
        _quota_changed(state, memory, tenant, made, old)


def _tenant_deleted(state: State, memory: Memory, event: ev.TenantDeleted) -> None:
    memory.forget(state.tenants.pop(event.tenant).usage)
    state.held.pop((SwitchScope.tenant, event.tenant), None)
    state.switch_reasons.pop((SwitchScope.tenant, event.tenant), None)


def _quota_changed(state: State, memory: Memory, owner: Tenant | Group, made: bool, old: Quota) -> None:
    new = owner.quota
    change_limit(state, owner.usage, made, (old.bytes, old.blocks), (new.bytes, new.blocks))
    memory.limit_changed(owner.usage)


def _storage_put(state: State, memory: Memory, event: ev.StoragePut) -> None:
    storage = state.storages.get(event.storage)
    made = storage is None
    if storage is None:
        storage = Storage(event.storage, event.number, event.kind, event.options)
        state.storages[event.storage] = storage
        state.storage_of[event.number] = storage
    if storage.place() != place_of(event.kind, event.reach, event.fault_domain):
        told.moved(state, memory, storage.number)  # routers know its blocks as somewhere else
    storage.kind, storage.options = event.kind, event.options
    (state.volatile.add if storage.volatile else state.volatile.discard)(storage.number)
    storage.fault_domain, storage.reach = event.fault_domain, event.reach
    old, storage.capacity_bytes = storage.capacity_bytes, event.capacity_bytes
    if state.shards > 1:
        change_limit(state, storage.usage, made, (old, None), (event.capacity_bytes, None))
        memory.limit_changed(storage.usage)
    else:
        storage.usage.budget_bytes = event.capacity_bytes
    press(state, memory, storage.usage)


def _storage_deleted(state: State, memory: Memory, event: ev.StorageDeleted) -> None:
    storage = state.storages.pop(event.storage)
    del state.storage_of[storage.number]
    state.volatile.discard(storage.number)
    memory.forget(storage.usage)
    state.held.pop((SwitchScope.storage, event.storage), None)
    state.switch_reasons.pop((SwitchScope.storage, event.storage), None)


def _group_put(state: State, memory: Memory, event: ev.GroupPut) -> None:
    group = state.groups.get(event.group)
    made = group is None
    if group is None:
        group = state.groups[event.group] = Group(event.group, state.tenants[event.tenant])
    _leave(state, [name for name in group.storages if name not in event.storages])
    group.storages = event.storages
    old, group.quota = group.quota, event.quota
    if state.shards > 1:
        _quota_changed(state, memory, group, made, old)
    group.high_permille, group.low_permille = event.high_permille, event.low_permille
    group.eviction = event.eviction
    press(state, memory, group.usage)
    for instance in state.instances.values():
        if instance.group is group:
            press(state, memory, instance.usage)


def _group_deleted(state: State, memory: Memory, event: ev.GroupDeleted) -> None:
    group = state.groups.pop(event.group)
    _leave(state, group.storages)
    memory.forget(group.usage)
    state.held.pop((SwitchScope.group, event.group), None)
    state.switch_reasons.pop((SwitchScope.group, event.group), None)


def _leave(state: State, storages: Iterable[str]) -> None:
    """A group no longer names these storages."""
    if state.shards > 1:
        for name in storages:
            state.storages[name].left_seq = state.seq


def _instance_put(state: State, memory: Memory, event: ev.InstancePut) -> None:
    instance = state.instances.get(event.instance)
    if instance is None:
        instance = make_instance(
            state, event.instance, state.groups[event.group], event.fingerprint, event.tables, event.shard
        )
        state.table_next = max(state.table_next, *(number + 1 for number in event.tables))
        instance.effective = state.effective_switch(instance)
    instance.quota = event.quota
    if instance.publication != event.publication:
        instance.publication = event.publication
        told.published(state, memory, instance)
    if state.shards > 1:
        # at once: a shard that took this and not yet what follows must not take it for no limit
        instance.usage.budget_bytes, instance.usage.budget_blocks = event.quota.bytes, event.quota.blocks
        press(state, memory, instance.usage)


def make_instance(
    state: State, id: str, group: Group, fingerprint: Fingerprint, tables: tuple[int, ...], shard: int
) -> Instance:
    """The instance with its key tables: the first full group (else the first) is the primary one."""
    instance = Instance(id, group, fingerprint, shard)
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
    state.published.discard(event.instance)
    del state.retiring[event.instance]
    for table in instance.tables.values():
        assert not table.slots and not table.blocks_deleting, "an instance goes that still has locations"
        del state.index.tables[table.number]
    memory.forget(instance.usage)
    memory.errander.drained.pop(event.instance, None)
    state.switch_reasons.pop((SwitchScope.instance, event.instance), None)


def _budget_granted(state: State, memory: Memory, event: ev.BudgetGranted) -> None:
    if event.grant < state.grant_next:
        return  # this grant was taken before
    state.grant_next = event.grant + 1
    usage = find_usage(state, event.scope, event.id)
    assert usage is not None
    usage.budget_bytes, usage.budget_blocks = event.bytes, event.blocks
    press(state, memory, usage)


def _slice_granted(state: State, memory: Memory, event: ev.SliceGranted) -> None:
    if event.grant < state.grant_next:
        return  # this grant was taken before
    state.grant_next = event.grant + 1
    amounts = (event.bytes, event.blocks)
    if event.shard == state.shard:
        usage = find_usage(state, event.scope, event.id)
        assert usage is not None
        if usage.budget_bytes is not None:
            usage.budget_bytes += event.bytes
        if usage.budget_blocks is not None:
            usage.budget_blocks += event.blocks
    elif not state.shard:
        pair = state.held[event.scope, event.id].slices[event.shard - 1]
        for at, amount in enumerate(amounts):
            have = pair[at]
            if have is not None:
                pair[at] = have + amount


def _slice_returned(state: State, memory: Memory, event: ev.SliceReturned) -> None:
    usage = find_usage(state, event.scope, event.id)
    assert usage is not None
    pair = [usage.budget_bytes, usage.budget_blocks]
    take_effect(pair, (event.bytes, event.blocks), event.kept)
    usage.budget_bytes, usage.budget_blocks = pair
    press(state, memory, usage)
    if event.number:
        assert event.number == state.return_next, "returns are numbered one by one"
        state.return_next += 1
        state.outstanding[event.number] = Returned(
            event.number, event.scope, event.id, event.bytes, event.blocks, event.kept, event.version
        )
        memory.errander.returned(event.number)
    else:
        memory.limit_changed(usage)


def _return_taken(state: State, memory: Memory, event: ev.ReturnTaken) -> None:
    if event.shard == state.shard:
        state.outstanding.pop(event.number, None)
    elif not state.shard:
        assert event.number == state.returns_taken[event.shard] + 1, "returns are taken one by one"
        state.returns_taken[event.shard] = event.number
        held = state.held.get((event.scope, event.id))
        if held is not None:
            take_effect(held.slices[event.shard - 1], (event.bytes, event.blocks), event.kept)
            usage = find_usage(state, event.scope, event.id)
            assert usage is not None
            memory.limit_changed(usage)


def _slice_set(state: State, memory: Memory, event: ev.SliceSet) -> None:
    usage = find_usage(state, event.scope, event.id)
    assert usage is not None
    usage.budget_bytes, usage.budget_blocks = event.bytes, event.blocks
    press(state, memory, usage)


def _catalogue_taken(state: State, memory: Memory, event: ev.CatalogueTaken) -> None:
    assert event.version > state.catalogue_version, "the catalogue went backwards"
    state.catalogue_version = event.version
    state.cluster = event.cluster or state.cluster
    state.grant_next = max(state.grant_next, event.grant_next)
    memory.errander.took_catalogue(event.version)


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
    member.endpoints = event.endpoints
    member.pool_channel, member.local_channel = event.pool_channel, event.local_channel


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


APPLY: dict[type, Callable[[State, Memory, Any], None]] = {
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
    ev.SliceGranted: _slice_granted,
    ev.SliceReturned: _slice_returned,
    ev.ReturnTaken: _return_taken,
    ev.SliceSet: _slice_set,
    ev.CatalogueTaken: _catalogue_taken,
    ev.SwitchSet: _switch_set,
    ev.EngineRegistered: _engine_registered,
    ev.WorkerRegistered: _worker_registered,
    ev.MemberExpired: _member_expired,
    ev.MemberLeft: _member_left,
}
