"""The cluster that is tortured: every replica reaches PostgreSQL and etcd through links of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from metaservice.cli.local.cluster import DATABASE, LocalCluster
from metaservice.cli.local.etcd import EtcdMember
from metaservice.cli.local.places import HOST
from metaservice.cli.local.process import LocalFailed, LocalProcess
from metaservice.cli.local.replicas import LocalReplica, Settings
from metaservice.client import Client, ClientConfig
from tests.torture.cluster_load import FINGERPRINT, GROUP, STORAGE, TENANT, instance_of
from tests.torture.cluster_proxy import Proxies

SHARDS = 4
POSTGRES = "postgres"
DISK_MIB = 320
WAL = {"max_wal_size": "'64MB'", "min_wal_size": "'32MB'", "track_commit_timestamp": "on"}
"""So that a small disk is enough; commit times are the order of the journals."""


class Site(LocalCluster):
    """A `LocalCluster` behind proxies. The thread that starts it must live as long as it."""

    def __init__(self, folder: Path, *, replicas: int, etcd_members: int, settings: Settings) -> None:
        """`etcd_members` 0: PostgreSQL's rows are the leases. `settings`: of every replica, beside where its
        stores are."""
        super().__init__(
            folder,
            replicas=replicas,
            shards=SHARDS,
            etcd_members=etcd_members,
            leadership="etcd" if etcd_members else "sql_lease",
            settings=settings,
        )
        self.disk: Path | None = None
        """The small file system that PostgreSQL is on; None where there may be none."""
        self.no_disk = ""
        """Why not."""
        self._proxies: Proxies | None = None

    @property
    def proxies(self) -> Proxies:
        """The links, once replicas were launched."""
        assert self._proxies is not None
        return self._proxies

    @property
    def dsn(self) -> str:
        """Of the database itself, past the links."""
        return self.postgres.dsn.rpartition("/")[0] + "/" + DATABASE

    def start_stores(self) -> None:
        """See LocalCluster; the database is on a small disk where that may be made."""
        place = self.folder / POSTGRES
        place.mkdir(exist_ok=True)
        self.no_disk = mount(place, DISK_MIB)
        if not self.no_disk:
            self.disk = place
            self._stack.callback(unmount, place)
        super().start_stores()
        self.postgres.configure(**WAL)
        self.postgres.stop()
        self.postgres.start()

    def launch_replicas(self) -> None:
        """See LocalCluster."""
        names = [f"r{number}" for number in range(1, self._count + 1)]
        stores = {POSTGRES: self.postgres.port}
        for member in self._members:
            stores[member.name] = int(member.endpoint.rpartition(":")[2])
        self._proxies = self._stack.enter_context(
            Proxies({f"{name}:{store}": port for name in names for store, port in stores.items()})
        )
        for name in names:
            replica = LocalReplica(name, self.folder, {**self._shared(), **self._own(name)})
            self.replicas.append(replica)
            self._stack.callback(replica.crash)
            replica.launch()

    def links(self, replica: str, store: str) -> list[str]:
        """The links of a replica to `postgres`, or to `etcd`: all its members."""
        stores = [store] if store == POSTGRES else [member.name for member in self._members]
        return [f"{replica}:{one}" for one in stores]

    @property
    def _members(self) -> list[EtcdMember]:
        return self.etcd.members if self.etcd is not None else []

    def _own(self, name: str) -> Settings:
        ports = self.proxies.ports
        here, there = f"{HOST}:{self.postgres.port}", f"{HOST}:{ports[f'{name}:{POSTGRES}']}"
        own: Settings = {"postgres_dsn": self.dsn.replace(here, there)}
        if self.etcd is None:
            return own
        endpoints = [f"http://{HOST}:{ports[link]}" for link in self.links(name, "etcd")]
        return {**own, "etcd_endpoints": endpoints}


def mount(place: Path, size_mib: int) -> str:
    """A file system of this size at `place`; why not, "" when it is there."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=0711", "ucm-torture", str(place)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    except OSError as error:
        return f"mount cannot be run ({error})"
    return "" if done.returncode == 0 else f"mounting is not permitted here ({done.stderr.strip()})"


def unmount(place: Path) -> None:
    """Undo it, whoever still uses it."""
    with suppress(OSError):
        subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False, timeout=20)


def timing(ttl_ms: int) -> dict[str, int]:
    """Settings of every replica at this lease time: all the others as short as the timing laws allow."""
    longer = 1_000
    return {
        "lead_ttl_ms": ttl_ms,
        "staleness_ms_max": longer,
        "write_ttl_ms_min": 2 * ttl_ms,
        "write_ttl_ms_default": 4 * ttl_ms,
        "late_write_ms": 1_500,
        "lease_ms_max": ttl_ms,
        "reclaim_delay_ms": ttl_ms + longer,
        "task_ttl_ms": 5_000,
        "expire_ms": max(15_000, 3 * ttl_ms),
        "snapshot_batches": 2_000,
    }


def furnish(urls: Sequence[str], root: str, quota_blocks: int, *, eviction: str = "lru") -> None:
    """A tenant with a hard quota, a storage, a group, and an instance in every shard. Raises what the calls
    of operators raise."""
    with Client(ClientConfig(url=tuple(urls), admin_timeout_ms=20_000)) as operator:
        operator.put_tenant(TENANT, blocks_max=quota_blocks)
        operator.put_storage(STORAGE, "posix", {"root": root, "fsync": "none"})
        operator.put_group(GROUP, TENANT, [STORAGE], eviction=eviction)
        for shard in range(SHARDS):
            operator.put_instance(instance_of(shard), GROUP, FINGERPRINT, shard=shard)
            placed: dict[str, Any] = operator.get_json(f"/v1/instances/{instance_of(shard)}")
            if placed["shard"] != shard:
                raise LocalFailed(f"{instance_of(shard)} was placed in shard {placed['shard']}")


def worker(urls: Sequence[str], folder: Path) -> LocalProcess:
    """A worker that deletes, as it runs anywhere; started."""
    program = ["-m", "metaservice.cli.worker", "--url", ",".join(urls), "--worker", "w1"]
    options = ["--storage", STORAGE, "--poll-ms", "300"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UCM_")}
    return LocalProcess(
        "worker", [sys.executable, *program, *options], folder / "worker.log", environment=kept
    )
