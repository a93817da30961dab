"""Leases named in one call may be of several shards, and each shard's leader answers for its own only."""

from array import array
from collections.abc import Sequence

from .calls import shard_of
from .results import LeasesResult


def by_shard(leases: Sequence[str]) -> list[Sequence[str]]:
    """The leases in runs of one shard each, every run in the order named."""
    if len(leases) < 2:
        return [leases]
    runs: dict[int, list[str]] = {}
    for lease in leases:
        runs.setdefault(shard_of(lease), []).append(lease)
    return list(runs.values())


def joined(leases: Sequence[str], results: list[LeasesResult]) -> LeasesResult:
    """One result for `leases`, in the order named, from those of their runs. It fails when one of them
    does; then the others' outcomes stand all the same."""
    if len(results) == 1:
        return results[0]
    rows = {shard_of(result.leases[0]): iter(range(len(result.leases))) for result in results}
    of_shard = {shard_of(result.leases[0]): result for result in results}
    whole = LeasesResult(leases=list(leases), changed=array("I"))
    outcomes = bytearray()
    for lease in leases:
        result, row = of_shard[shard_of(lease)], next(rows[shard_of(lease)])
        outcomes.append(result.outcomes[row])
        whole.changed.append(result.changed[row])
    whole.outcomes = bytes(outcomes)
    whole.ttl_ms = min(result.ttl_ms for result in results)
    whole.deadline_ms = min(result.deadline_ms for result in results)
    for result in results:
        whole.switch = whole.switch or result.switch
        if whole.failure is None:
            whole.failure, whole.detail = result.failure, result.detail
    return whole
