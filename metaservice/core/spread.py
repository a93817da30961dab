"""How data shards come to know the catalogue: copies of its events, or the difference to all of it.

A data shard's journal stands alone: what it took of the catalogue is in it, in one batch that ends with the
version. So a shard decides with exactly the version that its journal names, whoever leads it, and a message
of the catalogue's that is lost, doubled or late costs time only.

What follows from what was taken is decided here, in the same batch: sessions of engines that were replaced or
left end, and a limit that was set where there was none binds the shard to what it uses by then.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from msgspec import Struct
from msgspec.msgpack import encode
from msgspec.structs import replace

from . import events as ev
from . import membership
from .commands import SyncCatalogue, TakeCatalogue
from .escrow import effect, find_usage, granted, limit_of, take_effect
from .memory import Memory
from .model import SwitchMode, SwitchScope
from .replies import CatalogueView, Slices
from .state import Group, Instance, Pair, ScopeKey, State, Storage, Tenant, Usage

E = TypeVar("E", bound=Struct)


def concerns(event: ev.Event) -> bool:
    """Whether data shards have to take a copy of this event of the catalogue's."""
    return type(event) in ev.SPREAD


# ---------------------------------------------------------------- taking events


def take_catalogue(
    state: State, memory: Memory, command: TakeCatalogue, now_ms: int
) -> Iterator[list[ev.Event]]:
    """Steps; the caller applies each before it asks for the next."""
    assert not state.leads_catalogue, "the catalogue takes no copies of itself"
    if command.since != state.catalogue_version or command.version <= command.since:
        return
    cluster = ""
    for event in command.events:
        if isinstance(event, ev.TookOver):
            cluster = event.cluster
        elif isinstance(event, ev.SliceGranted | ev.ReturnTaken) and event.shard != state.shard:
            continue
        else:
            yield [replace(event, now_ms=now_ms)]
            yield _fenced(state, memory, event, now_ms)
    yield [ev.CatalogueTaken(now_ms, command.version, cluster, 0)]
    yield _bound(state, memory, now_ms)


def _fenced(state: State, memory: Memory, event: ev.Event, now_ms: int) -> list[ev.Event]:
    """The sessions that an engine's change ends here."""
    if isinstance(event, ev.EngineRegistered):
        return [*membership.fence(state, memory, event.engine, event.incarnation, now_ms)]
    if isinstance(event, ev.MemberLeft) and event.kind == "engine":
        return [*membership.fence(state, memory, event.id, "", now_ms)]
    return []


def _bound(state: State, memory: Memory, now_ms: int) -> list[ev.Event]:
    """A limit where there was none: this shard keeps what it uses, and nothing more, until it is granted
    more."""
    found = ((usage, _kept(memory, usage, limit)) for usage, limit in _limits(state))
    bound = [(usage, amounts) for usage, amounts in found if amounts != (None, None)]
    return [
        ev.SliceReturned(
            now_ms, state.return_next + row, usage.scope, usage.id, *amounts, True, state.catalogue_version
        )
        for row, (usage, amounts) in enumerate(bound)
    ]


def _limits(state: State) -> Iterator[tuple[Usage, Pair]]:
    for tenant in state.tenants.values():
        yield tenant.usage, (tenant.quota.bytes, tenant.quota.blocks)
    for group in state.groups.values():
        yield group.usage, (group.quota.bytes, group.quota.blocks)
    for storage in state.storages.values():
        yield storage.usage, (storage.capacity_bytes, None)


def _kept(memory: Memory, usage: Usage, limit: Pair) -> Pair:
    """What the shard binds itself to, in the dimensions that have a limit and no slice yet."""
    open_bytes = usage.budget_bytes is None and limit[0] is not None
    open_blocks = usage.budget_blocks is None and limit[1] is not None
    if not (open_bytes or open_blocks):
        return None, None
    used = memory.errander.used(usage)
    return used[0] if open_bytes else None, used[1] if open_blocks else None


def bind_here(
    state: State, memory: Memory, usage: Usage, old: Pair, new: Pair, now_ms: int
) -> list[ev.Event]:
    """The catalogue's own shard binds itself in the same step that sets a limit where there was none."""
    used = memory.errander.used(usage)
    kept_bytes = used[0] if old[0] is None and new[0] is not None else None
    kept_blocks = used[1] if old[1] is None and new[1] is not None else None
    if kept_bytes is None and kept_blocks is None:
        return []
    return [ev.SliceReturned(now_ms, 0, usage.scope, usage.id, kept_bytes, kept_blocks, True, 0)]


# ---------------------------------------------------------------- the whole catalogue


def view(state: State, memory: Memory) -> CatalogueView:
    """The catalogue of now. Only of a state whose last change to it is durable."""
    assert state.leads_catalogue and memory.spread_seq <= memory.durable_seq, "not all of it is durable"
    return CatalogueView(
        memory.durable_seq, state.cluster, state.grant_next, tuple(_all(state)),
        tuple(
            Slices(
                *key, held.made_seq, held.since[0], held.since[1],
                tuple((pair[0], pair[1]) for pair in granted(state, key)),
            )
            for key, held in sorted(state.held.items())
        ),
        tuple(state.returns_taken),
    )  # fmt: skip


def _all(state: State) -> Iterator[ev.Event]:
    """Events that make this catalogue out of nothing."""
    for _, tenant in sorted(state.tenants.items()):
        yield ev.TenantPut(0, tenant.id, tenant.quota)
    for _, one in sorted(state.storages.items()):
        yield ev.StoragePut(
            0, one.id, one.number, one.kind, one.options, one.capacity_bytes, one.fault_domain, one.reach
        )
    for _, group in sorted(state.groups.items()):
        yield ev.GroupPut(
            0, group.id, group.tenant.id, group.storages, group.quota, group.high_permille,
            group.low_permille, group.eviction,
        )  # fmt: skip
    for _, instance in sorted(state.instances.items()):
        tables = tuple(table.number for table in instance.tables.values())
        yield ev.InstancePut(
            0, instance.id, instance.group.id, instance.fingerprint, instance.quota, tables, instance.shard,
            instance.publication,
        )  # fmt: skip
    for id in state.retiring:
        yield ev.InstanceRetired(0, id)
    if state.switch is not SwitchMode.normal:
        yield ev.SwitchSet(0, SwitchScope.cluster, "", state.switch, _reason(state, SwitchScope.cluster, ""))
    registries: tuple[tuple[SwitchScope, Mapping[str, Tenant | Group | Instance | Storage]], ...] = (
        (SwitchScope.tenant, state.tenants),
        (SwitchScope.group, state.groups),
        (SwitchScope.instance, state.instances),
        (SwitchScope.storage, state.storages),
    )
    for scope, registry in registries:
        for id, owner in sorted(registry.items()):
            if owner.switch is not SwitchMode.normal:
                yield ev.SwitchSet(0, scope, id, owner.switch, _reason(state, scope, id))
    for _, member in sorted(state.engines.items()):
        yield ev.EngineRegistered(
            0, member.id, member.incarnation, member.instance, member.rank, member.endpoints,
            member.pool_channel, member.local_channel,
        )  # fmt: skip
        if member.expired_ms:
            yield ev.MemberExpired(0, "engine", member.id, member.incarnation)
    for _, member in sorted(state.workers.items()):
        yield ev.WorkerRegistered(0, member.id, member.incarnation, member.storages)
        if member.expired_ms:
            yield ev.MemberExpired(0, "worker", member.id, member.incarnation)
    for _, one in sorted(state.storages.items()):
        if one.pool is not None:
            yield ev.PoolChanged(0, one.id, one.pool.worker, one.pool.incarnation)


def _reason(state: State, scope: SwitchScope, id: str) -> str:
    return state.switch_reasons.get((scope, id), "")


# ---------------------------------------------------------------- taking the difference


def sync_catalogue(
    state: State, memory: Memory, command: SyncCatalogue, now_ms: int
) -> Iterator[list[ev.Event]]:
    """Steps from what the shard knows to what the view says; the caller applies each before it asks for the
    next."""
    assert not state.leads_catalogue, "the catalogue takes no copies of itself"
    wanted = command.view
    known_version = state.catalogue_version
    if wanted.version <= known_version:
        return
    slices = {(one.scope, one.id): one for one in wanted.slices}
    fresh = {key for key, one in slices.items() if one.made_seq > known_version}
    """Scopes that were made since: what is here under the name is an earlier one."""
    pools = {one.storage: (one.worker, one.incarnation) for one in _of(wanted, ev.PoolChanged)}
    yield [
        ev.PoolChanged(now_ms, id, "", "")
        for id, one in state.storages.items()
        if one.pool is not None and (one.pool.worker, one.pool.incarnation) != pools.get(id)
    ]
    yield from _gone(state, memory, wanted, fresh, now_ms)
    before = {encode(event) for event in _all(state)}
    awake = _woken(state, wanted)
    switched = {(one.scope, one.id) for one in _of(wanted, ev.SwitchSet)}
    for one in [one for one in _all(state) if isinstance(one, ev.SwitchSet)]:
        if (one.scope, one.id) not in switched:
            yield [ev.SwitchSet(now_ms, one.scope, one.id, SwitchMode.normal, "")]
    for event in wanted.events:
        if encode(event) not in before or _member(event) in awake:
            yield [replace(event, now_ms=now_ms)]
            yield _fenced(state, memory, event, now_ms)
    for key, held in slices.items():
        yield _reset(state, key, held, wanted.returns_taken[state.shard], now_ms)
    yield [
        ev.ReturnTaken(now_ms, state.shard, number, one.scope, one.id, None, None, one.kept)
        for number, one in state.outstanding.items()
        if number <= wanted.returns_taken[state.shard]
    ]
    yield [ev.CatalogueTaken(now_ms, wanted.version, wanted.cluster, wanted.grant_next)]
    yield _bound(state, memory, now_ms)


def _of(view: CatalogueView, kind: type[E]) -> Iterator[E]:
    return (event for event in view.events if isinstance(event, kind))


def _member(event: ev.Event) -> tuple[str, str]:
    """(kind, id) of a registration, ('', '') of anything else."""
    if isinstance(event, ev.EngineRegistered):
        return "engine", event.engine
    return ("worker", event.worker) if isinstance(event, ev.WorkerRegistered) else ("", "")


def _woken(state: State, view: CatalogueView) -> set[tuple[str, str]]:
    """Members that are expired here and, as they registered again, not in the view."""
    expired = {(one.kind, one.id) for one in _of(view, ev.MemberExpired)}
    return {
        (kind, id)
        for kind in ("engine", "worker")
        for id, member in state.members(kind).items()
        if member.expired_ms and (kind, id) not in expired
    }


def _gone(
    state: State, memory: Memory, view: CatalogueView, fresh: set[ScopeKey], now_ms: int
) -> Iterator[list[ev.Event]]:
    """What is no more, from the narrowest to the widest. The catalogue let none of it go before this shard
    said that it is empty here."""
    tables = {one.instance: one.tables for one in _of(view, ev.InstancePut)}
    for instance in list(state.instances.values()):
        if tables.get(instance.id) != tuple(table.number for table in instance.tables.values()):
            if not instance.retiring:
                yield [ev.InstanceRetired(now_ms, instance.id)]
            yield [ev.InstanceGone(now_ms, instance.id)]
    groups = {one.group for one in _of(view, ev.GroupPut)}
    for id in _missing(state.groups, groups, SwitchScope.group, fresh):
        yield [ev.GroupDeleted(now_ms, id)]
    tenants = {one.tenant for one in _of(view, ev.TenantPut)}
    for id in _missing(state.tenants, tenants, SwitchScope.tenant, fresh):
        yield [ev.TenantDeleted(now_ms, id)]
    storages = {one.storage for one in _of(view, ev.StoragePut)}
    for id in _missing(state.storages, storages, SwitchScope.storage, fresh):
        yield [ev.StorageDeleted(now_ms, id)]
    engines = {one.engine for one in _of(view, ev.EngineRegistered)}
    for id in [id for id in state.engines if id not in engines]:
        left = ev.MemberLeft(now_ms, "engine", id)
        yield [left]
        yield _fenced(state, memory, left, now_ms)
    workers = {one.worker for one in _of(view, ev.WorkerRegistered)}
    for id in [id for id in state.workers if id not in workers]:
        yield [ev.MemberLeft(now_ms, "worker", id)]


def _missing(known: Iterable[str], wanted: set[str], scope: SwitchScope, fresh: set[ScopeKey]) -> list[str]:
    return [id for id in known if id not in wanted or (scope, id) in fresh]


def _reset(state: State, key: ScopeKey, slices: Slices, taken: int, now_ms: int) -> list[ev.Event]:
    """The shard's slice: what it was granted, less what it gave up since and the catalogue has not taken.
    The catalogue will take it by the same rule."""
    limit = limit_of(state, *key)
    pair = list(slices.granted[state.shard])
    since = (slices.bytes_seq, slices.blocks_seq)
    for number, one in state.outstanding.items():
        if number > taken and (one.scope, one.id) == key:
            take_effect(pair, effect(one, slices.made_seq, since, limit, pair), one.kept)
    usage = find_usage(state, *key)
    assert usage is not None
    if (usage.budget_bytes, usage.budget_blocks) == tuple(pair):
        return []
    return [ev.SliceSet(now_ms, *key, pair[0], pair[1])]
