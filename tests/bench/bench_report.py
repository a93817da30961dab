"""The figures as text that is also Markdown, and as JSON."""

from collections.abc import Sequence

import msgspec

from tests.bench.bench_clients import Cell, Figures
from tests.bench.bench_service import Machine

AIMS = {
    ("lookup", 1, 256): "500k keys/s",
    ("lookup", 1, 1): "p50 < 200 us",
    ("write", 1, 256): "60k keys/s",
}
TITLES = {
    "lookup": "lookup + lease, all hits",
    "miss": "lookup, all misses",
    "write": "start + finish",
}


class CallRow(msgspec.Struct, kw_only=True):
    """A cell against the service, the best of several, and the same against the bare server."""

    cell: Cell
    service: Figures
    bare: Figures | None

    @property
    def ratio(self) -> float | None:
        """Service's keys/s over the bare server's."""
        return self.service.keys_per_s / self.bare.keys_per_s if self.bare is not None else None


class Fact(msgspec.Struct, kw_only=True):
    """One figure by itself. `aim` is empty where none is set."""

    name: str
    value: float
    unit: str
    aim: str = ""
    note: str = ""


class Report(msgspec.Struct, kw_only=True):
    """Everything that was measured in one run."""

    machine: Machine
    quick: bool
    repeats: int
    blocks: int
    calls: list[CallRow]
    facts: list[Fact]
    load_after: float = 0.0
    seconds: float = 0.0

    def text(self) -> str:
        """For people."""
        parts = []
        if self.calls:
            parts.append(_table(_CALL_HEAD, [_call_cells(row) for row in self.calls]))
        if self.facts:
            parts.append(_table(_FACT_HEAD, [_fact_cells(fact) for fact in self.facts]))
        best = f"best of up to {self.repeats}" if self.repeats > 1 else "measured once"
        parts.append(
            f"machine: {self.machine.line()}\n"
            f"load: {self.machine.load:.1f} before, {self.load_after:.1f} after (this run makes about 2; "
            "what is more are other programs, which slow it down)\n"
            f"calls: msgpack through the SDK over loopback, SQLite with synchronous=FULL, "
            f"{self.blocks:,} blocks stored, keys of 32 bytes, one part a block; {best}.\n"
            "start + finish: a call is the pair. cpu: of the server, us a key. bare: a dict behind a socket, "
            "without rules, HTTP or disk.\n"
            f"total time: {self.seconds:.0f} s"
        )
        return "\n\n".join(parts)


_CALL_HEAD = (
    "what", "clients", "keys a call", "keys/s", "calls/s", "p50 us", "p99 us", "cpu us/key", "bare keys/s",
    "of bare", "aim",
)  # fmt: skip
_FACT_HEAD = ("what", "figure", "unit", "aim", "how")


def _call_cells(row: CallRow) -> list[str]:
    cell, figures = row.cell, row.service
    return [
        TITLES[cell.what], str(cell.clients), str(cell.keys), f"{figures.keys_per_s:,.0f}",
        f"{figures.calls_per_s:,.0f}", f"{figures.p50_us:,.0f}", f"{figures.p99_us:,.0f}",
        f"{figures.cpu_us_per_key:.2f}", "" if row.bare is None else f"{row.bare.keys_per_s:,.0f}",
        "" if row.ratio is None else f"{row.ratio:.0%}", AIMS.get((cell.what, cell.clients, cell.keys), ""),
    ]  # fmt: skip


def _fact_cells(fact: Fact) -> list[str]:
    digits = 0 if fact.value >= 100 else 1 if fact.value >= 10 else 2
    return [fact.name, f"{fact.value:,.{digits}f}", fact.unit, fact.aim, fact.note]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned; the ones of figures to the right."""
    widths = [max(len(line[at]) for line in (head, *rows)) for at in range(len(head))]
    right = [
        bool(rows) and all(not line[at] or line[at][0].isdigit() for line in rows) for at in range(len(head))
    ]
    right = [one and any(line[at] for line in rows) for at, one in enumerate(right)]

    def line_of(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if one else cell.ljust(width)
            for cell, width, one in zip(cells, widths, right, strict=True)
        ]
        return "| " + " | ".join(padded) + " |"

    rule = (
        "|"
        + "|".join(
            "-" * (width + 1) + (":" if one else "-") for width, one in zip(widths, right, strict=True)
        )
        + "|"
    )
    return "\n".join([line_of(head), rule, *map(line_of, rows)])
