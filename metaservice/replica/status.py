"""What a replica says of itself and of the cluster: plain data for `GET /v1/cluster`, and numbers for a
scrape."""

from collections.abc import Sequence
from typing import Any

from .election import FOR_EVER, Election
from .shard import Shard

_LARGEST = frozenset({"epoch", "durable_seq", "staleness_ms", "append_stalled_ms", "writes_refused"})


def members(election: Election) -> list[dict[str, Any]]:
    """The replicas that are alive, by what they last said."""
    view = election.view
    return [
        {
            "replica": id,
            "url": one.url,
            "ready": one.report.ready,
            "journal_ok": one.report.journal_ok,
            "applied": {str(shard): seq for shard, seq in one.report.applied.items()},
        }
        for id, one in sorted(view.members.items() if view is not None else ())
    ]


def shards(election: Election, all_shards: Sequence[Shard], now_s: float) -> list[dict[str, Any]]:
    """Each shard as this replica has it."""
    view = election.view
    found: list[dict[str, Any]] = []
    for shard in all_shards:
        leader, url = election.leader(shard.number)
        reports = [one.report.applied for one in view.members.values()] if view is not None else []
        head_seq = max((applied.get(shard.number, 0) for applied in reports), default=0)
        left_s = shard.lease_until_s - now_s
        limited = shard.ready and shard.lease_until_s != FOR_EVER
        found.append(
            {
                "shard": shard.number,
                "role": str(shard.role),
                "status": shard.status,
                "reason": election.said.get(shard.number, shard.reason),
                "ready": shard.ready,
                "leader": leader,
                "leader_url": url,
                "epoch": shard.epoch,
                "seq": shard.durable_seq,
                "lag": max(0, head_seq - shard.durable_seq),
                "staleness_ms": shard.staleness_ms,
                "lease_left_ms": max(0, int(left_s * 1000)) if limited else 0,
            }
        )
    return found


def gauges(all_shards: Sequence[Shard]) -> dict[str, float]:
    """Numbers of now over all shards: the largest of what has no sum, the sum of all else."""
    told: dict[str, float] = {}
    for shard in all_shards:
        for name, value in shard.gauges().items():
            if name in _LARGEST:
                told[name] = max(told.get(name, 0.0), value)
            else:
                told[name] = told.get(name, 0.0) + value
    return told
