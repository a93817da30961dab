"""A cluster that somebody else runs: where its replicas are, who leads, and how to kill that one.

The replicas are never started here: whoever runs them does that.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from engine_adapters.replay.children import Children
from engine_adapters.replay.deployment import INSTANCE, KEY_LENGTH, Site, Sizing, Times
from metaservice.client import AsyncClient, ClientConfig

LEADER_TIMEOUT_S = 60.0
POLL_S = 0.02
PROBE_TIMEOUT_MS = 500
TTL_MS_DEFAULT = 5_000
LEASE_MS_DEFAULT = 5_000
LATE_WRITE_MS_DEFAULT = 5_000


class ClusterFailed(Exception):
    """The cluster is not as the demo needs it."""


class Replica(Struct, frozen=True):
    """One replica; `pid` 0: not running, or on another machine."""

    url: str
    replica: str = ""
    pid: int = 0


class Description(Struct, frozen=True, kw_only=True):
    """What the runner of a cluster says of it. It may change: a replica that was started again has another
    process id. `limits`: those of the service's settings that matter here, in ms."""

    replicas: list[Replica]
    storage_root: str
    ttl_ms: int = TTL_MS_DEFAULT
    limits: dict[str, int] = {}

    @classmethod
    def read(cls, path: Path) -> "Description":
        """From a file of JSON. Raises ClusterFailed."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise ClusterFailed(f"{path}: {error}") from None

    @classmethod
    def at(cls, urls: Sequence[str], storage_root: Path) -> "Description":
        """Of replicas of which nothing is known but where they are."""
        return cls(replicas=[Replica(url=url) for url in urls], storage_root=str(storage_root))

    @property
    def times(self) -> Times:
        """No answer is older than a write session, its late writes and a take-over between."""
        write_ttl_ms = self.limits.get("write_ttl_ms", 2 * self.ttl_ms)
        late_ms = self.limits.get("late_write_ms", LATE_WRITE_MS_DEFAULT)
        return Times(
            lease_ms=min(LEASE_MS_DEFAULT, self.limits.get("lease_ms_max", LEASE_MS_DEFAULT)),
            write_ttl_ms=write_ttl_ms,
            safe_age_ms=write_ttl_ms + late_ms + self.ttl_ms,
        )


class ClusterSite(Site):
    """The demo's things in a cluster."""

    def __init__(
        self, children: Children, describe: Callable[[], Description], sizing: Sizing, seed: int
    ) -> None:
        """`describe` gives the newest description. Raises ClusterFailed."""
        self._describe = describe
        first = describe()
        super().__init__(children, Path(first.storage_root), sizing, seed, first.times)
        self.url = ",".join(replica.url for replica in first.replicas)
        self.killable = all(replica.pid for replica in first.replicas)
        """Whether the replicas are processes of this machine."""

    async def leader(self) -> str:
        """The URL of the replica that leads the instance's shard. Raises ClusterFailed and ClientError."""
        async with self.client() as client:
            shard = (await client.get_json(f"/v1/instances/{INSTANCE}"))["shard"]
            seen = await client.cluster()
        url = seen.shards[shard].leader_url if shard < len(seen.shards) else ""
        if not url:
            raise ClusterFailed(f"nobody leads shard {shard}")
        return url

    async def kill_leader(self) -> str:
        """SIGKILL to that replica; its name. Raises ClusterFailed and ClientError."""
        url = await self.leader()
        for replica in self._describe().replicas:
            if replica.url == url and replica.pid:
                os.kill(replica.pid, signal.SIGKILL)
                return replica.replica or url
        raise ClusterFailed(f"no process is known for {url}")

    async def unavailable_ms(self) -> int:
        """Wait until lookups about the instance are answered; how long that took. Raises ClusterFailed when
        they are not in time."""
        began = time.monotonic()
        config = ClientConfig(url=self.url, timeout_ms=PROBE_TIMEOUT_MS, breaker_pause_ms_max=250)
        async with AsyncClient(config) as client:
            while time.monotonic() < began + LEADER_TIMEOUT_S:
                await asyncio.sleep(POLL_S)
                looked = await client.lookup(INSTANCE, [bytes(KEY_LENGTH)])
                if looked.failure is None:
                    return round((time.monotonic() - began) * 1_000)
        raise ClusterFailed(f"nobody took over within {LEADER_TIMEOUT_S:g} s: {looked.failure}")
