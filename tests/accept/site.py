"""The service that the engines share: three replicas on PostgreSQL and etcd, and two workers with a storage
each, all on this machine."""

import sys
import time
from pathlib import Path
from typing import Any

from metaservice.cli.local.cluster import LocalCluster
from metaservice.cli.local.process import LocalProcess, until
from metaservice.cli.local.replicas import LocalReplica, Settings, ask
from metaservice.client import Client, ClientConfig, ClientError

TENANT = "accept-tenant"
GROUP = "accept-group"
DISK, MEMORY = "accept-disk", "accept-memory"
DISK_BYTES = 1 << 30
QUOTA_BYTES = 1 << 30
MEMORY_BYTES = 32 << 20
"""Less than the blocks of a run take: the group's storages are filled in order, so both are used."""
SLOT_BYTES = 1 << 20
LEAD_TTL_MS = 3_000
LEASE_MS = 5_000
WRITE_TTL_MS = 2 * LEAD_TTL_MS
SETTINGS: Settings = {
    "lead_ttl_ms": LEAD_TTL_MS,
    "staleness_ms_max": 1_000,
    "write_ttl_ms_min": WRITE_TTL_MS,
    "write_ttl_ms_default": WRITE_TTL_MS,
    "late_write_ms": 1_500,
    "lease_ms_max": LEASE_MS,
    "reclaim_delay_ms": LEAD_TTL_MS + 1_000,
    "task_ttl_ms": 5_000,
}
"""Shorter than a fleet would have them, for the run waits for some of them."""
WORKER_OPTIONS = {"sweep-ms": 1_000, "safe-age-ms": WRITE_TTL_MS + 8_000, "backoff-ms-max": 500}
OPERATOR_TIMEOUT_MS = 15_000
TAKEN_OVER_TIMEOUT_S = 60.0


class Site:
    """A context manager: everything it started ends with it."""

    def __init__(self, folder: Path) -> None:
        """Data and logs are kept in `folder`."""
        self.folder = folder
        self.disk = folder / "disk"
        self.cluster = LocalCluster(folder / "cluster", settings=SETTINGS)
        self._workers: list[LocalProcess] = []

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end(5.0)
        self.cluster.close()

    def start(self) -> None:
        """Raises LocalFailed and ClientError."""
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Start stores and replicas. Raises LocalFailed."""
        self.cluster.start_stores()
        self.cluster.launch_replicas()

    def await_ready(self) -> None:
        """Returns when the service is there, with a group for engines and a worker for each of its storages.
        Raises LocalFailed and ClientError."""
        self.cluster.await_ready()
        self.disk.mkdir()
        with self.operator() as client:
            root = {"root": str(self.disk), "fsync": "none"}
            client.put_storage(DISK, "posix", root, capacity_bytes=DISK_BYTES)
            slots = {"slot_bytes": str(SLOT_BYTES)}
            client.put_storage(MEMORY, "shm", slots, capacity_bytes=MEMORY_BYTES)
            client.put_tenant(TENANT)
            client.put_group(GROUP, TENANT, [MEMORY, DISK], bytes_max=QUOTA_BYTES)
        for storage in (DISK, MEMORY):
            self._start_worker(storage)
        deadline_s = time.monotonic() + TAKEN_OVER_TIMEOUT_S
        for _ in until(deadline_s):
            with self.operator() as client:
                workers = client.get_json("/v1/workers")["items"]
            if len(workers) == len(self._workers):
                return
        raise self._workers[-1].failure("did not register")

    @property
    def url(self) -> str:
        """All replicas, for a client."""
        return ",".join(self.cluster.urls)

    def operator(self) -> Client:
        """A client for questions and switches; it raises its errors."""
        return Client(ClientConfig(url=self.url, timeout_ms=OPERATOR_TIMEOUT_MS, raise_errors=True))

    def connector(self, engine: str, **more: Any) -> dict[str, Any]:
        """The extra configuration of an engine's connector."""
        return {
            "url": self.url,
            "group": GROUP,
            "engine": engine,
            "lease_ms": LEASE_MS,
            "write_ttl_ms": WRITE_TTL_MS,
            "audit_path": str(self.audit_of(engine)),
            **more,
        }

    def audit_of(self, engine: str) -> Path:
        """Where an engine notes the pages it moves, over all its starts."""
        return self.folder / f"{engine}.audit"

    def instance(self) -> tuple[str, int]:
        """The engines' instance and its shard. Raises ClientError, and ValueError unless there is just
        one."""
        with self.operator() as client:
            (found,) = client.get_json("/v1/instances")["items"]
        return found["id"], found["shard"]

    def leader(self) -> LocalReplica:
        """The replica that leads the engines' instance. Raises ClientError."""
        _, shard = self.instance()
        for _ in until(time.monotonic() + TAKEN_OVER_TIMEOUT_S):
            leader = self.cluster.leader(shard)
            if leader is not None:
                return leader
        raise ClientError(f"nobody leads shard {shard}")

    def gauge(self, name: str) -> int:
        """A number that the replicas tell, over all of them; one that is down tells none."""
        total = 0.0
        for replica in self.cluster.replicas:
            status, body = ask(replica.url, "/metrics")
            for line in body.decode().splitlines() if status == 200 else ():
                told, _, value = line.rpartition(" ")
                if told == f"ucm_meta_{name}":
                    total += float(value)
        return round(total)

    def _start_worker(self, storage: str) -> None:
        command = [sys.executable, "-m", "metaservice.cli.worker", "--url", self.url]
        command += ["--worker", f"worker-of-{storage}", "--storage", storage]
        for name, value in WORKER_OPTIONS.items():
            command += [f"--{name}", str(value)]
        log = self.folder / f"worker-of-{storage}.log"
        self._workers.append(LocalProcess(f"worker of {storage}", command, log))
