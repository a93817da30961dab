"""Replicas of the service on the loopback address, each a process with a configuration file of its own."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from metaservice.cli.local.places import HOST, free_port
from metaservice.cli.local.process import LocalProcess, until

ASK_TIMEOUT_S = 2.0
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0

Settings = Mapping[str, str | int | float | bool | Sequence[str]]
"""Settings of `ucm-meta serve` by name, as its configuration file has them."""


class LocalReplica:
    """One replica. Its port and name stay the same from start to start."""

    def __init__(self, name: str, folder: Path, settings: Settings) -> None:
        """Writes `<name>.toml` into `folder`. Only this user may read it: it may hold passwords."""
        self.name = name
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._folder = folder
        self._config = folder / f"{name}.toml"
        self._process: LocalProcess | None = None
        own: Settings = {"replica": name, "host": HOST, "port": self.port, "data": str(folder / name)}
        self._config.touch(0o600)
        self._config.write_text(toml({**settings, **own}), encoding="utf-8")

    @property
    def pid(self) -> int:
        """The process id; of the last process when none runs."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether its process runs, frozen or not."""
        return self._process is not None and self._process.running

    @property
    def log(self) -> Path:
        """What it says, over all its starts."""
        return self._folder / f"{self.name}.log"

    def launch(self) -> None:
        """Start its process. It may take requests once `ready`."""
        command = [sys.executable, "-m", "metaservice.main", "serve", "--config", str(self._config)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("UCM_")}
        self._process = LocalProcess(f"replica {self.name}", command, self.log, environment=kept)

    def ready(self) -> bool:
        """Whether it says that it may take requests. Raises `LocalFailed` when its process has ended."""
        if self._process is not None and not self._process.running:
            raise self._process.failure(f"ended with status {self._process.status}")
        status, _ = ask(self.url, "/readyz")
        return status == 200

    def await_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns once it is ready; raises `LocalFailed` when it is not in time, or ended."""
        assert self._process is not None
        for _ in until(time.monotonic() + timeout_s):
            if self.ready():
                return
        raise self._process.failure(f"was not ready after {timeout_s:g} s")

    def status(self) -> dict[str, Any] | None:
        """What `GET /v1/cluster` says here; None when it does not answer."""
        code, body = ask(self.url, "/v1/cluster")
        found: dict[str, Any] | None = json.loads(body) if code == 200 else None
        return found

    def crash(self) -> None:
        """SIGKILL; gone when this returns."""
        if self._process is not None:
            self._process.kill()

    def ask_to_end(self) -> None:
        """SIGTERM: it hands its shards over, drains and ends. Does not wait."""
        if self._process is not None:
            self._process.thaw()
            self._process.send(signal.SIGTERM)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """SIGTERM, and SIGKILL when it does not end in time. Whether it ended by itself, with status 0."""
        if self._process is None:
            return True
        return self._process.end(timeout_s) and self._process.status == 0

    def freeze(self) -> None:
        """SIGSTOP: its connections stay and nobody answers."""
        assert self._process is not None
        self._process.freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.thaw()


def ask(url: str, path: str) -> tuple[int, bytes]:
    """Status and body of a GET, without any proxy; (0, b"") when nobody answers in time."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=ASK_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()


def toml(settings: Settings) -> str:
    """Settings as a configuration file. Texts, numbers, switches and lists of texts read the same as JSON."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
