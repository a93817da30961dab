"""The keeper as a process: it outlives a busy engine, its own death and a fork, and never a dead engine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from metaservice.client.config import Keepalive
from tests.unit.client_keepers import (
    KEYS,
    Leases,
    alive,
    client_for,
    eventually,
    got,
    join,
    keeper_of,
)
from tests.unit.client_peers import good, peer

ROOT = Path(__file__).resolve().parent.parent.parent
either = pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
"""Both work alike here; the second one takes longer to start."""


def test_keeper_process_that_dies_is_started_again_and_told_everything() -> None:
    service = Leases()
    with peer(service) as one, client_for(one) as client:
        registration = client.register_engine("e", keepalive="process")
        lease = client.lookup("i", KEYS, lease_ms=3_000, renew=True).lease or ""
        eventually(lambda: len(got(one, "heartbeat")) >= 2)
        dead = keeper_of(client).pid
        os.kill(dead, signal.SIGKILL)
        eventually(lambda: keeper_of(client).pid != dead)
        beats, renewals = len(got(one, "heartbeat")), len(got(one, "renew"))
        eventually(lambda: len(got(one, "heartbeat")) >= beats + 3 and len(got(one, "renew")) > renewals)
        assert client.held(lease)
        assert registration.active
        pid = keeper_of(client).pid
    eventually(lambda: not alive(pid))


@pytest.mark.slow
def test_keeper_process_that_does_not_read_never_blocks_a_call() -> None:
    with peer(Leases()) as one, client_for(one, keepalive="process", timeout_ms=5_000) as client:
        first = client.lookup("i", KEYS[:1], lease_ms=30_000, renew=True).lease or ""
        eventually(lambda: client.held(first))
        pid = keeper_of(client).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            leases = [
                client.lookup("i", KEYS[:1], lease_ms=2_000, renew=True).lease or "" for _ in range(600)
            ]
            assert time.monotonic() - began < 10
        finally:
            os.kill(pid, signal.SIGCONT)
        last = client.lookup("i", KEYS[:1], lease_ms=2_000, renew=True).lease or ""
        time.sleep(2.5)
        held = [client.held(lease) for lease in (*leases[-100:], last)]
    assert all(held), "and what it missed it is told later"


SCRIPT = """
import ctypes, os, sys, threading, time
from metaservice.client import Client, ClientConfig
client = Client(ClientConfig(url=sys.argv[1]))
def start():
    client.register_engine("e", keepalive="process")
if "thread" in sys.argv[2:]:
    starter = threading.Thread(target=start)
    starter.start()
    starter.join()
else:
    start()
if "fork" in sys.argv[2:] or "raw fork" in sys.argv[2:]:
    child = os.fork() if "fork" in sys.argv[2:] else ctypes.CDLL(None).fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    print(child)
else:
    print(0)
print(client._calling.keeps._host.pid, flush=True)
if "exit" in sys.argv[2:]:
    sys.exit(0)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "how",
    [
        "kill",
        "fork",
        "raw fork",
        pytest.param("thread", marks=pytest.mark.slow),
        pytest.param("exit", marks=pytest.mark.slow),
    ],
)
def test_keeper_process_never_outlives_its_engine(how: str) -> None:
    """Killed, killed while a forked child lives on (one that
    Python knows of and one that it does not), started from a thread that ended, or ended in order."""
    with peer(good) as one:
        engine = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, one.url, how], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert engine.stdout is not None
        forked, keeper = int(engine.stdout.readline()), int(engine.stdout.readline())
        try:
            if how == "thread":
                time.sleep(0.5)
                assert alive(keeper), "only the thread that started it has ended"
            if how != "exit":
                eventually(lambda: len(got(one, "heartbeat")) >= 3)
                engine.kill()
            engine.wait(timeout=10)
            eventually(lambda: not alive(keeper), 1.5)
            time.sleep(0.1)
            count = len(got(one, "heartbeat"))
            time.sleep(0.4)
            assert len(got(one, "heartbeat")) == count, "a dead engine is not kept alive"
        finally:
            engine.kill()
            engine.stdout.close()
            if forked:
                os.kill(forked, signal.SIGKILL)


def test_forked_child_neither_renews_nor_stops_its_parents_leases() -> None:
    service = Leases()
    with peer(service) as one, client_for(one) as client:
        join(client, one, "process")
        lease = client.lookup("i", KEYS, lease_ms=400, renew=True).lease or ""
        fed = keeper_of(client)._socket
        child = os.fork()
        if child == 0:
            client.close()
            os._exit(0 if fed.fileno() == -1 else 3)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.6)
        assert client.held(lease)
        assert alive(keeper_of(client).pid)


@either
def test_dropped_client_stops_its_keeper(mode: Keepalive) -> None:
    with peer(good) as one:
        client = client_for(one)
        client.register_engine("e", keepalive=mode)
        eventually(lambda: len(got(one, "heartbeat")) >= 2)
        del client
        time.sleep(0.3)
        count = len(got(one, "heartbeat"))
        time.sleep(0.4)
        assert len(got(one, "heartbeat")) == count


def test_keepalive_can_move_from_thread_to_process_with_all_that_is_kept() -> None:
    service = Leases()
    with peer(service) as one, client_for(one) as client:
        lease = client.lookup("i", KEYS, lease_ms=2_000, renew=True).lease or ""
        join(client, one, "process")
        assert keeper_of(client).pid
        eventually(lambda: len(got(one, "renew")) >= 2)
        assert client.held(lease)
        assert service.broken == []
