"""The database that holds every shard's journal: the same promises as `metaservice.journal`, in virtual
time.

Each method is one statement, executed whole when it reaches the server. It may reach the server late or
never, and its answer may never come back: then the caller does not know, and has to `resolve`. What the
server did is told to the witness at once, whoever hears of it.
"""

from collections.abc import Callable
from typing import NamedTuple

from metaservice.journal.port import Batch

from .cluster_net import Host
from .cluster_time import Heap

READ_BATCHES_MAX = 64
KEPT = 2
"""Snapshots that stay."""

Told = Callable[[int, Batch], None]


class Snapshot(NamedTuple):
    """The state at a seq."""

    seq: int
    epoch: int
    digest: bytes
    chunks: tuple[bytes, ...]


class Refused(NamedTuple):
    """An append that was not done: `why` is `fenced`, `full` or `void`."""

    why: str


class Read(NamedTuple):
    """What a reader gets: `trimmed` means that it has to start from the newest snapshot."""

    head_seq: int
    epoch: int
    batches: tuple[Batch, ...]
    trimmed: bool
    snapshot: Snapshot | None


class Rows:
    """What is kept of one shard."""

    def __init__(self) -> None:
        self.epoch = 0
        self.head_seq = 0
        self.trimmed_seq = 0
        self.batches: list[Batch] = []
        self.snapshots: list[Snapshot] = []
        self.void: dict[str, int] = {}
        """replica -> calls up to this number can no longer get in."""


class Store(Host):
    """The server."""

    def __init__(self, heap: Heap, shards: int, told: Told) -> None:
        super().__init__(heap, "journal")
        self.shards = [Rows() for _ in range(shards)]
        self.full = False
        self._told = told

    def claim(self, shard: int) -> int:
        """A new epoch."""
        rows = self.shards[shard]
        rows.epoch += 1
        return rows.epoch

    def append(self, shard: int, batch: Batch, replica: str, call: int) -> Refused | None:
        """One batch; None: it is durable."""
        rows = self.shards[shard]
        if call <= rows.void.get(replica, 0):
            return Refused("void")
        if self.fenced(rows, batch):
            return Refused("fenced")
        if self.full:
            return Refused("full")
        rows.batches.append(batch)
        rows.head_seq = batch.last_seq
        self._told(shard, batch)
        return None

    @staticmethod
    def fenced(rows: Rows, batch: Batch) -> bool:
        """Whether the batch does not continue the journal."""
        return batch.epoch != rows.epoch or batch.first_seq != rows.head_seq + 1

    def resolve(self, shard: int, batch: Batch, replica: str, call: int) -> bool | None:
        """Whether that very batch is in. False is final: nothing the replica sent so far can get in any
        more. None: it would have been trimmed meanwhile."""
        rows = self.shards[shard]
        if batch.first_seq <= rows.trimmed_seq:
            return None
        rows.void[replica] = max(call, rows.void.get(replica, 0))
        found = next((kept for kept in rows.batches if kept.first_seq == batch.first_seq), None)
        return found is not None and found.payload == batch.payload

    def read(self, shard: int, after_seq: int, count: int = READ_BATCHES_MAX) -> Read:
        """The batches behind a seq, `count` at most."""
        rows = self.shards[shard]
        newest = rows.snapshots[-1] if rows.snapshots else None
        if after_seq < rows.trimmed_seq:
            return Read(rows.head_seq, rows.epoch, (), True, newest)
        first = len(rows.batches)
        while first and rows.batches[first - 1].first_seq > after_seq:
            first -= 1
        return Read(rows.head_seq, rows.epoch, tuple(rows.batches[first : first + count]), False, None)

    def save(self, shard: int, snapshot: Snapshot) -> None:
        """Keep a snapshot; an older one than the newest is ignored."""
        snapshots = self.shards[shard].snapshots
        if not snapshots or snapshots[-1].seq < snapshot.seq:
            snapshots.append(snapshot)
            del snapshots[:-KEPT]

    def trim(self, shard: int) -> None:
        """Drop what is behind the older of the snapshots."""
        rows = self.shards[shard]
        if len(rows.snapshots) < KEPT:
            return
        limit = rows.snapshots[0].seq
        gone = 0
        while gone < len(rows.batches) and rows.batches[gone].last_seq <= limit:
            gone += 1
        if gone:
            rows.trimmed_seq = rows.batches[gone - 1].last_seq
            del rows.batches[:gone]
