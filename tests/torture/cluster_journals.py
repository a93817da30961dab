"""The journals of all shards, read while the cluster runs: the witness of a torture.

It reads the tables itself, each batch once, in order, with PostgreSQL's commit time of it; that is the order
over shards, for whatever one shard does because of another is committed later. It reports as a follower, so
that nothing is trimmed before it was read.
"""

import asyncio
import heapq
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import asyncpg

from metaservice.journal.port import Batch
from metaservice.journal.records import record_crc

POLL_S = 0.25
TIMEOUT_S = 3.0
PAGE = 500
NAME = "witness"

_PAGE = """
SELECT first_seq, last_seq, epoch, payload, crc,
       extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8 AS commit_s
  FROM ucm.journal WHERE shard = $1 AND first_seq > $2 ORDER BY first_seq LIMIT $3
"""
_REPORT = """
INSERT INTO ucm.follower (shard, replica, applied_seq, reported_at) VALUES ($1, $2, $3, now())
    ON CONFLICT (shard, replica) DO UPDATE SET applied_seq = $3, reported_at = now()
"""
_HEADS = "SELECT id, head_seq, epoch FROM ucm.shard ORDER BY id"
_DIGESTS = "SELECT shard, seq, digest FROM ucm.snapshot WHERE whole ORDER BY shard, seq"


@dataclass(frozen=True, slots=True)
class Told:
    """One batch as the database has it, and when it was committed."""

    shard: int
    batch: Batch
    commit_s: float


class Journals(threading.Thread):
    """Reads on until told to stop, whatever happens to the database meanwhile."""

    def __init__(self, dsn: str, shards: int) -> None:
        super().__init__(name="journals", daemon=True)
        self.shards = shards
        self.told: list[list[Told]] = [[] for _ in range(shards)]
        self.faults: list[str] = []
        self.digests: dict[tuple[int, int], bytes] = {}
        """(shard, seq) -> digest, of snapshots that were seen."""
        self._dsn = dsn
        self._halt = threading.Event()

    def stop(self) -> None:
        """Read what there is by now, then end. The database must answer."""
        self._halt.set()
        self.join()

    def merged(self) -> Iterator[Told]:
        """Everything, in the order in which it was committed."""
        return heapq.merge(*self.told, key=lambda one: one.commit_s)

    def heads(self) -> list[int]:
        """The last seq read of each shard."""
        return [told[-1].batch.last_seq if told else 0 for told in self.told]

    def run(self) -> None:
        """See Thread."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        connection: asyncpg.Connection | None = None
        done_s = 0.0
        while True:
            last = self._halt.is_set()
            try:
                if connection is None:
                    connection = await asyncpg.connect(
                        self._dsn,
                        timeout=TIMEOUT_S,
                        command_timeout=TIMEOUT_S,
                        server_settings={"application_name": NAME},
                    )
                for shard in range(self.shards):
                    await self._read(connection, shard)
                await self._look(connection)
                if last:
                    break
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                if connection is not None:
                    connection.terminate()
                    connection = None
                if last:
                    done_s = done_s or time.monotonic() + 60
                    if time.monotonic() > done_s:
                        self.faults.append(f"the journals cannot be read at the end: {error!r}")
                        break
            await asyncio.sleep(POLL_S)
        if connection is not None:
            with suppress(OSError, TimeoutError):
                await connection.close(timeout=TIMEOUT_S)

    async def _read(self, connection: "asyncpg.Connection", shard: int) -> None:
        told = self.told[shard]
        while True:
            after = told[-1].batch.first_seq if told else 0
            rows = await connection.fetch(_PAGE, shard, after, PAGE)
            for row in rows:
                self._take(shard, row)
            if len(rows) < PAGE:
                break
        if told:
            await connection.execute(_REPORT, shard, NAME, told[-1].batch.last_seq)

    def _take(self, shard: int, row: "asyncpg.Record") -> None:
        told = self.told[shard]
        batch = Batch(row["first_seq"], row["last_seq"], row["epoch"], row["payload"])
        crc = record_crc(shard, batch.first_seq, batch.last_seq, batch.epoch, batch.payload)
        if crc != row["crc"]:
            self.faults.append(f"shard {shard} seq {batch.first_seq}: the checksum does not match")
        before_s = told[-1].commit_s if told else 0.0
        told.append(Told(shard, batch, max(before_s, row["commit_s"] or 0.0)))

    async def _look(self, connection: "asyncpg.Connection") -> None:
        for row in await connection.fetch(_DIGESTS):
            key, digest = (row["shard"], row["seq"]), bytes(row["digest"])
            if self.digests.setdefault(key, digest) != digest:
                self.faults.append(f"two snapshots of shard {key[0]} at seq {key[1]} have other digests (I6)")
        for row in await connection.fetch(_HEADS):
            told = self.told[row["id"]] if row["id"] < self.shards else []
            if told and row["head_seq"] < told[-1].batch.last_seq:
                self.faults.append(
                    f"the head of shard {row['id']} went back to {row['head_seq']} from "
                    f"{told[-1].batch.last_seq} (I5)"
                )
