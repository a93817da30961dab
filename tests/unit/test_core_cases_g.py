"""Kind G, quotas and eviction: limits hold, what goes for them is said, counters are sums of rows."""

from random import Random
from typing import Any

import pytest

from metaservice.core.commands import ConfirmTask, PutGroup, PutInstance, PutStorage, PutTenant
from metaservice.core.model import EvictionPolicy, Limits, Quota
from metaservice.core.outcomes import RefusedReason
from metaservice.core.replies import Started
from tests.sim.fleet import BLOCK_BYTES, FINGERPRINT, Fleet, chain, key, outcomes, windowed

LIMITS = Limits(lease_ms_max=1_000, reclaim_delay_ms=100, late_write_ms=100, expire_ms=1_000_000)
ALL: dict[str, Any] = {"high_permille": 1000, "low_permille": 1000}


def reasons(started: Started) -> set[str]:
    """Why rows were refused."""
    return {RefusedReason(reason).name for reason in started.reasons if reason}


@pytest.mark.parametrize("watermark", [1000, 500])
def test_g1_over_quota_policy_is_one_and_said(watermark: int) -> None:
    marks: dict[str, Any] = {"high_permille": watermark, "low_permille": watermark}
    fleet = Fleet(LIMITS, quota=Quota(bytes=10 * BLOCK_BYTES), eviction=EvictionPolicy.reject, **marks)
    for number in range(10):
        fleet.put([key(f"n{number}")])
    for _ in range(5):
        refused = fleet.start(chain(40, "more"))
        assert outcomes(refused) == ["refused"] * 40 and reasons(refused) == {"quota_tenant"}
        assert refused.evicted == 0 and refused.session is None
        fleet.tick(100)
    assert fleet.used() == 10, "nothing that was acknowledged is dropped"


def test_g1_evicting_is_the_other_policy_and_said_too() -> None:
    fleet = Fleet(LIMITS, quota=Quota(bytes=10 * BLOCK_BYTES), eviction=EvictionPolicy.lru, **ALL)
    fleet.put(chain(10, "old"))
    fleet.now_ms += 1
    started = fleet.start(chain(4, "new"))
    assert outcomes(started) == ["write"] * 4 and started.evicted == 4
    assert fleet.lookup(chain(10, "old")).hits == 6, "the oldest leaves go, never the prefix under them"
    big = fleet.start(chain(40, "big"))
    assert big.evicted == 6 and outcomes(big) == ["write"] * 6 + ["refused"] * 34
    assert reasons(big) == {"quota_tenant"}
    assert fleet.used() == 10


@pytest.mark.parametrize(
    ("scope", "reason"),
    [
        ("tenant", "quota_tenant"),
        ("group", "quota_group"),
        ("instance", "quota_instance"),
        ("storage", "storage_full"),
    ],
)
def test_g1_refusal_names_the_limit_that_is_short(scope: str, reason: str) -> None:
    fleet = Fleet(LIMITS)
    quota = Quota(blocks=3)
    policy = EvictionPolicy.reject
    fleet.done(PutGroup(group="g", tenant="t", storages=("s",), eviction=policy, **ALL))
    if scope == "tenant":
        fleet.done(PutTenant(tenant="t", quota=quota))
    elif scope == "group":
        fleet.done(PutGroup(group="g", tenant="t", storages=("s",), quota=quota, eviction=policy, **ALL))
    elif scope == "instance":
        fleet.done(PutInstance(instance="i", group="g", fingerprint=FINGERPRINT, quota=quota))
    else:
        fleet.done(PutStorage(storage="s", kind="posix", options={}, capacity_bytes=3 * BLOCK_BYTES + 1))
    started = fleet.start(chain(5))
    assert outcomes(started) == ["write"] * 3 + ["refused"] * 2 and reasons(started) == {reason}


def test_g1_lowered_quota_refuses_writes_and_is_reached_by_eviction() -> None:
    fleet = Fleet(LIMITS, **ALL)
    fleet.put(chain(20))
    fleet.done(PutTenant(tenant="t", quota=Quota(blocks=10)))
    assert fleet.used() == 20
    fleet.tick()
    assert fleet.used() == 9 and fleet.lookup(chain(20)).hits == 9, "tenants come down to 900 of 1000"


def test_g2_hanging_deletion_is_named_and_eviction_goes_on() -> None:
    fleet = Fleet(LIMITS, capacity_bytes=10 * BLOCK_BYTES)
    fleet.tick(LIMITS.lease_ms_max)
    fleet.put(chain(8, "stuck"))
    fleet.remove(chain(8, "stuck"))
    assert outcomes(fleet.start(chain(3))) == ["write"] * 3, "what is being deleted counts as freed"
    fleet.tick(LIMITS.reclaim_delay_ms)
    assert len(fleet.take()) == 1  # and the worker hangs
    fleet.tick(LIMITS.task_ttl_ms - 1)
    assert outcomes(fleet.start(chain(2, "other"))) == ["write"] * 2
    fleet.tick(1)
    late = fleet.start(chain(4, "late"))
    assert reasons(late) == {"deletion_backlog"} and "write" not in outcomes(late)
    view = fleet.machine.describe("storages")[0]
    assert view.overdue_bytes == 8 * BLOCK_BYTES  # type: ignore[attr-defined]
    assert len(fleet.delete()) == 8, "another worker does it"
    assert outcomes(fleet.start(chain(4, "late"))) == ["write"] * 4


def test_g2_other_candidates_are_evicted_meanwhile() -> None:
    fleet = Fleet(LIMITS, capacity_bytes=10 * BLOCK_BYTES)
    fleet.tick(LIMITS.lease_ms_max)
    fleet.put(chain(4, "stuck"))
    fleet.remove(chain(4, "stuck"))
    fleet.tick(LIMITS.reclaim_delay_ms)
    fleet.take()
    fleet.tick(LIMITS.task_ttl_ms)
    fleet.put(chain(6, "old"))
    started = fleet.start(chain(2, "new"))
    assert outcomes(started) == ["write"] * 2 and started.evicted == 2


def test_g2_failed_deletion_is_offered_again() -> None:
    fleet = Fleet(LIMITS)
    fleet.tick(LIMITS.lease_ms_max)
    fleet.put(chain(2))
    fleet.remove(chain(2))
    fleet.tick(LIMITS.reclaim_delay_ms)
    (task,) = fleet.take()
    confirm = ConfirmTask(worker="k", incarnation="1", task=task.task, ok=b"\x01\x00")
    first = fleet.done(confirm)
    assert (first.gone, first.again) == (1, 1) and fleet.done(confirm) == first
    fleet.tick(LIMITS.task_retry_ms)
    assert len(fleet.delete()) == 1 and fleet.delete() == []


def test_g2_late_confirmation_is_accepted() -> None:
    fleet = Fleet(LIMITS)
    fleet.tick(LIMITS.lease_ms_max)
    fleet.put(chain(2))
    fleet.remove(chain(2))
    fleet.tick(LIMITS.reclaim_delay_ms)
    (late,) = fleet.take()
    fleet.tick(LIMITS.task_ttl_ms)
    (again,) = fleet.take()
    assert again.task != late.task and again.locations == late.locations
    assert fleet.done(ConfirmTask(worker="k", incarnation="1", task=late.task)).gone == 2
    assert fleet.done(ConfirmTask(worker="k", incarnation="1", task=again.task)).gone == 2
    assert fleet.refused(ConfirmTask(worker="k", incarnation="1", task="t-0-1-99")) == "task_unknown"
    fleet.machine.check()


def test_g7_counters_are_the_sum_of_rows_through_a_soak(seed: int) -> None:
    rng = Random(seed)
    fleet = Fleet(LIMITS, quota=Quota(blocks=60), capacity_bytes=50 * BLOCK_BYTES)
    fleet.tick(LIMITS.lease_ms_max)
    for turn in range(300):
        names = chain(rng.randint(1, 8), f"p{rng.randrange(30)}-")
        started = fleet.start(names, rng.choice(("e1", "e2")), ttl_ms=1_000)
        if started.session is not None and rng.random() < 0.8:
            count = sum(1 for generation in started.generations if generation)
            owner = fleet.machine.state.sessions[started.session].engine
            ok = bytes(rng.random() < 0.9 for _ in range(2 * count))
            fleet.finish(started, owner, ok=ok)
        fleet.lookup(names, lease_ms=rng.choice((0, 500)))
        if rng.random() < 0.2:
            fleet.remove(names[:2])
        fleet.tick(rng.choice((1, 100, 700)))
        fleet.delete()
        if turn % 60 == 59:
            fleet.crash()
            fleet.tick(LIMITS.lease_ms_max)
        fleet.machine.check()
        assert fleet.used() <= 60


def test_eviction_is_leaf_first_across_attention_groups() -> None:
    fleet = Fleet(LIMITS, fingerprint=windowed(), quota=Quota(blocks=3), **ALL)
    for group, parts in (("full", ("tp0", "tp1")), ("mamba", ("m",))):
        fleet.finish(fleet.start([key("a")], group=group), parts=parts)
    fleet.finish(fleet.start([key("b")], parent=key("a"), group="full"), parts=("tp0", "tp1"))
    fleet.now_ms += 1
    fleet.lookup([key("a"), key("b")])
    assert outcomes(fleet.start([key("x")], group="swa")) == ["write"]
    assert fleet.lookup([key("a")], mode="each", group="mamba").hits == 0, (
        "the state hung on a, and was the oldest leaf"
    )
    assert fleet.lookup([key("a"), key("b")]).hits == 2


def test_watermark_brings_a_group_down_to_its_low_mark() -> None:
    fleet = Fleet(LIMITS, high_permille=800, low_permille=500)
    fleet.done(PutGroup(
        group="g", tenant="t", storages=("s",), quota=Quota(blocks=10), high_permille=800, low_permille=500,
    ))  # fmt: skip
    fleet.put(chain(8))
    fleet.tick()
    assert fleet.used() == 8, "not above the high mark yet"
    fleet.put([key("last")])
    fleet.tick()
    assert fleet.used() == 5


@pytest.mark.parametrize(
    ("large_blocks", "before", "left"),
    [(None, 0, 9), (100, 0, 9), (0, 0, 5), (12, 9, 9 + 9), (11, 9, 5 + 5)],
    ids=["no limit", "large", "nothing", "just below its mark", "above its mark"],
)
def test_a_storage_is_not_evicted_from_while_a_later_one_has_room(
    large_blocks: int | None, before: int, left: int
) -> None:
    fleet = Fleet(Limits(high_permille=800, low_permille=500))
    size = None if large_blocks is None else large_blocks * BLOCK_BYTES
    fleet.done(PutStorage(storage="large", kind="posix", options={}, capacity_bytes=size))
    fleet.done(PutStorage(storage="small", kind="posix", options={}, capacity_bytes=10 * BLOCK_BYTES))
    if before:
        fleet.done(PutGroup(group="g", tenant="t", storages=("large",)))
        fleet.put(chain(before, "before"))
    fleet.done(PutGroup(group="g", tenant="t", storages=("small", "large")))
    fleet.put(chain(9))
    fleet.tick()
    assert fleet.used() == left
    if large_blocks == 12:
        fleet.put([key("one"), key("two"), key("three")])
        fleet.tick()
        assert fleet.used() == 5 + 6, "none has room: both are brought down to their low marks"
