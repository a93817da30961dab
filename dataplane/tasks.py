"""Deletion tasks: taken from each shard's leader, done, and confirmed."""

import logging
from collections.abc import Mapping, Sequence
from threading import Event

from dataplane.options import WorkerOptions, WorkerStats
from dataplane.port import Backend, DeleteFailed, Place
from dataplane.service import Guard, Service
from metaservice.client.breaker import Backoff, new_random
from metaservice.client.errors import PASSING
from metaservice.client.results import DeleteTask, now_ms

log = logging.getLogger("dataplane.worker")

LANES_MAX = 8
"""Shards are asked at the same time up to so many; where there are more, they take turns."""
_CHUNK_LOCATIONS = 256
"""Locations deleted between two looks at the clock."""
_CONFIRM_TRIES = 5


def dealt(shards: int) -> list[Sequence[int | None]]:
    """The shards of each lane. A service of one shard is not asked for it by name."""
    if shards == 1:
        return [(None,)]
    lanes = min(shards, LANES_MAX)
    return [range(lane, shards, lanes) for lane in range(lanes)]


class _Turn:
    """One shard, and when it may be asked again."""

    __slots__ = ("backoff", "not_before_ms", "shard")

    def __init__(self, shard: int | None, backoff: Backoff) -> None:
        self.shard = shard
        self.backoff = backoff
        self.not_before_ms = 0


class Lane:
    """Asks its shards one after the other, so that one without a leader keeps nobody but its lane waiting,
    and that no longer than a question takes."""

    def __init__(
        self,
        service: Service,
        guard: Guard,
        storages: Mapping[str, Backend],
        stats: WorkerStats,
        options: WorkerOptions,
        over: Event,
        shards: Sequence[int | None],
    ) -> None:
        """`over` ends it, as does nothing else."""
        self._service = service
        self._guard = guard
        self._storages = storages
        self._stats = stats
        self._options = options
        self._over = over
        self._random = new_random()
        self._turns = [_Turn(shard, self._backoff()) for shard in shards]
        self._poll_ms = options.poll_ms // len(self._turns)

    def run(self) -> None:
        """Take tasks and do them, until the worker ends."""
        while not self._over.is_set():
            for turn in self._turns:
                if now_ms() >= turn.not_before_ms and not self._over.is_set():
                    self._ask(turn)
            wait_ms = min(turn.not_before_ms for turn in self._turns) - now_ms()
            if wait_ms > 0:
                self._over.wait(wait_ms / 1_000)

    def _backoff(self) -> Backoff:
        return Backoff(self._options.backoff_ms_min, self._options.backoff_ms_max, self._random)

    def _later(self, turn: _Turn, why: str) -> None:
        """Ask this shard again after a pause."""
        pause_ms = turn.backoff.next_ms()
        about = "" if turn.shard is None else f" (shard {turn.shard})"
        log.info("%s%s; again in %d ms", why, about, pause_ms)
        turn.not_before_ms = now_ms() + pause_ms

    def _ask(self, turn: _Turn) -> None:
        standing = self._guard.standing()
        if standing is None:
            self._later(turn, self._guard.trouble())
            return
        asked_ms = now_ms()
        answer = self._service.take_tasks(
            limit=self._options.tasks_max, wait_ms=self._poll_ms, shard=turn.shard
        )
        if answer.failure is not None:
            self._later(turn, f"no tasks: {answer.failure} {answer.detail}".rstrip())
        elif answer.tasks and answer.cluster != standing.cluster:
            with self._stats.lock:
                self._stats.refused += 1
            self._later(turn, f"tasks of cluster {answer.cluster!r}, this worker is of {standing.cluster!r}")
        elif self._do_all(answer.tasks, standing.cluster):
            self._later(turn, "some bytes could not be deleted")
        else:
            turn.backoff.reset()
            if not answer.tasks and now_ms() - asked_ms < self._poll_ms // 2:
                self._later(turn, "no tasks, and no wait for some")

    def _do_all(self, tasks: list[DeleteTask], cluster: str) -> int:
        """How many locations of `tasks` could not be deleted."""
        left = 0
        for task in tasks:
            ok = self._do(task, cluster, self._storages.get(task.storage.name))
            left += ok.count(False)
            self._confirm(task, ok)
        return left

    def _do(self, task: DeleteTask, cluster: str, backend: Backend | None) -> list[bool]:
        """Delete what `task` names as far as its time allows: per location whether all its parts are gone."""
        ok = [False] * len(task.locations)
        if backend is None:
            log.error(
                "task %s is for storage %s, which this worker does not serve", task.task, task.storage.name
            )
            return ok
        failed: list[DeleteFailed] = []
        # Unconfirmed at its deadline, a task goes to another worker: what is not done by then is left to it.
        end_ms = task.deadline_ms - task.ttl_ms // 5
        each = len(task.parts)
        for at in range(0, len(ok), _CHUNK_LOCATIONS):
            if self._over.is_set() or now_ms() >= end_ms:
                break
            rows = range(at, min(at + _CHUNK_LOCATIONS, len(ok)))
            places = [
                Place(cluster, task.locations[row], task.generations[row], part)
                for row in rows
                for part in task.parts
            ]
            results = backend.delete_many(places)
            self._count(results)
            for number, row in enumerate(rows):
                of_row = results[number * each : (number + 1) * each]
                failures = [result for result in of_row if isinstance(result, DeleteFailed)]
                failed += failures
                ok[row] = not failures
        if failed:
            log.warning("%d files of task %s not deleted, such as %s", len(failed), task.task, failed[0])
        return ok

    def _count(self, results: list[bool | DeleteFailed]) -> None:
        with self._stats.lock:
            self._stats.deleted += results.count(True)
            self._stats.absent += results.count(False)
            self._stats.failed += len(results) - results.count(True) - results.count(False)

    def _confirm(self, task: DeleteTask, ok: list[bool]) -> None:
        """Tell the service, a few times if need be. If it never hears, it hands the task out again."""
        backoff = self._backoff()
        for _ in range(_CONFIRM_TRIES):
            answer = self._service.confirm_task(task, ok=ok)
            if answer.failure is None:
                with self._stats.lock:
                    self._stats.tasks += 1
                return
            if answer.failure not in PASSING or self._over.is_set():
                break
            pause_ms = backoff.next_ms()
            why = f"{answer.failure} {answer.detail}".rstrip()
            log.info("task %s not confirmed: %s; again in %d ms", task.task, why, pause_ms)
            self._over.wait(pause_ms / 1_000)
        log.warning("task %s stays unconfirmed: %s %s", task.task, answer.failure, answer.detail)
