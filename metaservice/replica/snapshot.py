"""When to cut a snapshot, and how: a process of its own replays the journal and writes it down.

The serving process spends nothing on it but starting that process, its event loop never stops for it, and the
snapshot is proved by an independent replay (the way a follower will do it).
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from metaservice.journal.port import JournalSize
from metaservice.journal.snapshots import SnapshotStore


class SnapshotKeeper:
    """Cuts when the journal behind the newest snapshot has grown past a bound."""

    def __init__(
        self,
        cut_command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        batches_max: int = 20_000,
        bytes_max: int = 64 * 1024 * 1024,
        check_s: float = 5.0,
        timeout_s: float = 600.0,
    ) -> None:
        self._command = list(cut_command)
        self._environment = {**os.environ, **(environment or {})}
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self.check_s = check_s
        self._timeout_s = timeout_s
        self._floor = JournalSize(0, 0)

    def due(self, size: JournalSize) -> bool:
        """Whether the journal has grown enough since the last cut. Trimming keeps one snapshot's worth
        behind."""
        return (
            size.batches - self._floor.batches >= self._batches_max
            or size.bytes - self._floor.bytes >= self._bytes_max
        )

    async def cut(self, store: SnapshotStore) -> int:
        """Cut one; returns the seq up to which the journal may be trimmed now (0: none yet)."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                _, errors = await process.communicate()
        except BaseException:
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise
        if process.returncode:
            tail = errors.decode(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"cutting a snapshot failed with {process.returncode}: {' '.join(tail)}")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, store.latest)
        return await loop.run_in_executor(None, store.trim_limit)

    def trimmed(self, size: JournalSize) -> None:
        """What is left after a cut and a trim: growth counts from here."""
        self._floor = size
