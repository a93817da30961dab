"""Whether a state is consistent in itself: every counter recomputed from the rows. For tests, the simulator
and repair tools."""

from .index import DELETING, GONE, SERVING, WRITING
from .outcomes import FinishStatus
from .state import State, Usage


def check(state: State) -> None:
    """Raises AssertionError naming the first contradiction (invariant I4 and the links behind eviction)."""
    index = state.index
    count = len(index)
    columns = (
        index.parent, index.table, index.state, index.generation, index.storage, index.done, index.sums,
        index.children,
        index.session, index.visible, index.used_ms, index.pins,
    )  # fmt: skip
    assert all(len(column) == count for column in columns), "columns have different lengths"
    gone = [slot for slot in range(count) if index.state[slot] == GONE]
    assert sorted(index.free) == gone, "the free list is not the gone slots"
    assert len(set(index.free)) == len(index.free), "a slot is free twice"
    _check_links(state)
    _check_usage(state)
    _check_pools(state)
    _check_sessions(state)


def _check_links(state: State) -> None:
    index = state.index
    children: dict[int, int] = {}
    pending: dict[tuple[int, bytes], int] = {}
    live = 0
    for slot in range(len(index)):
        if index.state[slot] not in (WRITING, SERVING):
            assert not index.visible[slot], "a block is visible that does not serve"
            continue
        live += 1
        table = index.tables[index.table[slot]]
        assert table.slots.get(index.key[slot]) == slot, "a live location is not in its key table"
        assert index.state[slot] == SERVING or not index.visible[slot], (
            "a block is visible that is being written"
        )
        needed = index.parent[slot] if table.primary else index.key[slot]
        if needed is None:
            continue
        home = table.dependency
        upper = home.slots.get(needed)
        if upper is None:
            pending[home.number, needed] = pending.get((home.number, needed), 0) + 1
        else:
            children[upper] = children.get(upper, 0) + 1
    assert live == sum(len(table.slots) for table in index.tables.values()), (
        "key tables hold more than live blocks"
    )
    for slot in range(len(index)):
        assert index.children[slot] == children.get(slot, 0), f"children of slot {slot} are counted wrongly"
    counted = {(table.number, key): n for table in index.tables.values() for key, n in table.pending.items()}
    assert counted == pending, "dependents of absent blocks are counted wrongly"


def _check_usage(state: State) -> None:
    index = state.index
    expected: dict[Usage, list[int]] = {}
    deleting = 0
    for slot in range(len(index)):
        at = index.state[slot]
        if at == GONE:
            continue
        table = index.tables[index.table[slot]]
        for usage in (
            *state.scopes(state.instances[table.instance]),
            state.storage_of[index.storage[slot]].usage,
        ):
            sums = expected.setdefault(usage, [0, 0, 0, 0])
            offset = 2 if at == DELETING else 0
            sums[offset] += table.size_bytes
            sums[offset + 1] += 1
        deleting += at == DELETING
    assert index.deleting_count == deleting == len(state.deleting), "deleting locations are counted wrongly"
    for registry in (state.tenants, state.groups, state.instances, state.storages):
        for one in registry.values():
            usage = one.usage
            counted = [usage.bytes, usage.blocks, usage.deleting_bytes, usage.deleting_blocks]
            assert counted == expected.get(usage, [0, 0, 0, 0]), (
                f"usage of {usage.scope.name} {usage.id} is wrong"
            )


def _check_pools(state: State) -> None:
    for storage in state.storages.values():
        pool, used = storage.pool, storage.usage.blocks + storage.usage.deleting_blocks
        if pool is None:
            assert not (storage.volatile and used), f"locations of {storage.id} are left without their pool"
            continue
        owner = state.workers.get(pool.worker)
        assert storage.volatile, f"{storage.id} has a pool and is not volatile"
        assert owner is not None and not owner.expired_ms, f"the pool of {storage.id} is a dead worker's"
        assert owner.incarnation == pool.incarnation, f"the pool of {storage.id} is of another incarnation"
        assert storage.id in owner.storages, f"the pool of {storage.id} is of a worker that left it"
        assert pool.incarnation not in storage.spent, f"the pool of {storage.id} is one that was gone"
        for session in state.sessions.values():
            if session.number < pool.session_first:
                pending = (
                    slot
                    for slot, status in zip(session.slots, session.status, strict=True)
                    if status == FinishStatus.pending
                )
                assert all(state.index.storage[slot] != storage.number for slot in pending), (
                    f"a location in an earlier pool of {storage.id} is left"
                )


def _check_sessions(state: State) -> None:
    index = state.index
    writing = 0
    for session in state.sessions.values():
        assert session.open == session.status.count(FinishStatus.pending) > 0, (
            "an open session has no open location"
        )
        for slot, generation, status in zip(session.slots, session.generations, session.status, strict=True):
            if status == FinishStatus.pending:
                writing += 1
                assert index.session[slot] == session.number, "a pending location is of another session"
                assert index.generation[slot] == generation, "a pending location has another generation"
                assert index.state[slot] == WRITING, "a pending location is not being written"
    assert writing == index.state.count(WRITING), "a location is being written in no session"
