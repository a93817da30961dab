"""The service as a process that a test starts, stops, kills, freezes and looks at from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from socket import AF_INET, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket
from types import TracebackType
from typing import Any, Self

import httpx

ROOT = Path(__file__).resolve().parent.parent.parent
START_S = 60.0
"""How long a start may take on a busy machine; a test that needs it shorter measures by itself."""


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket(AF_INET, SOCK_STREAM) as probe:
        probe.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def flags_of(settings: Mapping[str, object]) -> list[str]:
    """`lease_ms_max=300` as `--lease-ms-max 300`."""
    flags: list[str] = []
    for name, value in settings.items():
        flags += ["--" + name.replace("_", "-"), str(value)]
    return flags


class ServiceProcess:
    """One service on one data directory and one port, over all its lives."""

    def __init__(self, directory: Path, **settings: object) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.data = directory / "data"
        self.ready_file = directory / "ready.json"
        self.log_file = directory / "service.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.settings: dict[str, object] = {"grace_ms": 3_000, **settings}
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def command(self) -> list[str]:
        """The command line of `serve`."""
        fixed = {"data": self.data, "port": self.port, "ready_file": self.ready_file, **self.settings}
        return [sys.executable, "-m", "metaservice.main", "serve", *flags_of(fixed)]

    def launch(self) -> "subprocess.Popen[bytes]":
        """Start it and return at once."""
        assert self.process is None or self.process.poll() is not None, "it runs already"
        self.starts += 1
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
            )
        return self.process

    def start(self) -> None:
        """Start it and wait until it answers. AssertionError with its log when it does not."""
        process = self.launch()
        deadline_s = time.monotonic() + START_S
        while not self._says_ready(process.pid):
            assert process.poll() is None, f"it ended with {process.returncode}: {self.log()[-3_000:]}"
            assert time.monotonic() < deadline_s, f"not ready in {START_S} s: {self.log()[-3_000:]}"
            time.sleep(0.01)

    def _says_ready(self, pid: int) -> bool:
        try:
            return bool(json.loads(self.ready_file.read_bytes())["pid"] == pid)
        except FileNotFoundError:
            return False

    def refused(self) -> tuple[int, str]:
        """Start it where it must not be able to; its exit status and what it said last."""
        before = len(self.log())
        process = self.launch()
        status = process.wait(START_S)
        return status, self.log()[before:]

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has let go of it. Nothing happens when it does not run."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def terminate(self, timeout_s: float) -> int:
        """SIGTERM; its exit status. AssertionError when it has not ended after `timeout_s`."""
        assert self.process is not None
        self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end in {timeout_s} s: {self.log()[-3_000:]}") from None

    def freeze(self, seconds: float) -> None:
        """The process gets no time at all for so long."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.process.pid, signal.SIGCONT)

    def log(self) -> str:
        """Everything that it wrote to stderr so far, in all its lives."""
        return self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file.exists() else ""

    # -- looked at from outside

    def get(self, path: str) -> Any:
        """The JSON of a route that must answer 200."""
        reply = httpx.get(self.url + path, timeout=10.0, trust_env=False)
        assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text[:500]}"
        return reply.json()

    def epoch(self) -> int:
        """The epoch that it leads in."""
        return int(self.get("/v1/status")["epoch"])
