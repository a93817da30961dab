"""The part of a client that workers use: deletion tasks."""

from collections.abc import Sequence

from .face import AsyncFace, Face
from .member_calls import ConfirmTask, TakeTasks, UnknownPlaces
from .results import ConfirmResult, DeleteTask, TasksResult, UnknownResult


class Tasks(Face):
    """Tasks of workers."""

    def take_tasks(
        self,
        *,
        limit: int = 1024,
        wait_ms: int = 0,
        shard: int | None = None,
        timeout_ms: int | None = None,
    ) -> TasksResult:
        """Deletion tasks of at most `limit` locations, waiting up to `wait_ms` (besides the deadline)
        for some: of `shard`, or of all shards that the catalogue's leader leads."""
        return self._run(TakeTasks(limit, wait_ms, shard), timeout_ms)

    def confirm_task(
        self, task: DeleteTask, *, ok: Sequence[bool] | None = None, timeout_ms: int | None = None
    ) -> ConfirmResult:
        """Say which locations of a task have no bytes any more (None: all)."""
        return self._run(ConfirmTask(task, ok), timeout_ms)

    def unknown_places(
        self,
        storage: str,
        locations: Sequence[int],
        generations: Sequence[int],
        *,
        timeout_ms: int | None = None,
    ) -> UnknownResult:
        """Which of these places, found in `storage`, belong to no block. All are of one shard
        (`location >> 44`)."""
        return self._run(UnknownPlaces(storage, locations, generations), timeout_ms)


class AsyncTasks(AsyncFace):
    """Tasks of workers, awaited."""

    async def take_tasks(
        self,
        *,
        limit: int = 1024,
        wait_ms: int = 0,
        shard: int | None = None,
        timeout_ms: int | None = None,
    ) -> TasksResult:
        """Deletion tasks of at most `limit` locations, waiting up to `wait_ms` (besides the deadline)
        for some: of `shard`, or of all shards that the catalogue's leader leads."""
        return await self._run(TakeTasks(limit, wait_ms, shard), timeout_ms)

    async def confirm_task(
        self, task: DeleteTask, *, ok: Sequence[bool] | None = None, timeout_ms: int | None = None
    ) -> ConfirmResult:
        """Say which locations of a task have no bytes any more (None: all)."""
        return await self._run(ConfirmTask(task, ok), timeout_ms)

    async def unknown_places(
        self,
        storage: str,
        locations: Sequence[int],
        generations: Sequence[int],
        *,
        timeout_ms: int | None = None,
    ) -> UnknownResult:
        """Which of these places, found in `storage`, belong to no block. All are of one shard
        (`location >> 44`)."""
        return await self._run(UnknownPlaces(storage, locations, generations), timeout_ms)
