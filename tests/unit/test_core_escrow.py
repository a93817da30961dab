"""Limits that span shards: slices granted, wanted, given up and taken, step by step."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from metaservice.core import commands as cmd
from metaservice.core.escrow import find_usage, granted
from metaservice.core.events import BlocksRemoved, ReturnTaken, SliceGranted, SliceReturned
from metaservice.core.model import EvictionPolicy, Limits, Quota, SwitchScope
from metaservice.core.outcomes import RefusedReason
from metaservice.core.rejections import Rejection
from metaservice.core.replies import Errands, Give, Settled
from tests.sim.fleet import key
from tests.unit.core_realm import Realm

TENANT = (SwitchScope.tenant, "ta")
BLOCK = 20


def slices(realm: Realm, at: int = 1, scope: tuple[SwitchScope, str] = TENANT) -> list[int | None]:
    """What each shard may use of a scope, as the shards say."""
    usages = [find_usage(node.machine.state, *scope) for node in realm.nodes]
    assert None not in usages
    return [(one.budget_bytes, one.budget_blocks)[at] for one in usages if one is not None]


def limit(realm: Realm, quota: Quota) -> None:
    """The operator sets the tenant's limit."""
    realm.lowered.add(TENANT)
    realm.done(0, cmd.PutTenant(tenant="ta", quota=quota))


def give(realm: Realm, shard: int, *gives: Give) -> None:
    """The shard is asked to give, whatever the catalogue thinks."""
    realm.done(shard, cmd.GiveBudget(settled=Settled(0, 0, 0, 0, (), gives)))


def blocks(amount: int, evict: bool = False) -> Give:
    """So many blocks of the tenant's."""
    return Give(*TENANT, 0, amount, evict)


# ---------------------------------------------------------------- granting


def test_one_shard_uses_all_at_once_and_has_no_errands() -> None:
    realm = Realm(1)
    realm.furnish(tenant=Quota(blocks=10))
    assert slices(realm) == [10]
    assert realm.catalogue.errands(realm.now_ms) is None
    assert realm.put(0, 12) == 10


def test_each_shard_begins_with_a_part_and_the_rest_is_granted_on_demand() -> None:
    realm = Realm(4)
    realm.furnish(tenant=Quota(blocks=800))
    assert slices(realm) == [100] * 4
    assert realm.put(2, 100) == 100
    assert realm.put(2, 50) == 50
    have = slices(realm)
    assert have[2] is not None and have[2] >= 150 and have[0] == have[1] == have[3] == 100
    realm.check()


def test_without_asking_a_shard_holds_to_its_slice() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=40))
    started = realm.start(1, 15, ask=False)
    assert started.outcomes.count(0) == 10
    assert started.reasons[-1] == RefusedReason.quota_tenant
    realm.check()


@pytest.mark.parametrize("shards", [2, 4, 7])
def test_one_busy_shard_gets_nearly_all_of_a_limit(shards: int) -> None:
    realm = Realm(shards)
    realm.furnish(tenant=Quota(bytes=40_000))
    realm.rest(2)
    total = 0
    for _ in range(60):
        total += realm.put(shards - 1, 50)
        realm.round()
        realm.check()
    assert total * BLOCK >= 0.95 * 40_000


def test_a_write_is_short_only_where_asking_may_help() -> None:
    realm = Realm(2)
    realm.furnish("ab", tenant=Quota(blocks=40))
    machine = realm.nodes[1].machine

    def write(count: int, instance: str = "a1", **more: Any) -> cmd.StartWrite:
        keys = [key(f"n{row}") for row in range(count)]
        return cmd.StartWrite(instance=instance, engine="e", incarnation="1", keys=keys, **more)

    assert not machine.short(write(10)) and machine.short(write(11))
    assert not machine.short(write(11, "a0")), "it lives elsewhere"
    assert not machine.short(write(11, "none")) and not machine.short(write(11, group="none"))
    realm.finish(1, realm.done(1, write(10)))
    assert not machine.short(write(10)), "they are there already"
    assert machine.short(write(11)), "one is new"
    limit(realm, Quota(blocks=10))
    realm.feed(1)
    assert not machine.short(write(11)), "the slice is all that the limit allows"


def test_news_goes_at_once_and_the_rest_once_a_round() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=40))
    machine = realm.nodes[1].machine
    assert realm.errand(1) is not None, "the first report"
    assert machine.errands(realm.now_ms) is None
    assert realm.errand(1, realm.limits.errand_ms - 1) is None
    assert realm.errand(1, 1) is not None
    give(realm, 1, blocks(3))
    errands = machine.errands(realm.now_ms)
    assert errands is not None and errands.returns[0].blocks == 3
    assert machine.errands(realm.now_ms) is None, "it was told; again in the next round"
    assert realm.errand(1, realm.limits.errand_ms) is not None
    assert machine.state.outstanding == {}


# ---------------------------------------------------------------- giving


def test_given_up_budget_is_free_only_once_the_catalogue_took_it_and_only_once() -> None:
    realm = Realm(3)
    realm.furnish(tenant=Quota(blocks=60))
    give(realm, 1, blocks(4))
    assert slices(realm) == [10, 6, 10]
    assert granted(realm.catalogue.state, TENANT)[1] == [None, 10]
    realm.check()
    errands = realm.nodes[1].machine.errands(realm.now_ms)
    assert errands is not None
    for _ in range(2):
        realm.done(0, cmd.Settle(errands=errands))
        assert granted(realm.catalogue.state, TENANT)[1] == [None, 6]
        realm.check()
    assert 1 in realm.nodes[1].machine.state.outstanding
    realm.feed(1)
    assert not realm.nodes[1].machine.state.outstanding
    realm.check()


def test_returns_are_taken_in_order() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=40))
    give(realm, 1, blocks(1))
    give(realm, 1, blocks(2))
    errands = realm.nodes[1].machine.errands(realm.now_ms)
    assert errands is not None and [one.number for one in errands.returns] == [1, 2]
    realm.done(0, cmd.Settle(errands=replace(errands, returns=errands.returns[1:])))
    assert granted(realm.catalogue.state, TENANT)[1] == [None, 10], "the first is missing"
    realm.done(0, cmd.Settle(errands=errands))
    assert granted(realm.catalogue.state, TENANT)[1] == [None, 7]
    realm.done(0, cmd.Settle(errands=replace(errands, number=0)))
    assert granted(realm.catalogue.state, TENANT)[1] == [None, 7]
    assert realm.nodes[0].machine.state.returns_taken == [0, 2]


def test_a_return_is_told_only_once_it_is_durable() -> None:
    realm = Realm(2, auto=False)
    realm.furnish(tenant=Quota(blocks=40))
    realm.flush(1)
    machine = realm.nodes[1].machine
    give(realm, 1, blocks(4))
    errands = machine.errands(realm.now_ms)
    assert errands is not None and not errands.returns
    realm.flush(1)
    errands = machine.errands(realm.now_ms)
    assert errands is not None and len(errands.returns) == 1


def test_what_is_in_use_is_not_given_and_late_answers_do_no_harm() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=40))
    realm.put(1, 8)
    give(realm, 1, blocks(5), Give(SwitchScope.group, "none", 0, 1, False))
    assert slices(realm)[1] == 8
    give(realm, 1, blocks(5, evict=True))
    assert slices(realm)[1] == 8, "the policy is to refuse, not to evict"
    give(realm, 1, Give(SwitchScope.instance, "a1", 0, 1, False), Give(*TENANT, 100, 0, False))
    assert slices(realm)[1] == 8, "neither instances nor dimensions without a limit are shared"
    realm.check()


def test_the_catalogues_own_shard_gives_at_once() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=40))
    give(realm, 0, blocks(5))
    assert slices(realm) == [5, 10] and realm.catalogue.state.outstanding == {}
    assert realm.put(1, 30) == 30, "it is free at once"
    realm.check()


def test_who_has_more_than_its_share_evicts_for_who_has_less() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=100), eviction=EvictionPolicy.lru, high_permille=1000)
    for _ in range(20):
        realm.put(0, 10)
        realm.round()
    assert realm.used(*TENANT)[1] >= 95
    for _ in range(20):
        realm.put(1, 10)
        realm.put(0, 10)
        realm.round()
        realm.check()
    have = slices(realm)
    assert sorted(have) == [50, 50], have  # type: ignore[type-var]
    assert any(isinstance(one, BlocksRemoved) and one.why == "quota" for one in realm.nodes[0].events)
    assert realm.used(*TENANT)[1] >= 95


def test_nobody_evicts_for_one_that_has_its_share() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=100), eviction=EvictionPolicy.lru, high_permille=1000)
    for _ in range(20):
        for shard in (0, 1):
            realm.put(shard, 10)
        realm.round()
    before = slices(realm)
    for _ in range(10):
        realm.put(1, 30)
        realm.round()
    assert slices(realm) == before


def test_watermarks_leave_a_slice_alone_that_may_grow() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=100), eviction=EvictionPolicy.lru)
    realm.put(1, 25)
    realm.tick(100)
    assert realm.used(*TENANT)[1] == 25, "its slice is full, the limit is not"
    for _ in range(12):
        for shard in (0, 1):
            realm.put(shard, 10)
        realm.round()
    assert realm.nodes[1].machine.memory.errander.starved
    realm.tick(100)
    assert realm.used(*TENANT)[1] <= 91, "now there is no more to be had: the watermarks hold"


def test_a_scope_is_starved_only_when_nobody_has_any_to_spare() -> None:
    realm = Realm(3)
    realm.furnish(tenant=Quota(blocks=60))
    realm.rest(1)
    realm.put(0, 10)
    realm.put(1, 30)
    realm.put(2, 10)
    realm.rest(1)
    for _ in range(4):
        realm.start(1, 20)
        realm.rest(1)
    assert realm.used(*TENANT)[1] >= 59
    assert realm.nodes[1].machine.memory.errander.starved == {TENANT}
    limit(realm, Quota(blocks=100))
    realm.feed(1)
    assert not realm.nodes[1].machine.memory.errander.starved, "there may be more now"
    assert realm.put(1, 20) == 20


# ---------------------------------------------------------------- limits that change


def test_a_raised_limit_is_granted_on_demand() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=20))
    assert realm.put(1, 30) == 15
    realm.done(0, cmd.PutTenant(tenant="ta", quota=Quota(blocks=200)))
    realm.rest(1)
    assert realm.put(1, 90) == 90
    realm.check()


@pytest.mark.parametrize("policy", list(EvictionPolicy))
def test_a_lowered_limit_is_come_down_to(policy: EvictionPolicy) -> None:
    realm = Realm(3)
    realm.furnish(tenant=Quota(blocks=300), eviction=policy, high_permille=1000)
    for _ in range(3):
        for shard in range(3):
            realm.put(shard, 20)
        realm.round()
    assert realm.used(*TENANT)[1] == 180
    limit(realm, Quota(blocks=90))
    realm.rest(6)
    if policy is EvictionPolicy.lru:
        assert realm.used(*TENANT)[1] <= 90
        assert sum(one or 0 for one in slices(realm)) <= 90
    else:
        assert realm.used(*TENANT)[1] == 180 == sum(one or 0 for one in slices(realm))
        assert realm.put(1, 5) == 0
    limit(realm, Quota(blocks=300))
    realm.rest(2)
    assert realm.put(1, 5) == 5
    realm.check()


def test_a_limit_where_there_was_none_binds_each_shard_to_what_it_uses() -> None:
    realm = Realm(3)
    realm.furnish()
    for shard in range(3):
        assert realm.put(shard, 10 * (shard + 1)) == 10 * (shard + 1)
    limit(realm, Quota(blocks=100))
    assert slices(realm) == [10, None, None]
    realm.feed(1)
    assert slices(realm) == [10, 20, None]
    realm.errand(1)
    assert granted(realm.catalogue.state, TENANT) == [[None, 10], [None, 20], [None, None]]
    assert realm.put(1, 5) == 0, "nobody is granted anything while a shard is not bound yet"
    realm.rest(2)
    for _ in range(4):
        realm.put(1, 40)
        realm.rest(1)
    assert realm.used(*TENANT)[1] == 100
    assert realm.put(2, 1) == 0
    realm.lowered.clear()
    realm.check()


def test_a_limit_that_is_lifted_binds_nobody() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=10))
    give(realm, 1, blocks(1))
    limit(realm, Quota())
    realm.rest(1)
    assert slices(realm) == [None, None]
    assert realm.put(1, 50) == 50
    realm.check()


def test_what_was_kept_under_an_older_limit_does_not_count() -> None:
    realm = Realm(2)
    realm.furnish()
    limit(realm, Quota(blocks=100))
    realm.feed(1)
    old = realm.nodes[1].machine.errands(realm.now_ms)
    assert old is not None and old.returns[0].kept and old.returns[0].blocks == 0
    limit(realm, Quota())
    realm.feed(1)
    realm.put(1, 30)
    limit(realm, Quota(blocks=60))
    realm.done(0, cmd.Settle(errands=old))
    assert granted(realm.catalogue.state, TENANT)[1] == [None, None], "it bound itself to another limit"
    realm.feed(1)
    assert slices(realm)[1] == 30
    for _ in range(4):
        realm.rest(1)
        realm.put(0, 40)
    assert realm.used(*TENANT)[1] == 60
    realm.lowered.clear()
    realm.check()


def test_what_was_given_of_an_earlier_scope_of_the_name_does_not_count() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=40))
    give(realm, 1, blocks(7))
    errands = realm.nodes[1].machine.errands(realm.now_ms)
    for shard in (0, 1):
        realm.done(0, cmd.DeleteInstance(instance=f"a{shard}"))
    realm.tick(100)
    for _ in range(2):
        realm.round()
        realm.tick(600)
    # what it told is late: the catalogue has another tenant of the name by now
    assert realm.catalogue.state.returns_taken[1] == 1, "taken in the round"
    give(realm, 1, blocks(2))
    late = realm.nodes[1].machine.errands(realm.now_ms)
    assert errands is not None and late is not None and late.returns[0].number == 2
    realm.done(0, cmd.DeleteGroup(group="ga"))
    realm.done(0, cmd.DeleteTenant(tenant="ta"))
    realm.done(0, cmd.PutTenant(tenant="ta", quota=Quota(blocks=40)))
    realm.done(0, cmd.Settle(errands=late))
    assert granted(realm.catalogue.state, TENANT)[1] == [None, 10]
    assert realm.catalogue.state.returns_taken[1] == 2
    realm.feed(1)
    assert slices(realm) == [10, 10]
    realm.check()


def test_returns_of_a_scope_that_went_keep_their_place() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=40))
    for shard in (0, 1):
        realm.done(0, cmd.DeleteInstance(instance=f"a{shard}"))
    realm.tick(100)
    for _ in range(2):
        realm.round()
        realm.tick(600)
    give(realm, 1, blocks(7))
    realm.done(0, cmd.DeleteGroup(group="ga"))
    realm.done(0, cmd.DeleteTenant(tenant="ta"))
    realm.feed(1)
    assert list(realm.nodes[1].machine.state.outstanding) == [1]
    realm.done(0, cmd.PutTenant(tenant="ta", quota=Quota(blocks=40)))
    realm.rest(2)
    assert realm.catalogue.state.returns_taken[1] == 1
    assert slices(realm) == [10, 10] and not realm.nodes[1].machine.state.outstanding
    realm.check()


# ---------------------------------------------------------------- storages


def test_a_storages_capacity_is_shared_too_and_overdue_deletions_count() -> None:
    realm = Realm(2)
    realm.furnish(capacity_bytes=40 * BLOCK, eviction=EvictionPolicy.lru)
    scope = (SwitchScope.storage, "sa")
    assert slices(realm, 0, scope) == [200, 200]
    realm.put(1, 10)
    assert realm.put(1, 10) == 10
    have = slices(realm, 0, scope)
    assert have[1] is not None and have[1] >= 20 * BLOCK
    realm.tick(2_000)
    machine = realm.nodes[1].machine
    keys = list(machine.state.instances["a1"].primary.slots)
    realm.done(1, cmd.Remove(instance="a1", keys=keys[:5]))
    realm.tick(200)
    assert machine.read(cmd.TakeTasks(worker="k", incarnation="1"), realm.now_ms).tasks
    realm.tick(realm.limits.task_ttl_ms)
    assert machine.memory.deletions.overdue_bytes == {0: 5 * BLOCK}
    give(realm, 1, Give(*scope, 1_000, 0, False))
    assert slices(realm, 0, scope)[1] == 20 * BLOCK, "their bytes are still there"
    realm.round()
    view = realm.catalogue.describe_one("storages", "sa", realm.now_ms)
    assert view.overdue_bytes == 5 * BLOCK  # type: ignore[union-attr]
    realm.check()


# ---------------------------------------------------------------- crashes


def steps(realm: Realm) -> list[Callable[[], Any]]:
    """A grant and a return with everything between, as single steps; messages are kept between them."""
    post: dict[str, Any] = {}

    def ask(shard: int, name: str) -> None:
        realm.now_ms += realm.limits.errand_ms
        post[name] = realm.nodes[shard].machine.errands(realm.now_ms)

    def settle(name: str) -> None:
        if post[name] is not None:
            post[f"{name}!"] = realm.done(0, cmd.Settle(errands=post[name]))

    def answer(shard: int, name: str) -> None:
        if f"{name}!" in post and realm.nodes[0].durable == len(realm.nodes[0].events):
            realm.done(shard, cmd.GiveBudget(settled=post[f"{name}!"]))

    return [
        lambda: realm.start(1, 14, ask=False),
        lambda: ask(1, "want"),
        lambda: settle("want"),
        lambda: realm.flush(0),
        lambda: realm.feed(1),
        lambda: answer(1, "want"),
        lambda: realm.flush(1),
        lambda: give(realm, 2, blocks(6)),
        lambda: ask(2, "too early"),
        lambda: realm.flush(2),
        lambda: ask(2, "give"),
        lambda: settle("give"),
        lambda: settle("give"),
        lambda: realm.flush(0),
        lambda: answer(2, "give"),
        lambda: realm.feed(2),
        lambda: realm.flush(2),
        lambda: realm.feed(1),
        lambda: realm.start(1, 14, ask=False),
    ]


@pytest.mark.parametrize("crashed", [0, 1, 2])
@pytest.mark.parametrize("at", range(19))
def test_a_take_over_at_any_step_loses_and_doubles_nothing(crashed: int, at: int) -> None:
    realm = Realm(3, auto=False)
    realm.furnish(tenant=Quota(blocks=66))
    for number, step in enumerate(steps(realm)):
        step()
        realm.check()
        if number == at:
            realm.crash(crashed)
            realm.check()
    for node in realm.nodes:
        realm.flush(node.shard)
    realm.auto = True
    realm.tick(10_000)
    realm.rest(3)
    for _ in range(12):
        for shard in range(3):
            realm.put(shard, 4)
        realm.round()
        realm.check()
    assert realm.used(*TENANT)[1] >= 63
    realm.check_replay()


def test_a_new_catalogue_leader_is_told_everything_again() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=40))
    realm.put(0, 3)
    realm.put(1, 5)
    realm.rest(1)

    def shown() -> tuple[int, int | None]:
        usage = realm.catalogue.describe_one("tenants", "ta", realm.now_ms).usage  # type: ignore[union-attr]
        return usage.blocks, usage.blocks_max

    assert shown() == (8, 40), "of all shards, and of the operator's limit"
    assert dict(realm.catalogue.usages("instances"))["a1"] == (100, 5, 0, 0)
    realm.crash(0)
    assert shown() == (3, 40)
    realm.rest(2)
    assert shown() == (8, 40)
    realm.crash(1)
    realm.rest(1)
    assert shown() == (8, 40)
    keys = list(realm.nodes[1].machine.state.instances["a1"].primary.slots)
    realm.done(1, cmd.Remove(instance="a1", keys=keys[:2]))
    realm.round()
    assert shown() == (6, 40)


def test_old_and_doubled_reports_change_nothing() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=40))
    realm.rest(1)
    realm.put(1, 5)
    realm.now_ms += realm.limits.errand_ms
    old = realm.nodes[1].machine.errands(realm.now_ms)
    assert old is not None
    realm.put(1, 2)
    realm.rest(1)
    for errands in (old, replace(old, epoch=old.epoch - 1, number=99)):
        realm.done(0, cmd.Settle(errands=errands))
        usage = realm.catalogue.describe_one("tenants", "ta", realm.now_ms).usage  # type: ignore[union-attr]
        assert usage.blocks == 7


def test_errands_of_no_shard_are_refused() -> None:
    realm = Realm(2)
    reply = realm.send(0, cmd.Settle(errands=Errands(2, 1, 1, 0, 0, (), (), (), ())))
    assert isinstance(reply, Rejection) and reply.code == "invalid_field"


def test_grants_and_returns_are_in_the_journals_as_amounts() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=40))
    give(realm, 1, blocks(4))
    realm.rest(1)
    copied = [one for one in realm.nodes[1].events if isinstance(one, SliceGranted)]
    assert [(one.shard, one.blocks) for one in copied if one.scope is SwitchScope.tenant] == [(1, 10)]
    assert [one.blocks for one in realm.nodes[1].events if isinstance(one, SliceReturned)] == [4]
    for node in realm.nodes:
        assert [one.number for one in node.events if isinstance(one, ReturnTaken)] == [1]


def test_a_large_eviction_for_others_is_bounded() -> None:
    realm = Realm(2, Limits(evict_batch_max=8, errand_ms=500))
    realm.furnish(tenant=Quota(blocks=100), eviction=EvictionPolicy.lru, high_permille=1000)
    realm.put(1, 25)
    give(realm, 1, blocks(20, evict=True))
    removed = [one for one in realm.nodes[1].events if isinstance(one, BlocksRemoved)]
    assert [len(one.slots) // 4 for one in removed] == [8]
    assert slices(realm)[1] == 17
    realm.check()
