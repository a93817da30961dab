"""The state machines of the service, whole, in one literal table each.

Everything that may happen to a CacheLocation, a WriteSession or a ReadLease is a row here; what is no row
cannot happen, and `apply` asserts it. The diagrams in docs/states.md are generated from these tables (idea:
h11).
"""

from collections.abc import Mapping

from .model import LeaseState, LocationState, SessionState

LOCATION: Mapping[LocationState, Mapping[str, LocationState]] = {
    LocationState.gone: {"started": LocationState.writing},
    LocationState.writing: {
        "last part finished": LocationState.serving,
        "part failed": LocationState.deleting,
        "session ended": LocationState.deleting,
        "removed": LocationState.deleting,
        "pool gone": LocationState.gone,
    },
    LocationState.serving: {
        "removed": LocationState.deleting,
        "evicted": LocationState.deleting,
        "pool gone": LocationState.gone,
    },
    LocationState.deleting: {"bytes deleted": LocationState.gone, "pool gone": LocationState.gone},
}

SESSION: Mapping[SessionState, Mapping[str, SessionState]] = {
    SessionState.open: {
        "renewed": SessionState.open,
        "last location finished": SessionState.finished,
        "deadline passed": SessionState.expired,
        "aborted": SessionState.aborted,
        "engine replaced": SessionState.aborted,
    },
    SessionState.finished: {},
    SessionState.expired: {},
    SessionState.aborted: {},
}

LEASE: Mapping[LeaseState, Mapping[str, LeaseState]] = {
    LeaseState.held: {
        "renewed": LeaseState.held,
        "released": LeaseState.released,
        "deadline passed": LeaseState.expired,
    },
    LeaseState.released: {"released": LeaseState.released},
    LeaseState.expired: {},
}

for _table, _states in ((LOCATION, LocationState), (SESSION, SessionState), (LEASE, LeaseState)):
    assert set(_table) == set(_states), f"{_states.__name__}: a state has no row"


def sources(what: str) -> frozenset[int]:
    """The location states from which `what` may happen; raises KeyError when the table knows no such
    thing."""
    found = frozenset(int(state) for state, row in LOCATION.items() if what in row)
    if not found:
        raise KeyError(what)
    return found
