"""Limits that span shards: slices granted, wanted, given up and taken, step by step."""

from typing import Any

import pytest
from msgspec.structs import replace

from metaservice.core import commands as cmd
from metaservice.core.escrow import granted
from metaservice.core.events import BlocksRemoved
from metaservice.core.model import EvictionPolicy, Quota, SwitchScope
from metaservice.core.outcomes import RefusedReason
from metaservice.core.replies import Give
from tests.sim.fleet import key
from tests.unit.core_realm import TENANT, Realm, blocks, give, limit, slices

BLOCK = 20


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


def test_nobody_evicts_for_one_above_its_share_though_others_have_less() -> None:
    realm = Realm(3)
    realm.furnish(tenant=Quota(blocks=90), eviction=EvictionPolicy.lru, high_permille=1000)
    realm.put(0, 10)
    for _ in range(6):
        realm.put(2, 45, ask=realm.used(*TENANT)[1] < 20)
        realm.rest(1)
    for _ in range(6):
        realm.put(1, 35)
        realm.rest(1)
    have = [one or 0 for one in slices(realm)]
    assert have[0] < 30 and have[1] >= 30 and have[2] > 30, have
    before = len([one for one in realm.nodes[2].events if isinstance(one, BlocksRemoved)])
    for _ in range(4):
        realm.put(1, 35)
        realm.round()
    after = len([one for one in realm.nodes[2].events if isinstance(one, BlocksRemoved)])
    assert before == after, "shard 1 has its share"


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
    realm.rest(6)
    realm.start(0, 40)
    slice_bytes = slices(realm, 0, scope)[1]
    settled = realm.errand(1, realm.limits.errand_ms)
    assert slice_bytes is not None and settled is not None
    assert sum(one.bytes for one in settled.give) <= slice_bytes - 20 * BLOCK, "the catalogue knows that too"
    view = realm.catalogue.describe_one("storages", "sa", realm.now_ms)
    assert view.overdue_bytes == 5 * BLOCK  # type: ignore[union-attr]
    realm.check()
