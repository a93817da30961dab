"""Finds files that the service does not know and deletes them, once they are past all doubt.

Such files are what crashes leave: a writer died before it published, a write landed after its session had
ended, a block's record went while its bytes could not be deleted. No task will ever name them.
"""

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from threading import Event

from dataplane.options import WorkerStats
from dataplane.port import Backend, DeleteFailed, Found, ScanFailed
from dataplane.service import Guard, Service, Standing
from metaservice.client.calls import shard_of_location
from metaservice.client.results import now_ms

log = logging.getLogger("dataplane.worker")

Slot = tuple[int, int]
"""(location, generation)"""

BATCH_MAX = 1024
"""Files that one question to the service is about."""


class SweepStopped(Exception):
    """The pass cannot go on: the service is away or not ours, or the worker ends. Nothing more was
    deleted."""


class Sweeper:
    """One pass after another over the files of this worker's cluster.

    A file goes only when all of this holds: it was last changed more than `safe_age_ms` ago by the storage's
    own clock; it carries a name of this project, in the folder of the service's cluster; the service, asked
    after the file was seen, knows no block, in any state, with that location and generation; the registration
    under which it was asked is still the same; and the file is still the very same. Locations are never given
    out twice with one generation, so what is unknown now and older than any answer under way stays unknown.
    """

    def __init__(
        self,
        service: Service,
        guard: Guard,
        storages: Mapping[str, Backend],
        stats: WorkerStats,
        safe_age_ms: int,
        shards: int,
    ) -> None:
        self._service = service
        self._guard = guard
        self._storages = storages
        self._stats = stats
        self._safe_age_ms = safe_age_ms
        self._shards = shards

    def sweep(self, over: Event) -> bool:
        """One pass over all storages; False when it was cut off by the service's absence or by `over`."""
        standing = self._guard.standing()
        if standing is None:
            return False
        foreign = 0
        for name, backend in self._storages.items():
            try:
                foreign += self._sweep_storage(name, backend, standing, over)
            except SweepStopped as stopped:
                log.info("sweep of %s stopped: %s", name, stopped)
                return False
            except ScanFailed as failed:
                self._stats.sweep_failed += 1
                log.warning("sweep of %s: %s", name, failed)
        self._stats.foreign = foreign
        self._stats.sweeps += 1
        return True

    def _sweep_storage(self, name: str, backend: Backend, standing: Standing, over: Event) -> int:
        """Returns how many foreign files there are."""
        foreign: list[str] = []
        ripe = self._ripe(backend.scan(standing.cluster), foreign)
        while batch := list(islice(ripe, BATCH_MAX)):
            began_ms = now_ms()
            self._settle(name, backend, standing, batch)
            # As much rest as work: a sweep never takes more than half of a storage that engines wait for.
            if over.wait((now_ms() - began_ms) / 1_000):
                raise SweepStopped("the worker ends")
        if foreign:
            log.warning("%d foreign files in %s are left alone, such as %s", len(foreign), name, foreign[0])
        return len(foreign)

    def _ripe(self, found: Iterator[Found], foreign: list[str]) -> Iterator[Found]:
        for one in found:
            if one.place is None or shard_of_location(one.place.location) >= self._shards:
                foreign.append(one.name)
            elif one.age_ms > self._safe_age_ms:
                yield one

    def _settle(self, name: str, backend: Backend, standing: Standing, batch: list[Found]) -> None:
        """Delete those of `batch` that are orphans."""
        orphans: set[Slot] = set()
        by_shard: dict[int, list[Slot]] = {}
        for slot in {(one.place.location, one.place.generation) for one in batch if one.place is not None}:
            by_shard.setdefault(shard_of_location(slot[0]), []).append(slot)
        for slots in by_shard.values():
            orphans |= self._orphans(name, standing, slots)
        gone = [
            one
            for one in batch
            if one.place is not None
            and (one.place.location, one.place.generation) in orphans
            and self._discard(backend, one)
        ]
        if gone:
            log.info("deleted %d orphans of %s, such as %s", len(gone), name, gone[0].name)

    def _orphans(self, name: str, standing: Standing, slots: list[Slot]) -> set[Slot]:
        """Which of `slots`, all of one shard, its leader does not know."""
        if not self._guard.holds(standing):
            raise SweepStopped(self._guard.trouble())
        answer = self._service.unknown_places(name, [slot[0] for slot in slots], [slot[1] for slot in slots])
        if answer.failure is not None:
            raise SweepStopped(f"{answer.failure} {answer.detail}".rstrip())
        if not self._guard.holds(standing):
            raise SweepStopped(self._guard.trouble())
        return {slot for slot, unknown in zip(slots, answer.unknown, strict=True) if unknown}

    def _discard(self, backend: Backend, one: Found) -> bool:
        try:
            gone = backend.discard(one)
        except DeleteFailed as failed:
            self._stats.sweep_failed += 1
            log.warning("orphan not deleted: %s", failed)
            return False
        if gone and one.state == "temporary":
            self._stats.swept_temporary += 1
        elif gone:
            self._stats.swept += 1
        return gone
