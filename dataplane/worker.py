"""The worker daemon: deletes the bytes that the service names, and those that it does not know.

It holds no state: whatever it was about to do when it died is a task that times out and goes to another
worker, and every deletion may be done twice. Of a volatile storage it owns the pool: that dies with it.
"""

import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread, current_thread, main_thread
from types import FrameType

from dataplane.options import WorkerOptions, WorkerStats
from dataplane.pools import PoolOwner
from dataplane.port import Backend, OpenFailed
from dataplane.registry import open_backend, pools_of
from dataplane.service import Guard, Registered, Service
from dataplane.sweep import Sweeper
from dataplane.tasks import Lane, dealt
from metaservice.client.breaker import Backoff, new_random
from metaservice.client.errors import REJECTED

log = logging.getLogger("dataplane.worker")

_LOOK_MS = 100
"""How soon the end of the run, or of one of its threads, is noticed."""


class Worker:
    """One worker for some storages.

    `storages` maps each name to an opened backend, or to None: then it is opened as the service describes it.
    A backend handed in stays the caller's to close. Of a storage of a volatile kind the worker makes, renews
    and removes the pool; such a one is to be None. Runs once.
    """

    def __init__(
        self,
        service: Service,
        worker_id: str,
        storages: Mapping[str, Backend | None],
        options: WorkerOptions | None = None,
    ) -> None:
        if not storages:
            raise ValueError("storages: a worker without storages has nothing to do")
        self.stats = WorkerStats()
        self._service = service
        self._id = worker_id
        self._storages = dict(storages)
        self._options = options or WorkerOptions()
        self._random = new_random()
        self._over = Event()
        self._broken: BaseException | None = None
        self._pools = PoolOwner(self.stats)

    def run(self, stop: Event) -> None:
        """Work until `stop` is set, then finish or hand back what is under way. Goes on through outages of
        the service.

        Raises what went wrong in this program itself, so that a supervisor starts it anew rather than it
        being half alive.
        """
        main = Thread(target=self._guarded, args=(self._work,), name="worker-tasks", daemon=True)
        main.start()
        while main.is_alive() and not stop.wait(_LOOK_MS / 1_000):
            pass
        self._over.set()
        main.join(self._options.stop_ms / 1_000)
        self._pools.leave()  # after the service was told, however long it took to hear
        if self._broken is not None:
            raise self._broken

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run a thread's work; should it fail, all of the worker ends."""
        try:
            work()
        except BaseException as error:
            self._broken = error
        finally:
            self._over.set()

    def _work(self) -> None:
        registration = self._service.register_worker(self._id, list(self._storages))
        guard = Guard(registration, self._options.cluster)
        opened: list[Backend] = []
        try:
            storages = self._open(registration, guard, opened)
            shards = self._shard_count(guard)
            if storages is None or not shards:
                return
            lasting = {
                name: backend for name, backend in storages.items() if not backend.capabilities.volatile
            }
            sweeper = Sweeper(self._service, guard, lasting, self.stats, self._options.safe_age_ms, shards)
            others = [self._started("worker-sweep", lambda: self._sweep(sweeper))]
            if len(lasting) < len(storages):
                keep = partial(self._keep_pools, registration, guard, storages)
                others.append(self._started("worker-pools", keep))
            try:
                self._delete(guard, storages, shards)
            finally:
                self._over.set()
                for thread in others:
                    thread.join()
        finally:
            if registration.active:
                self._service.deregister()
            for backend in opened:
                backend.close()

    def _started(self, name: str, work: Callable[[], None]) -> Thread:
        """A thread of the worker's; when its work ends, so does the worker's."""
        thread = Thread(target=self._guarded, args=(work,), name=name, daemon=True)
        thread.start()
        return thread

    def _backoff(self) -> Backoff:
        return Backoff(self._options.backoff_ms_min, self._options.backoff_ms_max, self._random)

    def _pause(self, backoff: Backoff, why: str) -> None:
        """Wait before the next try, unless the worker ends."""
        pause_ms = backoff.next_ms()
        log.info("%s; again in %d ms", why, pause_ms)
        self._over.wait(pause_ms / 1_000)

    def _open(
        self, registration: Registered, guard: Guard, opened: list[Backend]
    ) -> dict[str, Backend] | None:
        """All storages, opened as the service describes them where none was handed in; None when the worker
        ends first.

        No task is taken before: a worker that cannot reach a storage would fail its tasks instead of another
        doing them.
        """
        backoff = self._backoff()
        storages = {name: backend for name, backend in self._storages.items() if backend is not None}
        while not self._over.is_set():
            standing = guard.standing()
            if standing is None:
                self._pause(backoff, guard.trouble())
                continue
            known = {ref.name: ref for ref in registration.storage_table}
            try:
                for name in self._storages.keys() - storages.keys():
                    if name not in known:
                        raise OpenFailed("storages", f"the service does not describe {name!r}")
                    if pools_of(known[name].kind) is not None:
                        storages[name] = self._pools.own(known[name], standing)
                    else:
                        storages[name] = open_backend(known[name].kind, known[name].options)
                        opened.append(storages[name])
            except OpenFailed as failed:
                self._pause(backoff, f"storage not opened: {failed}")
                continue
            return storages
        return None

    # --- tasks -----------------------------------------------------------------------------------------

    def _shard_count(self, guard: Guard) -> int:
        """How many shards the service has, which never changes; 0 when the worker ends first."""
        backoff = self._backoff()
        while not self._over.is_set():
            seen = self._service.cluster()
            if seen.failure == REJECTED + "not_found":
                return 1  # a release that knows no shards
            if seen.failure is not None:
                self._pause(backoff, f"number of shards not known: {seen.failure} {seen.detail}".rstrip())
            elif seen.cluster not in ("", guard.cluster):
                self._pause(backoff, f"cluster {seen.cluster!r}, this worker belongs to {guard.cluster!r}")
            else:
                return len(seen.shards)
        return 0

    def _delete(self, guard: Guard, storages: Mapping[str, Backend], shards: int) -> None:
        """Take deletion tasks of all shards and do them, until the worker ends."""
        lanes = [
            Lane(self._service, guard, storages, self.stats, self._options, self._over, turns)
            for turns in dealt(shards)
        ]
        others = [self._started("worker-tasks", lane.run) for lane in lanes[1:]]
        try:
            lanes[0].run()
        finally:
            self._over.set()
            for thread in others:
                thread.join()

    # --- pools -----------------------------------------------------------------------------------------

    def _keep_pools(self, registration: Registered, guard: Guard, storages: dict[str, Backend]) -> None:
        """See that each owned storage has the pool of the current registration, until the worker ends."""
        backoff = self._backoff()
        owned = [name for name, backend in storages.items() if backend.capabilities.volatile]
        while not self._over.wait(_LOOK_MS / 1_000):
            standing = guard.standing()
            if standing is None:
                continue
            known = {ref.name: ref for ref in registration.storage_table}
            try:
                for name in owned:
                    if name in known:
                        storages[name] = self._pools.own(known[name], standing)
                backoff.reset()
            except OpenFailed as failed:
                self._pause(backoff, f"no pool: {failed}")

    # --- sweeps ----------------------------------------------------------------------------------------

    def _sweep(self, sweeper: Sweeper) -> None:
        """Sweep each `sweep_ms`, sooner after a sweep that was cut off; ±20 %, so that workers spread."""
        backoff = self._backoff()
        pause_ms = self._options.sweep_ms
        while not self._over.wait(pause_ms * self._random.uniform(0.8, 1.2) / 1_000):
            if sweeper.sweep(self._over):
                backoff.reset()
                pause_ms = self._options.sweep_ms
            else:
                pause_ms = min(backoff.next_ms(), self._options.sweep_ms)


def run_worker(
    service: Service,
    worker_id: str,
    storages: Mapping[str, Backend | None],
    options: WorkerOptions | None = None,
) -> WorkerStats:
    """Run a worker until SIGTERM or SIGINT; the process's main function. Returns what it did.

    Outside the main thread, where no signal can be handled, it runs for ever.
    """
    worker = Worker(service, worker_id, storages, options)
    with _stopped_by_signals() as stop:
        worker.run(stop)
    log.info("worker %s ends: %s", worker_id, worker.stats)
    return worker.stats


@contextmanager
def _stopped_by_signals() -> Iterator[Event]:
    """An event that SIGTERM and SIGINT set. A second one of the same ends the process as if nobody had
    listened."""
    stop = Event()
    before = {}

    def heard(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    if current_thread() is main_thread():
        before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
