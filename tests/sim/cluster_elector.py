"""Who may lead: `MemoryElector` behind the wire, with a clock of its own."""

from metaservice.leadership.errors import ReplicaSuperseded
from metaservice.leadership.memory import MemoryElector
from metaservice.leadership.port import Report, View

from .cluster_net import SILENCE, Host, Silence
from .cluster_setting import TTL_MS
from .cluster_time import Clock, Heap


class Elector(Host):
    """One server. Every method is one request, done whole when it arrives."""

    def __init__(self, heap: Heap, shards: int, clock: Clock) -> None:
        super().__init__(heap, "elector")
        self.clock = clock
        self.state = MemoryElector(shards, TTL_MS)

    def renew(self, life: str, replica: str, report: Report) -> View | Silence:
        """See MemoryElector."""
        try:
            return self.state.renew(life, replica, replica, report, self.clock.mono_ms)
        except ReplicaSuperseded:
            return SILENCE

    def acquire(self, life: str, shard: int) -> bool:
        """See MemoryElector."""
        return self.state.acquire(life, shard, self.clock.mono_ms)

    def resign(self, life: str, shard: int, successor: str) -> None:
        """See MemoryElector."""
        self.state.resign(life, shard, successor, self.clock.mono_ms)

    def holder(self, shard: int) -> str:
        """The replica that has the shard now, "" for none."""
        life = self.state.holder(shard, self.clock.mono_ms)
        return "" if life is None else life.partition("/")[0]
