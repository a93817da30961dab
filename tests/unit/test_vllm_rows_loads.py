"""Bugs that users of other connectors reported, about what is read: shown on fake engines with the real
connector, service and storages. Rows are those of the list of reports."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.engine_request import Status
from tests.engines.fake_engine import FakeEngine
from tests.engines.ground import Ground, files_of
from tests.engines.oracle import Shape, block_keys
from tests.engines.row_house import BLOCKS, DOCUMENT, row_house, until

TWO_RANKS = Shape(ranks=2)
WINDOW = Shape(windows=(0, 7))


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    logging.getLogger("ucm.vllm").setLevel(logging.ERROR)
    made = Ground(tmp_path_factory.mktemp("loads"))
    yield made
    made.close()


@pytest.mark.parametrize("shape", [Shape(), TWO_RANKS, WINDOW, Shape(windows=(9,))])
@pytest.mark.parametrize("load", ["async", "sync"])
def test_row29_what_one_engine_stores_another_reads_back(ground: Ground, shape: Shape, load: str) -> None:
    if load == "sync" and shape.windows != (0,):
        load = "async"
    with row_house(ground, shape) as house:
        house.filled(load=load)
        reader = house.engine("reader", load=load)
        reader.serve("r", DOCUMENT, 5)
        reader.settle()
        counts = reader.counted()
        assert counts["loaded_blocks"] == BLOCKS
        assert reader.engine.scheduler.loaded_tokens == BLOCKS * 4


def test_row02_a_rank_that_did_not_store_its_part_makes_the_block_nobodys(ground: Ground) -> None:
    with row_house(ground, TWO_RANKS) as house:
        writer = house.engine("writer")
        house.fail_writes(writer, rank=1)
        writer.serve("w", DOCUMENT, 1)
        writer.settle()
        assert house.stored() == 0
        reader = house.engine("reader")
        reader.serve("r", DOCUMENT, 3)
        assert reader.engine.scheduler.loaded_tokens == 0


def test_row32_a_block_serves_with_the_last_of_its_parts_whoever_holds_them(ground: Ground) -> None:
    """Parts of stages are counted like parts of ranks."""
    ground.group("stages")
    parts = [{"name": f"pp{stage}-tp{rank}", "bytes": 8} for stage in range(2) for rank in range(2)]
    fingerprint = {
        "model": "m", "kv_dtype": "bytes", "block_size_tokens": 4, "key_length": 32, "hash_scheme": "sha256",
        "groups": [{"name": "full"}], "parts": [{**part, "group": "full"} for part in parts],
    }  # fmt: skip
    client = ground.client
    client.put_instance("stages", "g-stages", fingerprint)
    client.register_engine("stages-e", instance="stages", keepalive=None)
    keys = block_keys(Shape(), DOCUMENT)
    started = client.start_write("stages", keys)
    for last, part in enumerate(str(part["name"]) for part in parts):
        assert client.lookup("stages", keys).hits == 0, last
        done = client.finish(
            started, started.locations, started.generations, parts=[part], checksums=[1] * len(keys)
        )
        assert done.failure is None
    assert client.lookup("stages", keys).hits == len(keys)


@pytest.mark.parametrize("rank", [0, 1])
def test_row03_one_ranks_lost_bytes_shorten_the_hit_of_every_engine(ground: Ground, rank: int) -> None:
    with row_house(ground, TWO_RANKS) as house:
        house.filled()
        house.file_of(6, part=rank).unlink()
        finder, other = house.engine("finder"), house.engine("other")
        finder.serve("f", DOCUMENT, 3)
        # It stores what it had to compute; before that, nobody is told of the lost block again.
        until(lambda: finder.counted().get("removed_blocks", 0) >= 1, what="the removal")
        finder.settle()
        other.serve("o", DOCUMENT, 3)
        other.settle()
        assert finder.counted()["failed_blocks"] >= 1
        assert other.counted().get("failed_blocks", 0) == 0


def test_row04_a_rank_that_cannot_load_ends_the_wait_of_all_at_once(ground: Ground) -> None:
    with row_house(ground, TWO_RANKS) as house:
        house.filled()
        reader = house.engine("reader", load_wait_ms=15_000)
        mover = reader.workers[1]._mover
        setattr(mover, "read", lambda refs, buffers: ["io_error"] * len(refs))  # noqa: B010
        began_s = time.monotonic()
        reader.serve("r", DOCUMENT, 3)
        assert time.monotonic() - began_s < 5
        reader.settle()
        assert reader.counted().get("loaded_blocks", 0) == 0


def test_row04_a_rank_that_hangs_is_waited_for_a_bounded_time(ground: Ground) -> None:
    with row_house(ground, TWO_RANKS) as house:
        house.filled()
        reader = house.engine("reader", load_wait_ms=300)
        house.hold_reads(reader, rank=1)
        began_s = time.monotonic()
        reader.serve("r", DOCUMENT, 3)
        assert 0.3 <= time.monotonic() - began_s < 5
        assert reader.counted()["loads_late"] == 1


def test_row05_blocks_that_are_evicted_between_lookup_and_load_stay_readable(ground: Ground) -> None:
    """The lease, not luck: everything is removed, and a worker deletes what it may."""
    with row_house(ground) as house:
        house.filled()
        stop = ground.start_worker(f"w-{house.group}", f"s-{house.group}")
        reader = house.engine("reader")
        gate = house.hold_reads(reader)
        reader.ask("r", DOCUMENT, 3)
        reader.step_until(gate.reached.is_set, what="the load")
        removed = ground.client.remove(house.instance, block_keys(Shape(), DOCUMENT))
        assert removed.removed == BLOCKS and house.stored() == 0
        time.sleep(0.4)  # many times the reclaim delay of this service
        assert len(files_of(house.root)) == BLOCKS
        gate.open()
        reader.run()
        reader.settle()
        assert reader.counted()["loaded_blocks"] == BLOCKS
        until(lambda: len(files_of(house.root)) <= 1, what="the deletion, once the lease was over")
        stop.set()


def test_row06_a_load_uses_the_answer_it_was_promised_from(ground: Ground) -> None:
    """A request that waits for room for many steps is asked about again and again: one lookup, one lease."""
    with row_house(ground) as house:
        house.filled()
        reader = house.engine("reader", blocks=20, reserve_whole=False, running_max=4)
        reader.ask("long", [1, 2, 3] * 9, 24)
        for _ in range(3):
            reader.engine.step()
        reader.ask("r", DOCUMENT, 4)
        reader.run()
        reader.settle()
        assert reader.face.asked > 10
        assert reader.wire.count(b"/lookup") <= 2 + reader.engine.scheduler.preemptions


def test_row07_a_prefix_that_is_in_memory_already_holds_no_lease(ground: Ground) -> None:
    with row_house(ground) as house:
        first = house.filled()
        first.serve("again", DOCUMENT, 3)
        until(lambda: not house.leases(), what="the end of the lease")
        assert first.engine.scheduler.loaded_tokens == 0


@pytest.mark.parametrize("when", ["asked", "answered", "loading", "running"])
def test_row07_row18_an_abort_at_any_moment_leaves_no_lease_and_no_late_report(
    ground: Ground, when: str
) -> None:
    with row_house(ground) as house:
        house.filled()
        reader = house.engine("reader")
        gate = house.hold_reads(reader)
        if when == "asked":
            reader.wire.delay_s = 0.1
        reader.ask("r", DOCUMENT, 9)
        if when == "asked":
            for _ in range(20):
                reader.engine.step()
        elif when == "answered":
            until(lambda: reader.broker.answer("r#1") is not None, what="the answer")
        else:
            reader.step_until(gate.reached.is_set, what="the load")
        if when == "running":
            gate.open()
            reader.step_until(lambda: reader.engine.scheduler.running, what="the request's start")
        reader.engine.abort("r", within_step=when == "running")
        for _ in range(5):
            reader.pump()
        gate.open()
        reader.run()
        reader.settle()
        reader.engine.check_idle()
        assert reader.engine.outcomes["r"].status == Status.aborted
        assert not house.leases()


@pytest.mark.parametrize("shape", [Shape(), TWO_RANKS, WINDOW])
@pytest.mark.parametrize("load", ["async", "sync"])
def test_row12_row13_blocks_that_cannot_be_read_are_computed_and_right(
    ground: Ground, shape: Shape, load: str
) -> None:
    """Every block is damaged. (That the V2 model runner of a GPU computes them right is not shown here.)"""
    if load == "sync" and shape is WINDOW:
        load = "async"
    with row_house(ground, shape) as house:
        house.filled(load=load)
        for path in files_of(house.root):
            path.write_bytes(path.read_bytes()[:-3])
        reader = house.engine("reader", load=load)
        reader.serve("r", DOCUMENT, 6)
        reader.settle()
        counts = reader.counted()
        assert counts.get("loaded_blocks", 0) == 0 and counts["failed_blocks"] == BLOCKS


def test_row13_with_policy_fail_the_request_ends_in_an_error_and_nothing_else_does(ground: Ground) -> None:
    with row_house(ground) as house:
        house.filled()
        house.file_of(4).unlink()
        reader = house.engine("reader", recompute=False)
        reader.ask("r", DOCUMENT, 6)
        reader.ask("other", (5, 4, 3, 2, 1, 2, 3), 3)
        reader.run()
        assert reader.engine.outcomes["r"].status == Status.error
        assert reader.engine.outcomes["other"].status == Status.stopped


def test_row14_a_load_that_fails_half_way_keeps_the_front_and_computes_the_tail(ground: Ground) -> None:
    with row_house(ground) as house:
        house.filled()
        path = house.file_of(3)
        path.write_bytes(path.read_bytes()[:-1])
        reader = house.engine("reader")
        reader.serve("r", DOCUMENT, 6)
        reader.settle()
        counts = reader.counted()
        assert (counts["loaded_blocks"], counts["failed_blocks"]) == (3, 7)


def test_row15_row34_only_whole_blocks_are_loaded_wherever_the_local_prefix_ends(ground: Ground) -> None:
    """The fake engine refuses anything else; lengths and local prefixes of every remainder."""
    with row_house(ground) as house:
        house.filled()
        for length in (1, 4, 5, 8, 9, 13, 16, 17, 18):
            reader = house.engine(f"r{length}")
            reader.serve("warm", DOCUMENT[: max(1, length // 2)], 1)
            reader.serve("r", DOCUMENT[:length], 3)
            reader.settle()
            assert reader.engine.scheduler.loaded_tokens <= (length - 1) // 4 * 4
            reader.close()


def test_row16_another_blocks_bytes_under_a_blocks_name_are_refused(ground: Ground) -> None:
    with row_house(ground) as house:
        house.filled()
        one, two = house.file_of(2), house.file_of(5)
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
        reader = house.engine("reader")
        reader.serve("r", DOCUMENT, 6)
        reader.settle()
        assert reader.counted()["loaded_blocks"] == 2


def test_row25_a_block_that_one_group_misses_is_no_hit_in_any(ground: Ground) -> None:
    with row_house(ground, WINDOW) as house:
        house.filled()
        house.file_of(BLOCKS - 1, part=1).unlink()
        reader = house.engine("reader")
        reader.serve("r", DOCUMENT, 4)
        reader.settle()
        assert reader.counted().get("loaded_blocks", 0) == 0


def test_row25_a_window_loads_only_what_it_can_still_see(ground: Ground) -> None:
    with row_house(ground, WINDOW) as house:
        house.filled()
        reader = house.engine("reader")
        reader.serve("r", DOCUMENT, 4)
        reader.settle()
        (pages,) = reader.pages
        assert reader.counted()["loaded_blocks"] == BLOCKS
        assert pages.scattered == BLOCKS + 2  # a window of 7 tokens reaches back into two blocks


def test_row26_several_groups_tell_failed_requests_and_never_block_numbers(ground: Ground) -> None:
    """The fake engine ends, as vLLM does, at a block number from a model of several groups."""
    with row_house(ground, WINDOW) as house:
        house.filled()
        house.file_of(0).unlink()
        reader = house.engine("reader")
        assert reader.serve("r", DOCUMENT, 6)
        reader.settle()
        assert reader.counted()["failed_blocks"] == BLOCKS


def test_row28_a_lease_that_ran_out_before_the_load_is_noticed(ground: Ground) -> None:
    """Behind the engine's back its lease ends, the blocks go, and their places hold others by the time it
    reads."""
    with row_house(ground) as house:
        house.filled()
        stop = ground.start_worker(f"w-{house.group}", f"s-{house.group}")
        reader = house.engine("reader", lease_ms=300)
        gate = house.hold_reads(reader)
        reader.ask("r", DOCUMENT, 6)
        reader.step_until(gate.reached.is_set, what="the load")
        reader.wire.cut()  # it renews nothing any more
        ground.client.remove(house.instance, block_keys(Shape(), DOCUMENT))
        until(lambda: not files_of(house.root), what="the deletion")
        other = house.engine("other")
        other.serve("o", tuple(reversed(DOCUMENT)), 1)
        other.settle()
        gate.open()
        reader.wire.mend()
        reader.run()
        assert reader.counted().get("loaded_blocks", 0) == 0
        stop.set()


@pytest.mark.parametrize("blocks", [129, 257, 1_025])
def test_row30_long_prefixes_are_right_across_every_batch_limit(ground: Ground, blocks: int) -> None:
    prompt = tuple((number * number + 5) % 251 for number in range(blocks * 4 + 1))
    with row_house(ground) as house:
        more: dict[str, Any] = {"blocks": blocks + 40, "budget_tokens": 2_048}
        house.filled(prompt=prompt, **more)
        reader = house.engine("reader", **more)
        reader.serve("r", prompt, 3)
        reader.settle()
        assert reader.counted()["loaded_blocks"] == blocks


def test_a_fleet_without_the_service_gives_the_same_tokens(ground: Ground) -> None:
    with row_house(ground) as house:
        house.filled()
        reader = house.engine("reader", lookup_wait_ms=100, timeout_ms=100)
        reader.wire.cut()
        assert reader.serve("r", DOCUMENT, 4) == reader.asked["r"].right(Shape())
        reader.wire.mend()
        until(
            lambda: (
                reader.serve(f"r{time.monotonic_ns()}", tuple(reversed(DOCUMENT)), 1)
                and reader.counted().get("lookup_calls", 0)
            ),
            what="the return of the service",
        )


def test_the_same_requests_without_a_connector_give_the_same_tokens() -> None:
    engine = FakeEngine(WINDOW)
    engine.add("r", DOCUMENT, 6)
    engine.run()
    with_it = FakeEngine(Shape(windows=(0, 7)))
    with_it.add("r", DOCUMENT, 6)
    with_it.run()
    assert engine.outcomes["r"].outputs == with_it.outcomes["r"].outputs
