"""What routers are told next: the leader's decision, journaled as `Announced`, carried out by `told`.

A router's memory is bounded and so is what it is told: of each instance at most `entries_max` blocks, those
used last. New blocks come in as they begin to serve, blocks that a lookup touched come back, the least
recently used go, leaf first. Beside that everything announced is told once more as time passes, for those who
missed something, and at once when somebody asks for it (`Restate`).

All work is in steps of bounded size: routers must not cost a lookup anything.
"""

from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace

from .commands import Announce, Restate
from .events import Announced, Event
from .index import Table, packed_slots
from .memory import Memory
from .rejections import Rejection
from .replies import Done
from .state import Instance, State
from .telling import Telling
from .told import SLOT_BITS, SLOT_MASK, hangs, may_stand, sift

CANDIDATES_PER_BLOCK = 4
"""Candidates looked at in a step for each block that it may announce."""
CROSSING_MS = 2_000
"""A block whose parent is told in another stream is told again after this long: two streams have no order,
and who heard of the block first passed it over."""
HEATED_MAX = 4_096
"""Blocks that lookups bring back at a time."""


def due(state: State, memory: Memory, now_ms: int) -> bool:
    """Whether there is a step to take now."""
    telling = _led(state, memory, now_ms)
    if telling.pressing or state.untold or state.doomed or telling.crossing(now_ms):
        return True
    return now_ms - telling.told_ms >= memory.limits.beat_ms and bool(state.published)


def eligible(state: State, slot: int) -> bool:
    """Whether the block may be announced now: also its being there is durable."""
    return bool(state.index.visible[slot]) and may_stand(state, slot)


def _led(state: State, memory: Memory, now_ms: int) -> Telling:
    """The leader's mind, from the first time on that somebody asks what to announce: where nobody does,
    nothing is gathered."""
    telling = memory.telling
    if not telling.leading:
        telling.lead(now_ms)
        for instance in state.published:
            telling.shrink(state.instances[instance])
    return telling


def announce(state: State, memory: Memory, command: Announce, now_ms: int) -> tuple[object, list[Event]]:
    """One step; no event when there is nothing to say and it is no time for a beat."""
    telling, limits = _led(state, memory, now_ms), memory.limits
    dropped = _shrunk(state, memory)
    stored: list[int] = []
    if len(state.untold) < limits.window_removed_max and not state.doomed:
        # else what went is told first: it may be what is to be stored again
        colder, stored = _stored(state, memory, now_ms)
        dropped += colder
    restated = telling.restated(state, now_ms, limits.window_blocks_max, limits.restate_ms)
    again = telling.again(len(state.tombstones), now_ms, limits.restate_ms, limits.window_removed_max)
    silent = not (dropped or stored or restated or again or state.untold or state.doomed)
    if silent and not (now_ms - telling.told_ms >= limits.beat_ms and state.published):
        return Done(), []
    columns = packed_slots(stored), packed_slots(restated), packed_slots(dropped)
    return Done(), [Announced(now_ms, state.window + 1, *columns, again, limits.window_removed_max)]


def restate(state: State, memory: Memory, command: Restate, now_ms: int) -> tuple[object, list[Event]]:
    """Leader memory only: the next windows tell it all again."""
    if command.instance:
        instance = state.instances.get(command.instance)
        if instance is None:
            return Rejection("instance_unknown", f"no instance {command.instance!r}", "instance"), []
        if instance.publication is None:
            return _not_published(command.instance), []
        chosen = [instance]
    else:
        chosen = [one for one in state.instances.values() if one.publication is not None]
    telling = _led(state, memory, now_ms)
    for one in chosen:
        telling.restate(one)
    return Done(), []


def _not_published(instance: str) -> Rejection:
    return Rejection("not_published", f"instance {instance!r} has no publication: set one first", "instance")


def heated(state: State, memory: Memory, slots: Iterable[int]) -> None:
    """Lookups found these blocks: they, and all above them, may be worth announcing again."""
    index, telling = state.index, memory.telling
    if not telling.leading:
        return
    left = HEATED_MAX
    for slot in slots:
        path: list[int] = []
        at: int | None = slot
        while at is not None and left and not index.announced[at] and eligible(state, at):
            path.append(at)
            left -= 1
            parent = index.parent[at]
            at = None if parent is None else index.tables[index.table[at]].slots.get(parent)
        telling.revealed(reversed(path))


# ---------------------------------------------------------------- new blocks


def _stored(state: State, memory: Memory, now_ms: int) -> tuple[list[int], list[int]]:
    """(what to withdraw for it, what to announce), parents before children."""
    index, telling = state.index, memory.telling
    left = memory.limits.window_blocks_max
    chosen: set[int] = set()
    wanted: dict[str, list[int]] = {}
    for slot in telling.candidates(state, CANDIDATES_PER_BLOCK * left):
        if index.announced[slot] or slot in chosen or not eligible(state, slot):
            continue
        table = index.tables[index.table[slot]]
        if table.instance in telling.shrinking:
            telling.shrinking[table.instance] = True
            continue  # found again when it has room
        parent = index.parent[slot]
        if not hangs(state, slot, chosen):
            assert parent is not None, "what begins a prompt hangs on nothing"
            telling.wait(table, parent, slot)
            continue
        if parent is not None and _crosses(state, slot, table.slots[parent]):
            telling.later(slot, now_ms + CROSSING_MS)
        chosen.add(slot)
        wanted.setdefault(table.instance, []).append(slot)
        if len(chosen) >= left:
            break
    dropped: list[int] = []
    kept: list[int] = []
    for name, slots in wanted.items():
        instance = state.instances[name]
        assert instance.publication is not None, "what is not announced was chosen"
        over = instance.announced + len(slots) - instance.publication.entries_max
        colder = _coldest(state, instance, over, slots) if over > 0 else []
        dropped += colder
        kept += slots[: max(0, len(slots) - max(0, over) + len(colder))]
    return dropped, kept


def _shrunk(state: State, memory: Memory) -> list[int]:
    """What goes because a limit was lowered."""
    dropped: list[int] = []
    telling = memory.telling
    for name in list(telling.shrinking):
        left = memory.limits.window_blocks_max - len(dropped)
        if left <= 0:
            break
        instance = state.instances.get(name)
        if instance is not None and instance.publication is not None:
            over = instance.announced - instance.publication.entries_max
            if over > 0 and (colder := _coldest(state, instance, min(over, left), ())):
                dropped += colder
                continue
        if telling.shrinking.pop(name):
            telling.look_again()
    return dropped


def _crosses(state: State, slot: int, parent: int) -> bool:
    """Whether the two are told in different streams."""
    here, there = state.index.storage[slot], state.index.storage[parent]
    return here != there and state.storage_of[here].node != state.storage_of[there].node


def _coldest(state: State, instance: Instance, count: int, wanted: Iterable[int]) -> list[int]:
    """At most `count` announced blocks of the instance, the least recently used and no more recent than what
    is wanted, each only when all below it are among them; none that a wanted block hangs on."""
    index, table = state.index, instance.primary
    if len(table.hot) > 4 * instance.announced + 1024:
        sift(index, table)
    heap = table.hot
    needed = {index.parent[slot] for slot in wanted}
    newest_ms = max((index.used_ms[slot] for slot in wanted), default=1 << 62)
    victims: list[int] = []
    chosen: set[int] = set()
    aside: list[int] = []
    while heap and len(victims) < count:
        entry = heap[0]
        slot = entry & SLOT_MASK
        used = index.used_ms[slot]
        if slot in chosen or not index.announced[slot] or index.table[slot] != table.number:
            heappop(heap)
        elif used != entry >> SLOT_BITS:
            heapreplace(heap, used << SLOT_BITS | slot)
        elif not _all_below(table, index.key[slot], chosen):
            heappop(heap)  # it comes back when what is below it goes
        elif used > newest_ms:
            break
        elif index.key[slot] in needed:
            aside.append(heappop(heap))
        else:
            heappop(heap)
            victims.append(slot)
            chosen.add(slot)
            parent = index.parent[slot]
            upper = None if parent is None else table.slots.get(parent)
            if upper is not None and index.announced[upper]:
                heappush(heap, index.used_ms[upper] << SLOT_BITS | upper)
    for entry in aside:
        heappush(heap, entry)
    return victims


def _all_below(table: Table, key: bytes, chosen: set[int]) -> bool:
    below = table.below.get(key)
    if below is None:
        return True
    return below in chosen if isinstance(below, int) else below <= chosen
