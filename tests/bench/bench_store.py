"""What a million blocks cost: memory, the time to start over them, replay, snapshots."""

import subprocess
import sys
import time
from pathlib import Path

import msgspec

from tests.bench.bench_clients import write
from tests.bench.bench_service import (
    CHAIN_KEYS,
    INSTANCE,
    NEVER_SNAPSHOT,
    ROOT,
    BenchError,
    Service,
    chain,
    new_client,
)

LONG_CHAIN = 1 << 40
"""The chain that the lookup of thousands of keys asks for."""


class Filled(msgspec.Struct, kw_only=True):
    """How the store was filled."""

    blocks: int
    seconds: float
    rss_before_bytes: int
    rss_after_bytes: int
    journal_bytes: int
    cpu_us_per_block: float


def fill(service: Service, blocks: int, long_chain: int) -> Filled:
    """Write `blocks` blocks, and one chain of `long_chain` more, by one client."""
    with new_client(service.port) as client:
        client.register_engine("bench-fill", instance=INSTANCE)
        write(client, chain(LONG_CHAIN + 1, CHAIN_KEYS))
        before_bytes, cpu_s = service.rss_bytes(), service.cpu_s()
        began_s = time.perf_counter()
        for number in range(blocks // CHAIN_KEYS):
            write(client, chain(number, CHAIN_KEYS))
        seconds = time.perf_counter() - began_s
        cpu_s = service.cpu_s() - cpu_s
        stored = blocks // CHAIN_KEYS * CHAIN_KEYS
        filled = Filled(
            blocks=stored,
            seconds=seconds,
            rss_before_bytes=before_bytes,
            rss_after_bytes=service.rss_bytes(),
            journal_bytes=_size_of(service.journal),
            cpu_us_per_block=cpu_s * 1e6 / stored,
        )
        parent: bytes | None = None
        for first in range(0, long_chain, CHAIN_KEYS):
            keys = chain(LONG_CHAIN, min(CHAIN_KEYS, long_chain - first), first)
            write(client, keys, parent)
            parent = keys[-1]
    return filled


def _size_of(journal: Path) -> int:
    return sum(path.stat().st_size for path in journal.parent.glob(journal.name + "*"))


class Replayed(msgspec.Struct, kw_only=True):
    """What a fresh process measured over a journal without a snapshot, then over the snapshot it saved."""

    blocks: int
    replay_s: float
    replay_cpu_s: float
    save_s: float
    snapshot_bytes: int
    load_s: float
    load_cpu_s: float


def replayed(journal: Path, repeats: int) -> Replayed:
    """The best of several, measured in a process of its own. Leaves a snapshot behind."""
    command = [sys.executable, "-m", "tests.bench.bench_replay", str(journal), str(repeats)]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=300)
    if run.returncode:
        raise BenchError(f"replaying failed with {run.returncode}")
    return msgspec.json.decode(run.stdout, type=Replayed)


def restart_s(data: Path) -> float:
    """From the start of the process until the service answers."""
    with Service(data, *NEVER_SNAPSHOT) as service:
        return service.started_s
