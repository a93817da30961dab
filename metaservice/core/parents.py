"""Parents of the blocks in one request: one per distinct key, no contradiction, no cycle."""

from collections.abc import Sequence

from .index import Table
from .rejections import Rejection
from .state import State


def wanted_of(
    keys: list[bytes], parents: Sequence[bytes | None] | None, parent: bytes | None, key_length: int
) -> dict[bytes, bytes | None] | Rejection:
    """key -> parent of the distinct keys, in request order: as given, or one chain below `parent`.

    A key that is named twice is one block. In a chain its first place counts; explicit parents must agree.
    """
    if parents is None:
        if parent is not None and len(parent) != key_length:
            return Rejection(
                "key_length", f"{len(parent)} bytes; keys of this instance have {key_length}", "parent"
            )
        unique = dict.fromkeys(keys)
        chain = keys if len(unique) == len(keys) else list(unique)
        return dict(zip(chain, [parent, *chain[:-1]], strict=True))
    if parent is not None:
        return Rejection("invalid_field", "give either parents or parent", "parent")
    if len(parents) != len(keys):
        return Rejection("column_length", f"{len(parents)} parents for {len(keys)} keys", "parents")
    wanted: dict[bytes, bytes | None] = {}
    for row, (key, one) in enumerate(zip(keys, parents, strict=True)):
        if one is not None and len(one) != key_length:
            return Rejection(
                "key_length", f"{len(one)} bytes; keys of this instance have {key_length}", f"parents[{row}]"
            )
        if wanted.setdefault(key, one) != one:
            return Rejection(
                "duplicate_conflict", "the key is named before with another parent", f"keys[{row}]"
            )
    return wanted


def find_cycle(
    state: State, table: Table, keys: list[bytes], wanted: dict[bytes, bytes | None], explicit: bool
) -> Rejection | None:
    """A cycle among the request's keys, or through blocks that are there already and wait for one of them."""
    if explicit or not wanted.keys().isdisjoint((wanted[keys[0]],)):
        clear: set[bytes] = set()
        for key in wanted:
            path: set[bytes] = set()
            at: bytes | None = key
            while at is not None and at in wanted and at not in clear:
                if at in path:
                    return Rejection(
                        "parent_cycle", "the block is its own ancestor", f"keys[{keys.index(at)}]"
                    )
                path.add(at)
                at = wanted[at]
            clear |= path
    if table.primary and table.pending:
        index, slots = state.index, table.slots
        for key in sorted(wanted.keys() & table.pending.keys()):
            at = wanted[key]
            seen: set[bytes] = set()
            while at is not None and at not in seen:
                if at == key:
                    return Rejection(
                        "parent_cycle", "the block is its own ancestor", f"keys[{keys.index(key)}]"
                    )
                seen.add(at)
                slot = slots.get(at)  # of a block that is there, the recorded parent is the true one
                at = wanted.get(at) if slot is None else index.parent[slot]
    return None
