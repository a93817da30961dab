"""What the journals really say, whoever knows it: the judge of a simulated cluster.

It is told every batch that the database took, in the order in which that happened, and follows blocks,
sessions and use in the simplest tables that do. Nothing here calls the core: what is wrong in `apply` is
wrong in the replicas only, and shows.
"""

from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from metaservice.core import events as ev
from metaservice.core.ids import location_base
from metaservice.core.model import Quota
from metaservice.core.outcomes import FinishStatus
from metaservice.journal.codec import decode_batch
from metaservice.journal.port import Batch

from .cluster_escrow import Escrow
from .rows import Violation

Place = tuple[int, int]
"""(location, generation)"""
Scope = tuple[str, str]
"""(tenant | group | instance | storage, id)"""
WRITING, SERVING, DELETING, GONE = range(4)


class Table(NamedTuple):
    """A key table as the journal names it: by number."""

    number: int
    instance: str
    key_length: int
    size_bytes: int
    scopes: tuple[Scope, ...]
    """narrowest first, without the storage"""


class Copy:
    """One use of one place, from its start on, for ever."""

    __slots__ = ("key", "place", "published_seq", "removed_seq", "session", "state", "storage", "table")

    def __init__(self, place: Place, key: bytes, table: Table, storage: str, session: int) -> None:
        self.place = place
        self.key = key
        self.table = table
        self.storage = storage
        self.session = session
        self.state = WRITING
        self.published_seq = 0
        self.removed_seq = 0

    def __repr__(self) -> str:
        state = ("writing", "serving", "deleting", "gone")[self.state]
        return (
            f"{state} {self.place} {self.key!r} of {self.table.instance}, session {self.session}, "
            f"published {self.published_seq}, removed {self.removed_seq}"
        )

    def served_at(self, seq: int) -> bool:
        """Whether the journal up to `seq` says that the place is readable."""
        return 0 < self.published_seq <= seq and not 0 < self.removed_seq <= seq


class Limit:
    """What may be used of a scope. `None` is no limit. What was allowed once may stay for a while: it is the
    largest so far that counts."""

    def __init__(self) -> None:
        self.bytes: int | None = 0
        self.blocks: int | None = 0

    def put(self, quota: Quota) -> None:
        """The operator's word."""
        self.bytes = None if self.bytes is None or quota.bytes is None else max(self.bytes, quota.bytes)
        self.blocks = None if self.blocks is None or quota.blocks is None else max(self.blocks, quota.blocks)


class History:
    """What one shard's journal says."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.base = location_base(shard)
        self.seq = 0
        self.epoch = 0
        self.tables: dict[int, Table] = {}
        self.storages: dict[int, str] = {}
        self.tenants_of: dict[str, str] = {}
        """group -> its tenant"""
        self.at: dict[int, Copy] = {}
        """slot -> its latest use"""
        self.live: dict[tuple[int, bytes], Copy] = {}
        """(table, key) -> the copy that is being written or serves"""
        self.sessions: dict[int, dict[int, Copy]] = {}
        """open session -> slot -> copy"""
        self.deadlines: dict[int, list[int]] = {}
        """session -> [deadline, ttl]: nobody may end it earlier because of time"""


class Witness:
    """See the module. Everything raises Violation."""

    def __init__(self, shards: int) -> None:
        self.histories = [History(shard) for shard in range(shards)]
        self.copies: dict[Place, Copy] = {}
        self.used: dict[Scope, list[int]] = {}
        """[bytes, blocks] written or serving, over all shards"""
        self.limits: dict[Scope, Limit] = {}
        self.requests: set[tuple[str, str, str]] = set()
        self.digests: dict[tuple[int, int], tuple[bytes, str]] = {}
        self.escrow = Escrow(shards)
        self.batches = 0
        self.events = 0
        self.listen: Callable[[int, Batch, list[Any]], None] | None = None
        """Hears of every batch, for a trace."""

    def told(self, shard: int, batch: Batch) -> None:
        """The database took a batch."""
        history = self.histories[shard]
        events: list[Any] = decode_batch(batch.payload)
        self.batches += 1
        self.events += len(events)
        if self.listen is not None:
            self.listen(shard, batch, events)
        if batch.first_seq != history.seq + 1 or batch.last_seq != history.seq + len(events):
            raise Violation(
                f"I5: seq {batch.first_seq}..{batch.last_seq} of shard {shard} follows seq {history.seq}"
            )
        if batch.epoch < history.epoch:
            raise Violation(f"I5: epoch {batch.epoch} of shard {shard} follows epoch {history.epoch}")
        if batch.epoch > history.epoch and (
            not isinstance(events[0], ev.TookOver) or events[0].epoch != batch.epoch
        ):
            raise Violation(f"I5: epoch {batch.epoch} of shard {shard} begins with {events[0]}")
        history.epoch = batch.epoch
        for event in events:
            history.seq += 1
            handle = _HANDLE.get(type(event))
            if handle is not None:
                handle(self, history, event)
        self.escrow.told(shard, events, batch.last_seq)

    def compare(self, shard: int, seq: int, digest: bytes, who: str) -> None:
        """Whoever is at this seq has this digest."""
        known, first = self.digests.setdefault((shard, seq), (digest, who))
        if known != digest:
            raise Violation(f"I6: {who} and {first} differ at seq {seq} of shard {shard}")

    def open_sessions(self) -> Iterator[tuple[int, int]]:
        """(shard, session) of sessions that have not ended."""
        for history in self.histories:
            for session, rows in history.sessions.items():
                if rows:
                    yield history.shard, session

    # ------------------------------------------------------------ catalogue

    def put(self, history: History, scope: Scope, quota: Quota) -> None:
        """A limit is set. The catalogue's word counts, its copies say the same later."""
        if history.shard == 0:
            self.limits.setdefault(scope, Limit()).put(quota)

    def tenant_put(self, history: History, event: ev.TenantPut) -> None:
        """TenantPut"""
        self.put(history, ("tenant", event.tenant), event.quota)

    def group_put(self, history: History, event: ev.GroupPut) -> None:
        """GroupPut"""
        history.tenants_of[event.group] = event.tenant
        self.put(history, ("group", event.group), event.quota)

    def storage_put(self, history: History, event: ev.StoragePut) -> None:
        """StoragePut"""
        history.storages[event.number] = event.storage
        self.put(history, ("storage", event.storage), Quota(bytes=event.capacity_bytes))

    def instance_put(self, history: History, event: ev.InstancePut) -> None:
        """InstancePut"""
        self.put(history, ("instance", event.instance), event.quota)
        scopes = (
            ("instance", event.instance),
            ("group", event.group),
            ("tenant", history.tenants_of[event.group]),
        )
        for number, group in zip(event.tables, event.fingerprint.groups, strict=True):
            size = sum(part.bytes for part in event.fingerprint.parts if part.group == group.name)
            history.tables[number] = Table(number, event.instance, event.fingerprint.key_length, size, scopes)

    # ------------------------------------------------------------ blocks

    def write_started(self, history: History, event: ev.WriteStarted) -> None:
        """WriteStarted"""
        if event.request_id:
            request = (event.engine, event.incarnation, event.request_id)
            if request in self.requests:
                raise Violation(f"I7: {request} was decided twice")
            self.requests.add(request)
        if event.session in history.sessions:
            raise Violation(f"I5: session {event.session} of shard {history.shard} is given twice")
        table = history.tables[event.table]
        rows = history.sessions[event.session] = {}
        history.deadlines[event.session] = [event.deadline_ms, event.ttl_ms]
        generations, storages = array("I", event.generations), array("H", event.storages)
        length = table.key_length
        for row, slot in enumerate(array("I", event.slots)):
            key = event.keys[row * length : (row + 1) * length]
            place = (history.base + slot, generations[row])
            before = history.at.get(slot)
            if before is not None and (before.state != GONE or before.place[1] >= place[1]):
                raise Violation(f"I3: {place} is given to {key!r} of {table.instance}: {before}")
            if (event.table, key) in history.live:
                raise Violation(
                    f"two writers of {key!r} in {table.instance}: {history.live[event.table, key]}"
                )
            copy = Copy(place, key, table, history.storages[storages[row]], event.session)
            history.at[slot] = history.live[event.table, key] = rows[slot] = self.copies[place] = copy
        count = len(rows)
        if count:
            self.count(table.scopes, count * table.size_bytes, count)
            for storage in set(storages):
                name = ("storage", history.storages[storage])
                number = storages.count(storage)
                self.count((name,), number * table.size_bytes, number)

    def count(self, scopes: tuple[Scope, ...], size_bytes: int, blocks: int) -> None:
        """More (or less) is in use; more than the limit is a violation."""
        for scope in scopes:
            used = self.used.setdefault(scope, [0, 0])
            used[0] += size_bytes
            used[1] += blocks
            if blocks < 0:
                continue
            limit = self.limits[scope]
            if limit.bytes is not None and used[0] > limit.bytes:
                raise Violation(f"I4: {scope} uses {used[0]} of {limit.bytes} bytes")
            if limit.blocks is not None and used[1] > limit.blocks:
                raise Violation(f"I4: {scope} uses {used[1]} of {limit.blocks} blocks")

    def write_finished(self, history: History, event: ev.WriteFinished) -> None:
        """WriteFinished"""
        rows = history.sessions.get(event.session, {})
        for slot, status in zip(array("I", event.slots), event.status, strict=True):
            copy = rows.get(slot)
            if copy is None or copy.state != WRITING:
                raise Violation(f"I2: session {event.session} finished what it does not hold: {slot} {copy}")
            if status == FinishStatus.serving:
                copy.state, copy.published_seq = SERVING, history.seq
                del rows[slot]
            elif status == FinishStatus.freed:
                self.free(history, copy)

    def session_ended(self, history: History, event: ev.SessionEnded) -> None:
        """SessionEnded"""
        if event.expired and event.now_ms < history.deadlines[event.session][0]:
            raise Violation(
                f"I8: session {event.session} expired at {event.now_ms}, promised until "
                f"{history.deadlines[event.session][0]}"
            )
        for copy in list(history.sessions.get(event.session, {}).values()):
            self.free(history, copy)

    def session_renewed(self, history: History, event: ev.SessionRenewed) -> None:
        """SessionRenewed"""
        deadline = history.deadlines[event.session]
        deadline[0] = max(deadline[0], event.deadline_ms)

    def took_over(self, history: History, event: ev.TookOver) -> None:
        """TookOver: writers could not reach anybody, and get their time anew."""
        for session in history.sessions:
            deadline = history.deadlines[session]
            deadline[0] = max(deadline[0], event.now_ms + deadline[1])

    def blocks_removed(self, history: History, event: ev.BlocksRemoved) -> None:
        """BlocksRemoved"""
        for slot in array("I", event.slots):
            copy = history.at.get(slot)
            if copy is None or copy.state not in (WRITING, SERVING):
                raise Violation(f"{event.why}: slot {slot} of shard {history.shard} is removed: {copy}")
            self.free(history, copy)

    def free(self, history: History, copy: Copy) -> None:
        """A block's key is free, its place not yet."""
        slot = copy.place[0] - history.base
        history.sessions.get(copy.session, {}).pop(slot, None)
        copy.state, copy.removed_seq = DELETING, history.seq
        del history.live[copy.table.number, copy.key]
        self.count(copy.table.scopes, -copy.table.size_bytes, -1)
        self.count((("storage", copy.storage),), -copy.table.size_bytes, -1)

    def locations_gone(self, history: History, event: ev.LocationsGone) -> None:
        """LocationsGone"""
        for slot in array("I", event.slots):
            copy = history.at.get(slot)
            if copy is None or copy.state != DELETING:
                raise Violation(f"I3: slot {slot} of shard {history.shard} is gone: {copy}")
            copy.state = GONE

    def pool_changed(self, history: History, event: ev.PoolChanged) -> None:
        """PoolChanged: whatever was in the storage is gone."""
        for copy in history.at.values():
            if copy.storage == event.storage and copy.state != GONE:
                if copy.state != DELETING:
                    self.free(history, copy)
                copy.state = GONE


_HANDLE: dict[type, Callable[[Witness, History, Any], None]] = {
    ev.TookOver: Witness.took_over,
    ev.SessionRenewed: Witness.session_renewed,
    ev.TenantPut: Witness.tenant_put,
    ev.GroupPut: Witness.group_put,
    ev.StoragePut: Witness.storage_put,
    ev.InstancePut: Witness.instance_put,
    ev.WriteStarted: Witness.write_started,
    ev.WriteFinished: Witness.write_finished,
    ev.SessionEnded: Witness.session_ended,
    ev.BlocksRemoved: Witness.blocks_removed,
    ev.LocationsGone: Witness.locations_gone,
    ev.PoolChanged: Witness.pool_changed,
}
