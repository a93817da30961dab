"""Kind A, two-phase writes: nothing half-written is ever read, and nothing half-written stays."""

from metaservice.core.model import Limits, Quota
from tests.sim.fleet import Fleet, chain, key, outcomes, statuses

LIMITS = Limits(lease_ms_max=1_000, reclaim_delay_ms=500, expire_ms=1_000_000)


def test_a1_writer_killed_after_start() -> None:
    fleet = Fleet(LIMITS)
    fleet.now_ms += LIMITS.lease_ms_max
    first = fleet.start([key("k")], ttl_ms=10_000)
    fleet.tick(9_999)
    waiting = fleet.start([key("k")], "e2")
    assert outcomes(waiting) == ["in_progress"] and waiting.wait_ms[0] == 1 and waiting.session is None
    fleet.tick(1)
    second = fleet.start([key("k")], "e2")
    assert outcomes(second) == ["write"] and second.locations != first.locations
    assert fleet.refused(fleet.finishing(first)) == "session_expired"
    fleet.tick(LIMITS.late_write_ms - 1)
    assert fleet.take() == []  # a late write may still land there
    fleet.tick(1)
    assert fleet.delete() == list(first.locations)
    third = fleet.start([key("other")])
    assert third.locations == first.locations and third.generations[0] == first.generations[0] + 1
    assert fleet.refused(fleet.finishing(first)) == "session_expired"
    assert statuses(fleet.finish(second, "e2")) == ["serving"]


def test_a2_unfinished_writes_are_reclaimed_after_a_restart() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(100), ttl_ms=5_000)
    fleet.crash()
    assert fleet.used() == 100
    fleet.tick(5_000)
    assert fleet.used() == 0
    assert fleet.refused(fleet.finishing(started)) == "session_expired"
    fleet.tick(LIMITS.late_write_ms)
    assert sorted(fleet.delete()) == sorted(started.locations)
    unknown = fleet.finishing(started, session=started.session + 9)  # type: ignore[operator]
    assert fleet.refused(unknown) == "session_unknown"
    fleet.machine.check()


def test_a2_session_of_before_the_restart_may_still_finish() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(3), ttl_ms=5_000)
    fleet.now_ms += 60_000  # the service was away for longer than the session would have lived
    fleet.crash(from_capture=True)
    fleet.tick(4_999)
    assert statuses(fleet.finish(started)) == ["serving"] * 3


def test_a3_sweep_needs_no_traffic_no_pressure_and_leaves_recency_alone() -> None:
    fleet = Fleet(LIMITS, quota=Quota(blocks=1_000))
    fleet.put(chain(3, "served"))
    used = [fleet.block(one).last_used_ms for one in chain(3, "served")]  # type: ignore[union-attr]
    fleet.start([key("leaked")], ttl_ms=5_000)
    fleet.crash()
    for _ in range(20):
        fleet.tick(500)
    assert fleet.block(key("leaked")) is None and fleet.used() == 3
    assert [fleet.block(one).last_used_ms for one in chain(3, "served")] == used  # type: ignore[union-attr]
    assert outcomes(fleet.start([key("leaked")])) == ["write"]


def test_a3_sweep_does_not_touch_what_was_published_meanwhile() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(2), ttl_ms=5_000)
    fleet.finish(started, locations=started.locations[:1], generations=started.generations[:1])
    fleet.tick(5_000)
    assert fleet.lookup(chain(2)).hits == 1


def test_a5_lookup_never_returns_what_does_not_serve() -> None:
    fleet = Fleet(LIMITS, auto=False)
    for number in range(200):
        one = [key(f"n{number}")]
        started = fleet.start(one)
        assert fleet.lookup(one).hits == 0
        fleet.flush()
        assert fleet.lookup(one).hits == 0
        fleet.finish(started)
        assert fleet.lookup(one).hits == 0, "published, but no journal has it"
        fleet.flush()
        assert fleet.lookup(one).hits == 1


def test_a6_failed_writes_free_their_locations_at_once() -> None:
    fleet = Fleet(LIMITS, quota=Quota(blocks=4), high_permille=1000, low_permille=1000)
    for number in range(20):
        started = fleet.start(chain(4, f"r{number}-"))
        assert outcomes(started) == ["write"] * 4, "the quota is free again although no byte was deleted yet"
        failed = fleet.finish(started, ok=bytes(8), checksums=None)
        assert statuses(failed) == ["freed"] * 4 and failed.open == 0
        assert fleet.used() == 0


def test_a6_one_failed_part_frees_the_location_and_only_it() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(2))
    assert statuses(fleet.finish(started, ok=b"\x01\x01\x00\x01")) == ["serving", "freed"]
    assert fleet.lookup(chain(2)).hits == 1
    assert outcomes(fleet.start(chain(2), "e2")) == ["present", "write"]


def test_a7_retry_after_a_lost_leader_allocates_once() -> None:
    fleet = Fleet(LIMITS, auto=False)
    fleet.flush()
    durable = fleet.start(chain(5), request_id="r1")
    fleet.flush()
    lost = fleet.start(chain(5, "lost"), request_id="r2")
    fleet.crash()
    fleet.flush()
    assert fleet.used() == 5, "what no journal has was never given"
    assert fleet.start(chain(5), request_id="r1") == durable, "the first answer, from before the crash"
    again = fleet.start(chain(5, "lost"), request_id="r2")
    assert outcomes(again) == ["write"] * 5 and again.locations == lost.locations
    assert fleet.used() == 10
    fleet.machine.check()


def test_a7_retried_finish_gets_its_first_answer_after_a_restart() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(3))
    finish = fleet.finishing(started, ok=b"\x01\x01\x00\x01\x01\x01", request_id="f")
    first = fleet.done(finish)
    assert statuses(first) == ["serving", "freed", "serving"]
    fleet.remove(chain(3)[:1])
    fleet.crash()
    assert fleet.done(finish) == first
    fleet.crash(from_capture=True)
    assert fleet.done(finish) == first


def test_a1_finish_of_each_rank_by_itself() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(2))
    assert statuses(fleet.finish(started, parts=("tp1",))) == ["pending", "pending"]
    assert fleet.lookup(chain(2)).hits == 0
    assert statuses(fleet.finish(started, parts=("tp1",))) == ["pending", "pending"], "reported twice"
    last = fleet.finish(started, parts=("tp0",))
    assert statuses(last) == ["serving", "serving"] and (last.published, last.open) == (2, 0)
    assert fleet.lookup(chain(2)).hits == 2


def test_a1_foreign_and_stale_finishes_change_nothing() -> None:
    fleet = Fleet(LIMITS)
    one, other = fleet.start([key("one")]), fleet.start([key("other")], "e2")
    assert fleet.refused(fleet.finishing(one, "e2")) == "foreign_session"
    assert fleet.refused(fleet.finishing(one, incarnation="0")) == "reregister"
    assert fleet.refused(fleet.finishing(one, locations=other.locations)) == "foreign_location"
    stale = fleet.finishing(one)
    stale.generations[0] += 1
    assert fleet.refused(stale) == "stale_generation"
    assert fleet.refused(fleet.finishing(one, parts=("tp9",))) == "unknown_part"
    assert fleet.refused(fleet.finishing(one, sizes=(10, 11))) == "size_mismatch"
    assert fleet.refused(fleet.finishing(one, checksums=None)) == "invalid_field", "what is in has a checksum"
    assert statuses(fleet.finish(one)) == ["serving"]
