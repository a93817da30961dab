"""Kind C, liveness: who is heard of stays, who is not is told to register again; nobody meets silence."""

from metaservice.core.commands import (
    Deregister,
    Heartbeat,
    Lookup,
    PutInstance,
    RegisterEngine,
    RegisterWorker,
    StartWrite,
    TakeTasks,
)
from metaservice.core.model import Limits
from metaservice.core.replies import Beat, Registered
from tests.sim.fleet import FINGERPRINT, Fleet, chain, key, outcomes, statuses

LIMITS = Limits()


def status(fleet: Fleet, engine: str = "e1") -> str:
    """What people are told of an engine."""
    view = fleet.machine.describe_one("engines", engine, fleet.now_ms)
    return str(view.status) if view is not None else "gone"  # type: ignore[attr-defined]


def beat(fleet: Fleet, kind: str = "engine", id: str = "e1", incarnation: str = "1") -> str:
    """Send a heartbeat; `active`, or the code of its refusal."""
    reply = fleet.ask(Heartbeat(kind=kind, id=id, incarnation=incarnation))
    return reply.status if isinstance(reply, Beat) else reply.code


def test_c1_engine_that_only_beats_stays() -> None:
    fleet = Fleet(LIMITS)
    for _ in range(3 * LIMITS.expire_ms // LIMITS.heartbeat_ms):
        fleet.tick(LIMITS.heartbeat_ms)
        assert beat(fleet) == "active"
    assert status(fleet) == "active" and status(fleet, "e2") == "expired"
    assert outcomes(fleet.start([key("k")])) == ["write"]


def test_c1_expired_engine_is_told_to_register_again() -> None:
    fleet = Fleet(LIMITS)
    fleet.tick(LIMITS.expire_ms)
    named = {"instance": "i", "engine": "e1", "incarnation": "1", "keys": [key("k")]}
    assert fleet.refused(Lookup(**named)) == "reregister"  # type: ignore[arg-type]
    assert fleet.refused(StartWrite(**named)) == "reregister"  # type: ignore[arg-type]
    assert beat(fleet) == "reregister" and beat(fleet, id="never") == "reregister"
    assert fleet.refused(TakeTasks(worker="k", incarnation="1")) == "reregister"
    fleet.done(RegisterEngine(engine="e1", incarnation="1"))
    assert beat(fleet) == "active" and outcomes(fleet.start([key("k")])) == ["write"]


def test_c1_sessions_of_an_expired_engine_live_to_their_own_deadline() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(2), ttl_ms=100_000)
    fleet.tick(LIMITS.expire_ms)
    assert status(fleet) == "expired"
    assert statuses(fleet.finish(started)) == ["serving"] * 2


def test_c1_expired_engine_is_forgotten_in_the_end() -> None:
    fleet = Fleet(LIMITS)
    fleet.tick(LIMITS.expire_ms)
    fleet.tick(LIMITS.forget_ms)
    assert status(fleet) == "gone" and beat(fleet) == "reregister"


def test_c2_defaults_of_both_sides_agree() -> None:
    assert LIMITS.heartbeat_ms * 2 <= LIMITS.suspect_ms < LIMITS.expire_ms


def test_c3_heartbeat_without_identity_is_refused() -> None:
    fleet = Fleet(LIMITS)
    assert beat(fleet, id="") == "reregister"
    assert beat(fleet, incarnation="") == "reregister"
    assert beat(fleet, kind="worker", id="e1") == "reregister"
    assert fleet.refused(RegisterEngine(engine="e3", incarnation="")) == "invalid_field"


def test_c4_second_incarnation_fences_the_first() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(2), ttl_ms=100_000)
    reply = fleet.done(RegisterEngine(engine="e1", incarnation="2"))
    assert reply == Registered("e1", "2", "1")
    assert beat(fleet) == "reregister" and beat(fleet, incarnation="2") == "active"
    assert fleet.refused(fleet.finishing(started)) == "session_aborted"
    assert fleet.refused(fleet.finishing(started, incarnation="2")) == "reregister"
    assert fleet.refused(RegisterEngine(engine="e1", incarnation="1")) == "incarnation_retired"
    assert outcomes(fleet.start(chain(2), incarnation="2")) == ["write"] * 2, (
        "the writes of the first are over"
    )
    fleet.crash()
    assert fleet.refused(RegisterEngine(engine="e1", incarnation="1")) == "incarnation_retired"


def test_c4_same_incarnation_registers_as_often_as_it_likes() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start(chain(2))
    before = fleet.machine.seq
    assert fleet.done(RegisterEngine(engine="e1", incarnation="1")) == Registered("e1", "1")
    assert fleet.machine.seq == before, "nothing happened, so nothing is journaled"
    assert statuses(fleet.finish(started)) == ["serving"] * 2


def test_c4_fenced_worker_cannot_take_or_confirm() -> None:
    fleet = Fleet(LIMITS)
    fleet.done(RegisterWorker(worker="k", incarnation="2", storages=("s",)))
    assert fleet.refused(TakeTasks(worker="k", incarnation="1")) == "reregister"
    assert (
        fleet.refused(RegisterWorker(worker="k", incarnation="1", storages=("s",))) == "incarnation_retired"
    )


def test_c5_suspect_comes_before_expired() -> None:
    fleet = Fleet(LIMITS)
    fleet.tick(LIMITS.suspect_ms - 1)
    assert status(fleet) == "active"
    fleet.tick(1)
    assert status(fleet) == "suspect" and beat(fleet) == "active" and status(fleet) == "active"
    fleet.tick(LIMITS.expire_ms - 1)
    assert status(fleet) == "suspect"
    fleet.tick(1)
    assert status(fleet) == "expired"


def test_c5_a_new_leader_starts_to_count_anew() -> None:
    fleet = Fleet(LIMITS)
    fleet.now_ms += 10 * LIMITS.expire_ms  # it was the service that was away
    fleet.crash()
    fleet.tick()
    assert status(fleet) == "active" and status(fleet, "e2") == "active"
    fleet.tick(LIMITS.expire_ms)
    assert status(fleet) == "expired"


def test_c6_many_engines_register_at_once() -> None:
    fleet = Fleet(LIMITS)
    for number in range(64):
        fleet.done(RegisterEngine(engine=f"n{number}", incarnation="1", instance="i", rank=number))
        fleet.tick(200)  # the service takes its time with each
        assert beat(fleet, id=f"n{max(0, number - 20)}") == "active"
    views = fleet.machine.describe("engines", fleet.now_ms)
    late = [view.id for view in views if view.status == "expired"]  # type: ignore[attr-defined]
    assert [id for id in late if id.startswith("n")] == [], "none is expired by the start-up of the others"


def test_c6_number_of_registrations_is_bounded() -> None:
    fleet = Fleet(Limits(registered_max=4))
    fleet.done(RegisterEngine(engine="e3", incarnation="1"))
    fleet.done(RegisterEngine(engine="e4", incarnation="1"))
    assert fleet.refused(RegisterEngine(engine="e5", incarnation="1")) == "registry_full"
    fleet.done(Deregister(kind="engine", id="e4", incarnation="1"))
    fleet.done(RegisterEngine(engine="e5", incarnation="1"))


def test_c1_an_instance_must_exist_to_be_used() -> None:
    fleet = Fleet(LIMITS)
    assert (
        fleet.refused(RegisterEngine(engine="e3", incarnation="1", instance="nobody")) == "instance_unknown"
    )
    fleet.done(PutInstance(instance="j", group="g", fingerprint=FINGERPRINT))
    fleet.done(RegisterEngine(engine="e3", incarnation="1", instance="j"))
