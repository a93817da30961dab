"""Cuts one snapshot of a shard's journal, in a process of its own. Run by the service itself:

python -m metaservice.replica.cut sqlite PATH SHARD SHARDS
python -m metaservice.replica.cut postgres SCHEMA SHARD SHARDS     (the DSN is in UCM_POSTGRES_DSN)
"""

import os
import sys
from pathlib import Path

from metaservice.core.capture import capture
from metaservice.core.machine import Machine
from metaservice.core.model import Limits
from metaservice.journal import postgres, sqlite
from metaservice.journal.errors import CorruptSnapshot
from metaservice.journal.port import JournalReader
from metaservice.journal.postgres_settings import PostgresSettings

from .replay import replay

DSN_VARIABLE = "UCM_POSTGRES_DSN"
"""A secret: arguments are seen by everybody on the machine, the environment is not."""


def cut(reader: JournalReader, shard: int, shards: int) -> int:
    """Replay what is durable, save it as a snapshot; returns its seq. The journal's owner may go on
    appending.

    What is saved was restored once, to the same digest, before anybody can see it: a snapshot that does not
    lead back to its state must never let the journal behind it be trimmed.
    """
    limits = Limits()  # a replay decides nothing, so that no limit matters
    machine = replay(reader, shard, limits, shards)
    seq, epoch, digest = machine.seq, machine.state.epoch, machine.digest()
    chunks = list(capture(machine.state))
    del machine
    if Machine.restore(chunks, shard, limits, shards).digest() != digest:
        raise CorruptSnapshot(f"of seq {seq}", "it restores to another digest than that of its state")
    reader.snapshots.save(seq, epoch, digest, chunks)
    return seq


def main(arguments: list[str]) -> int:
    """See the module."""
    kind, where, shard, shards, *way = arguments
    if kind == "postgres":
        timeout_ms, through = way
        settings = PostgresSettings(
            os.environ[DSN_VARIABLE], where, int(timeout_ms), pooler=through == "pooler"
        )
        reader: JournalReader = postgres.open_reader(settings, int(shard))
    else:
        reader = sqlite.open_reader(Path(where), int(shard))
    try:
        sys.stdout.write(f"{cut(reader, int(shard), int(shards))}\n")
    finally:
        reader.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
