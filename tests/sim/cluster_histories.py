"""Runs clustered histories: ends those that never would, shortens those that fail, tries the planted bugs."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from metaservice.journal.port import Batch

from .cluster_plan import Act, plan
from .cluster_play import play
from .cluster_world import World
from .histories import broken, commit, seeds_of, shorten
from .planted import Planted

SHRINK_TRIES_MAX = 120
PLANTED_SEEDS_MAX = 2_000
TRACE_LINES_MAX = 60

CAUGHT_BY = {
    "fenced_state_kept": 33,
    "delay_counted_from_the_decision": 1322,
    "lease_counted_from_the_answer": 129,
    "return_counted_before_durable": 689,
}
"""Bugs that few histories notice -> a seed that did, to be tried first."""


def failure(seed: int, acts: list[Act], prepare: Callable[[World], None] | None = None) -> Exception | None:
    """What goes wrong in a clustered history, None when nothing does."""
    return broken(lambda: play(seed, acts, prepare))


def report(seed: int, acts: list[Act]) -> str:
    """A failing history for people: seed and commit, what went wrong, how to see it again, and the shortest
    known way there."""
    acts = shorten(acts, lambda fewer: failure(seed, fewer), SHRINK_TRIES_MAX)
    lines: list[str] = []

    def listen(world: World) -> None:
        def told(shard: int, batch: Batch, events: list[Any]) -> None:
            names = Counter(type(event).__name__ for event in events)
            what = ", ".join(f"{count} {name}" for name, count in names.items())
            world.tell(f"shard {shard} epoch {batch.epoch} seq {batch.first_seq}..{batch.last_seq}: {what}")

        world.trace = lines.append
        world.witness.listen = told

    error = failure(seed, acts, listen)
    short = [line if len(line) < 300 else f"{line[:300]}..." for line in lines[-TRACE_LINES_MAX:]]
    return "\n".join(
        [
            f"cluster seed={seed} commit={commit()} {type(error).__name__}: {error}",
            f"  again: python tests/sim/run.py --only cluster --start {seed} --seeds 1",
            f"  acts: {' '.join(f'{act.kind}@{act.at_ms}' for act in acts)}",
            *(f"  {line}" for line in short),
        ]
    )


def regressions() -> list[int]:
    """Seeds that once found something."""
    return seeds_of("cluster_seeds.txt")


def caught_by(name: str, bug: Planted, seeds: int = PLANTED_SEEDS_MAX) -> int | None:
    """The first seed whose history fails with the bug and only with it, None when none does."""
    first = [CAUGHT_BY[name]] if name in CAUGHT_BY else []
    tried: list[int] = [*first, *range(1, seeds + 1)]
    for seed in tried:
        acts = plan(seed)
        with bug():
            found = failure(seed, acts)
        if found is not None and failure(seed, acts) is None:
            return seed
    return None
