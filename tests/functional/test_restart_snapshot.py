"""Snapshots cut beside the running service: the journal is trimmed, and a restart finds what was served."""

import logging
import random
from pathlib import Path

import pytest

from metaservice.core import commands as cmd
from metaservice.core.machine import Machine
from metaservice.core.replies import Started
from metaservice.journal.codec import decode_batch
from metaservice.journal.errors import JournalTrimmed
from metaservice.journal.port import JournalReader
from metaservice.journal.sqlite import open_reader
from metaservice.replica.replay import replay
from metaservice.replica.shard import Shard
from metaservice.replica.snapshot import SnapshotKeeper
from tests.unit.replica_house import LIMITS, Bench, chain, fill, finish_of, furnish, hits, remove_of, start_of

BATCHES_MAX = 40


def keeper_of(bench: Bench) -> SnapshotKeeper:
    """What the service makes of `--snapshot-batches 40`, looking more often."""
    command = ["-m", "metaservice.replica.cut", "sqlite", str(bench.path), "0", "1"]
    return SnapshotKeeper(command, batches_max=BATCHES_MAX, check_s=0.05)


def is_trimmed(reader: JournalReader) -> bool:
    try:
        for _ in reader.read(0):
            break
    except JournalTrimmed:
        return True
    return False


class Writer:
    """Writes, aborts, removes and abandons at random; knows which blocks must be there."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.serving: set[bytes] = set()
        self.number = 0

    async def step(self, shard: Shard) -> None:
        keys = chain(self.rng.randint(1, 8), self.number)
        self.number += 10
        act = self.rng.random()
        if act < 0.7 or not self.serving:
            await fill(shard, keys)
            self.serving.update(keys)
        elif act < 0.8:
            started: Started = await shard.submit(start_of(keys, f"r{self.number}"))
            assert started.session is not None
            await shard.submit(cmd.Abort(session=started.session, engine="e", incarnation="x"))
        elif act < 0.9:
            await shard.submit(start_of(keys))
        else:
            gone = self.rng.sample(sorted(self.serving), min(5, len(self.serving)))
            await shard.submit(remove_of(gone, f"r{self.number}"))
            self.serving.difference_update(gone)


async def write_until_trimmed(bench: Bench, shard: Shard, writer: Writer) -> None:
    reader = open_reader(bench.path, 0)
    try:
        while not is_trimmed(reader):
            assert writer.number < 100_000, "the journal was never trimmed"
            await writer.step(shard)
    finally:
        reader.close()


async def test_d5_restart_from_snapshot_and_tail_is_what_was_served(tmp_path: Path, seed: int) -> None:
    bench = Bench("sqlite", tmp_path)
    writer = Writer(seed)
    async with bench.leading(keeper_of(bench)) as shard:
        await furnish(shard)
        started: Started = await shard.submit(start_of(chain(3, 1_000_000), "first"))
        finished = await shard.submit(finish_of(started, "second"))
        removed = await shard.submit(remove_of(chain(1, 1_000_002), "third"))
        await write_until_trimmed(bench, shard, writer)
        for _ in range(20):
            await writer.step(shard)
        machine = shard.machine
    machine.check()
    whole = Machine(0, LIMITS)
    for payload in bench.gate.payloads:
        for event in decode_batch(payload):
            whole.apply(event)
    reader = open_reader(bench.path, 0)
    again = replay(reader, 0, LIMITS)
    kept = reader.size().batches
    trimmed_seq = bench.gate.appended[-kept][0] - 1
    assert trimmed_seq > BATCHES_MAX // 2
    assert (
        sum(1 for _ in reader.read(trimmed_seq)) == kept
    )  # trimmed at the end of a batch, and no hole behind it
    reader.close()
    assert again.seq == whole.seq == machine.seq
    assert again.digest() == whole.digest() == machine.digest()
    async with bench.leading() as shard:
        keys = sorted(writer.serving)
        assert hits(shard, keys) == len(keys)
        shard.machine.check()
        # I7: what a snapshot says of answered requests is as good as the journal.
        assert await shard.submit(start_of(chain(3, 1_000_000), "first")) == started
        assert await shard.submit(finish_of(started, "second")) == finished
        assert await shard.submit(remove_of(chain(1, 1_000_002), "third")) == removed
        assert hits(shard, chain(3, 1_000_000)) == 2


async def test_a_damaged_newest_snapshot_is_passed_over(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench("sqlite", tmp_path)
    writer = Writer(seed)
    async with bench.leading(keeper_of(bench)) as shard:
        await furnish(shard)
        await write_until_trimmed(bench, shard, writer)
        machine = shard.machine
    newest = max(tmp_path.rglob("snapshot-*.ucm"))
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    reader = open_reader(bench.path, 0)
    assert replay(reader, 0, LIMITS).digest() == machine.digest()
    reader.close()
    with caplog.at_level(logging.ERROR):
        async with bench.leading() as shard:
            keys = sorted(writer.serving)
            assert hits(shard, keys) == len(keys)
    assert "was passed over" in caplog.text
    assert newest.name in caplog.text
