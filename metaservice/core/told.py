"""What routers have been told, as part of the state: which blocks are announced, what of it went and must
still be told as removed, and what was told so lately.

`take` carries out a step that the leader decided (`announcing`), the same on every replica, and makes of it
the window that is sent. Routers find a block by its parent: so a block is announced only while its parent is,
and when one goes all below it are withdrawn with it, to be announced again when it comes back.
"""

from collections.abc import Container, Iterable, Sequence
from heapq import heapify, heappush
from itertools import islice

from .events import Announced
from .index import SERVING, BlockIndex, Table, unpacked_slots
from .memory import Memory
from .model import TOMBSTONES
from .starts import announceable
from .state import Instance, State, Told
from .windows import Gone, Run, Window

SLOT_BITS = 32
SLOT_MASK = (1 << SLOT_BITS) - 1
WITHDRAWN_AT_ONCE = 1_024
"""What hangs on a block that goes may be all there is. No replica serves anybody while it is withdrawn, so it
is in steps; a router that still holds it cannot find it without its parent."""
TOLD_AGAIN = 2
"""How often a removal is told once more: a router that missed it once has most likely heard it then."""


def may_stand(state: State, slot: int) -> bool:
    """Whether routers may be told of the block in this slot, its parent aside: it serves, is of the main
    attention, of an instance that is announced, its tokens are known, and its hash is one that consumers take
    for a hash (those that would fit in 32 bits they take for something else)."""
    index = state.index
    if index.state[slot] != SERVING or not index.tokens[slot]:
        return False
    table = index.tables[index.table[slot]]
    instance = state.instances[table.instance]
    publication = instance.publication
    if publication is None or instance.retiring or not announceable(table):
        return False
    if not state.storage_of[index.storage[slot]].medium:
        return False
    key = index.key[slot]
    return (key[:4] if publication.hash_of == "head64" else key[-8:-4]) != bytes(4)


def hangs(state: State, slot: int, chosen: Container[int] = ()) -> bool:
    """Whether the block's parent is announced (or about to be: `chosen`) where those who hear of the block
    hear of it too, or the block begins a prompt. No engine reaches the memory of two nodes."""
    index = state.index
    parent = index.parent[slot]
    if parent is None:
        return True
    upper = index.tables[index.table[slot]].slots.get(parent)
    if upper is None or not (index.announced[upper] or upper in chosen):
        return False
    here, there = index.storage[slot], index.storage[upper]
    if here == there:
        return True
    nodes = {state.storage_of[here].node, state.storage_of[there].node}
    return len(nodes - {""}) <= 1


# ---------------------------------------------------------------- one step


def take(state: State, memory: Memory, event: Announced) -> None:
    """Carry out the step; the window goes to those who collect them."""
    assert event.number == state.window + 1, f"window {event.number} after {state.window}"
    state.window = event.number
    withdraw(state, memory, unpacked_slots(event.dropped))
    _follow(state, memory)
    gone = list(islice(state.untold, event.removed))
    for told in gone:
        del state.untold[told]
        _owe(state, told.instance, -1)
    again = _again(state, event.again)
    _bury(state, gone)
    index = state.index
    restated = [slot for slot in unpacked_slots(event.restated) if index.announced[slot]]
    stored = _store(state, memory, unpacked_slots(event.stored))
    memory.telling.told(event)
    if memory.windows is not None:
        window = Window(
            state.shard, state.seq, event.number, event.now_ms, runs(state, stored), runs(state, restated),
            gone_rows(gone), gone_rows(again),
        )  # fmt: skip
        memory.windows.append(window)


def _store(state: State, memory: Memory, slots: Iterable[int]) -> list[int]:
    """Mark those as announced that hang on something. The leader saw that they may stand; only what they hang
    on may have gone since, in this very step."""
    index = state.index
    stored = []
    for slot in slots:
        if index.announced[slot] or not hangs(state, slot):
            continue
        index.announced[slot] = 1
        stored.append(slot)
        table = index.tables[index.table[slot]]
        _count(state, table, 1)
        _hang(table, index.parent[slot], slot)
    for slot in stored:
        _offer(state, index.tables[index.table[slot]], slot)
    if stored:
        memory.telling.stored(state, stored)
    return stored


def _hang(table: Table, parent: bytes | None, slot: int) -> None:
    if parent is None:
        return
    below = table.below.get(parent)
    if below is None:
        table.below[parent] = slot
    elif isinstance(below, int):
        table.below[parent] = {below, slot}
    else:
        below.add(slot)


def _count(state: State, table: Table, change: int) -> None:
    """So many blocks of the table more are announced."""
    state.instances[table.instance].announced += change
    state.announced += change


def _owe(state: State, instance: str, change: int) -> None:
    """So many removals of the instance more are not told yet."""
    count = state.untold_of.get(instance, 0) + change
    if count:
        state.untold_of[instance] = count
    else:
        state.untold_of.pop(instance, None)


def _offer(state: State, table: Table, slot: int) -> None:
    """An announced block with none below it may be the next to be withdrawn."""
    index = state.index
    if index.key[slot] not in table.below:
        heappush(table.hot, index.used_ms[slot] << SLOT_BITS | slot)
        if len(table.hot) > 4 * state.instances[table.instance].announced + 1024:
            sift(index, table)


def sift(index: BlockIndex, table: Table) -> None:
    """Leave one candidate a block, when stale ones outnumber the others. On every replica: it may lead one
    day, or never."""
    slots = {entry & SLOT_MASK for entry in table.hot}
    table.hot = [
        index.used_ms[slot] << SLOT_BITS | slot
        for slot in slots
        if index.announced[slot] and index.table[slot] == table.number and index.key[slot] not in table.below
    ]
    heapify(table.hot)


# ---------------------------------------------------------------- withdrawing


def withdraw(state: State, memory: Memory, slots: Iterable[int]) -> None:
    """Those of these blocks that are announced are not any more, and nor is what hangs on them, of which much
    follows in the next steps: routers hear of it in the next windows. Call before the slots lose their
    keys."""
    left, wanting = WITHDRAWN_AT_ONCE, list[int]()
    for slot in slots:
        left = _withdraw(state, slot, left, wanting)
    if wanting:
        memory.telling.wanting(wanting)


def _follow(state: State, memory: Memory) -> None:
    """Withdraw some of what hung on blocks that were withdrawn."""
    left, wanting = WITHDRAWN_AT_ONCE, list[int]()
    doomed = state.doomed
    while doomed and left > 0:
        slot = doomed.popleft()
        if state.index.announced[slot]:
            left = _withdraw(state, slot, left, wanting)
            wanting.append(slot)
    if wanting:
        memory.telling.wanting(wanting)


def _withdraw(state: State, first: int, left: int, wanting: list[int]) -> int:
    """Withdraw this block and what hangs on it, `left` blocks at most: the others are doomed. Returns how
    many are left. `wanting` gets what may be announced again once its parent is."""
    index = state.index
    announced = index.announced
    todo = [first]
    while todo:
        slot = todo.pop()
        if not announced[slot]:
            continue
        if left <= 0 and slot != first:
            state.doomed.append(slot)
            continue
        left -= 1
        announced[slot] = 0
        table = index.tables[index.table[slot]]
        _count(state, table, -1)
        key = index.key[slot]
        told = Told(table.instance, *state.storage_of[index.storage[slot]].place(), key)
        if told not in state.untold:
            state.untold[told] = None
            _owe(state, table.instance, 1)
        _unhang(state, table, slot)
        below = table.below.pop(key, None)
        if below is not None:
            under = [below] if isinstance(below, int) else sorted(below)
            todo += under
            wanting += under
    return left


def _unhang(state: State, table: Table, slot: int) -> None:
    index = state.index
    parent = index.parent[slot]
    if parent is None:
        return
    below = table.below.get(parent)
    if below is None:
        return  # the parent was withdrawn first
    if isinstance(below, int):
        del table.below[parent]
    else:
        below.discard(slot)
        if below:
            return
        del table.below[parent]
    upper = table.slots.get(parent)
    if upper is not None and index.announced[upper]:
        _offer(state, table, upper)


def _bury(state: State, gone: Iterable[Told]) -> None:
    tombstones = state.tombstones
    tombstones.extend(gone)
    while len(tombstones) > TOMBSTONES:
        tombstones.popleft()


def _again(state: State, count: int) -> list[Told]:
    """The next tombstones to be told once more, without those whose block is announced there (again) and
    those of instances that are no more."""
    told = []
    for _ in range(min(count, len(state.tombstones))):
        one = state.tombstones.popleft()
        if one.instance not in state.instances or stands(state, one) or one in state.untold:
            continue
        told.append(one)
        if one.times + 1 < TOLD_AGAIN:
            state.tombstones.append(Told(one.instance, one.medium, one.node, one.key, one.times + 1))
    return told


def stands(state: State, told: Told) -> bool:
    """Whether the block is announced in that very place."""
    instance = state.instances.get(told.instance)
    slot = None if instance is None else instance.primary.slots.get(told.key)
    if slot is None or not state.index.announced[slot]:
        return False
    storage = state.storage_of[state.index.storage[slot]]
    return (storage.medium, storage.node) == (told.medium, told.node)


# ---------------------------------------------------------------- as it is sent


def runs(state: State, slots: Sequence[int]) -> list[Run]:
    """The blocks in these slots as runs, each block behind its parent where the order has it so."""
    index = state.index
    key_of, parent_of, label_of = index.key, index.parent, index.label
    made: list[Run] = []
    rows: list[int] = []
    at: tuple[int, int, tuple[str, str] | None] | None = None
    last: bytes | None = None
    for slot in slots:
        place = (index.table[slot], index.storage[slot], label_of[slot])
        if rows and (place != at or parent_of[slot] != last):
            made.append(_run(state, rows))
            rows = []
        rows.append(slot)
        at, last = place, key_of[slot]
    if rows:
        made.append(_run(state, rows))
    return made


def _run(state: State, slots: list[int]) -> Run:
    index = state.index
    first = slots[0]
    storage = state.storage_of[index.storage[first]]
    lora, salt = index.label[first] or ("", "")
    keys = [index.key[slot] for slot in slots]
    return Run(
        index.tables[index.table[first]].instance, storage.medium, storage.node, lora, salt,
        index.parent[first], len(keys[0]), b"".join(keys), [index.tokens[slot] for slot in slots],
    )  # fmt: skip


def gone_rows(told: Iterable[Told]) -> list[Gone]:
    """Removed blocks by place, in their order; by length of key too: an instance of the same name may have
    been there before."""
    by_place: dict[tuple[str, str, str, int], list[bytes]] = {}
    for one in told:
        by_place.setdefault((one.instance, one.medium, one.node, len(one.key)), []).append(one.key)
    return [Gone(*place, b"".join(keys)) for place, keys in by_place.items()]


def tombstones(state: State) -> list[Gone]:
    """What is remembered as gone, and neither announced there again nor of an instance that is no more."""
    return gone_rows(
        one for one in state.tombstones if one.instance in state.instances and not stands(state, one)
    )


def standing(state: State, first: int, count: int) -> tuple[list[Run], int | None]:
    """What is announced among the slots from `first` on (`count` of them), and where to go on; None: that
    was all."""
    end = min(first + count, len(state.index))
    flags = state.index.announced[first:end]
    slots = [first + row for row, flag in enumerate(flags) if flag] if any(flags) else []
    return runs(state, slots), end if end < len(state.index) else None


def derive(state: State) -> None:
    """Counts, links and candidates from the flags, after a restore."""
    index = state.index
    slots = [slot for slot, flag in enumerate(index.announced) if flag]
    for slot in slots:
        table = index.tables[index.table[slot]]
        _count(state, table, 1)
        _hang(table, index.parent[slot], slot)
    for slot in slots:
        _offer(state, index.tables[index.table[slot]], slot)
    for told in state.untold:
        _owe(state, told.instance, 1)
    for instance in state.instances.values():
        _speaks(state, instance)


def _speaks(state: State, instance: Instance) -> None:
    """Note whether this shard tells routers of the instance."""
    here = state.shards == 1 or instance.shard == state.shard
    (state.published.add if here and instance.publication else state.published.discard)(instance.id)


def moved(state: State, memory: Memory, storage: int) -> None:
    """The storage is about to be known to routers as another place."""
    index = state.index
    slots = [slot for slot in index.in_storage(storage) if index.announced[slot]]
    withdraw(state, memory, slots)
    memory.telling.look_again()  # also at those that stood nowhere before


def published(state: State, memory: Memory, instance: Instance) -> None:
    """An instance is announced from now on, in another way, or no more."""
    _speaks(state, instance)
    if instance.publication is None and instance.announced:
        announced = state.index.announced
        slots = sorted(slot for slot in instance.primary.slots.values() if announced[slot])
        withdraw(state, memory, slots[:WITHDRAWN_AT_ONCE])
        state.doomed.extend(slots[WITHDRAWN_AT_ONCE:])
    memory.telling.look_again()
    memory.telling.shrink(instance)
