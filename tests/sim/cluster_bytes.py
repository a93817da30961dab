"""The disks: bytes that prove what was read, and promises to those who may be reading.

A place is (location, generation). It belongs to the session that it was given to, is written part by part,
and is read only where the metadata said so. A read that finds other bytes or none, a deletion under a reader
and a place with two writers are violations, whatever any replica believes.
"""

from collections.abc import Iterable
from typing import NamedTuple

from .cluster_time import Heap
from .cluster_witness import Place
from .rows import Violation

Owner = tuple[str, int, int]
"""(engine/incarnation, shard, session)"""


class Promise:
    """Somebody may be reading these places until then (true time)."""

    __slots__ = ("lease", "places", "reader", "until_ms")

    def __init__(self, reader: str, lease: str | None, places: frozenset[Place], until_ms: int) -> None:
        self.reader = reader
        self.lease = lease
        self.places = places
        self.until_ms = until_ms

    def __repr__(self) -> str:
        return f"the promise of {self.lease or 'a lookup'} to {self.reader} until {self.until_ms}"


class Content(NamedTuple):
    """What a part of a place holds."""

    instance: str
    key: bytes


class Bytes:
    """All storages together."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self.disk: dict[Place, dict[str, Content]] = {}
        self.owners: dict[Place, Owner] = {}
        self.pools: dict[Place, str] = {}
        """The pool of a place in a volatile storage, as its writer was told."""
        self.dead: set[str] = set()
        """Pools whose worker is another process by now."""
        self.promises: list[Promise] = []
        self.reads = 0
        self.deleted = 0

    def give(self, place: Place, owner: Owner) -> None:
        """A writer was told that the place is its own."""
        known = self.owners.setdefault(place, owner)
        if known != owner:
            raise Violation(f"I3: {place} belongs to {known} and was given to {owner} as well")

    def lost(self, place: Place) -> bool:
        """Whether the place is in memory that is gone: nobody can write or read it, and everybody knows."""
        return self.pools.get(place) in self.dead or self.pools.get(place) == ""

    def bury(self, pool: str) -> None:
        """A worker's process is over."""
        self.dead.add(pool)
        for place in [place for place in self.disk if self.pools.get(place) == pool]:
            del self.disk[place]

    def write(self, place: Place, owner: Owner, part: str, content: Content) -> None:
        """A writer writes; perhaps long after its session is over: that place is nobody else's, ever."""
        if self.owners.get(place) != owner:
            raise Violation(f"I3: {owner} writes to {place}, which belongs to {self.owners.get(place)}")
        self.disk.setdefault(place, {})[part] = content

    def read(self, places: Iterable[Place], parts: tuple[str, ...], contents: Iterable[Content]) -> None:
        """A reader reads what it was told of: every part is there, whole, and of the block it asked for."""
        for place, content in zip(places, contents, strict=True):
            if self.lost(place):
                continue  # it cannot be opened: a miss
            self.reads += 1
            found = self.disk.get(place, {})
            for part in parts:
                if found.get(part) != content:
                    raise Violation(f"I2: dirty read of {place} {part}: {found.get(part)}, not {content}")

    def promise(self, reader: str, lease: str | None, places: Iterable[Place], until_ms: int) -> Promise:
        """Somebody may read until then."""
        made = Promise(reader, lease, frozenset(places), until_ms)
        self.promises.append(made)
        return made

    def delete(self, places: Iterable[Place], who: str) -> None:
        """A worker deletes."""
        now_ms = self._heap.now_ms
        gone = set(places)
        self.promises = [promise for promise in self.promises if promise.until_ms > now_ms]
        for promise in self.promises:
            if under := gone & promise.places:
                raise Violation(f"I3: {who} deletes {sorted(under)} under {promise}")
        for place in gone:
            self.deleted += self.disk.pop(place, None) is not None
