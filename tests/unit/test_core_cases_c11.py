"""C11: engines and workers that crash and start again for ever leave nothing behind that grows; what is gone
is shown as such and can be taken away, what lives cannot by mistake."""

from metaservice.core.commands import Deregister, RegisterEngine, RegisterWorker
from metaservice.core.machine import Machine
from metaservice.core.model import RETIRED_INCARNATIONS, Limits
from metaservice.core.views import MemberView
from tests.sim.fleet import Fleet, key, outcomes

LIMITS = Limits(
    suspect_ms=2_000, expire_ms=5_000, forget_ms=60_000, write_ttl_ms_default=5_000, hot_summary_ms=1_000_000
)
CYCLES = 1_000
STEP_MS = 1_000
LIVES = (LIMITS.expire_ms + LIMITS.forget_ms) // STEP_MS + 1
"""As many deaths, a step apart, may be registered at once."""


def shown(fleet: Fleet, kind: str) -> dict[str, str]:
    """id -> status of all engines or workers."""
    views = fleet.machine.describe(kind, fleet.now_ms, "", None)
    return {view.id: view.status for view in views if isinstance(view, MemberView)}


def size(machine: Machine) -> int:
    """How long a snapshot of the state is."""
    return sum(map(len, machine.capture()))


def live_and_die(fleet: Fleet, engine: str, worker: str, incarnation: str) -> None:
    """Both register, the engine begins a write, and nobody hears of them again."""
    fleet.done(RegisterEngine(engine=engine, incarnation=incarnation, instance="i"))
    fleet.done(RegisterWorker(worker=worker, incarnation=incarnation, storages=("s",)))
    asked = fleet.start([key(f"k{incarnation}")], engine, incarnation=incarnation, request_id="")
    assert outcomes(asked) == ["write"]
    fleet.tick(STEP_MS)


def held(fleet: Fleet) -> dict[str, int]:
    """How much of everything that names a member there is."""
    state, memory = fleet.machine.state, fleet.machine.memory
    return {
        "engines": len(state.engines),
        "workers": len(state.workers),
        "sessions": len(state.sessions),
        "sessions_of": len(state.sessions_of),
        "beats": len(memory.beats),
        "deadlines": len(memory.session_deadlines),
    }


def test_c11_a_thousand_lives_under_new_names_are_all_forgotten() -> None:
    fleet = Fleet(LIMITS)
    peak: dict[str, int] = {}
    sizes: list[int] = []
    for life in range(CYCLES):
        live_and_die(fleet, f"engine-{life}", f"worker-{life}", str(life))
        for name, count in held(fleet).items():
            peak[name] = max(peak.get(name, 0), count)
        if life in (CYCLES // 2, CYCLES - 1):
            sizes.append(size(fleet.machine))
    lives = LIMITS.expire_ms // STEP_MS + 1
    assert LIVES - 2 <= peak["engines"] <= LIVES + 2 and LIVES - 2 <= peak["workers"] <= LIVES + 2
    assert max(peak["sessions"], peak["sessions_of"], peak["deadlines"]) <= lives + 2
    assert peak["beats"] <= 2 * lives + 3
    # what is remembered of ended sessions has a bound of its own, further away than these lives reach
    assert sizes[1] - sizes[0] < 200 * CYCLES // 2
    fleet.tick(LIMITS.expire_ms)
    fleet.tick(LIMITS.forget_ms)
    assert shown(fleet, "engines") == {} and shown(fleet, "workers") == {}
    assert held(fleet) == dict.fromkeys(held(fleet), 0)


def test_c11_a_thousand_lives_under_one_name_are_one_row() -> None:
    fleet = Fleet(LIMITS)
    for life in range(CYCLES):
        live_and_die(fleet, "e1", "k", f"life-{life}")
        state = fleet.machine.state
        assert len(state.engines["e1"].retired) <= RETIRED_INCARNATIONS
        assert len(state.workers["k"].retired) <= RETIRED_INCARNATIONS
        assert len(state.sessions) <= 1 and len(state.workers) == 1, "the life before is fenced"
    assert shown(fleet, "engines")["e1"] == "active"


def test_c11_what_is_gone_can_be_taken_away_at_once() -> None:
    fleet = Fleet(LIMITS)
    started = fleet.start([key("k")], ttl_ms=100_000)
    fleet.tick(LIMITS.expire_ms)
    assert shown(fleet, "engines") == {"e1": "expired", "e2": "expired"}
    assert shown(fleet, "workers") == {"k": "expired"}
    assert fleet.machine.state.sessions
    fleet.done(Deregister(kind="engine", id="e1", incarnation=""))
    fleet.done(Deregister(kind="worker", id="k", incarnation=""))
    assert shown(fleet, "engines") == {"e2": "expired"} and shown(fleet, "workers") == {}
    assert not fleet.machine.state.sessions, "what it was writing is over with it"
    assert fleet.refused(fleet.finishing(started)) in ("reregister", "session_aborted")
    assert fleet.refused(Deregister(kind="engine", id="e1", incarnation="")) == "engine_unknown"


def test_c11_clearing_up_never_ends_what_lives() -> None:
    fleet = Fleet(LIMITS)
    gone = Deregister(kind="engine", id="e1", incarnation="")
    assert fleet.refused(gone) == "not_expired"
    fleet.tick(LIMITS.suspect_ms)
    assert shown(fleet, "engines")["e1"] == "suspect"
    assert fleet.refused(gone) == "not_expired"
    fleet.tick(LIMITS.expire_ms)
    fleet.done(RegisterEngine(engine="e1", incarnation="2"))
    assert fleet.refused(gone) == "not_expired", "it came back between the look and the deletion"
    assert fleet.refused(Deregister(kind="worker", id="k2", incarnation="")) == "worker_unknown"
    fleet.done(Deregister(kind="engine", id="e1", incarnation="2"))
    assert "e1" not in shown(fleet, "engines")
