"""What happened to each request, and the figures that follow from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from engine_adapters.replay.messages import Done

IDEAL_DISTANCE_MAX = 0.02
HIT_RATE_DROP_MAX = 0.15


class Common(Struct, frozen=True, kw_only=True):
    """What a run came to. Rates are shares of 1."""

    requests: int
    blocks_asked: int
    blocks_hit: int
    hit_rate: float
    ideal_hit_rate: float
    dirty_reads: int


class ServiceFigures(Common, frozen=True, kw_only=True):
    """The last line of the demo with a service of its own."""

    hit_rate_before_kill: float
    hit_rate_after_kill: float
    hit_rate_drop: float
    orphans_left: int
    seconds: float


class ClusterFigures(Common, frozen=True, kw_only=True):
    """The last line of the demo in a cluster."""

    hit_rate_drop_engine: float
    hit_rate_drop_leader: float
    hit_rate_drop: float
    unavailable_ms: int
    orphans: int
    seconds: float


Figures = ServiceFigures | ClusterFigures

Verdicts = Sequence[tuple[bool, str]]
"""What a run must have shown, each with whether it did."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One request that was answered: by which engine, and what an infinite cache would have hit."""

    engine: str
    ideal_hits: int
    done: Done


class Ledger:
    """All answered requests in the order of their answers. A request whose engine was killed is not among
    them before another engine answered it: each counts once."""

    def __init__(self) -> None:
        self.rows: list[Answered] = []
        self.engine_killed_at: int | None = None
        """How many requests had been answered when the engine was killed."""
        self.service_killed_at: int | None = None
        """The same when a part of the service was killed."""
        self.asked = 0
        self.hits = 0
        self.dirty = 0

    def add(self, engine: str, ideal_hits: int, done: Done) -> None:
        """Enter an answer."""
        self.rows.append(Answered(engine, ideal_hits, done))
        self.asked += done.asked
        self.hits += done.hits
        self.dirty += done.dirty

    def of(self, engine: str) -> list[Answered]:
        """What one engine answered, over its restarts."""
        return [row for row in self.rows if row.engine == engine]

    def figures(self, ideal_hit_rate: float, orphans_left: int, seconds: float) -> ServiceFigures:
        """The figures of the run so far.

        The hit rate of a phase says little by itself: a cache fills up, so later requests hit more than
        earlier ones whatever happens to an engine. So each phase is measured against what an infinite cache
        would have hit on the very same requests: `hit_rate_before_kill` = blocks hit / blocks that could
        have been hit, over the requests answered before the engine was killed; `hit_rate_after_kill` the
        same over all answered after it, on all engines, the killed one's unfinished request and the
        service's own outage included; the drop is their difference. 1.0 is all that was possible, also where
        that was nothing, or where a request found what one handed out after it had already written.
        """
        cut = len(self.rows) if self.engine_killed_at is None else self.engine_killed_at
        before = min(1.0, share_of_possible(self.rows[:cut]))
        after = min(1.0, share_of_possible(self.rows[cut:]))
        return ServiceFigures(
            **self._common(ideal_hit_rate),
            hit_rate_before_kill=_rounded(before),
            hit_rate_after_kill=_rounded(after),
            hit_rate_drop=_rounded(before - after),
            orphans_left=orphans_left,
            seconds=round(seconds, 1),
        )

    def cluster_figures(
        self, ideal_hit_rate: float, orphans: int, seconds: float, unavailable_ms: int
    ) -> ClusterFigures:
        """The figures of a run in a cluster. Each kill cuts the requests in those answered before it and
        those after it, up to the next kill; shares are measured as in `figures`, and a drop is how much
        smaller the share after is than that of all before."""
        leader_at = len(self.rows) if self.service_killed_at is None else self.service_killed_at
        engine_at = leader_at if self.engine_killed_at is None else min(self.engine_killed_at, leader_at)
        of_engine = self._drop(engine_at, leader_at)
        of_leader = self._drop(leader_at, len(self.rows))
        return ClusterFigures(
            **self._common(ideal_hit_rate),
            hit_rate_drop_engine=of_engine,
            hit_rate_drop_leader=of_leader,
            hit_rate_drop=max(of_engine, of_leader),
            unavailable_ms=unavailable_ms,
            orphans=orphans,
            seconds=round(seconds, 1),
        )

    def _drop(self, cut: int, end: int) -> float:
        if cut == end:
            return 0.0
        before = min(1.0, share_of_possible(self.rows[:cut]))
        return _rounded(before - min(1.0, share_of_possible(self.rows[cut:end])))

    def _common(self, ideal_hit_rate: float) -> dict[str, Any]:
        return {
            "requests": len(self.rows),
            "blocks_asked": self.asked,
            "blocks_hit": self.hits,
            "hit_rate": _rounded(self.hits / self.asked if self.asked else 0.0),
            "ideal_hit_rate": _rounded(ideal_hit_rate),
            "dirty_reads": self.dirty,
        }


def share_of_possible(rows: Iterable[Answered]) -> float:
    """Blocks hit / blocks that an infinite cache would have hit. It can be a little above 1: engines work
    at the same time, and a request may find what one handed out after it has written already."""
    hits = possible = 0
    for row in rows:
        hits += row.done.hits
        possible += row.ideal_hits
    return hits / possible if possible else 1.0


def verdicts(
    figures: ServiceFigures, *, requests: int, engine_killed: bool, service_killed: bool, absent_files: int
) -> Verdicts:
    """What a run with a service of its own must have shown."""
    distance = abs(figures.hit_rate - figures.ideal_hit_rate)
    return [
        (figures.requests == requests, f"{figures.requests} of {requests} requests were answered"),
        (engine_killed, "an engine was killed while it wrote"),
        (service_killed, "the service was killed, and came back on the same data"),
        (figures.dirty_reads == 0, f"{figures.dirty_reads} dirty reads (0 allowed)"),
        (
            distance <= IDEAL_DISTANCE_MAX,
            f"hit rate {figures.hit_rate:.1%} is {100 * distance:.2f} points from the ideal"
            f" (at most {100 * IDEAL_DISTANCE_MAX:.0f})",
        ),
        _small(figures.hit_rate_drop, "the kill"),
        *_clean(absent_files, figures.orphans_left),
    ]


def cluster_verdicts(
    figures: ClusterFigures,
    *,
    requests: int,
    engine_killed: bool,
    leader_killed: bool | None,
    absent_files: int,
) -> Verdicts:
    """What a run in a cluster must have shown. `leader_killed` None: no replica was to be killed."""
    shown = [
        (figures.requests == requests, f"{figures.requests} of {requests} requests were answered"),
        (engine_killed, "an engine was killed while it wrote"),
        (figures.dirty_reads == 0, f"{figures.dirty_reads} dirty reads (0 allowed)"),
        _small(figures.hit_rate_drop_engine, "the engine was killed"),
    ]
    if leader_killed is not None:
        shown += [
            (leader_killed, "the replica that led was killed, and another took over"),
            _small(figures.hit_rate_drop_leader, "the leader was killed"),
        ]
    return [*shown, *_clean(absent_files, figures.orphans)]


def _small(drop: float, after: str) -> tuple[bool, str]:
    return drop < HIT_RATE_DROP_MAX, (
        f"hit rate fell by {drop:.3f} after {after} (less than {HIT_RATE_DROP_MAX})"
    )


def _clean(absent_files: int, orphans: int) -> Verdicts:
    return [
        (
            absent_files == 0,
            f"{absent_files} blocks that the service names are not in the storage (0 allowed)",
        ),
        (orphans == 0, f"{orphans} orphans left (0 allowed)"),
    ]


def _rounded(rate: float) -> float:
    return round(rate, 4)
