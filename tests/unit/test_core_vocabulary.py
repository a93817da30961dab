"""The words of the core, the wire and the documents say the same thing."""

import ast
from enum import IntEnum
from pathlib import Path

import pytest

from metaservice.core import commands
from metaservice.core import outcomes as core_outcomes
from metaservice.core.apply import _APPLY
from metaservice.core.diagram import document
from metaservice.core.events import Event
from metaservice.core.machine import _DECIDE, _STEPS
from metaservice.core.transitions import LEASE, LOCATION, SESSION, sources
from metaservice.wire import schemas
from metaservice.wire.problems import PROBLEMS

ROOT = Path(__file__).parents[2]
OUTCOMES = ("WriteOutcome", "RefusedReason", "FinishStatus", "RemoveOutcome", "LeaseOutcome")


@pytest.mark.parametrize("name", OUTCOMES)
def test_outcome_codes_of_core_and_wire_are_equal(name: str) -> None:
    core: type[IntEnum] = getattr(core_outcomes, name)
    wire: type[IntEnum] = getattr(schemas, name)
    assert {one.name: one.value for one in core} == {one.name: one.value for one in wire}


def rejection_codes() -> set[tuple[str, str]]:
    """(code, where) of every literal code given to a Rejection in the core."""
    found: set[tuple[str, str]] = set()
    for path in (ROOT / "metaservice/core").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Rejection":
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found.add((first.value, f"{path.name}:{node.lineno}"))
    return found


def test_every_rejection_code_is_registered() -> None:
    codes = rejection_codes()
    assert len(codes) > 40, "the scan no longer finds the rejections"
    unknown = sorted(f"{code} at {where}" for code, where in codes if code not in PROBLEMS)
    assert not unknown


def test_every_event_is_applied_and_every_command_decided() -> None:
    assert set(_APPLY) == set(Event.__args__)
    reads = {"Lookup", "RenewLeases", "ReleaseLeases", "Heartbeat", "TakeTasks", "Unknown"}
    special = {"Tick", "TakeOver", "Command"}
    defined = {
        name
        for name, one in vars(commands).items()
        if isinstance(one, type) and issubclass(one, commands.Command)
    }
    assert {one.__name__ for one in (*_DECIDE, *_STEPS)} == defined - reads - special


def test_transition_tables_have_no_dead_state() -> None:
    for table in (LOCATION, SESSION, LEASE):
        states = set(table)
        reached = {target for row in table.values() for target in row.values()}
        start = next(iter(table))
        assert states - reached <= {start}, f"never reached: {states - reached}"
    with pytest.raises(KeyError):
        sources("no such thing")


def test_the_states_page_is_generated_from_the_tables() -> None:
    page = (ROOT / "docs/states.md").read_text()
    assert page == document(), "run: python -m metaservice.core.diagram > docs/states.md"
