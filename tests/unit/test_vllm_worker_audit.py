"""The record of moved pages: off unless asked for, bounded, and never in the way."""

import os
from pathlib import Path

import msgspec
import pytest

from dataplane.integrity import checksum_of
from engine_adapters.vllm.audit import Audit, PageEntry
from engine_adapters.vllm.orders import StepOrders
from tests.unit.vllm_memory_service import MemoryService, content, key_of
from tests.unit.vllm_worker_house import IDENTITY, load_order, ranks_of, save_order


def entries(path: Path) -> list[PageEntry]:
    return [msgspec.json.decode(line, type=PageEntry) for line in path.read_bytes().splitlines()]


def test_each_page_is_noted_on_its_way(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    service = MemoryService(tmp_path / "s", ["tp0"])
    path = tmp_path / "audit.jsonl"
    with ranks_of(service, audit_path=str(path)) as (rank,):
        order = rank.compute(save_order("s", [1, 2], [1, 2]))
        rank.step(StepOrders(identity=IDENTITY, saves=(order,)))
        rank.saves_over(1)
        load = load_order(service.places(order.keys), [11, 12])
        results = rank.step(StepOrders(identity=IDENTITY, loads=(load,)))
        if not results.received:
            rank.received("r")
    found = entries(path)
    assert [one.what for one in found] == ["copied"] * 2 + ["written"] * 2 + ["published"] * 2 + [
        "loaded"
    ] * 2
    for number in (1, 2):
        mine = [one for one in found if one.key == key_of(number).hex()]
        assert {one.checksum for one in mine} == {checksum_of(content(key_of(number), "tp0"))}
        assert {(one.part, one.engine, one.incarnation, one.request) for one in mine} == {
            ("tp0", "e", "one", "r")
        }
        placed = {(one.location, one.generation) for one in mine if one.what != "copied"}
        assert placed == {(service.blocks["i", key_of(number)]["location"], 1)}
        assert all(one.time_ns > 0 for one in mine)
    assert path.stat().st_mode & 0o777 == 0o640


def test_what_may_serve_is_noted_before_it_does(tmp_path: Path) -> None:
    """An engine that dies in its finish has left word of what others may read."""
    (tmp_path / "s").mkdir()
    service = MemoryService(tmp_path / "s", ["tp0"])
    path = tmp_path / "audit.jsonl"
    noted: list[str] = []
    service.before["finish"] = lambda: noted.extend(one.what for one in entries(path))
    with ranks_of(service, audit_path=str(path)) as (rank,):
        order = rank.compute(save_order("s", [1], [1]))
        rank.step(StepOrders(identity=IDENTITY, saves=(order,)))
        rank.saves_over(1)
    assert noted == ["copied", "written"]


def test_it_is_off_by_default_and_refused_at_start_when_it_cannot_be(tmp_path: Path) -> None:
    assert not Audit("").on
    with pytest.raises(OSError, match="No such file"):
        Audit(str(tmp_path / "no" / "such" / "folder"))


def test_it_ends_when_it_is_full_and_when_the_disk_fails(tmp_path: Path) -> None:
    path = tmp_path / "a"
    audit = Audit(str(path), size_bytes_max=600)
    for _ in range(20):
        audit.note("loaded", b"k" * 32, "tp0", request="r")
    assert not audit.on and 0 < path.stat().st_size <= 600
    other = Audit(str(path))
    os.close(other._descriptor)
    other.note("loaded", b"k" * 32, "tp0", request="r")
    assert not other.on
    other.close()
