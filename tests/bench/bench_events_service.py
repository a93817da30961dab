"""The service, engines and blocks of the measurement of cache events."""

import contextlib
import random
import time
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from metaservice.client import Client
from metaservice.wire.schemas import TokenRow
from metaservice.wire.tokens import pack_tokens
from tests.bench.bench_service import KEY_LENGTH, BenchError, Service, new_client

VOCABULARY = 150_000
ROWS = 4_096
"""Different blocks of token ids: making them must not be what is measured."""
BIG, SMALL, QUIET = "big", "small", "quiet"
"""Instances: most blocks; those that are told again while lookups are timed; one that is not announced."""


class Options(NamedTuple):
    """How much is measured."""

    blocks: int
    small: int
    """Of the blocks, those of the instance that is told again while lookups are timed."""
    workers: int
    ranks: int
    tokens: int
    seconds: float
    turns: int
    replays: int


class Bench:
    """A service, its engines and what is written into it."""

    def __init__(self, options: Options, service: Service) -> None:
        self.options = options
        self.service = service
        self.client = new_client(service.port)
        self._chance = chance = random.Random(1)
        self._rows = [
            pack_tokens([chance.randrange(VOCABULARY) for _ in range(options.tokens)]) for _ in range(ROWS)
        ]

    def set_up(self) -> None:
        """Instances and engines."""
        client, workers = self.client, self.options.workers
        client.put_tenant("bench")
        client.put_storage("pool", "posix", {"root": "/nowhere"})
        client.put_group("bench", "bench", ["pool"])
        fingerprint = {
            "model": "bench", "revision": "1", "kv_dtype": "bf16",
            "block_size_tokens": self.options.tokens, "key_length": KEY_LENGTH,
            "hash_scheme": "test", "hash_seed": "0", "parts": [{"name": "tp0", "bytes": 2 << 20}],
        }  # fmt: skip
        for name in (BIG, SMALL):
            publication = {"model": name, "entries_max": 2 * self.options.blocks}
            client.put_instance(name, "bench", fingerprint, publication=publication)
        client.put_instance(QUIET, "bench", fingerprint)
        for instance in (BIG, SMALL):
            for number in range(workers):
                with new_client(self.service.port) as engine:
                    told = engine.register_engine(
                        f"{instance}-{number}",
                        instance=instance,
                        rank=number % self.options.ranks,
                        keepalive=None,
                        endpoints={"address": f"10.0.0.{number}:8000", "worker_id": number + 1},
                    )
                    if told.failure is not None:
                        raise BenchError(f"not registered: {told.failure} {told.detail}")
        self.client.register_engine("writer", instance=BIG)

    def streams(self, instance: str) -> list[dict[str, Any]]:
        """The streams of an instance, once all are there."""
        until_s = time.monotonic() + 20
        while True:
            views = self.client.get_json("/v1/events")["streams"]
            found = [view for view in views if view["instance"] == instance and view["live"]]
            if len(found) == min(self.options.ranks, self.options.workers):
                return found
            if time.monotonic() > until_s:
                raise BenchError(f"streams of {instance}: {views}")
            time.sleep(0.1)

    def write(self, client: Client, instance: str, keys: list[bytes]) -> None:
        """New blocks with their token ids."""
        start = self._chance.randrange(ROWS)
        tokens: list[TokenRow] = [self._rows[(start + row) % ROWS] for row in range(len(keys))]
        started = client.start_write(instance, keys, tokens=tokens)
        if started.failure is not None or any(started.outcomes):
            raise BenchError(f"start-write: {started.failure} {started.detail}")
        finished = client.finish(
            started, started.locations, started.generations, checksums=array("Q", range(len(keys)))
        )
        if finished.published != len(keys):
            raise BenchError(f"finish: {finished.failure} {finished.detail}")

    def announced(self, instance: str) -> int:
        """How many of its blocks routers are told of."""
        return int(self.client.get_json(f"/v1/instances/{instance}")["announced"])

    def publisher(self) -> int:
        """The process id of the publisher."""
        found = [
            int(stat.parent.name)
            for stat in Path("/proc").glob("[0-9]*/stat")
            if _parent_of(stat) == self.service.pid and b"publisher" in (stat.parent / "cmdline").read_bytes()
        ]
        if len(found) != 1:
            raise BenchError(f"publisher processes: {found}")
        return found[0]


def _parent_of(stat: Path) -> int:
    with contextlib.suppress(OSError):
        return int(stat.read_text().rpartition(")")[2].split()[1])
    return 0


def restate(client: Client, instance: str) -> None:
    """Have all of it told again."""
    client.post(f"/v1/instances/{instance}/restate", {})


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def cpu_s(pid: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
