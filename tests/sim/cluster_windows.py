"""What routers are told by a cluster: every replica makes the same windows of a journal, and all of them
together say what the journal says."""

from collections.abc import Iterable

from metaservice.core.machine import Machine
from metaservice.core.windows import Run, Window

from .announced import FIRST_NUMBER, Spot, Told, spots
from .cluster_witness import Copy
from .rows import Violation


class Windows:
    """The windows of all shards, by whoever made them first. Everything raises Violation."""

    def __init__(self, shards: int, removed_max: int) -> None:
        self._known: list[dict[int, tuple[Window, str]]] = [{} for _ in range(shards)]
        self._removed_max = removed_max

    def heard(self, shard: int, windows: Iterable[Window], durable_seq: int, who: str) -> None:
        """A replica has windows that it may send."""
        known = self._known[shard]
        for window in windows:
            if window.seq > durable_seq:
                raise Violation(
                    f"{who} tells window {window.number} of seq {window.seq} before it is durable"
                )
            first, whose = known.setdefault(window.number, (window, who))
            if first != window:
                raise Violation(f"I6: {whose} made {first}, {who} made {window}")

    def count(self) -> int:
        """Of all shards."""
        return sum(map(len, self._known))

    def folded(self, shard: int, copies: Iterable[Copy]) -> dict[Spot, Told]:
        """What routers know after all of a shard's windows, each of which is right where it stands."""
        lives: dict[tuple[str, bytes], list[Copy]] = {}
        for copy in copies:
            lives.setdefault((copy.table.instance, copy.key), []).append(copy)
        told: dict[Spot, Told] = {}
        numbers = sorted(self._known[shard])
        if numbers != [*range(FIRST_NUMBER, FIRST_NUMBER + len(numbers))]:
            raise Violation(f"shard {shard}: numbers of windows are not one after the other: {numbers}")
        for number in numbers:
            window, who = self._known[shard][number]
            fold(told, window)
            removed = sum(len(gone.keys) // gone.key_length for gone in window.removed)
            if removed >= self._removed_max:
                continue  # there is more to be told as gone
            for spot in told:
                served = lives.get((spot.instance, spot.key), [])
                if not any(copy.served_at(window.seq) for copy in served):
                    raise Violation(f"window {number} of {who} leaves {spot} announced: {served}")
        return told

    def compare(self, shard: int, machine: Machine, told: dict[Spot, Told], who: str) -> None:
        """A replica that has told everything says that what routers know is announced."""
        found: dict[Spot, tuple[bytes | None, bytes, str, str]] = {}
        first: int | None = 0
        while first is not None:
            runs, first = machine.standing(first, 7)
            for spot, block in (pair for run in runs for pair in blocks(run)):
                found[spot] = block.words
        want = {spot: block.words for spot, block in told.items()}
        if found != want:
            raise Violation(f"{who} has announced of shard {shard}: {dict(found.items() ^ want.items())}")


def fold(told: dict[Spot, Told], window: Window) -> None:
    """Follow one window."""
    for spot in (spot for gone in window.removed for spot in spots(gone)):
        if told.pop(spot, None) is None:
            raise Violation(f"window {window.number} removes {spot}, which was not announced")
    for spot in (spot for gone in window.again for spot in spots(gone)):
        if spot in told:
            raise Violation(f"window {window.number} removes {spot} again, which is announced")
    for run in window.restated:
        for spot, block in blocks(run):
            if spot not in told or told[spot].words != block.words:
                raise Violation(f"window {window.number} tells {spot} again, known is {told.get(spot)}")
    known = {(spot.instance, spot.key) for spot in told}
    for run in window.stored:
        for spot, block in blocks(run):
            if spot in told:
                raise Violation(f"window {window.number} stores {spot}, which is announced")
            if block.parent is not None and (spot.instance, block.parent) not in known:
                raise Violation(f"window {window.number} stores {spot} before its parent")
            told[spot] = block
            known.add((spot.instance, spot.key))


def blocks(run: Run) -> Iterable[tuple[Spot, Told]]:
    """Each block of a run, and what is said of it."""
    parent = run.parent
    for spot, tokens in zip(spots(run), run.tokens, strict=True):
        yield spot, Told(parent, tokens, run.lora, run.salt)
        parent = spot.key
