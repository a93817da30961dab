"""What is announced: every block with what routers need to know it by, packed as it came.

Kept so that a subscriber which missed more than the ring holds can be told all of it, and so that a route
query can be answered for the pool. Per block it costs one dict entry, its key once as an object and once in
the packed keys, and its packed token ids; what a block has in common with its run is kept once a run.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec import Struct

from metaservice.core.windows import Gone, Run, Window

TOMBSTONES_MAX = 65_536
"""Blocks that are remembered as gone, of all instances of a shard together: as many as the leader remembers.
Of the place that has most of them the oldest go first."""
CHUNK_BLOCKS_MAX = 512
_COMPACT_DEAD_MIN = 64


class Announced:
    """By instance, and there by medium and node. Only for one thread."""

    def __init__(self) -> None:
        self._shards: dict[str, int] = {}
        self._places: dict[str, dict[tuple[str, str], _Place]] = {}
        self._tombstones: dict[int, int] = {}
        self.forgotten = 0
        """Blocks that went so long ago that nobody is told any more."""

    # ------------------------------------------------------------ what happens

    def admit(self, shard: int, instance: str) -> None:
        """An instance is announced, by this shard from now on. What goes of others is passed over."""
        if self._shards.setdefault(instance, shard) != shard:
            self.forget_instance(instance)
            self._shards[instance] = shard
        self._places.setdefault(instance, {})
        self._tombstones.setdefault(shard, 0)

    def apply(self, window: Window) -> None:
        """One step of a shard."""
        for gone in window.removed:
            self._remove(window.shard, gone)
        for gone in window.again:
            self._remove(window.shard, gone)
        for run in window.restated:
            self._add(window.shard, run, window.number)
        for run in window.stored:
            self._add(window.shard, run, window.number)

    def standing(self, shard: int, runs: Iterable[Run], number: int) -> None:
        """What was announced already when window `number` was the newest. What is known stays as it is."""
        for run in runs:
            self._add(shard, run, number)

    def tombstones(self, shard: int, gone: Iterable[Gone]) -> None:
        """What was announced and is not any more."""
        for item in gone:
            self._remove(shard, item)

    def forget(self, shard: int) -> None:
        """All of a shard."""
        for instance in [name for name, of in self._shards.items() if of == shard]:
            self.forget_instance(instance)

    def forget_instance(self, instance: str) -> None:
        """All of an instance."""
        shard = self._shards.pop(instance, None)
        if shard is not None:
            for place in self._places.pop(instance).values():
                self._tombstones[shard] -= len(place.gone)

    def _place(self, of: Run | Gone) -> "_Place":
        return self._places[of.instance].setdefault((of.medium, of.node), _Place())

    def _add(self, shard: int, run: Run, number: int) -> None:
        if run.instance not in self._shards:
            self.admit(shard, run.instance)
        if self._shards[run.instance] != shard:
            return
        place = self._place(run)
        before = len(place.gone)
        place.add(run, number)
        self._tombstones[shard] += len(place.gone) - before

    def _remove(self, shard: int, gone: Gone) -> None:
        if self._shards.get(gone.instance) != shard:
            return
        place = self._place(gone)
        before = len(place.gone)
        place.remove(_keys(gone.keys, gone.key_length))
        self._tombstones[shard] += len(place.gone) - before
        while (excess := self._tombstones[shard] - TOMBSTONES_MAX) > 0:
            fullest = max(self._of(shard), key=lambda one: len(one.gone))
            forgotten = fullest.forget_gone(excess)
            self._tombstones[shard] -= forgotten
            self.forgotten += forgotten

    def _of(self, shard: int) -> "Iterator[_Place]":
        for instance, of in self._shards.items():
            if of == shard:
                yield from self._places[instance].values()

    # ------------------------------------------------------------ how it stands

    def blocks(self, instance: str, node: str | None = None) -> int:
        """How many are announced of an instance, or of what it has on `node` ("": in the pool)."""
        places = self._places.get(instance, {})
        return sum(len(place.blocks) for (_, on), place in places.items() if node is None or on == node)

    @property
    def instances(self) -> Collection[str]:
        """Those that something is known of."""
        return self._places.keys()

    def find(self, instance: str, keys: Sequence[bytes]) -> list[Collection[tuple[str, str]]]:
        """Where each of `keys` from the first on is announced, as (medium, node); the list ends before the
        first one that is announced nowhere. Takes time for each key and place: ask for some thousand keys at
        a time."""
        places = [(at, place.blocks) for at, place in self._places.get(instance, {}).items() if place.blocks]
        found: list[Collection[tuple[str, str]]] = []
        for key in keys:
            here = [at for at, blocks in places if key in blocks]
            if not here:
                break
            found.append(here)
        return found

    def runs(self, instance: str, node: str, up_to: int | None = None) -> Iterator[Run]:
        """All that is announced of an instance on `node` ("": in the pool), parents before their children.
        `up_to`: only what was announced by then, in windows of no higher number.

        May be gone through bit by bit while windows are applied: what they bring may be in it unless `up_to`
        leaves it out, and what they take may be missing.
        """
        places = [
            (medium, place) for (medium, on), place in self._places.get(instance, {}).items() if on == node
        ]
        met: set[int] = set()
        for medium, place in places:
            for chunk in list(place.chunks):
                if id(chunk) in met:
                    continue
                met.add(id(chunk))
                climb = [(medium, chunk)]
                while climb:
                    above = _above(places, climb[-1][1])
                    if above is not None and id(above[1]) not in met:
                        met.add(id(above[1]))
                        climb.append(above)
                        continue
                    of, highest = climb.pop()
                    if up_to is None or highest.born <= up_to:
                        yield from highest.runs(instance, of, node)

    def gone(self, instance: str, node: str) -> Iterator[Gone]:
        """What is remembered as gone there."""
        for (medium, on), place in self._places.get(instance, {}).items():
            if on != node:
                continue
            by_length: dict[int, list[bytes]] = {}
            for key in place.gone:
                by_length.setdefault(len(key), []).append(key)
            for length, keys in by_length.items():
                for first in range(0, len(keys), CHUNK_BLOCKS_MAX):
                    packed = b"".join(keys[first : first + CHUNK_BLOCKS_MAX])
                    yield Gone(instance, medium, node, length, packed)

    @property
    def tombstone_count(self) -> int:
        """Blocks remembered as gone."""
        return sum(self._tombstones.values())


class _Chunk(Struct, gc=False):
    """A run, or a piece of one, of which some blocks may be gone meanwhile. The garbage collector never looks
    at one: it refers to nothing that refers back."""

    lora: str
    salt: str
    parent: bytes | None
    key_length: int
    keys: bytes
    tokens: bytes
    ends: "array[int] | int"
    live: int
    """A bit a block."""
    born: int
    """In which window."""

    def drop(self, key: bytes) -> bool:
        """This block is gone; whether it was the last one."""
        at = self.keys.find(key)
        while at % self.key_length:
            at = self.keys.find(key, at + 1)
        self.live &= ~(1 << at // self.key_length)
        return not self.live

    def runs(self, instance: str, medium: str, node: str) -> Iterator[Run]:
        """The blocks that are not gone."""
        length = self.key_length
        first, live = 0, self.live
        while live:
            skip = (live & -live).bit_length() - 1
            first, live = first + skip, live >> skip
            count = (~live & live + 1).bit_length() - 1
            parent = self.parent if first == 0 else self.keys[(first - 1) * length : first * length]
            keys = self.keys[first * length : (first + count) * length]
            tokens = self._tokens(first, first + count)
            yield Run(instance, medium, node, self.lora, self.salt, parent, length, keys, tokens)
            first, live = first + count, live >> count

    def _tokens(self, first: int, last: int) -> list[bytes]:
        tokens, ends = self.tokens, self.ends
        if isinstance(ends, int):
            return [tokens[at * ends : (at + 1) * ends] for at in range(first, last)]
        begin = ends[first - 1] if first else 0
        cut = []
        for end in ends[first:last]:
            cut.append(tokens[begin:end])
            begin = end
        return cut


class _Place:
    """One medium of one node, for one instance."""

    __slots__ = ("blocks", "chunks", "dead", "gone")

    def __init__(self) -> None:
        self.blocks: dict[bytes, _Chunk] = {}
        self.chunks: list[_Chunk] = []
        self.dead = 0
        self.gone: dict[bytes, None] = {}
        """The oldest first."""

    def add(self, run: Run, number: int) -> None:
        keys = _keys(run.keys, run.key_length)
        if len(keys) != len(run.tokens):
            return  # Nobody could be told of such a run either.
        fresh = dict.fromkeys(keys)
        if len(fresh) == len(keys) and self.blocks.keys().isdisjoint(fresh):
            self._hold(run, 0, len(keys), keys, number)
        else:
            first = 0
            met: set[bytes] = set()
            for at, key in enumerate(keys):
                if key in self.blocks or key in met:
                    self._hold(run, first, at, keys, number)
                    first = at + 1
                met.add(key)
            self._hold(run, first, len(keys), keys, number)
        if self.gone:
            for key in fresh:
                self.gone.pop(key, None)

    def _hold(self, run: Run, first: int, last: int, keys: Sequence[bytes], number: int) -> None:
        for begin in range(first, last, CHUNK_BLOCKS_MAX):
            end = min(begin + CHUNK_BLOCKS_MAX, last)
            chunk = _chunk(
                run,
                keys[begin - 1] if begin else run.parent,
                keys[begin:end],
                run.tokens[begin:end],
                number,
            )
            self.chunks.append(chunk)
            self.blocks.update(dict.fromkeys(keys[begin:end], chunk))

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            chunk = self.blocks.pop(key, None)
            if chunk is not None and chunk.drop(key):
                self.dead += 1
            self.gone.pop(key, None)
            self.gone[key] = None
        if self.dead > _COMPACT_DEAD_MIN and 2 * self.dead > len(self.chunks):
            self.chunks = [chunk for chunk in self.chunks if chunk.live]
            self.dead = 0

    def forget_gone(self, count: int) -> int:
        """How many of the oldest were forgotten, up to `count`."""
        oldest = [key for key, _ in zip(self.gone, range(count), strict=False)]
        for key in oldest:
            del self.gone[key]
        return len(oldest)


def _chunk(
    run: Run, parent: bytes | None, keys: Sequence[bytes], tokens: Sequence[bytes], born: int
) -> _Chunk:
    single = len(keys) == 1  # then the very objects are kept, so that its key is in memory once
    return _Chunk(
        lora=run.lora,
        salt=run.salt,
        parent=parent,
        key_length=run.key_length,
        keys=keys[0] if single else b"".join(keys),
        tokens=tokens[0] if single else b"".join(tokens),
        ends=_ends(tokens),
        live=(1 << len(keys)) - 1,
        born=born,
    )


def _above(places: Sequence[tuple[str, _Place]], chunk: _Chunk) -> tuple[str, _Chunk] | None:
    """The chunk that has to be told before this one, None when there is none."""
    if chunk.parent is not None:
        for medium, place in places:
            parent = place.blocks.get(chunk.parent)
            if parent is not None:
                return medium, parent
    return None


def _keys(packed: bytes, length: int) -> list[bytes]:
    return [packed[at : at + length] for at in range(0, len(packed), max(length, 1))]


def _ends(tokens: Sequence[bytes]) -> "array[int] | int":
    """Where each block's token ids end when they are joined: one length when all have the same."""
    sizes = set(map(len, tokens))
    if len(sizes) == 1:
        return sizes.pop()
    ends = array("I")
    end = 0
    for packed in tokens:
        end += len(packed)
        ends.append(end)
    return ends
