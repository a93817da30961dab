"""Snapshots of one of several shards, states that are compared, and the end of an epoch by plan."""

import pytest

from metaservice.core import commands as cmd
from metaservice.core.capture import restore
from metaservice.core.events import HotBlocks, StateChecked
from metaservice.core.machine import Machine
from metaservice.core.model import EvictionPolicy, Quota
from metaservice.core.summary import StateDiverged
from tests.sim.fleet import Fleet, key
from tests.unit.core_realm import LIMITS, Realm


def test_a_snapshot_of_another_number_of_shards_is_refused() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=80))
    chunks = realm.nodes[1].machine.capture()
    assert Machine.restore(chunks, 1, LIMITS, 2).digest() == realm.nodes[1].machine.digest()
    for shards in (1, 3):
        with pytest.raises(ValueError, match="shards"):
            restore(chunks, LIMITS, shards)
    with pytest.raises(ValueError, match="shards"):
        restore(Fleet().machine.capture(), LIMITS, 2)


def test_i6_a_replica_that_adds_up_to_something_else_is_found_out() -> None:
    fleet = Fleet(LIMITS)
    fleet.put([key("a")])
    fleet.tick(LIMITS.hot_summary_ms)
    checks = [row for row, one in enumerate(fleet.events) if isinstance(one, StateChecked)]
    assert len(checks) == 1
    fleet.replayed()
    replica = Machine(0, LIMITS)
    for event in fleet.events[: checks[0]]:
        replica.apply(event)
    replica.state.tenants["t"].usage.bytes += 1
    with pytest.raises(StateDiverged):
        replica.apply(fleet.events[checks[0]])


def test_states_are_compared_only_when_something_happened() -> None:
    fleet = Fleet(LIMITS)
    for _ in range(5):
        fleet.tick(LIMITS.hot_summary_ms)
    assert sum(isinstance(one, StateChecked) for one in fleet.events) == 1
    for name in "abc":
        fleet.put([key(name)])
        fleet.tick(1)
    assert sum(isinstance(one, StateChecked) for one in fleet.events) == 2, "not too often"
    fleet.tick(LIMITS.hot_summary_ms)
    assert sum(isinstance(one, StateChecked) for one in fleet.events) == 3
    assert not any(isinstance(one, HotBlocks) for one in fleet.events), "nothing was looked up"


def test_a_leader_that_stands_down_by_plan_is_a_follower() -> None:
    fleet = Fleet(LIMITS, quota=Quota(blocks=3), eviction=EvictionPolicy.lru, high_permille=1000)
    fleet.tick(1_000)
    fleet.put([key("a")])
    fleet.put([key("b")])
    fleet.put([key("c")])
    held = fleet.lookup([key("a"), key("b")], mode="each", lease_ms=500)
    fleet.remove([key("b"), key("c")])
    fleet.tick(100)
    assert [len(task.locations) for task in fleet.take()] == [1], "b is leased"
    digest = fleet.machine.digest()
    machine = fleet.machine
    machine.stand_down()
    assert machine.digest() == digest and not any(machine.state.index.pins)
    assert machine.gauges()["leases_held"] == 0
    fleet.take_over()
    fleet.done(cmd.RegisterEngine(engine="e1", incarnation="1"))
    assert fleet.ask(cmd.ReleaseLeases(leases=(held.lease or "",))).outcomes == b"\x03", "unknown"
    assert fleet.take() == [], "what the leader before promised is waited for"
    fleet.tick(1_000)
    assert sum(len(task.locations) for task in fleet.take()) == 2, "what was in work, or leased, is offered"
    machine.check()


def test_d4_readers_of_followers_are_waited_for_from_when_a_removal_is_durable() -> None:
    fleet = Fleet(LIMITS)
    fleet.put([key("a")])
    fleet.tick(2_000)
    fleet.auto = False
    fleet.remove([key("a")])
    fleet.now_ms += 10_000  # the append hung; followers went on showing the block
    fleet.machine.mark_durable(len(fleet.events), fleet.now_ms)
    assert fleet.take() == []
    fleet.now_ms += LIMITS.reclaim_delay_ms
    assert [len(task.locations) for task in fleet.take()] == [1]
