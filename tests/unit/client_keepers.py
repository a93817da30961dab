"""What the tests of background renewal share: services that remember renewals or forget registrations."""

import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from metaservice.client import Client, ClientConfig, Registration
from metaservice.client.config import Keepalive
from metaservice.client.hosts import ProcessHost
from metaservice.wire.schemas import LeaseOutcome
from tests.unit.client_peers import Peer, Request, answer_to, good, http, problem

KEYS = [bytes([n]) * 16 for n in range(1, 9)]


def eventually(check: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait until `check` is true."""
    until = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


def client_for(one: Peer, **changes: Any) -> Client:
    return Client(ClientConfig(**{"url": one.url, "timeout_ms": 1_000, **changes}))


def got(one: Peer, verb: str) -> list[Request]:
    return [request for request in list(one.requests) if request.verb == verb]


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def keeper_of(client: Client) -> ProcessHost:
    host = client._calling.keeps._host
    assert isinstance(host, ProcessHost)
    return host


def join(client: Client, one: Peer, mode: Keepalive) -> Registration:
    """Register, and wait until the keeper runs: a process takes a moment to start."""
    registration = client.register_engine("e", keepalive=mode)
    eventually(lambda: got(one, "heartbeat"))
    return registration


class Leases:
    """A service that knows the leases given and lets them expire, and remembers every renewal."""

    def __init__(self) -> None:
        self.deadlines_s: dict[str, float] = {}
        self.given = 0
        self.broken: list[str] = []
        self._lock = Lock()

    def __call__(self, request: Request) -> None:
        fields = answer_to(request)
        asked = request.fields
        now = time.monotonic()
        with self._lock:
            if request.verb == "lookup" and asked["lease_ms"]:
                self.given += 1
                fields["lease"] = f"r-0-1-{self.given}"
                self.deadlines_s[fields["lease"]] = now + asked["lease_ms"] / 1_000
            elif request.verb == "renew" and "/leases/" in request.line:
                outcomes = []
                for lease in fields["leases"]:
                    if self.deadlines_s.get(lease, 0) > now:
                        self.deadlines_s[lease] = now + asked["ttl_ms"] / 1_000
                        outcomes.append(LeaseOutcome.renewed)
                    else:
                        self.broken.append(lease)
                        outcomes.append(LeaseOutcome.expired)
                fields["outcomes"] = bytes(outcomes)
        request.send(http(msgspec.msgpack.encode(fields)))


def named(request: Request) -> list[str]:
    return [request.line.split("/")[3], *request.fields.get("also", [])]


class Forgetful:
    """A service that forgets registrations when told to."""

    def __init__(self) -> None:
        self.known: set[str] = set()

    def __call__(self, request: Request) -> None:
        incarnation = str(request.fields.get("incarnation"))
        if request.verb in ("e", "w"):
            self.known.add(incarnation)
            good(request)
        elif request.verb in ("heartbeat", "writes") and incarnation not in self.known:
            request.send(problem(409, "reregister"))
        else:
            good(request)
