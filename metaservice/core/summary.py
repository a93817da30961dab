"""What a state adds up to: replicas compare it every few seconds, where a digest would take too long.

It does not look at blocks one by one, only at what they are counted in; nor at any order, so that a state
from a snapshot gives the same as one that was replayed.
"""

from collections.abc import Iterable
from hashlib import blake2b
from itertools import chain

from msgspec.msgpack import encode
from msgspec.structs import astuple

from .state import WINDOW_FIRST, State, Usage


class StateDiverged(AssertionError):
    """This replica's state is not what the leader's was at the same seq (invariant I6): it must be thrown
    away."""


def summary(state: State) -> bytes:
    """16 bytes, equal for equal states. O(what is registered)."""
    index = state.index
    numbers = (
        state.shard, state.shards, state.epoch, state.cluster, state.takeover_ms,
        state.session_next, state.table_next, state.grant_next, state.catalogue_version, state.return_next,
        len(index), len(index.free), index.deleting_count, len(index.tables),
        len(state.sessions), len(state.ended), len(state.remembered), len(state.retiring),
        len(state.switch_reasons), len(state.engines), len(state.workers),
        sum(one.expired_ms for one in chain(state.engines.values(), state.workers.values())),
        sum(one.deadline_ms for one in state.sessions.values()),
        sorted(state.outstanding), state.returns_taken,
        sum(sum(amount or 0 for amount in chain(*held.slices)) for held in state.held.values()),
        [
            _totals(one.usage for one in state.tenants.values()),
            _totals(one.usage for one in state.groups.values()),
            _totals(one.usage for one in state.instances.values()),
            _totals(one.usage for one in state.storages.values()),
        ],
    )  # fmt: skip
    # beside the rest, so that a state without pools adds up to what it did before there were any
    pools = sorted((id, *astuple(one.pool)) for id, one in state.storages.items() if one.pool is not None)
    told = [state.window, len(state.untold), len(state.tombstones), index.announced.count(1)]
    told += [len(state.doomed)] if state.doomed else []
    extra = [*([pools] if pools else []), *([told] if state.window > WINDOW_FIRST else [])]
    return blake2b(encode((*numbers, *extra) if extra else numbers), digest_size=16).digest()


def _totals(usages: Iterable[Usage]) -> list[int]:
    totals = [0] * 8
    for usage in usages:
        totals[0] += 1
        totals[1] += usage.bytes
        totals[2] += usage.blocks
        totals[3] += usage.deleting_bytes
        totals[4] += usage.deleting_blocks
        totals[5] += usage.budget_bytes or 0
        totals[6] += usage.budget_blocks or 0
        totals[7] += (usage.budget_bytes is None) + (usage.budget_blocks is None)
    return totals
