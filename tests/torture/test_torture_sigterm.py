"""SIGTERM under load: readiness falls first, work goes on meanwhile, and callers who retry notice nothing."""

import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest

from tests.torture.checks import Checker
from tests.torture.ledger import Ledger
from tests.torture.service_process import ServiceProcess
from tests.torture.writers import SETTINGS, Actor, Deleter, Writer, client_of, furnish

DRAIN_MS = 800
GRACE_MS = 3_000


class Watcher(threading.Thread):
    """Asks for readiness and liveness all the time, over new connections as a probe does."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.seen: list[tuple[str, float]] = []
        """(what, when) each time something else was seen than before."""
        self.halt = threading.Event()

    def run(self) -> None:
        """See Thread."""
        while not self.halt.is_set():
            what = self._look()
            if not self.seen or self.seen[-1][0] != what:
                self.seen.append((what, time.monotonic()))
            time.sleep(0.01)

    def _look(self) -> str:
        try:
            return f"ready {self._status('/readyz')} live {self._status('/livez')}"
        except OSError:
            return "gone"

    def _status(self, path: str) -> int:
        probe = HTTPConnection("127.0.0.1", self.port, timeout=2.0)
        try:
            probe.request("GET", path)
            return probe.getresponse().status
        finally:
            probe.close()


@pytest.mark.torture
@pytest.mark.slow
def test_i10_sigterm_under_load_fails_nobody_who_retries(tmp_path: Path, seed: int) -> None:
    ledger = Ledger()
    settings = {**SETTINGS, "drain_ms": DRAIN_MS, "grace_ms": GRACE_MS}
    with ServiceProcess(tmp_path, **settings) as service:
        service.start()
        with client_of(service.url) as operator:
            furnish(operator)
        checker = Checker(service.url, ledger, seed)
        checker.begin()
        actors: list[Actor] = [Writer(number, service.url, ledger, seed) for number in range(3)]
        actors.append(Deleter(service.url, ledger))
        watcher = Watcher(service.port)
        for thread in (*actors, watcher):
            thread.start()
        time.sleep(0.5)

        began_s = time.monotonic()
        acts_before = sum(actor.acts for actor in actors)
        status = service.terminate(DRAIN_MS / 1_000 + GRACE_MS / 1_000 + 2)
        took_s = time.monotonic() - began_s
        watcher.halt.set()
        watcher.join()
        assert status == 0
        assert took_s < (DRAIN_MS + GRACE_MS) / 1_000
        kinds = [what for what, _ in watcher.seen]
        assert kinds[:2] == ["ready 200 live 200", "ready 503 live 200"], watcher.seen
        fell_s = watcher.seen[1][1]
        gone_s = watcher.seen[2][1] if len(watcher.seen) > 2 else began_s + took_s
        assert gone_s - fell_s > DRAIN_MS / 1_000 * 0.5, "requests were not taken while balancers look away"
        assert sum(actor.acts for actor in actors) > acts_before

        service.start()
        time.sleep(0.3)
        for actor in actors[:-1]:
            actor.stop()
        checker.settle()
        actors[-1].stop()
        checker.close()
        assert ledger.problems == []
        assert ledger.finishes > 0 and ledger.unsure == set()
        assert sum(actor.repeats for actor in actors) > 0, "nobody had to retry: the stop was not under load"
        assert "Traceback" not in service.log()


@pytest.mark.torture
def test_i10_a_long_poll_and_idle_connections_do_not_hold_a_stop_up(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, **SETTINGS, drain_ms=0, grace_ms=10_000) as service:
        service.start()
        with client_of(service.url) as client:
            furnish(client)
            client.register_worker("w1", ["s1"], keepalive=None)
            answers: list[tuple[str | None, int]] = []

            def poll() -> None:
                result = client.take_tasks(wait_ms=30_000)
                answers.append((result.failure, len(result.tasks)))

            polling = threading.Thread(target=poll)
            polling.start()
            idle = [httpx.Client(base_url=service.url, trust_env=False) for _ in range(20)]
            for each in idle:
                assert each.get("/livez").status_code == 200
            time.sleep(0.2)
            began_s = time.monotonic()
            assert service.terminate(10) == 0
            assert time.monotonic() - began_s < 3
            polling.join(5)
            for each in idle:
                each.close()
            assert answers == [(None, 0)]
