"""Who leads a shard: the roles of a replica as a table, and the decisions as a pure function of facts.

Time is a number of seconds of the replica's own monotonic clock, handed in. Nothing here waits, asks or
writes: the driver (`node.py`) and the simulator carry out what is decided. Every decision comes with a
sentence for the log, after Patroni's habit.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum

from metaservice.leadership.port import View


class Role(StrEnum):
    """What a replica is for one shard."""

    FOLLOWER = "follower"
    PROMOTING = "promoting"
    LEADER = "leader"
    DEMOTING = "demoting"


class Turn(Enum):
    """What makes a role change."""

    ACQUIRED = "the lease was acquired"
    TOOK_OVER = "the take-over is durable"
    LET_GO = "the lease is lost, given away, or the state cannot be trusted"
    RELEASED = "nothing of the leadership is left"


TABLE: dict[tuple[Role, Turn], Role] = {
    (Role.FOLLOWER, Turn.ACQUIRED): Role.PROMOTING,
    (Role.PROMOTING, Turn.TOOK_OVER): Role.LEADER,
    (Role.PROMOTING, Turn.LET_GO): Role.DEMOTING,
    (Role.LEADER, Turn.LET_GO): Role.DEMOTING,
    (Role.DEMOTING, Turn.RELEASED): Role.FOLLOWER,
}
"""Whatever is not here cannot happen: asking for it is a programmer's error."""


def turned(role: Role, turn: Turn) -> Role:
    """The role after a turn."""
    after = TABLE.get((role, turn))
    assert after is not None, f"a {role.value} cannot turn: {turn.value}"
    return after


class Action(Enum):
    """What the driver has to do now."""

    STAY = "stay"
    CAMPAIGN = "campaign"
    DEMOTE = "demote"
    """Stop leading at once."""
    HAND_OVER = "hand over"
    """Make durable what is queued, then give the lease to the successor."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`successor` goes with HAND_OVER; "" is whoever comes first."""

    action: Action
    sentence: str
    successor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds. `successor_s`: how long the others leave a shard to the one it was handed to; `rank_s`: to
    each that comes before them; `stall_s`: after which an append counts as stalled; `settle_s`: how long a
    replica that leads less has to be able before a shard moves to it."""

    able_s: float = 1.5
    """How long another must have been able to lead before a stalled leader gives way to it: when a database
    that hung for everybody comes back, whoever hears of it first must not cost the leader its shards."""
    successor_s: float = 1.0
    rank_s: float = 0.3
    stall_s: float = 2.5
    settle_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a replica knows when it decides about one shard."""

    now_s: float
    role: Role
    lease_until_s: float
    """How long our lease is good by our own clock; counted from before the renewal was sent."""
    view: View | None
    """What the last renewal or look saw; None: nothing was seen, or too long ago."""
    warm: bool
    """Whether our state stands close enough to the journal's head to take over."""
    journal_ok: bool
    """Whether our own last word with the journal was a good one."""
    stalled_s: float = 0.0
    """For how long our own append has not come through."""
    stopping: bool = False
    hand_to: str | None = None
    """An operator asked for a handover, to this replica or ("") to any."""


class Judge:
    """Decides for one shard of one replica. Keeps only since when it sees what it sees."""

    def __init__(self, shard: int, replica: str, timing: Timing, *, spread: bool = True) -> None:
        self._shard = shard
        self._replica = replica
        self._timing = timing
        self._spread = spread
        self._vacant_s: float | None = None
        self._lighter_since: tuple[str, float] = ("", 0.0)
        self._able_since_s: float | None = None

    def decide(self, facts: Facts) -> Decision:
        """What to do now, and why."""
        if facts.role in (Role.LEADER, Role.PROMOTING):
            self._vacant_s = None
            return self._as_leader(facts)
        if facts.role is Role.DEMOTING:
            return Decision(Action.STAY, "letting go of the leadership")
        return self._as_follower(facts)

    # ------------------------------------------------------------ leading

    def _as_leader(self, facts: Facts) -> Decision:
        if facts.now_s >= facts.lease_until_s:
            return Decision(
                Action.DEMOTE, "our lease is over or no longer ours; another may lead from now on"
            )
        able = self._successor(facts)
        if not able:
            self._able_since_s = None
        elif self._able_since_s is None:
            self._able_since_s = facts.now_s
        if facts.role is Role.PROMOTING:
            return Decision(Action.STAY, "taking over")
        if facts.stopping:
            return Decision(Action.HAND_OVER, "this replica stops", able)
        if facts.hand_to is not None:
            return Decision(Action.HAND_OVER, "an operator asked for it", facts.hand_to or able)
        if facts.stalled_s >= self._timing.stall_s:
            since_s = self._able_since_s
            if since_s is not None and facts.now_s - since_s >= self._timing.able_s:
                return Decision(
                    Action.HAND_OVER,
                    f"our appends have stalled for {facts.stalled_s:.1f} s, and {able} says that its "
                    "journal works",
                    able,
                )
            return Decision(
                Action.STAY, "the journal answers nobody for long enough: going on with lookups, from memory"
            )
        lighter = self._lighter(facts)
        if lighter:
            return Decision(Action.HAND_OVER, f"we lead more shards than {lighter}", lighter)
        return Decision(Action.STAY, "leading")

    def _successor(self, facts: Facts) -> str:
        """The live, ready replica with a working journal that stands first in the order, "" for none."""
        if facts.view is None:
            return ""
        for replica in order(facts.view, self._shard):
            report = facts.view.members[replica].report
            if replica != self._replica and report.ready and report.journal_ok:
                return replica
        return ""

    def _lighter(self, facts: Facts) -> str:
        """The replica that should lead this shard instead of us, so that all lead about as many, once it has
        been able to for a while; "" for none. One shard at a time: the last of ours."""
        target = ""
        if self._spread and facts.view is not None:
            holders = facts.view.holders.items()
            ours = [shard for shard, holder in holders if holder.replica == self._replica]
            if ours and self._shard == max(ours):
                able = self._successor(facts)
                if able and leads(facts.view, able) <= len(ours) - 2:
                    target = able
        if target != self._lighter_since[0]:
            self._lighter_since = (target, facts.now_s)
        return target if facts.now_s - self._lighter_since[1] >= self._timing.settle_s else ""

    # ------------------------------------------------------------ following

    def _as_follower(self, facts: Facts) -> Decision:
        if facts.view is None:
            self._vacant_s = None
            return Decision(Action.STAY, "nobody can say who leads: the election does not answer")
        holder = facts.view.holders.get(self._shard)
        if holder is not None and holder.replica and holder.replica != self._replica:
            self._vacant_s = None
            return Decision(Action.STAY, f"following {holder.replica}")
        if self._vacant_s is None:
            self._vacant_s = facts.now_s
        unable = _unable(facts)
        if holder is not None and holder.replica:
            if unable:
                # what nobody gives back keeps the others from it as long as we live
                return Decision(Action.HAND_OVER, f"the lease is ours, but {unable}", self._successor(facts))
            return Decision(Action.CAMPAIGN, "the lease is ours already")
        if unable:
            return Decision(Action.STAY, f"nobody leads; {unable}")
        waited_s = facts.now_s - self._vacant_s
        named = holder.successor if holder is not None else ""
        if named and named != self._replica and named in facts.view.members:
            if waited_s < self._timing.successor_s:
                return Decision(Action.STAY, f"nobody leads; {named} was asked to")
        elif not named:
            able = [
                replica
                for replica in order(facts.view, self._shard)
                if replica == self._replica
                or (
                    facts.view.members[replica].report.ready and facts.view.members[replica].report.journal_ok
                )
            ]
            rank = able.index(self._replica) if self._replica in able else len(able)
            if waited_s < rank * self._timing.rank_s:
                return Decision(Action.STAY, f"nobody leads; {able[0]} comes first")
        return Decision(Action.CAMPAIGN, "nobody leads, and we can")


def _unable(facts: Facts) -> str:
    """Why this replica could not lead now, "" when it could."""
    if facts.stopping:
        return "this replica stops"
    if not facts.warm:
        return "still catching up with the journal"
    return "" if facts.journal_ok else "our own journal does not answer"


def leads(view: View, replica: str) -> int:
    """How many shards a replica leads."""
    return sum(holder.replica == replica for holder in view.holders.values())


def order(view: View, shard: int) -> list[str]:
    """The live replicas in the order in which they should lead a shard that nobody leads: those that lead
    the fewest first; among equals, neighbours take neighbouring shards."""
    members = sorted(view.members)
    turn = shard % max(1, len(members))
    return sorted(members[turn:] + members[:turn], key=lambda replica: leads(view, replica))
