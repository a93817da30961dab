"""Volatile storages in one shard: a pool is one worker's in one life, and what lies in it goes with it."""

from array import array

import pytest

from metaservice.core.commands import (
    ConfirmTask,
    DeleteGroup,
    DeleteInstance,
    DeleteStorage,
    Deregister,
    Heartbeat,
    PutStorage,
    RegisterWorker,
    ReleaseLeases,
    RenewLeases,
    TakeTasks,
    Tick,
    Unknown,
)
from metaservice.core.events import MemberExpired, MemberLeft, PoolChanged, WorkerRegistered
from metaservice.core.model import LocationState, Quota
from metaservice.core.outcomes import LeaseOutcome, RefusedReason
from metaservice.core.replies import LeasesAnswered
from metaservice.core.views import StorageView
from tests.sim.fleet import BLOCK_BYTES, chain, key, outcomes, statuses
from tests.unit.core_host import LIMITS, Host


def test_d11_what_lay_in_memory_goes_with_its_worker_and_what_lay_on_disk_stays() -> None:
    host = Host()
    host.put(chain(3))
    host.prefer("s")
    host.put(chain(2, "disk"))
    host.restart("m2")
    host.restart("2", worker="k", storages=("s",))
    assert host.lookup(chain(3)).hits == 0
    assert host.lookup(chain(2, "disk")).hits == 2, "nothing has to be written again"
    assert host.used() == 2
    host.sound()


@pytest.mark.parametrize("how", ["replaced", "left", "expired", "moved away"])
def test_all_that_is_in_a_pool_goes_in_the_step_that_ends_it(how: str) -> None:
    host = Host()
    host.put(chain(4))
    host.remove([key("k3")])
    pending = host.start(chain(2, "w"))
    states = {LocationState(at).name for at in host.machine.state.index.state}
    assert states == {"writing", "serving", "deleting"}
    before = len(host.events)
    if how == "replaced":
        host.restart("m2")
        expected = [PoolChanged, WorkerRegistered, PoolChanged]
    elif how == "left":
        host.done(Deregister(kind="worker", id="m", incarnation="m1"))
        expected = [PoolChanged, MemberLeft]
    elif how == "moved away":
        host.restart("m1", storages=("s",))
        expected = [PoolChanged, WorkerRegistered]
    else:
        host.silence(pending)
        expected = [PoolChanged, MemberExpired]
    kinds = {PoolChanged, WorkerRegistered, MemberLeft, MemberExpired}
    assert [type(event) for event in host.events[before:] if type(event) in kinds] == expected
    assert host.pool() == (("m", "m2") if how == "replaced" else ("", ""))

    state, usage = host.machine.state, host.mem.usage
    assert set(state.index.state) == {LocationState.gone} and not state.deleting
    assert (usage.bytes, usage.blocks, usage.deleting_bytes, usage.deleting_blocks) == (0, 0, 0, 0)
    assert host.used() == 0 and host.lookup(chain(3)).hits == 0
    assert statuses(host.finish(pending)) == ["removed", "removed"], "the writer is told, not left waiting"
    assert not state.sessions
    assert outcomes(host.start(chain(4))) == ["write"] * 4, "the keys are free at once"
    host.sound()


def test_a_storage_without_a_pool_takes_no_writes_and_the_next_one_does() -> None:
    host = Host()
    assert host.where(host.start(chain(2))) == ["mem", "mem"]
    host.done(Deregister(kind="worker", id="m", incarnation="m1"))
    assert host.where(host.start(chain(2, "x"))) == ["s", "s"]
    host.prefer("mem")
    refused = host.start(chain(2, "y"))
    assert outcomes(refused) == ["refused", "refused"]
    assert set(refused.reasons) == {RefusedReason.no_storage}
    host.restart("m2")
    assert host.where(host.start(chain(2, "y"))) == ["mem", "mem"]
    host.sound()


def test_c4_a_second_worker_is_refused_while_the_first_one_lives() -> None:
    host = Host()
    host.put(chain(2))
    second = RegisterWorker(worker="m9", incarnation="x", storages=("s", "mem"))
    reply = host.send(second)
    assert (reply.code, reply.field, reply.detail) == ("storage_owned", "storages[1]", {"worker": "m"})
    assert "m9" not in host.machine.state.workers and host.lookup(chain(2)).hits == 2
    host.silence()
    host.done(second)
    assert host.pool() == ("m9", "x")
    back = RegisterWorker(worker="m", incarnation="m2", storages=("mem",))
    assert host.refused(back) == "storage_owned", "who comes back late finds it taken"
    host.sound()


def test_registering_again_unchanged_changes_nothing() -> None:
    host = Host()
    host.put(chain(2))
    before = host.machine.digest()
    host.restart("m1")
    assert host.machine.digest() == before and host.lookup(chain(2)).hits == 2


@pytest.mark.parametrize("how", ["left", "expired", "moved away"])
def test_an_incarnation_gets_no_second_pool_under_its_name(how: str) -> None:
    host = Host()
    host.put(chain(1))
    if how == "left":
        host.done(Deregister(kind="worker", id="m", incarnation="m1"))
    elif how == "expired":
        host.silence()
    else:
        host.restart("m1", storages=("s",))
    again = RegisterWorker(worker="m", incarnation="m1", storages=("mem",))
    assert host.refused(again) == "incarnation_retired"
    host.crash()
    assert host.refused(again) == "incarnation_retired"
    host.restart("m2")
    assert host.pool() == ("m", "m2")
    host.sound()


def test_how_many_lives_are_remembered_is_bounded() -> None:
    host = Host()
    for number in range(100):
        host.restart(f"n{number}")
    assert len(host.mem.spent) == 32 and host.mem.spent[-1] == "n98"
    assert host.refused(RegisterWorker(worker="m", incarnation="n98", storages=("mem",)))


def test_a3_slots_are_used_again_at_once_and_never_with_the_same_generation() -> None:
    host = Host()
    first = host.start(chain(3))
    host.restart("m2")
    second = host.put(chain(3))
    assert set(first.locations) == set(second.locations)
    assert set(first.generations) == {1} and set(second.generations) == {2}
    found = host.lookup(chain(3)).located
    assert found is not None and set(found.generations) == {2}
    late = host.finish(first)
    assert statuses(late) == ["removed"] * 3, "a late finish is of what is gone"
    assert host.lookup(chain(3)).hits == 3
    host.sound()


def test_i2_a_block_of_the_next_pool_is_not_seen_before_it_is_durable() -> None:
    host = Host(auto=False)
    host.put(chain(2))
    published = len(host.events)
    host.restart("m2")
    again = host.put(chain(2))
    host.flush(published)
    assert host.lookup(chain(2)).hits == 0, "what became durable went with its pool"
    host.flush()
    looked = host.lookup(chain(2))
    assert looked.located is not None and list(looked.located.generations) == list(again.generations)


def test_a_removal_of_the_earlier_use_deletes_nothing_of_the_next() -> None:
    host = Host(auto=False)
    host.now_ms += LIMITS.lease_ms_max
    host.put(chain(2))
    host.flush()
    host.remove(chain(2))
    removed = len(host.events)
    host.restart("m2")
    host.put(chain(2))
    host.remove(chain(2))
    host.flush(removed)
    host.now_ms += LIMITS.reclaim_delay_ms + 1
    assert not host.ask(TakeTasks(worker="m", incarnation="m2")).tasks, "a crash would bring them back"
    host.flush()
    host.now_ms += LIMITS.reclaim_delay_ms + 1
    tasks = host.ask(TakeTasks(worker="m", incarnation="m2")).tasks
    assert [(sorted(task.locations), set(task.generations), task.pool) for task in tasks] == [
        ([0, 1], {2}, "m2")
    ]


# ---------------------------------------------------------------- who is told


def held(host: Host, names: tuple[str, ...], *, release: bool = False) -> list[tuple[str, int]]:
    """Outcome and changed blocks of leases."""
    command = ReleaseLeases(leases=names) if release else RenewLeases(leases=names, ttl_ms=500)
    reply: LeasesAnswered = host.ask(command)
    return [
        (LeaseOutcome(outcome).name, changed)
        for outcome, changed in zip(reply.outcomes, reply.changed, strict=True)
    ]


def test_read_leases_tell_that_their_blocks_are_gone() -> None:
    host = Host()
    host.put(chain(2, "m"))
    host.prefer("s")
    host.put(chain(1, "d"))
    leases = tuple(
        lease
        for keys in (chain(2, "m"), chain(1, "d"), chain(2, "m"))
        if (lease := host.lookup(keys, lease_ms=1_000).lease) is not None
    )
    assert len(leases) == 3
    host.restart("m2")
    assert held(host, leases) == [("renewed", 2), ("renewed", 0), ("renewed", 2)]
    assert held(host, leases[:2], release=True) == [("released", 2), ("released", 0)]
    assert held(host, leases[:2], release=True) == [("released", 2), ("released", 0)], "again the same"
    host.now_ms += 1_001
    assert held(host, leases) == [("released", 2), ("released", 0), ("expired", 2)]


def test_a_lease_over_an_earlier_pool_holds_nothing_of_the_next() -> None:
    host = Host()
    host.put(chain(3))
    lease = host.lookup(chain(3), lease_ms=1_000).lease
    host.restart("m2")
    host.put(chain(3))
    assert host.remove([key("k2")]) == ["removed"], "it does not wait for the lease"
    newer = host.lookup(chain(2), lease_ms=1_000).lease
    assert lease is not None and newer is not None
    assert held(host, (lease,), release=True) == [("released", 3)]
    assert host.remove([key("k1")]) == ["waiting_for_lease"], "the newer one holds on"
    assert held(host, (newer,), release=True) == [("released", 0)]
    assert set(host.machine.state.index.pins) == {0}
    only = host.machine.read(RenewLeases(leases=(lease,), locations=array("Q", (0,))), host.now_ms)
    assert list(only.outcomes) == [LeaseOutcome.released]


def test_i7_a_lookup_that_is_repeated_is_not_answered_with_what_is_gone() -> None:
    host = Host()
    host.put(chain(2))
    asked = {"engine": "e1", "incarnation": "1", "request_id": "l", "lease_ms": 1_000}
    first = host.lookup(chain(2), **asked)
    assert host.lookup(chain(2), **asked).lease == first.lease
    host.restart("m2")
    assert host.lookup(chain(2), **asked).hits == 0
    host.put(chain(2))
    third = host.lookup(chain(2), **asked)
    assert third.hits == 2 and third.lease != first.lease and third.located is not None
    assert host.lookup(chain(2), **asked).lease == third.lease
    assert set(third.located.generations) == {2}


def test_i7_a_repeated_start_names_the_pool_that_its_places_were_in() -> None:
    host = Host()
    number = host.mem.number
    first = host.start(chain(2), request_id="q")
    assert first.pools == {number: "m1"}
    assert host.start(chain(2), request_id="q") == first
    host.restart("m2")
    again = host.start(chain(2), request_id="q")
    assert (again.session, list(again.locations)) == (first.session, list(first.locations))
    assert again.pools == {number: ""}, "never another one"
    assert host.start(chain(2), request_id="q2").pools == {number: "m2"}
    host.prefer("s")
    assert host.start(chain(1, "d"), request_id="q3").pools == {}


def test_tasks_that_are_under_way_are_void() -> None:
    host = Host()
    host.now_ms += LIMITS.lease_ms_max
    host.put(chain(3))
    host.remove(chain(3))
    host.now_ms += LIMITS.reclaim_delay_ms
    (task,) = host.ask(TakeTasks(worker="m", incarnation="m1")).tasks
    assert (task.storage, task.pool, len(task.locations)) == ("mem", "m1", 3)
    host.restart("m2")
    host.now_ms += LIMITS.task_ttl_ms
    host.done(Tick())
    deletions = host.machine.memory.deletions
    assert deletions.timeouts == 0 and sum(deletions.overdue_bytes.values()) == 0, "nothing is overdue"
    assert not host.ask(TakeTasks(worker="m", incarnation="m2")).tasks
    host.put(chain(3))
    confirmed = host.done(ConfirmTask(worker="m", incarnation="m2", task=task.task, ok=bytes((1, 0, 1))))
    assert (confirmed.gone, confirmed.again) == (3, 0)
    assert host.lookup(chain(3)).hits == 3, "what has the slots now is untouched"
    host.sound()


def test_overdue_deletions_of_a_pool_no_longer_count() -> None:
    host = Host()
    host.done(
        PutStorage(storage="mem", kind="shm", options={"dir": "/dev/shm"}, capacity_bytes=3 * BLOCK_BYTES)
    )
    host.prefer("mem")
    host.now_ms += LIMITS.lease_ms_max
    host.put(chain(3))
    host.remove(chain(3))
    host.now_ms += LIMITS.reclaim_delay_ms
    host.ask(TakeTasks(worker="m", incarnation="m1"))
    host.tick(LIMITS.task_ttl_ms)
    assert set(host.start(chain(1, "x")).reasons) == {RefusedReason.deletion_backlog}
    host.restart("m2")
    assert outcomes(host.start(chain(3, "x"))) == ["write"] * 3
    host.sound()


def test_places_of_an_earlier_pool_are_unknown() -> None:
    host = Host()
    old = host.put(chain(2))
    host.restart("m2")
    new = host.put(chain(1))
    locations, generations = old.locations + new.locations, old.generations + new.generations
    asked = Unknown(worker="m", incarnation="m2", storage="mem", locations=locations, generations=generations)
    assert list(host.ask(asked).unknown) == [1, 1, 0]


# ---------------------------------------------------------------- what hangs together


def test_a_chain_over_two_storages_is_cut_where_the_pool_was() -> None:
    host = Host(quota=Quota(blocks=4), high_permille=1000, low_permille=1000)
    host.prefer("s")
    host.put(chain(1))
    host.prefer("mem")
    host.now_ms += 1
    host.put(chain(3)[1:], parent=key("k0"))
    assert host.lookup(chain(3)).hits == 3
    host.restart("m2")
    assert host.lookup(chain(3)).hits == 1
    host.prefer("s")
    host.now_ms += 1
    host.put(chain(3, "n"))
    assert host.start(chain(1, "x")).evicted == 1, "what lost its children can be evicted"
    assert host.lookup(chain(1)).hits == 0
    host.sound()


def test_a_session_goes_on_with_what_it_writes_elsewhere() -> None:
    host = Host()
    host.done(
        PutStorage(storage="mem", kind="shm", options={"dir": "/dev/shm"}, capacity_bytes=2 * BLOCK_BYTES)
    )
    started = host.start(chain(3))
    assert host.where(started) == ["mem", "mem", "s"]
    host.restart("m2")
    assert statuses(host.finish(started)) == ["removed", "removed", "serving"]
    assert host.used() == 1 and not host.machine.state.sessions
    host.sound()


def test_retiring_an_instance_waits_for_nothing_that_is_gone() -> None:
    host = Host()
    host.put(chain(3))
    host.done(DeleteInstance(instance="i"))
    host.tick()
    host.restart("m2")
    host.tick()
    assert "i" not in host.machine.state.instances
    host.sound()


def test_f4_a_pool_that_is_gone_is_gone_for_the_next_leader_too() -> None:
    host = Host(auto=False)
    host.put(chain(2))
    host.flush()
    host.capture()
    host.restart("m2")
    host.crash(from_capture=True)
    assert host.pool() == ("m", "m1") and host.lookup(chain(2)).hits == 2, "it was never durable"
    host.restart("m2")
    host.flush()
    host.crash(from_capture=True)
    assert host.pool() == ("m", "m2") and host.lookup(chain(2)).hits == 0
    host.silence()
    assert host.pool() == ("", "")
    host.flush()
    host.sound()


# ---------------------------------------------------------------- operators


def test_a_storage_that_a_worker_holds_is_neither_deleted_nor_moved() -> None:
    host = Host()
    host.done(DeleteInstance(instance="i"))
    host.tick()
    host.done(DeleteGroup(group="g"))
    elsewhere = PutStorage(storage="mem", kind="shm", options={"dir": "/elsewhere"})
    assert host.refused(DeleteStorage(storage="mem")) == "in_use"
    assert host.refused(elsewhere) == "storage_mismatch"
    host.done(PutStorage(storage="mem", kind="shm", options={"dir": "/dev/shm"}, capacity_bytes=1))
    assert host.pool() == ("m", "m1"), "its capacity is another matter"
    host.done(Deregister(kind="worker", id="m", incarnation="m1"))
    host.done(elsewhere)
    host.done(PutStorage(storage="mem", kind="posix", options={}))
    assert host.mem.open and not host.machine.state.volatile
    host.done(DeleteStorage(storage="mem"))
    host.sound()


def test_the_pool_is_the_services_to_give() -> None:
    host = Host()
    given = PutStorage(storage="x", kind="shm", options={"pool": "mine"})
    assert host.refused(given) == "invalid_field"
    host.done(PutStorage(storage="x", kind="posix", options={"pool": "a word like any other"}))


def test_views_say_who_holds_a_storage() -> None:
    host = Host()
    views = {view.id: view for view in host.machine.describe("storages") if isinstance(view, StorageView)}
    assert (views["mem"].volatile, views["mem"].worker, views["mem"].pool) == (True, "m", "m1")
    assert (views["s"].volatile, views["s"].worker, views["s"].pool) == (False, "", "")
    assert views["mem"].options == {"dir": "/dev/shm"}, "as it was registered, to be put again"
    assert host.mem.told() == {"dir": "/dev/shm", "pool": "m1"}
    host.done(Deregister(kind="worker", id="m", incarnation="m1"))
    assert host.mem.told() == {"dir": "/dev/shm", "pool": ""}
    assert host.machine.state.storages["s"].told() == {}


def test_heartbeats_of_a_lost_worker_say_that_it_has_to_register() -> None:
    host = Host()
    host.silence()
    reply = host.ask(Heartbeat(kind="worker", id="m", incarnation="m1"))
    assert reply.code == "reregister"


def test_c5_a_worker_that_is_only_silent_for_a_while_keeps_its_pool() -> None:
    host = Host()
    host.put(chain(2))
    host.now_ms += LIMITS.suspect_ms
    host.done(Tick())
    view = host.machine.describe_one("workers", "m", host.now_ms)
    assert getattr(view, "status", "") == "suspect"
    assert host.lookup(chain(2)).hits == 2 and host.pool() == ("m", "m1")
