"""Draws docs/states.md from the transition tables: `python -m metaservice.core.diagram > docs/states.md`."""

import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from .transitions import LEASE, LOCATION, SESSION

_HEAD = """# State machines

Generated from `metaservice/core/transitions.py` by `python -m metaservice.core.diagram`; a test compares the
two.
"""


def _chart(title: str, text: str, table: Mapping[Any, Mapping[str, IntEnum]], start: str) -> str:
    rows = [f"    [*] --> {start}"]
    for state, row in table.items():
        arrows: dict[str, list[str]] = {}
        for what, target in row.items():
            arrows.setdefault(target.name, []).append(what)
        rows += [f"    {state.name} --> {target}: {' / '.join(whats)}" for target, whats in arrows.items()]
        if not row:
            rows.append(f"    {state.name} --> [*]")
    return f"## {title}\n\n{text}\n\n```mermaid\nstateDiagram-v2\n" + "\n".join(rows) + "\n```\n"


def document() -> str:
    """The whole page."""
    charts = (
        _chart(
            "CacheLocation",
            "One copy of one block in one storage. `gone` is a free slot; its next use has a new generation.",
            LOCATION,
            "gone",
        ),
        _chart("WriteSession", "The lease under which an engine writes a set of locations.", SESSION, "open"),
        _chart(
            "ReadLease", "The promise that named locations stay readable until a deadline.", LEASE, "held"
        ),
    )
    return "\n".join((_HEAD, *charts))


if __name__ == "__main__":
    sys.stdout.write(document())
