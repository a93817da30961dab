"""Lookups: what of an ordered list of keys is readable, and where. Reads of durable state; a lease is taken
in the same step.

A false miss costs a recomputation, a false hit is wrong output: whatever is not certain is a miss.
"""

from array import array
from collections.abc import Sequence
from itertools import compress

from .commands import Lookup
from .ids import caller_name, location_base
from .index import Table, locations_of
from .memory import Memory
from .model import GroupKind, SwitchMode, SwitchScope
from .rejections import Rejection
from .replies import Located, Looked, Switched
from .state import Instance, State
from .validate import check_caller, check_keys, find_instance, find_table

MODES = ("prefix", "window", "state", "each")


def lookup(state: State, memory: Memory, command: Lookup, now_ms: int) -> Looked | Rejection:
    """Answer one lookup, with a lease over exactly the returned blocks when one is asked for."""
    instance = find_instance(state, command.instance)
    if isinstance(instance, Rejection):
        return instance
    if command.engine:
        refused = check_caller(state, "engine", command.engine, command.incarnation)
        if refused is not None:
            return refused
    refused = _check(memory, instance, command)
    if refused is not None:
        return refused
    table = _table_for(instance, command)
    if isinstance(table, Rejection):
        return table
    request = None
    if command.engine and command.request_id and command.lease_ms:
        request = (caller_name(command.engine, command.incarnation), command.request_id)
    if request is not None and (first := memory.leases.of_request(request)) is not None:
        if not _answers(state, table, command, first):
            return Rejection("invalid_field", "the request id was used for another lookup", "request_id")
        assert first.lease is not None
        memory.leases.renew(first.lease, now_ms + first.lease_ms, None)
        return first
    switch = instance.effective
    if switch is not None and switch.mode is SwitchMode.bypass:
        return Looked(
            command.mode,
            len(command.keys),
            0,
            0,
            "switch",
            0,
            table.group.name,
            switch,
            hit=_no_hits(command),
        )
    reply = _MODE[command.mode](state, instance, table, command)
    reply.switch = reply.switch or switch
    if reply.hits and reply.located is not None:
        _touch_and_lease(state, memory, command, reply, table, request, now_ms)
    return reply


def _answers(state: State, table: Table, command: Lookup, first: Looked) -> bool:
    """Whether the first answer to a request id is one to these keys: a reused id must not lead to other
    blocks. The leased slots still have their keys, whatever became of the blocks."""
    if (first.mode, first.asked) != (command.mode, len(command.keys)) or first.located is None:
        return False
    index, base = state.index, location_base(state.shard)
    slots = [location - base for location in first.located.locations]
    asked = (
        list(compress(command.keys, first.hit))
        if command.mode == "each"
        else command.keys[first.start : first.start + first.hits]
    )
    here = all(index.table[slot] == table.number for slot in slots)
    return here and asked == [index.key[slot] for slot in slots]


def _check(memory: Memory, instance: Instance, command: Lookup) -> Rejection | None:
    limits = memory.limits
    refused = check_keys(command.keys, instance, limits)
    if refused is not None:
        return refused
    if command.parent is not None and len(command.parent) != instance.fingerprint.key_length:
        return Rejection("key_length", f"keys have {instance.fingerprint.key_length} bytes", "parent")
    if command.mode not in MODES:
        return Rejection("invalid_field", f"expected one of {', '.join(MODES)}", "mode")
    if command.limit is not None and command.limit < 0:
        return Rejection("invalid_field", "expected 0 or more", "limit")
    if command.lease_ms and not limits.lease_ms_min <= command.lease_ms <= limits.lease_ms_max:
        return Rejection(
            "ttl_out_of_range", f"expected {limits.lease_ms_min}..{limits.lease_ms_max} ms, or 0", "lease_ms"
        )
    if command.lease_ms and memory.leases.full:
        return Rejection("too_many_leases", f"{limits.leases_max} read leases are held", "lease_ms")
    if command.mode == "window" and command.window_blocks is not None and command.window_blocks < 1:
        return Rejection("invalid_field", "expected 1 or more", "window_blocks")
    if command.mode != "window" and command.window_blocks is not None:
        return Rejection("invalid_field", "only lookups of mode window have a window", "window_blocks")
    return None


def _table_for(instance: Instance, command: Lookup) -> Table | Rejection:
    if command.mode == "state" and (
        instance.first(GroupKind.full) is None or instance.first(GroupKind.state) is None
    ):
        return Rejection("mode_not_applicable", "state needs a full and a state attention group", "mode")
    if command.group is not None:
        table = find_table(instance, command.group)
        if command.mode == "state" and isinstance(table, Table) and not table.primary:
            return Rejection("mode_not_applicable", "state lookups search the full attention group", "group")
        return table
    if command.mode == "window":
        window = instance.first(GroupKind.sliding_window)
        if window is None:
            return Rejection("mode_not_applicable", "the instance has no sliding_window group", "mode")
        return window
    return instance.primary


def _prefix(state: State, instance: Instance, table: Table, command: Lookup) -> Looked:
    keys = command.keys
    slots, span = state.index.visible_prefix(table, keys, command.parent)
    slots, switch = _readable_run(state, slots)
    cut = "switch" if switch is not None else "none" if len(slots) == len(keys) else "miss"
    if command.limit is not None and len(slots) > command.limit:
        slots, switch, cut = slots[: command.limit], None, "limit"
    if span is not None:
        span = (span[0], span[0] + len(slots))
    return Looked(
        command.mode, len(keys), len(slots), 0, cut, len(slots), table.group.name, switch,
        located=_located(state, slots, span), span=span,
    )  # fmt: skip


def _state(state: State, instance: Instance, table: Table, command: Lookup) -> Looked:
    reply = _prefix(state, instance, table, command)
    holder = instance.first(GroupKind.state)
    assert holder is not None and reply.located is not None
    keys = command.keys[: reply.hits]
    found, flags = state.index.visible_of(holder, keys)
    barred = None
    for row in range(len(keys) - 1, -1, -1):
        slot = found[row]
        if not flags[row] or slot is None:
            continue
        if not _chained(state, slot, keys, row, command.parent):
            continue
        barred = _storage_switch(state, slot)
        if barred is not None:
            continue
        if row + 1 < reply.hits:
            reply.cut, reply.switch = "miss", None
        reply.hits = reply.cut_at = row + 1
        base = location_base(state.shard)
        kept = [location - base for location in reply.located.locations[: row + 1]]
        reply.located, reply.span = _located(state, kept), None
        reply.state_group, reply.state = holder.group.name, _located(state, [slot])
        return reply
    reply.cut = "switch" if barred is not None else reply.cut if not reply.hits else "miss"
    reply.switch = barred or (reply.switch if reply.cut == "switch" else None)
    reply.hits = reply.cut_at = 0
    reply.located = _located(state, [])
    return reply


def _window(state: State, instance: Instance, table: Table, command: Lookup) -> Looked:
    keys = command.keys
    width = command.window_blocks or table.group.window_blocks or 1
    found, flags = state.index.visible_of(table, keys)
    barred: Switched | None = None
    end, length = len(keys), 0
    for row in range(len(keys) - 1, -1, -1):
        slot = found[row]
        held = _storage_switch(state, slot) if flags[row] and slot is not None else None
        barred = barred or held
        if not flags[row] or slot is None or held or not _chained(state, slot, keys, row, command.parent):
            end, length = row, 0
            continue
        length += 1
        if length == width or row == 0:  # a run from the very start is whole, however short
            return _window_found(state, table, command, found, row, end)
    cut = "switch" if barred is not None else "miss"
    return Looked(
        command.mode, len(keys), 0, 0, cut, 0, table.group.name, barred, located=_located(state, [])
    )


def _window_found(
    state: State, table: Table, command: Lookup, found: Sequence[int | None], start: int, end: int
) -> Looked:
    count = len(command.keys)
    slots = [slot for slot in found[start:end] if slot is not None]
    if command.limit is not None and len(slots) > command.limit:
        return Looked(command.mode, count, 0, 0, "limit", 0, table.group.name, located=_located(state, []))
    cut = "none" if end == count else "miss"
    return Looked(
        command.mode, count, len(slots), start, cut, end, table.group.name, located=_located(state, slots)
    )


def _each(state: State, instance: Instance, table: Table, command: Lookup) -> Looked:
    keys = command.keys
    found, flags = state.index.visible_of(table, keys)
    column = bytearray(flags)
    if _any_bypassed(state):
        for row, slot in enumerate(found):
            if column[row] and slot is not None and _storage_switch(state, slot) is not None:
                column[row] = 0
    allowed = len(keys) if command.limit is None else command.limit
    if column.count(1) > allowed:
        for row, flag in enumerate(column):
            if flag:
                column[row] = allowed > 0
                allowed -= 1
    slots = [slot for slot, flag in zip(found, column, strict=True) if flag and slot is not None]
    cut, cut_at, barred = "none", column.find(0), None
    if cut_at < 0:
        cut_at = len(keys)
    else:
        first = found[cut_at]
        barred = _storage_switch(state, first) if flags[cut_at] and first is not None else None
        cut = "miss" if not flags[cut_at] else "switch" if barred is not None else "limit"
    return Looked(
        command.mode, len(keys), len(slots), 0, cut, cut_at, table.group.name, barred,
        hit=bytes(column), located=_located(state, slots),
    )  # fmt: skip


_MODE = {"prefix": _prefix, "window": _window, "state": _state, "each": _each}


def _chained(state: State, slot: int, keys: Sequence[bytes], row: int, parent: bytes | None) -> bool:
    """Whether the block's recorded parent is the key before it in the request."""
    return state.index.parent[slot] == (keys[row - 1] if row else parent)


def _no_hits(command: Lookup) -> bytes:
    return bytes(len(command.keys)) if command.mode == "each" else b""


def _any_bypassed(state: State) -> bool:
    return any(storage.switch is SwitchMode.bypass for storage in state.storages.values())


def _storage_switch(state: State, slot: int) -> Switched | None:
    storage = state.storage_of[state.index.storage[slot]]
    if storage.switch is not SwitchMode.bypass:
        return None
    return Switched(SwitchScope.storage, storage.id, storage.switch)


def _readable_run(state: State, slots: list[int]) -> tuple[list[int], Switched | None]:
    """The run up to the first location whose storage is bypassed."""
    if _any_bypassed(state):
        for row, slot in enumerate(slots):
            held = _storage_switch(state, slot)
            if held is not None:
                return slots[:row], held
    return slots, None


def _located(state: State, slots: list[int], span: tuple[int, int] | None = None) -> Located:
    return Located(locations_of(state.shard, slots, span), *state.index.places(slots, span))


def _touch_and_lease(
    state: State,
    memory: Memory,
    command: Lookup,
    reply: Looked,
    table: Table,
    request: tuple[str, str] | None,
    now_ms: int,
) -> None:
    located = reply.located
    assert located is not None
    base = location_base(state.shard)
    span = reply.span
    if span is not None:
        slots = array("I", range(*span))
    else:
        slots = array("I", [location - base for location in located.locations])
    memory.touch(slots, span, now_ms, chain=table.primary and command.mode != "each")
    generations = located.generations
    if reply.state is not None:
        at = reply.state.locations[0] - base
        memory.touch(array("I", (at,)), None, now_ms, chain=False)
        slots.append(at)
        span = None
        generations = generations + reply.state.generations
    if command.lease_ms:
        reply.lease_ms = command.lease_ms
        reply.lease = memory.leases.grant(
            slots, span, generations, now_ms + command.lease_ms, state.epoch, request, reply
        )
