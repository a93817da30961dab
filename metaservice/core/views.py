"""The state for people: what the admin routes, the CLI and the console show. Reads only."""

from collections.abc import Mapping
from heapq import nsmallest

from msgspec import Struct

from .ids import location_base, session_name
from .membership import status_of
from .memory import Memory
from .model import (
    Endpoints,
    EvictionPolicy,
    Fingerprint,
    LocationState,
    Publication,
    Quota,
    SwitchMode,
    SwitchScope,
)
from .rejections import Rejection
from .replies import BlockDetail, Switched, Usage
from .state import Group, Instance, Member, State, Storage, Tenant
from .state import Usage as Counters
from .validate import find_table


class TenantView(Struct, frozen=True):
    """A tenant."""

    id: str
    quota: Quota
    switch: SwitchMode
    usage: Usage


class StorageView(Struct, frozen=True):
    """A storage. `overdue_bytes`: deletions that no worker confirmed in time. Of a volatile one: `worker`
    holds its bytes in `pool`, the name of that worker's life (both '': nobody does, and it takes no writes).
    """

    id: str
    number: int
    kind: str
    options: dict[str, str]
    capacity_bytes: int | None
    fault_domain: str
    switch: SwitchMode
    usage: Usage
    overdue_bytes: int
    volatile: bool = False
    worker: str = ""
    pool: str = ""
    reach: str = ""


class GroupView(Struct, frozen=True):
    """An instance group."""

    id: str
    tenant: str
    storages: tuple[str, ...]
    quota: Quota
    high_permille: int
    low_permille: int
    eviction: EvictionPolicy
    switch: SwitchMode
    usage: Usage


class InstanceView(Struct, frozen=True):
    """An instance. `effective` is the strictest switch on its path (None: all normal); `shard`: where its
    blocks live; `announced`: how many of its blocks routers are told of (by that shard's state)."""

    id: str
    group: str
    tenant: str
    fingerprint: Fingerprint
    quota: Quota
    switch: SwitchMode
    effective: Switched | None
    retiring: bool
    usage: Usage
    shard: int = 0
    publication: Publication | None = None
    announced: int = 0


class MemberView(Struct, frozen=True):
    """An engine or worker; `status` is active, suspect or expired."""

    id: str
    incarnation: str
    status: str
    registered_ms: int
    silent_ms: int
    instance: str
    rank: int
    storages: tuple[str, ...]
    sessions: int
    endpoints: Endpoints = Endpoints()
    pool_channel: int = -1
    local_channel: int = -1


class SwitchView(Struct, frozen=True):
    """A switch that is not normal. `id` is `scope/id`, so that the list has a key."""

    id: str
    scope: SwitchScope
    name: str
    mode: SwitchMode
    reason: str


KINDS = ("tenants", "storages", "groups", "instances", "engines", "workers", "switches")


def describe(
    state: State, memory: Memory, kind: str, now_ms: int, after: str = "", limit: int | None = None
) -> list[Struct]:
    """Registered things of a kind in the order of their ids: at most `limit` of those behind `after`."""
    behind = (id for id in _ids(state, kind) if id > after)
    chosen = sorted(behind) if limit is None else nsmallest(limit, behind)
    return [view for id in chosen if (view := describe_one(state, memory, kind, id, now_ms))]


def usages(state: State, memory: Memory, kind: str) -> list[tuple[str, tuple[int, int, int, int]]]:
    """(id, (bytes, blocks, deleting bytes, deleting blocks)) of all tenants, groups, instances or storages.
    Cheap: it is asked at every scrape."""
    registries: dict[str, Mapping[str, Tenant | Group | Instance | Storage]] = {
        "tenants": state.tenants,
        "groups": state.groups,
        "instances": state.instances,
        "storages": state.storages,
    }
    if memory.reports.totals:
        return [(one.id, _totals(memory, one.usage)[:4]) for one in registries[kind].values()]
    return [
        (one.id, (use.bytes, use.blocks, use.deleting_bytes, use.deleting_blocks))
        for one in registries[kind].values()
        for use in (one.usage,)
    ]


def describe_one(state: State, memory: Memory, kind: str, id: str, now_ms: int) -> Struct | None:
    """One registered thing, None when there is none."""
    if id not in _ids(state, kind):
        return None
    if kind == "tenants":
        tenant = state.tenants[id]
        return TenantView(id, tenant.quota, tenant.switch, _usage(memory, tenant.usage, tenant.quota))
    if kind == "storages":
        return _storage(state, memory, id)
    if kind == "groups":
        group = state.groups[id]
        return GroupView(
            id, group.tenant.id, group.storages, group.quota, group.high_permille, group.low_permille,
            group.eviction,
            group.switch, _usage(memory, group.usage, group.quota),
        )  # fmt: skip
    if kind == "instances":
        one = state.instances[id]
        return InstanceView(
            id, one.group.id, one.group.tenant.id, one.fingerprint, one.quota, one.switch, one.effective,
            one.retiring,
            _usage(memory, one.usage, one.quota), one.shard, one.publication, one.announced,
        )  # fmt: skip
    if kind == "switches":
        return _ids_of_switches(state)[id]
    singular = kind.removesuffix("s")
    return _member(state, memory, singular, state.members(singular)[id], now_ms)


def block(state: State, instance_id: str, group: str | None, key: bytes) -> BlockDetail | Rejection:
    """Everything known of one block."""
    instance = state.instances.get(instance_id)
    if instance is None:
        return Rejection("instance_unknown", f"no instance {instance_id!r}", "instance")
    table = instance.primary if group is None else find_table(instance, group)
    if isinstance(table, Rejection):
        return table
    index = state.index
    slot = table.slots.get(key)
    if slot is None:
        return Rejection("block_unknown", "no block with this key is written or serves", "key")
    done = index.done[slot]
    sums = index.sums[slot] or bytes(8 * len(table.parts))
    session = index.session[slot]
    return BlockDetail(
        key, index.parent[slot], instance_id, table.group.name, LocationState(index.state[slot]).name,
        bool(index.visible[slot]), location_base(state.shard) + slot, index.generation[slot],
        state.storage_of[index.storage[slot]].id, table.size_bytes,
        {part.name: "written" if done >> at & 1 else "awaited" for at, part in enumerate(table.parts)},
        {
            part.name: int.from_bytes(sums[8 * at : 8 * at + 8], "little")
            for at, part in enumerate(table.parts)
            if done >> at & 1
        },
        index.children[slot], index.pins[slot], session_name(state.shard, session) if session else "",
        index.used_ms[slot],
    )  # fmt: skip


def _ids(state: State, kind: str) -> Mapping[str, object]:
    known: dict[str, Mapping[str, object]] = {
        "tenants": state.tenants,
        "storages": state.storages,
        "groups": state.groups,
        "instances": state.instances,
        "engines": state.engines,
        "workers": state.workers,
    }
    return known[kind] if kind != "switches" else _ids_of_switches(state)


def _ids_of_switches(state: State) -> dict[str, SwitchView]:
    cluster = SwitchView(
        "cluster", SwitchScope.cluster, "", state.switch, _reason(state, SwitchScope.cluster, "")
    )
    scopes: tuple[tuple[SwitchScope, Mapping[str, Tenant | Group | Instance | Storage]], ...] = (
        (SwitchScope.tenant, state.tenants),
        (SwitchScope.group, state.groups),
        (SwitchScope.instance, state.instances),
        (SwitchScope.storage, state.storages),
    )
    views = [cluster]
    for scope, registry in scopes:
        views += [
            SwitchView(f"{scope.name}/{id}", scope, id, one.switch, _reason(state, scope, id))
            for id, one in registry.items()
        ]
    return {view.id: view for view in views if view.mode is not SwitchMode.normal}


def _reason(state: State, scope: SwitchScope, id: str) -> str:
    return state.switch_reasons.get((scope, id), "")


def _totals(memory: Memory, counters: Counters) -> tuple[int, int, int, int, int]:
    """Bytes, blocks, deleting bytes, deleting blocks of all shards, and what is overdue in the others; as far
    as they told (only the catalogue's leader is told)."""
    others = memory.reports.totals.get((counters.scope, counters.id), (0, 0, 0, 0, 0))
    return (
        counters.bytes + others[0],
        counters.blocks + others[1],
        counters.deleting_bytes + others[2],
        counters.deleting_blocks + others[3],
        others[4],
    )


def _usage(memory: Memory, counters: Counters, limit: Quota) -> Usage:
    """What is used of the operator's limit, which may be more than this shard's slice of it."""
    return Usage(*_totals(memory, counters)[:4], limit.bytes, limit.blocks)


def _storage(state: State, memory: Memory, id: str) -> StorageView:
    one = state.storages[id]
    return StorageView(
        id, one.number, one.kind, one.options, one.capacity_bytes, one.fault_domain, one.switch,
        _usage(memory, one.usage, Quota(one.capacity_bytes)),
        memory.deletions.overdue_bytes.get(one.number, 0) + _totals(memory, one.usage)[4],
        one.volatile,
        one.pool.worker if one.pool is not None else "",
        one.pool.incarnation if one.pool is not None else "",
        "node" if one.local else "pool",
    )  # fmt: skip


def _member(state: State, memory: Memory, kind: str, member: Member, now_ms: int) -> MemberView:
    return MemberView(
        member.id, member.incarnation, status_of(memory, kind, member, now_ms), member.registered_ms,
        max(0, now_ms - memory.beats.get((kind, member.id), member.registered_ms)), member.instance,
        member.rank,
        member.storages, len(state.sessions_of.get(member.id, ())) if kind == "engine" else 0,
        member.endpoints, member.pool_channel, member.local_channel,
    )  # fmt: skip
