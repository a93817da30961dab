"""The processes that the demo starts: each with its log, and none left behind."""

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

STOP_GRACE_S = 5.0
LOG_TAIL_LINES = 15


class ChildFailed(Exception):
    """A process that the demo needs ended or did not become ready. The message ends with the tail of its
    log."""


class Child:
    """One process, known by its pid. It has its own session, so that ^C in a terminal reaches the demo
    alone, which then stops its children in order."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.stop_grace_s = STOP_GRACE_S
        """How long `stop` waits before it kills."""

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return self.process.returncode is None

    def kill(self) -> None:
        """SIGKILL: no goodbye, no cleaning up."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL when that is not heeded in time. Returns when the process is gone."""
        if self.running:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), self.stop_grace_s)
            except TimeoutError:
                self.kill()
        await self.process.wait()

    def failure(self, what: str) -> ChildFailed:
        """The error that says `what` happened to this process, and what it said last."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        tail = "\n".join(f"  | {line}" for line in text.splitlines()[-LOG_TAIL_LINES:])
        return ChildFailed(f"{self.name} {what}; its log {self.log} ends with:\n{tail or '  | (nothing)'}")


class Children:
    """All processes of one run. Leaving the context ends every one that still runs."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._all: list[Child] = []

    async def __aenter__(self) -> "Children":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(child.stop() for child in self._all))

    async def start(self, name: str, command: Sequence[str], *, pipes: bool = False) -> Child:
        """Start `command`. Its stderr, and stdout unless `pipes`, go to `<name>.log`, behind what is there
        already."""
        log = self._log_folder / f"{name}.log"
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            starting = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *command,
                    stdin=PIPE if pipes else DEVNULL,
                    stdout=PIPE if pipes else descriptor,
                    stderr=descriptor,
                    start_new_session=True,
                )
            )
            try:
                process = await asyncio.shield(starting)
            except asyncio.CancelledError:
                (await starting).kill()  # not known to anybody yet
                raise
        finally:
            os.close(descriptor)
        child = Child(name, process, log)
        self._all.append(child)
        return child
