"""What routers were told, folded naively: every window is checked against the model as of that window's seq.

The judge keeps one dict of what is announced. It shares the vocabulary of the core (windows) and none of its
code; what must hold is written out here once more.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from metaservice.core.model import GroupKind, Limits, LocationState, Publication
from metaservice.core.windows import CPU, EXTERNAL, STORAGE, Gone, Run, Window

from .rows import Copy, State, Violation

FIRST_NUMBER = 2**20 + 1
"""Streams begin here: below is room for the numbering of snapshots."""
PATIENCE_WINDOWS = 12
PAUSE_WINDOWS = 4
"""What may be told is, so many windows later at most than it would be if all that there is was told first."""
MEDIA = (CPU, STORAGE, EXTERNAL)


class Spot(NamedTuple):
    """Where a block is announced to be; `node` is "" for what every engine reaches."""

    instance: str
    medium: str
    node: str
    key: bytes


class Told(NamedTuple):
    """What was said of it, and when last."""

    parent: bytes | None
    tokens: bytes
    lora: str
    salt: str
    number: int = 0
    at_ms: int = 0

    @property
    def words(self) -> tuple[bytes | None, bytes, str, str]:
        """What was said, without when."""
        return self[:4]


class Tomb(NamedTuple):
    """That it is gone was told then, and once more by window `again` (0: not yet)."""

    number: int
    at_ms: int
    again: int = 0


class Judge:
    """Takes the windows of one shard in the order in which they are released."""

    def __init__(self, shard: int, limits: Limits) -> None:
        self.shard = shard
        self.limits = limits
        self.windows: list[Window] = []
        self.told: dict[Spot, Told] = {}
        self.tombs: dict[Spot, Tomb] = {}
        self._nodes: dict[tuple[str, bytes], set[str]] = {}
        """(instance, key) -> the nodes that it is announced at"""
        self._waiting: dict[Spot, int] = {}
        """Could be announced -> number of the window since which"""
        self._over: dict[str, tuple[int, int]] = {}
        """Instance -> its budget at the last window, and by how much it was over it"""
        self._squeezed: set[Spot] = set()
        """Went for want of room: they come back when somebody asks for them, or with the next rotation"""
        self._changed: dict[str, int] = {}
        """Instance ("": all) -> seq at which it, or where its blocks are, was put anew"""
        self._asked: dict[Spot, tuple[Told, int]] = {}
        """To be told again: how it was last told, and the number by which it has to be"""

    # ------------------------------------------------------------ what is fed in

    def released(self, windows: Iterable[Window], durable: int, state_at: Callable[[int], State]) -> None:
        """These windows may be sent from now on. Raises Violation. Windows of before that come once more
        (a machine that replays has them again) must be the same."""
        for window in windows:
            if window.seq > durable:
                raise Violation(f"window {window.number} of seq {window.seq} is out, durable is {durable}")
            if self.windows and window.number <= self.windows[-1].number:
                self.same(window)
            else:
                self.fold(window, state_at(window.seq))

    def same(self, window: Window) -> None:
        """I6: a window of a number is one window, whoever made it."""
        known = self.windows[window.number - self.windows[0].number]
        if known != window:
            raise Violation(f"I6: two windows have one number: {known} and {window}")

    def restate_asked(self, instance: str, number: int) -> None:
        """Somebody lost what he was told of an instance ("": all), when window `number` was the last: it is
        told again within some windows."""
        by = number + self.steps(len(self.told))
        for spot, told in self.told.items():
            if instance in ("", spot.instance) and told.number <= number:
                self._asked[spot] = (told, by)

    def changed(self, instance: str, seq: int) -> None:
        """How the instance is announced, or ("") where a storage is, is something else from that seq on: it
        may have been yet something else before."""
        self._changed[instance] = seq

    def steps(self, blocks: int) -> int:
        """In how many windows so many blocks are told."""
        return -(-blocks // self.limits.window_blocks_max) + PAUSE_WINDOWS

    def crash(self) -> None:
        """What was only asked of a leader who is gone may be forgotten."""
        self._asked.clear()

    @property
    def number(self) -> int:
        """Of the last window."""
        return self.windows[-1].number if self.windows else FIRST_NUMBER - 1

    # ------------------------------------------------------------ one window

    def fold(self, window: Window, state: State) -> None:
        """Follow a window and look at what is announced then."""
        if window.number != self.number + 1 or window.shard != self.shard:
            raise Violation(f"window {window.number} of shard {window.shard} follows window {self.number}")
        if self.windows and (window.seq, window.now_ms) < (self.windows[-1].seq, self.windows[-1].now_ms):
            raise Violation(f"window {window.number} goes back in the journal or in time")
        self.windows.append(window)
        serving = dict(places(state))
        before = dict(self.told)
        removed = [spot for gone in window.removed for spot in spots(gone)]
        for spot in removed:
            if self.told.pop(spot, None) is None:
                raise Violation(f"{spot} was not announced and is told as removed")
            self._nodes[spot.instance, spot.key].discard(spot.node)
            self.tombs[spot] = Tomb(window.number, window.now_ms)
        for spot in (spot for gone in window.again for spot in spots(gone)):
            if spot in self.told:
                raise Violation(f"{spot} is announced and told as removed once more")
            if spot not in self.tombs:
                raise Violation(f"{spot} was never removed and is told as that again")
            self.tombs[spot] = self.tombs[spot]._replace(again=window.number)
        for run in window.restated:
            self.follow(run, window, serving, again=True)
        for run in window.stored:
            self.follow(run, window, serving, again=False)
        self.only_what_serves(serving, window)
        self.budgets(state, window)
        self.nothing_left_out(state, serving, window)
        self.reasons(removed, before, state, serving, window)
        self.rotation(state, window)
        self.promised(window)

    def follow(self, run: Run, window: Window, serving: dict[Spot, Told], *, again: bool) -> None:
        """A run is told: each block after the one it hangs on, as it is."""
        parent = run.parent
        if run.medium not in MEDIA or (run.medium == EXTERNAL) != (run.node == ""):
            raise Violation(f"medium {run.medium!r} at node {run.node!r}")
        if len(run.keys) != run.key_length * len(run.tokens) or not run.keys:
            raise Violation(f"a run of {len(run.keys)} bytes of keys and {len(run.tokens)} blocks: {run}")
        for spot, tokens in zip(spots(run), run.tokens, strict=True):
            told = Told(parent, tokens, run.lora, run.salt, window.number, window.now_ms)
            known = self.told.get(spot)
            if again and (known is None or known.words != told.words):
                raise Violation(f"restated as {told}, but was announced as {known}: {spot}")
            if not again and known is not None:
                raise Violation(f"{spot} is announced already and is told as new: {window.number}")
            if not self.reachable(spot, parent):
                raise Violation(f"a child before its parent: {spot} hangs on {parent!r}")
            if spot not in serving:
                raise Violation(f"{spot} is told in window {window.number} and does not serve")
            if serving[spot].words != told.words:
                raise Violation(f"{spot} is told as {told}, it is {serving[spot]}")
            self._nodes.setdefault((spot.instance, spot.key), set()).add(spot.node)
            self.told[spot] = told
            self._squeezed.discard(spot)
            self.tombs.pop(spot, None)
            parent = spot.key

    def reachable(self, spot: Spot, parent: bytes | None) -> bool:
        """Whether routers were told of the block that this one hangs on, if it hangs on any: not only in the
        memory of another node, which no engine reaches together with this one's."""
        nodes = self._nodes.get((spot.instance, parent), set()) if parent is not None else {""}
        return any(node in ("", spot.node) or not spot.node for node in nodes)

    # ------------------------------------------------------------ what must hold after it

    def only_what_serves(self, serving: dict[Spot, Told], window: Window) -> None:
        """Whatever is gone is told as gone in the next window, or in those after it when it is much."""
        removed = sum(len(gone.keys) // gone.key_length for gone in window.removed)
        for spot in self.told if removed < self.limits.window_removed_max else ():
            if spot not in serving:
                raise Violation(f"{spot} is gone and still announced after window {window.number}")

    def budgets(self, state: State, window: Window) -> None:
        """No instance is over its budget; one whose budget shrank comes down window by window."""
        counts: dict[str, int] = {}
        for spot in self.told:
            counts[spot.instance] = counts.get(spot.instance, 0) + 1
        before, self._over = self._over, {}
        full = sum(len(gone.keys) // gone.key_length for gone in window.removed)
        for instance, count in counts.items():
            limit = publication(state, instance).entries_max
            known_limit, known_over = before.get(instance, (limit, 0))
            over = count - limit
            stays = over >= known_over and limit == known_limit
            if over > 0 and stays and full < self.limits.window_removed_max:
                raise Violation(f"{instance} has {count} blocks announced, {over} too many")
            self._over[instance] = limit, max(0, over)

    def nothing_left_out(self, state: State, serving: dict[Spot, Told], window: Window) -> None:
        """What may be announced, and is within the budget, is before long."""
        sizes: dict[str, int] = {}
        for spot in serving:
            sizes[spot.instance] = sizes.get(spot.instance, 0) + 1
        waiting: dict[Spot, int] = {}
        for spot, block in serving.items():
            fits = sizes[spot.instance] <= publication(state, spot.instance).entries_max
            wanted = fits and published(state, spot.instance)
            if wanted and spot not in self.told and self.reachable(spot, block.parent):
                waiting[spot] = self._waiting.get(spot, window.number)
        self._waiting = waiting
        for spot, since in waiting.items():
            tomb = self.tombs.get(spot)
            if tomb and spot in self._squeezed and not self.overdue(tomb.number, tomb.at_ms, window):
                continue
            if window.number - since > self.steps(len(serving) + len(self.tombs)):
                raise Violation(f"{spot} could be announced since window {since} and is not")

    def reasons(
        self,
        removed: list[Spot],
        before: dict[Spot, Told],
        state: State,
        serving: dict[Spot, Told],
        window: Window,
    ) -> None:
        """What still serves is told as removed only for want of room, or with what it hangs on."""
        for spot in removed:
            if spot not in serving or spot in self.told or not published(state, spot.instance):
                continue
            if not self.reachable(spot, before[spot].parent):
                continue
            known = sum(other.instance == spot.instance for other in before)
            new = sum(len(run.tokens) for run in window.stored if run.instance == spot.instance)
            changed_seq = max(self._changed.get(spot.instance, 0), self._changed.get("", 0))
            if known + new >= publication(state, spot.instance).entries_max:
                self._squeezed.add(spot)
            elif changed_seq <= self.windows[-2].seq and not self._written_since(spot, state):
                raise Violation(f"{spot} serves, there is room for it, and it is told as removed")

    def _written_since(self, spot: Spot, state: State) -> bool:
        """Whether this is another copy, written since the window before: the one that was told is gone."""
        return any(
            (copy.instance, copy.key, copy.state) == (spot.instance, spot.key, LocationState.serving)
            and copy.seq > self.windows[-2].seq
            for copy in state.copies.values()
        )

    def rotation(self, state: State, window: Window) -> None:
        """Everything is told once more as time passes, also what is gone."""
        for spot, told in self.told.items():
            if self.overdue(told.number, told.at_ms, window):
                raise Violation(f"{spot} was last told in window {told.number} at {told.at_ms}")
        for spot, tomb in self.tombs.items():
            known = spot.instance in state.instances and published(state, spot.instance)
            # an instance that was put anew under its name is another one: nobody tells of the one before
            anew_seq = self._changed.get(spot.instance, 0)
            known = known and anew_seq <= self.windows[tomb.number - self.windows[0].number].seq
            if known and not tomb.again and self.overdue(tomb.number, tomb.at_ms, window):
                raise Violation(f"that {spot} is gone was told in window {tomb.number} and never again")

    def overdue(self, number: int, at_ms: int, window: Window) -> bool:
        """Whether two rotations have passed since then, with windows at all times to tell it in: a machine
        that nobody asks to announce tells nothing."""
        rotation_ms = self.limits.restate_ms
        if window.now_ms - at_ms <= 2 * rotation_ms + self._gaps_ms(number):
            return False
        return window.number - number > 2 * PATIENCE_WINDOWS

    def _gaps_ms(self, number: int) -> int:
        """For how long there was no window when there should have been, after window `number`."""
        at = max(0, number - self.windows[0].number)
        times = [window.now_ms for window in self.windows[at:]]
        return sum(max(0, after - before - self.limits.beat_ms) for before, after in pairwise(times))

    def promised(self, window: Window) -> None:
        """Who asked to be told again was."""
        for spot, (told, by) in list(self._asked.items()):
            if spot not in self.told or self.told[spot].number > told.number:
                del self._asked[spot]
            elif window.number > by:
                raise Violation(f"{spot} was to be told again by window {by}")

    # ------------------------------------------------------------ compared with a machine

    def standing(self, runs: Iterable[Run], gone: Iterable[Gone]) -> None:
        """What a machine says is announced is what the windows say; and no tombstone is of something that
        is announced. Only at a moment when everything is durable."""
        found: dict[Spot, tuple[bytes | None, bytes, str, str]] = {}
        for run in runs:
            parent = run.parent
            for spot, tokens in zip(spots(run), run.tokens, strict=True):
                if spot in found:
                    raise Violation(f"{spot} stands twice")
                found[spot] = (parent, tokens, run.lora, run.salt)
                parent = spot.key
        want = {spot: told.words for spot, told in self.told.items()}
        if found != want:
            raise Violation(f"standing and windows differ: {dict(found.items() ^ want.items())}")
        for spot in (spot for each in gone for spot in spots(each)):
            if spot in self.told:
                raise Violation(f"{spot} is announced and has a tombstone")


def spots(row: Run | Gone) -> Iterator[Spot]:
    """The blocks of a run or of what is gone."""
    for at in range(0, len(row.keys), row.key_length):
        yield Spot(row.instance, row.medium, row.node, row.keys[at : at + row.key_length])


def published(state: State, instance: str) -> bool:
    """Whether what is new of the instance is announced."""
    row = state.instances[instance]
    return row.publication is not None and not row.retiring


def publication(state: State, instance: str) -> Publication:
    """How it is announced; of one that is not, with no room at all."""
    row = state.instances.get(instance)
    if row is None or row.publication is None:
        return Publication("", entries_max=0)
    return row.publication


def places(state: State) -> Iterator[tuple[Spot, Told]]:
    """What may be announced if its parents are: it serves, has tokens, and is of an instance that is
    announced, in its primary group of the kind that any prefix of may be reused; and in a place that has a
    name for routers."""
    for copy in state.copies.values():
        row = state.instances[copy.instance]
        if copy.state != LocationState.serving or not copy.tokens or row.publication is None:
            continue
        group = row.attention(copy.group)
        if copy.group == row.primary and group is not None and group.kind == GroupKind.full:
            medium, node = place(state, copy)
            if medium != EXTERNAL and not node:
                continue
            told = Told(copy.parent, copy.tokens, copy.lora, copy.salt)
            yield Spot(copy.instance, medium, node, copy.key), told


def place(state: State, copy: Copy) -> tuple[str, str]:
    """Medium and node of a copy."""
    storage = state.storages[copy.storage]
    volatile = storage.kind == "shm"
    reach = storage.reach or ("node" if volatile else "pool")
    if reach == "pool":
        return EXTERNAL, ""
    return (CPU if volatile else STORAGE), storage.fault_domain
