"""Compares the whole of a machine with the model: every block, session, member and counter."""

from metaservice.core.ids import SLOT_MASK
from metaservice.core.machine import Machine
from metaservice.core.model import LocationState, SwitchScope

from .model import Model
from .rows import Violation

KINDS = {
    "tenants": SwitchScope.tenant,
    "groups": SwitchScope.group,
    "instances": SwitchScope.instance,
    "storages": SwitchScope.storage,
}


def compare(model: Model, machine: Machine) -> None:
    """Raises Violation naming the first difference."""
    compare_blocks(model, machine)
    compare_sessions(model, machine)
    compare_usage(model, machine)
    for kind in ("engine", "worker"):
        want = {name: (m.incarnation, bool(m.expired_ms)) for name, m in model.members(kind).items()}
        got = {m.id: (m.incarnation, bool(m.expired_ms)) for m in machine.state.members(kind).values()}
        differ(f"{kind}s", want, got)
    held = {
        name: (one.pool.worker, one.pool.incarnation)
        for name, one in machine.state.storages.items()
        if one.pool is not None
    }
    differ("pools", model.state.pools, held)


def differ(what: str, want: object, got: object) -> None:
    """Raises Violation when the two differ."""
    if want != got:
        raise Violation(f"{what}: the model has {want}, the machine {got}")


def compare_blocks(model: Model, machine: Machine) -> None:
    """Every location in its state, and no other."""
    index = machine.state.index
    used = sum(state != LocationState.gone for state in index.state)
    differ("locations in use", len(model.state.copies), used)
    for copy in model.state.copies.values():
        slot = copy.location & SLOT_MASK
        got = (
            index.key[slot],
            index.parent[slot],
            index.state[slot],
            index.generation[slot],
            machine.state.storage_of[index.storage[slot]].id,
            index.tables[index.table[slot]].instance,
            index.tables[index.table[slot]].group.name,
            index.session[slot],
            bool(index.visible[slot]),
            [bool(index.done[slot] >> part & 1) for part in range(len(copy.parts))],
        )
        want = (
            copy.key,
            copy.parent,
            copy.state,
            copy.generation,
            copy.storage,
            copy.instance,
            copy.group,
            copy.session,
            model.visible(copy),
            [part is not None for part in copy.parts],
        )
        if want != got:
            raise Violation(f"location {copy.location}: the model has {want}, the machine {got}")


def compare_sessions(model: Model, machine: Machine) -> None:
    """Every open session with its deadline."""
    want = {number: s.deadline_ms for number, s in model.state.sessions.items() if s.open}
    got = {number: s.deadline_ms for number, s in machine.state.sessions.items()}
    differ("open sessions", want, got)


def compare_usage(model: Model, machine: Machine) -> None:
    """Every counter that people are shown is the sum of its rows."""
    want = {scope: [0, 0, 0, 0] for scope in model.live_uses()}
    rows_of = {name: [want[scope] for scope in model.path(name)] for name in model.state.instances}
    for copy in model.state.copies.values():
        at = 0 if copy.live else 2
        for row in (*rows_of[copy.instance], want[SwitchScope.storage, copy.storage]):
            row[at] += copy.size_bytes
            row[at + 1] += 1
    for kind, scope in KINDS.items():
        for view in machine.describe(kind):
            usage = view.usage  # type: ignore[attr-defined]
            name = view.id  # type: ignore[attr-defined]
            got = [usage.bytes, usage.blocks, usage.deleting_bytes, usage.deleting_blocks]
            differ(f"usage of {kind} {name}", want[scope, name], got)
