"""What calls return: plain data, filled whether the call succeeded or not.

`failure` is None when the service answered as it should, else a word of `metaservice.client.errors`. On
failure every result says the safe thing: no hits, nothing to write, nothing published, no lease held, no
place unknown.
"""

import time
from array import array
from collections.abc import Iterator, Sequence

from msgspec import Struct

from metaservice.wire.schemas import (
    FinishStatus,
    LeaseOutcome,
    PartRef,
    RefusedReason,
    StorageRef,
    SwitchRef,
    WriteOutcome,
)
from metaservice.wire.schemas_cluster import ClusterMember, ClusterShard


def now_ms() -> int:
    """The clock of all deadlines here: monotonic, and the same in every process of this machine."""
    return time.monotonic_ns() // 1_000_000


class PlaceRef(Struct, frozen=True):
    """One part of one block in one storage: all that a data plane needs to read or write it.

    `checksum` is what was recorded when it was written; None when it is still to be written.
    """

    cluster: str
    location: int
    generation: int
    part: str
    size_bytes: int
    key: bytes
    checksum: int | None
    storage: StorageRef


class Places(Struct, kw_only=True):
    """Places of n blocks in columns: `locations` (u64), `generations` (u32), `storages` (u16, index into
    `storage_table`), `checksums` (u64, n * len(parts) rows, block-major; empty for places still to be
    written)."""

    keys: Sequence[bytes] = ()
    """The key of each row."""
    locations: "array[int]" = array("Q")
    generations: "array[int]" = array("I")
    storages: "array[int]" = array("H")
    checksums: "array[int]" = array("Q")
    storage_table: list[StorageRef] = []
    parts: list[PartRef] = []
    cluster: str = ""

    def part_index(self, part: str | int) -> int:
        """The index of a part given by name or index. Raises KeyError for a name, IndexError for an
        index unknown."""
        if isinstance(part, int):
            if not 0 <= part < len(self.parts):
                raise IndexError(f"part {part}: the group has {len(self.parts)}")
            return part
        for index, known in enumerate(self.parts):
            if known.name == part:
                return index
        raise KeyError(
            f"part {part!r}: the group has {', '.join(known.name for known in self.parts) or 'none'}"
        )

    def place(self, row: int, part: str | int = 0) -> PlaceRef:
        """The place of one part of the block in `row`. Raises IndexError where there is no place."""
        if not 0 <= row < len(self.locations) or not self.generations[row]:
            raise IndexError(f"row {row} has no place")
        index = self.part_index(part)
        at = row * len(self.parts) + index
        return PlaceRef(
            cluster=self.cluster,
            location=self.locations[row],
            generation=self.generations[row],
            part=self.parts[index].name,
            size_bytes=self.parts[index].bytes,
            key=self.keys[row],
            checksum=self.checksums[at] if self.checksums else None,
            storage=self.storage_table[self.storages[row]],
        )

    def places(self, part: str | int = 0) -> Iterator[PlaceRef]:
        """The places of one part, of every row that has one, in order."""
        for row, generation in enumerate(self.generations):
            if generation:
                yield self.place(row, part)


class LookupResult(Places, kw_only=True):
    """`hits` blocks are readable: asked keys `start` to `start + hits - 1` (mode `each`: those with 1 in
    `hit`). Rows of the columns, and of `keys`, are these blocks.

    `cut` says what ended the run: `none`, `miss`, `limit` or `switch`; `cut_at` is the index of the
    first asked key not returned; `switch` the switch that held. With a `lease` the blocks stay readable
    until `lease_deadline_ms`, counted from before the call was sent. `state` is the one state block at
    the end of the run in mode `state`. `epoch` and `seq` say of which state of its shard the answer
    is, and `staleness_ms` how old that may be: 0 unless the question allowed more.
    """

    asked: int
    hits: int = 0
    start: int = 0
    cut: str = "miss"
    cut_at: int = 0
    switch: SwitchRef | None = None
    hit: bytes = b""
    lease: str | None = None
    lease_ms: int = 0
    lease_deadline_ms: int = 0
    state: Places | None = None
    epoch: int = 0
    seq: int = 0
    staleness_ms: int = 0
    failure: str | None = None
    detail: str = ""

    def lease_left_ms(self) -> int:
        """How long the lease of this very call still holds, renewals not counted; 0 without one."""
        return max(0, self.lease_deadline_ms - now_ms()) if self.lease else 0


class WriteResult(Places, kw_only=True):
    """One row an asked key: `outcomes` (WriteOutcome), `reasons` (RefusedReason), `wait_ms` (u32: how
    long the other writer of an `in_progress` key still has). Rows to write have places. `session` is
    None when there is nothing to write."""

    session: str | None = None
    engine: str = ""
    incarnation: str = ""
    ttl_ms: int = 0
    deadline_ms: int = 0
    outcomes: bytes = b""
    reasons: bytes = b""
    wait_ms: "array[int]" = array("I")
    switch: SwitchRef | None = None
    evicted: int = 0
    request_id: str = ""
    failure: str | None = None
    detail: str = ""

    @property
    def writable(self) -> list[int]:
        """The rows to write, each location once: a key that was asked twice is one block."""
        seen: dict[int, int] = {}
        for row, outcome in enumerate(self.outcomes):
            if outcome == WriteOutcome.write:
                seen.setdefault(self.locations[row], row)
        return list(seen.values())

    def reason(self, row: int) -> str:
        """Why `row` was refused, as text for people; `none` when it was not."""
        return RefusedReason(self.reasons[row]).name


class FinishResult(Struct, kw_only=True):
    """`status` per location (FinishStatus), `published` blocks that began to serve, `open` locations still
    unfinished.

    After a failure nothing is known: `status` is all `pending`. The same call with this `request_id`
    asks again and gets the first answer.
    """

    status: bytes = b""
    published: int = 0
    open: int = 0
    request_id: str = ""
    failure: str | None = None
    detail: str = ""

    def serving(self, row: int) -> bool:
        """Whether the location in `row` is known to serve."""
        return self.status[row] == FinishStatus.serving


class RenewResult(Struct, kw_only=True):
    """The write session holds until `deadline_ms` (counted from before the call was sent)."""

    ttl_ms: int = 0
    deadline_ms: int = 0
    failure: str | None = None
    detail: str = ""


class AbortResult(Struct, kw_only=True):
    """How many locations were freed."""

    freed: int = 0
    request_id: str = ""
    failure: str | None = None
    detail: str = ""


class LeasesResult(Struct, kw_only=True):
    """One row a named lease: `outcomes` (LeaseOutcome), `changed`: blocks that are no longer what was
    leased; data read under such a lease must be thrown away. After a failure the outcomes of leases whose
    shard did not answer are `unknown`: hold nothing for leased."""

    leases: list[str] = []
    outcomes: bytes = b""
    changed: "array[int]" = array("I")
    ttl_ms: int = 0
    deadline_ms: int = 0
    switch: SwitchRef | None = None
    failure: str | None = None
    detail: str = ""

    def held(self, row: int = 0) -> bool:
        """Whether the lease in `row` covered its blocks up to this call: what was read under it may be
        used."""
        return self.outcomes[row] in (LeaseOutcome.renewed, LeaseOutcome.released) and not self.changed[row]


class RemoveResult(Struct, kw_only=True):
    """Per asked key a RemoveOutcome; after a failure `outcomes` is empty."""

    outcomes: bytes = b""
    removed: int = 0
    request_id: str = ""
    failure: str | None = None
    detail: str = ""


class SwitchResult(Struct, kw_only=True):
    """`mode` of the strictest switch on the instance (`normal`, `read_only`, `bypass`), and `switch`: where
    it is set, None when all is normal. After a failure `mode` is empty: nothing is known."""

    mode: str = ""
    switch: SwitchRef | None = None
    failure: str | None = None
    detail: str = ""


class HeartbeatResult(Struct, kw_only=True):
    """`status` is `active`, or empty after a failure; `switch` the strictest on the engine's instance."""

    status: str = ""
    heartbeat_ms: int = 0
    switch: SwitchRef | None = None
    failure: str | None = None
    detail: str = ""


class LeaveResult(Struct, kw_only=True):
    """A registration was given up, unless `failure` says otherwise: then it expires by itself."""

    failure: str | None = None
    detail: str = ""


class Registered(Struct, kw_only=True):
    """What the service said to one registration."""

    id: str = ""
    incarnation: str = ""
    heartbeat_ms: int = 0
    suspect_ms: int = 0
    expire_ms: int = 0
    cluster: str = ""
    epoch: int = 0
    storage_table: list[StorageRef] = []
    failure: str | None = None
    detail: str = ""


class DeleteTask(Struct, frozen=True, kw_only=True):
    """Delete these locations' bytes, all of `parts` each, from `storage`; confirm before `deadline_ms`."""

    task: str
    storage: StorageRef
    parts: tuple[str, ...]
    locations: "array[int]"
    generations: "array[int]"
    ttl_ms: int
    deadline_ms: int


class TasksResult(Struct, kw_only=True):
    """Deletion tasks handed to this worker; none after a failure."""

    tasks: list[DeleteTask] = []
    cluster: str = ""
    failure: str | None = None
    detail: str = ""


class ConfirmResult(Struct, kw_only=True):
    """`gone`: locations now free; `again`: offered once more later."""

    gone: int = 0
    again: int = 0
    failure: str | None = None
    detail: str = ""


class UnknownResult(Struct, kw_only=True):
    """1 where no block has that place, so that its bytes are an orphan. After a failure all are 0:
    nothing may go."""

    unknown: bytes = b""
    failure: str | None = None
    detail: str = ""


class ClusterResult(Struct, kw_only=True):
    """The cluster as the replica `replica` at `url` sees it: who is alive, and per shard who leads it. Empty
    after a failure."""

    cluster: str = ""
    replica: str = ""
    url: str = ""
    members: list[ClusterMember] = []
    shards: list[ClusterShard] = []
    failure: str | None = None
    detail: str = ""
