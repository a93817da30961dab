"""A small deployment: the service, one worker and their storage, in one folder and on one machine."""

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

LEASE_MS = 5_000
WRITE_TTL_MS = 5_000

SERVICE_LIMITS = {
    "write-ttl-ms-default": WRITE_TTL_MS,
    "late-write-ms": 1_500,
    "lease-ms-max": LEASE_MS,
    "reclaim-delay-ms": 250,
    "task-ttl-ms": 5_000,
}
"""Shorter than a fleet would have them, for the end of a run waits for all of them: a new leader deletes
nothing before the longest lease of the one before it is over."""


WORKER_OPTIONS = {
    "sweep-ms": 500,
    "safe-age-ms": WRITE_TTL_MS + SERVICE_LIMITS["late-write-ms"],
    "backoff-ms-max": 500,
}
"""No answer of this deployment is older than a write session and its late writes: one process, one
machine."""


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


class Deployment:
    """The service and the worker, as processes."""

    def __init__(self, children: Children, folder: Path, sizing: Sizing, seed: int) -> None:
        self._children = children
        self._folder = folder
        self._sizing = sizing
        self.hash_seed = f"demo-{seed}"
        self.storage_root = folder / "storage"
        self.url = ""
        self._port = 0
        self._service: Child | None = None

    @property
    def storage_options(self) -> dict[str, str]:
        """Bytes must outlive a killed process here, not a power cut: no fsync."""
        return {"root": str(self.storage_root), "fsync": "none"}

    def client(self) -> AsyncClient:
        """A client that raises its errors, for the demo's own questions."""
        return AsyncClient(ClientConfig(url=self.url, timeout_ms=10_000, raise_errors=True))

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

    async def set_up(self) -> None:
        """Register what engines need: storage, tenant, group and instance. Raises `ClientError`."""
        self.storage_root.mkdir(parents=True)
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
        for name, value in WORKER_OPTIONS.items():
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
            *("--lease-ms", str(LEASE_MS)),
            *("--write-ttl-ms", str(WRITE_TTL_MS)),
        ]
