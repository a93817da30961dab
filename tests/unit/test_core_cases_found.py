"""Faults that the simulator found in the core once, each in its shortest form."""

from array import array
from typing import Any

import pytest

from metaservice.core.commands import (
    ConfirmTask,
    DeleteInstance,
    Lookup,
    PutGroup,
    PutInstance,
    PutStorage,
    RegisterEngine,
    RegisterWorker,
    Remove,
    RenewLeases,
    StartWrite,
    TakeTasks,
)
from metaservice.core.model import Limits, Quota
from metaservice.core.rejections import Rejection
from tests.sim.fleet import BLOCK_BYTES, FINGERPRINT, Fleet, chain, key, outcomes, statuses, windowed

LIMITS = Limits(lease_ms_max=1_000, reclaim_delay_ms=500, late_write_ms=800, expire_ms=1_000_000)
ALL: dict[str, Any] = {"high_permille": 1000, "low_permille": 1000}


@pytest.mark.timeout(20)
def test_odd_parent_of_a_block_that_is_there_does_not_stop_the_service() -> None:
    fleet = Fleet(LIMITS)
    p, c, x, k = key("p"), key("c"), key("x"), key("k")
    fleet.put([p, c, x], parents=[None, p, k])
    odd = fleet.start([k, p], parents=[p, c])
    assert outcomes(odd) == ["write", "refused"], "p stays what it is"


def test_bytes_go_only_after_the_removal_is_durable() -> None:
    fleet = Fleet(LIMITS, auto=False)
    fleet.tick(LIMITS.lease_ms_max)
    fleet.put([key("k")])
    fleet.flush()
    fleet.remove([key("k")])
    fleet.tick(LIMITS.reclaim_delay_ms)
    assert fleet.take() == [], "a crash would bring the block back"
    fleet.flush()
    assert len(fleet.take()) == 1


def test_bytes_of_an_expired_write_go_only_after_the_expiry_is_durable() -> None:
    fleet = Fleet(LIMITS, auto=False)
    started = fleet.start([key("k")], ttl_ms=1_000)
    fleet.flush()
    fleet.tick(1_000)
    fleet.tick(LIMITS.late_write_ms)
    assert fleet.take() == []
    fleet.crash()
    fleet.flush()
    assert statuses(fleet.finish(started)) == ["serving"], "the new leader extended the session"


def reused_slot(fleet: Fleet) -> None:
    """Slot 0 was deleted, and is being deleted again under its second generation, from now on."""
    fleet.tick(LIMITS.lease_ms_max)
    fleet.put([key("first")])
    fleet.remove([key("first")])
    fleet.tick(LIMITS.reclaim_delay_ms)
    assert len(fleet.delete()) == 1
    again = fleet.put([key("second")])
    assert list(again.locations) == [0] and list(again.generations) == [2]


def test_deletion_of_an_earlier_use_of_a_place_is_forgotten() -> None:
    fleet = Fleet(LIMITS)
    reused_slot(fleet)
    fleet.crash()
    fleet.tick(LIMITS.lease_ms_max)
    fleet.remove([key("second")])
    assert fleet.take() == [], "it must wait like any other"
    fleet.tick(LIMITS.reclaim_delay_ms)
    (task,) = fleet.take()
    assert list(task.locations) == [0] and fleet.take() == []


def test_deletion_that_came_back_late_does_not_make_the_next_one_early() -> None:
    fleet = Fleet(LIMITS, auto=False)
    fleet.tick(LIMITS.lease_ms_max)
    fleet.put([key("first")])
    fleet.remove([key("first")])
    fleet.flush()
    fleet.tick(LIMITS.reclaim_delay_ms)
    (late,) = fleet.take()
    fleet.tick(LIMITS.task_ttl_ms)
    fleet.done(ConfirmTask(worker="k", incarnation="1", task=late.task))
    fleet.put([key("second")])
    fleet.flush()
    fleet.remove([key("second")])
    fleet.tick(LIMITS.reclaim_delay_ms)
    assert fleet.take() == [], "the second removal is not durable"
    fleet.flush()
    assert len(fleet.take()) == 1


def test_deletion_is_asked_of_the_storage_where_the_bytes_are() -> None:
    fleet = Fleet(LIMITS)
    reused_slot(fleet)
    fleet.remove([key("second")])
    fleet.tick(LIMITS.reclaim_delay_ms)
    assert len(fleet.delete()) == 1
    fleet.done(PutStorage(storage="s2", kind="posix", options={}))
    fleet.done(PutGroup(group="g", tenant="t", storages=("s2", "s")))
    fleet.done(RegisterWorker(worker="k2", incarnation="1", storages=("s2",)))
    fleet.put([key("third")])
    fleet.remove([key("third")])
    fleet.crash()
    fleet.tick(LIMITS.lease_ms_max)
    assert fleet.take() == [], "worker k does not serve s2"
    (task,) = fleet.ask(TakeTasks(worker="k2", incarnation="1")).tasks
    assert task.storage == "s2" and list(task.locations) == [0]


def test_candidates_that_lie_in_one_storage_are_found_when_it_is_that_ones_turn() -> None:
    fleet = Fleet(LIMITS, capacity_bytes=0)
    fleet.done(PutStorage(storage="s2", kind="posix", options={}, capacity_bytes=2 * BLOCK_BYTES))
    fleet.done(PutGroup(group="g", tenant="t", storages=("s", "s2"), **ALL))
    fleet.put(chain(2))
    started = fleet.start([key("new")])
    assert outcomes(started) == ["write"] and started.evicted == 1


def test_session_that_a_new_leader_could_not_extend_expires_once() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(2), ttl_ms=5_000)
    fleet.crash()  # in the same millisecond: the deadline stays what it is
    fleet.tick(5_000)
    assert fleet.refused(fleet.finishing(started)) == "session_expired"
    fleet.machine.check()


def test_leases_are_renewed_by_location_on_every_shard() -> None:
    fleet = Fleet(LIMITS, shard=5)
    fleet.put(chain(2))
    found = fleet.lookup(chain(2), lease_ms=500)
    assert found.located is not None and found.lease is not None
    fleet.ask(
        RenewLeases(leases=(found.lease,), ttl_ms=1_000, locations=array("Q", found.located.locations[:1]))
    )
    fleet.tick(500)
    leases = [detail.leases for one in chain(2) if (detail := fleet.block(one)) is not None]
    assert leases == [1, 0]


@pytest.mark.parametrize("mode", ["window", "prefix", "each"])
def test_every_block_of_a_window_counts_as_used(mode: str) -> None:
    fleet = Fleet(LIMITS, fingerprint=windowed(), quota=Quota(blocks=4), **ALL)
    hot = chain(2, "hot")
    for keys in (hot, chain(2, "cold")):
        fleet.finish(fleet.start(keys, group="swa"), parts=("w",))
        fleet.now_ms += 10
    assert fleet.lookup(hot, mode=mode, group="swa").hits == 2
    fleet.now_ms += 10
    assert outcomes(fleet.start(chain(2, "new"), group="swa")) == ["write"] * 2
    assert fleet.lookup(hot, mode="each", group="swa").hits == 2, "the cold ones went"


def test_parents_that_a_request_names_are_not_evicted_for_it() -> None:
    fleet = Fleet(LIMITS, fingerprint=windowed(), quota=Quota(blocks=2), **ALL)
    fleet.finish(fleet.start([key("p")], group="swa"), parts=("w",))
    fleet.now_ms += 10
    fleet.finish(fleet.start([key("other")], group="swa"), parts=("w",))
    started = fleet.start([key("q")], parent=key("p"), group="swa")
    assert outcomes(started) == ["write"]
    assert fleet.lookup([key("p")], mode="each", group="swa").hits == 1


def test_retry_of_a_write_whose_instance_is_gone() -> None:
    fleet = Fleet(LIMITS)
    fleet.done(PutInstance(instance="j", group="g", fingerprint=FINGERPRINT))
    command = StartWrite(
        instance="j", engine="e1", incarnation="1", keys=[key("k")], request_id="r", ttl_ms=1_000
    )
    fleet.done(command)
    fleet.done(DeleteInstance(instance="j"))
    for _ in range(8):
        fleet.tick(1_000)
        fleet.delete()
    assert fleet.machine.describe_one("instances", "j", fleet.now_ms) is None
    reply = fleet.send(command)
    assert isinstance(reply, Rejection) or reply.session is not None


def test_late_failure_of_an_earlier_holder_gives_the_work_to_nobody_else() -> None:
    fleet = Fleet(LIMITS)
    fleet.tick(LIMITS.lease_ms_max)
    fleet.put(chain(2))
    fleet.remove(chain(2))
    fleet.tick(LIMITS.reclaim_delay_ms)
    (early,) = fleet.take()
    fleet.tick(LIMITS.task_ttl_ms)
    assert len(fleet.take()) == 1
    fleet.done(ConfirmTask(worker="k", incarnation="1", task=early.task, ok=b"\x00\x01"))
    fleet.tick(LIMITS.task_retry_ms)
    assert fleet.take() == [], "another worker is about it"
    fleet.tick(LIMITS.task_ttl_ms)
    assert len(fleet.delete()) == 1


def test_a_removed_block_in_the_middle_takes_no_recency_with_it() -> None:
    """What a lookup returned stays as recent as the lookup, whatever becomes of the blocks below it."""
    fleet = Fleet(LIMITS, quota=Quota(blocks=4), **ALL)
    hot = chain(3, "hot")
    fleet.put(hot)
    fleet.now_ms += 10
    fleet.put([key("cold")])
    fleet.now_ms += 10
    assert fleet.lookup(hot).hits == 3
    fleet.remove(hot[1:2])
    fleet.now_ms += 10
    fleet.put([key("new")])
    assert outcomes(fleet.start([key("newer")])) == ["write"]
    found = fleet.lookup([hot[0], hot[2], key("cold")], mode="each").hit
    assert found == bytes([1, 1, 0]), "the cold one goes first"


def test_the_next_life_of_an_engine_may_count_its_requests_from_one_again() -> None:
    fleet = Fleet(LIMITS)
    before = fleet.start([key("old")], request_id="1")
    fleet.done(RegisterEngine(engine="e1", incarnation="2"))
    after = fleet.start([key("new")], incarnation="2", request_id="1")
    assert after.session is not None and after.session != before.session
    command = fleet.finishing(after, incarnation="2", request_id="2")
    assert statuses(fleet.done(command)) == ["serving"]
    assert fleet.lookup([key("new")]).hits == 1


def test_a_request_id_that_is_used_again_never_leads_to_other_blocks() -> None:
    fleet = Fleet(LIMITS)
    fleet.put([key("a")], request_id="w")
    fleet.put([key("b")])
    named = {"engine": "e1", "incarnation": "1", "request_id": "r", "lease_ms": 1_000}
    first = fleet.lookup([key("a")], **named)
    assert fleet.lookup([key("a")], **named) == first
    for keys, more in (([key("b")], {}), ([key("a"), key("b")], {}), ([key("a")], {"mode": "each"})):
        command = Lookup(instance="i", keys=keys, **{**named, **more})  # type: ignore[arg-type]
        refused = fleet.machine.read(command, fleet.now_ms)
        assert isinstance(refused, Rejection) and refused.field == "request_id"
    for keys in ([key("c")], [key("a"), key("c")]):
        again = StartWrite(instance="i", engine="e1", incarnation="1", keys=keys, request_id="w")
        assert fleet.refused(again) == "invalid_field"


def test_request_ids_of_callers_without_a_name_are_not_remembered() -> None:
    fleet = Fleet(LIMITS)
    fleet.put(chain(2))
    assert fleet.lookup(chain(1), request_id="1", lease_ms=1_000).hits == 1
    assert fleet.lookup(chain(2), request_id="1", lease_ms=1_000).hits == 2
    for number, one in enumerate(chain(2)):
        fleet.done(Remove(instance="i", keys=[one], request_id="1"))
        assert fleet.block(one) is None, f"remove {number} was taken for a retry"
