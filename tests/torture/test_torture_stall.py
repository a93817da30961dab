"""The service itself stands still (SIGSTOP): it must not hold its own absence against anybody."""

import threading
import time
from pathlib import Path

import pytest

from metaservice.client import Client
from metaservice.client.results import WriteResult
from tests.torture.ledger import checksum_of
from tests.torture.service_process import ServiceProcess
from tests.torture.writers import INSTANCE, PARTS, chain_of, client_of, furnish

EXPIRE_MS = 1_600
TTL_MS = 1_000
"""The shortest time to live that a service allows by default."""
STALL_S = 2.5
ENGINES = 64
WRITERS = 8


class Beats(threading.Thread):
    """Heartbeats of many engines, each on time as far as the service answers."""

    def __init__(self, clients: list[Client]) -> None:
        super().__init__(daemon=True)
        self.clients = clients
        self.halt = threading.Event()
        self.refused: list[str] = []

    def run(self) -> None:
        """See Thread."""
        while not self.halt.is_set():
            for client in self.clients:
                failure = client.heartbeat().failure
                if failure is not None:
                    self.refused.append(failure)
            time.sleep(0.2)


class Holder(threading.Thread):
    """An engine that writes and reads slowly, and renews session and lease at a third of their time."""

    def __init__(self, number: int, client: Client) -> None:
        super().__init__(daemon=True)
        self.number = number
        self.client = client
        self.halt = threading.Event()
        self.lost: list[str] = []

    def run(self) -> None:
        """See Thread."""
        write = self.client.start_write(INSTANCE, chain_of(f"stall-{self.number}", 3), ttl_ms=TTL_MS)
        read = self.client.lookup(INSTANCE, chain_of("read", 3), lease_ms=TTL_MS)
        if read.lease is None or write.failure is not None:
            self.lost.append(f"nothing to hold: {write.failure} {read.failure}")
            return
        while not self.halt.wait(TTL_MS / 3_000):
            renewed = self.client.renew_write(write, ttl_ms=TTL_MS)
            if renewed.failure is not None:
                self.lost.append(f"session: {renewed.failure}")
            leases = self.client.renew_leases([read.lease], ttl_ms=TTL_MS)
            if not leases.held():
                self.lost.append(f"lease: {leases.failure} {leases.outcomes!r}")
        if (failure := finish(self.client, write)) is not None:
            self.lost.append(f"finish: {failure}")


def finish(client: Client, write: WriteResult) -> str | None:
    """Finish all of it; the failure, if any."""
    places = list(zip(write.locations, write.generations, strict=True))
    sums = [checksum_of(place, part) for place in places for part in range(len(PARTS))]
    return client.finish(write, list(write.locations), list(write.generations), checksums=sums).failure


@pytest.mark.torture
@pytest.mark.slow
def test_c5_c6_a_stall_of_our_own_never_expires_others(tmp_path: Path) -> None:
    """Frozen, twice, for longer than engines, sessions and leases live: afterwards all of them are there."""
    settings: dict[str, object] = {"heartbeat_ms": 400, "suspect_ms": 800, "expire_ms": EXPIRE_MS}
    with ServiceProcess(tmp_path, **settings) as service:
        service.start()
        clients = [client_of(service.url, timeout_ms=10_000) for _ in range(ENGINES)]
        furnish(clients[0])
        for number, client in enumerate(clients):  # C6: all at once
            registration = client.register_engine(f"e{number}", instance=INSTANCE, keepalive=None)
            assert registration.active, registration.failure
        assert finish(clients[0], clients[0].start_write(INSTANCE, chain_of("read", 3))) is None
        beats = Beats(clients)
        holders = [Holder(number, client) for number, client in enumerate(clients[:WRITERS])]
        for each in (beats, *holders):
            each.start()
        for _ in range(2):
            time.sleep(TTL_MS / 1_500)
            service.freeze(STALL_S)
        time.sleep(TTL_MS / 1_500)
        beats.halt.set()
        for holder in holders:
            holder.halt.set()
        for thread in (beats, *holders):
            thread.join()
        assert [holder.lost for holder in holders] == [[]] * WRITERS
        assert beats.refused == []
        engines = service.get("/v1/engines?page_size=1000")["items"]
        assert len(engines) == ENGINES
        assert {engine["status"] for engine in engines} <= {"active", "suspect"}
        assert clients[0].lookup(INSTANCE, chain_of("stall-1", 3)).hits == 3
        for client in clients:
            client.close()
        assert "Traceback" not in service.log()


@pytest.mark.torture
@pytest.mark.slow
def test_a_writer_who_is_gone_is_noticed_all_the_same_after_a_stall(tmp_path: Path) -> None:
    """The other side of it: a stall postpones deadlines, it does not remove them."""
    with ServiceProcess(tmp_path) as service:
        service.start()
        with client_of(service.url, timeout_ms=10_000) as client:
            furnish(client)
            client.register_engine("e1", instance=INSTANCE, keepalive=None)
            client.start_write(INSTANCE, chain_of("gone", 3), ttl_ms=1_200)
            service.freeze(2.0)
            deadline_s = time.monotonic() + 4
            while service.get("/v1/tenants/acme")["usage"]["blocks"]:
                assert time.monotonic() < deadline_s, "its blocks are still held"
                time.sleep(0.05)
