"""Replays a journal, cuts a snapshot and loads it, in a process of its own.

`python -m tests.bench.bench_replay JOURNAL REPEATS` prints what `bench_store.Replayed` holds, as JSON.
"""

import sys
import time
from pathlib import Path

import msgspec

from metaservice.core.capture import capture
from metaservice.core.machine import Machine
from metaservice.core.model import Limits
from metaservice.journal.sqlite import SqliteReader, open_reader
from metaservice.replica.replay import replay
from tests.bench.bench_store import Replayed


def _timed(reader: SqliteReader) -> tuple[Machine, float, float]:
    """One replay: the machine, seconds, processor seconds."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    machine = replay(reader, 0, Limits())
    return machine, time.perf_counter() - began_s, time.process_time() - cpu_s


def replay_here(path: Path, repeats: int) -> Replayed:
    """`bench_store.replayed`, in this process."""
    reader = open_reader(path, 0)
    try:
        replays, loads = [], []
        for _ in range(repeats):
            machine, wall_s, cpu_s = _timed(reader)  # the one before goes now, outside the measured time
            replays.append((wall_s, cpu_s))
        blocks = len(machine.state.index)
        began_s = time.perf_counter()
        info = reader.snapshots.save(
            machine.seq, machine.state.epoch, machine.digest(), capture(machine.state)
        )
        save_s = time.perf_counter() - began_s
        for _ in range(repeats):
            machine, wall_s, cpu_s = _timed(reader)
            loads.append((wall_s, cpu_s))
    finally:
        reader.close()
    return Replayed(
        blocks=blocks,
        replay_s=min(replays)[0],
        replay_cpu_s=min(took[1] for took in replays),
        save_s=save_s,
        snapshot_bytes=info.size_bytes,
        load_s=min(loads)[0],
        load_cpu_s=min(took[1] for took in loads),
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(replay_here(Path(sys.argv[1]), int(sys.argv[2]))))
