"""Runs histories: ends those that never would, shortens those that fail, and tries the planted bugs."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

from .operators import Step, plan, play
from .planted import Planted
from .world import World

S = TypeVar("S")
HERE = Path(__file__).resolve().parent
SECONDS_MAX = 20
"""A history takes a tenth of a second. One that takes so long will not end."""
SHRINK_TRIES_MAX = 300
PLANTED_SEEDS_MAX = 300
TRACE_LINES_MAX = 60


class Endless(AssertionError):
    """The machine does not come back from a command."""


def _ring(_signal: int, _frame: FrameType | None) -> None:
    raise Endless(f"no answer within {SECONDS_MAX} s")


def failure(seed: int, steps: list[Step], prepare: Callable[[World], None] | None = None) -> Exception | None:
    """What goes wrong in a history, None when nothing does."""
    return broken(lambda: play(seed, steps, prepare))


def broken(run: Callable[[], object]) -> Exception | None:
    """What a call breaks with, None when it ends well. One that never ends is ended."""
    before = signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_MAX)
    try:
        run()
    except Exception as error:  # whatever the machine breaks with is a finding
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


def kind(error: Exception) -> str:
    """What makes two failures the same, for shortening."""
    return f"{type(error).__name__} {str(error)[:12]}"


def shortened(seed: int, steps: list[Step]) -> list[Step]:
    """The history without acts that the failure does not need."""
    return shorten(steps, lambda fewer: failure(seed, fewer), SHRINK_TRIES_MAX)


def shorten(steps: list[S], failure_of: Callable[[list[S]], Exception | None], tries_max: int) -> list[S]:
    """The steps without those that the failure does not need (delta debugging, bounded)."""
    error = failure_of(steps)
    assert error is not None, "only a failing history can be shortened"
    wanted, tries, size = kind(error), 0, len(steps) // 2
    while size and tries < tries_max:
        at = 0
        while at < len(steps) and tries < tries_max:
            fewer = steps[:at] + steps[at + size :]
            tries += 1
            again = failure_of(fewer)
            if again is not None and kind(again) == wanted:
                steps = fewer
            else:
                at += size
        size //= 2
    return steps


def report(seed: int, steps: list[Step]) -> str:
    """A failing history for people: seed and commit, what went wrong, and the shortest known way there."""
    steps = shortened(seed, steps)
    lines: list[str] = []

    def listen(world: World) -> None:
        world.trace = lines.append

    error = failure(seed, steps, listen)
    short = [line if len(line) < 500 else f"{line[:500]}..." for line in lines[-TRACE_LINES_MAX:]]
    acts = " ".join(name for name, _ in steps)
    head = f"seed={seed} commit={commit()} {type(error).__name__}: {error}"
    return "\n".join([head, f"  acts: {acts}", *(f"  {line}" for line in short)])


def commit() -> str:
    """The commit under test, with `+` where files differ from it; `unknown` outside a repository."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def regressions() -> list[int]:
    """Seeds that once found something."""
    return seeds_of("seeds.txt")


def seeds_of(name: str) -> list[int]:
    """The seeds in a file beside this one: one a line, then a remark."""
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    return [int(line.split()[0]) for line in lines if line.strip() and not line.startswith("#")]


def caught_by(bug: Planted, first: int = 1, seeds: int = PLANTED_SEEDS_MAX) -> int | None:
    """The first seed whose history fails with the bug and only with it, None when none does."""
    for seed in range(first, first + seeds):
        steps = plan(seed)
        with bug():
            found = failure(seed, steps)
        if found is not None and failure(seed, steps) is None:
            return seed
    return None
