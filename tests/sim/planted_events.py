"""Bugs planted into what routers are told, one at a time; see `planted`."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from metaservice.core import announcing, apply, capture, machine, publishing, starts, told
from metaservice.core import events as ev
from metaservice.core.machine import Machine
from metaservice.core.telling import Telling, Walk

from .planted import Planted


@contextmanager
def window_number_skipped() -> Iterator[None]:
    """A step that stores something takes two numbers."""
    known = told.take

    def take(state: Any, memory: Any, event: ev.Announced) -> None:
        known(state, memory, event)
        state.window += bool(event.stored)

    def announce(state: Any, memory: Any, command: Any, now_ms: int) -> Any:
        reply, events = known_announce(state, memory, command, now_ms)
        return reply, [replace(event, number=state.window + 1) for event in events]

    known_announce = announcing.announce
    with patch.dict(apply._APPLY, {ev.Announced: take}), _decided(announcing.announce, announce):
        yield


@contextmanager
def _decided(known: Any, other: Any) -> Iterator[None]:
    """Another decision in the machine's table."""
    (command,) = [command for command, decide in machine._DECIDE.items() if decide is known]
    with patch.dict(machine._DECIDE, {command: other}):
        yield


@contextmanager
def removal_forgotten() -> Iterator[None]:
    """Blocks that are withdrawn are told by nobody as removed."""
    known = told.withdraw

    def withdraw(state: Any, memory: Any, slots: Any) -> None:
        before = dict(state.untold)
        known(state, memory, slots)
        state.untold.clear()
        state.untold.update(before)

    with patch.object(told, "withdraw", withdraw):
        yield


@contextmanager
def told_before_durable() -> Iterator[None]:
    """Windows are released as soon as they are made."""

    def take_windows(self: Machine) -> list[Any]:
        windows = self.memory.windows
        taken = list(windows or ())
        if windows:
            windows.clear()
        return taken

    with patch.object(Machine, "take_windows", take_windows):
        yield


@contextmanager
def budget_ignored() -> Iterator[None]:
    """Nothing is withdrawn to make room, and what is new comes in all the same."""
    known = announcing._stored

    def stored(state: Any, *rest: Any) -> Any:
        instances = state.instances.values()
        kept = {one.id: one.publication for one in instances}
        for one in instances:
            one.publication = one.publication and replace(one.publication, entries_max=1_000)
        try:
            return known(state, *rest)
        finally:
            for one in instances:
                one.publication = kept[one.id]

    with patch.object(announcing, "_stored", stored), patch.object(announcing, "_shrunk", lambda *_: []):
        yield


@contextmanager
def restated_as_stored() -> Iterator[None]:
    """What is told again looks like something new: who counts would need two removals."""
    known = Machine.take_windows

    def take_windows(self: Machine) -> list[Any]:
        return [
            replace(window, stored=[*window.restated, *window.stored], restated=[]) for window in known(self)
        ]

    with patch.object(Machine, "take_windows", take_windows):
        yield


@contextmanager
def child_before_parent() -> Iterator[None]:
    """New blocks are announced in whatever order they come, their parents or not."""
    with patch.object(told, "hangs", lambda *_: True), patch.object(announcing, "_stored", _any_order()):
        yield


def _any_order() -> Any:
    known = announcing._stored

    def stored(*arguments: Any) -> Any:
        dropped, slots = known(*arguments)
        return dropped, slots[::-1]

    return stored


@contextmanager
def children_stay_when_the_parent_goes() -> Iterator[None]:
    """Only the block itself is withdrawn, what hangs on it stays announced."""
    known = told.withdraw

    def withdraw(state: Any, memory: Any, slots: Any) -> None:
        slots = list(slots)
        for slot in slots:
            state.index.tables[state.index.table[slot]].below.pop(state.index.key[slot], None)
        known(state, memory, slots)

    with patch.object(told, "withdraw", withdraw):
        yield


@contextmanager
def removals_told_once() -> Iterator[None]:
    """Who misses a removal keeps the block for ever."""
    with patch.object(Telling, "again", lambda *_: 0):
        yield


@contextmanager
def rotation_off() -> Iterator[None]:
    """Nothing is told again unless somebody asks."""
    known = Telling.restated

    def restated(self: Telling, state: Any, now_ms: int, blocks: int, restate_ms: int) -> list[int]:
        return known(self, state, now_ms, blocks, 1 << 60)

    with patch.object(Telling, "restated", restated):
        yield


@contextmanager
def restate_ignored() -> Iterator[None]:
    """Somebody asks for all of it again and hears nothing."""
    with patch.object(Telling, "restate", lambda *_: None):
        yield


@contextmanager
def beats_forgotten() -> Iterator[None]:
    """Windows are made only when there is something to say."""

    def silent(state: Any, memory: Any, now_ms: int) -> bool:
        return bool(memory.telling.pressing or state.untold)

    with patch.object(announcing, "due", silent):
        yield


@contextmanager
def walk_forgets_branches() -> Iterator[None]:
    """Telling all of it again follows one child of each block only."""
    known = Walk.step

    def step(self: Walk, state: Any, blocks: int, slots: int) -> list[int]:
        index = state.index
        kept = [(table, dict(table.below)) for table in index.tables.values()]
        for table, below in kept:
            table.below = {
                key: under if isinstance(under, int) else min(under) for key, under in below.items()
            }
        try:
            return known(self, state, blocks, slots)
        finally:
            for table, below in kept:
                table.below = below

    with patch.object(Walk, "step", step):
        yield


@contextmanager
def windows_lean_on_leader_memory() -> Iterator[None]:
    """What is announced depends on what this replica has shown to readers."""
    known = told._store

    def store(state: Any, memory: Any, slots: Any) -> Any:
        return known(state, memory, [slot for slot in slots if state.index.visible[slot]])

    with patch.object(told, "_store", store):
        yield


@contextmanager
def followers_know_no_tombstones() -> Iterator[None]:
    """What is told again as removed is known to the leader only."""
    known = told.take

    def take(state: Any, memory: Any, event: ev.Announced) -> None:
        known(state, memory, event if memory.telling.leading else replace(event, again=0))

    with patch.dict(apply._APPLY, {ev.Announced: take}):
        yield


@contextmanager
def takeover_looks_at_nothing() -> Iterator[None]:
    """A new leader announces only what comes after it took over."""
    known = Telling.lead

    def lead(self: Telling, now_ms: int) -> None:
        known(self, now_ms)
        self._scan = None

    with patch.object(Telling, "lead", lead):
        yield


@contextmanager
def moved_storage_keeps_its_name() -> Iterator[None]:
    """A storage is another place for routers, and they are told nothing."""
    with patch.object(told, "moved", lambda *_: None):
        yield


@contextmanager
def short_spans_taken() -> Iterator[None]:
    """Tokens of half a block are as good as any."""
    with patch.object(starts, "check_tokens", lambda *_: None):
        yield


@contextmanager
def hash_spaces_mixed() -> Iterator[None]:
    """Two instances of one routing group may name the same tokens differently."""
    with patch.object(publishing, "_mixed", lambda *_: None):
        yield


@contextmanager
def tokens_of_the_wrong_row() -> Iterator[None]:
    """Each block gets the tokens of the next one."""
    known = apply._APPLY[ev.WriteStarted]

    def started(state: Any, memory: Any, event: ev.WriteStarted) -> None:
        if event.tokens:
            event = replace(event, tokens=(*islice(event.tokens, 1, None), event.tokens[0]))
        known(state, memory, event)

    with patch.dict(apply._APPLY, {ev.WriteStarted: started}):
        yield


@contextmanager
def snapshot_forgets_tombstones() -> Iterator[None]:
    """What was removed shortly before a snapshot is never told again after it."""
    known = capture.restore

    def restore(*arguments: Any) -> Any:
        state, memory = known(*arguments)
        state.tombstones.clear()
        state.untold.clear()
        return state, memory

    with patch.object(capture, "restore", restore):
        yield


PLANTED: dict[str, Planted] = {
    bug.__name__: bug
    for bug in (
        window_number_skipped,
        removal_forgotten,
        told_before_durable,
        budget_ignored,
        restated_as_stored,
        child_before_parent,
        children_stay_when_the_parent_goes,
        removals_told_once,
        rotation_off,
        restate_ignored,
        beats_forgotten,
        walk_forgets_branches,
        windows_lean_on_leader_memory,
        followers_know_no_tombstones,
        takeover_looks_at_nothing,
        moved_storage_keeps_its_name,
        short_spans_taken,
        hash_spaces_mixed,
        tokens_of_the_wrong_row,
        snapshot_forgets_tombstones,
    )
}
