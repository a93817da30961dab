"""Decisions about starting to write: which keys get a place, and the session under which they are written.
Pure: they read the state and return events and a reply."""

from array import array
from collections.abc import Sequence

from .admission import Admission, admit
from .commands import Finish, StartWrite
from .events import BlocksRemoved, Event, WriteStarted
from .ids import NONE, caller_name, location_base
from .index import SERVING, Table, locations_of, packed_slots
from .memory import Memory
from .model import GroupKind, SwitchMode
from .outcomes import RefusedReason, WriteOutcome
from .parents import find_cycle, wanted_of
from .rejections import Rejection
from .replies import Started, Switched
from .state import Instance, State
from .validate import check_caller, check_keys, check_sizes, check_tokens, find_instance, find_table, ttl_of

Decision = tuple[object, list[Event]]


def start_write(state: State, memory: Memory, command: StartWrite, now_ms: int) -> Decision:
    """Decide each key of a start-write: write, present, in progress or refused."""
    refused = check_caller(state, "engine", command.engine, command.incarnation)
    if refused is not None:
        return refused, []
    if command.request_id:
        first = _first_start(state, memory, command)
        if first is not None:
            return first, []
    instance = find_instance(state, command.instance)
    if isinstance(instance, Rejection):
        return instance, []
    table = instance.primary if command.group is None else find_table(instance, command.group)
    if isinstance(table, Rejection):
        return table, []
    ttl_ms = ttl_of(command.ttl_ms, memory.limits)
    if isinstance(ttl_ms, Rejection):
        return ttl_ms, []
    refused = (
        check_keys(command.keys, instance, memory.limits)
        or check_sizes(command.sizes, table)
        or check_tokens(command.tokens, len(command.keys), instance.fingerprint.block_size_tokens)
    )
    if refused is not None:
        return refused, []
    wanted = wanted_of(command.keys, command.parents, command.parent, instance.fingerprint.key_length)
    if isinstance(wanted, Rejection):
        return wanted, []
    refused = find_cycle(state, table, command.keys, wanted, command.parents is not None)
    if refused is not None:
        return refused, []
    if len(state.sessions) >= memory.limits.sessions_max:
        return Rejection("too_many_sessions", f"{memory.limits.sessions_max} write sessions are open"), []
    switch = instance.effective
    if switch is not None and switch.mode is not SwitchMode.normal:
        return _all_refused(memory, command, table, ttl_ms, switch), []
    return _decide_rows(state, memory, command, instance, table, ttl_ms, wanted, now_ms)


def _first_start(state: State, memory: Memory, command: StartWrite) -> Started | Rejection | None:
    """The first answer to a retried request; a Rejection when it was one to other keys."""
    request = request_of(command)
    event = state.remembered.get(request)
    if event is None:
        first = memory.unjournaled.get(request)
        return reused(command.request_id) if first and len(first.outcomes) != len(command.keys) else first
    if not isinstance(event, WriteStarted) or len(event.outcomes) != len(command.keys):
        return reused(command.request_id)
    reply = started_reply(state, event)
    index, base = state.index, location_base(state.shard)
    for key, location, generation in zip(command.keys, reply.locations, reply.generations, strict=True):
        slot = location - base
        # a place that was used again since no longer tells its first key
        if generation and index.generation[slot] == generation and index.key[slot] not in (key, b""):
            return reused(command.request_id)
    return reply


def request_of(command: StartWrite | Finish) -> tuple[str, str]:
    """What a retry is recognised by."""
    return caller_name(command.engine, command.incarnation), command.request_id


def reused(request_id: str) -> Rejection:
    """A request id that names another call already."""
    return Rejection("invalid_field", f"request id {request_id!r} was used for another call", "request_id")


def _all_refused(memory: Memory, command: StartWrite, table: Table, ttl_ms: int, switch: Switched) -> Started:
    count = len(command.keys)
    reply = Started(
        None, ttl_ms, table.group.name,
        bytes((WriteOutcome.refused,)) * count, bytes((RefusedReason.switch,)) * count,
        array("Q", bytes(8 * count)), array("I", bytes(4 * count)), array("H", bytes(2 * count)),
        array("I", bytes(4 * count)), switch,
    )  # fmt: skip
    if command.request_id:
        memory.remember_unjournaled(request_of(command), reply)
    return reply


def _decide_rows(
    state: State,
    memory: Memory,
    command: StartWrite,
    instance: Instance,
    table: Table,
    ttl_ms: int,
    wanted: dict[bytes, bytes | None],
    now_ms: int,
) -> Decision:
    index = state.index
    found = index.find(table, wanted)
    outcomes = bytearray(len(found))
    reasons = bytearray(len(found))
    waits: dict[int, int] = {}
    fresh = found.count(None)
    if fresh < len(found):
        for row, (slot, parent) in enumerate(zip(found, wanted.values(), strict=True)):
            if slot is None:
                continue
            if index.parent[slot] != parent:
                outcomes[row], reasons[row] = WriteOutcome.refused, RefusedReason.parent_mismatch
            elif index.state[slot] == SERVING:
                outcomes[row] = WriteOutcome.present
            else:
                outcomes[row] = WriteOutcome.in_progress
                waits[row] = max(0, state.sessions[index.session[slot]].deadline_ms - now_ms)
    admission = _admit(state, memory, instance, table, wanted, found, fresh)
    if admission.count < fresh:
        left = admission.count
        for row, slot in enumerate(found):
            if slot is not None:
                continue
            if left:
                left -= 1
            else:
                outcomes[row], reasons[row] = WriteOutcome.refused, admission.reason
    events: list[Event] = []
    if admission.victims:
        events.append(
            BlocksRemoved(
                now_ms,
                packed_slots(admission.victims),
                "quota",
                now_ms + memory.limits.reclaim_delay_ms,
                "",
                "",
                b"",
            )
        )
    event = _started_event(
        state, command, instance, table, ttl_ms, wanted, bytes(outcomes), bytes(reasons), waits, admission,
        now_ms,
    )  # fmt: skip
    reply = started_reply(state, event)
    if admission.count:
        events.append(event)
    elif command.request_id:
        memory.remember_unjournaled(request_of(command), reply)
    return reply, events


def _admit(
    state: State,
    memory: Memory,
    instance: Instance,
    table: Table,
    wanted: dict[bytes, bytes | None],
    found: list[int | None],
    fresh: int,
) -> Admission:
    if not fresh:
        return Admission(0, [], RefusedReason.none, [])
    protected = {slot for slot in found if slot is not None}
    protected.update(
        slot for slot in state.index.find(table, filter(None, wanted.values())) if slot is not None
    )
    if not table.primary:
        protected.update(slot for slot in state.index.find(table.dependency, wanted) if slot is not None)
    return admit(state, memory, instance, table, fresh, protected)


def _started_event(
    state: State,
    command: StartWrite,
    instance: Instance,
    table: Table,
    ttl_ms: int,
    wanted: dict[bytes, bytes | None],
    outcomes: bytes,
    reasons: bytes,
    waits: dict[int, int],
    admission: Admission,
    now_ms: int,
) -> WriteStarted:
    """The event, and with it the reply. Columns of the reply are spread from distinct keys to requested
    rows."""
    keys = list(wanted)
    parents: Sequence[bytes | None] = list(wanted.values())
    if admission.count < len(keys):
        rows_to_write = [row for row, outcome in enumerate(outcomes) if outcome == WriteOutcome.write]
        keys = [keys[row] for row in rows_to_write]
        parents = [parents[row] for row in rows_to_write]
    first = parents[0] if parents else None
    chain = parents[1:] == keys[:-1]
    slots = state.index.free_slots(len(keys))
    storages = array("H")
    for storage, count in admission.placed:
        storages.extend(array("H", (storage.number,)) * count)
    rows = b""
    wait_ms = b""
    if waits:
        column = array("I", bytes(4 * len(outcomes)))
        for row, wait in waits.items():
            column[row] = min(wait, NONE)
        wait_ms = column.tobytes()
    if len(command.keys) > len(wanted):  # a key was named twice: spread the columns over the requested rows
        row_of = {key: row for row, key in enumerate(wanted)}
        written_of = {key: row for row, key in enumerate(keys)}
        spread = [row_of[key] for key in command.keys]
        outcomes, reasons = bytes(outcomes[row] for row in spread), bytes(reasons[row] for row in spread)
        rows = packed_slots(written_of.get(key, NONE) for key in command.keys)
        if wait_ms:
            column = array("I", wait_ms)
            wait_ms = array("I", [column[row] for row in spread]).tobytes()
    return WriteStarted(
        now_ms, state.session_next, command.engine, command.incarnation, table.number, ttl_ms,
        now_ms + ttl_ms,
        b"".join(keys), first, None if chain else tuple(parents), slots.tobytes(),
        state.index.next_generations(slots).tobytes(), storages.tobytes(), outcomes, reasons, rows, wait_ms,
        len(admission.victims), command.request_id, table.group.name,
        *_tokens_of(command, instance, table, keys),
    )  # fmt: skip


def _tokens_of(
    command: StartWrite, instance: Instance, table: Table, keys: list[bytes]
) -> tuple[tuple[bytes, ...] | None, str, str]:
    """What routers are to know the written keys by: kept only of what is ever announced."""
    tokens = command.tokens
    if tokens is None or instance.publication is None or not announceable(table):
        return None, "", ""
    if len(keys) < len(tokens):
        first = dict(zip(reversed(command.keys), reversed(tokens), strict=True))
        tokens = [first[key] for key in keys]
    return tuple(tokens), command.lora or instance.publication.lora, command.salt


def announceable(table: Table) -> bool:
    """Whether routers may be told of the table's blocks: those of the main attention alone say how long a
    prefix is. A window or a state would make hits of what is none."""
    return table.primary and table.group.kind is GroupKind.full


def started_reply(state: State, event: WriteStarted) -> Started:
    """The reply that the event carries: the first one and every retry's."""
    count = len(event.outcomes)
    slots, generations = array("I", event.slots), array("I", event.generations)
    storages = array("H", event.storages)
    located = locations_of(state.shard, slots)
    if event.rows or len(slots) < count:
        if event.rows:
            rows = array("I", event.rows)
        else:
            rows, nexts = array("I", (NONE,)) * count, iter(range(len(slots)))
            for row, outcome in enumerate(event.outcomes):
                if outcome == WriteOutcome.write:
                    rows[row] = next(nexts)
        located = array("Q", [0 if row == NONE else located[row] for row in rows])
        generations = array("I", [0 if row == NONE else generations[row] for row in rows])
        storages = array("H", [0 if row == NONE else storages[row] for row in rows])
    wait_ms = array("I", event.wait_ms) if event.wait_ms else array("I", bytes(4 * count))
    return Started(
        event.session if event.slots else None, event.ttl_ms, event.group,
        event.outcomes, event.reasons, located, generations, storages, wait_ms, None, event.evicted,
        _pools_of(state, event) if state.volatile else {},
    )  # fmt: skip


def _pools_of(state: State, event: WriteStarted) -> dict[int, str]:
    """Storage number -> pool, for the volatile storages of a write. A retry may come when it is gone: then
    another must not be named for it."""
    pools: dict[int, str] = {}
    for number in set(array("H", event.storages)) & state.volatile:
        pool = state.storage_of[number].pool
        current = pool is not None and event.session >= pool.session_first
        pools[number] = pool.incarnation if pool is not None and current else ""
    return pools
