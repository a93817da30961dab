"""Kind B, read leases: named, bounded in time, and what they promise is kept."""

from array import array

from metaservice.core.commands import Lookup, ReleaseLeases, RenewLeases
from metaservice.core.model import Limits, Quota
from metaservice.core.outcomes import LeaseOutcome
from tests.sim.fleet import Fleet, chain, key, outcomes

LIMITS = Limits(lease_ms_max=10_000, reclaim_delay_ms=500, expire_ms=1_000_000)


def fleet_that_deletes(**more: object) -> Fleet:
    """A fleet whose take-over is long enough ago that bytes may be deleted."""
    fleet = Fleet(LIMITS, **more)  # type: ignore[arg-type]
    fleet.now_ms += LIMITS.lease_ms_max
    return fleet


def release(fleet: Fleet, *leases: str | None) -> list[tuple[str, int]]:
    """Release leases; outcome and changed blocks of each."""
    reply = fleet.ask(ReleaseLeases(leases=tuple(lease or "" for lease in leases)))
    return [(LeaseOutcome(code).name, n) for code, n in zip(reply.outcomes, reply.changed, strict=True)]


def renew(fleet: Fleet, *leases: str | None, ttl_ms: int, only: list[int] | None = None) -> list[str]:
    """Renew leases; the outcome of each."""
    locations = array("Q", only) if only is not None else None
    command = RenewLeases(leases=tuple(lease or "" for lease in leases), ttl_ms=ttl_ms, locations=locations)
    return [LeaseOutcome(code).name for code in fleet.ask(command).outcomes]


def test_b1_slow_reader_learns_that_its_block_changed() -> None:
    fleet = fleet_that_deletes()
    fleet.put([key("k")])
    found = fleet.lookup([key("k")], lease_ms=1_000)
    place = found.located.locations[0]  # type: ignore[union-attr]
    fleet.remove([key("k")])
    fleet.tick(999)
    assert fleet.take() == [], "somebody may be reading"
    fleet.tick(1)
    assert fleet.delete() == [place]
    reused = fleet.start([key("k2")])
    assert list(reused.locations) == [place] and reused.generations[0] == 2
    assert renew(fleet, found.lease, ttl_ms=1_000) == ["expired"]
    assert release(fleet, found.lease) == [("expired", 1)]


def test_b1_expired_lease_whose_blocks_are_still_there_says_so() -> None:
    fleet = fleet_that_deletes()
    fleet.put(chain(3))
    found = fleet.lookup(chain(3), lease_ms=1_000)
    fleet.tick(1_000)
    assert release(fleet, found.lease) == [("expired", 0)]
    fleet.remove(chain(3)[2:])
    assert release(fleet, found.lease) == [("expired", 0)], "its bytes are not deleted yet"
    fleet.tick(LIMITS.reclaim_delay_ms)
    fleet.delete()
    assert release(fleet, found.lease) == [("expired", 1)]


def test_b1_leases_do_not_outlive_their_leader() -> None:
    fleet = fleet_that_deletes()
    fleet.put([key("k")])
    found = fleet.lookup([key("k")], lease_ms=LIMITS.lease_ms_max)
    fleet.crash()
    assert renew(fleet, found.lease, ttl_ms=1_000) == ["unknown"]
    fleet.remove([key("k")])
    fleet.tick(LIMITS.lease_ms_max - 1)
    assert fleet.take() == [], "the new leader does not know who reads"
    fleet.tick(1)
    assert len(fleet.delete()) == 1
    again = fleet.lookup([key("k")], lease_ms=1_000)
    assert again.lease is None and again.hits == 0


def test_b3_half_of_a_large_lease_is_renewed_in_one_call() -> None:
    fleet = fleet_that_deletes()
    keys = chain(7_000)
    fleet.put(keys)
    found = fleet.lookup(keys, lease_ms=1_000)
    assert found.hits == 7_000 and found.located is not None
    half = list(found.located.locations[:3_500])
    fleet.tick(800)
    assert renew(fleet, found.lease, ttl_ms=1_000, only=half) == ["renewed"]
    fleet.remove(keys)
    fleet.tick(200)
    expired: set[int] = set()
    fleet.tick(LIMITS.reclaim_delay_ms)
    while gone := fleet.delete():
        expired |= set(gone)
    assert expired == set(found.located.locations[3_500:])
    assert release(fleet, found.lease) == [("released", 0)]
    renewed: set[int] = set()
    while gone := fleet.delete():
        renewed |= set(gone)
    assert renewed == set(half)


def test_b3_many_leases_are_renewed_in_one_call() -> None:
    fleet = fleet_that_deletes()
    fleet.put(chain(100))
    leases = [fleet.lookup(chain(100), lease_ms=1_000).lease for _ in range(100)]
    fleet.tick(900)
    assert renew(fleet, *leases[:50], ttl_ms=1_000) == ["renewed"] * 50
    fleet.tick(100)
    assert renew(fleet, *leases, ttl_ms=1_000) == ["renewed"] * 50 + ["expired"] * 50


def test_b3_renewal_never_shortens() -> None:
    fleet = fleet_that_deletes()
    fleet.put([key("k")])
    found = fleet.lookup([key("k")], lease_ms=5_000)
    assert renew(fleet, found.lease, ttl_ms=100) == ["renewed"]
    fleet.tick(4_999)
    assert release(fleet, found.lease) == [("released", 0)]


def test_b3_part_of_a_lease_is_renewed_on_every_shard() -> None:
    fleet = Fleet(LIMITS, shard=3)
    fleet.put(chain(2))
    found = fleet.lookup(chain(2), lease_ms=1_000)
    assert found.located is not None
    assert renew(fleet, found.lease, ttl_ms=5_000, only=list(found.located.locations)) == ["renewed"]
    fleet.tick(1_000)
    assert release(fleet, found.lease) == [("released", 0)]


def test_b4_leases_that_nobody_uses_do_not_fill_the_cache() -> None:
    fleet = fleet_that_deletes(quota=Quota(blocks=10), high_permille=1000, low_permille=1000)
    fleet.put(chain(10))
    for _ in range(1_000):
        assert fleet.lookup(chain(10), lease_ms=2_000).lease is not None
    full = fleet.start(chain(10, "new"))
    assert outcomes(full) == ["refused"] * 10, "what is leased is not evicted"
    fleet.tick(2_000)
    assert outcomes(fleet.start(chain(10, "new"))) == ["write"] * 10


def test_b5_double_release_is_idempotent() -> None:
    fleet = fleet_that_deletes()
    fleet.put([key("k")])
    mine, other = (fleet.lookup([key("k")], lease_ms=2_000) for _ in range(2))
    assert release(fleet, mine.lease, mine.lease) == [("released", 0)] * 2
    assert fleet.block(key("k")).leases == 1  # type: ignore[union-attr]
    fleet.remove([key("k")])
    fleet.tick(1_999)
    assert fleet.take() == [], "the other one still reads"
    assert release(fleet, other.lease) == [("released", 0)]
    assert len(fleet.delete()) == 1
    assert release(fleet, mine.lease, other.lease) == [("released", 0)] * 2, "the first answer"


def test_b5_release_after_expiry_touches_no_other_lease() -> None:
    fleet = fleet_that_deletes()
    fleet.put([key("k")])
    early = fleet.lookup([key("k")], lease_ms=1_000)
    fleet.tick(1_000)
    late = fleet.lookup([key("k")], lease_ms=1_000)
    assert release(fleet, early.lease, "r-0-1-999", "nonsense") == [
        ("expired", 0),
        ("unknown", 0),
        ("unknown", 0),
    ]
    assert fleet.block(key("k")).leases == 1  # type: ignore[union-attr]
    assert renew(fleet, late.lease, ttl_ms=1_000) == ["renewed"]


def test_b6_lease_of_a_crashed_reader_ends_by_the_clock() -> None:
    fleet = fleet_that_deletes()
    fleet.put([key("k")])
    fleet.lookup([key("k")], lease_ms=1_000)
    fleet.tick(1_000)
    assert fleet.block(key("k")).leases == 0  # type: ignore[union-attr]
    assert len(fleet.machine.memory.leases) == 0 and fleet.machine.memory.leases.expired == 1


def test_b7_owner_releases_and_removes_in_one_step() -> None:
    fleet = fleet_that_deletes()
    fleet.put(chain(2))
    mine = fleet.lookup(chain(2), lease_ms=5_000)
    other = fleet.lookup(chain(1), lease_ms=5_000)
    assert fleet.remove(chain(2), lease=mine.lease or "") == ["waiting_for_lease", "removed"]
    assert fleet.used() == 0, "space is free at once"
    assert release(fleet, mine.lease) == [("released", 0)]
    fleet.tick(LIMITS.reclaim_delay_ms)
    assert list(fleet.delete()) == [mine.located.locations[1]]  # type: ignore[union-attr]
    release(fleet, other.lease)
    assert list(fleet.delete()) == [mine.located.locations[0]]  # type: ignore[union-attr]


def test_b8_removed_under_a_lease_goes_by_itself_afterwards() -> None:
    fleet = fleet_that_deletes()
    fleet.put([key("k")])
    found = fleet.lookup([key("k")], lease_ms=5_000)
    assert fleet.remove([key("k")]) == ["waiting_for_lease"]
    assert fleet.remove([key("k")]) == ["absent"]
    assert fleet.lookup([key("k")]).hits == 0, "hidden at once"
    assert outcomes(fleet.start([key("k")])) == ["write"], "and no obstacle for another writer"
    fleet.tick(LIMITS.reclaim_delay_ms)
    assert fleet.delete() == []
    release(fleet, found.lease)
    assert len(fleet.delete()) == 1


def test_b8_the_same_when_the_lease_expires_instead() -> None:
    fleet = fleet_that_deletes()
    fleet.put([key("k")])
    fleet.lookup([key("k")], lease_ms=5_000)
    fleet.remove([key("k")])
    fleet.tick(4_999)
    assert fleet.delete() == []
    fleet.tick(1)
    assert len(fleet.delete()) == 1


def test_repeated_lookup_has_the_same_lease_for_as_long_as_it_says() -> None:
    fleet = fleet_that_deletes()
    fleet.put([key("k")])
    asked = {"lease_ms": 5_000, "engine": "e1", "incarnation": "1", "request_id": "r"}
    first = fleet.lookup([key("k")], **asked)
    fleet.tick(4_000)
    again = fleet.lookup([key("k")], **asked)
    assert again.lease == first.lease and again.located == first.located
    fleet.remove([key("k")])
    fleet.tick(again.lease_ms - 1)
    assert fleet.take() == [], "the reader was told that its lease holds"
    fleet.tick(LIMITS.lease_ms_max)
    assert len(fleet.delete()) == 1


def test_leases_are_bounded_in_number_and_time() -> None:
    fleet = Fleet(Limits(leases_max=3, lease_ms_min=100, lease_ms_max=10_000))
    fleet.put([key("k")])
    for _ in range(3):
        fleet.lookup([key("k")], lease_ms=1_000)
    asked = Lookup(instance="i", keys=[key("k")], lease_ms=1_000)
    assert fleet.refused(asked) == "too_many_leases"
    for lease_ms in (99, 10_001):
        assert fleet.refused(Lookup(instance="i", keys=[key("k")], lease_ms=lease_ms)) == "ttl_out_of_range"
    fleet.tick(1_000)
    assert fleet.lookup([key("k")], lease_ms=1_000).lease is not None
