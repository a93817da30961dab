"""What happened to each request, and the figures that follow from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from engine_adapters.replay.messages import Done

IDEAL_DISTANCE_MAX = 0.02
HIT_RATE_DROP_MAX = 0.15


class Figures(Struct, frozen=True, kw_only=True):
    """The last line of the demo. Rates are shares of 1."""

    requests: int
    blocks_asked: int
    blocks_hit: int
    hit_rate: float
    ideal_hit_rate: float
    dirty_reads: int
    hit_rate_before_kill: float
    hit_rate_after_kill: float
    hit_rate_drop: float
    orphans_left: int
    seconds: float


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

    def figures(self, ideal_hit_rate: float, orphans_left: int, seconds: float) -> Figures:
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
        return Figures(
            requests=len(self.rows),
            blocks_asked=self.asked,
            blocks_hit=self.hits,
            hit_rate=_rounded(self.hits / self.asked if self.asked else 0.0),
            ideal_hit_rate=_rounded(ideal_hit_rate),
            dirty_reads=self.dirty,
            hit_rate_before_kill=_rounded(before),
            hit_rate_after_kill=_rounded(after),
            hit_rate_drop=_rounded(before - after),
            orphans_left=orphans_left,
            seconds=round(seconds, 1),
        )


def share_of_possible(rows: Iterable[Answered]) -> float:
    """Blocks hit / blocks that an infinite cache would have hit. It can be a little above 1: engines work
    at the same time, and a request may find what one handed out after it has written already."""
    hits = possible = 0
    for row in rows:
        hits += row.done.hits
        possible += row.ideal_hits
    return hits / possible if possible else 1.0


def verdicts(
    figures: Figures, *, requests: int, engine_killed: bool, service_killed: bool, absent_files: int
) -> Sequence[tuple[bool, str]]:
    """What the run must have shown, each with whether it did."""
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
        (
            figures.hit_rate_drop < HIT_RATE_DROP_MAX,
            f"hit rate fell by {figures.hit_rate_drop:.3f} after the kill (less than {HIT_RATE_DROP_MAX})",
        ),
        (
            absent_files == 0,
            f"{absent_files} blocks that the service names are not in the storage (0 allowed)",
        ),
        (figures.orphans_left == 0, f"{figures.orphans_left} orphans left (0 allowed)"),
    ]


def _rounded(rate: float) -> float:
    return round(rate, 4)
