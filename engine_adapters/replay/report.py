"""What the demo tells: steps and progress while it runs, tables at its end. As text, or as JSON lines for a
program that draws them."""

from collections.abc import Sequence
from typing import IO, Literal, Protocol

import msgspec
from msgspec import Struct

from engine_adapters.replay.ledger import Figures, Ledger, share_of_possible

Align = Literal["left", "right"]


class Progress(Struct, tag="progress", frozen=True):
    """`done` of `total` requests are answered; so many blocks were asked and hit in them."""

    done: int
    total: int
    blocks_asked: int
    blocks_hit: int


class Note(Struct, tag="note", frozen=True):
    """Something happened."""

    text: str


class Table(Struct, tag="table", frozen=True):
    """Rows of text under a header; numbers are aligned `right`."""

    title: str
    header: list[str]
    align: list[Align]
    rows: list[list[str]]


class Verdict(Struct, tag="verdict", frozen=True):
    """Something that the run had to show, and whether it did."""

    passed: bool
    text: str


class Result(Struct, tag="result", frozen=True):
    """The figures; always the last thing told."""

    figures: Figures


class Fault(Struct, tag="fault", frozen=True):
    """The run could not be carried through, for this reason; no result follows."""

    text: str


Told = Progress | Note | Table | Verdict | Result | Fault


class Teller(Protocol):
    """Takes what there is to tell."""

    def tell(self, told: Told) -> None:
        """Pass it on."""


class EventTeller:
    """One JSON object a line."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def tell(self, told: Told) -> None:
        """Write and flush it: somebody draws it now."""
        self._out.write(msgspec.json.encode(told).decode() + "\n")
        self._out.flush()


class TextTeller:
    """Text for people and logs, without progress. The result is one line of JSON."""

    def __init__(self, out: IO[str], errors: IO[str]) -> None:
        self._out = out
        self._errors = errors

    def tell(self, told: Told) -> None:
        """Write it as text, a fault to the error stream."""
        match told:
            case Progress():
                return
            case Note(text):
                self._out.write(f"{text}\n")
            case Table():
                self._out.write(f"\n{table_text(told)}\n")
            case Verdict(passed, text):
                self._out.write(f"{'ok' if passed else 'FAILED':6}  {text}\n")
            case Result(figures):
                self._out.write(f"\n{msgspec.json.encode(figures).decode()}\n")
            case Fault(text):
                self._errors.write(f"error: {text}\n")
        self._out.flush()


def table_text(table: Table) -> str:
    """The table in columns of plain text."""
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if align == "right" else cell.ljust(width)
            for cell, width, align in zip(cells, widths, table.align, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([table.title, line(table.header), rule, *map(line, table.rows)])


def engines_table(ledger: Ledger, engines: Sequence[str]) -> Table:
    """One row an engine and one for all."""
    header = ["engine", "requests", "blocks", "hit", "hit rate", "of possible", "written", "by others"]
    header += ["failed calls", "dirty reads"]
    table_rows = []
    for name in [*engines, "all"]:
        rows = ledger.rows if name == "all" else ledger.of(name)
        asked = sum(row.done.asked for row in rows)
        hits = sum(row.done.hits for row in rows)
        table_rows.append(
            [
                name,
                f"{len(rows):,}",
                f"{asked:,}",
                f"{hits:,}",
                f"{hits / asked if asked else 0:.1%}",
                f"{share_of_possible(rows):.1%}",
                f"{sum(row.done.written for row in rows):,}",
                f"{sum(row.done.present + row.done.in_progress for row in rows):,}",
                f"{sum(len(row.done.failures) for row in rows):,}",
                f"{sum(row.done.dirty for row in rows):,}",
            ]
        )
    align: list[Align] = ["left"]
    align += ["right"] * (len(header) - 1)
    return Table("Engines", header, align, table_rows)


MEANINGS = {
    "requests": "requests answered, each counted once",
    "blocks_asked": "whole blocks of their prompts",
    "blocks_hit": "of these, found, loaded and equal to what was computed for their key",
    "hit_rate": "blocks_hit / blocks_asked",
    "ideal_hit_rate": "the same for an infinite cache that never fails, on the same requests in this order",
    "dirty_reads": "blocks named as readable that were absent, cut short or not the right bytes",
    "hit_rate_before_kill": "share of the ideal's hits that was hit, in requests answered before the kill",
    "hit_rate_after_kill": "the same in all requests answered after it, on every engine",
    "hit_rate_drop": "the difference of these two",
    "hit_rate_drop_engine": "how much less of the ideal's hits after an engine was killed than before",
    "hit_rate_drop_leader": "the same for the replica that led the instance's shard",
    "unavailable_ms": "from the leader's kill until a lookup was answered again",
    "orphans": "files in the storage unknown to the service, and locations neither readable nor gone",
    "orphans_left": "files in the storage unknown to the service, and locations neither readable nor gone",
    "seconds": "from start to end, installation not counted",
}
"""What each figure means, for people."""
_LARGER = "the larger of these two"


def figures_table(figures: Figures) -> Table:
    """Each figure with its meaning."""
    values = msgspec.structs.asdict(figures)
    meanings = {**MEANINGS, "hit_rate_drop": _LARGER} if "hit_rate_drop_leader" in values else MEANINGS
    rows = [[name, _value_text(value), meanings[name]] for name, value in values.items()]
    return Table("Figures", ["figure", "value", "meaning"], ["left", "right", "left"], rows)


def _value_text(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
