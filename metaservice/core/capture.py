"""A State as chunks of bytes and back: snapshots and digests.

The chunks are canonical: two states that say the same give the same bytes, whatever way they came about.
Derived things (links, counters, key tables) are not written but rebuilt. Recency travels behind the state and
is no part of the digest.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import chain
from typing import Any

import msgspec

from . import capture_told, told
from .apply_catalogue import make_instance
from .events import WriteStarted
from .eviction import rebuild
from .index import DELETING, GONE, SERVING, WRITING, BlockIndex
from .memory import Memory
from .model import EvictionPolicy, Fingerprint, Limits, Quota, SwitchMode, SwitchScope
from .replies import Returned
from .state import (
    Ended,
    Group,
    Held,
    Member,
    Pool,
    Remembered,
    Session,
    State,
    Storage,
    Tenant,
    Usage,
)  # fmt: skip

FORMAT = 1
_OF_ROUTERS = ("tokens", "lora", "salt")
assert WriteStarted.__struct_fields__[-len(_OF_ROUTERS) :] == _OF_ROUTERS
_SLOTS_PER_CHUNK = 65_536

_Budget = tuple[int | None, int | None]


class _Member(msgspec.Struct, array_like=True):
    """What every release wrote of a member; where an engine is comes in `_Told`."""

    id: str
    incarnation: str
    registered_ms: int
    expired_ms: int
    retired: list[str]
    instance: str
    rank: int
    storages: tuple[str, ...]


class _Head(msgspec.Struct, array_like=True):
    format: int
    shard: int
    seq: int
    epoch: int
    cluster: str
    now_ms: int
    takeover_ms: int
    switch: SwitchMode
    switch_reasons: list[tuple[SwitchScope, str, str]]
    session_next: int
    table_next: int
    grant_next: int
    tenants: list[tuple[str, Quota, SwitchMode, _Budget]]
    storages: list[tuple[str, int, str, dict[str, str], int | None, str, SwitchMode]]
    groups: list[tuple[str, str, tuple[str, ...], Quota, int, int, EvictionPolicy, SwitchMode, _Budget]]
    instances: list[tuple[str, str, Fingerprint, Quota, SwitchMode, bool, tuple[int, ...], _Budget]]
    retiring: list[str]
    engines: list[_Member]
    workers: list[_Member]
    slots: int
    free: bytes


class _HeadWithPools(_Head):
    """Written where there is or was a pool of a volatile storage: what knows none stays as it was before
    there were any, and so does its digest. A row: the storage, its pool, its spent incarnations."""

    pools: list[tuple[str, Pool | None, tuple[str, ...]]] = []


class _Sessions(msgspec.Struct, array_like=True):
    open: list[tuple[int, str, str, int, int, int, bytes, bytes, bytes]]
    ended: list[Ended]
    remembered: list[tuple[str, str, Any]]
    deleting: list[tuple[int, int]]


class _Slots(msgspec.Struct, array_like=True):
    """Columns of a run of slots."""

    first: int
    key: list[bytes]
    parent: list[bytes | None]
    table: bytes
    state: bytes
    generation: bytes
    storage: bytes
    done: bytes
    sums: list[bytes]
    session: bytes


class _Spread(msgspec.Struct, array_like=True):
    """What there is more with several shards: slices of limits, and where instances live. Capacities of
    storages: their slices here, as their budgets are elsewhere."""

    shards: int
    catalogue_version: int
    return_next: int
    outstanding: list[Returned]
    returns_taken: list[int]
    held: list[tuple[SwitchScope, str, int, list[int], list[list[int | None]]]]
    storages: list[tuple[str, int | None, int]]
    instances: list[tuple[str, int]]


class _Recency(msgspec.Struct, array_like=True):
    used_ms: bytes


_ENCODER = msgspec.msgpack.Encoder(order="sorted")


def capture(state: State) -> Iterator[bytes]:
    """The state in chunks, then the recency in a last one."""
    yield from _canonical(state)
    yield _ENCODER.encode(_Recency(state.index.used_ms.tobytes()))


def digest(state: State) -> bytes:
    """32 bytes that are equal for equal states."""
    hashed = blake2b(digest_size=32)
    for chunk in _canonical(state):
        hashed.update(len(chunk).to_bytes(8, "little"))
        hashed.update(chunk)
    return hashed.digest()


def _canonical(state: State) -> Iterator[bytes]:
    index = state.index
    yield _ENCODER.encode(_head(state))
    yield _ENCODER.encode(
        _Sessions(
            [
                (
                    one.number, one.engine, one.incarnation, one.table.number, one.ttl_ms, one.deadline_ms,
                    one.slots.tobytes(), one.generations.tobytes(), bytes(one.status),
                )
                for one in state.sessions.values()
            ],
            list(state.ended.values()),
            [(*request, _remembered(event)) for request, event in state.remembered.items()],
            sorted(state.deleting.items()),
        )
    )  # fmt: skip
    for first in range(0, len(index), _SLOTS_PER_CHUNK):
        end = min(first + _SLOTS_PER_CHUNK, len(index))
        yield _ENCODER.encode(
            _Slots(
                first, index.key[first:end], index.parent[first:end], index.table[first:end].tobytes(),
                bytes(index.state[first:end]), index.generation[first:end].tobytes(),
                index.storage[first:end].tobytes(), index.done[first:end].tobytes(), index.sums[first:end],
                index.session[first:end].tobytes(),
            )
        )  # fmt: skip
    if state.shards > 1:
        yield _ENCODER.encode(_spread(state))
    yield from capture_told.capture(state, _SLOTS_PER_CHUNK)


def _spread(state: State) -> _Spread:
    return _Spread(
        state.shards, state.catalogue_version, state.return_next,
        [one for _, one in sorted(state.outstanding.items())],
        state.returns_taken,
        [
            (scope, id, held.made_seq, held.since, held.slices)
            for (scope, id), held in sorted(state.held.items())
        ],
        [(id, one.usage.budget_bytes, one.left_seq) for id, one in sorted(state.storages.items())],
        [(id, one.shard) for id, one in sorted(state.instances.items())],
    )  # fmt: skip


def _remembered(event: Remembered) -> Any:
    """As every release wrote it: an answer does not depend on tokens."""
    if not isinstance(event, WriteStarted):
        return event
    row = msgspec.structs.astuple(event)
    return [WriteStarted.__struct_config__.tag, *row[: -len(_OF_ROUTERS)]]


def _budget(usage: Usage) -> _Budget:
    return usage.budget_bytes, usage.budget_blocks


def _head(state: State) -> _Head:
    head = _plain_head(state)
    pools = [
        (one.id, one.pool, one.spent)
        for _, one in sorted(state.storages.items())
        if one.pool is not None or one.spent
    ]
    return _HeadWithPools(**msgspec.structs.asdict(head), pools=pools) if pools else head


def _member(one: Member) -> _Member:
    return _Member(*(getattr(one, name) for name in _Member.__struct_fields__))


def _plain_head(state: State) -> _Head:
    return _Head(
        FORMAT, state.shard, state.seq, state.epoch, state.cluster, state.now_ms, state.takeover_ms,
        state.switch,
        sorted((scope, id, reason) for (scope, id), reason in state.switch_reasons.items()),
        state.session_next, state.table_next, state.grant_next,
        [(one.id, one.quota, one.switch, _budget(one.usage)) for _, one in sorted(state.tenants.items())],
        [
            (one.id, one.number, one.kind, one.options, one.capacity_bytes, one.fault_domain, one.switch)
            for _, one in sorted(state.storages.items())
        ],
        [
            (
                one.id, one.tenant.id, one.storages, one.quota, one.high_permille, one.low_permille,
                one.eviction,
                one.switch, _budget(one.usage),
            )
            for _, one in sorted(state.groups.items())
        ],
        [
            (
                one.id, one.group.id, one.fingerprint, one.quota, one.switch, one.retiring,
                tuple(table.number for table in one.tables.values()), _budget(one.usage),
            )
            for _, one in sorted(state.instances.items())
        ],
        list(state.retiring),
        [_member(one) for _, one in sorted(state.engines.items())],
        [_member(one) for _, one in sorted(state.workers.items())],
        len(state.index),
        array("I", state.index.free).tobytes(),
    )  # fmt: skip


# ---------------------------------------------------------------- restore


def restore(chunks: Iterable[bytes], limits: Limits, shards: int = 1) -> tuple[State, Memory]:
    """The state of captured chunks, and fresh leader memory beside it. ValueError when they are of another
    format or of a cluster with another number of shards."""
    source = iter(chunks)
    head = msgspec.msgpack.decode(next(source), type=_HeadWithPools)
    if head.format != FORMAT:
        raise ValueError(f"snapshot format {head.format}; this release reads {FORMAT}")
    state = State(head.shard, shards)
    _restore_head(state, head)
    sessions = msgspec.msgpack.decode(next(source), type=_Sessions)
    decoder = msgspec.msgpack.Decoder(_Slots)
    intern: dict[bytes, bytes] = {}
    while len(state.index) < head.slots:
        _restore_slots(state.index, decoder.decode(next(source)), intern)
    *rest, last = source
    if (len(rest) == 0) if shards > 1 else (rest and not capture_told.begins(rest[0])):
        raise ValueError(f"the snapshot is not of one of {shards} shards")
    if shards > 1:
        _restore_spread(state, msgspec.msgpack.decode(rest.pop(0), type=_Spread))
    recency = msgspec.msgpack.decode(last, type=_Recency)
    index = state.index
    capture_told.restore(state, rest)
    index.used_ms = array("Q", recency.used_ms)
    index.free = list(array("I", head.free))
    _restore_sessions(state, sessions)
    _derive(state)
    memory = Memory(state, limits)
    _remind(state, memory)
    return state, memory


def _restore_head(state: State, head: _HeadWithPools) -> None:
    state.seq, state.epoch, state.cluster = head.seq, head.epoch, head.cluster
    state.now_ms, state.takeover_ms, state.switch = head.now_ms, head.takeover_ms, head.switch
    state.switch_reasons = {(scope, id): reason for scope, id, reason in head.switch_reasons}
    state.session_next, state.table_next, state.grant_next = (
        head.session_next,
        head.table_next,
        head.grant_next,
    )
    for id, quota, switch, budget in head.tenants:
        tenant = state.tenants[id] = Tenant(id)
        tenant.quota, tenant.switch = quota, switch
        tenant.usage.budget_bytes, tenant.usage.budget_blocks = budget
    for id, number, kind, options, capacity, domain, switch in head.storages:
        storage = state.storages[id] = Storage(id, number, kind, options)
        state.storage_of[number] = storage
        if storage.volatile:
            state.volatile.add(number)
        storage.capacity_bytes = storage.usage.budget_bytes = capacity
        storage.fault_domain, storage.switch = domain, switch
    for id, pool, spent in head.pools:
        state.storages[id].pool, state.storages[id].spent = pool, spent
    for id, owner, storages, quota, high, low, eviction, switch, budget in head.groups:
        group = state.groups[id] = Group(id, state.tenants[owner])
        group.storages, group.quota, group.eviction, group.switch = storages, quota, eviction, switch
        group.high_permille, group.low_permille = high, low
        group.usage.budget_bytes, group.usage.budget_blocks = budget
    for id, group_id, fingerprint, quota, switch, retiring, tables, budget in head.instances:
        instance = make_instance(state, id, state.groups[group_id], fingerprint, tables, 0)
        instance.quota, instance.switch, instance.retiring = quota, switch, retiring
        instance.usage.budget_bytes, instance.usage.budget_blocks = budget
    state.retiring = dict.fromkeys(head.retiring)
    state.engines = {one.id: Member(**msgspec.structs.asdict(one)) for one in head.engines}
    state.workers = {one.id: Member(**msgspec.structs.asdict(one)) for one in head.workers}
    for instance in state.instances.values():
        instance.effective = state.effective_switch(instance)


def _restore_spread(state: State, spread: _Spread) -> None:
    if spread.shards != state.shards:
        raise ValueError(f"the snapshot is of a cluster of {spread.shards} shards, not {state.shards}")
    state.catalogue_version, state.return_next = spread.catalogue_version, spread.return_next
    state.outstanding = {one.number: one for one in spread.outstanding}
    state.returns_taken = spread.returns_taken
    for scope, id, made_seq, since, slices in spread.held:
        state.held[scope, id] = Held(made_seq, since, slices)
    for id, budget, left_seq in spread.storages:
        state.storages[id].usage.budget_bytes = budget
        state.storages[id].left_seq = left_seq
    for id, shard in spread.instances:
        state.instances[id].shard = shard


def _restore_slots(index: BlockIndex, part: _Slots, intern: dict[bytes, bytes]) -> None:
    assert part.first == len(index), "chunks out of order"
    count = len(part.key)
    # a parent key is the same object as its block's key, as it is when written live: 80 bytes a block
    keys = part.key
    intern.update(zip(keys, keys, strict=True))
    parents = [intern.get(one, one) if one is not None else None for one in part.parent]
    index.key += keys
    index.parent += parents
    index.table.frombytes(part.table)
    index.state += part.state
    index.generation.frombytes(part.generation)
    index.storage.frombytes(part.storage)
    index.done.frombytes(part.done)
    index.sums += part.sums
    index.session.frombytes(part.session)
    index.children.frombytes(bytes(4 * count))
    index.pins.frombytes(bytes(4 * count))
    index.visible += part.state.translate(bytes(int(at == SERVING) for at in range(256)))


def _restore_sessions(state: State, saved: _Sessions) -> None:
    for number, engine, incarnation, table, ttl_ms, deadline_ms, slots, generations, status in saved.open:
        state.sessions[number] = Session(
            number, engine, incarnation, state.index.tables[table], ttl_ms, deadline_ms, array("I", slots),
            array("I", generations), bytearray(status),
        )  # fmt: skip
        state.sessions_of.setdefault(engine, set()).add(number)
    for ended in saved.ended:
        state.ended[ended.number] = ended
    for client, request_id, event in saved.remembered:
        state.remembered[client, request_id] = msgspec.convert(event, Remembered)
    state.deleting = dict(saved.deleting)


def _derive(state: State) -> None:
    """Key tables, links and counters from the columns."""
    index = state.index
    table_of, key_of, parent_of, children = index.table, index.key, index.parent, index.children
    live = [slot for slot, at in enumerate(index.state) if at in (SERVING, WRITING)]
    slots_of = {number: table.slots for number, table in index.tables.items()}
    for slot in live:
        slots_of[table_of[slot]][key_of[slot]] = slot
    homes = {
        number: (table.primary, table.dependency.slots.get, table.dependency.pending)
        for number, table in index.tables.items()
    }
    for slot in live:
        primary, find, pending = homes[table_of[slot]]
        needed = parent_of[slot] if primary else key_of[slot]
        if needed is None:
            continue
        upper = find(needed)
        if upper is None:
            pending[needed] = pending.get(needed, 0) + 1
        else:
            children[upper] += 1
    counts: Counter[tuple[int, int, bool]] = Counter()
    for (number, storage, at), count in Counter(
        zip(table_of, index.storage, index.state, strict=True)
    ).items():
        if at != GONE:
            counts[number, storage, at == DELETING] += count
        if at == DELETING:
            index.tables[number].blocks_deleting += count
            index.deleting_count += count
    for (number, storage, deleting), count in counts.items():
        table = index.tables[number]
        instance = state.instances[table.instance]
        for usage in chain(state.scopes(instance), (state.storage_of[storage].usage,)):
            if deleting:
                usage.deleting_blocks += count
                usage.deleting_bytes += count * table.size_bytes
            else:
                usage.blocks += count
                usage.bytes += count * table.size_bytes
    for table in index.tables.values():
        rebuild(index, table)
    told.derive(state)


def _remind(state: State, memory: Memory) -> None:
    """Leader memory that follows from the state: deadlines and what waits for deletion, scopes under
    pressure."""
    for session in state.sessions.values():
        memory.watch_session(session.number, session.deadline_ms)
    for slot, not_before_ms in state.deleting.items():
        memory.deletions.queue((slot,), not_before_ms)
    usages = chain(
        (one.usage for one in state.tenants.values()),
        (one.usage for one in state.groups.values()),
        (one.usage for one in state.instances.values()),
        (one.usage for one in state.storages.values()),
    )
    memory.pressed.update(usages)
