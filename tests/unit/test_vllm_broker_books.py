"""The books of the broker: leases, removals, storages that can be opened here, adapters."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event

import pytest

from engine_adapters.namespace import Away, Registered
from engine_adapters.vllm import adapters, openings
from engine_adapters.vllm.adapters import NO_INSTANCE, Adapters
from engine_adapters.vllm.leases import Leases
from engine_adapters.vllm.openings import Openings
from engine_adapters.vllm.removals import Removals
from metaservice.wire.schemas import StorageRef

KEYS = [bytes([n]) * 32 for n in range(1, 9)]


def until(check: Callable[[], object], within_s: float = 5.0) -> None:
    end = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000

    def __call__(self) -> int:
        return self.ms


def test_leases_are_counted_until_they_are_known_to_be_over() -> None:
    clock = Clock()
    leases = Leases(1_000, 100, clock)
    for name in "abc":
        leases.took(name)
    leases.let_go("a")
    leases.let_go("a")
    leases.let_go("unknown")
    assert (len(leases), leases.leaving()) == (3, ["a"])
    leases.released(["a"])
    leases.let_go("a")
    assert (len(leases), leases.leaving()) == (2, [])
    leases.let_go("b")
    clock.ms += 1_050
    assert leases.sweep(lambda lease: lease == "c") == 0, "a renewal may have been on its way"
    clock.ms += 50
    assert leases.sweep(lambda lease: lease == "c") == 1
    assert len(leases) == 1
    assert leases.sweep(lambda lease: False) == 1
    assert len(leases) == 0


def test_removals_are_as_fast_as_they_may_be_and_no_block_twice() -> None:
    clock = Clock()
    removals = Removals(6, clock)
    assert removals.add("i", [KEYS[0], KEYS[0], KEYS[1]]) == 0
    assert removals.add("i", KEYS[:2]) == 0, "reported again by the next reader"
    assert removals.add("j", KEYS) == 4
    first = removals.next()
    assert first == ("i", KEYS[:2]) == removals.next()
    assert first is not None
    removals.done(first)
    assert removals.next() == ("j", KEYS[:4])
    clock.ms += 10_000
    assert removals.add("i", KEYS[:3]) == 2, "one more every ten seconds"
    clock.ms += 50_000
    assert removals.next() == ("i", KEYS[:1])
    clock.ms += 10_000
    assert removals.next() is None, "too old to matter"


def test_a_mount_that_hangs_costs_its_blocks_and_not_the_thread_that_asks() -> None:
    hangs, tried = Event(), []

    def opens_some(kind: str, options: Mapping[str, str]) -> object:
        tried.append(options["root"])
        if options["root"].startswith("/hangs"):
            hangs.wait(10)
        if options["root"] == "/broken":
            raise OSError("input/output error")
        return object()

    known = Openings(opens_some)
    good = StorageRef(name="s", kind="posix", options={"root": "/good"})
    assert known.usable(good, 5_000)
    begun = time.monotonic()
    stuck = [StorageRef(name=f"s{n}", kind="posix", options={"root": f"/hangs{n}"}) for n in range(6)]
    assert [known.usable(one, 50) for one in stuck] == [False] * 6
    assert time.monotonic() - begun < 2
    assert known.usable(good, 1) and tried.count("/good") == 1
    assert len(tried) == 1 + openings.TRIES_MAX
    hangs.set()
    until(lambda: known.usable(stuck[0], 100))
    broken = StorageRef(name="b", kind="posix", options={"root": "/broken"})
    assert [known.usable(broken, 1_000) for _ in range(3)] == [False] * 3
    assert tried.count("/broken") == 1, "and no is believed for a while too"


def test_a_storage_that_was_good_is_believed_while_it_is_tried_again_unless_it_hangs() -> None:
    clock, go_on, tried = Clock(), Event(), []

    def opens_late(kind: str, options: Mapping[str, str]) -> object:
        tried.append(kind)
        if len(tried) > 1:
            go_on.wait(10)
        return object()

    known = Openings(opens_late, clock)
    storage = StorageRef(name="s", kind="posix", options={"root": "/r"})
    assert known.usable(storage, 5_000)
    clock.ms += openings.GOOD_MS
    assert known.usable(storage, 1), "at once, and tried again beside it"
    until(lambda: len(tried) == 2)
    clock.ms += openings.SLOW_MS
    assert not known.usable(storage, 1)
    go_on.set()
    until(lambda: known.usable(storage, 1))


# ---------------------------------------------------------------- adapters


def lora(folder: Path) -> tuple[str, str]:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return "a", str(folder)


def test_an_adapter_waits_for_a_service_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "AGAIN_MS", 50)
    answers: list[Registered | Away] = [Away("i-a", "timeout"), Away("i-a", "timeout"), Registered("i-a")]
    digests: list[str] = []

    def register(digest: str, name: str) -> Registered | Away:
        assert name == "a"
        digests.append(digest)
        return answers.pop(0)

    known = Adapters(register)
    name = lora(tmp_path / "a")
    assert known.instance_of(name) is None
    until(lambda: known.instance_of(name) == "i-a")
    assert len(digests) == 3 and len(set(digests)) == 1 and len(digests[0]) == 32
    known.close()
    known.join(5)


def test_adapters_are_bounded_and_a_forgotten_one_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "ADAPTERS_MAX", 2)
    known = Adapters(lambda digest, name: Registered(f"i-{digest[:4]}"))
    name = lora(tmp_path / "a")
    until(lambda: known.instance_of(name))
    for number in range(5):
        known.instance_of((f"none{number}", str(tmp_path / "none")))
    assert known.instance_of(name) is None
    until(lambda: known.instance_of(name))
    until(lambda: known.instance_of(("none4", str(tmp_path / "none"))) == NO_INSTANCE)
    known.close()
    known.join(5)
