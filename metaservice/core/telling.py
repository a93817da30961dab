"""What the leader keeps in mind for announcing: blocks that may be new to routers, blocks that wait for their
parent, and how far it is in telling everything once more. Leader memory: a new leader looks through all
blocks again.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from operator import gt

from .events import Announced
from .index import Table
from .state import Instance, State

WAITING_MAX = 65_536
"""Blocks that wait for their parent. Those beyond are found again when everything is looked through."""
RESTATED_PER_MS = 20
"""What was told before can wait: told faster than this it would hold up lookups."""
SCAN_SLOTS = 8_192
"""Slots looked at in one step."""
ROUND_SLOTS_MAX = 65_536
"""Slots that the round through everything goes past in one step, however long nothing was told."""


class Walk:
    """All announced blocks, of one instance or of all, each behind its parent; in steps, while they change.
    What changes behind or ahead of it is told by its own event."""

    def __init__(self, table: Table | None, below: Sequence[int] = ()) -> None:
        """`below`: only these and all that hangs on them."""
        self._table = table
        self._next = 0 if not below else 1 << 62
        self._todo: list[int] = list(reversed(below))
        self._met: set[int] | None = set() if below else None
        """One of them may hang on another."""

    def step(self, state: State, blocks: int, slots: int) -> list[int]:
        """At most that many announced slots, having looked at that many slots at most for beginnings."""
        index = state.index
        found: list[int] = []
        while len(found) < blocks:
            if self._todo:
                slot = self._todo.pop()
                if index.announced[slot] and (self._met is None or slot not in self._met):
                    found.append(slot)
                    if self._met is not None:
                        self._met.add(slot)
                    below = index.tables[index.table[slot]].below.get(index.key[slot], ())
                    self._todo += (below,) if isinstance(below, int) else below
                continue
            if slots <= 0 or self._next >= len(index):
                break
            end = min(self._next + slots, len(index), self._next + SCAN_SLOTS)
            slots -= end - self._next
            number = None if self._table is None else self._table.number
            self._todo = [
                slot
                for slot in compress(range(self._next, end), index.announced[self._next : end])
                if index.parent[slot] is None and number in (None, index.table[slot])
            ]
            self._todo.reverse()
            self._next = end
        return found

    @property
    def begun(self) -> bool:
        """Whether it has gone past something."""
        return bool(self._next)

    def over(self, state: State) -> bool:
        """Whether it has come to the end."""
        return not self._todo and self._next >= len(state.index)


class Telling:
    """Beside a State, in Memory. A replica that does not lead keeps nothing here."""

    def __init__(self) -> None:
        self.told_ms = 0
        """When the last window was made."""
        self.leading = False
        self.dropped_waiting = 0
        self.shrinking: dict[str, bool] = {}
        """Instances that may have more announced than they are allowed to; whether something was passed over
        for it."""
        self._fresh: deque[int] = deque()
        self._waiting: dict[tuple[int, bytes], list[int]] = {}
        self.waiting = 0
        """How many blocks wait for a parent that is not announced: orphans, if it never is."""
        self._scan: int | None = None
        self._walks: dict[str, Walk] = {}
        self._once_more: dict[str, Instance] = {}
        """To be told from the beginning again when the walk under way is over."""
        self._later: deque[tuple[int, int]] = deque()
        self._walked_ms = 0
        self._round = Walk(None)
        self._round_ms = 0
        self._owed_blocks = 0.0
        self._owed_again = 0.0
        self._again_ms = 0
        self._looked_ms = 0

    # ------------------------------------------------------------ who leads

    def lead(self, now_ms: int) -> None:
        """From now on this replica decides: look through everything once."""
        self.__init__()  # type: ignore[misc]
        self.leading = True
        self._scan = 0
        self._round_ms = self._again_ms = self._walked_ms = self._looked_ms = now_ms

    def rest(self) -> None:
        """Another one does."""
        told_ms = self.told_ms
        self.__init__()  # type: ignore[misc]
        self.told_ms = told_ms

    @property
    def pressing(self) -> bool:
        """Whether there may be something to tell, or to look for, now."""
        return bool(self._fresh or self._walks or self._scan is not None or self.shrinking)

    def crossing(self, now_ms: int) -> bool:
        """Whether it is time to tell something once more."""
        return bool(self._later) and self._later[0][0] <= now_ms

    # ------------------------------------------------------------ what happens

    def revealed(self, slots: Iterable[int]) -> None:
        """These blocks are readable now."""
        if self.leading:
            self._fresh += slots

    wanting = revealed
    """These blocks may be announced again when their parent is."""

    def look_again(self) -> None:
        """What may be announced has changed: look through everything. Those that wait are found again, if
        they are still there."""
        if self.leading:
            self._scan = 0
            self._waiting.clear()
            self.waiting = 0

    def shrink(self, instance: Instance) -> None:
        """Its limit may be lower now."""
        if self.leading:
            self.shrinking.setdefault(instance.id, False)

    def told(self, event: Announced) -> None:
        """A step was taken."""
        self.told_ms = event.now_ms

    def stored(self, state: State, slots: Iterable[int]) -> None:
        """Those that waited for these blocks wait no more."""
        if not self._waiting:
            return
        index = state.index
        for slot in slots:
            ready = self._waiting.pop((index.table[slot], index.key[slot]), None)
            if ready is not None:
                self.waiting -= len(ready)
                self._fresh += ready

    def wait(self, table: Table, parent: bytes, slot: int) -> None:
        """This block is announced once its parent is."""
        if self.waiting >= WAITING_MAX:
            self.dropped_waiting += 1
            return
        those = self._waiting.setdefault((table.number, parent), [])
        if slot not in those[-8:]:
            those.append(slot)
            self.waiting += 1

    # ------------------------------------------------------------ what to tell

    def candidates(self, state: State, count: int) -> Iterator[int]:
        """Slots that may have to be announced: at most `count` of the fresh ones, then a look through some of
        the others."""
        for _ in range(count):
            if not self._fresh:
                break
            yield self._fresh.popleft()
        if self._scan is None or self._fresh:
            return
        index = state.index
        end = min(self._scan + SCAN_SLOTS, len(index))
        span = slice(self._scan, end)
        self._fresh += compress(range(self._scan, end), map(gt, index.visible[span], index.announced[span]))
        self._scan = end if end < len(index) else None

    def later(self, slot: int, at_ms: int) -> None:
        """Tell this block, and what hangs on it by then, once more at that time."""
        if len(self._later) < WAITING_MAX:
            self._later.append((at_ms, slot))

    def restate(self, instance: Instance) -> None:
        """Tell all of the instance once more, from the beginning. One that is under way comes to its end
        first: somebody who asks again and again must not keep others from hearing of the rest."""
        walk = self._walks.get(instance.id)
        if walk is not None and walk.begun:
            self._once_more[instance.id] = instance
        else:
            self._walks[instance.id] = Walk(instance.primary)

    def restated(self, state: State, now_ms: int, blocks: int, restate_ms: int) -> list[int]:
        """What to tell once more in this step: what was asked for, and a share of everything."""
        found: list[int] = []
        if self._later and self._later[0][0] <= now_ms and "" not in self._walks:
            crossed: list[int] = []
            while self._later and self._later[0][0] <= now_ms and len(crossed) < blocks:
                crossed.append(self._later.popleft()[1])
            self._walks[""] = Walk(None, crossed)
        waited_ms = max(0, now_ms - self._walked_ms)
        self._walked_ms = now_ms
        blocks = min(blocks, RESTATED_PER_MS * waited_ms)
        for name in list(self._walks):
            walk = self._walks[name]
            found += walk.step(state, blocks - len(found), SCAN_SLOTS)
            if walk.over(state):
                del self._walks[name]
                instance = self._once_more.pop(name, None)
                if instance is not None:
                    self._walks[name] = Walk(instance.primary)
            if len(found) >= blocks:
                return found
        passed_ms = max(0, now_ms - self._round_ms)
        self._round_ms = now_ms
        share = min(1.0, passed_ms / restate_ms)
        if now_ms - self._looked_ms >= restate_ms and self._scan is None:
            self._looked_ms = now_ms
            self.look_again()
        self._owed_blocks = min(blocks, self._owed_blocks + state.announced * share)
        if self._owed_blocks >= 1:
            slots = min(int(len(state.index) * share) + 64, ROUND_SLOTS_MAX)
            again = self._round.step(state, min(int(self._owed_blocks), blocks - len(found)), slots)
            self._owed_blocks -= len(again)
            found += again
            if self._round.over(state):
                self._round = Walk(None)
        return found

    def again(self, tombstones: int, now_ms: int, restate_ms: int, most: int) -> int:
        """How many tombstones to tell once more in this step."""
        passed_ms = max(0, now_ms - self._again_ms)
        self._again_ms = now_ms
        self._owed_again = min(float(tombstones), self._owed_again + tombstones * passed_ms / restate_ms)
        count = min(int(self._owed_again), most)
        self._owed_again -= count
        return count
