"""A real shard on a real journal, with time, the speed of the disk and its faults in the test's hands."""

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metaservice.clock import monotonic_s
from metaservice.core import commands as cmd
from metaservice.core.model import Fingerprint, Limits, Part
from metaservice.core.outcomes import WriteOutcome
from metaservice.core.replies import Finished, Looked, Started
from metaservice.journal.memory import MemoryJournal, MemoryStore
from metaservice.journal.port import Journal
from metaservice.journal.sqlite import SqliteJournal
from metaservice.leadership.single import SingleLeadership
from metaservice.replica import life as replica_life
from metaservice.replica.election import Pace
from metaservice.replica.errors import ShardUnavailable
from metaservice.replica.node import Replica
from metaservice.replica.shard import Clock, Hooks, Shard
from metaservice.replica.snapshot import SnapshotKeeper

LIMITS = Limits(lease_ms_max=1_000, reclaim_delay_ms=100, late_write_ms=200)
BLOCK_BYTES = 1_000
FINGERPRINT = Fingerprint(
    model="m",
    revision="r",
    kv_dtype="bf16",
    block_size_tokens=16,
    key_length=16,
    hash_scheme="h",
    hash_seed="s",
    parts=(Part("tp0", BLOCK_BYTES),),
)
WAIT_S = 20.0
"""How long a test waits for what must happen; never reached when it does."""


def leave_the_heap_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard collects garbage when it builds its state: here that is the heap of the whole test run."""
    idle = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
    monkeypatch.setattr(replica_life, "gc", idle)


def chain(count: int, start: int = 0) -> list[bytes]:
    """Keys in prefix order."""
    return [b"k" + number.to_bytes(15, "big") for number in range(start, start + count)]


class HandClock:
    """The shard's time: stands still until the test moves it."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.value_ms = now_ms

    def start(self, journaled_ms: int) -> None:
        self.value_ms = max(self.value_ms, journaled_ms + 1)

    def now_ms(self) -> int:
        return self.value_ms


class Gate:
    """Every append passes here: the test can hold them all up, and sees what was appended."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self.waiting = 0
        self.appended: list[tuple[int, int]] = []
        """(first_seq, last_seq) of what got in, in order."""
        self.payloads: list[bytes] = []
        """What got in, though the journal may trim it later."""

    def hold(self) -> None:
        """From now on the disk does not answer."""
        self._free.clear()

    def free(self) -> None:
        """The disk answers again."""
        self._free.set()

    def taken(self, first_seq: int, last_seq: int, payload: bytes) -> None:
        """Called in the journal's thread once the batch is in."""
        self.appended.append((first_seq, last_seq))
        self.payloads.append(payload)

    def pass_through(self) -> None:
        """Called in the journal's thread."""
        self.waiting += 1
        assert self._free.wait(WAIT_S), "the test left an append held"
        self.waiting -= 1


class HeldMemoryJournal(MemoryJournal):
    """A journal in memory behind a gate."""

    def __init__(self, store: MemoryStore, gate: Gate) -> None:
        super().__init__(store, 0)
        self._gate = gate

    def append(self, first_seq: int, last_seq: int, epoch: int, payload: bytes) -> None:
        self._gate.pass_through()
        super().append(first_seq, last_seq, epoch, payload)
        self._gate.taken(first_seq, last_seq, payload)


class HeldSqliteJournal(SqliteJournal):
    """A journal on disk behind a gate."""

    def __init__(self, path: Path, gate: Gate) -> None:
        super().__init__(path, 0)
        self._gate = gate

    def append(self, first_seq: int, last_seq: int, epoch: int, payload: bytes) -> None:
        self._gate.pass_through()
        super().append(first_seq, last_seq, epoch, payload)
        self._gate.taken(first_seq, last_seq, payload)


class Told:
    """An observer that remembers what it was told."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        """Commands of each durable batch."""
        self.ended: list[tuple[str, int]] = []
        self.evictions: list[tuple[str, int, int]] = []
        self.reasons: list[str] = []

    def batch(self, *, commands: int, events: int, payload_bytes: int, append_ms: float, queued: int) -> None:
        assert events > 0 and payload_bytes > 0 and append_ms >= 0 and queued >= 0
        self.batches.append(commands)

    def expired(self, kind: str, count: int) -> None:
        self.ended.append((kind, count))

    def evicted(self, reason: str, blocks: int, size_bytes: int) -> None:
        self.evictions.append((reason, blocks, size_bytes))

    def loop_lag(self, lag_ms: float) -> None:
        assert lag_ms >= 0

    def rebuilt(self, reason: str) -> None:
        self.reasons.append(reason)


class LoneShard(Shard):
    """The one shard of a replica that is alone, with the replica's life."""

    def __init__(self, bench: "Bench", snapshots: SnapshotKeeper | None) -> None:
        clock = Clock(bench.clock.start, bench.clock.now_ms, monotonic_s)
        super().__init__(0, bench.journal(), bench.limits, clock, bench.told, lambda: "c1")
        self.replica = Replica(
            "r1", "http://r1", self._alone, SingleLeadership("r1", "http://r1", 1), bench.limits, bench.told,
            monotonic_s,
            pace=Pace(look_ms=20),
            keepers=[snapshots] if snapshots is not None else [],
        )  # fmt: skip

    def _alone(self, hooks: Hooks) -> list[Shard]:
        self._hooks = hooks
        return [self]

    async def start(self) -> None:
        """Load, and lead."""
        await self.replica.start()

    async def stop(self) -> None:
        """Finish what is queued, and let go."""
        await self.replica.stop()


class Bench:
    """One store (`memory` or `sqlite`) on which shards live one after another."""

    def __init__(self, kind: str, directory: Path, limits: Limits = LIMITS) -> None:
        self.kind = kind
        self.path = directory / "journal.sqlite"
        self.store = MemoryStore()
        self.gate = Gate()
        self.clock = HandClock()
        self.told = Told()
        self.limits = limits

    def journal(self) -> Journal:
        """Another journal object on the store."""
        if self.kind == "memory":
            return HeldMemoryJournal(self.store, self.gate)
        return HeldSqliteJournal(self.path, self.gate)

    def shard(self, snapshots: SnapshotKeeper | None = None) -> LoneShard:
        """A shard that has not started."""
        return LoneShard(self, snapshots)

    @asynccontextmanager
    async def leading(self, snapshots: SnapshotKeeper | None = None) -> AsyncIterator[LoneShard]:
        """A started shard; stopped at the end, whatever happens."""
        shard = self.shard(snapshots)
        await shard.start()
        try:
            yield shard
        finally:
            self.gate.free()
            if shard.status != "stopped":
                await asyncio.wait_for(shard.stop(), WAIT_S)


async def furnish(shard: Shard, **group: Any) -> None:
    """A tenant, a storage, a group, an instance, an engine and a worker."""
    for command in (
        cmd.PutTenant(tenant="t"),
        cmd.PutStorage(storage="s", kind="posix", options={"root": "/s"}),
        cmd.PutGroup(group="g", tenant="t", storages=("s",), **group),
        cmd.PutInstance(instance="i", group="g", fingerprint=FINGERPRINT),
        cmd.RegisterEngine(engine="e", incarnation="x", instance="i"),
        cmd.RegisterWorker(worker="w", incarnation="x", storages=("s",)),
    ):
        await shard.submit(command)


def start_of(
    keys: list[bytes], request_id: str = "", ttl_ms: int = 0, parent: bytes | None = None
) -> cmd.StartWrite:
    """A start-write of engine `e`."""
    return cmd.StartWrite(
        instance="i",
        engine="e",
        incarnation="x",
        keys=keys,
        parent=parent,
        ttl_ms=ttl_ms,
        request_id=request_id,
    )


def finish_of(started: Started, request_id: str = "") -> cmd.Finish:
    """A finish of all that was to be written."""
    assert started.session is not None
    rows = [row for row, outcome in enumerate(started.outcomes) if outcome == WriteOutcome.write]
    locations = array("Q", [started.locations[row] for row in rows])
    return cmd.Finish(
        session=started.session,
        engine="e",
        incarnation="x",
        locations=locations,
        generations=array("I", [started.generations[row] for row in rows]),
        checksums=array("Q", [1_000 + location for location in locations]),
        request_id=request_id,
    )


def remove_of(keys: list[bytes], request_id: str = "") -> cmd.Remove:
    """A remove by engine `e`."""
    return cmd.Remove(instance="i", keys=keys, client="e" if request_id else "", request_id=request_id)


async def fill(shard: Shard, keys: list[bytes]) -> Started:
    """Write and finish a chain."""
    started: Started = await shard.submit(start_of(keys))
    finished: Finished = await shard.submit(finish_of(started))
    assert finished.published == len(keys)
    return started


def hits(shard: Shard, keys: list[bytes]) -> int:
    """How many of the keys a lookup finds, one by one."""
    looked: Looked = shard.read(cmd.Lookup(instance="i", keys=keys, mode="each"))
    return looked.hits


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait for what must happen by itself."""
    for _ in range(int(WAIT_S / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"it never happened: {what}")


async def refusal(shard: Shard, command: cmd.Command) -> ShardUnavailable:
    """Why the shard cannot take the command now; AssertionError when it can."""
    try:
        reply = await shard.submit(command)
    except ShardUnavailable as error:
        return error
    raise AssertionError(f"it was taken: {reply}")
