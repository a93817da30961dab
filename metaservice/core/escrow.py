"""Limits that span shards: who may use how much of them, as replicated state.

A limit (tenant, group: bytes and blocks; storage: bytes) is divided into slices, one a shard. A shard admits
within its slice and asks nobody. The catalogue shard says what every shard was granted; a shard's own journal
says what it has of that. Both speak in amounts that are added and subtracted, and each amount moves in two
steps, the taking first:

    free -> granted   SliceGranted, durable in the catalogue, is what the shard adds when its copy comes;
    slice -> free     SliceReturned, durable in the shard, is what the catalogue adds to the free budget.

So whatever crashes in between, an amount is for a while in nobody's hands, never in two. Grants happen once
because a shard takes the catalogue's events in order, each once, and returns because the catalogue takes them
by number. The catalogue shard's own slice needs no second step: it is a budget in the same journal.

A limit that is set where there was none finds shards that use it already. Such a shard counts as unlimited in
the catalogue, and nobody is granted anything, until it has bound itself to what it uses (a `kept` return).
Returns name the catalogue version that they were made under: what was made under an older limit, or for an
earlier scope of the same name, has a number but no effect.
"""

from collections.abc import Sequence

from .model import SwitchScope
from .replies import Returned
from .state import Held, Pair, ScopeKey, State, Usage

DIMENSIONS = 2
"""0: bytes, 1: blocks."""


def limit_of(state: State, scope: SwitchScope, id: str) -> Pair:
    """The operator's (bytes, blocks) limit of a tenant, group or storage; None where there is none."""
    if scope is SwitchScope.tenant:
        quota = state.tenants[id].quota
    elif scope is SwitchScope.group:
        quota = state.groups[id].quota
    else:
        return state.storages[id].capacity_bytes, None
    return quota.bytes, quota.blocks


def find_usage(state: State, scope: SwitchScope, id: str) -> Usage | None:
    """What this shard uses of a tenant, group, instance or storage, None when there is no such thing."""
    if scope is SwitchScope.tenant:
        tenant = state.tenants.get(id)
        return tenant.usage if tenant is not None else None
    if scope is SwitchScope.group:
        group = state.groups.get(id)
        return group.usage if group is not None else None
    if scope is SwitchScope.instance:
        instance = state.instances.get(id)
        return instance.usage if instance is not None else None
    storage = state.storages.get(id)
    return storage.usage if storage is not None else None


def change_limit(state: State, usage: Usage, made: bool, old: Pair, new: Pair) -> None:
    """The operator's limit of a scope that spans shards became another one. What was granted stays, but for
    dimensions that have no limit now (unlimited for everybody) or a scope that is new (nothing granted yet).
    """
    pair = [usage.budget_bytes, usage.budget_blocks]
    for at in range(DIMENSIONS):
        if new[at] is None:
            pair[at] = None
        elif made:
            pair[at] = 0
    usage.budget_bytes, usage.budget_blocks = pair
    if state.shard:
        return
    key = (usage.scope, usage.id)
    if made:
        slices = [[None if limit is None else 0 for limit in new] for _ in range(state.shards - 1)]
        state.held[key] = Held(state.seq, [0, 0], slices)
        return
    held = state.held[key]
    for at in range(DIMENSIONS):
        if new[at] is None:
            for one in held.slices:
                one[at] = None
        elif old[at] is None:
            held.since[at] = state.seq


def granted(state: State, key: ScopeKey) -> list[list[int | None]]:
    """What every shard was granted, by shard; the catalogue's own budget is what it was granted."""
    usage = find_usage(state, *key)
    assert usage is not None
    own: list[int | None] = [usage.budget_bytes, usage.budget_blocks]
    return [own, *([*one] for one in state.held[key].slices)]


def effect(
    returned: Returned, made_seq: int, since: Sequence[int], limit: Pair, pair: Sequence[int | None]
) -> Pair:
    """What taking a return does to what its shard was granted (`pair`): the amounts that count, None where
    nothing does. `since`: when each dimension's limit came to be where there had been none."""
    if returned.version < made_seq:
        return None, None
    amounts: list[int | None] = [None, None]
    for at, amount in enumerate((returned.bytes, returned.blocks)):
        if amount is None or limit[at] is None:
            continue
        bounded = pair[at] is not None
        if bounded != returned.kept and (bounded or returned.version >= since[at]):
            amounts[at] = amount
    return amounts[0], amounts[1]


def take_effect(pair: list[int | None], amounts: Pair, kept: bool) -> None:
    """Do to `pair` what `effect` said."""
    for at, amount in enumerate(amounts):
        if amount is None:
            continue
        have = pair[at]
        if kept:
            pair[at] = amount
        else:
            assert have is not None and have >= amount, "a shard gives up more than it was granted"
            pair[at] = have - amount
