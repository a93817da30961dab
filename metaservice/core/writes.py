"""Decisions about write sessions: start, finish, renew, abort. Pure: they read the state and return events
and a reply."""

from array import array
from collections.abc import Sequence

from .admission import Admission, admit
from .commands import Abort, Finish, RenewWrite, StartWrite
from .events import BlocksRemoved, Event, SessionEnded, SessionRenewed, WriteFinished, WriteStarted
from .ids import NONE, SLOT_MASK, caller_name, location_base, shard_of
from .index import SERVING, Table, locations_of, packed_slots
from .memory import Memory
from .model import SessionState, SwitchMode
from .outcomes import FinishStatus, RefusedReason, WriteOutcome
from .parents import find_cycle, wanted_of
from .rejections import Rejection
from .replies import Aborted, Finished, Renewed, Started, Switched
from .state import Ended, Instance, Session, State
from .validate import (
    check_caller,
    check_keys,
    check_sizes,
    find_instance,
    find_table,
    owned_session,
    ttl_of,
)  # fmt: skip

PENDING = int(FinishStatus.pending)
FREED = int(FinishStatus.freed)
SERVES = int(FinishStatus.serving)

Decision = tuple[object, list[Event]]


# ---------------------------------------------------------------- start


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
    refused = check_keys(command.keys, instance, memory.limits) or check_sizes(command.sizes, table)
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
    request = _request_of(command)
    event = state.remembered.get(request)
    if event is None:
        first = memory.unjournaled.get(request)
        return _reused(command.request_id) if first and len(first.outcomes) != len(command.keys) else first
    if not isinstance(event, WriteStarted) or len(event.outcomes) != len(command.keys):
        return _reused(command.request_id)
    reply = started_reply(state, event)
    index, base = state.index, location_base(state.shard)
    for key, location, generation in zip(command.keys, reply.locations, reply.generations, strict=True):
        slot = location - base
        # a place that was used again since no longer tells its first key
        if generation and index.generation[slot] == generation and index.key[slot] not in (key, b""):
            return _reused(command.request_id)
    return reply


def _request_of(command: StartWrite | Finish) -> tuple[str, str]:
    """What a retry is recognised by."""
    return caller_name(command.engine, command.incarnation), command.request_id


def _reused(request_id: str) -> Rejection:
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
        memory.remember_unjournaled(_request_of(command), reply)
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
        state, command, table, ttl_ms, wanted, bytes(outcomes), bytes(reasons), waits, admission, now_ms
    )
    reply = started_reply(state, event)
    if admission.count:
        events.append(event)
    elif command.request_id:
        memory.remember_unjournaled(_request_of(command), reply)
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
    )  # fmt: skip


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


# ---------------------------------------------------------------- finish


def finish(state: State, memory: Memory, command: Finish, now_ms: int) -> Decision:
    """Take the outcome of parts; a block serves when its last part is in."""
    session = owned_session(state, command.session, command.engine, command.incarnation)
    if isinstance(session, Rejection):
        return session, []
    if command.request_id:
        event = state.remembered.get(_request_of(command))
        if event is not None:
            if isinstance(event, WriteFinished) and event.session == command.session:
                return finished_reply(event), []
            return _reused(command.request_id), []
    if isinstance(session, Ended):
        return _finish_ended(state, session, command), []
    return _finish_open(state, memory, session, command, now_ms)


def finished_reply(event: WriteFinished) -> Finished:
    """The reply that the event carries."""
    return Finished(event.answer or event.status, event.published, event.open)


def _finish_ended(state: State, ended: Ended, command: Finish) -> Finished | Rejection:
    if ended.state == SessionState.expired:
        return Rejection(
            "session_expired", "the session's deadline passed; its locations were freed", "session"
        )
    if ended.state == SessionState.aborted:
        return Rejection("session_aborted", "the session was aborted; its locations were freed", "session")
    row_of = {slot: row for row, slot in enumerate(array("I", ended.slots))}
    rows = _rows(state, row_of, array("I", ended.generations), command)
    if isinstance(rows, Rejection):
        return rows
    return Finished(bytes(ended.status[row] for row in rows), 0, 0)


def _rows(
    state: State, row_of: dict[int, int], generations: "array[int]", command: Finish
) -> list[int] | Rejection:
    """The session's rows of the named locations."""
    if not command.locations:
        return Rejection("empty_batch", "name at least one location", "locations")
    if len(command.generations) != len(command.locations):
        return Rejection(
            "column_length",
            f"{len(command.generations)} generations for {len(command.locations)} locations",
            "generations",
        )
    rows: list[int] = []
    for at, location in enumerate(command.locations):
        row = row_of.get(location & SLOT_MASK) if shard_of(location) == state.shard else None
        if row is None:
            return Rejection(
                "foreign_location", f"location {location} is not part of the session", f"locations[{at}]"
            )
        if generations[row] != command.generations[at]:
            return Rejection(
                "stale_generation",
                f"location {location} has generation {generations[row]} here, not {command.generations[at]}",
                f"generations[{at}]",
            )
        rows.append(row)
    return rows


def _finish_open(state: State, memory: Memory, session: Session, command: Finish, now_ms: int) -> Decision:
    table = session.table
    refused = check_sizes(command.sizes, table)
    if refused is not None:
        return refused, []
    columns = _part_columns(table, command)
    if isinstance(columns, Rejection):
        return columns, []
    whole = (
        command.parts is None
        and (command.ok is None or command.ok.find(0) < 0)
        and command.locations == locations_of(state.shard, session.slots)
        and command.generations == session.generations
        and session.status.count(PENDING) == len(session.slots)
        and not any(map(state.index.done.__getitem__, session.slots))
    )
    if whole:
        assert command.checksums is not None
        event = WriteFinished(
            now_ms, session.number, session.slots.tobytes(), bytes(len(session.slots)), b"", b"",
            command.checksums.tobytes(), 0, len(session.slots), 0, command.request_id,
        )  # fmt: skip
        return finished_reply(event), [event]
    return _finish_rows(state, memory, session, columns, command, now_ms)


def _part_columns(table: Table, command: Finish) -> list[int] | Rejection:
    """Part numbers of the call's part columns."""
    names = [part.name for part in table.parts]
    parts = names if command.parts is None else list(command.parts)
    if not parts or len(set(parts)) != len(parts):
        return Rejection("invalid_field", "name each part once", "parts")
    for row, name in enumerate(parts):
        if name not in names:
            return Rejection(
                "unknown_part", f"no part {name!r}; there are {', '.join(names)}", f"parts[{row}]"
            )
    count = len(command.locations) * len(parts)
    if command.ok is not None and len(command.ok) != count:
        return Rejection("column_length", f"{len(command.ok)} rows; locations times parts are {count}", "ok")
    succeeded = command.ok is None or 1 in command.ok
    if succeeded and command.checksums is None:
        return Rejection("invalid_field", "needed where a part succeeded", "checksums")
    if command.checksums is not None and len(command.checksums) != count:
        return Rejection(
            "column_length", f"{len(command.checksums)} rows; locations times parts are {count}", "checksums"
        )
    return [names.index(name) for name in parts]


def _finish_rows(
    state: State,
    memory: Memory,
    session: Session,
    columns: list[int],
    command: Finish,
    now_ms: int,
) -> Decision:
    rows = _rows(state, session.rows(), session.generations, command)
    if isinstance(rows, Rejection):
        return rows, []
    table = session.table
    parts, width = len(table.parts), len(columns)
    done = state.index.done
    news: dict[int, int] = {}
    failed: set[int] = set()
    sums: dict[int, array[int]] = {}
    for at, row in enumerate(rows):
        if session.status[row] != PENDING:
            continue  # it is decided: the first answer stands
        had = done[session.slots[row]] | news.get(row, 0)
        for column, part in enumerate(columns):
            place = at * width + column
            if had >> part & 1:
                continue
            if command.ok is not None and not command.ok[place]:
                failed.add(row)
                continue
            assert command.checksums is not None
            news[row] = news.get(row, 0) | 1 << part
            had |= 1 << part
            sums.setdefault(row, array("Q", bytes(8 * parts)))[part] = command.checksums[place]
    status = bytearray(session.status)
    changed = sorted(news.keys() | failed)
    for row in changed:
        whole = done[session.slots[row]] | news.get(row, 0) == table.full_mask
        status[row] = FREED if row in failed else SERVES if whole else PENDING
    answer = bytes(status[row] for row in rows)
    published = sum(status[row] == SERVES for row in changed)
    if not changed:
        return Finished(answer, 0, session.open), []
    none = array("Q", bytes(8 * parts))
    event = WriteFinished(
        now_ms, session.number, packed_slots(session.slots[row] for row in changed),
        bytes(status[row] for row in changed), answer, array("Q", [news.get(row,
        0) for row in changed]).tobytes(),
        b"".join(sums.get(row, none).tobytes() for row in changed), now_ms + memory.limits.late_write_ms,
        published,
        status.count(PENDING), command.request_id,
    )  # fmt: skip
    return finished_reply(event), [event]


# ---------------------------------------------------------------- renew, abort


def renew_write(state: State, memory: Memory, command: RenewWrite, now_ms: int) -> Decision:
    """Prolong a session (never shorten it)."""
    session = owned_session(state, command.session, command.engine, command.incarnation)
    if isinstance(session, Rejection):
        return session, []
    if isinstance(session, Ended):
        return _over(session), []
    ttl_ms = session.ttl_ms if not command.ttl_ms else ttl_of(command.ttl_ms, memory.limits)
    if isinstance(ttl_ms, Rejection):
        return ttl_ms, []
    deadline_ms = now_ms + ttl_ms
    if deadline_ms <= session.deadline_ms:
        return Renewed(session.deadline_ms - now_ms), []
    return Renewed(ttl_ms), [SessionRenewed(now_ms, session.number, deadline_ms)]


def _over(ended: Ended) -> Rejection:
    code = {
        SessionState.expired: "session_expired",
        SessionState.aborted: "session_aborted",
        SessionState.finished: "session_ended",
    }[SessionState(ended.state)]
    return Rejection(code, f"the write session is over: {SessionState(ended.state).name}", "session")


def abort(state: State, memory: Memory, command: Abort, now_ms: int) -> Decision:
    """Free what is still being written; what serves already stays."""
    session = owned_session(state, command.session, command.engine, command.incarnation)
    if isinstance(session, Rejection):
        return session, []
    if isinstance(session, Ended):
        if session.state == SessionState.expired:
            return _over(session), []
        return Aborted(session.freed), []
    event = session_end(session, memory, False, command.request_id, now_ms)
    return Aborted(event.freed), [event]


def session_end(
    session: Session, memory: Memory, expired: bool, request_id: str, now_ms: int
) -> SessionEnded:
    """The event that ends a session with work open. A late write may land until `late_write_ms` from now."""
    return SessionEnded(
        now_ms, session.number, expired, session.open, now_ms + memory.limits.late_write_ms, request_id
    )
