"""A PostgreSQL of our own on the loopback address, which can be killed, frozen and failed over at will.

As root the server runs as another user, for PostgreSQL refuses to run as root.
"""

import os
import pwd
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from metaservice.cli.local.binaries import copy_of_wheel, postgres_programs
from metaservice.cli.local.places import HOST, blocked_for_others, free_port, temporary_folder
from metaservice.cli.local.process import (
    LocalFailed,
    LocalProcess,
    Owner,
    launch_command,
    processes_in,
    signal_all,
    title,
    until,
)

USER = "ucm"
DATABASE = "postgres"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 60.0
BIND_TRIES = 5
NOBODY = 65_534

SETTINGS = {
    "listen_addresses": f"'{HOST}'",
    "unix_socket_directories": "''",
    "max_connections": "200",
    "shared_buffers": "'64MB'",
    "wal_level": "replica",
    "max_wal_senders": "8",
    "max_wal_size": "'256MB'",
    "hot_standby": "on",
    "log_line_prefix": "'%m [%p] '",
    "logging_collector": "off",
    "jit": "off",
}
"""What every server has; values as its configuration file spells them."""

WITHOUT_FSYNC = {"fsync": "off", "full_page_writes": "off"}
"""What was committed outlives every killed process, not a power cut."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens and how to log in."""

    port: int
    password: str

    def dsn(self, database: str = DATABASE) -> str:
        """As a URL."""
        return f"postgresql://{USER}:{self.password}@{HOST}:{self.port}/{database}"


class LocalPostgres:
    """One server. A context manager; `close` ends it. Not safe to use from two threads at once, and the
    thread that starts it must live as long as it."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        fsync: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`folder` (made when absent) keeps its data and log and stays; None is a temporary one. `settings`
        are added to `SETTINGS`. Raises `LocalFailed` when there is no PostgreSQL on this machine."""
        self._stack = ExitStack()
        self._folder = folder if folder is not None else self._stack.enter_context(temporary_folder())
        self._settings = SETTINGS | ({} if fsync else WITHOUT_FSYNC) | dict(settings or {})
        self._programs = postgres_programs()
        self._owner = Owner()
        self._process: LocalProcess | None = None
        self._address = Address(0, "")

    # --- life ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._process is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> str:
        """Start it, on the same data and port as before when there are any, and return its DSN once it
        answers (a standby: reads). Raises `LocalFailed`."""
        self._choose_owner()
        if not (self._data / "local.conf").exists():
            self._create()
        self._address = Address(self._address.port, self._password.read_text(encoding="ascii"))
        self._await_gone()
        for attempt in range(1, BIND_TRIES + 1):
            if self._address.port == 0:
                self._address = Address(free_port(), self._address.password)
            self._write_settings()
            if self._launched():
                return self.dsn
            if attempt == BIND_TRIES or not self._port_taken():
                break
            self._address = Address(0, self._address.password)
        assert self._process is not None
        raise self._process.failure(f"was not ready after {START_TIMEOUT_S:g} s, or ended")

    def crash(self) -> None:
        """SIGKILL to every one of its processes, as when the machine goes down; gone when this returns."""
        signal_all(self.pids, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
        self._await_gone()

    def stop(self) -> None:
        """End it in order (connections are cut); gone when this returns."""
        self.thaw()
        if self._process is not None and self._process.running:
            self._process.end(STOP_TIMEOUT_S, signal.SIGINT)
        self.crash()

    def close(self) -> None:
        """End it. A temporary folder goes too."""
        try:
            self.stop()
        finally:
            self._stack.close()

    # --- what torture does ----------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Its processes, the postmaster first while it lives; empty when none runs."""
        postmaster = self._process.pid if self._process is not None else 0
        return sorted(processes_in(self._data), key=lambda pid: (pid != postmaster, pid))

    @property
    def backend_pids(self) -> list[int]:
        """Its processes that serve a client of the network, also standbys that follow it."""
        return [pid for pid in self.pids if f" {HOST}(" in title(pid)]

    def freeze(self) -> None:
        """SIGSTOP to all its processes: the kernel keeps and takes connections, and nobody answers."""
        signal_all(self.pids, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT to all."""
        signal_all(self.pids, signal.SIGCONT)

    def configure(self, **settings: str) -> None:
        """Change settings that a running server can take, e.g. `default_transaction_read_only="on"`."""
        self._settings |= settings
        self._write_settings()
        if self._process is not None and self._process.running:
            self._process.send(signal.SIGHUP)

    def execute(self, sql: str, database: str = DATABASE) -> str:
        """Run statements as the superuser, each in a transaction of its own; rows as lines of `|`-separated
        text. Raises `LocalFailed` with what the server said."""
        command = [str(self._programs / "psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"]
        command += ["-h", HOST, "-p", str(self._address.port), "-U", USER, "-d", database]
        return _run(command, sql, _environment() | {"PGPASSWORD": self._address.password}).rstrip("\n")

    # --- databases and followers ------------------------------------------------------------------------

    @property
    def dsn(self) -> str:
        """Of the server's first database."""
        return self._address.dsn()

    @property
    def port(self) -> int:
        """Where it listens; 0 before the first start."""
        return self._address.port

    @property
    def log(self) -> Path:
        """What the server says."""
        return self._folder / "postgres.log"

    def create_database(self, name: str) -> str:
        """An empty database; its DSN. `name` is letters, digits and `_`. Raises `LocalFailed`."""
        assert re.fullmatch(r"[a-z0-9_]+", name)
        self.execute(f"CREATE DATABASE {name}")
        return self._address.dsn(name)

    def drop_database(self, name: str) -> None:
        """Remove a database, whoever is connected to it."""
        assert re.fullmatch(r"[a-z0-9_]+", name)
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def standby(self, name: str = "standby", *, synchronous: bool = True) -> "LocalPostgres":
        """A started second server that follows this one. While it is `synchronous`, no commit here is
        acknowledged before it is on the standby's disk too. Close it before this one."""
        follower = LocalPostgres(self._folder / name, settings=self._settings)
        follower._settings |= {"synchronous_standby_names": "''"}
        follower._copy_from(self._address, name)
        follower.start()
        if synchronous:
            self.configure(synchronous_standby_names=f"'\"{name}\"'", synchronous_commit="on")
            self._await_synchronous(name)
        return follower

    def promote(self) -> None:
        """Make a standby the primary; it takes writes when this returns. Raises `LocalFailed`."""
        self._run_as_owner("pg_ctl", "promote", "-w", "-D", str(self._data))

    # --- within -----------------------------------------------------------------------------------------

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def _password(self) -> Path:
        return self._folder / "password"

    def _create(self) -> None:
        self._make_room(secrets.token_urlsafe(16))
        self._run_as_owner(
            "initdb", "-D", str(self._data), "-U", USER, "--pwfile", str(self._password),
            "--auth", "scram-sha-256", "-E", "UTF8", "--locale", "C", "--no-sync", "--no-instructions",
        )  # fmt: skip
        with (self._data / "postgresql.conf").open("a", encoding="ascii") as file:
            file.write("include 'local.conf'\n")

    def _copy_from(self, primary: Address, name: str) -> None:
        self._choose_owner()
        self._make_room(primary.password)
        source = f"host={HOST} port={primary.port} user={USER} password={primary.password}"
        self._run_as_owner(
            "pg_basebackup", "-D", str(self._data), "-d", f"{source} application_name={name}",
            "-R", "-X", "stream", "-c", "fast", "-N",
        )  # fmt: skip

    def _make_room(self, password: str) -> None:
        """The data folder, and the password beside it, both of the server's user."""
        self._data.mkdir(0o700)
        self._give_away(self._data)
        self._password.touch(0o600)
        self._password.write_text(password, encoding="ascii")
        self._give_away(self._password)

    def _choose_owner(self) -> None:
        """Make the folder, and when this process is root find a user for the server who can work there.
        Raises `LocalFailed` when other users cannot get there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() != 0:
            return
        if blocked_for_others(self._data) == self._folder.resolve():
            self._folder.chmod(0o711)
        blocked = blocked_for_others(self._data)
        if blocked is not None:
            raise LocalFailed(
                f"PostgreSQL does not run as root, and no other user may pass through {blocked}: choose"
                f" another folder, or chmod o+x {blocked}"
            )
        self._owner = _unprivileged()
        if blocked_for_others(self._programs / "postgres") is not None:
            # E.g. a virtual environment below a home folder that is closed to others.
            self._programs = copy_of_wheel(self._programs, self._folder / "programs")

    def _give_away(self, path: Path) -> None:
        if self._owner.uid is not None and self._owner.gid is not None:
            os.chown(path, self._owner.uid, self._owner.gid)

    def _write_settings(self) -> None:
        lines = [f"{name} = {value}\n" for name, value in (self._settings | {"port": str(self.port)}).items()]
        path = self._data / "local.conf"
        partial = path.with_suffix(".new")
        partial.write_text("".join(lines), encoding="utf-8")
        self._give_away(partial)
        partial.replace(path)

    def _launched(self) -> bool:
        """Start the server; whether it became ready."""
        command = [str(self._programs / "postgres"), "-D", str(self._data)]
        process = self._process = LocalProcess(
            "PostgreSQL",
            command,
            self.log,
            environment=_environment(),
            owner=self._owner,
            folder=self._folder,
        )
        for _ in until(time.monotonic() + START_TIMEOUT_S):
            if self._ready(process.pid):
                return True
            if not process.running:
                return False
        process.kill()
        return False

    def _ready(self, pid: int) -> bool:
        """The postmaster keeps its state in the eighth line of its pid file."""
        try:
            lines = (self._data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() in ("ready", "standby")

    def _port_taken(self) -> bool:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "Address already in use" in text[-2_000:]

    def _await_gone(self) -> None:
        """A backend that outlives its postmaster keeps the data locked."""
        for _ in until(time.monotonic() + STOP_TIMEOUT_S):
            if not self.pids:
                return
        raise LocalFailed(f"processes {self.pids} of PostgreSQL in {self._data} do not end")

    def _await_synchronous(self, name: str) -> None:
        question = (
            "SELECT count(*) FROM pg_stat_replication"
            f" WHERE application_name = '{name}' AND sync_state = 'sync'"
        )
        for _ in until(time.monotonic() + START_TIMEOUT_S):
            if self.execute(question) == "1":
                return
        raise LocalFailed(f"{name} does not follow as a synchronous standby: see {self.log}")

    def _run_as_owner(self, program: str, *words: str) -> None:
        _run(
            launch_command([str(self._programs / program), *words], self._owner),
            "",
            _environment(),
            self._folder,
        )


def _run(command: list[str], text: str, environment: Mapping[str, str], folder: Path | None = None) -> str:
    try:
        run = subprocess.run(
            command, input=text, env=environment, cwd=folder, capture_output=True, text=True, check=True,
            timeout=COMMAND_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise LocalFailed(f"{error.stderr.strip() or error}") from None
    except subprocess.TimeoutExpired as error:
        raise LocalFailed(str(error)) from None
    return run.stdout


def _environment() -> dict[str, str]:
    """Nothing of the starter's that would point a program at another server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return kept | {"LC_ALL": "C", "TZ": "UTC"}


def _unprivileged() -> Owner:
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        return Owner(NOBODY, NOBODY)
    return Owner(nobody.pw_uid, nobody.pw_gid)
