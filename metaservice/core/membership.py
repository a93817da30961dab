"""Decisions about engines and workers: registration with an incarnation, heartbeats, suspicion, expiry.

An unknown, expired or replaced caller is told to register again, never left in silence.
"""

from . import pools, publishing
from .commands import Deregister, Heartbeat, RegisterEngine, RegisterWorker
from .events import EngineRegistered, Event, MemberExpired, MemberLeft, SessionEnded, WorkerRegistered
from .memory import Memory
from .rejections import Rejection
from .replies import Beat, Done, Registered
from .state import Member, State
from .validate import check_caller
from .writes import session_end

Decision = tuple[object, list[Event]]


def register_engine(state: State, memory: Memory, command: RegisterEngine, now_ms: int) -> Decision:
    """Another incarnation under the id fences the one before: its open write sessions end now."""
    if command.instance and command.instance not in state.instances:
        return Rejection(
            "instance_unknown", f"no instance {command.instance!r}: register it first", "instance"
        ), []
    refused = publishing.refuse_engine(state, command) or _refuse(
        state, memory, "engine", command.engine, command.incarnation
    )
    if refused is not None:
        return refused, []
    known = state.engines.get(command.engine)
    memory.beats["engine", command.engine] = now_ms
    fenced = _fenced(known, command.incarnation)
    current = known is not None and not fenced and not known.expired_ms
    if current and known is not None:
        same = (known.instance, known.rank, known.endpoints)
        if same == (command.instance, command.rank, command.endpoints):
            return Registered(command.engine, command.incarnation), []
    events: list[Event] = [
        EngineRegistered(
            now_ms, command.engine, command.incarnation, command.instance, command.rank, command.endpoints,
            *publishing.channels(state, command),
        )
    ]  # fmt: skip
    if fenced:
        events += fence(state, memory, command.engine, command.incarnation, now_ms)
    return Registered(command.engine, command.incarnation, fenced), events


def fence(state: State, memory: Memory, engine: str, incarnation: str, now_ms: int) -> list[SessionEnded]:
    """End the open sessions of every other incarnation of the engine."""
    open_now = sorted(state.sessions_of.get(engine, ()))
    sessions = [state.sessions[number] for number in open_now]
    return [
        session_end(session, memory, False, "", now_ms)
        for session in sessions
        if session.incarnation != incarnation
    ]


def register_worker(state: State, memory: Memory, command: RegisterWorker, now_ms: int) -> Decision:
    """A volatile storage that it names becomes this incarnation's: what an earlier one held there is gone."""
    if not command.storages or len(set(command.storages)) != len(command.storages):
        return Rejection("invalid_field", "name one storage or more, each once", "storages"), []
    for row, name in enumerate(command.storages):
        if name not in state.storages:
            return Rejection("storage_unknown", f"no storage {name!r}", f"storages[{row}]"), []
    worker, incarnation, storages = command.worker, command.incarnation, command.storages
    refused = _refuse(state, memory, "worker", worker, incarnation) or pools.refuse(state, command)
    if refused is not None:
        return refused, []
    known = state.workers.get(worker)
    memory.beats["worker", worker] = now_ms
    fenced = _fenced(known, incarnation)
    events: list[Event] = [*pools.ended(state, worker, now_ms, incarnation, storages)]
    if known is None or fenced or known.expired_ms or known.storages != storages:
        events.append(WorkerRegistered(now_ms, worker, incarnation, storages))
    return Registered(worker, incarnation, fenced), [*events, *pools.begun(state, command, now_ms)]


def deregister(state: State, memory: Memory, command: Deregister, now_ms: int) -> Decision:
    """A member leaves on purpose; an engine's open sessions end. Without its incarnation only an expired one
    is taken away: whoever clears up must not end what lives, or has just come back."""
    if command.id not in state.members(command.kind):
        return Rejection(f"{command.kind}_unknown", f"no {command.kind} {command.id!r}", "id"), []
    member = state.members(command.kind)[command.id]
    if command.incarnation and member.incarnation != command.incarnation:
        return Rejection(
            "reregister", f"{command.kind} {command.id!r} has another incarnation now", "incarnation"
        ), []
    if not command.incarnation and not member.expired_ms:
        return Rejection(
            "not_expired",
            f"{command.kind} {command.id!r} has not expired: name its incarnation to end it all the same",
            "incarnation",
        ), []
    left = MemberLeft(now_ms, command.kind, command.id)
    if command.kind == "engine":
        return Done(), [left, *fence(state, memory, command.id, "", now_ms)]
    return Done(), [*pools.ended(state, command.id, now_ms), left]


def heartbeat(state: State, memory: Memory, command: Heartbeat, now_ms: int) -> Beat | Rejection:
    """Leader memory only."""
    refused = check_caller(state, command.kind, command.id, command.incarnation)
    if refused is not None:
        return refused
    memory.beats[command.kind, command.id] = now_ms
    member = state.members(command.kind)[command.id]
    instance = state.instances.get(member.instance)
    return Beat("active", instance.effective if instance is not None else None)


def status_of(memory: Memory, kind: str, member: Member, now_ms: int) -> str:
    """active, suspect or expired."""
    if member.expired_ms:
        return "expired"
    silent_ms = now_ms - memory.beats.get((kind, member.id), member.registered_ms)
    return "suspect" if silent_ms >= memory.limits.suspect_ms else "active"


def expiries(state: State, memory: Memory, now_ms: int) -> list[Event]:
    """Members that were silent too long, and members that were gone so long that they are forgotten."""
    limits = memory.limits
    events: list[Event] = []
    for kind in ("engine", "worker"):
        for member in state.members(kind).values():
            if member.expired_ms:
                if now_ms - member.expired_ms >= limits.forget_ms:
                    events.append(MemberLeft(now_ms, kind, member.id))
                continue
            heard_ms = memory.beats.setdefault((kind, member.id), now_ms)
            if now_ms - heard_ms >= limits.expire_ms:
                if kind == "worker":
                    events += pools.ended(state, member.id, now_ms)
                events.append(MemberExpired(now_ms, kind, member.id, member.incarnation))
    return events


def _refuse(state: State, memory: Memory, kind: str, id: str, incarnation: str) -> Rejection | None:
    if not incarnation:
        return Rejection("invalid_field", "an incarnation is needed", "incarnation")
    known = state.members(kind).get(id)
    if known is None:
        if len(state.members(kind)) >= memory.limits.registered_max:
            return Rejection("registry_full", f"{memory.limits.registered_max} {kind}s are registered")
        return None
    if incarnation in known.retired:
        return Rejection(
            "incarnation_retired",
            "a newer incarnation replaced this one: start with a new one",
            "incarnation",
        )
    return None


def _fenced(known: Member | None, incarnation: str) -> str:
    return known.incarnation if known is not None and known.incarnation != incarnation else ""
