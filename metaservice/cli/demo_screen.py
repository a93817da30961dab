"""Draws the demo on a terminal: a progress bar while it runs, tables at its end.

The demo is another process that tells what happens as JSON lines; nothing of it is imported here.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Literal

import msgspec
from msgspec import Raw, Struct
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table


class Event(Struct):
    """One line of the demo; which fields are there depends on `type`."""

    type: Literal["progress", "note", "table", "verdict", "result", "fault"]
    done: int = 0
    total: int = 0
    blocks_asked: int = 0
    blocks_hit: int = 0
    text: str = ""
    passed: bool = False
    title: str = ""
    header: list[str] = []
    align: list[Literal["left", "right"]] = []
    rows: list[list[str]] = []
    figures: Raw = Raw(b"{}")


def run_drawn(command: Sequence[str]) -> int:
    """Run the demo's `command` and draw what it tells; its exit status. Signals are passed on to it, and
    its end is waited for: it stops what it started before it goes."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as demo:

        def pass_on(number: int, _: FrameType | None) -> None:
            demo.send_signal(number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, pass_on)
        assert demo.stdout is not None
        screen = DemoScreen(Console(), Console(stderr=True))
        try:
            for line in demo.stdout:
                screen.show(msgspec.json.decode(line, type=Event))
        finally:
            screen.close()
    return demo.returncode


class DemoScreen:
    """Where events are drawn."""

    def __init__(self, console: Console, errors: Console) -> None:
        self._console = console
        self._errors = errors
        self._progress = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("hit rate {task.fields[hit_rate]:.1%}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def show(self, event: Event) -> None:
        """Draw one event."""
        match event.type:
            case "progress":
                self._advance(event)
            case "note":
                self._console.print(f"[dim]•[/] {escape(event.text)}", highlight=False)
            case "table":
                self.close()
                self._console.print(_table(event))
            case "verdict":
                mark = "[green]✓[/]" if event.passed else "[bold red]✗[/]"
                self._console.print(f"{mark} {escape(event.text)}", highlight=False)
            case "result":
                self.close()
                # Not through the console: it would break the line to the width of the terminal.
                sys.stdout.write(bytes(event.figures).decode() + "\n")
                sys.stdout.flush()
            case "fault":
                self.close()
                self._errors.print(f"[bold red]error:[/] {escape(event.text)}", highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()

    def _advance(self, event: Event) -> None:
        rate = event.blocks_hit / event.blocks_asked if event.blocks_asked else 0.0
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("", total=event.total, hit_rate=rate)
        self._progress.update(self._task, completed=event.done, hit_rate=rate)


def _table(event: Event) -> Table:
    table = Table(title=event.title, title_justify="left", title_style="bold")
    for name, align in zip(event.header, event.align, strict=True):
        table.add_column(name, justify=align, overflow="fold")
    for row in event.rows:
        table.add_row(*map(escape, row))
    return table
