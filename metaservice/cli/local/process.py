"""One process on this machine, known by its pid: start, end, kill, freeze."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

LOG_TAIL_LINES = 15
POLL_S = 0.01
_LAUNCHER = str(Path(__file__).with_name("launch.py"))


class LocalFailed(Exception):
    """Something on this machine could not be started or ended early. The message says what to do, or ends
    with the tail of the process's log."""


class Owner:
    """The user that a process runs as: the one of this process, or another one when this one is root."""

    def __init__(self, uid: int | None = None, gid: int | None = None) -> None:
        """Both or none; None stays as it is."""
        self.uid = uid
        self.gid = gid

    @property
    def words(self) -> list[str]:
        """The two words of the launcher."""
        return ["-", "-"] if self.uid is None else [str(self.uid), str(self.gid)]


def launch_command(command: Sequence[str], owner: Owner | None = None) -> list[str]:
    """`command` as a command that the kernel kills when the thread that starts it ends: start it from a
    thread that lives as long as the process shall."""
    words = (owner or Owner()).words
    return [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), *words, *command]


class LocalProcess:
    """A running process and its log. Not safe to use from two threads at once."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        owner: Owner | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start `command`, an absolute path and its arguments; what it says is added to `log`. It has a
        session of its own, so that ^C in a terminal does not reach it. Raises OSError when there is no such
        folder or no room for another process."""
        self.name = name
        self.log = log
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                launch_command(command, owner),
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when it has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone: its ports are free when this returns."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP: it keeps its connections and answers nobody."""
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)

    def end(self, timeout_s: float, number: signal.Signals = signal.SIGTERM) -> bool:
        """Ask it to end and wait; SIGKILL when it does not within `timeout_s`. Whether it ended by itself."""
        self.send(number)
        self.thaw()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            return True
        self.kill()
        return False

    def failure(self, what: str) -> LocalFailed:
        """The error that says `what` happened to it, and what it said last."""
        return LocalFailed(f"{self.name} {what}; its log {self.log} ends with:\n{tail(self.log)}")


def tail(log: Path) -> str:
    """The last lines of a log, set off for a message."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = text.splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(f"  | {line}" for line in lines) or "  | (nothing)"


def until(deadline_s: float) -> Iterator[None]:
    """Yields, with a short sleep between, until the monotonic clock reaches `deadline_s`."""
    while True:
        yield
        if time.monotonic() >= deadline_s:
            return
        time.sleep(POLL_S)


def processes_in(folder: Path) -> list[int]:
    """The processes whose working folder this is, of the users whose processes may be looked at; zombies have
    none."""
    found = []
    place = str(folder.resolve())
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and os.readlink(entry / "cwd") == place:
                found.append(int(entry.name))
    return found


def title(pid: int) -> str:
    """What a process calls itself, e.g. "postgres: checkpointer"; empty when it is gone."""
    try:
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to each that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
