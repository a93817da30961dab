"""What every elector promises.

Leadership is a lease of `ttl_ms` that a replica renews. An elector never makes anything safe: the epoch in
the journal fences writes, and a leader answers only while its own monotonic clock says that its lease is
valid. What an elector adds is that, normally, only one replica tries.

One object speaks for one *life* of a replica, one process from start to end. A process that was killed and
comes back under the same name is another life, holds nothing of what the earlier one held, and has to wait
for the earlier one's lease like anybody else: the earlier one may only be stopped, and still count on its
lease.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says of itself with each renewal. Small: it is written to the elector every time."""

    applied: dict[int, int] = field(default_factory=dict)
    """Shard -> seq up to which this replica has applied the journal."""
    journal_ok: bool = True
    """Whether it reaches the journal. A leader that does not hands over to one that does."""
    ready: bool = False
    """Whether it could lead: everything loaded, not draining."""


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that is alive, or at most one ttl dead."""

    replica: str
    url: str
    """Where clients and other replicas reach it."""
    report: Report


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a shard, and who shall have it next."""

    replica: str
    """'' when the shard is free and only a successor is named."""
    url: str
    successor: str = ""
    """The replica for which the last holder resigned; '' as soon as somebody has the shard, or when that
    replica is gone. It is a hint: whoever else wants the shard waits a little, and takes it when the
    successor does not."""


@dataclass(frozen=True, slots=True)
class View:
    """What the elector knew at one moment."""

    holders: Mapping[int, Holder]
    """Only shards that are held or have a successor named. It names this replica only where this very life
    holds the shard: what an earlier life of the same name still holds is left out (and `acquire` refuses it
    until that lease has run out)."""
    members: Mapping[str, Member]
    """Replica -> member; those alive, this one included once it has renewed."""


class Leadership(Protocol):
    """One replica's access to the elector. Every call ends within twice `timeout_ms`, whatever hangs: with an
    answer, LeadershipUnavailable, LeadershipRefused or ReplicaSuperseded.

    Calls may overlap; they are taken one after another.
    """

    async def renew(self, report: Report) -> View:
        """Keeps this replica alive for another `ttl_ms`, and says what is so after that.

        A lease that was lost meanwhile is made anew, without the shards that went with it. Where the view
        names this replica as holder, that is valid until `ttl_ms` after the moment *before this call*, by a
        clock that does not stop while the machine sleeps: counting from the reply would count on time that
        the elector has not given.
        """
        ...

    async def look(self) -> View:
        """The view without renewing anything. It prolongs nothing, not even where it names this replica."""
        ...

    async def acquire(self, shard: int) -> bool:
        """Takes the shard when nobody alive holds it; True also when this life holds it already.

        True is worth no more than the last renewal: what was taken is valid until `ttl_ms` after *that*
        one's start. So renew first, then acquire. A named successor is not looked at here: who waits for
        whom is the caller's rule.
        """
        ...

    async def resign(self, shard: int, successor: str = "") -> None:
        """Lets go of the shard if this life holds it, and names who shall have it next.

        Stop answering for the shard first: from this call's start on another may have it.
        """
        ...

    async def close(self) -> None:
        """Lets go of everything at once, so that nobody has to wait for a ttl. Never raises, and ends in time
        also when nobody answers; what was held then runs out by itself. May be called twice."""
        ...
