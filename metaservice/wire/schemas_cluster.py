"""The cluster as one replica sees it."""

from msgspec import field

from .schemas import Reply


class ClusterShard(Reply, kw_only=True):
    """One shard as the asked replica sees it. `role` is its own: follower, promoting, leader or demoting;
    `leader` and `leader_url` are empty while nobody is known to lead.

    `seq` is durable on the leader and applied on a follower, `lag` how many behind the journal's head it was
    when that was last read, `lease_left_ms` how long it may still answer without another renewal (0: it does
    not lead).
    """

    shard: int
    role: str
    status: str
    reason: str
    ready: bool
    leader: str
    leader_url: str
    epoch: int
    seq: int
    lag: int = 0
    staleness_ms: int = 0
    lease_left_ms: int = 0


class ClusterMember(Reply, kw_only=True):
    """A replica that is alive, by what it last said of itself. `applied`: shard number (as text) to seq."""

    replica: str
    url: str
    ready: bool
    journal_ok: bool = True
    applied: dict[str, int] = field(default_factory=dict)


class ClusterReply(Reply, kw_only=True):
    """`GET /v1/cluster`: the asked replica, the members it knows, and each shard, in every state of the
    replica."""

    replica: str
    url: str
    cluster: str
    status: str
    reason: str
    ready: bool
    members: list[ClusterMember]
    shards: list[ClusterShard]
