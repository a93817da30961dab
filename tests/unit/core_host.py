"""A fleet with a volatile storage, and the worker that holds its bytes."""

from typing import Any

from metaservice.core.commands import Heartbeat, PutGroup, PutStorage, RegisterWorker, RenewWrite, Tick
from metaservice.core.model import Limits
from metaservice.core.replies import Started
from metaservice.core.state import Storage
from tests.sim.fleet import Fleet

LIMITS = Limits(
    lease_ms_max=1_000, reclaim_delay_ms=100, late_write_ms=100, expire_ms=15_000, task_ttl_ms=1_500,
    hot_summary_ms=1_000_000,
)  # fmt: skip


class Host(Fleet):
    """Blocks go to the volatile storage `mem`, held by worker `m`, and only then to the lasting `s`."""

    def __init__(self, limits: Limits = LIMITS, **more: Any) -> None:
        super().__init__(limits, **more)
        self.done(PutStorage(storage="mem", kind="shm", options={"dir": "/dev/shm"}))
        self.prefer("mem", "s")
        self.restart("m1")
        self.flush()

    def prefer(self, *storages: str) -> None:
        """Where new blocks go."""
        self.done(PutGroup(group="g", tenant="t", storages=storages))

    def restart(self, incarnation: str, worker: str = "m", storages: tuple[str, ...] = ("mem",)) -> Any:
        """The worker starts (anew)."""
        return self.done(RegisterWorker(worker=worker, incarnation=incarnation, storages=storages))

    @property
    def mem(self) -> Storage:
        """The volatile storage."""
        return self.machine.state.storages["mem"]

    def pool(self) -> tuple[str, str]:
        """Who holds it and in which life, ('', '') for nobody."""
        pool = self.mem.pool
        return ("", "") if pool is None else (pool.worker, pool.incarnation)

    def where(self, started: Started) -> list[str]:
        """The storage of each row that was given a place."""
        rows = zip(started.storages, started.generations, strict=True)
        return [self.machine.state.storage_of[number].id for number, generation in rows if generation]

    def silence(self, started: Started | None = None) -> None:
        """Time passes until worker `m` has expired. Everybody else is heard of, and the writer renews."""
        for pause_ms in (self.limits.expire_ms - 1, 1):
            self.now_ms += pause_ms
            self.ask(Heartbeat(kind="worker", id="k", incarnation="1"))
            for engine in ("e1", "e2"):
                self.ask(Heartbeat(kind="engine", id=engine, incarnation="1"))
            if started is not None and started.session is not None:
                self.done(RenewWrite(session=started.session, engine="e1", incarnation="1", ttl_ms=60_000))
            self.done(Tick())

    def sound(self) -> None:
        """Counters and links agree, and so do replicas: by events, by a snapshot, at every event."""
        self.machine.check()
        for upto in range(len(self.events)):
            self.replayed(upto).check()
        assert self.replayed().digest() == self.machine.digest()
        self.capture()
        restored = self.restored()
        assert restored is not None and restored.digest() == self.machine.digest()
        restored.check()
