"""Kind H, degradation: what cannot be promised is said to be a miss, and by what it was cut."""

from typing import Any

import pytest

from metaservice.core.commands import Lookup, SetSwitch
from metaservice.core.model import Limits, SwitchMode, SwitchScope
from metaservice.core.outcomes import RefusedReason
from metaservice.core.replies import Looked, Switched
from tests.sim.fleet import FINGERPRINT, Fleet, chain, key, outcomes, windowed

LIMITS = Limits(lease_ms_max=1_000)
SCOPES = [
    (SwitchScope.cluster, ""),
    (SwitchScope.tenant, "t"),
    (SwitchScope.group, "g"),
    (SwitchScope.instance, "i"),
]


def flip(fleet: Fleet, scope: SwitchScope, id: str, mode: SwitchMode) -> None:
    """Set a switch."""
    fleet.done(SetSwitch(scope=scope, id=id, mode=mode))


def said(found: Looked) -> tuple[int, str, int]:
    """How many blocks, and what cut them where."""
    return found.hits, found.cut, found.cut_at


@pytest.mark.parametrize(("scope", "id"), SCOPES)
def test_h3_switch_between_lookup_and_lease_gives_an_honest_zero(scope: SwitchScope, id: str) -> None:
    fleet = Fleet(LIMITS)
    fleet.put(chain(64))
    assert fleet.lookup(chain(64)).hits == 64
    flip(fleet, scope, id, SwitchMode.bypass)
    leased = fleet.lookup(chain(64), lease_ms=500)
    assert said(leased) == (0, "switch", 0) and leased.lease is None and leased.lease_ms == 0
    assert leased.switch == Switched(scope, id, SwitchMode.bypass)
    flip(fleet, scope, id, SwitchMode.normal)
    assert fleet.lookup(chain(64), lease_ms=500).hits == 64


@pytest.mark.parametrize("mode", [SwitchMode.read_only, SwitchMode.bypass])
@pytest.mark.parametrize(("scope", "id"), SCOPES)
def test_h3_switch_refuses_writes_and_is_named(scope: SwitchScope, id: str, mode: SwitchMode) -> None:
    fleet = Fleet(LIMITS)
    fleet.put(chain(2))
    flip(fleet, scope, id, mode)
    started = fleet.start(chain(3))
    assert outcomes(started) == ["refused"] * 3 and set(started.reasons) == {RefusedReason.switch}
    assert started.session is None and started.switch == Switched(scope, id, mode)
    found = fleet.lookup(chain(2))
    assert found.switch == Switched(scope, id, mode)
    assert found.hits == (2 if mode == SwitchMode.read_only else 0)


def test_h3_strictest_switch_on_the_path_holds() -> None:
    fleet = Fleet(LIMITS)
    fleet.put(chain(2))
    flip(fleet, SwitchScope.cluster, "", SwitchMode.read_only)
    flip(fleet, SwitchScope.instance, "i", SwitchMode.bypass)
    assert fleet.lookup(chain(2)).switch == Switched(SwitchScope.instance, "i", SwitchMode.bypass)
    flip(fleet, SwitchScope.instance, "i", SwitchMode.normal)
    assert fleet.lookup(chain(2)).switch == Switched(SwitchScope.cluster, "", SwitchMode.read_only)


def test_h3_write_in_flight_may_finish_under_a_switch() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(2))
    flip(fleet, SwitchScope.group, "g", SwitchMode.read_only)
    assert fleet.finish(started).published == 2


@pytest.mark.parametrize("mode", ["prefix", "window", "each"])
def test_h3_bypassed_storage_hides_its_locations(mode: str) -> None:
    fleet = Fleet(LIMITS, fingerprint=windowed())
    group = "swa" if mode == "window" else "full"
    parts = ("w",) if mode == "window" else ("tp0", "tp1")
    fleet.finish(fleet.start(chain(3), group=group), parts=parts)
    flip(fleet, SwitchScope.storage, "s", SwitchMode.bypass)
    found = fleet.lookup(chain(3), mode=mode, lease_ms=500)
    assert said(found) == (0, "switch", 0) and found.lease is None
    assert found.switch == Switched(SwitchScope.storage, "s", SwitchMode.bypass)
    started = fleet.start([key("new")])
    assert outcomes(started) == ["refused"] and set(started.reasons) == {RefusedReason.no_storage}


def test_h4_places_and_lease_come_in_one_step() -> None:
    fleet = Fleet(LIMITS)
    fleet.put(chain(10))
    fleet.start(chain(12))
    found = fleet.lookup(chain(12), lease_ms=500)
    assert found.hits == 10 and found.located is not None and found.lease is not None
    assert len(found.located.locations) == len(found.located.generations) == len(found.located.storages) == 10
    assert len(found.located.checksums) == 8 * 2 * 10, "one for each part of each block"
    leased = [detail.leases for one in chain(12) if (detail := fleet.block(one)) is not None]
    assert leased == [1] * 10 + [0] * 2


def test_h4_ranks_agree_on_one_length() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(4))
    fleet.finish(started, parts=("tp0",))
    fleet.finish(
        started, parts=("tp1",), locations=started.locations[:2], generations=started.generations[:2]
    )
    assert said(fleet.lookup(chain(4))) == (2, "miss", 2), (
        "where one rank lacks its part there is nothing for any"
    )


def test_h4_state_and_prefix_agree_on_one_length() -> None:
    fleet = Fleet(LIMITS, fingerprint=windowed())
    fleet.finish(fleet.start(chain(4), group="full"), parts=("tp0", "tp1"))
    assert said(fleet.lookup(chain(4), mode="state")) == (0, "miss", 0)
    for row in (1, 2):
        fleet.finish(fleet.start([chain(4)[row]], parent=chain(4)[row - 1], group="mamba"), parts=("m",))
    found = fleet.lookup(chain(4), mode="state", lease_ms=500)
    assert said(found) == (3, "miss", 3) and found.state is not None and found.state_group == "mamba"
    assert len(found.state.locations) == 1 and len(found.located.locations) == 3  # type: ignore[union-attr]
    assert said(fleet.lookup(chain(4), mode="state", limit=2)) == (2, "limit", 2)
    assert said(fleet.lookup(chain(4), mode="state", limit=1)) == (0, "miss", 0)


@pytest.mark.parametrize(
    ("asked", "want"),
    [
        ({}, (4, "miss", 4)),
        ({"keys": chain(4)}, (4, "none", 4)),
        ({"limit": 3}, (3, "limit", 3)),
        ({"limit": 4}, (4, "miss", 4)),
        ({"limit": 0}, (0, "limit", 0)),
        ({"keys": [key("absent")], "limit": 0}, (0, "miss", 0)),
        ({"keys": [*chain(2), key("absent"), key("k3")], "mode": "each"}, (3, "miss", 2)),
        ({"keys": [*chain(2), key("absent"), key("k3")], "mode": "each", "limit": 1}, (1, "limit", 1)),
        ({"keys": [key("absent"), *chain(2)], "mode": "each", "limit": 1}, (1, "miss", 0)),
        ({"keys": chain(4), "mode": "each"}, (4, "none", 4)),
    ],
)
def test_h5_what_cut_a_lookup_is_said(asked: dict[str, Any], want: tuple[int, str, int]) -> None:
    fleet = Fleet(LIMITS)
    fleet.put(chain(4))
    found = fleet.lookup(**({"keys": chain(6)} | asked))
    assert said(found) == want
    assert len(found.located.locations) == want[0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("there", "window", "limit", "want"),
    [
        ((0, 1, 2, 3, 4, 5), 2, None, (4, 2, "none", 6)),
        ((0, 1, 2, 3, 5), 2, None, (2, 2, "miss", 4)),
        ((0, 1, 3, 5), 2, None, (0, 2, "miss", 2)),
        ((0, 1, 2), 4, None, (0, 3, "miss", 3)),
        ((1, 2, 4), 3, None, (0, 0, "miss", 0)),
        ((0, 1, 2, 3), 3, 2, (0, 0, "limit", 0)),
        ((0, 1, 2, 3), 3, 3, (1, 3, "miss", 4)),
        ((5,), 1, None, (5, 1, "none", 6)),
        ((), 2, None, (0, 0, "miss", 0)),
    ],
)
def test_h5_window_is_the_right_most_whole_run(
    there: tuple[int, ...], window: int, limit: int | None, want: tuple[int, int, str, int]
) -> None:
    fleet = Fleet(LIMITS, fingerprint=windowed())
    keys = chain(6)
    for row in there:
        parent = keys[row - 1] if row else None
        fleet.finish(fleet.start([keys[row]], parent=parent, group="swa"), parts=("w",))
    found = fleet.lookup(keys, mode="window", window_blocks=window, limit=limit)
    assert (found.start, found.hits, found.cut, found.cut_at) == want


def test_h5_modes_that_do_not_apply_are_refused() -> None:
    fleet = Fleet(LIMITS, fingerprint=FINGERPRINT)
    for mode, code in (
        ("window", "mode_not_applicable"),
        ("state", "mode_not_applicable"),
        ("all", "invalid_field"),
    ):
        assert fleet.refused(Lookup(instance="i", keys=chain(1), mode=mode)) == code
