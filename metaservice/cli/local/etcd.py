"""An etcd of our own on the loopback address: one member or several, each can be killed and frozen."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Self

from metaservice.cli.local.binaries import etcd_program
from metaservice.cli.local.places import HOST, free_port, temporary_folder
from metaservice.cli.local.process import LocalFailed, LocalProcess, until

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 2.0
ASK_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files for the clients' side of every member. With `client_ca`, clients must show a certificate."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def words(self) -> list[str]:
        """As command line."""
        words = ["--cert-file", str(self.certificate), "--key-file", str(self.key)]
        if self.client_ca is not None:
            words += ["--client-cert-auth", "--trusted-ca-file", str(self.client_ca)]
        return words


class EtcdMember:
    """One member. Its ports and data stay the same from start to start."""

    def __init__(self, name: str, folder: Path, tls: ServerTls | None) -> None:
        self.name = name
        self._folder = folder
        self._tls = tls
        self._client_port, self._peer_port, self._metrics_port = free_port(), free_port(), free_port()
        self._process: LocalProcess | None = None

    @property
    def endpoint(self) -> str:
        """Where clients reach it."""
        return f"{'https' if self._tls else 'http'}://{HOST}:{self._client_port}"

    @property
    def peer(self) -> str:
        """Its place in the list of members."""
        return f"{self.name}=http://{HOST}:{self._peer_port}"

    @property
    def pid(self) -> int:
        """The process id; of the last process when none runs."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether its process runs, frozen or not."""
        return self._process is not None and self._process.running

    def launch(self, peers: Sequence[str], words: Sequence[str]) -> None:
        """Start its process. It answers once a majority of the members runs."""
        peer = self.peer.partition("=")[2]
        command = [
            str(etcd_program()),
            *("--name", self.name),
            *("--data-dir", str(self._folder / self.name)),
            *("--listen-client-urls", self.endpoint),
            *("--advertise-client-urls", self.endpoint),
            *("--listen-peer-urls", peer),
            *("--initial-advertise-peer-urls", peer),
            *("--initial-cluster", ",".join(peers)),
            *("--listen-metrics-urls", f"http://{HOST}:{self._metrics_port}"),
            *("--log-level", "warn"),
            *words,
            *(self._tls.words if self._tls else []),
        ]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        self._process = LocalProcess(
            f"etcd {self.name}", command, self._folder / f"{self.name}.log", environment=kept
        )

    def healthy(self) -> bool:
        """Whether it knows a leader and could commit just now. Asked of a port without TLS. Raises
        `LocalFailed` when its process has ended."""
        if self._process is not None and not self._process.running:
            raise self._process.failure(f"ended with status {self._process.status}")
        connection = HTTPConnection(HOST, self._metrics_port, timeout=ASK_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            return b'"true"' in connection.getresponse().read()
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def crash(self) -> None:
        """SIGKILL; gone when this returns."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """End it in order; gone when this returns."""
        if self._process is not None:
            self._process.end(STOP_TIMEOUT_S, signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP: its connections stay and nobody answers."""
        assert self._process is not None
        self._process.freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.thaw()


class LocalEtcd:
    """A cluster of members. A context manager; `close` ends it. Not safe to use from two threads at once, and
    the thread that starts it must live as long as it."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        members: int = 1,
        tls: ServerTls | None = None,
        words: Sequence[str] = ("--unsafe-no-fsync",),
    ) -> None:
        """`folder` (made when absent) keeps data and logs and stays; None is a temporary one. `words` are
        further options of every member: without the default, writes outlive a power cut too."""
        self._stack = ExitStack()
        place = folder if folder is not None else self._stack.enter_context(temporary_folder())
        place.mkdir(parents=True, exist_ok=True)
        self._words = tuple(words)
        self.members = [EtcdMember(f"e{number}", place, tls) for number in range(1, members + 1)]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where clients reach it, a URL a member."""
        return tuple(member.endpoint for member in self.members)

    @property
    def pids(self) -> list[int]:
        """The members' process ids."""
        return [member.pid for member in self.members if member.running]

    def start(self) -> tuple[str, ...]:
        """Start every member that does not run, and return the endpoints once all answer. Raises
        `LocalFailed`."""
        peers = [member.peer for member in self.members]
        for member in self.members:
            if not member.running:
                member.launch(peers, self._words)
        for _ in until(time.monotonic() + START_TIMEOUT_S):
            if all(member.healthy() for member in self.members):
                return self.endpoints
        raise LocalFailed(f"etcd was not ready after {START_TIMEOUT_S:g} s")

    def restart(self, member: EtcdMember) -> None:
        """Start one member again; it need not answer yet when this returns."""
        member.launch([other.peer for other in self.members], self._words)

    def crash(self) -> None:
        """SIGKILL to all."""
        for member in self.members:
            member.crash()

    def stop(self) -> None:
        """End all in order; gone when this returns. The last ones find no majority to tell: killed."""
        for member in self.members:
            member.stop()

    def freeze(self) -> None:
        """SIGSTOP to all."""
        for member in self.members:
            member.freeze()

    def thaw(self) -> None:
        """SIGCONT to all."""
        for member in self.members:
            member.thaw()

    def close(self) -> None:
        """End it, at once: etcd needs no goodbye. A temporary folder goes too."""
        try:
            self.crash()
        finally:
            self._stack.close()
