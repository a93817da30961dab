"""Several replicas with real sockets over fake shards: who leads what is set by hand, and what each was
asked is seen.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec

from metaservice.api.app import build_app
from metaservice.api.peers import Peers
from metaservice.api.port import EventsPort
from metaservice.api.server import ApiServer
from metaservice.api.settings import ApiSettings
from metaservice.clock import monotonic_s
from metaservice.telemetry.metrics import Metrics
from metaservice.telemetry.tracing import open_tracer
from tests.functional.api_house import listening
from tests.security.fake_shard import KEY, FakeCluster, FakeReplica

OWNER = {"engine": "e1", "incarnation": "i1"}
LOOKUP: dict[str, Any] = {"keys": [KEY.hex()]}
START: dict[str, Any] = {**OWNER, "keys": [KEY.hex()], "request_id": "q1"}


class Standing:
    """One running replica."""

    def __init__(self, replica: FakeReplica, server: ApiServer, metrics: Metrics, peers: Peers) -> None:
        self.replica = replica
        self.server = server
        self.metrics = metrics
        self.peers = peers

    def forwarded(self, outcome: str) -> int:
        """How many requests about shards led elsewhere ended so."""
        told = self.metrics.expose("")[1].decode()
        found = re.search(rf'ucm_meta_forwarded_total{{outcome="{outcome}"}} (\d+)', told)
        return int(found[1]) if found else 0


class Fleet:
    """All replicas, and a client that speaks to any of them."""

    def __init__(self, cluster: FakeCluster, members: dict[str, Standing], http: httpx.AsyncClient) -> None:
        self.cluster = cluster
        self.members = members
        self.http = http

    def __getitem__(self, id: str) -> Standing:
        return self.members[id]

    async def send(self, to: str, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """One JSON request to a replica."""
        content = b"" if body is None else msgspec.json.encode(body)
        sent = {"content-type": "application/json"} if body is not None else {}
        sent.update({name.replace("_", "-"): value for name, value in headers.items()})
        url = self.cluster.urls[to] + path
        return await self.http.request(method, url, content=content, headers=sent)

    def asked(self, id: str, shard: int) -> list[str]:
        """The kinds of commands that a replica answered as the shard's leader."""
        return [type(command).__name__ for command in self[id].replica.shard(shard).asked]


@asynccontextmanager
async def open_fleet(
    *ids: str,
    shards: int = 3,
    settings: ApiSettings | None = None,
    events: dict[str, EventsPort] | None = None,
) -> AsyncIterator[Fleet]:
    """Replicas of these ids; the first leads everything until told otherwise. `events`: their publishers."""
    settings = settings or ApiSettings(leader_wait_ms=200)
    cluster = FakeCluster(shards)
    members: dict[str, Standing] = {}
    async with AsyncExitStack() as stack:
        for id in ids:
            replica, metrics, peers = FakeReplica(cluster, id), Metrics(monotonic_s), Peers(id, settings)
            stack.push_async_callback(peers.close)
            publisher = (events or {}).get(id)
            app = build_app(replica, metrics, open_tracer(False), settings, peers, publisher)
            server = await stack.enter_async_context(listening(app, settings))
            cluster.urls[id] = f"http://127.0.0.1:{server.bound_port}"
            members[id] = Standing(replica, server, metrics, peers)
        cluster.leaders = dict.fromkeys(range(shards), ids[0])
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=20.0, trust_env=False, verify=False))
        yield Fleet(cluster, members, http)


class DeafLeader:
    """A socket that takes requests and, by `manner`, hangs up (`dies`) or never answers (`hangs`)."""

    def __init__(self, manner: str) -> None:
        self.manner = manner
        self.requests: list[bytes] = []
        self.url = ""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "DeafLeader":
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        self.requests.append(head + await reader.readexactly(length))
        if self.manner == "hangs":
            await reader.read()
        writer.close()


def problem(reply: httpx.Response) -> tuple[int, str]:
    """Status and code of a refusal."""
    body = msgspec.json.decode(reply.content)
    return reply.status_code, body["code"]


def spread(fleet: Fleet) -> None:
    """Shard 0 is led by r1, shard 1 by r2, shard 2 by r3."""
    fleet.cluster.leaders = {0: "r1", 1: "r2", 2: "r3"}
