"""What the worker side loads: a prefix of verified blocks, told once, and nothing after it was given up."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from engine_adapters.vllm.orders import NO_BLOCK, LoadOrder
from metaservice.client import Places
from tests.unit.vllm_memory_service import PAGE_BYTES, MemoryService, key_of
from tests.unit.vllm_worker_house import (
    GARBAGE,
    Gate,
    Rank,
    eventually,
    load_order,
    ranks_of,
    save_order,
    step,
)


@pytest.fixture
def service(tmp_path: Path) -> MemoryService:
    return MemoryService(tmp_path, ["tp0"])


def keys_of(count: int) -> list[bytes]:
    return [key_of(number) for number in range(count)]


def untouched(rank: Rank, blocks: Sequence[int], group: int = 0) -> bool:
    return all(bytes(rank.pages.page(group, block)) == bytes([GARBAGE]) * PAGE_BYTES for block in blocks)


def test_a_load_is_told_once_with_what_it_brought(service: MemoryService) -> None:
    places = service.put(keys_of(10))
    with ranks_of(service) as (rank,):
        results = rank.step(step(loads=(load_order(places, range(20, 30)),)))
        if "r" not in results.received:
            rank.received("r")
        assert all(rank.right(keys_of(10), range(20, 30)))
        (loaded,) = rank.loaded
        assert (loaded.request, loaded.ticket, loaded.blocks, loaded.asked) == ("r", "r#1", 10, 10)
        assert (loaded.size_bytes, loaded.reason, loaded.bad) == (10 * PAGE_BYTES, "", ())
        assert 0 < loaded.began_ns <= loaded.ended_ns
        assert not rank.side.load_errors()
        later = rank.results({"r"})
        assert not (later.received or later.failed or later.sent) and len(rank.loaded) == 1


def test_the_report_of_a_load_comes_with_its_results(service: MemoryService) -> None:
    """vLLM goes on with a request in the step that says received: whatever is known of it is told by then."""
    places = service.put(keys_of(3))
    service.path(key_of(1), "tp0").unlink()
    with ranks_of(service) as (rank,):
        for number in range(50):
            order = load_order(places, [1, 2, 3], request=f"r{number}", ticket=f"t{number}")
            rank.step(step(loads=(order,)))
            while True:
                results = rank.side.take_results(set())
                errors = rank.side.load_errors()
                report = rank.side.report()
                told = [] if report is None else [one.ticket for one in report.loaded]
                assert (f"t{number}" in told) == bool(results.received) == bool(errors)
                if told:
                    break


@pytest.mark.parametrize("batch", [1, 3, 8, 100])
def test_row30_a_long_prefix_is_right_across_every_batch_limit(service: MemoryService, batch: int) -> None:
    places = service.put(keys_of(60))
    with ranks_of(service, load_batch_blocks=batch) as (rank,):
        rank.step(step(loads=(load_order(places, range(1, 61)),)))
        eventually(lambda: rank.results() and rank.loaded)
        assert rank.loaded[0].blocks == 60 and all(rank.right(keys_of(60), range(1, 61)))


SPOILED = {
    "gone": "missing",
    "short": "truncated",
    "rotten": "bad_checksum",
    "another's": "wrong_location",
}


@pytest.mark.parametrize("how", SPOILED)
def test_row14_row16_the_first_bad_block_ends_the_prefix(service: MemoryService, how: str) -> None:
    """Whatever stands there is not what the service named: the rows before it are loaded, it and all behind
    it are told as failed, and its key is told as bad."""
    places = service.put(keys_of(6))
    path = service.path(key_of(3), "tp0")
    whole = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "short":
        path.write_bytes(whole[:-1])
    elif how == "rotten":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        path.write_bytes(service.path(key_of(4), "tp0").read_bytes())
    with ranks_of(service, load_batch_blocks=4) as (rank,):
        rank.pages.spoil(range(1, 7))
        results = rank.step(step(loads=(load_order(places, range(1, 7)),)))
        results = results if results.received else rank.received("r")
        assert results.received == {"r"} and not results.failed
        assert rank.side.load_errors() == {4, 5, 6} and not rank.side.load_errors()
        (loaded,) = rank.loaded
        assert (loaded.blocks, loaded.asked, loaded.reason) == (3, 6, SPOILED[how])
        assert loaded.bad == (key_of(3),)
        assert all(rank.right(keys_of(3), [1, 2, 3])) and untouched(rank, [4, 5, 6])
        assert rank.counts[f"read_refused_{SPOILED[how]}"] == 1


def test_what_may_pass_is_not_told_as_bad(service: MemoryService, tmp_path: Path) -> None:
    places = service.put(keys_of(2))
    service.storage.options["root"] = str(tmp_path / "not mounted")
    with ranks_of(service) as (rank,):
        rank.step(step(loads=(load_order(places, [1, 2]),)))
        eventually(lambda: rank.results() and rank.loaded)
        (loaded,) = rank.loaded
        assert (loaded.blocks, loaded.reason, loaded.bad) == (0, "not_open", ())
        assert rank.side.load_errors() == {1, 2}


# -------------------------------------------------------------------------------------------- windows


def test_rows_outside_the_window_are_not_loaded(tmp_path: Path) -> None:
    service = MemoryService(tmp_path, ["g0-tp0", "g1-tp0"])
    places = service.put(keys_of(5))
    with ranks_of(service, groups=2, windows=(False, True)) as (rank,):
        for page in rank.pages.memory:
            page[:] = bytes([GARBAGE]) * len(page)
        window = (NO_BLOCK, NO_BLOCK, NO_BLOCK, 14, 15)
        order = LoadOrder("r", "t", places, (tuple(range(1, 6)), window), False)
        rank.step(step(loads=(order,)))
        eventually(lambda: rank.results() and rank.loaded)
        assert rank.loaded[0].blocks == 5 and rank.loaded[0].size_bytes == 7 * PAGE_BYTES
        assert all(rank.right(keys_of(5), range(1, 6)))
        assert all(rank.right(keys_of(5)[3:], [14, 15], group=1))
        assert len(rank.pages.scattered) == 7 and untouched(rank, [1, 2, 3], group=1)


def test_a_bad_page_behind_the_window_hurts_nobody(tmp_path: Path) -> None:
    service = MemoryService(tmp_path, ["g0-tp0", "g1-tp0"])
    places = service.put(keys_of(3))
    service.path(key_of(0), "g1-tp0").unlink()
    with ranks_of(service, groups=2, windows=(False, True)) as (rank,):
        order = LoadOrder("r", "t", places, ((1, 2, 3), (NO_BLOCK, NO_BLOCK, 13)), False)
        rank.step(step(loads=(order,)))
        eventually(lambda: rank.results() and rank.loaded)
        assert rank.loaded[0].blocks == 3


@pytest.mark.parametrize(("parts", "windows"), [(2, (False, False)), (2, (False, True)), (1, (True,))])
def test_row26_where_blocks_say_nothing_the_whole_request_failed(
    tmp_path: Path, parts: int, windows: tuple[bool, ...]
) -> None:
    """Several groups have no common block ids; and a hole in a window cannot be computed from."""
    service = MemoryService(tmp_path, ["g0-tp0", "g1-tp0"][:parts])
    places = service.put(keys_of(4))
    service.path(key_of(2), service.parts[-1]).unlink()
    with ranks_of(service, groups=parts, windows=windows) as (rank,):
        results = rank.step(step(loads=(load_order(places, range(1, 5), groups=parts),)))
        results = results if results.received else rank.received("r")
        assert results.received == results.failed == {"r"}
        assert not rank.side.load_errors()
        assert (rank.loaded[0].blocks, rank.loaded[0].bad) == (0, (key_of(2),))


def test_synchronous_loads_need_a_model_that_can_be_told_of_their_failure(tmp_path: Path) -> None:
    service = MemoryService(tmp_path, ["g0-tp0", "g1-tp0"])
    with pytest.raises(ValueError, match="'sync' is for"), ranks_of(service, groups=2, load="sync"):
        pass
    one = MemoryService(tmp_path, ["tp0"])
    with pytest.raises(ValueError, match="'sync' is for"), ranks_of(one, windows=(True,), load="sync"):
        pass


# ----------------------------------------------------------------------------------------- synchronous


def test_a_synchronous_load_is_there_when_the_forward_begins(service: MemoryService) -> None:
    places = service.put(keys_of(20))
    with ranks_of(service, load="sync") as (rank,):
        orders = step(loads=tuple(
            load_order(places, range(20 * n + 1, 20 * n + 21), request=f"r{n}", ticket=f"t{n}", sync=True)
            for n in range(3)
        ))  # fmt: skip
        rank.side.start_loads(orders)
        for n in range(3):
            assert all(rank.right(keys_of(20), range(20 * n + 1, 20 * n + 21)))
        results = rank.results()
        assert not results.received, "nobody waits for it"
        assert [one.blocks for one in rank.loaded] == [20, 20, 20] and not rank.reports[0].failures


def test_row4_a_synchronous_load_that_hangs_ends_in_time_and_taints_the_step(service: MemoryService) -> None:
    places = service.put(keys_of(3))
    with ranks_of(service, load="sync", load_wait_ms=100) as (rank,):
        gate = Gate()
        rank.mover.before_read = gate
        rank.pages.spoil(range(1, 4))
        began = time.monotonic()
        rank.side.start_loads(step(loads=(load_order(places, [1, 2, 3], sync=True),)))
        assert 0.09 < time.monotonic() - began < 1
        rank.side.submit_saves(step(saves=(rank.compute(save_order("s", [50], [50])),)))
        gate.open()
        rank.results()
        assert rank.side.load_errors() == {1, 2, 3}
        (loaded,) = rank.loaded
        assert (loaded.blocks, loaded.reason) == (0, "late")
        assert rank.reports[0].failures == {0: 1} and rank.counts["sync_loads_failed"] == 1
        assert rank.saves_over(1)[0].reason == "tainted"
        eventually(lambda: not any(rank.side._loader._running))
        assert untouched(rank, [1, 2, 3]), "the late read must not land in blocks that were computed since"
        rank.side.start_loads(step(loads=(load_order(places, [1, 2, 3], ticket="r#2", sync=True),)))
        assert all(rank.right(keys_of(3), [1, 2, 3]))


# ------------------------------------------------------------------------------- late, aborted, twice


def test_a_late_load_is_told_and_never_lands(service: MemoryService) -> None:
    places = service.put(keys_of(3))
    with ranks_of(service, load_wait_ms=60) as (rank,):
        gate = Gate()
        rank.mover.before_read = gate
        rank.step(step(loads=(load_order(places, [1, 2, 3]),)))
        results = rank.received("r")
        assert not results.failed and rank.side.load_errors() == {1, 2, 3}
        assert rank.loaded[0].reason == "late" and rank.loaded[0].blocks == 0
        assert rank.counts["loads_late"] == 1
        rank.pages.spoil([1, 2, 3])
        gate.open()
        eventually(lambda: not any(rank.side._loader._running))
        assert untouched(rank, [1, 2, 3]) and not rank.pages.scattered
        assert not rank.results().received and len(rank.loaded) == 1


def test_a_read_that_comes_after_the_end_does_not_count(service: MemoryService) -> None:
    """Between the end of a load and its report the late bytes arrive: they are not taken for loaded."""
    places = service.put(keys_of(3))
    with ranks_of(service, load_wait_ms=20) as (rank,):
        gate = Gate()
        rank.mover.before_read = gate
        rank.side.start_loads(step(loads=(load_order(places, [1, 2, 3]),)))
        assert gate.reached.wait(5)
        time.sleep(0.03)
        rank.side._loader.expire()
        gate.open()
        eventually(lambda: not any(rank.side._loader._running))
        assert rank.results().received == {"r"}
        assert (rank.loaded[0].blocks, rank.loaded[0].reason) == (0, "late")
        assert rank.side.load_errors() == {1, 2, 3}


def test_a_load_that_is_late_between_two_pages_stops_there(service: MemoryService) -> None:
    """The page that is being copied is waited for, so none lands once the load was told as over."""
    places = service.put(keys_of(3))
    with ranks_of(service, load_wait_ms=60) as (rank,):
        gate = Gate()
        rank.pages.before_scatter = lambda block: gate() if block == 2 else None
        rank.step(step(loads=(load_order(places, [1, 2, 3]),)))
        assert gate.reached.wait(5)
        load = rank.side._loader._running[0] or rank.side._loader._running[1]
        assert load is not None
        opened: list[bool] = []

        def open_then() -> None:
            eventually(lambda: load.ending)
            opened.append(True)
            gate.open()

        time.sleep(0.08)
        opener = Thread(target=open_then)
        opener.start()
        results = rank.results()
        assert opened, "the page under way was not waited for"
        opener.join()
        assert results.received == {"r"} and rank.side.load_errors() == {1, 2, 3}
        rank.pages.spoil([1, 2, 3])
        eventually(lambda: not any(rank.side._loader._running))
        assert untouched(rank, [1, 2, 3])


def test_a_load_that_is_being_ended_is_not_taken_for_whole(service: MemoryService) -> None:
    """The loading thread may get the lock first: what becomes of the load is said by who ends it."""
    places = service.put(keys_of(3))
    with ranks_of(service) as (rank,):
        gate = Gate()
        rank.pages.before_scatter = lambda block: gate() if block == 2 else None
        rank.step(step(loads=(load_order(places, [1, 2, 3]),)))
        assert gate.reached.wait(5)
        (load,) = rank.side._loader._open.values()
        load.ending = True
        gate.open()
        eventually(lambda: not any(rank.side._loader._running))
        assert not load.over and len(rank.pages.scattered) == 2
        assert rank.results({"r"}).received == {"r"} and rank.loaded[0].blocks == 0


def test_row18_an_aborted_request_is_told_once_and_its_load_lands_nowhere(service: MemoryService) -> None:
    """vLLM keeps its blocks until we say that the load is over: at once, whatever the storage does."""
    places = service.put(keys_of(3))
    with ranks_of(service) as (rank,):
        gate = Gate()
        rank.mover.before_read = gate
        rank.step(step(loads=(load_order(places, [1, 2, 3]),)))
        assert gate.reached.wait(5)
        results = rank.step(step(), {"r"})
        assert results.received == {"r"} and not results.failed
        assert not rank.side.load_errors(), "nobody computes what is missing"
        assert rank.loaded[0].reason == "aborted"
        rank.pages.spoil([1, 2, 3])
        gate.open()
        eventually(lambda: not any(rank.side._loader._running))
        assert untouched(rank, [1, 2, 3])
        assert not rank.results({"r"}).received and len(rank.loaded) == 1


def test_row19_a_second_load_of_a_request_ends_the_first(service: MemoryService) -> None:
    places = service.put(keys_of(3))
    with ranks_of(service) as (rank,):
        gate = Gate()
        rank.mover.before_read = lambda: gate() if not gate.reached.is_set() else None
        rank.step(step(loads=(load_order(places, [1, 2, 3]),)))
        assert gate.reached.wait(5)
        rank.pages.spoil([1, 2, 3])
        results = rank.step(step(loads=(load_order(places, [4, 5, 6], ticket="r#2"),)))
        results = results if results.received else rank.received("r")
        gate.open()
        eventually(lambda: not any(rank.side._loader._running))
        assert untouched(rank, [1, 2, 3]) and all(rank.right(keys_of(3), [4, 5, 6]))
        assert {one.ticket: one.reason for one in rank.loaded} == {"r#1": "superseded", "r#2": ""}
        assert not rank.results().received


def test_loads_in_quick_succession_never_look_stuck(service: MemoryService) -> None:
    places = service.put(keys_of(1))
    with ranks_of(service, load_threads=1) as (rank,):
        for number in range(300):
            order = load_order(places, [1], request=f"r{number}", ticket=f"t{number}")
            results = rank.step(step(loads=(order,)))
            if not results.received:
                rank.received(f"r{number}")
        assert {one.reason for one in rank.loaded} == {""} and len(rank.loaded) == 300


def test_a_storage_that_hangs_for_good_costs_its_deadline_once(service: MemoryService) -> None:
    """With every thread stuck in it, later loads fail at once: nobody waits for what cannot come."""
    places = service.put(keys_of(1))
    with ranks_of(service, load_threads=2, load_wait_ms=80) as (rank,):
        gate = Gate()
        rank.mover.before_read = gate
        loads = tuple(load_order(places, [n], request=f"r{n}", ticket=f"t{n}") for n in (1, 2))
        rank.step(step(loads=loads))
        eventually(lambda: rank.results() and len(rank.loaded) == 2)
        results = rank.step(step(loads=(load_order(places, [3], request="r3", ticket="t3"),)))
        assert results.received == {"r3"} and rank.loaded[2].reason == "stuck"
        gate.open()
        eventually(lambda: not any(rank.side._loader._running))
        rank.step(step(loads=(load_order(places, [4], request="r4", ticket="t4"),)))
        eventually(lambda: rank.results() and len(rank.loaded) == 4)
        assert rank.loaded[3].blocks == 1


# ------------------------------------------------------------------------------------------- lies, faults


def _with(places: Places, **changes: object) -> Places:
    return msgspec.structs.replace(places, **changes)


def test_places_that_do_not_fit_are_refused_not_believed(service: MemoryService) -> None:
    good = service.put(keys_of(3))
    lies = {
        "no such part": _with(good, parts=[msgspec.structs.replace(good.parts[0], name="tp7")]),
        "another size": _with(good, parts=[msgspec.structs.replace(good.parts[0], bytes=PAGE_BYTES - 1)]),
        "fewer rows": _with(good, keys=good.keys[:2], locations=good.locations[:2]),
        "fewer checksums": _with(good, checksums=good.checksums[:2]),
        "no place": _with(good, generations=good.generations[:2] + type(good.generations)("I", [0])),
        "no rows": Places(),
    }
    with ranks_of(service) as (rank,):
        rank.pages.spoil([1, 2, 3])
        for number, (name, places) in enumerate(lies.items()):
            order = load_order(places, [1, 2, 3], request=name, ticket=name)
            assert rank.step(step(loads=(order,))).received == {name}
            assert rank.side.load_errors() == {1, 2, 3}
            assert rank.loaded[number].reason == "bad_order"
        wrong = _with(good, keys=list(reversed(good.keys)))
        results = rank.step(step(loads=(load_order(wrong, [1, 2, 3]),)))
        if not results.received:
            rank.received("r")
        assert rank.loaded[-1].reason == "wrong_key" and rank.loaded[-1].blocks == 0
        assert untouched(rank, [1, 2, 3])


def test_a_fault_while_loading_fails_that_load_alone(service: MemoryService) -> None:
    places = service.put(keys_of(2))
    with ranks_of(service) as (rank,):

        def fault(block: int) -> None:
            raise RuntimeError("the device is gone")

        rank.pages.before_scatter = fault
        results = rank.step(step(loads=(load_order(places, [1, 2]),)))
        results = results if results.received else rank.received("r")
        assert rank.side.load_errors() == {1, 2} and rank.loaded[0].reason == "internal"
        rank.pages.before_scatter = lambda block: None
        results = rank.step(step(loads=(load_order(places, [1, 2], ticket="r#2"),)))
        if not results.received:
            rank.received("r")
        assert rank.loaded[1].blocks == 2


def test_buffers_of_loads_are_bounded(service: MemoryService) -> None:
    places = service.put(keys_of(40))
    with ranks_of(service, load_buffer_bytes=4 * PAGE_BYTES, load_threads=2) as (rank,):
        loads = tuple(load_order(places, range(1, 41), request=f"r{n}", ticket=f"t{n}") for n in range(4))
        rank.step(step(loads=loads))
        eventually(lambda: rank.results() and len(rank.loaded) == 4)
        assert {one.blocks for one in rank.loaded} == {40}
        assert rank.pages.allocated <= 4 * PAGE_BYTES


@pytest.mark.parametrize("seed", range(8))
def test_row18_every_load_is_told_exactly_once_whatever_becomes_of_it(
    service: MemoryService, seed: int
) -> None:
    """Slow storages, aborts at any moment, missing bytes; blocks are used for others once a load was told."""
    chance = random.Random(seed)
    places = service.put(keys_of(6))
    service.path(key_of(5), "tp0").unlink()
    with ranks_of(service, load_wait_ms=30, load_batch_blocks=2) as (rank,):
        rank.mover.before_read = lambda: time.sleep(chance.choice([0, 0.001, 0.02]))
        free = list(range(1, 60))
        busy: dict[str, list[int]] = {}
        told: list[str] = []
        names = iter(range(1_000_000))
        spoiled: set[int] = set()
        until = time.monotonic() + 0.6
        while time.monotonic() < until or busy:
            loads = []
            while time.monotonic() < until and len(free) >= 6 and chance.random() < 0.5:
                blocks, free = free[:6], free[6:]
                name = f"r{next(names)}"
                busy[name] = blocks
                spoiled -= set(blocks)
                loads.append(load_order(places, blocks, request=name, ticket=name))
            gone = {name for name in busy if chance.random() < 0.02}
            results = rank.step(step(loads=tuple(loads)), gone)
            errors = rank.side.load_errors()
            for name in results.received:
                blocks = busy.pop(name)
                told.append(name)
                loaded = next(one for one in reversed(rank.loaded) if one.ticket == name)
                assert all(rank.right(keys_of(6)[: loaded.blocks], blocks[: loaded.blocks])), f"seed {seed}"
                if loaded.reason != "aborted":
                    assert set(blocks[loaded.blocks :]) <= errors, f"seed {seed}"
                rank.pages.spoil(blocks)
                spoiled |= set(blocks)
                free += blocks
        time.sleep(0.03)
        assert len(told) == len(set(told)) == len(rank.loaded), f"seed {seed}"
        assert untouched(rank, sorted(spoiled)), f"seed {seed}: a load landed after it was told"
