"""Limits that span shards: slices granted, wanted, given up and taken, step by step."""

import pytest

from metaservice.core import commands as cmd
from metaservice.core.escrow import find_usage, granted
from metaservice.core.model import EvictionPolicy, Quota, SwitchScope
from metaservice.core.outcomes import RefusedReason
from tests.unit.core_realm import Realm

TENANT = (SwitchScope.tenant, "ta")


def slices(realm: Realm, at: int = 1) -> list[int | None]:
    """What each shard may use of the tenant, as the shards say."""
    found = [find_usage(node.machine.state, *TENANT) for node in realm.nodes]
    return [one and (one.budget_bytes, one.budget_blocks)[at] for one in found]  # type: ignore[misc]


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
    assert total * 20 >= 0.95 * 40_000
