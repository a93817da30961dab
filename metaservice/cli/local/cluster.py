"""A whole cluster on the loopback address: PostgreSQL, etcd and replicas, any of which can be killed, frozen
and started again."""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Self

from metaservice.cli.local.etcd import LocalEtcd
from metaservice.cli.local.places import HOST, temporary_folder
from metaservice.cli.local.postgres import LocalPostgres
from metaservice.cli.local.process import LocalFailed, until
from metaservice.cli.local.replicas import START_TIMEOUT_S, LocalReplica, Settings

SHARDS = 4
DATABASE = "ucm"


class LocalCluster:
    """One cluster. A context manager; `close` ends it. Not safe to use from two threads at once, and the
    thread that starts it must live as long as it."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        replicas: int = 3,
        shards: int = SHARDS,
        etcd_members: int = 3,
        leadership: Literal["etcd", "sql_lease"] = "etcd",
        standby: bool = False,
        settings: Settings | None = None,
        own: Callable[[int], Settings] | None = None,
    ) -> None:
        """`folder` (made when absent) keeps data and logs and stays; None is a temporary one. `settings`: of
        every replica; `own`: more for one of them, by its number from 1 on. `standby`: PostgreSQL gets a
        synchronous standby that the replicas know too."""
        self._stack = ExitStack()
        self.folder = folder if folder is not None else self._stack.enter_context(temporary_folder())
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shards = shards
        self.postgres = LocalPostgres(self.folder / "postgres")
        self.standby: LocalPostgres | None = None
        self.etcd = LocalEtcd(self.folder / "etcd", members=etcd_members) if leadership == "etcd" else None
        self.replicas: list[LocalReplica] = []
        self._count = replicas
        self._with_standby = standby
        self._settings: Settings = settings or {}
        self._own_settings = own

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def urls(self) -> tuple[str, ...]:
        """Of all replicas."""
        return tuple(replica.url for replica in self.replicas)

    def start(self) -> None:
        """Start everything; returns once every replica is ready and every shard has a leader. Raises
        `LocalFailed`."""
        self.start_stores()
        self.launch_replicas()
        self.await_ready()

    def start_stores(self) -> None:
        """Start PostgreSQL and etcd. Raises `LocalFailed`."""
        self._stack.callback(self.postgres.close)
        self.postgres.start()
        self.postgres.create_database(DATABASE)
        if self._with_standby:
            self.standby = self.postgres.standby()
            self._stack.callback(self.standby.close)
        if self.etcd is not None:
            self._stack.callback(self.etcd.close)
            self.etcd.start()

    def launch_replicas(self) -> None:
        """Start the replicas, which need not be ready yet when this returns."""
        self.replicas = [
            LocalReplica(f"r{number}", self.folder, self._settings_of(number))
            for number in range(1, self._count + 1)
        ]
        for replica in self.replicas:
            self._stack.callback(replica.crash)
            replica.launch()

    def await_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns once every running replica is ready and knows the others, and every shard has a leader that
        serves. Raises `LocalFailed` when that is not so in time."""
        deadline = time.monotonic() + timeout_s
        for replica in self.replicas:
            if replica.running:
                replica.await_ready(timeout_s)
        for _ in until(deadline):
            if self._acquainted() and all(self.leader(shard) is not None for shard in range(self.shards)):
                return
        absent = [shard for shard in range(self.shards) if self.leader(shard) is None]
        raise LocalFailed(f"shards {absent} have no leader after {timeout_s:g} s; logs are in {self.folder}")

    def _acquainted(self) -> bool:
        """Whether every running replica knows that every other one could lead."""
        running = {replica.name for replica in self.replicas if replica.running}
        for replica in self.replicas:
            if replica.running:
                status = replica.status()
                able = {
                    one["replica"]
                    for one in (status or {}).get("members", ())
                    if one["ready"] and one["journal_ok"]
                }
                if not running <= able:
                    return False
        return True

    def leader(self, shard: int) -> LocalReplica | None:
        """The replica that says that it leads the shard and serves; None when none says so."""
        for replica in self.replicas:
            row = self._row(replica, shard)
            if row is not None and row["role"] == "leader" and row["ready"]:
                return replica
        return None

    def replica(self, name: str) -> LocalReplica:
        """By its name. Raises StopIteration for an unknown one."""
        return next(replica for replica in self.replicas if replica.name == name)

    def close(self) -> None:
        """End everything at once, replicas first: nobody is left whom they could hand over to. A temporary
        folder goes too."""
        self._stack.close()

    def _row(self, replica: LocalReplica, shard: int) -> dict[str, Any] | None:
        """What a replica says of one shard."""
        said = replica.status() if replica.running else None
        rows: list[dict[str, Any]] = said["shards"] if said is not None else []
        return next((row for row in rows if row["shard"] == shard), None)

    def _settings_of(self, number: int) -> Settings:
        """What one replica is told."""
        return {**self._shared(), **(self._own_settings(number) if self._own_settings is not None else {})}

    def _shared(self) -> Settings:
        """What all replicas are told."""
        elected: Settings = (
            {"leadership": "etcd", "etcd_endpoints": list(self.etcd.endpoints)}
            if self.etcd is not None
            else {"leadership": "sql_lease"}
        )
        stored: Settings = {"journal": "postgres", "postgres_dsn": self._dsn(), "shards": self.shards}
        return {**stored, **elected, **self._settings}

    def _dsn(self) -> str:
        dsn = self.postgres.dsn.rpartition("/")[0] + "/" + DATABASE
        if self.standby is None:
            return dsn
        here = f"{HOST}:{self.postgres.port}"
        both = dsn.replace(here, f"{here},{HOST}:{self.standby.port}")
        return both + "?target_session_attrs=read-write"

    def describe(self, path: Path, **more: Any) -> None:
        """Write where the replicas are and their process ids, as JSON, in one step: whoever reads it again
        and again never finds half of it."""
        rows = [
            {"replica": one.name, "url": one.url, "pid": one.pid if one.running else 0}
            for one in self.replicas
        ]
        partial = path.with_suffix(".new")
        partial.write_text(json.dumps({"replicas": rows, "shards": self.shards, **more}), encoding="utf-8")
        partial.replace(path)
