"""Limits that span shards: they change, scopes come and go, leaders die at any step."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from metaservice.core import commands as cmd
from metaservice.core.escrow import granted
from metaservice.core.events import BlocksRemoved, ReturnTaken, SliceGranted, SliceReturned
from metaservice.core.model import EvictionPolicy, Limits, Quota, SwitchScope
from metaservice.core.rejections import Rejection
from metaservice.core.replies import Errands
from tests.unit.core_realm import TENANT, Realm, blocks, give, limit, slices


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
