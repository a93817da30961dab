"""Bugs that users of other connectors reported, about what is stored and for whom: shown on fake engines with
the real connector, service and storages. Rows are those of the list of reports."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread, Timer

import pytest

from engine_adapters.vllm.known import KEYS_MAX, KnownKeys
from tests.engines.engine_request import Adapter
from tests.engines.ground import Ground
from tests.engines.oracle import Shape, block_keys
from tests.engines.row_house import BLOCKS, DOCUMENT, row_house, until

OTHER = tuple((11 * number + 1) % 251 for number in range(41))


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    logging.getLogger("ucm.vllm").setLevel(logging.ERROR)
    made = Ground(tmp_path_factory.mktemp("saves"))
    yield made
    made.close()


def test_row01_a_store_that_failed_is_seen_by_nobody_and_can_be_done_again(ground: Ground) -> None:
    with row_house(ground) as house:
        writer = house.engine("writer")
        write = writer.workers[0]._mover.write
        house.fail_writes(writer)
        writer.serve("w", DOCUMENT, 1)
        writer.settle()
        assert house.stored() == 0
        setattr(writer.workers[0]._mover, "write", write)  # noqa: B010
        writer.serve("again", DOCUMENT, 1)
        writer.settle()
        assert house.stored() == BLOCKS


def test_row08_a_writer_that_dies_loses_its_blocks_to_the_next_and_its_late_finish_is_refused(
    ground: Ground,
) -> None:
    with row_house(ground) as house:
        dying = house.engine("dying", write_ttl_ms=300)
        gate = house.hold_writes(dying)
        dying.serve("d", DOCUMENT, 1)
        assert gate.reached.wait(5)
        dying.kill()
        heir = house.engine("heir")
        began_s = time.monotonic()
        until(lambda: heir.serve(f"h{time.monotonic_ns()}", DOCUMENT, 1) and house.stored() == BLOCKS)
        assert time.monotonic() - began_s < 6
        heir.settle()
        before = house.ground.stored(house.instance, block_keys(house.shape, DOCUMENT))
        dying.wire.mend()  # a machine that comes back and goes on where it stood
        gate.open()
        until(lambda: not ground.sessions_open(), what="the end of all sessions")
        time.sleep(0.1)
        assert house.ground.stored(house.instance, block_keys(house.shape, DOCUMENT)) == before


def test_row09_two_writers_of_the_same_blocks_store_each_once(ground: Ground) -> None:
    with row_house(ground) as house:
        pair = [house.engine("a"), house.engine("b")]
        gates = [house.hold_writes(each) for each in pair]
        threads = [Thread(target=each.serve, args=("same", DOCUMENT, 1)) for each in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        until(lambda: any(gate.reached.is_set() for gate in gates))
        for gate in gates:
            gate.open()
        for each in pair:
            each.settle()
        counts = [each.counted() for each in pair]
        assert sum(each.get("saved_blocks", 0) for each in counts) == BLOCKS
        others = ("present_blocks", "dropped_blocks", "found_blocks")
        assert sum(each.get(name, 0) for each in counts for name in others) >= BLOCKS
        assert house.stored() == BLOCKS


def test_row17_blocks_that_are_taken_back_before_they_were_copied_are_never_stored(ground: Ground) -> None:
    """Copying stands still while the request is preempted and its blocks are filled with another's."""
    with row_house(ground) as house:
        engine = house.engine("e", blocks=14, reserve_whole=False, running_max=2)
        gate = house.gate()
        engine.pages[0].before_copy = gate
        engine.ask("first", DOCUMENT[:13], 24)
        engine.engine.step()
        engine.ask("victim", OTHER[:13], 24)
        engine.step_until(gate.reached.is_set, what="the first copy")
        opened = Timer(0.3, gate.open)
        opened.start()
        engine.step_until(lambda: engine.engine.scheduler.preemptions, what="the preemption")
        engine.run()
        engine.settle()
        opened.join()
        assert engine.counted()["save_drops_preempted"] > 0


def test_row17_a_finished_requests_blocks_are_held_until_they_are_copied(ground: Ground) -> None:
    with row_house(ground) as house:
        engine = house.engine("e", blocks=14)
        gate = house.gate()
        engine.pages[0].before_copy = gate
        engine.ask("r", DOCUMENT[:33], 1)
        engine.step_until(lambda: "r" in engine.engine.outcomes)
        assert gate.reached.wait(5)
        pool = engine.engine.scheduler.tables.pool
        for _ in range(50):
            engine.pump()
        assert pool.leaked >= 8
        gate.open()
        until(lambda: not engine.pump() and not pool.leaked, what="the blocks' return")
        engine.settle()
        assert house.stored(DOCUMENT[:33]) == 8


def test_row19_a_preempted_request_comes_again_with_a_lookup_and_a_lease_of_its_own(ground: Ground) -> None:
    with row_house(ground) as house:
        house.filled(prompt=DOCUMENT[:21])
        engine = house.engine("e", blocks=14, reserve_whole=False, running_max=2)
        engine.ask("first", OTHER[:9], 24)
        engine.ask("second", DOCUMENT[:21], 16)
        until(lambda: engine.broker.answer("first#1") and engine.broker.answer("second#1"))

        def both_run() -> bool:
            time.sleep(0.005)  # a forward takes longer than to load
            return len(engine.engine.scheduler.running) == 2

        engine.step_until(both_run, "the load")
        engine.run()
        preemptions = engine.engine.scheduler.preemptions
        assert preemptions
        engine.settle()
        assert engine.wire.count(b"/lookup") <= 2 + preemptions
        assert engine.engine.scheduler.loaded_tokens >= 2 * 20 or preemptions < 2


def test_row20_an_engine_that_hashes_otherwise_is_refused_and_has_no_cache(ground: Ground) -> None:
    with row_house(ground) as house:
        house.filled()
        odd = house.engine("odd", namespace={"canary": "another"}, start_wait_ms=2_000)
        assert odd.broker.refused is not None and "canary" in odd.broker.refused
        odd.serve("o", DOCUMENT, 3)
        assert odd.wire.count(b"/lookup") == 0 and odd.wire.count(b"/writes") == 0


def test_row21_an_adapters_blocks_are_not_the_base_models_nor_another_versions(
    ground: Ground, tmp_path: Path
) -> None:
    """Same name, same path, other weights: vLLM's own keys are the same, so the instance has to differ."""

    def adapter(weights: bytes) -> Adapter:
        folder = tmp_path / "lora"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_bytes(b"{}")
        (folder / "adapter_model.safetensors").write_bytes(weights)
        return Adapter("lora", str(folder), weights.hex())

    with row_house(ground) as house:
        base = house.filled()
        old = adapter(b"one")
        assert base.serve("lora", DOCUMENT, 4, adapter=old) != base.serve("base", DOCUMENT, 4)
        base.settle()
        same = house.engine("same")
        same.serve("s", DOCUMENT, 4, adapter=old)
        same.settle()
        assert same.counted()["loaded_blocks"] == BLOCKS
        # From here on the old engines' adapter has no cache; what they stored stays of its own instance.
        new = adapter(b"two, and longer")
        later = house.engine("later")
        later.serve("l", DOCUMENT, 4, adapter=new)
        later.settle()
        assert later.counted().get("loaded_blocks", 0) == 0
        house.engines.remove(base)
        house.engines.remove(same)
        for each in (base, same):
            assert not each.wrong()
            ground.later(each.close)


@pytest.mark.parametrize("where", ["request", "salt", "tenant"])
def test_row22_the_same_tokens_under_another_salt_are_a_miss(ground: Ground, where: str) -> None:
    with row_house(ground) as house:
        owner = house.engine("owner")
        owner.serve("o", DOCUMENT, 1, salt="mine" if where == "request" else "")
        owner.settle()
        namespace = {} if where == "request" else {where: "theirs"}
        other = house.engine("other", namespace=namespace)
        other.serve("x", DOCUMENT, 3, salt="theirs" if where == "request" else "")
        other.settle()
        counts = other.counted()
        assert counts.get("loaded_blocks", 0) == counts.get("found_blocks", 0) == 0
        if where == "request":
            other.engine.scheduler.tables.pool.reset()
            other.serve("mine", DOCUMENT, 3, salt="mine")
            other.settle()
            assert other.counted()["loaded_blocks"] == BLOCKS


def test_row22_what_is_published_of_a_salted_request_has_no_tokens(ground: Ground) -> None:
    """Whoever hashes tokens would take its blocks for everybody's."""
    with row_house(ground) as house:
        engine = house.engine("e")
        engine.serve("r", DOCUMENT, 1, salt="secret")
        engine.settle()
        assert engine.counted()["saved_blocks"] == BLOCKS
        assert not any(each.tokens for each in engine.side.outcomes.take_published())


def test_row23_new_weights_leave_all_old_blocks_behind_and_fence_the_old_writer(ground: Ground) -> None:
    with row_house(ground) as house:
        engine = house.filled()
        old = house.instance
        gate = house.hold_writes(engine)
        engine.serve("late", OTHER, 1)
        assert gate.reached.wait(5)
        namespace = engine.broker._joining._namespace
        from msgspec.structs import replace

        engine.broker.renew_namespace(replace(namespace, weight_version="2"))
        engine.side.reset()
        assert engine.engine.scheduler.tables.pool.reset()
        until(lambda: engine.broker.identity is not None and house.instance != old, what="the new instance")
        gate.open()
        engine.serve("after", DOCUMENT, 3)
        engine.settle()
        assert engine.counted().get("loaded_blocks", 0) == 0
        assert house.stored(OTHER, old) == 0, "an old writer's blocks serve"
        assert house.stored(DOCUMENT, old) == house.stored(DOCUMENT) == BLOCKS


def test_row24_pages_that_are_laid_out_otherwise_are_others(ground: Ground) -> None:
    with row_house(ground) as house:
        house.filled()
        for field in ("layout", "kv_format", "engine_version"):
            other = house.engine(field, namespace={field: "another"})
            other.serve("o", DOCUMENT, 3)
            other.settle()
            assert other.counted().get("loaded_blocks", 0) == 0


def test_row28_the_blocks_of_a_pool_go_with_the_worker_that_owned_it(ground: Ground) -> None:
    """A storage in memory: its worker ends while a load is under way, and nothing of it is believed."""
    with row_house(ground, kind="shm") as house:
        first = house.engine("first")
        until(lambda: first.serve(f"f{time.monotonic_ns()}", DOCUMENT, 1) and house.stored() == BLOCKS)
        first.settle()
        warm = house.engine("warm")
        warm.serve("w", DOCUMENT, 3)
        warm.settle()
        assert warm.counted()["loaded_blocks"] == BLOCKS
        reader = house.engine("reader")
        gate = house.hold_reads(reader)
        reader.ask("r", DOCUMENT, 3)
        reader.step_until(gate.reached.is_set, what="the load")
        ground.stop_workers()
        until(lambda: house.stored() == 0, what="the end of the pool's locations")
        gate.open()
        reader.run()
        reader.settle()
        assert reader.counted().get("loaded_blocks", 0) == 0


def test_row31_what_is_known_to_be_stored_is_bounded_and_forgotten() -> None:
    known = KnownKeys()
    keys = [number.to_bytes(4, "big") for number in range(KEYS_MAX + 10)]
    known.saving("i", keys)
    known.saved("i", keys, 0)
    assert known.leading("i", keys[:1], 0) == 0, "the oldest are forgotten"
    assert known.leading("i", keys[-10:], 0) == 10
    assert known.leading("i", keys[-10:], 3_600_000_000_000) == 0, "all are forgotten in time"
    assert known.leading("j", keys[-10:], 0) == 0


def test_row33_a_finish_that_never_arrives_leaves_nothing_and_is_counted(ground: Ground) -> None:
    with row_house(ground) as house:
        engine = house.engine("e", write_ttl_ms=300, timeout_ms=200)
        gate = house.hold_writes(engine)
        engine.serve("r", DOCUMENT, 1)
        assert gate.reached.wait(5)
        engine.wire.cut()
        gate.open()
        engine.settle()
        assert engine.counted()["finish_failures"] >= 1
        engine.wire.mend()
        assert house.stored() == 0


def test_blocks_that_one_rank_drops_are_dropped_by_all(ground: Ground) -> None:
    with row_house(ground, Shape(ranks=2)) as house:
        engine = house.engine("e", save_queue_blocks_max=64)
        write = engine.workers[1]._mover.write
        house.fail_writes(engine, rank=1)
        engine.serve("r", DOCUMENT, 1)
        engine.settle()
        assert house.stored() == 0
        setattr(engine.workers[1]._mover, "write", write)  # noqa: B010
        engine.serve("again", DOCUMENT, 1)
        engine.settle()
        assert house.stored() == BLOCKS
