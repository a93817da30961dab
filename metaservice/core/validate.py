"""Checks that several commands share. Each returns what it found or the Rejection that says what was
wrong."""

import re

from .ids import KEY_LENGTH_MAX, KEY_LENGTH_MIN
from .index import Table
from .model import Fingerprint, GroupKind, Limits
from .rejections import Rejection
from .state import Ended, Instance, Member, Session, State

_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


def find_instance(state: State, id: str) -> Instance | Rejection:
    """The instance, when it answers callers, and here."""
    instance = state.instances.get(id)
    if instance is None:
        return Rejection("instance_unknown", f"no instance {id!r}: register it first", "instance")
    if state.shards > 1 and instance.shard != state.shard:
        return Rejection("instance_unknown", f"instance {id!r} lives in shard {instance.shard}", "instance")
    if instance.retiring:
        return Rejection("instance_retiring", f"instance {id!r} is being removed", "instance")
    return instance


def find_table(instance: Instance, group: str) -> Table | Rejection:
    """The key table of an attention group."""
    table = instance.tables.get(group)
    if table is None:
        known = ", ".join(instance.tables)
        return Rejection("unknown_group", f"no attention group {group!r}; the instance has {known}", "group")
    return table


def check_keys(keys: list[bytes], instance: Instance, limits: Limits) -> Rejection | None:
    """Number and length of a request's keys."""
    if not keys:
        return Rejection("empty_batch", "name at least one key", "keys")
    if len(keys) > limits.keys_per_request_max:
        return Rejection(
            "too_many_keys", f"{len(keys)} keys; at most {limits.keys_per_request_max} in one request", "keys"
        )
    length = instance.fingerprint.key_length
    if set(map(len, keys)) != {length}:
        row = next(row for row, key in enumerate(keys) if len(key) != length)
        return Rejection(
            "key_length", f"{len(keys[row])} bytes; keys of this instance have {length}", f"keys[{row}]"
        )
    return None


def check_caller(state: State, kind: str, id: str, incarnation: str) -> Rejection | None:
    """Whether this engine or worker is registered, alive and of the current incarnation."""
    member = state.members(kind).get(id)
    if member is None:
        return Rejection("reregister", f"{kind} {id!r} is not registered: register it (again)", kind)
    if member.incarnation != incarnation:
        return Rejection(
            "reregister", f"{kind} {id!r} has another incarnation now: register again", "incarnation"
        )
    if member.expired_ms:
        return Rejection("reregister", f"{kind} {id!r} expired without heartbeats: register again", kind)
    return None


def find_member(state: State, kind: str, id: str, incarnation: str) -> Member | Rejection:
    """The registered member behind a call."""
    return check_caller(state, kind, id, incarnation) or state.members(kind)[id]


def owned_session(state: State, number: int, engine: str, incarnation: str) -> Session | Ended | Rejection:
    """The caller's session, open or as far as it is remembered."""
    session: Session | Ended | None = state.sessions.get(number) or state.ended.get(number)
    if session is None:
        if 0 < number < state.session_next:
            return Rejection(
                "session_ended", "the write session is over, and its outcome is no longer kept", "session"
            )
        return Rejection("session_unknown", "no such write session", "session")
    if session.engine != engine:
        return Rejection("foreign_session", "the write session belongs to another engine", "engine")
    if session.incarnation != incarnation:
        return Rejection(
            "reregister", "the write session belongs to another incarnation of this engine", "incarnation"
        )
    return session


def ttl_of(asked_ms: int, limits: Limits) -> int | Rejection:
    """The time to live of a write session: 0 asks for the default."""
    if not asked_ms:
        return limits.write_ttl_ms_default
    if not limits.write_ttl_ms_min <= asked_ms <= limits.write_ttl_ms_max:
        return Rejection(
            "ttl_out_of_range",
            f"expected {limits.write_ttl_ms_min}..{limits.write_ttl_ms_max} ms, or 0 for the default",
            "ttl_ms",
        )
    return asked_ms


def check_sizes(sizes: tuple[int, ...] | None, table: Table) -> Rejection | None:
    """Sizes that a caller states must be the fingerprint's."""
    expected = tuple(part.bytes for part in table.parts)
    if sizes is not None and sizes != expected:
        return Rejection("size_mismatch", f"bytes per part are {list(expected)}, not {list(sizes)}", "sizes")
    return None


def check_tokens(tokens: list[bytes] | None, keys: int, block_size_tokens: int) -> Rejection | None:
    """A row a key, each b"" or the packed ids of a whole block: routers take a shorter span for another
    text."""
    if tokens is None:
        return None
    if len(tokens) != keys:
        return Rejection("column_length", f"{len(tokens)} rows of tokens for {keys} keys", "tokens")
    for row, packed in enumerate(tokens):
        if packed and not (1 <= packed[0] <= 4 and len(packed) == 1 + packed[0] * block_size_tokens):
            return Rejection(
                "invalid_field",
                f"expected nothing, or the packed ids of {block_size_tokens} tokens "
                f"(1 + width * {block_size_tokens} bytes, width 1 to 4)",
                f"tokens[{row}]",
            )
    return None


def check_fingerprint(fingerprint: Fingerprint, limits: Limits) -> Rejection | None:
    """Whether a fingerprint makes sense in itself."""

    def bad(message: str, field: str) -> Rejection:
        return Rejection("invalid_fingerprint", message, f"fingerprint.{field}")

    if not KEY_LENGTH_MIN <= fingerprint.key_length <= KEY_LENGTH_MAX:
        return bad(f"expected {KEY_LENGTH_MIN}..{KEY_LENGTH_MAX} bytes", "key_length")
    if not 1 <= fingerprint.block_size_tokens <= 1_000_000:
        return bad("expected 1..1000000 tokens", "block_size_tokens")
    groups = [group.name for group in fingerprint.groups]
    if not groups or len(groups) > limits.groups_max or len(set(groups)) != len(groups):
        return bad(f"expected 1..{limits.groups_max} groups with different names", "groups")
    for row, group in enumerate(fingerprint.groups):
        if not _PART_NAME.fullmatch(group.name):
            return bad("expected letters, digits, '_' and '-' (32 at most)", f"groups[{row}].name")
        if (group.kind is GroupKind.sliding_window) != (group.window_blocks > 0):
            return bad("sliding_window groups, and only they, have 1 or more", f"groups[{row}].window_blocks")
        parts = [part.name for part in fingerprint.parts if part.group == group.name]
        if not parts or len(parts) > limits.parts_max or len(set(parts)) != len(parts):
            return bad(
                f"group {group.name!r} needs 1..{limits.parts_max} parts with different names", "parts"
            )
    for row, part in enumerate(fingerprint.parts):
        if part.group not in groups:
            return bad(f"no attention group {part.group!r}", f"parts[{row}].group")
        if not _PART_NAME.fullmatch(part.name):
            return bad("expected letters, digits, '_' and '-' (32 at most)", f"parts[{row}].name")
        if not 1 <= part.bytes <= 1 << 40:
            return bad("expected 1..2^40 bytes", f"parts[{row}].bytes")
    return None
