"""From core replies to wire replies: packed columns for msgpack, lists, names and URIs for JSON."""

import sys
from array import array
from asyncio import sleep
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Protocol

from msgspec import Struct

from metaservice.core import replies
from metaservice.core.ids import session_name
from metaservice.wire import schemas as wire
from metaservice.wire import schemas_members as members_wire
from metaservice.wire.columns import packed


class Storage(Protocol):
    """What a reader or writer has to know of a storage."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def options(self) -> dict[str, str]: ...


class Places(Struct, gc=False):
    """Places of n blocks on the wire: columns, the table that `storages` indexes, and the parts of each
    block.
    """

    locations: Any
    generations: Any
    storages: Any
    checksums: Any
    table: list[wire.StorageRef]
    parts: list[wire.PartRef]


class Finder(Protocol):
    """Finds a storage by the number that core replies carry. LookupError: there is none."""

    def storage(self, number: int) -> Storage: ...


def places(
    finder: Finder,
    parts: list[wire.PartRef],
    locations: "array[int]",
    generations: "array[int]",
    storages: "array[int]",
    checksums: bytes,
    as_msgpack: bool,
    pools: Mapping[int, str] | None = None,
) -> Places:
    """Columns in either encoding. Rows without a place (storage 0, generation 0) point at the table's first
    entry; a storage that is registered no longer gets an entry without name or kind, which nobody can open.
    `pools`: by storage number, the pool in which the places are where that may be another than the current.
    """
    table: list[wire.StorageRef] = []
    index: dict[int, int] = {}
    for number in sorted(set(storages), reverse=True):
        ref = _storage_ref(finder, number, pools)
        if ref is None and number == 0:
            index[number] = 0  # rows without a place
            continue
        index[number] = len(table)
        table.append(ref or wire.StorageRef(name="", kind="", options={}))
    if len(table) <= 1:
        indexes: Sequence[int] = array("H", bytes(2 * len(storages)))
    else:
        indexes = array("H", map(index.__getitem__, storages))
    if as_msgpack:
        return Places(
            numbers("Q", locations), numbers("I", generations), numbers("H", indexes), checksums, table, parts
        )
    return Places(
        list(locations), list(generations), list(indexes), unpacked("Q", checksums), table, parts
    )  # fmt: skip


def _storage_ref(finder: Finder, number: int, pools: Mapping[int, str] | None) -> wire.StorageRef | None:
    try:
        found = finder.storage(number)
    except LookupError:
        return None
    options = dict(found.options)
    if pools and number in pools:
        options["pool"] = pools[number]
    return wire.StorageRef(name=found.name, kind=found.kind, options=options)


def numbers(kind: Any, column: Sequence[int]) -> bytes:
    """A number column packed little-endian; an array of that kind is copied once and not looked at."""
    if isinstance(column, array) and column.typecode == kind and sys.byteorder == "little":
        return column.tobytes()
    return packed(kind, column)


def unpacked(kind: str, column: bytes) -> list[int]:
    """The numbers of a packed little-endian column."""
    values = array(kind, column)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def codes(kind: type[IntEnum], column: bytes, as_msgpack: bool) -> bytes | list[str]:
    """A column of outcome codes: as it is for msgpack, as names for JSON."""
    if as_msgpack:
        return column
    names = [member.name for member in sorted(kind)]
    return [names[code] for code in column]


def flags(column: bytes, as_msgpack: bool) -> bytes | list[bool]:
    """A column of booleans in either encoding."""
    return column if as_msgpack else [flag != 0 for flag in column]


def switch(held: replies.Switched | None) -> wire.SwitchRef | None:
    """The switch that held, in words."""
    if held is None:
        return None
    return wire.SwitchRef(scope=held.scope.name, id=held.id, mode=held.mode.name)


def uri_slice(found: Places, cluster: str, start: int, stop: int) -> list[dict[str, str]]:
    """The places of rows start..stop as text, part by part; an empty object for a row without a place."""
    heads = [f"{storage.kind}://{storage.name}/{cluster}/" for storage in found.table]
    parts = [part.name for part in found.parts]
    rows = zip(
        found.locations[start:stop], found.generations[start:stop], found.storages[start:stop], strict=True
    )
    return [
        {part: f"{heads[storage]}{location:x}-{generation}.{part}" for part in parts} if generation else {}
        for location, generation, storage in rows
    ]


async def uris(found: Places, cluster: str, rows_per_slice: int) -> list[dict[str, str]]:
    """All places as text, built in slices between turns of the event loop: a large one would hold everybody
    up.
    """
    texts: list[dict[str, str]] = []
    step = max(1, rows_per_slice // max(1, len(found.parts)))
    for start in range(0, len(found.locations), step):
        if start:
            await sleep(0)
        texts += uri_slice(found, cluster, start, start + step)
    return texts


def located(found: Places, cluster: str) -> wire.Located:
    """Places as a reply of their own (the state block of a `state` lookup)."""
    return wire.Located(
        locations=found.locations,
        generations=found.generations,
        storages=found.storages,
        checksums=found.checksums,
        storage_table=found.table,
        parts=found.parts,
        cluster=cluster,
    )


def looked(
    reply: replies.Looked, found: Places, as_msgpack: bool, cluster: str, epoch: int, seq: int
) -> wire.LookupReply:
    """The lookup reply without `state` and `uris`, which the caller adds."""
    return wire.LookupReply(
        locations=found.locations,
        generations=found.generations,
        storages=found.storages,
        checksums=found.checksums,
        storage_table=found.table,
        parts=found.parts,
        cluster=cluster,
        mode=reply.mode,
        asked=reply.asked,
        hits=reply.hits,
        start=reply.start,
        cut=reply.cut,
        cut_at=reply.cut_at,
        switch=None if reply.switch is None else switch(reply.switch),
        hit=reply.hit if as_msgpack else flags(reply.hit, False),
        lease=reply.lease,
        lease_ms=reply.lease_ms,
        epoch=epoch,
        seq=seq,
    )


def started(
    reply: replies.Started, found: Places, as_msgpack: bool, cluster: str, shard: int
) -> wire.StartWriteReply:
    """The start-write reply without `uris`, which the caller adds."""
    return wire.StartWriteReply(
        locations=found.locations,
        generations=found.generations,
        storages=found.storages,
        checksums=b"" if as_msgpack else [],
        storage_table=found.table,
        parts=found.parts,
        cluster=cluster,
        session=None if reply.session is None else session_name(shard, reply.session),
        ttl_ms=reply.ttl_ms,
        outcomes=codes(wire.WriteOutcome, reply.outcomes, as_msgpack),
        reasons=codes(wire.RefusedReason, reply.reasons, as_msgpack),
        wait_ms=numbers("I", reply.wait_ms) if as_msgpack else list(reply.wait_ms),
        switch=switch(reply.switch),
        evicted=reply.evicted,
    )


def finished(reply: replies.Finished, as_msgpack: bool) -> wire.FinishReply:
    """The finish reply."""
    return wire.FinishReply(
        status=codes(wire.FinishStatus, reply.status, as_msgpack), published=reply.published, open=reply.open
    )


def leases(reply: replies.LeasesAnswered, as_msgpack: bool) -> wire.LeaseReply:
    """The reply to renewing or releasing leases."""
    return wire.LeaseReply(
        leases=list(reply.leases),
        outcomes=codes(wire.LeaseOutcome, reply.outcomes, as_msgpack),
        changed=numbers("I", reply.changed) if as_msgpack else list(reply.changed),
        ttl_ms=reply.ttl_ms,
        switch=switch(reply.switch),
    )


def removed(reply: replies.Removed, as_msgpack: bool) -> wire.RemoveReply:
    """The remove reply."""
    return wire.RemoveReply(
        outcomes=codes(wire.RemoveOutcome, reply.outcomes, as_msgpack), removed=reply.removed
    )


def task(found: replies.Task, storage: wire.StorageRef, as_msgpack: bool) -> members_wire.DeleteTask:
    """One deletion task for a worker."""
    return members_wire.DeleteTask(
        task=found.task,
        storage=storage,
        parts=list(found.parts),
        locations=numbers("Q", found.locations) if as_msgpack else list(found.locations),
        generations=numbers("I", found.generations) if as_msgpack else list(found.generations),
        ttl_ms=found.ttl_ms,
    )
