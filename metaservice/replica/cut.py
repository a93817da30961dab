"""Cuts one snapshot of a SQLite journal: `python -m metaservice.replica.cut PATH SHARD`. Run by the service
itself."""

import sys
from pathlib import Path

from metaservice.core.capture import capture
from metaservice.core.model import Limits
from metaservice.journal.sqlite import open_reader

from .replay import replay


def cut(path: Path, shard: int, limits: Limits) -> int:
    """Replay what is durable, save it as a snapshot; returns its seq. The journal's owner may go on
    appending."""
    reader = open_reader(path, shard)
    try:
        machine = replay(reader, shard, limits)
        state = machine.state
        reader.snapshots.save(state.seq, state.epoch, machine.digest(), capture(state))
        return state.seq
    finally:
        reader.close()


def main(arguments: list[str]) -> int:
    """`sqlite PATH SHARD SHARDS`. A replay decides nothing, so that no limit matters."""
    _, path, shard, shards = arguments
    sys.stdout.write(f"{cut(Path(path), int(shard), Limits())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
