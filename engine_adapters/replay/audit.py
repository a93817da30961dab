"""Is anything left over? Compares what the service names as readable with what really lies in the storage.

It asks for every block that the run could have written and takes the answers as the whole truth: a file
that no answer names is an orphan, whoever left it; so is a location that counts as used and that no lookup
can reach.
"""

import asyncio
import time
from dataclasses import dataclass

from dataplane import Backend
from metaservice.client import AsyncClient, ClientError

KEYS_PER_LOOKUP = 4_096
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Audit:
    """What one comparison found. All counts are of files or locations."""

    readable: int
    """Locations that lookups name."""
    orphan_files: int
    """Published files of locations that no lookup names."""
    cut_off_files: int
    """Files of writes that never ended."""
    foreign_files: int
    """Files that no part of this project wrote."""
    absent_files: int
    """Readable locations without their file: a lookup that names them is a false hit."""
    unreachable: int
    """Locations that are being written or used by nobody."""
    deleting: int
    """Locations whose bytes still wait to be deleted."""

    @property
    def orphans(self) -> int:
        """All that is left over."""
        return (
            self.orphan_files
            + self.cut_off_files
            + self.foreign_files
            + abs(self.unreachable)
            + self.deleting
        )

    def text(self) -> str:
        """The counts for people."""
        return (
            f"{self.readable:,} readable locations; left over: {self.orphan_files} files of others,"
            f" {self.cut_off_files} cut off, {self.foreign_files} foreign, {abs(self.unreachable)} locations"
            f" unreachable, {self.deleting} not deleted yet; {self.absent_files} files absent"
        )


class Auditor:
    """Compares one instance with one storage."""

    def __init__(self, client: AsyncClient, backend: Backend, instance: str, part: str) -> None:
        """`client` raises its errors."""
        self._client = client
        self._backend = backend
        self._instance = instance
        self._part = part

    async def settled(self, keys: list[bytes], timeout_s: float) -> Audit:
        """The first comparison that finds nothing left over, or the last one before `timeout_s` is over:
        sessions have to expire, late writers must be waited for, and then workers delete and sweep. Raises
        as `compare`."""
        deadline = time.monotonic() + timeout_s
        while True:
            over = time.monotonic() > deadline
            try:
                audit = await self.compare(keys)
            except ClientError:
                if over:
                    raise  # until then a replica may be on its way
            else:
                if audit.orphans == 0 or over:
                    return audit
            await asyncio.sleep(POLL_S)

    async def compare(self, keys: list[bytes]) -> Audit:
        """One comparison. Raises `ClientError` and `ScanFailed`."""
        readable = await self._readable(keys)
        usage = (await self._client.get_json(f"/v1/instances/{self._instance}"))["usage"]
        found = await asyncio.to_thread(lambda: list(self._backend.scan()))
        stored = {
            (file.place.location, file.place.generation)
            for file in found
            if file.state == "published" and file.place is not None
        }
        return Audit(
            readable=len(readable),
            orphan_files=len(stored - readable),
            cut_off_files=sum(file.state == "temporary" for file in found),
            foreign_files=sum(file.state == "foreign" for file in found),
            absent_files=len(readable - stored),
            unreachable=usage["blocks"] - len(readable),
            deleting=usage["deleting_blocks"],
        )

    async def _readable(self, keys: list[bytes]) -> set[tuple[int, int]]:
        """(location, generation) of every block of `keys` that a lookup names."""
        readable: set[tuple[int, int]] = set()
        for at in range(0, len(keys), KEYS_PER_LOOKUP):
            result = await self._client.lookup(self._instance, keys[at : at + KEYS_PER_LOOKUP], mode="each")
            readable.update(zip(result.locations, result.generations, strict=True))
        return readable
