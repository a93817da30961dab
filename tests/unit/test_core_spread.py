"""How data shards come to know the catalogue, and what they may decide with it."""

from typing import Any

import pytest
from msgspec.structs import replace

from metaservice.core import commands as cmd
from metaservice.core.events import (
    MemberExpired,
    SessionEnded,
    TookOver,
    WriteStarted,
)
from metaservice.core.ids import shard_of
from metaservice.core.machine import Machine
from metaservice.core.model import Quota, SwitchMode, SwitchScope
from metaservice.core.rejections import Rejection
from metaservice.core.replies import InstanceRegistered
from metaservice.core.spread import concerns
from metaservice.core.views import KINDS
from tests.sim.fleet import FINGERPRINT, key
from tests.unit.core_realm import LIMITS, Realm, blocks, give, slices


def refused(reply: Any) -> str:
    """The code of a Rejection."""
    assert isinstance(reply, Rejection), reply
    return reply.code


def registered(machine: Machine) -> list[Any]:
    """What the machine says of the catalogue, without what only some shard or leader knows."""
    view = []
    for kind in KINDS:
        for one in machine.describe(kind, 0):
            fields = {name: getattr(one, name) for name in one.__struct_fields__}
            for name in ("usage", "registered_ms", "silent_ms", "sessions", "status", "overdue_bytes"):
                fields.pop(name, None)
            view.append((kind, fields))
    return view


def busy(realm: Realm) -> None:
    """Everything that can be registered, changed and deleted."""
    realm.furnish("ab", tenant=Quota(blocks=80), group=Quota(bytes=4_000), capacity_bytes=8_000)
    realm.put(1, 3)
    realm.done(0, cmd.PutTenant(tenant="ta", quota=Quota(blocks=100)))
    realm.done(0, cmd.SetSwitch(scope=SwitchScope.cluster, id="", mode=SwitchMode.read_only, reason="r"))
    realm.done(0, cmd.SetSwitch(scope=SwitchScope.storage, id="sb", mode=SwitchMode.bypass))
    for name in ("x", "y", "z"):
        realm.done(0, cmd.RegisterEngine(engine=name, incarnation="1", instance="a1", rank=3))
        realm.done(0, cmd.RegisterWorker(worker=f"w{name}", incarnation="1", storages=("sa",)))
    realm.done(0, cmd.RegisterEngine(engine="x", incarnation="2"))
    realm.done(0, cmd.Deregister(kind="engine", id="y", incarnation="1"))
    realm.done(0, cmd.Deregister(kind="worker", id="wy", incarnation="1"))
    for shard in range(len(realm.nodes)):
        realm.done(0, cmd.DeleteInstance(instance=f"b{shard}"))
    realm.done(0, cmd.PutGroup(group="gb", tenant="tb", storages=("sa",)))
    realm.lowered.add((SwitchScope.group, "gb"))
    realm.done(0, cmd.SetSwitch(scope=SwitchScope.cluster, id="", mode=SwitchMode.normal))


# ---------------------------------------------------------------- taking


def test_events_and_the_difference_lead_to_the_same_catalogue() -> None:
    realm = Realm(3)
    busy(realm)
    realm.feed(1)
    realm.done(2, cmd.SyncCatalogue(view=realm.view()))
    want = registered(realm.catalogue)
    assert registered(realm.nodes[1].machine) == registered(realm.nodes[2].machine) == want
    assert realm.nodes[2].machine.state.catalogue_version == realm.nodes[0].durable
    assert {node.machine.state.cluster for node in realm.nodes} == {"c0ffee"}
    assert {node.machine.state.grant_next for node in realm.nodes[2:]} == {realm.catalogue.state.grant_next}
    realm.check()
    realm.check_replay()


def test_a_shard_that_knows_nothing_takes_the_whole_catalogue() -> None:
    realm = Realm(2)
    realm.furnish("ab", tenant=Quota(blocks=80))
    for shard in range(2):
        realm.done(0, cmd.DeleteInstance(instance=f"b{shard}"))
    other = Realm(2)
    other.nodes[0] = realm.nodes[0]
    other.done(1, cmd.SyncCatalogue(view=realm.view()))
    assert registered(other.nodes[1].machine) == registered(realm.catalogue)
    other.check()


def test_c7_messages_that_come_twice_late_or_out_of_turn_change_nothing() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=80))
    realm.done(0, cmd.PutTenant(tenant="tb"))
    first = realm.news(1)
    view = realm.view()
    realm.done(0, cmd.PutTenant(tenant="tc", quota=Quota(blocks=8)))
    both = realm.news(1)
    assert first is not None and both is not None
    realm.done(1, first)
    digest = realm.nodes[1].machine.digest()
    for late in (first, both, cmd.SyncCatalogue(view=view)):
        before = len(realm.nodes[1].events)
        realm.done(1, late)
        assert len(realm.nodes[1].events) == before
    assert realm.nodes[1].machine.digest() == digest
    realm.feed(1)
    assert "tc" in realm.nodes[1].machine.state.tenants
    realm.check()


def test_what_was_deleted_and_made_again_meanwhile_is_not_what_it_was() -> None:
    realm = Realm(2)
    realm.furnish("ab", tenant=Quota(blocks=80), capacity_bytes=8_000)
    realm.done(0, cmd.RegisterEngine(engine="x", incarnation="1"))
    realm.done(0, cmd.SetSwitch(scope=SwitchScope.group, id="gb", mode=SwitchMode.bypass))
    realm.feed(1)
    for shard in range(2):
        realm.done(0, cmd.DeleteInstance(instance=f"b{shard}"))
    realm.tick(100)
    realm.rest(1)
    realm.tick(100)
    realm.now_ms += 1_000
    errands = realm.nodes[1].machine.errands(realm.now_ms)
    assert errands is not None and [one.instance for one in errands.drained] == ["b1"]
    realm.done(0, cmd.Settle(errands=errands))
    realm.tick(100)
    for command in (
        cmd.DeleteGroup(group="gb"), cmd.DeleteTenant(tenant="tb"),
        cmd.PutTenant(tenant="tb", quota=Quota(blocks=16)),
        cmd.PutGroup(group="gb", tenant="ta", storages=("sa",)),
        cmd.PutInstance(instance="b1", group="gb", fingerprint=FINGERPRINT, shard=1),
        cmd.Deregister(kind="engine", id="x", incarnation="1"),
    ):  # fmt: skip
        realm.done(0, command)
    realm.done(1, cmd.SyncCatalogue(view=realm.view()))
    assert registered(realm.nodes[1].machine) == registered(realm.catalogue)
    assert realm.nodes[1].machine.state.tenants["tb"].usage.budget_blocks == 4
    assert realm.put(1, 2, "b") == 2
    realm.check()


def test_members_that_expired_and_came_back_meanwhile_are_back() -> None:
    realm = Realm(2)
    realm.furnish()
    realm.now_ms += LIMITS.expire_ms
    realm.tick()
    realm.feed(1)
    assert any(isinstance(one, MemberExpired) for one in realm.nodes[1].events)
    state = realm.nodes[1].machine.state
    assert state.engines["e"].expired_ms and state.workers["k"].expired_ms
    realm.done(0, cmd.RegisterEngine(engine="e", incarnation="1"))
    realm.done(0, cmd.RegisterWorker(worker="k", incarnation="1", storages=("sa",)))
    realm.done(1, cmd.SyncCatalogue(view=realm.view()))
    assert not state.engines["e"].expired_ms and not state.workers["k"].expired_ms
    assert realm.put(1, 1) == 1


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_replaced_engines_sessions_end_in_every_shard(whole: bool, leaves: bool) -> None:
    realm = Realm(3)
    realm.furnish()
    for shard in range(3):
        realm.start(shard, 2)
    if leaves:
        realm.done(0, cmd.Deregister(kind="engine", id="e", incarnation="1"))
    else:
        realm.done(0, cmd.RegisterEngine(engine="e", incarnation="2"))
    for shard in (1, 2):
        realm.done(shard, cmd.SyncCatalogue(view=realm.view())) if whole else realm.feed(shard)
    for node in realm.nodes:
        assert not node.machine.state.sessions
        assert any(isinstance(one, SessionEnded) and not one.expired for one in node.events)
        reply = node.machine.execute(
            cmd.StartWrite(instance=f"a{node.shard}", engine="e", incarnation="1", keys=[key("n")]),
            realm.now_ms,
        )[0]
        assert refused(reply) == "reregister"


def test_only_what_data_shards_need_is_passed_on() -> None:
    realm = Realm(2)
    busy(realm)
    realm.start(0, 1)
    passed = {type(event) for event in realm.nodes[0].events if concerns(event)}
    kept = {type(event) for event in realm.nodes[0].events} - passed
    assert TookOver in passed and WriteStarted in kept


# ---------------------------------------------------------------- who decides what


def test_the_catalogue_is_decided_in_one_place() -> None:
    realm = Realm(2)
    realm.furnish()
    data = realm.nodes[1].machine
    for command in (cmd.PutTenant(tenant="t"), cmd.RegisterEngine(engine="x", incarnation="1")):
        with pytest.raises(AssertionError, match="for the catalogue"):
            data.execute(command, realm.now_ms)
    with pytest.raises(AssertionError, match="catalogue"):
        data.read(cmd.Heartbeat(kind="engine", id="e", incarnation="1"), realm.now_ms)
    with pytest.raises(AssertionError, match="copies of itself"):
        realm.catalogue.execute(cmd.SyncCatalogue(view=realm.view()), realm.now_ms)


def test_members_expire_in_the_catalogue_only() -> None:
    realm = Realm(2)
    realm.furnish()
    realm.tick(1)
    realm.now_ms += LIMITS.expire_ms
    realm.done(1, cmd.Tick())
    assert not any(isinstance(one, MemberExpired) for one in realm.nodes[1].events)
    realm.done(0, cmd.Tick())
    assert any(isinstance(one, MemberExpired) for one in realm.nodes[0].events)


def test_instances_are_placed_where_the_fewest_live() -> None:
    realm = Realm(3)
    realm.furnish()
    assert [realm.catalogue.state.instances[f"a{n}"].shard for n in range(3)] == [0, 1, 2]
    realm.done(0, cmd.DeleteInstance(instance="a1"))

    def place(name: str, **more: Any) -> Any:
        return realm.send(0, cmd.PutInstance(instance=name, group="ga", fingerprint=FINGERPRINT, **more))

    assert place("x") == InstanceRegistered(True, ("sa",), 1)
    assert place("y", shard=2).shard == 2
    assert place("y").shard == 2 and place("y", shard=2).shard == 2
    assert refused(place("y", shard=1)) == "invalid_field"
    assert refused(place("z", shard=3)) == "invalid_field"
    assert realm.catalogue.describe_one("instances", "y", 0).shard == 2  # type: ignore[union-attr]


def test_an_instance_is_served_where_it_lives_and_its_ids_say_so() -> None:
    realm = Realm(3)
    realm.furnish()
    started = realm.start(2, 2)
    assert {shard_of(location) for location in started.locations} == {2}
    realm.finish(2, started)
    found = realm.nodes[2].machine.read(cmd.Lookup(instance="a2", keys=[key("n0"), key("n1")]), realm.now_ms)
    assert found.hits == 2 and list(found.located.locations) == list(started.locations)
    elsewhere = realm.nodes[1].machine.read(cmd.Lookup(instance="a2", keys=[key("n0")]), realm.now_ms)
    assert refused(elsewhere) == "instance_unknown" and "shard 2" in elsewhere.message


def test_an_instances_quota_holds_from_the_first_copy_on() -> None:
    realm = Realm(2)
    realm.furnish()
    realm.done(
        0,
        cmd.PutInstance(instance="q", group="ga", fingerprint=FINGERPRINT, quota=Quota(blocks=3), shard=1),
    )
    news = realm.news(1)
    assert news is not None and len(news.events) == 1, "no second event that could come later"
    realm.feed(1)
    command = cmd.StartWrite(
        instance="q", engine="e", incarnation="1", keys=[key(f"q{row}") for row in range(5)]
    )
    assert realm.done(1, command).outcomes.count(0) == 3
    assert not realm.nodes[1].machine.short(command), "nobody has more of it"


# ---------------------------------------------------------------- going


def retire(realm: Realm, shard: int) -> None:
    """The shard's blocks of its instance are removed and deleted."""
    for _ in range(2):
        realm.tick(200)
        for task in (
            realm.nodes[shard].machine.read(cmd.TakeTasks(worker="k", incarnation="1"), realm.now_ms).tasks
        ):
            realm.done(shard, cmd.ConfirmTask(worker="k", incarnation="1", task=task.task))


def test_an_instance_goes_once_its_shard_says_that_it_is_empty() -> None:
    realm = Realm(2)
    realm.furnish()
    realm.put(1, 3)
    realm.tick(2_000)
    realm.done(0, cmd.DeleteInstance(instance="a1"))
    realm.rest(2)
    assert "a1" in realm.catalogue.state.instances, "its bytes are not deleted"
    retire(realm, 1)
    realm.tick()
    realm.rest(1)
    for node in realm.nodes:
        assert "a1" not in node.machine.state.instances
    assert realm.catalogue.state.instances["a0"].shard == 0
    realm.check()
    realm.check_replay()


def test_an_instance_that_a_crash_fills_again_does_not_go() -> None:
    realm = Realm(2, auto=False)
    realm.furnish()
    realm.put(1, 3)
    realm.flush(1)
    realm.tick(2_000)
    realm.done(0, cmd.DeleteInstance(instance="a1"))
    realm.flush(0)
    realm.feed(1)
    realm.tick()
    realm.flush(1)
    retire(realm, 1)
    realm.tick()
    realm.now_ms += 1_000
    errands = realm.nodes[1].machine.errands(realm.now_ms)
    assert errands is not None and not errands.drained, "that its places are gone is not durable"
    realm.flush(1)
    errands = realm.nodes[1].machine.errands(realm.now_ms)
    assert errands is not None and [one.instance for one in errands.drained] == ["a1"]


def test_a_late_word_does_not_let_the_next_instance_of_the_name_go() -> None:
    realm = Realm(2)
    realm.furnish()
    realm.done(0, cmd.DeleteInstance(instance="a1"))
    realm.feed(1)
    realm.tick(100)
    late = realm.nodes[1].machine.errands(realm.now_ms + 1_000)
    assert late is not None and late.drained
    realm.now_ms += 2_000
    realm.rest(1)
    assert "a1" not in realm.catalogue.state.instances
    realm.done(0, cmd.PutInstance(instance="a1", group="ga", fingerprint=FINGERPRINT, shard=1))
    realm.feed(1)
    realm.put(1, 2)
    realm.done(0, cmd.DeleteInstance(instance="a1"))
    realm.done(0, cmd.Settle(errands=late))
    assert "a1" in realm.catalogue.state.instances


def test_a_storage_goes_once_every_shard_says_that_nothing_is_in_it() -> None:
    realm = Realm(3)
    realm.furnish()
    realm.done(0, cmd.PutStorage(storage="new", kind="posix", options={}))
    realm.put(2, 2)
    realm.tick(2_000)
    realm.rest(1)

    def delete() -> str:
        return getattr(realm.send(0, cmd.DeleteStorage(storage="sa")), "message", "")

    assert "group 'ga'" in delete()
    realm.done(0, cmd.PutGroup(group="ga", tenant="ta", storages=("new",)))
    assert "shard 1 has not reported" in delete(), "it may not know yet that the group left"
    realm.round()
    realm.round()
    assert "2 locations of shard 2" in delete()
    moved = cmd.PutStorage(storage="sa", kind="s3", options={})
    assert refused(realm.send(0, moved)) == "storage_mismatch"
    keys = list(realm.nodes[2].machine.state.instances["a2"].primary.slots)
    realm.done(2, cmd.Remove(instance="a2", keys=keys))
    retire(realm, 2)
    realm.round()
    realm.crash(0)
    assert "shard 1 has not reported" in delete(), "a new leader was told nothing yet"
    realm.rest(2)
    assert delete() == ""
    realm.rest(1)
    assert all("sa" not in node.machine.state.storages for node in realm.nodes)
    realm.check()


def test_rows_that_another_leader_was_told_do_not_count_as_told() -> None:
    realm = Realm(2)
    realm.furnish()
    realm.done(0, cmd.PutStorage(storage="new", kind="posix", options={}))
    realm.put(1, 2)
    realm.done(0, cmd.PutGroup(group="ga", tenant="ta", storages=("new",)))
    realm.rest(2)
    assert "2 locations of shard 1" in realm.send(0, cmd.DeleteStorage(storage="sa")).message
    realm.crash(0)
    settled = realm.errand(1, realm.limits.errand_ms)
    assert settled is not None
    assert "has not reported" in realm.send(0, cmd.DeleteStorage(storage="sa")).message
    realm.rest(2)
    assert "2 locations of shard 1" in realm.send(0, cmd.DeleteStorage(storage="sa")).message


def test_an_answer_to_the_leader_before_acknowledges_nothing() -> None:
    realm = Realm(2)
    realm.furnish()
    realm.put(1, 2)
    first = realm.nodes[1].machine.errands(realm.now_ms)
    assert first is not None
    settled = realm.done(0, cmd.Settle(errands=first))
    realm.crash(1)
    second = realm.nodes[1].machine.errands(realm.now_ms)  # and that is lost
    assert second is not None and (second.number, second.base) == (first.number, 0)
    realm.done(1, cmd.GiveBudget(settled=settled))
    realm.now_ms += realm.limits.errand_ms
    third = realm.nodes[1].machine.errands(realm.now_ms)
    assert third is not None and third.base == 0 and third.used == second.used


def test_a_shard_that_takes_the_whole_catalogue_has_what_it_gave_up_no_more() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=80))
    give(realm, 1, blocks(5))
    give(realm, 1, blocks(3))
    errands = realm.nodes[1].machine.errands(realm.now_ms)
    assert errands is not None
    realm.done(0, cmd.Settle(errands=replace(errands, returns=errands.returns[:1])))
    realm.done(0, cmd.PutTenant(tenant="new"))
    realm.done(1, cmd.SyncCatalogue(view=realm.view()))
    assert slices(realm) == [20, 12] and list(realm.nodes[1].machine.state.outstanding) == [2]
    realm.check()
    realm.rest(2)
    assert not realm.nodes[1].machine.state.outstanding
    realm.check()


def test_a_storage_that_a_crash_fills_again_does_not_go() -> None:
    realm = Realm(2, auto=False)
    realm.furnish()
    realm.put(1, 2)
    realm.done(0, cmd.PutStorage(storage="new", kind="posix", options={}))
    realm.done(0, cmd.PutGroup(group="ga", tenant="ta", storages=("new",)))
    realm.flush(0)
    realm.feed(1)
    realm.flush(1)
    realm.tick(2_000)
    keys = list(realm.nodes[1].machine.state.instances["a1"].primary.slots)
    realm.done(1, cmd.Remove(instance="a1", keys=keys))
    realm.flush(1)
    retire(realm, 1)  # and that is not durable
    for _ in range(3):
        realm.now_ms += 1_000
        errands = realm.nodes[1].machine.errands(realm.now_ms)
        assert errands is not None
        settled = realm.done(0, cmd.Settle(errands=errands))
        realm.done(1, cmd.GiveBudget(settled=settled))
    assert refused(realm.send(0, cmd.DeleteStorage(storage="sa"))) == "in_use"
    realm.flush(0)
    realm.crash(1)
    assert realm.nodes[1].machine.state.storages["sa"].usage.deleting_blocks == 2
    retire(realm, 1)
    realm.flush(1)
    realm.tick(2_000)
    retire(realm, 1)
    realm.flush(1)
    realm.rest(3)
    realm.done(0, cmd.DeleteStorage(storage="sa"))
