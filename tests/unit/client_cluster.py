"""A cluster of peers that know who leads what, and may be killed, stopped or told to lie."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from metaservice.client import AsyncClient, Client, ClientConfig, LookupResult
from tests.unit.client_peers import Peer, Request, answer_to, http, problem, resetting, silent

KEYS = [bytes([n]) * 16 for n in range(1, 9)]
HOMES = {"i0": 0, "i1": 1, "i2": 2, "j1": 1}
"""Instances and their shards."""
SHARDS = 3


class FakeCluster:
    """Three replicas. `leads` says who leads each shard (None: nobody is known to), which every replica but
    those `astray` knows at once."""

    def __init__(self, replicas: int = 3) -> None:
        self.leads: dict[int, int | None] = {shard: shard % replicas for shard in range(SHARDS)}
        self.astray: dict[int, int] = {}
        """Replicas that name this one as the leader of everything."""
        self.stopped: set[int] = set()
        self.resets: set[int] = set()
        self.addresses: dict[int, str] = {}
        """What a replica calls itself, where that is not how it is reached."""
        self.retry_after_ms = 200
        self.behind: set[int] = set()
        """Replicas that are too far behind to answer anything themselves."""
        self.staleness_ms = 30
        self.peers = [self._replica(number) for number in range(replicas)]

    def _replica(self, number: int, port: int = 0) -> Peer:
        return Peer(lambda request: self._behave(number, request), port)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(peer.url for peer in self.peers)

    def config(self, **changes: Any) -> ClientConfig:
        return ClientConfig(**{"url": self.urls, "timeout_ms": 1_000, **changes})

    def kill(self, number: int) -> None:
        """Nobody listens there any more."""
        self.peers[number].close()

    def start(self, number: int) -> None:
        """Again at the same address; what it got before is kept."""
        before = self.peers[number]
        self.peers[number] = self._replica(number, before.port)
        self.peers[number].requests = before.requests

    def got(self, verb: str) -> list[tuple[int, Request]]:
        """All requests of this kind in order, each with the replica that got it."""
        found = [(number, one) for number, peer in enumerate(self.peers) for one in list(peer.requests)]
        return sorted((row for row in found if row[1].verb == verb), key=lambda row: row[1].at_s)

    def asked(self, verb: str) -> list[int]:
        """The replicas that got such requests, in order."""
        return [number for number, _ in self.got(verb)]

    def count(self) -> list[int]:
        """How many requests each got."""
        return [len(peer.requests) for peer in self.peers]

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    def stale(self, number: int, leader: int | None) -> dict[str, int]:
        """What a follower adds to an answer."""
        return {} if number == leader else {"staleness_ms": self.staleness_ms, "applied_seq": 1}

    def _behave(self, number: int, request: Request) -> None:
        if number in self.stopped:
            silent(request)
        elif number in self.resets:
            resetting(request)
        else:
            shard = shard_asked(request)
            leader = self.astray.get(number, self.leads[shard])
            if leader is None and not may_be_old(request):
                reply = problem(503, "not_ready", retry_after_ms=self.retry_after_ms)
            elif may_be_old(request) and number not in self.behind:
                reply = http(msgspec.msgpack.encode(answer_of(shard, request) | self.stale(number, leader)))
            elif leader is not None and leader != number and request.direct:
                url = self.addresses.get(leader, self.peers[leader].url)
                reply = problem(421, "not_leader", facts={"shard": shard, "leader": url})
            else:
                reply = http(msgspec.msgpack.encode(answer_of(shard, request)))
            request.send(reply)


def may_be_old(request: Request) -> bool:
    """Whether a follower may answer."""
    return request.verb == "lookup" and request.fields.get("staleness_ms_max") is not None


def shard_asked(request: Request) -> int:
    """Whose request it is, as a replica finds out."""
    _, _, room, id, *rest = request.line.split(" ")[1].split("/")
    match room:
        case "instances":
            return HOMES[id]
        case "writes" | "leases":
            return int(id.split("-")[1])
        case "workers" if rest and rest[0] == "tasks":
            return int(rest[1].split("-")[1]) if len(rest) > 1 else request.fields.get("shard") or 0
        case "workers" if rest and rest[0] == "unknown":
            return int.from_bytes(request.fields["locations"][:8], "little") >> 44
    return 0


def answer_of(shard: int, request: Request) -> dict[str, Any]:
    """A good answer, with ids of the shard."""
    if request.verb == "confirm":
        return {"gone": 1, "again": 0}
    fields = answer_to(request)
    for name, id in (("session", f"w-{shard}-1"), ("lease", f"r-{shard}-1-1")):
        if fields.get(name):
            fields[name] = id
    return fields


@contextmanager
def cluster(replicas: int = 3) -> Iterator[FakeCluster]:
    """A cluster for the length of a test."""
    one = FakeCluster(replicas)
    try:
        yield one
    finally:
        one.close()


# -- who asks

Look = Callable[[ClientConfig, int], list[LookupResult]]
"""So many lookups about i1, one after the other, with one client."""


def _blocking(config: ClientConfig, times: int) -> list[LookupResult]:
    with Client(config) as client:
        return [client.lookup("i1", KEYS) for _ in range(times)]


def _awaiting(config: ClientConfig, times: int) -> list[LookupResult]:
    async def look() -> list[LookupResult]:
        async with AsyncClient(config) as client:
            return [await client.lookup("i1", KEYS) for _ in range(times)]

    return asyncio.run(look())


both = pytest.mark.parametrize("look", [_blocking, _awaiting], ids=["sync", "async"])


def writer(house: FakeCluster, **changes: Any) -> Client:
    """A client that is registered as an engine, without a keeper."""
    client = Client(house.config(**changes))
    assert client.register_engine("e", keepalive=None).active
    return client
