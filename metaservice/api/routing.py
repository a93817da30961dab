"""Which shard a call is for: from the instance that it names, or from the id, which carries it.

Whether this replica leads that shard is found out by asking it: a shard that is led elsewhere raises
NotLeader.
"""

from typing import Any

from msgspec.structs import replace

from metaservice.core import commands
from metaservice.core.ids import parse_name, shard_of
from metaservice.replica.errors import NotLeader, ShardUnavailable

from .call import Call
from .errors import ApiError
from .names import name
from .port import CATALOGUE, InstanceInfo, ReplicaPort, ShardPort
from .settings import ApiSettings

SEQ = b"x-ucm-seq"
STALENESS = b"x-ucm-staleness-ms"


Position = tuple[int, int, bytes]
"""Epoch and seq of a shard, and the header line that says so."""
NO_POSITION: Position = (0, 0, b"")


class Routing:
    """Finds shards, and notes in the call which one answers it."""

    def __init__(self, replica: ReplicaPort) -> None:
        self.replica = replica
        self.shards = [replica.shard(number) for number in range(replica.shards)]
        self.catalogue = self.shards[CATALOGUE]
        self._home = replica.home
        self._positions: list[Position] = [NO_POSITION] * len(self.shards)

    def instance(self, call: Call, instance: str) -> tuple[ShardPort, InstanceInfo]:
        """The home of an instance and what is known of it there. Raises `instance_unknown`, and NotLeader or
        ShardUnavailable where this replica cannot know.
        """
        number = self._home(instance)
        if number is None:
            raise self.unknown(instance)
        call.shard = number
        shard = self.shards[number]
        try:
            info: InstanceInfo | None = shard.instance(instance)
        except ShardUnavailable as failure:
            if shard.ready:
                raise
            raise NotLeader(number, failure.message) from None
        if info is None:
            raise self.unknown(instance)
        return shard, info

    def unknown(self, instance: str) -> Exception:
        """The error for an instance that is in no catalogue: never said by a replica that has none."""
        name(instance, "instance")
        if not self.catalogue.epoch:
            return ShardUnavailable("not_ready", f"{self.catalogue.status}: {self.catalogue.reason}")
        return ApiError("instance_unknown", "no instance of this name is registered", "instance")

    def session(self, call: Call) -> tuple[ShardPort, int]:
        """The shard and number of the write session in the path. Raises `session_unknown`."""
        numbers = parse_name(name(call.segments[3], "session"), "w", 2)
        if numbers is None or numbers[0] >= len(self.shards):
            raise ApiError("session_unknown", "no write session of this service has this id", "session")
        call.shard = numbers[0]
        return self.shards[numbers[0]], numbers[1]

    def task(self, call: Call, task: str) -> ShardPort:
        """The shard of a deletion task; for an id that is none: the catalogue's, which knows no such task."""
        numbers = parse_name(task, "t", 3)
        call.shard = CATALOGUE if numbers is None or numbers[0] >= len(self.shards) else numbers[0]
        return self.shards[call.shard]

    def lease(self, lease: str) -> int:
        """The number of a read lease's shard; for an id that is none: the catalogue's, which knows no such
        lease.
        """
        numbers = parse_name(lease, "r", 3)
        return CATALOGUE if numbers is None or numbers[0] >= len(self.shards) else numbers[0]

    def location(self, location: int) -> int:
        """The number of a location's shard; for one that no shard can have: the catalogue's."""
        number = shard_of(location)
        return number if number < len(self.shards) else CATALOGUE

    def registry(self, call: Call) -> ShardPort:
        """The catalogue's shard, for what is registered there."""
        call.shard = CATALOGUE
        return self.catalogue

    def position(self, call: Call) -> Position:
        """From where in which shard's journal a call is answered now. The line is made once a position."""
        number = call.shard
        if number < 0:
            return NO_POSITION
        shard = self.shards[number]
        seq, epoch = shard.durable_seq, shard.epoch
        known = self._positions[number]
        if known[1] != seq or known[0] != epoch:
            line = b"%b: %d/%d/%d\r\n" % (SEQ, number, epoch, seq)
            known = self._positions[number] = (epoch, seq, line)
        return known


def local_state(shard: ShardPort, *, stale: bool, staleness_ms_max: int) -> dict[str, str] | None:
    """The headers of a view that may be given from the state that this replica has; None: only the leader
    may.

    `stale`: the caller takes what a follower has, when that is no older than `staleness_ms_max`.
    """
    if shard.ready:
        return {}
    staleness_ms = shard.staleness_ms
    if not stale or staleness_ms > staleness_ms_max:
        return None
    return {
        SEQ.decode(): f"{shard.number}/{shard.epoch}/{shard.durable_seq}",
        STALENESS.decode(): str(staleness_ms),
    }


def young_enough(shard: ShardPort, staleness_ms_max: int, settings: ApiSettings) -> int:
    """How old a follower's state is. Raises NotLeader when that is too old for the caller or the service. To
    be asked before the lookup: that may only be younger than is told.
    """
    staleness_ms = shard.staleness_ms
    if staleness_ms > min(staleness_ms_max, settings.staleness_ms_max):
        raise NotLeader(shard.number, f"shard {shard.number} is followed here, {staleness_ms} ms behind")
    return staleness_ms


def look(shard: ShardPort, command: commands.Lookup) -> Any:
    """A lookup in the state that this replica has. Raises NotLeader when it has none."""
    try:
        return shard.look(replace(command, engine="", incarnation=""))
    except ShardUnavailable as failure:
        raise NotLeader(shard.number, failure.message) from None
