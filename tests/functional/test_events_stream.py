"""What routers hear of blocks that come and go, from a real service over real sockets."""

import time
from collections.abc import Iterator
from itertools import count, pairwise

import pytest

from tests.functional.events_reader import Reader
from tests.functional.events_service import (
    BLOCK_TOKENS,
    FINGERPRINT,
    HYBRID,
    EventsService,
    Prompt,
    eventually,
    known,
    running,
    wanted,
)

_numbers = count(1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventsService]:
    with running(tmp_path_factory.mktemp("events")) as service:
        yield service


@pytest.fixture
def name() -> str:
    """An instance of the test's own: the service is everybody's."""
    return f"m{next(_numbers)}"


def furnished(service: EventsService, name: str, **more: object) -> Reader:
    """The instance, and a router on its stream of the pool."""
    service.furnish(name, publication={"model": name, **more})
    return service.reader(name)


def test_a_block_is_told_as_the_engine_knows_it(service: EventsService, name: str) -> None:
    reader = furnished(service, name)
    prompt = Prompt(1, 5)
    service.write(prompt, name)
    reader.pump(lambda: reader.has(prompt.hashes), what="the blocks are told")
    assert known(reader.index, "EXTERNAL") == wanted(prompt)
    view = service.stream(name)
    ((batch, event),) = [
        (batch, event) for batch in reader.batches for event in batch.events if event["type"] == "BlockStored"
    ]
    assert batch.topic == f"kv@pool@{name}" == view["topic"]
    assert batch.rank == view["rank"] == 0
    assert abs(time.time() - batch.ts) < 5
    assert event["block_size"] == BLOCK_TOKENS and event["lora_name"] is None
    after = Prompt(2, 3, after=prompt)
    service.write(after, name)
    reader.pump(lambda: reader.has(after.hashes), what="what hangs on them is told")
    assert known(reader.index, "EXTERNAL") == wanted(prompt) | wanted(after)
    assert service.ask("GET", f"/v1/instances/{name}")["announced"] == 8


def test_a_block_is_told_within_a_fraction_of_a_second(service: EventsService, name: str) -> None:
    reader = furnished(service, name)
    slowest_s = 0.0
    for seed in range(5):
        prompt = Prompt(10 + seed, 1)
        service.write(prompt, name)
        slowest_s = max(slowest_s, reader.pump(lambda keys=prompt.hashes: reader.has(keys)))  # type: ignore[misc]
    assert slowest_s < 0.9, "it waited for the next heartbeat"


def test_what_is_removed_is_told_with_all_that_hangs_on_it(service: EventsService, name: str) -> None:
    reader = furnished(service, name)
    prompt, aside = Prompt(3, 6), Prompt(4, 2)
    service.write(prompt, name)
    service.write(aside, name)
    reader.pump(lambda: reader.has(prompt.hashes + aside.hashes))
    service.remove([prompt.keys[5]], name)
    reader.pump(lambda: not reader.has([prompt.hashes[5]]), what="the last one is gone")
    assert reader.has(prompt.hashes[:5])
    service.remove([prompt.keys[2]], name)
    reader.pump(lambda: not reader.has([prompt.hashes[2]]), what="one in the middle is gone")
    reader.pump(lambda: reader.index.hashes() == {*prompt.hashes[:2], *aside.hashes})
    middle = Prompt(3, 6)
    body = {"parents": [prompt.keys[1]], "keys": [prompt.keys[2]], "tokens": [middle.packed[2]]}
    service.finish(service.start(prompt, name, **body), name)
    reader.pump(
        lambda: reader.has(prompt.hashes[:5]), what="it came back, and what hangs on it and is there with it"
    )
    assert known(reader.index, "EXTERNAL") == wanted(aside) | {
        one: told for one, told in wanted(prompt).items() if one != prompt.hashes[5]
    }


def test_a_block_without_tokens_is_never_told(service: EventsService, name: str) -> None:
    reader = furnished(service, name)
    prompt = Prompt(5, 3)
    service.write(prompt, name, tokens=None)
    some = Prompt(6, 4)
    service.write(some, name, tokens=[*some.packed[:2], None, some.packed[3]])
    reader.pump(lambda: reader.has(some.hashes[:2]))
    reader.beats(2)
    assert reader.index.hashes() == set(some.hashes[:2])
    assert service.lookup(prompt, name) == 3 and service.lookup(some, name) == 4


def test_row_04_a_block_waits_for_its_parent(service: EventsService, name: str) -> None:
    """Parents may be written after their children: a router would drop the child."""
    reader = furnished(service, name)
    prompt = Prompt(7, 4)
    late = {"keys": prompt.keys[2:], "tokens": prompt.packed[2:], "parent": prompt.keys[1]}
    service.finish(service.start(prompt, name, **late), name)
    reader.beats(2)
    assert reader.index.hashes() == set()
    early = {"keys": prompt.keys[:2], "tokens": prompt.packed[:2]}
    service.finish(service.start(prompt, name, **early), name)
    reader.pump(lambda: reader.has(prompt.hashes), what="all of it is told")
    assert known(reader.index, "EXTERNAL") == wanted(prompt)


def test_row_10_stores_that_repeat_are_told_once(service: EventsService, name: str) -> None:
    reader = furnished(service, name)
    prompt = Prompt(8, 4)
    service.write(prompt, name)
    for _ in range(3):
        again = service.start(prompt, name)
        assert again["session"] is None, "present: nothing to write"
    reader.pump(lambda: reader.has(prompt.hashes))
    reader.beats(3)
    assert reader.index.stored == 4, "who counts would need as many removals"
    service.remove(prompt.keys[3:], name)
    reader.pump(lambda: not reader.has(prompt.hashes[3:]))
    reader.beats(2)
    assert reader.index.hashes() == set(prompt.hashes[:3]) and reader.index.stored == 4


def test_row_17_only_the_main_attention_is_told(service: EventsService, name: str) -> None:
    service.furnish(name, publication={"model": name}, fingerprint=HYBRID)
    reader = service.reader(name)
    prompt, window = Prompt(9, 3), Prompt(20, 3)
    service.write(prompt, name)
    for group in ("swa", "mamba"):
        service.write(prompt, name, group=group)
        service.write(window, name, group=group)
    reader.pump(lambda: reader.has(prompt.hashes))
    reader.beats(2)
    assert known(reader.index, "EXTERNAL") == wanted(prompt)
    assert reader.index.stored == 3


def test_row_19_the_same_tokens_under_two_adapters_are_three_entries(
    service: EventsService, name: str
) -> None:
    reader = furnished(service, name)
    prompts = [Prompt(21, 2, lora=lora) for lora in ("", "sql-helper", "poet")]
    for prompt in prompts:
        service.write(prompt, name)
    reader.pump(lambda: len(reader.index.blocks) == 6)
    adapters = {reader.index.blocks[prompt.hashes[0], "EXTERNAL"].lora for prompt in prompts}
    assert adapters == {None, "sql-helper", "poet"}


def test_row_20_a_salt_is_told_so_that_nobody_else_matches(service: EventsService, name: str) -> None:
    reader = furnished(service, name)
    salted, plain = Prompt(22, 3, salt="tenant-7"), Prompt(22, 3)
    service.write(salted, name)
    service.write(plain, name)
    reader.pump(lambda: reader.has(salted.hashes + plain.hashes))
    assert {reader.index.blocks[one, "EXTERNAL"].salt for one in salted.hashes} == {"tenant-7"}
    assert {reader.index.blocks[one, "EXTERNAL"].salt for one in plain.hashes} == {""}
    assert not set(salted.hashes) & set(plain.hashes)


def test_an_instance_that_retires_is_told_as_gone(service: EventsService, name: str) -> None:
    reader = furnished(service, name)
    prompt = Prompt(23, 70)
    service.write(prompt, name)
    reader.pump(lambda: reader.has(prompt.hashes))
    service.ask("DELETE", f"/v1/instances/{name}")
    reader.pump(lambda: not reader.index.blocks, what="all of it is told as removed")


def test_publication_may_begin_and_end_while_blocks_are_there(service: EventsService, name: str) -> None:
    """What was written with its tokens while the instance was announced is told again when it is announced
    again; tokens that came while it was not were not kept."""
    reader = furnished(service, name)
    group = service.ask("GET", f"/v1/instances/{name}")["group"]
    prompt, between = Prompt(24, 9), Prompt(36, 3)
    service.write(prompt, name)
    reader.pump(lambda: reader.has(prompt.hashes))
    service.put_instance(name, group, None, FINGERPRINT)
    reader.pump(lambda: not reader.index.blocks, what="it is all taken back")
    service.write(between, name)
    assert service.ask("GET", f"/v1/instances/{name}")["announced"] == 0
    service.put_instance(name, group, {"model": name}, FINGERPRINT)
    again = service.reader(name)
    again.pump(lambda: again.has(prompt.hashes), what="what was told before is told again")
    again.beats(2)
    assert known(again.index, "EXTERNAL") == wanted(prompt)
    assert service.lookup(between, name) == 3


@pytest.mark.slow
def test_no_more_than_the_budget_is_told_and_what_is_asked_for_stays(
    service: EventsService, name: str
) -> None:
    reader = furnished(service, name, entries_max=20)
    hot, cold = Prompt(25, 8), Prompt(26, 8)
    service.write(hot, name)
    service.write(cold, name)
    reader.pump(lambda: reader.has(hot.hashes + cold.hashes))
    time.sleep(0.01)
    assert service.lookup(hot, name) == 8
    time.sleep(0.01)
    new = Prompt(27, 10)
    service.write(new, name)
    reader.pump(lambda: reader.has(new.hashes), what="what is new is told")
    assert len(reader.index.blocks) <= 20
    assert reader.has(hot.hashes), "what was asked for last stays"
    left = reader.index.hashes() & set(cold.hashes)
    assert left == set(cold.hashes[: len(left)]), "leaves go first"
    time.sleep(0.01)
    assert service.lookup(cold, name) == 8, "it is still there for those who ask"
    reader.pump(lambda: reader.has(cold.hashes), what="what is asked for comes back")
    assert len(reader.index.blocks) <= 20
    most = 0
    for at, batch in enumerate(reader.batches):
        stored = sum(len(e["block_hashes"]) for e in batch.events if e["type"] == "BlockStored")
        removed = sum(len(e["block_hashes"]) for e in batch.events if e["type"] == "BlockRemoved")
        most += stored - removed
        assert most <= 20, f"batch {at}"


def test_a_smaller_budget_is_kept_before_long(service: EventsService, name: str) -> None:
    reader = furnished(service, name)
    prompt = Prompt(28, 30)
    service.write(prompt, name)
    reader.pump(lambda: reader.has(prompt.hashes))
    group = service.ask("GET", f"/v1/instances/{name}")["group"]
    service.put_instance(name, group, {"model": name, "entries_max": 10}, FINGERPRINT)
    reader.pump(lambda: reader.index.hashes() == set(prompt.hashes[:10]), what="leaves went")


def test_row_08_every_stream_beats(service: EventsService, name: str) -> None:
    """An empty batch at least each second: who joined late, or missed the last batch, finds out by it."""
    reader = furnished(service, name)
    reader.drain(3.2)
    times = [batch.ts for batch in reader.batches]
    assert all(after - before < 1.1 for before, after in pairwise(times)), times
    assert [batch.events for batch in reader.batches] == [[]] * len(times)
    assert 3 <= len(times) < 15, "and not many more"


def test_all_of_an_instance_is_told_again_when_somebody_asks(service: EventsService, name: str) -> None:
    reader = furnished(service, name)
    prompt = Prompt(29, 100)
    service.write(prompt, name)
    reader.pump(lambda: reader.has(prompt.hashes))
    stored = reader.index.stored
    answer = service.ask("POST", f"/v1/instances/{name}/restate", {})
    assert answer["blocks"] == 100
    reader.pump(lambda: reader.index.stored == stored + 100, what="told again")
    assert reader.index.removed == 200, "each time after it was told as removed"
    assert known(reader.index, "EXTERNAL") == wanted(prompt)
    reader.beats(2)
    assert reader.index.stored == stored + 100, "once is enough"


def test_row_05_a_block_that_moves_to_another_tier_is_never_a_dead_entry(
    service: EventsService, name: str
) -> None:
    """Gone from memory and written to the disk of all: `CPU` is told as removed, `EXTERNAL` as stored, and
    nothing of the old place stays behind."""
    node = f"n-{name}"
    service.furnish(name, storages=[f"mem@{node}", "pool"], publication={"model": name})
    service.engine(f"e-{name}", name, node=node)
    service.worker(f"k-{name}", [f"mem-{node}"])
    pool = service.reader(name)
    near = service.reader(name, node, parents=[pool])
    prompt = Prompt(30, 4)
    started = service.start(prompt, name)
    service.finish(started, name)
    near.pump(lambda: near.has(prompt.hashes, "CPU"), what="they are in the node's memory")
    assert not pool.index.blocks
    service.ask("PUT", f"/v1/switches/storage/mem-{node}", {"mode": "read_only", "reason": "test"})
    service.remove(prompt.keys, name)
    service.write(prompt, name)
    pool.pump(lambda: pool.has(prompt.hashes, "EXTERNAL"), what="they are in the pool")
    near.pump(lambda: not near.index.blocks, what="they are told as removed from memory")
    assert known(pool.index, "EXTERNAL") == wanted(prompt)


def test_a_node_s_tiers_are_told_to_that_node_s_engines_only(service: EventsService, name: str) -> None:
    service.furnish(name, storages=["disk@n1", "disk@n2"], publication={"model": name})
    service.engine(f"e-{name}", name, node="n1")
    service.engine(f"f-{name}", name, node="n2")
    eventually(
        lambda: {one["node"] for one in service.streams(name)} == {"", "n1", "n2"}, "there are three streams"
    )
    first, second = service.reader(name, "n1"), service.reader(name, "n2")
    prompt = Prompt(31, 2)
    service.write(prompt, name)
    first.pump(lambda: first.has(prompt.hashes, "STORAGE"))
    second.beats(2)
    assert not second.index.blocks
    assert first.batches[-1].topic == f"kv@n1@{name}"


def test_row_18_a_stream_a_rank(service: EventsService, name: str) -> None:
    """One source a (worker, rank): each stream's batches carry its own rank, at its own port."""
    service.furnish(name, publication={"model": name})
    service.engine(f"f-{name}", name, rank=3)
    readers = {rank: service.reader(name, rank=rank) for rank in (0, 3)}
    ports = [view["endpoint"] for view in service.streams()] + [view["replay"] for view in service.streams()]
    assert len(set(ports)) == len(ports)
    prompt = Prompt(32, 2)
    service.write(prompt, name)
    for rank, reader in readers.items():
        reader.pump(lambda reader=reader: reader.has(prompt.hashes))  # type: ignore[misc]
        assert {batch.rank for batch in reader.batches} == {rank}


def test_the_stream_is_the_same_for_everybody(service: EventsService, name: str) -> None:
    """Two routers that joined at different times, and one that asks for a replay, have the same bytes."""
    first = furnished(service, name)
    prompt = Prompt(33, 130)
    service.write(prompt, name)
    first.pump(lambda: first.has(prompt.hashes))
    second = service.reader(name)
    second.pump(lambda: second.has(prompt.hashes), what="who joins late is told all of it")
    after = Prompt(34, 5)
    service.write(after, name)
    for reader in (first, second):
        reader.pump(lambda reader=reader: reader.has(after.hashes))  # type: ignore[misc]
    assert known(first.index, "EXTERNAL") == known(second.index, "EXTERNAL")
    assert second.replays == 1
    common = {batch.seq: batch for batch in first.batches}
    assert all(common.get(batch.seq, batch) == batch for batch in second.batches)


def test_metrics_say_what_was_published(service: EventsService, name: str) -> None:
    before = service.metric("ucm_meta_events_blocks_total")
    reader = furnished(service, name)
    prompt = Prompt(35, 12)
    service.write(prompt, name)
    reader.pump(lambda: reader.has(prompt.hashes))
    eventually(
        lambda: service.metric("ucm_meta_events_blocks_total") >= before + 12, "the metric counts them"
    )
