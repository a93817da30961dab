"""What routers that missed something get: replays, snapshots, the same stream after a restart."""

import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from metaservice.journal.errors import JournalTrimmed
from metaservice.journal.sqlite import open_reader
from tests.functional.events_reader import END, Batch, Index, Reader, dealer, decoded
from tests.functional.events_service import (
    EventsService,
    Prompt,
    eventually,
    known,
    running,
    wanted,
)

END_WITHIN_S = 0.1
RING = 32


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventsService]:
    """One whose streams remember few windows."""
    with running(tmp_path_factory.mktemp("replay"), events_ring_windows=RING) as service:
        yield service


def furnished(service: EventsService, name: str, **more: object) -> Reader:
    service.furnish(name, publication={"model": name, **more})
    return service.reader(name)


def fresh(service: EventsService, name: str) -> Index:
    """What a router that was never there knows after one replay from the beginning."""
    view = service.stream(name)
    with Reader(view["endpoint"], view["replay"]) as other:
        other.catch_up(0)
        return other.index


def test_row_01_a_replay_has_topics_and_an_end(service: EventsService) -> None:
    reader = furnished(service, "topics")
    prompt = Prompt(101, 3)
    service.write(prompt, "topics")
    reader.pump(lambda: reader.has(prompt.hashes))
    assert reader.seq is not None
    start = reader.seq - 1
    batches = reader.replayed(start)
    assert [batch.seq for batch in batches][:2] == [start, start + 1]
    assert {batch.topic for batch in batches} == {"kv@pool@topics"}
    mine = {batch.seq: batch for batch in reader.batches}
    assert all(mine.get(batch.seq, batch) == batch for batch in batches), "the very same batches"


@pytest.mark.parametrize(
    "start",
    [0, 1, 2**20 - 1, 2**20, 2**40, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1],
    ids=["0", "1", "below", "first", "ahead", "i64", "beyond i64", "before END", "END"],
)
def test_row_26_every_replay_ends_at_once(service: EventsService, start: int) -> None:
    """A router that never sees END waits for ever."""
    if not any(view["instance"] == "ends" for view in service.streams()):
        service.furnish("ends", publication={"model": "ends"})
    view = service.stream("ends")
    with Reader(view["endpoint"], view["replay"]) as reader:
        reader.replayed(0)
        began_s = time.monotonic()
        reader.replayed(start)
        assert time.monotonic() - began_s < END_WITHIN_S + 0.1, "a stream of next to nothing"


def test_row_26_the_end_comes_while_many_ask_and_blocks_are_written(service: EventsService) -> None:
    reader = furnished(service, "busy")
    for seed in range(4):
        service.write(Prompt(200 + seed, 60), "busy")
    reader.pump(lambda: len(reader.index.blocks) == 240)
    view = service.stream("busy")
    askers = [dealer(view["replay"]) for _ in range(12)]
    for asker in askers:
        asker.send_multipart([b"", bytes(8)])
    service.write(Prompt(210, 60), "busy")
    for asker in askers:
        ended = False
        while not ended:
            assert asker.poll(5_000), "one of many waits for ever"
            ended = asker.recv_multipart()[2] == END
        asker.close()


def test_row_07_who_missed_more_than_is_kept_has_the_exact_state(service: EventsService) -> None:
    """Batches that fell out of the ring come as a snapshot, what was removed meanwhile with it."""
    reader = furnished(service, "rows")
    stays, goes = Prompt(110, 5), Prompt(111, 5)
    service.write(stays, "rows")
    service.write(goes, "rows")
    reader.pump(lambda: reader.has(stays.hashes + goes.hashes))
    view = service.stream("rows")
    with Reader(view["endpoint"], view["replay"]) as sleeper:
        sleeper.pump(lambda: sleeper.has(stays.hashes + goes.hashes))
        service.remove(goes.keys, "rows")
        for seed in range(RING + 8):
            service.write(Prompt(300 + seed, 1), "rows")
            reader.pump(lambda seed=seed: len(reader.index.blocks) == 6 + seed, what="one window each")  # type: ignore[misc]
        late = [sleeper._sub.recv_multipart() for _ in range(3) if sleeper._sub.poll(1_000)]
        assert late and sleeper.seq is not None
        missed = sleeper.replayed(sleeper.seq + 1)
        oldest = min(batch.seq for batch in missed)
        assert oldest > sleeper.seq
        sleeper.catch_up(sleeper.seq + 1)
        assert known(sleeper.index, "EXTERNAL") == known(reader.index, "EXTERNAL")
        assert not sleeper.has(goes.hashes), "what went meanwhile is no ghost"
    assert known(fresh(service, "rows"), "EXTERNAL") == known(reader.index, "EXTERNAL")


def test_row_24_a_snapshot_does_not_hold_up_the_live_stream(service: EventsService) -> None:
    reader = furnished(service, "large", entries_max=100_000)
    for seed in range(20):
        service.write(Prompt(400 + seed, 1_000), "large")
    reader.pump(lambda: len(reader.index.blocks) == 20_000, 30.0)
    view = service.stream("large")
    asker = dealer(view["replay"])
    asker.send_multipart([b"", bytes(8)])
    worst_s = 0.0
    for seed in range(8):
        prompt = Prompt(450 + seed, 1)
        service.write(prompt, "large")
        worst_s = max(worst_s, reader.pump(lambda keys=prompt.hashes: reader.has(keys)))  # type: ignore[misc]
    assert worst_s < 1.0
    index = Index()
    while True:
        assert asker.poll(10_000)
        frames = asker.recv_multipart()
        if frames[2] == END:
            break
        for event in decoded(frames[1:]).events:
            index.take(event)
    asker.close()
    assert len(index.blocks) >= 20_000


@pytest.mark.parametrize("kind", ["stored", "removed", "beats", "many"])
def test_row_13_lost_batches_are_made_good_by_a_replay(service: EventsService, kind: str) -> None:
    name = f"lost-{kind}"
    reader = furnished(service, name)
    lost: list[Batch] = []
    prompt, other = Prompt(120, 4), Prompt(121, 4)
    service.write(prompt, name)
    reader.pump(lambda: reader.has(prompt.hashes))

    def drop(batch: Batch) -> bool:
        types = {event["type"] for event in batch.events}
        mine = {
            "stored": "BlockStored" in types,
            "removed": "BlockRemoved" in types,
            "beats": not types,
            "many": True,
        }[kind]
        if mine and len(lost) < (8 if kind == "many" else 2):
            lost.append(batch)
            return True
        return False

    reader.drop = drop
    service.write(other, name)
    service.remove(prompt.keys[2:], name)
    for seed in range(10 if kind == "many" else 0):
        service.write(Prompt(500 + seed, 1), name)
    goal = 6 + (10 if kind == "many" else 0)

    def settled() -> bool:
        return (
            bool(lost)
            and reader.replays >= 2
            and len(reader.index.blocks) == goal
            and not reader.has(prompt.hashes[3:])
        )

    reader.pump(settled, 15.0, f"the state is as if nothing was lost ({len(lost)} were)")
    assert known(fresh(service, name), "EXTERNAL") == known(reader.index, "EXTERNAL")
    assert wanted(other).items() <= known(reader.index, "EXTERNAL").items()


def test_row_15_a_replay_ends_at_or_behind_what_was_live_when_it_was_asked(service: EventsService) -> None:
    """The batch that showed the gap is in it, or comes next: no hole between the two."""
    reader = furnished(service, "holes")
    for seed in range(12):
        service.write(Prompt(600 + seed, 2), "holes")
        reader.beats(1)
        assert reader.seq is not None
        newest = reader.seq
        numbers = [batch.seq for batch in reader.replayed(newest - 3)]
        assert numbers == [*range(newest - 3, numbers[-1] + 1)] and numbers[-1] >= newest


def test_malformed_replay_requests_are_left_alone(service: EventsService) -> None:
    reader = furnished(service, "odd")
    view = service.stream("odd")
    odd: list[list[bytes]] = [
        [b""],
        [b"", b""],
        [b"", b"1234567"],
        [b"", b"123456789"],
        [b"x", bytes(8)],
        [b"", bytes(8), b"more"],
        [b"", b"\xff" * 4_096],
        [bytes(8)] * 50,
    ]
    for frames in odd:
        asker = dealer(view["replay"])
        asker.send_multipart(frames)
        asker.close(100)
    assert reader.replayed(0)[-1].seq >= (reader.seq or 0), "others are answered"


def test_a_restart_goes_on_where_the_stream_was(tmp_path: Path) -> None:
    """Row 9: seq never falls, a router that was there needs nothing but the replay, and replays have the same
    bytes as before."""
    with running(tmp_path) as service:
        reader = furnished(service, "m1")
        prompt, gone = Prompt(130, 40), Prompt(131, 3)
        service.write(prompt)
        service.write(gone)
        reader.pump(lambda: reader.has(prompt.hashes + gone.hashes))
        service.remove(gone.keys)
        reader.pump(lambda: not reader.has(gone.hashes[:1]))
        assert reader.seq is not None
        newest, before = reader.seq, known(reader.index, "EXTERNAL")
        service.restart()
        service.engine("e-m1", "m1", life="i2")
        reader.pump(lambda: (reader.seq or 0) > newest + 1, 20.0, "it goes on")
        assert known(reader.index, "EXTERNAL") == before == known(fresh(service, "m1"), "EXTERNAL")
        after = Prompt(132, 4, after=prompt)
        service.write(after)
        reader.pump(lambda: reader.has(after.hashes))
        assert known(reader.index, "EXTERNAL") == wanted(prompt) | wanted(after)


@pytest.mark.slow
def test_a_restart_from_a_snapshot_of_the_journal_goes_on_too(tmp_path: Path) -> None:
    with running(tmp_path, snapshot_batches=20, snapshot_check_ms=100) as service:
        reader = furnished(service, "m1")
        prompts = [Prompt(140 + number, 3) for number in range(15)]
        for prompt in prompts:
            service.write(prompt)
        reader.pump(lambda: len(reader.index.blocks) == 45)
        service.remove(prompts[0].keys)
        reader.pump(lambda: len(reader.index.blocks) == 42)
        more = (Prompt(10_000 + number, 1) for number in count())

        def trimmed() -> bool:
            service.write(next(more))
            return is_trimmed(service)

        eventually(trimmed, "the journal begins with a snapshot", 40.0)
        service.write(Prompt(160, 2))
        reader.pump(lambda: reader.has(Prompt(160, 2).hashes))
        newest = reader.seq
        service.restart()
        service.engine("e-m1", "m1", life="i2")
        reader.pump(lambda: (reader.seq or 0) > (newest or 0) + 1, 20.0, "it goes on")
        assert known(fresh(service, "m1"), "EXTERNAL") == known(reader.index, "EXTERNAL")


def test_the_publisher_that_dies_is_started_again_and_misses_nothing(tmp_path: Path) -> None:
    """The replica and its lookups go on without it."""
    with running(tmp_path) as service:
        reader = furnished(service, "m1")
        prompt = Prompt(150, 20)
        service.write(prompt)
        reader.pump(lambda: reader.has(prompt.hashes))
        (child,) = children(service)
        os.kill(child, signal.SIGKILL)
        after = Prompt(151, 5)
        service.write(after)
        assert service.lookup(prompt) == 20 and service.lookup(after) == 5
        reader.pump(lambda: reader.has(after.hashes), 20.0, "the stream is there again")
        assert children(service) != [child]
        assert known(fresh(service, "m1"), "EXTERNAL") == wanted(prompt) | wanted(after)


@pytest.mark.slow
def test_the_publisher_ends_with_its_replica(tmp_path: Path) -> None:
    """One that went on alone would tell routers what it cannot know."""
    with running(tmp_path) as service:
        furnished(service, "m1")
        before = children(service)
        assert len(before) == 1
        service.process.kill()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before), "it is gone", 3.0)
        service.process.start()


def is_trimmed(service: EventsService) -> bool:
    """Whether the journal begins with a snapshot."""
    reader = open_reader(service.process.data / "journal.sqlite", 0)
    try:
        for _ in reader.read(0):
            break
    except JournalTrimmed:
        return True
    finally:
        reader.close()
    return False


def children(service: EventsService) -> list[int]:
    """The processes that the service started and that run."""
    assert service.process.process is not None
    pid = service.process.process.pid
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found
