"""The picture of a cluster that its replicas give together."""

from collections.abc import Sequence

from msgspec import Struct

from metaservice.wire.schemas_cluster import ClusterReply, ClusterShard


class ReplicaStatus(Struct, kw_only=True):
    """One replica. `url` is where it was asked; when it does not answer, `error` says why, and what
    follows is unknown."""

    replica: str
    url: str
    answers: bool
    error: str = ""
    ready: bool = False
    status: str = ""
    reason: str = ""
    journal_ok: bool = True
    leads: list[int] = []
    lag_max: int = 0
    staleness_ms_max: int = 0


class FollowerStatus(Struct, kw_only=True):
    """What a replica that does not lead a shard says of it."""

    replica: str
    role: str
    seq: int
    lag: int
    staleness_ms: int


class ShardStatus(Struct, kw_only=True):
    """One shard. `led`: its leader answered and may serve. `note` says what is wrong where something is."""

    shard: int
    led: bool
    leader: str
    leader_url: str
    epoch: int
    seq: int
    lease_left_ms: int
    note: str
    followers: list[FollowerStatus]


class ClusterStatus(Struct, kw_only=True):
    """The cluster as a whole. `led`: every shard is."""

    cluster: str
    led: bool
    replicas: list[ReplicaStatus]
    shards: list[ShardStatus]


def joined(said: Sequence[ClusterReply], silent: dict[str, str], named: dict[str, str]) -> ClusterStatus:
    """One picture of what the replicas said. `silent`: URL -> error of those that said nothing; `named`: URL
    -> replica, by what the others say."""
    replicas = [
        ReplicaStatus(
            replica=one.replica,
            url=one.url,
            answers=True,
            ready=one.ready,
            status=one.status,
            reason=one.reason,
            journal_ok=all(member.journal_ok for member in one.members if member.replica == one.replica),
            leads=[row.shard for row in one.shards if row.role == "leader" and row.ready],
            lag_max=max((row.lag for row in one.shards), default=0),
            staleness_ms_max=max((row.staleness_ms for row in one.shards), default=0),
        )
        for one in said
    ]
    replicas += [
        ReplicaStatus(replica=named.get(url, ""), url=url, answers=False, error=error)
        for url, error in silent.items()
    ]
    numbers = sorted({row.shard for one in said for row in one.shards})
    shards = [_shard(number, said) for number in numbers]
    return ClusterStatus(
        cluster=max((one.cluster for one in said), default=""),
        led=bool(shards) and all(row.led for row in shards),
        replicas=replicas,
        shards=shards,
    )


def _shard(number: int, said: Sequence[ClusterReply]) -> ShardStatus:
    rows = [(one, row) for one in said for row in one.shards if row.shard == number]
    leaders = sorted(
        ((one, row) for one, row in rows if row.role == "leader" and row.ready),
        key=lambda pair: -pair[1].epoch,
    )
    newest = max((row.epoch for _, row in rows), default=0)
    if leaders:
        one, row = leaders[0]
        leader, leader_url, epoch, seq, left_ms = one.replica, one.url, row.epoch, row.seq, row.lease_left_ms
        others = [f"{other.replica} in epoch {old.epoch}" for other, old in leaders[1:]]
        # Each answered at another moment: between two of them the shard may have changed hands.
        note = f"also led by {', '.join(others)} when that was asked" if others else ""
    else:
        leader, leader_url, note = _why_not_led(rows)
        epoch, left_ms = newest, 0
        seq = max((row.seq for _, row in rows), default=0)
    return ShardStatus(
        shard=number,
        led=bool(leaders),
        leader=leader,
        leader_url=leader_url,
        epoch=epoch,
        seq=seq,
        lease_left_ms=left_ms,
        note=note,
        followers=[
            FollowerStatus(
                replica=one.replica, role=row.role, seq=row.seq, lag=row.lag, staleness_ms=row.staleness_ms
            )
            for one, row in rows
            if not leaders or one.replica != leader
        ],
    )


def _why_not_led(rows: Sequence[tuple[ClusterReply, ClusterShard]]) -> tuple[str, str, str]:
    """(who leads by hearsay, its URL, why the shard is not led)."""
    for one, row in rows:
        if row.role in ("promoting", "leader", "demoting"):
            return one.replica, one.url, f"{one.replica} is {row.role}: {row.reason or row.status}"
    for one, row in rows:
        if row.leader and row.leader not in {other.replica for other, _ in rows}:
            return (
                row.leader,
                row.leader_url,
                f"{row.leader} leads it, says {one.replica}, but does not answer",
            )
    reasons = sorted({row.reason for _, row in rows if row.reason})
    return "", "", f"nobody leads it: {'; '.join(reasons)}" if reasons else "nobody leads it"
