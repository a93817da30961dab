"""What the demo has in a service, and a small service of its own: one process, in one folder."""

import asyncio
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from engine_adapters.replay import hashing
from engine_adapters.replay.children import Child, Children
from metaservice.client import AsyncClient, ClientConfig

HOST = "127.0.0.1"
TENANT = "demo-tenant"
GROUP = "demo-group"
INSTANCE = "demo-model"
STORAGE = "demo-disk"
PART = "kv"
WORKER = "demo-worker"
KEY_LENGTH = 32

READY_TIMEOUT_S = 60.0
POLL_S = 0.02

SERVICE_LIMITS = {
    "write-ttl-ms-default": 5_000,
    "late-write-ms": 1_500,
    "lease-ms-max": 5_000,
    "reclaim-delay-ms": 250,
    "task-ttl-ms": 5_000,
}
"""Shorter than a fleet would have them, for the end of a run waits for all of them: a new leader deletes
nothing before the longest lease of the one before it is over."""


class Times(Struct, frozen=True, kw_only=True):
    """What engines ask for, and what a worker waits for, in ms. `safe_age_ms`: no answer of the service is
    older."""

    lease_ms: int
    write_ttl_ms: int
    safe_age_ms: int


OWN_SERVICE = Times(
    lease_ms=SERVICE_LIMITS["lease-ms-max"],
    write_ttl_ms=SERVICE_LIMITS["write-ttl-ms-default"],
    safe_age_ms=SERVICE_LIMITS["write-ttl-ms-default"] + SERVICE_LIMITS["late-write-ms"],
)
"""No answer of one process on one machine is older than a write session and its late writes."""


class Address(Struct):
    """What the service writes to its ready-file."""

    host: str
    port: int
    pid: int


class Sizing(Struct, frozen=True, kw_only=True):
    """How large a block is and how many the run may store at most."""

    block_size_tokens: int
    part_bytes: int
    blocks: int

    @property
    def quota_bytes(self) -> int:
        """A real limit of the group. Twice what an ideal cache would hold: the figures are about sharing,
        and an eviction of something useful would be a miss that the ideal does not have."""
        return 2 * self.blocks * self.part_bytes

    @property
    def capacity_bytes(self) -> int:
        """The storage holds a little more than its groups may use."""
        return self.quota_bytes + self.quota_bytes // 4


class Site:
    """A service that is there, and what the demo has in it and beside it: its storage, instance, worker and
    engines."""

    def __init__(
        self, children: Children, storage_root: Path, sizing: Sizing, seed: int, times: Times
    ) -> None:
        self._children = children
        self._sizing = sizing
        self._times = times
        self.hash_seed = f"demo-{seed}"
        self.storage_root = storage_root
        self.url = ""
        """Where the service is; of several replicas all, with commas between."""

    @property
    def storage_options(self) -> dict[str, str]:
        """Bytes must outlive a killed process here, not a power cut: no fsync."""
        return {"root": str(self.storage_root), "fsync": "none"}

    def client(self) -> AsyncClient:
        """A client that raises its errors, for the demo's own questions."""
        return AsyncClient(ClientConfig(url=self.url, timeout_ms=10_000, raise_errors=True))

    async def set_up(self) -> None:
        """Register what engines need: storage, tenant, group and instance. Raises `ClientError`."""
        self.storage_root.mkdir(parents=True, exist_ok=True)
        async with self.client() as client:
            await client.put_storage(
                STORAGE, "posix", self.storage_options, capacity_bytes=self._sizing.capacity_bytes
            )
            await client.put_tenant(TENANT)
            await client.put_group(
                GROUP,
                tenant=TENANT,
                storages=[STORAGE],
                bytes_max=self._sizing.quota_bytes,
                high_permille=950,
                low_permille=900,
                eviction="lru",
            )
            await client.put_instance(INSTANCE, group=GROUP, fingerprint=self.fingerprint())

    def fingerprint(self) -> dict[str, object]:
        """What must be equal for two engines to share blocks. The canary is what these processes hash a
        fixed run to."""
        tokens = self._sizing.block_size_tokens
        return {
            "model": "replay",
            "revision": "1",
            "kv_dtype": "shake128",
            "block_size_tokens": tokens,
            "key_length": KEY_LENGTH,
            "hash_scheme": hashing.HASH_SCHEME,
            "hash_seed": self.hash_seed,
            "canary": hashing.canary(block_size_tokens=tokens, seed=self.hash_seed, key_length=KEY_LENGTH),
            "groups": [{"name": "full", "kind": "full"}],
            "parts": [{"name": PART, "bytes": self._sizing.part_bytes, "group": "full"}],
        }

    async def start_worker(self) -> Child:
        """Start the worker that deletes and sweeps in the storage."""
        command = [sys.executable, "-m", "metaservice.cli.worker", "--url", self.url, "--worker", WORKER]
        command += ["--storage", STORAGE]
        options = {"sweep-ms": 500, "safe-age-ms": self._times.safe_age_ms, "backoff-ms-max": 500}
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        return await self._children.start("worker", command)

    def engine_command(self, name: str) -> list[str]:
        """The command line of one engine process."""
        return [
            *(sys.executable, "-m", "engine_adapters.replay.engine"),
            *("--url", self.url),
            *("--engine", name),
            *("--instance", INSTANCE),
            *("--part", PART),
            *("--part-bytes", str(self._sizing.part_bytes)),
            *("--block-size-tokens", str(self._sizing.block_size_tokens)),
            *("--hash-seed", self.hash_seed),
            *("--key-length", str(KEY_LENGTH)),
            *("--lease-ms", str(self._times.lease_ms)),
            *("--write-ttl-ms", str(self._times.write_ttl_ms)),
        ]


class Deployment(Site):
    """A service of one process, of the demo's own: it can be killed and started again."""

    def __init__(self, children: Children, folder: Path, sizing: Sizing, seed: int) -> None:
        super().__init__(children, folder / "storage", sizing, seed, OWN_SERVICE)
        self._folder = folder
        self._port = 0
        self._service: Child | None = None

    async def start_service(self) -> None:
        """Start the service on its data and wait until it is ready: on any free port first, then always on
        that one. Raises `ChildFailed`, with the end of its log."""
        ready_file = self._folder / "service-ready.json"
        ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "metaservice.main", "serve", "--data", str(self._folder / "service")]
        command += ["--host", HOST, "--port", str(self._port), "--ready-file", str(ready_file)]
        for name, value in SERVICE_LIMITS.items():
            command += [f"--{name}", str(value)]
        service = self._service = await self._children.start("service", command)
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not ready_file.exists():
                    if not service.running:
                        raise service.failure(f"ended with status {service.process.returncode}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise service.failure(f"was not ready after {READY_TIMEOUT_S:g} s") from None
        address = msgspec.json.decode(ready_file.read_bytes(), type=Address)
        self._port = address.port
        self.url = f"http://{address.host}:{address.port}"

    def kill_service(self) -> None:
        """SIGKILL."""
        assert self._service is not None
        self._service.kill()

    async def service_gone(self) -> None:
        """Wait until the killed service is really gone, so that its port and data are free."""
        assert self._service is not None
        await self._service.process.wait()
