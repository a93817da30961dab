"""Decisions about write sessions that are open: finish, renew, abort. Pure: they read the state and return
events and a reply."""

from array import array

from .commands import Abort, Finish, RenewWrite
from .events import Event, SessionEnded, SessionRenewed, WriteFinished
from .ids import SLOT_MASK, shard_of
from .index import Table, locations_of, packed_slots
from .memory import Memory
from .model import SessionState
from .outcomes import FinishStatus
from .rejections import Rejection
from .replies import Aborted, Finished, Renewed
from .starts import request_of, reused
from .state import Ended, Session, State
from .validate import (
    check_sizes,
    owned_session,
    ttl_of,
)  # fmt: skip

PENDING = int(FinishStatus.pending)
FREED = int(FinishStatus.freed)
SERVES = int(FinishStatus.serving)

Decision = tuple[object, list[Event]]


# ---------------------------------------------------------------- finish


def finish(state: State, memory: Memory, command: Finish, now_ms: int) -> Decision:
    """Take the outcome of parts; a block serves when its last part is in."""
    session = owned_session(state, command.session, command.engine, command.incarnation)
    if isinstance(session, Rejection):
        return session, []
    if command.request_id:
        event = state.remembered.get(request_of(command))
        if event is not None:
            if isinstance(event, WriteFinished) and event.session == command.session:
                return finished_reply(event), []
            return reused(command.request_id), []
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
