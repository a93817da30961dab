"""Decisions about blocks that go: remove by key, deletion tasks and their confirmation."""

from array import array

from .commands import ConfirmTask, Remove, TakeTasks, Unknown
from .events import BlocksRemoved, Event, LocationsGone
from .ids import NONE, SLOT_MASK, shard_of
from .index import DELETING, live_of, packed_slots
from .memory import Memory
from .outcomes import RemoveOutcome
from .rejections import Rejection
from .replies import Confirmed, Removed, Tasks, UnknownPlaces
from .state import State
from .validate import check_caller, check_keys, find_instance, find_member, find_table

Decision = tuple[object, list[Event]]


def remove(state: State, memory: Memory, command: Remove, now_ms: int) -> Decision:
    """Hide blocks at once; their bytes go when the last lease over them has ended."""
    instance = find_instance(state, command.instance)
    if isinstance(instance, Rejection):
        return instance, []
    if command.client and command.request_id:
        event = state.remembered.get((command.client, command.request_id))
        if isinstance(event, BlocksRemoved) and len(event.outcomes) == len(command.keys):
            return removed_reply(event), []
        if event is not None:
            return Rejection("invalid_field", "the request id was used for another call", "request_id"), []
    table = instance.primary if command.group is None else find_table(instance, command.group)
    if isinstance(table, Rejection):
        return table, []
    refused = check_keys(command.keys, instance, memory.limits)
    if refused is not None:
        return refused, []
    if command.lease:
        memory.leases.release(command.lease)
    index = state.index
    found = index.find(table, command.keys)
    outcomes = bytes(
        RemoveOutcome.absent
        if slot is None
        else RemoveOutcome.waiting_for_lease
        if index.pins[slot]
        else RemoveOutcome.removed
        for slot in found
    )
    slots = list(dict.fromkeys(slot for slot in found if slot is not None))
    if not slots:
        return Removed(outcomes, 0), []
    # A writer may still be writing what it was told to write: its place waits for late writes too.
    writing = any(index.session[slot] for slot in slots)
    limits = memory.limits
    wait_ms = max(limits.reclaim_delay_ms, limits.late_write_ms) if writing else limits.reclaim_delay_ms
    event = BlocksRemoved(
        now_ms, packed_slots(slots), "removed", now_ms + wait_ms, command.client, command.request_id, outcomes
    )
    return removed_reply(event), [event]


def removed_reply(event: BlocksRemoved) -> Removed:
    """The reply that the event carries."""
    return Removed(event.outcomes, len(event.slots) // 4)


def take_tasks(state: State, memory: Memory, command: TakeTasks, now_ms: int) -> Tasks | Rejection:
    """Hand deletion work to a worker. Leader memory: a lost task is handed out again."""
    worker = find_member(state, "worker", command.worker, command.incarnation)
    if isinstance(worker, Rejection):
        return worker
    if command.limit < 1:
        return Rejection("invalid_field", "expected 1 or more", "limit")
    numbers = [state.storages[name].number for name in worker.storages if name in state.storages]
    return Tasks(memory.deletions.take(state, command.worker, numbers, command.limit, now_ms))


def confirm_task(state: State, memory: Memory, command: ConfirmTask, now_ms: int) -> Decision:
    """The worker says which bytes are gone. Late is fine: a place is deleted once, whoever did it."""
    refused = check_caller(state, "worker", command.worker, command.incarnation)
    if refused is not None:
        return refused, []
    task = memory.deletions.find(command.task)
    if task is None:
        return Rejection("task_unknown", "no such task (any more): take tasks again", "task"), []
    if command.worker != task.worker:
        return Rejection("foreign_task", "the task is held by another worker", "task"), []
    if command.ok is not None and len(command.ok) != len(task.slots):
        return Rejection("column_length", f"{len(command.ok)} rows for {len(task.slots)} locations", "ok"), []
    if task.answer is not None:
        return Confirmed(*task.answer), []
    ok = command.ok if command.ok is not None else b"\x01" * len(task.slots)
    index = state.index
    gone, again, failed = array("I"), 0, array("I")
    for slot, generation, done in zip(task.slots, task.generations, ok, strict=True):
        waits = index.state[slot] == DELETING and index.generation[slot] == generation
        if waits and done:
            gone.append(slot)
        elif waits:
            failed.append(slot)
            again += 1
    task.answer = (len(task.slots) - again, again)
    memory.deletions.done(task, failed, now_ms)
    return Confirmed(*task.answer), [LocationsGone(now_ms, gone.tobytes())] if gone else []


def unknown(state: State, command: Unknown) -> UnknownPlaces | Rejection:
    """Which of these places does no block have, in any state? Their bytes are orphans."""
    worker = find_member(state, "worker", command.worker, command.incarnation)
    if isinstance(worker, Rejection):
        return worker
    storage = state.storages.get(command.storage)
    if storage is None:
        return Rejection("storage_unknown", f"no storage {command.storage!r}", "storage")
    if len(command.generations) != len(command.locations):
        return Rejection("column_length", "one generation a location", "generations")
    # What another shard's location is, only that shard can say: known, so that nobody deletes its bytes.
    here = [shard_of(location) == state.shard for location in command.locations]
    slots = array(
        "Q",
        [
            location & SLOT_MASK if mine else NONE
            for location, mine in zip(command.locations, here, strict=True)
        ],
    )
    live = live_of(state.index, slots, command.generations)
    index = state.index
    return UnknownPlaces(
        bytes(
            0 if not mine or (known and index.storage[slot] == storage.number) else 1
            for slot, known, mine in zip(slots, live, here, strict=True)
        )
    )
