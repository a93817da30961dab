"""Bugs planted into the core, one at a time: what finds no planted bug would find no real one either.

Each is a context manager that replaces one function of the core by a wrong one. They lean on the core's
insides on purpose: when a seam moves, the bug is no longer caught and the run says so.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from metaservice.core import admission, apply, machine, membership, ticks, writes
from metaservice.core import commands as cmd
from metaservice.core import events as ev
from metaservice.core.admission import Freed
from metaservice.core.deletion import Deletions
from metaservice.core.eviction import Plan
from metaservice.core.ids import SLOT_MASK
from metaservice.core.index import WRITING, BlockIndex
from metaservice.core.leases import Leases
from metaservice.core.state import State

Planted = Callable[[], AbstractContextManager[None]]


@contextmanager
def publish_after_expiry() -> Iterator[None]:
    """An expired session stays as it was, and its finish publishes."""
    known = apply._APPLY[ev.SessionEnded]

    def ended(state: Any, memory: Any, event: ev.SessionEnded) -> None:
        if not event.expired:
            known(state, memory, event)

    with patch.dict(apply._APPLY, {ev.SessionEnded: ended}):
        yield


@contextmanager
def visible_before_durable() -> Iterator[None]:
    """Readers see a block as soon as its last part is in."""
    known = BlockIndex.publish

    def publish(self: BlockIndex, slots: Any) -> None:
        known(self, slots)
        self.reveal(slots)

    with patch.object(BlockIndex, "publish", publish):
        yield


@contextmanager
def quota_checked_after() -> Iterator[None]:
    """As long as there is room for one block, there is room for all."""
    known, known_storage = Freed.room, Freed.storage_room

    def all_or_nothing(room: int | None) -> int | None:
        return 1 << 20 if room else room

    with (
        patch.object(Freed, "room", lambda *a: all_or_nothing(known(*a))),
        patch.object(Freed, "storage_room", lambda *a: all_or_nothing(known_storage(*a))),
    ):
        yield


@contextmanager
def dedup_off() -> Iterator[None]:
    """Two writers get a place for the same key."""
    known_find, known_reserve = BlockIndex.find, BlockIndex.reserve

    def find(self: BlockIndex, table: Any, keys: Any) -> list[int | None]:
        return [
            None if slot is not None and self.state[slot] == WRITING else slot
            for slot in known_find(self, table, keys)
        ]

    def reserve(
        self: BlockIndex, table: Any, slots: Any, generations: Any, storages: Any, keys: Any, *rest: Any
    ) -> None:
        for key in keys:
            table.slots.pop(key, None)
        known_reserve(self, table, slots, generations, storages, keys, *rest)

    with patch.object(BlockIndex, "find", find), patch.object(BlockIndex, "reserve", reserve):
        yield


def blind(column: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, for which a column of the block index is all zeros."""

    def called(self: Any, *arguments: Any) -> Any:
        index = self._index
        seen = getattr(index, column)
        setattr(index, column, array(seen.typecode, bytes(seen.itemsize * len(seen))))
        try:
            return method(self, *arguments)
        finally:
            setattr(index, column, seen)

    return called


@contextmanager
def lease_ignored_by_eviction() -> Iterator[None]:
    """Blocks that somebody reads are evicted."""
    with patch.object(Plan, "pick", blind("pins", Plan.pick)):
        yield


@contextmanager
def lease_ignored_by_deletion() -> Iterator[None]:
    """Bytes that somebody reads are deleted."""
    with patch.object(Deletions, "take", blind("pins", Deletions.take)):
        yield


@contextmanager
def part_forgotten() -> Iterator[None]:
    """A finish that names some parts counts for all of them."""
    known = machine._DECIDE[cmd.Finish]

    def finish(state: State, memory: Any, command: cmd.Finish, now_ms: int) -> Any:
        session = state.sessions.get(command.session)
        if session is None or command.parts is None or command.checksums is None:
            return known(state, memory, command, now_ms)
        names = [part.name for part in session.table.parts]
        if not set(command.parts) <= set(names) or command.ok is not None:
            return known(state, memory, command, now_ms)
        sums = array("Q")
        for at in range(len(command.locations)):
            given = command.checksums[at * len(command.parts) : (at + 1) * len(command.parts)]
            by_name = dict(zip(command.parts, given, strict=False))
            sums.extend(by_name.get(name, 0) for name in names)
        return known(state, memory, replace(command, parts=None, checksums=sums), now_ms)

    with patch.dict(machine._DECIDE, {cmd.Finish: finish}):
        yield


@contextmanager
def leaf_order_ignored() -> Iterator[None]:
    """Blocks go by age alone, whatever hangs on them."""

    def offer(index: BlockIndex, table: Any, slots: Any) -> None:
        table.heap += [index.used_ms[slot] << 32 | slot for slot in slots]
        table.heap.sort()

    with (
        patch.object(apply, "offer", offer),
        patch.object(Plan, "pick", blind("children", Plan.pick)),
    ):
        yield


@contextmanager
def generation_not_checked() -> Iterator[None]:
    """A finish may name any generation."""
    known = writes._rows

    def rows(state: Any, row_of: Any, generations: Any, command: cmd.Finish) -> Any:
        wanted = [
            generations[row_of[location & SLOT_MASK]] if location & SLOT_MASK in row_of else generation
            for location, generation in zip(command.locations, command.generations, strict=False)
        ]
        return known(state, row_of, generations, replace(command, generations=array("I", wanted)))

    with patch.object(writes, "_rows", rows):
        yield


@contextmanager
def retry_not_remembered() -> Iterator[None]:
    """A repeated request is decided anew."""
    with patch.object(apply, "_remember", lambda *_: None):
        yield


@contextmanager
def fence_missing() -> Iterator[None]:
    """The sessions of a replaced incarnation live on."""
    with patch.object(membership, "fence", lambda *_: []):
        yield


@contextmanager
def place_given_away_early() -> Iterator[None]:
    """Bytes are deleted at once, whoever may still be writing or reading them."""
    known = Deletions.queue

    def queue(self: Deletions, slots: Any, ready_ms: int, *rest: Any) -> None:
        known(self, slots, 0, *rest)

    with patch.object(Deletions, "queue", queue):
        yield


@contextmanager
def predecessor_forgotten() -> Iterator[None]:
    """A new leader deletes as if nobody had leased anything from the one before."""
    known = apply._APPLY[ev.TookOver]

    def took_over(state: State, memory: Any, event: ev.TookOver) -> None:
        known(state, memory, event)
        state.takeover_ms = 0

    with patch.dict(apply._APPLY, {ev.TookOver: took_over}):
        yield


@contextmanager
def sessions_not_extended() -> Iterator[None]:
    """A new leader expires sessions whose writers could not reach it in time."""
    known = apply._APPLY[ev.TookOver]

    def took_over(state: State, memory: Any, event: ev.TookOver) -> None:
        deadlines = {number: session.deadline_ms for number, session in state.sessions.items()}
        known(state, memory, event)
        for number, deadline_ms in deadlines.items():
            state.sessions[number].deadline_ms = deadline_ms

    with patch.dict(apply._APPLY, {ev.TookOver: took_over}):
        yield


@contextmanager
def expiry_waits_for_traffic() -> Iterator[None]:
    """Read leases end only when somebody releases them."""
    with patch.object(Leases, "sweep", lambda *_: 0):
        yield


@contextmanager
def recency_ignored() -> Iterator[None]:
    """Lookups do not count as use."""
    with patch("metaservice.core.memory.Memory.touch", lambda *_: None):
        yield


@contextmanager
def watermarks_off() -> Iterator[None]:
    """Nothing is evicted before somebody needs the room."""
    with patch.object(ticks, "watermark_victims", lambda *_: []):
        yield


@contextmanager
def locations_survive_their_pool() -> Iterator[None]:
    """A worker comes back under another incarnation, and what it held before seems to be there."""
    with patch.object(apply, "_lose", lambda *_: None):
        yield


@contextmanager
def lease_outlives_the_pool() -> Iterator[None]:
    """A reader is not told that what it leased went with its pool."""
    with patch.object(Leases, "lost", lambda *_: None):
        yield


@contextmanager
def full_storage_evicts_beside_an_empty_one() -> Iterator[None]:
    """A storage comes down to its low watermark although what is new goes to the next one."""
    with patch.object(admission, "_spills", lambda *_: False):
        yield


PLANTED: dict[str, Planted] = {
    bug.__name__: bug
    for bug in (
        publish_after_expiry,
        visible_before_durable,
        quota_checked_after,
        dedup_off,
        lease_ignored_by_eviction,
        lease_ignored_by_deletion,
        part_forgotten,
        leaf_order_ignored,
        generation_not_checked,
        retry_not_remembered,
        fence_missing,
        place_given_away_early,
        predecessor_forgotten,
        sessions_not_extended,
        expiry_waits_for_traffic,
        recency_ignored,
        watermarks_off,
        full_storage_evicts_beside_an_empty_one,
        locations_survive_their_pool,
        lease_outlives_the_pool,
    )
}
