"""Kind D, restart: what is durable comes back, whatever the leader knew, and numbers never go back."""

import pytest

from metaservice.core.commands import TakeOver
from metaservice.core.model import Limits
from tests.sim.fleet import Fleet, chain, key, outcomes, statuses
from tests.sim.house import CLUSTER

LIMITS = Limits(lease_ms_max=1_000, expire_ms=1_000_000)


def test_d10_epoch_only_grows() -> None:
    fleet = Fleet(LIMITS)
    seen = [fleet.machine.state.epoch]
    for from_capture in (False, True, True):
        fleet.capture()
        fleet.crash(from_capture=from_capture)
        seen.append(fleet.machine.state.epoch)
    assert seen == sorted(set(seen))
    with pytest.raises(AssertionError):
        fleet.machine.execute(TakeOver(epoch=seen[-1], cluster=CLUSTER), fleet.now_ms)


def test_d10_ids_of_two_epochs_differ() -> None:
    fleet = Fleet(LIMITS)
    fleet.put([key("k")])
    names = set()
    for _ in range(3):
        fleet.crash()
        names.add(fleet.lookup([key("k")], lease_ms=500).lease)
    assert len(names) == 3


def test_d2_everything_acknowledged_is_there_after_a_crash() -> None:
    fleet = Fleet(LIMITS)
    fleet.put(chain(1_000))
    digest = fleet.machine.digest()
    assert fleet.replayed().digest() == digest
    fleet.crash()
    assert fleet.lookup(chain(1_000)).hits == 1_000
    fleet.machine.check()


def test_d2_what_was_never_acknowledged_may_be_lost_and_is_lost_whole() -> None:
    fleet = Fleet(LIMITS, auto=False)
    fleet.flush()
    kept = fleet.start(chain(3))
    fleet.flush()
    fleet.finish(kept)
    fleet.crash()
    fleet.flush()
    assert fleet.lookup(chain(3)).hits == 0
    assert statuses(fleet.finish(kept)) == ["serving"] * 3, "the writer asks again"
    fleet.flush()
    assert fleet.lookup(chain(3)).hits == 3


@pytest.mark.parametrize("from_capture", [False, True])
def test_d5_snapshot_and_tail_give_the_same_as_the_whole_journal(from_capture: bool) -> None:
    fleet = Fleet(LIMITS)
    fleet.put(chain(20))
    pending = fleet.start(chain(5, "p"), request_id="r")
    fleet.capture()
    fleet.finish(pending, parts=("tp0",))
    fleet.remove(chain(20)[15:])
    digest = fleet.machine.digest()
    other = fleet.restored() if from_capture else fleet.replayed()
    assert other is not None and other.digest() == digest
    fleet.crash(from_capture=from_capture)
    assert fleet.lookup(chain(20)).hits == 15
    assert fleet.start(chain(5, "p"), request_id="r") == pending
    assert statuses(fleet.finish(pending, parts=("tp1",))) == ["serving"] * 5
    fleet.machine.check()


def test_d6_snapshot_of_nothing() -> None:
    fleet = Fleet(LIMITS)
    for machine in (fleet.fresh(), fleet.machine):
        again = type(machine).restore(machine.capture(), shard=0, limits=LIMITS)
        assert again.digest() == machine.digest()
        again.check()


def test_d1_places_of_before_the_crash_are_not_given_out_again() -> None:
    fleet = Fleet(LIMITS)
    taken = set(fleet.put(chain(10)).locations) | set(fleet.start(chain(5, "open")).locations)
    fleet.crash()
    fresh = fleet.start(chain(5, "new"))
    assert outcomes(fresh) == ["write"] * 5 and not taken & set(fresh.locations)
