"""From wire requests to core commands: columns checked and unpacked, names of the path put in.

No rule lives here.
"""

from typing import Protocol

from metaservice.core import commands
from metaservice.core.ids import caller_name, shard_of
from metaservice.core.model import Endpoints, Fingerprint, Limits
from metaservice.wire import schemas as wire
from metaservice.wire import schemas_members as members_wire
from metaservice.wire.columns import ColumnError, flags_of, key_of, keys_of, numbers_of, token_rows, u64

MODES = ("prefix", "window", "state", "each")
PARTS_MAX = 256
"""Rows a location may have in the part-wise columns of one request."""


class KeyRule(Protocol):
    """What of an instance is needed to read its keys."""

    @property
    def key_length(self) -> int: ...


class BlockRule(KeyRule, Protocol):
    """What of an instance is needed to read its blocks' token ids."""

    @property
    def fingerprint(self) -> Fingerprint: ...


def lookup(instance: str, info: KeyRule, body: wire.LookupRequest, limits: Limits) -> commands.Lookup:
    """Raises ColumnError for a key or mode that is not one."""
    if body.mode not in MODES:
        raise ColumnError("invalid_field", "mode", f"expected one of {', '.join(MODES)}")
    if body.staleness_ms_max is not None and body.lease_ms:
        raise ColumnError(
            "invalid_field", "staleness_ms_max", "a lease is the leader's to give: leave one of the two out"
        )
    length = info.key_length
    return commands.Lookup(
        instance=instance,
        keys=keys_of(body.keys, length, "keys", limits.keys_per_request_max),
        mode=body.mode,
        group=body.group,
        window_blocks=body.window_blocks,
        limit=body.limit,
        parent=None if body.parent is None else key_of(body.parent, length, "parent"),
        lease_ms=body.lease_ms,
        engine=body.engine or "",
        incarnation=body.incarnation or "",
        request_id=body.request_id or "",
    )


def start_write(
    instance: str, info: BlockRule, body: wire.StartWriteRequest, limits: Limits
) -> commands.StartWrite:
    """Raises ColumnError for a key or row of token ids that is not one, or columns of different lengths."""
    length = info.key_length
    keys = keys_of(body.keys, length, "keys", limits.keys_per_request_max)
    parents: list[bytes | None] | None = None
    if body.parents is not None:
        if len(body.parents) != len(keys):
            raise ColumnError(
                "column_length",
                "parents",
                f"{len(body.parents)} parents for {len(keys)} keys; give one a key",
            )
        parents = [
            None if parent is None else key_of(parent, length, f"parents[{row}]")
            for row, parent in enumerate(body.parents)
        ]
        if body.parent is not None:
            raise ColumnError(
                "invalid_field", "parent", "give either parent (of a chain) or parents (of each key)"
            )
    return commands.StartWrite(
        instance=instance,
        engine=body.engine,
        incarnation=body.incarnation,
        keys=keys,
        parents=parents,
        parent=None if body.parent is None else key_of(body.parent, length, "parent"),
        group=body.group,
        sizes=None if body.sizes is None else tuple(body.sizes),
        ttl_ms=body.ttl_ms,
        request_id=body.request_id or "",
        tokens=None
        if body.tokens is None
        else token_rows(body.tokens, "tokens", len(keys), info.fingerprint.block_size_tokens),
        lora=body.lora,
        salt=body.salt,
    )


def finish(session: int, body: wire.FinishRequest, limits: Limits) -> commands.Finish:
    """Raises ColumnError for a malformed column."""
    rows_max = limits.keys_per_request_max
    return commands.Finish(
        session=session,
        engine=body.engine,
        incarnation=body.incarnation,
        locations=numbers_of(body.locations, "Q", "locations", rows_max),
        generations=numbers_of(body.generations, "I", "generations", rows_max),
        parts=None if body.parts is None else tuple(body.parts),
        ok=None if body.ok is None else flags_of(body.ok, "ok", rows_max * PARTS_MAX),
        checksums=None
        if body.checksums is None
        else numbers_of(body.checksums, "Q", "checksums", rows_max * PARTS_MAX),
        sizes=None if body.sizes is None else tuple(body.sizes),
        request_id=body.request_id or "",
    )


def renew_write(session: int, body: wire.RenewWriteRequest) -> commands.RenewWrite:
    """Renew the write session of that number."""
    return commands.RenewWrite(
        session=session,
        engine=body.engine,
        incarnation=body.incarnation,
        ttl_ms=body.ttl_ms,
    )


def abort(session: int, body: wire.AbortRequest) -> commands.Abort:
    """Abort the write session of that number."""
    return commands.Abort(
        session=session,
        engine=body.engine,
        incarnation=body.incarnation,
        request_id=body.request_id or "",
    )


def renew_leases(lease: str, body: wire.LeaseRenewRequest, limits: Limits) -> commands.RenewLeases:
    """Raises ColumnError for a malformed column, or `locations` given with `also`."""
    locations = None
    if body.locations is not None:
        if body.also:
            raise ColumnError("invalid_field", "locations", "locations cannot be given together with also")
        locations = numbers_of(body.locations, "Q", "locations", limits.keys_per_request_max)
    return commands.RenewLeases(
        leases=_leases(lease, body.also, limits), ttl_ms=body.ttl_ms, locations=locations
    )


def release_leases(lease: str, body: wire.LeaseReleaseRequest, limits: Limits) -> commands.ReleaseLeases:
    """Raises ColumnError for more leases than one request may name."""
    return commands.ReleaseLeases(leases=_leases(lease, body.also, limits))


def remove(instance: str, info: KeyRule, body: wire.RemoveRequest, limits: Limits) -> commands.Remove:
    """Raises ColumnError for a key that is not one."""
    return commands.Remove(
        instance=instance,
        keys=keys_of(body.keys, info.key_length, "keys", limits.keys_per_request_max),
        group=body.group,
        lease=body.lease or "",
        client=caller_name(body.engine, body.incarnation) if body.engine and body.incarnation else "",
        request_id=body.request_id or "",
    )


def register_engine(engine: str, body: members_wire.RegisterEngineRequest) -> commands.RegisterEngine:
    """Register the engine of that name. Raises ColumnError for a worker id that is no u64."""
    told = body.endpoints or members_wire.EngineEndpoints()
    return commands.RegisterEngine(
        engine=engine,
        incarnation=body.incarnation,
        instance=body.instance or "",
        rank=body.rank,
        endpoints=Endpoints(
            node=told.node,
            address=told.address,
            worker_id=u64(told.worker_id, "endpoints.worker_id"),
            events=told.events,
            replay=told.replay,
            dialect=told.dialect,
        ),
        canary=body.canary,
    )


def confirm_task(
    worker: str, task: str, body: members_wire.ConfirmTaskRequest, limits: Limits
) -> commands.ConfirmTask:
    """Raises ColumnError for a malformed column."""
    return commands.ConfirmTask(
        worker=worker,
        incarnation=body.incarnation,
        task=task,
        ok=None if body.ok is None else flags_of(body.ok, "ok", limits.keys_per_request_max * PARTS_MAX),
    )


def unknown_places(worker: str, body: members_wire.UnknownRequest, limits: Limits) -> commands.Unknown:
    """Raises ColumnError for malformed columns, columns of different lengths, or locations of several
    shards.
    """
    rows_max = limits.keys_per_request_max
    locations = numbers_of(body.locations, "Q", "locations", rows_max)
    generations = numbers_of(body.generations, "I", "generations", rows_max)
    if len(locations) != len(generations):
        raise ColumnError(
            "column_length", "generations", f"{len(generations)} generations for {len(locations)} locations"
        )
    if locations and shard_of(min(locations)) != shard_of(max(locations)):
        first = shard_of(locations[0])
        row = next(row for row, location in enumerate(locations) if shard_of(location) != first)
        raise ColumnError(
            "invalid_field",
            f"locations[{row}]",
            "of another shard than the first: ask each shard by a request of its own",
        )
    return commands.Unknown(
        worker=worker,
        incarnation=body.incarnation,
        storage=body.storage,
        locations=locations,
        generations=generations,
    )


def _leases(lease: str, also: list[str], limits: Limits) -> tuple[str, ...]:
    if len(also) >= limits.keys_per_request_max:
        raise ColumnError(
            "too_many_keys",
            "also",
            f"{len(also) + 1} leases; at most {limits.keys_per_request_max} in one request",
        )
    return (lease, *also)
