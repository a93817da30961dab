"""An elector in memory, with time as an argument: for tests, and for the simulator.

It behaves as etcd does: a life has one lease, its shards go with it, and time is the elector's own. Calls are
functions of their arguments and the state; nothing here knows a clock, chance or a loop.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from metaservice.leadership.errors import LeadershipUnavailable, ReplicaSuperseded
from metaservice.leadership.port import Holder, Leadership, Member, Report, View


@dataclass(slots=True)
class _Lease:
    replica: str
    url: str
    report: Report
    ends_ms: int
    superseded: bool = False
    shards: set[int] = field(default_factory=set)


class MemoryElector:
    """The state that all replicas of a cluster share. All times are the elector's own milliseconds; the
    caller passes them, never smaller than before.

    A `life` is any string that no other process of the cluster uses.
    """

    def __init__(self, shards: int, ttl_ms: int) -> None:
        self.shards = shards
        self.ttl_ms = ttl_ms
        self._leases: dict[str, _Lease] = {}
        self._successors: dict[int, str] = {}
        self._superseded: set[str] = set()

    def renew(self, life: str, replica: str, url: str, report: Report, now_ms: int) -> View:
        """As `Leadership.renew`, for one life."""
        self._expire(now_ms)
        if life in self._superseded:
            raise ReplicaSuperseded(replica)
        lease = self._leases.get(life)
        if lease is None:
            for other, their in self._leases.items():
                if their.replica == replica:
                    their.superseded = True
                    self._superseded.add(other)
            self._leases[life] = _Lease(replica, url, report, now_ms + self.ttl_ms)
        else:
            lease.url, lease.report, lease.ends_ms = url, report, now_ms + self.ttl_ms
        return self.look(life, replica, now_ms)

    def look(self, life: str, replica: str, now_ms: int) -> View:
        """As `Leadership.look`: what `replica`, in its life `life`, is told."""
        self._expire(now_ms)
        alive = {lease.replica: lease for lease in self._leases.values() if not lease.superseded}
        holders = {
            shard: Holder("", "", successor)
            for shard, successor in self._successors.items()
            if successor in alive
        }
        for holder, lease in self._leases.items():
            if lease.replica != replica or holder == life:
                holders |= {shard: Holder(lease.replica, lease.url) for shard in lease.shards}
            else:
                for shard in lease.shards:
                    holders.pop(shard, None)
        members = {name: Member(name, lease.url, lease.report) for name, lease in alive.items()}
        return View(dict(sorted(holders.items())), dict(sorted(members.items())))

    def acquire(self, life: str, shard: int, now_ms: int) -> bool:
        """As `Leadership.acquire`."""
        self._expire(now_ms)
        lease = self._leases.get(life)
        if lease is None or lease.superseded or not 0 <= shard < self.shards:
            return False
        holder = self.holder(shard, now_ms)
        if holder is None:
            lease.shards.add(shard)
            self._successors.pop(shard, None)
        return holder in (None, life)

    def resign(self, life: str, shard: int, successor: str, now_ms: int) -> None:
        """As `Leadership.resign`."""
        self._expire(now_ms)
        lease = self._leases.get(life)
        if lease is not None and shard in lease.shards:
            lease.shards.discard(shard)
            self._successors[shard] = successor

    def revoke(self, life: str) -> None:
        """Ends the lease of a life at once: when it closes, and also as the fault of an elector that forgets
        a lease which it has just renewed (case D12)."""
        self._leases.pop(life, None)

    def drop(self, shard: int) -> None:
        """The fault of a shard's key that somebody deletes by hand."""
        for lease in self._leases.values():
            lease.shards.discard(shard)

    def holder(self, shard: int, now_ms: int) -> str | None:
        """The life that holds the shard; None when it is free."""
        self._expire(now_ms)
        return next((life for life, lease in self._leases.items() if shard in lease.shards), None)

    def holds_lease(self, life: str, now_ms: int) -> bool:
        """Whether the life's lease has not run out."""
        self._expire(now_ms)
        return life in self._leases

    def _expire(self, now_ms: int) -> None:
        for life in [life for life, lease in self._leases.items() if lease.ends_ms <= now_ms]:
            del self._leases[life]


class MemoryLeadership(Leadership):
    """The port over a shared elector, for tests that run replicas in one process."""

    def __init__(
        self, elector: MemoryElector, replica: str, url: str, life: str, now_ms: Callable[[], int]
    ) -> None:
        self._elector = elector
        self._replica = replica
        self._url = url
        self._life = life
        self._now_ms = now_ms
        self.reachable = True
        """Set to False, every call raises LeadershipUnavailable."""

    async def renew(self, report: Report) -> View:
        self._reach("renewing")
        return self._elector.renew(self._life, self._replica, self._url, report, self._now_ms())

    async def look(self) -> View:
        self._reach("looking")
        return self._elector.look(self._life, self._replica, self._now_ms())

    async def acquire(self, shard: int) -> bool:
        self._reach("acquiring")
        return self._elector.acquire(self._life, shard, self._now_ms())

    async def resign(self, shard: int, successor: str = "") -> None:
        self._reach("resigning")
        self._elector.resign(self._life, shard, successor, self._now_ms())

    async def close(self) -> None:
        if self.reachable:
            self._elector.revoke(self._life)

    def _reach(self, doing: str) -> None:
        if not self.reachable:
            raise LeadershipUnavailable("the elector in memory", doing, "it was made unreachable")
