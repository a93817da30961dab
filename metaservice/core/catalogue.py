"""Decisions about what operators register: tenants, storages, groups, instances, switches."""

from collections.abc import Mapping, Sized

from msgspec.structs import asdict

from . import publishing
from .commands import (
    DeleteGroup,
    DeleteInstance,
    DeleteStorage,
    DeleteTenant,
    PutGroup,
    PutInstance,
    PutStorage,
    PutTenant,
    SetSwitch,
)  # fmt: skip
from .events import (
    BudgetGranted,
    Event,
    GroupDeleted,
    GroupPut,
    InstancePut,
    InstanceRetired,
    SliceGranted,
    StorageDeleted,
    StoragePut,
    SwitchSet,
    TenantDeleted,
    TenantPut,
)  # fmt: skip
from .memory import Memory
from .model import REACHES, VOLATILE_KINDS, Fingerprint, Quota, SwitchScope
from .rejections import Rejection
from .replies import Done, InstanceRegistered
from .spread import bind_here
from .state import Pair, State, Usage
from .validate import check_fingerprint

Decision = tuple[object, list[Event]]

_STORAGES_MAX = 65_535


def _full(known: Sized, limit: int, kind: str) -> Rejection | None:
    if len(known) < limit:
        return None
    return Rejection("registry_full", f"{limit} {kind}s are registered")


def _check_quota(quota: Quota) -> Rejection | None:
    for field in ("bytes", "blocks"):
        value = getattr(quota, field)
        if value is not None and not 0 <= value < 1 << 53:
            return Rejection("invalid_field", "expected 0..2^53-1, or null for no limit", f"quota.{field}")
    return None


def _grants(
    state: State, memory: Memory, usage: Usage, old: Pair | None, new: Pair, now_ms: int
) -> list[Event]:
    """What follows when a limit is set (`old` None: its scope is new). One shard alone uses all of it. Of
    several, each gets a part of a new limit at once, so that it can begin without asking; the other half goes
    to whoever asks."""
    if state.shards == 1:
        return _whole(state, usage, new, now_ms)
    if old is not None:
        return bind_here(state, memory, usage, old, new, now_ms)
    slice_bytes, slice_blocks = ((limit or 0) // (2 * state.shards) for limit in new)
    if not (slice_bytes or slice_blocks):
        return []
    return [
        SliceGranted(
            now_ms, state.grant_next + shard, shard, usage.scope, usage.id, slice_bytes, slice_blocks
        )
        for shard in range(state.shards)
    ]


def _whole(state: State, usage: Usage, limit: Pair, now_ms: int) -> list[Event]:
    if (usage.budget_bytes, usage.budget_blocks) == limit:
        return []
    return [BudgetGranted(now_ms, state.grant_next, usage.scope, usage.id, *limit)]


def _pair(quota: Quota) -> Pair:
    return quota.bytes, quota.blocks


def put_tenant(state: State, memory: Memory, command: PutTenant, now_ms: int) -> Decision:
    known = state.tenants.get(command.tenant)
    refused = _check_quota(command.quota)
    if refused is None and known is None:
        refused = _full(state.tenants, memory.limits.registered_max, "tenant")
    if refused is not None:
        return refused, []
    if known is not None and known.quota == command.quota:
        return Done(False), []
    usage = known.usage if known is not None else Usage(SwitchScope.tenant, command.tenant)
    old = _pair(known.quota) if known is not None else None
    grants = _grants(state, memory, usage, old, _pair(command.quota), now_ms)
    return Done(known is None), [TenantPut(now_ms, command.tenant, command.quota), *grants]


def delete_tenant(state: State, memory: Memory, command: DeleteTenant, now_ms: int) -> Decision:
    tenant = state.tenants.get(command.tenant)
    if tenant is None:
        return Rejection("tenant_unknown", f"no tenant {command.tenant!r}", "tenant"), []
    users = [group.id for group in state.groups.values() if group.tenant is tenant]
    if users:
        return Rejection("in_use", f"group {users[0]!r} belongs to the tenant", "tenant"), []
    return Done(), [TenantDeleted(now_ms, command.tenant)]


def put_storage(state: State, memory: Memory, command: PutStorage, now_ms: int) -> Decision:
    capacity = command.capacity_bytes
    if capacity is not None and not 0 <= capacity < 1 << 53:
        return Rejection("invalid_field", "expected 0..2^53-1, or null for no limit", "capacity_bytes"), []
    if command.kind in VOLATILE_KINDS and "pool" in command.options:
        return Rejection(
            "invalid_field", "given by the service: the incarnation of the storage's worker", "options.pool"
        ), []
    if command.reach not in REACHES:
        return Rejection("invalid_field", "expected 'pool' or 'node', or '' for what is usual", "reach"), []
    known = state.storages.get(command.storage)
    if known is None:
        refused = _full(state.storages, min(memory.limits.registered_max, _STORAGES_MAX), "storage")
        if refused is not None:
            return refused, []
        number = next(number for number in range(_STORAGES_MAX) if number not in state.storage_of)
    else:
        number = known.number
        same = (known.kind, known.options, known.fault_domain, known.capacity_bytes, known.reach) == (
            command.kind, command.options, command.fault_domain, capacity, command.reach,
        )  # fmt: skip
        if same:
            return Done(False), []
        moved = (known.kind, known.options) != (command.kind, command.options)
        if moved and (user := _storage_user(state, memory, command.storage)) is not None:
            return Rejection("storage_mismatch", f"kind and options are fixed while {user}", "options"), []
    event = StoragePut(
        now_ms, command.storage, number, command.kind, command.options, capacity, command.fault_domain,
        command.reach,
    )  # fmt: skip
    if state.shards == 1:
        return Done(known is None), [event]  # which sets what this shard may use of it
    usage = known.usage if known is not None else Usage(SwitchScope.storage, command.storage)
    old = (known.capacity_bytes, None) if known is not None else None
    return Done(known is None), [event, *_grants(state, memory, usage, old, (capacity, None), now_ms)]


def _storage_user(state: State, memory: Memory, storage: str) -> str | None:
    """Who needs the storage, in words."""
    for group in state.groups.values():
        if storage in group.storages:
            return f"group {group.id!r} names the storage"
    known = state.storages[storage]
    if known.pool is not None:
        return f"worker {known.pool.worker!r} holds the storage's bytes"
    usage = known.usage
    if usage.blocks or usage.deleting_blocks:
        return f"{usage.blocks + usage.deleting_blocks} locations are in the storage"
    for shard in range(1, state.shards):
        # A shard that knows that no group names the storage puts nothing there any more: what it says then
        # holds for good.
        report = memory.reports.of(shard)
        if report is None or not report.complete or report.version < known.left_seq:
            return f"shard {shard} has not reported yet that nothing of it is in the storage"
        row = report.used.get((SwitchScope.storage, storage))
        if row is not None and row.blocks + row.deleting_blocks:
            return f"{row.blocks + row.deleting_blocks} locations of shard {shard} are in the storage"
    return None


def delete_storage(state: State, memory: Memory, command: DeleteStorage, now_ms: int) -> Decision:
    if command.storage not in state.storages:
        return Rejection("storage_unknown", f"no storage {command.storage!r}", "storage"), []
    user = _storage_user(state, memory, command.storage)
    if user is not None:
        return Rejection("in_use", user, "storage"), []
    return Done(), [StorageDeleted(now_ms, command.storage)]


def put_group(state: State, memory: Memory, command: PutGroup, now_ms: int) -> Decision:
    known = state.groups.get(command.group)
    refused = _check_group(state, command) or _check_quota(command.quota)
    if refused is None and known is None:
        refused = _full(state.groups, memory.limits.registered_max, "group")
    if refused is not None:
        return refused, []
    if known is not None:
        if known.tenant.id != command.tenant:
            return Rejection(
                "tenant_mismatch", f"the group belongs to tenant {known.tenant.id!r}", "tenant"
            ), []
        same = (known.storages, known.quota, known.high_permille, known.low_permille, known.eviction) == (
            command.storages, command.quota, command.high_permille, command.low_permille, command.eviction,
        )  # fmt: skip
        if same:
            return Done(False), []
    usage = known.usage if known is not None else Usage(SwitchScope.group, command.group)
    event = GroupPut(
        now_ms, command.group, command.tenant, command.storages, command.quota, command.high_permille,
        command.low_permille, command.eviction,
    )  # fmt: skip
    old = _pair(known.quota) if known is not None else None
    grants = _grants(state, memory, usage, old, _pair(command.quota), now_ms)
    return Done(known is None), [event, *grants]


def _check_group(state: State, command: PutGroup) -> Rejection | None:
    if command.tenant not in state.tenants:
        return Rejection("tenant_unknown", f"no tenant {command.tenant!r}", "tenant")
    if not command.storages or len(set(command.storages)) != len(command.storages):
        return Rejection("invalid_field", "name one storage or more, each once", "storages")
    for row, name in enumerate(command.storages):
        if name not in state.storages:
            return Rejection("storage_unknown", f"no storage {name!r}", f"storages[{row}]")
    if not 1 <= command.low_permille <= command.high_permille <= 1000:
        return Rejection(
            "invalid_field", "expected 1 <= low_permille <= high_permille <= 1000", "low_permille"
        )
    return None


def delete_group(state: State, memory: Memory, command: DeleteGroup, now_ms: int) -> Decision:
    group = state.groups.get(command.group)
    if group is None:
        return Rejection("group_unknown", f"no group {command.group!r}", "group"), []
    users = [instance.id for instance in state.instances.values() if instance.group is group]
    if users:
        return Rejection("in_use", f"instance {users[0]!r} is in the group", "group"), []
    return Done(), [GroupDeleted(now_ms, command.group)]


def put_instance(state: State, memory: Memory, command: PutInstance, now_ms: int) -> Decision:
    known = state.instances.get(command.instance)
    group = state.groups.get(command.group)
    if group is None:
        return Rejection("group_unknown", f"no group {command.group!r}", "group"), []
    refused = check_fingerprint(command.fingerprint, memory.limits) or _check_quota(command.quota)
    if refused is None and known is None:
        refused = _full(state.instances, memory.limits.registered_max, "instance")
    if refused is None and command.shard is not None and not 0 <= command.shard < state.shards:
        refused = Rejection("invalid_field", f"expected 0..{state.shards - 1}, or null", "shard")
    if refused is None:
        refused = publishing.refuse(state, command)
    if refused is not None:
        return refused, []
    if known is None:
        shard = _place(state, command) if command.shard is None else command.shard
        count = len(command.fingerprint.groups)
        tables = tuple(range(state.table_next, state.table_next + count))
        usage = Usage(SwitchScope.instance, command.instance)
    else:
        if known.retiring:
            return Rejection(
                "instance_retiring", "the instance is being removed; try another id", "instance"
            ), []
        if known.fingerprint != command.fingerprint:
            return _mismatch(known.fingerprint, command.fingerprint), []
        if known.group is not group:
            return Rejection("group_mismatch", f"the instance is in group {known.group.id!r}", "group"), []
        if command.shard not in (None, known.shard) and state.shards > 1:
            return Rejection("invalid_field", f"the instance lives in shard {known.shard}", "shard"), []
        if (known.quota, known.publication) == (command.quota, command.publication):
            return InstanceRegistered(False, group.storages, known.shard), []
        shard = known.shard
        tables = tuple(table.number for table in known.tables.values())
        usage = known.usage
    event = InstancePut(
        now_ms, command.instance, command.group, command.fingerprint, command.quota, tables, shard,
        command.publication,
    )  # fmt: skip
    # with several shards the event itself says all, as it may reach its shard before what follows it
    grants = _whole(state, usage, _pair(command.quota), now_ms) if state.shards == 1 else []
    return InstanceRegistered(known is None, group.storages, shard), [event, *grants]


def _place(state: State, command: PutInstance) -> int:
    """That of the instance in whose streams its blocks are told; else the shard with the fewest live
    instances, the first of equals."""
    if command.publication is not None and command.publication.base:
        return state.instances[command.publication.base].shard
    counts = [0] * state.shards
    for instance in state.instances.values():
        if not instance.retiring and state.shards > 1:
            counts[instance.shard] += 1
    return counts.index(min(counts))


def _mismatch(known: Fingerprint, other: Fingerprint) -> Rejection:
    """Names each field that differs, with both values."""
    have, want = asdict(known), asdict(other)
    differs = {
        field: {"registered": _plain(have[field]), "asked": _plain(want[field])}
        for field in have
        if have[field] != want[field]
    }
    return Rejection(
        "fingerprint_mismatch",
        f"the instance is registered with another {', '.join(differs)}",
        "fingerprint." + next(iter(differs)),
        {"differs": differs},
    )


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [asdict(item) for item in value]
    return value


def delete_instance(state: State, memory: Memory, command: DeleteInstance, now_ms: int) -> Decision:
    instance = state.instances.get(command.instance)
    if instance is None:
        return Rejection("instance_unknown", f"no instance {command.instance!r}", "instance"), []
    if instance.retiring:
        return Done(), []
    return Done(), [InstanceRetired(now_ms, command.instance)]


def set_switch(state: State, memory: Memory, command: SetSwitch, now_ms: int) -> Decision:
    known: dict[SwitchScope, tuple[Mapping[str, object], str]] = {
        SwitchScope.tenant: (state.tenants, "tenant_unknown"),
        SwitchScope.group: (state.groups, "group_unknown"),
        SwitchScope.instance: (state.instances, "instance_unknown"),
        SwitchScope.storage: (state.storages, "storage_unknown"),
    }
    if command.scope is SwitchScope.cluster:
        if command.id:
            return Rejection("invalid_field", "the cluster's switch has no id", "id"), []
    else:
        registry, code = known[command.scope]
        if command.id not in registry:
            return Rejection(code, f"no {command.scope.name} {command.id!r}", "id"), []
    return Done(), [SwitchSet(now_ms, command.scope, command.id, command.mode, command.reason)]
