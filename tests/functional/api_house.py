"""A whole service in the test's own loop: a real shard on a journal in memory, behind a real socket."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from metaservice.api.app import App, build_app
from metaservice.api.peers import Peers
from metaservice.api.port import EventsPort
from metaservice.api.server import ApiServer
from metaservice.api.settings import ApiSettings
from metaservice.clock import ShardClock, monotonic_s
from metaservice.core.model import Limits
from metaservice.journal.memory import MemoryJournal, MemoryStore
from metaservice.leadership.single import SingleLeadership
from metaservice.replica.election import Pace
from metaservice.replica.node import Replica
from metaservice.replica.shard import Clock, Hooks, Shard
from metaservice.telemetry.metrics import Metrics
from metaservice.telemetry.tracing import Tracer, open_tracer

KEY_LENGTH = 16
PART_BYTES = 1024
FINGERPRINT: dict[str, Any] = {
    "model": "tiny-llm",
    "revision": "r1",
    "kv_dtype": "bf16",
    "block_size_tokens": 16,
    "key_length": KEY_LENGTH,
    "hash_scheme": "xxh3",
    "hash_seed": "7",
    "parts": [{"name": "tp0", "bytes": PART_BYTES}, {"name": "tp1", "bytes": PART_BYTES}],
}
HYBRID: dict[str, Any] = {
    **FINGERPRINT,
    "groups": [
        {"name": "full"},
        {"name": "swa", "kind": "sliding_window", "window_blocks": 2},
        {"name": "mamba", "kind": "state"},
    ],
    "parts": [
        {"name": "tp0", "bytes": PART_BYTES},
        {"name": "swa0", "bytes": 64, "group": "swa"},
        {"name": "ssm0", "bytes": 32, "group": "mamba"},
    ],
}
OWNER = {"engine": "e1", "incarnation": "i1"}
WORKER = {"incarnation": "j1"}
LIMITS = Limits(reclaim_delay_ms=0, late_write_ms=50, write_ttl_ms_min=50, lease_ms_min=50)


def key(number: int) -> bytes:
    """The key of that number."""
    return b"k" + number.to_bytes(KEY_LENGTH - 1, "big")


def keys(count: int, start: int = 0) -> list[bytes]:
    """A chain of keys, root first."""
    return [key(number) for number in range(start, start + count)]


def numbers(column: Any, kind: str) -> list[int]:
    """A reply's number column as a list, in whichever encoding it came."""
    if isinstance(column, list):
        return column
    size = struct.calcsize(kind)
    return [*struct.unpack(f"<{len(column) // size}{kind}", column)]


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Return once the condition holds. Raises TimeoutError when it does not come to."""
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError("the condition never held")


class Speech:
    """One of the two encodings: how keys and checksums are said in it, and how replies are read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.media = f"application/{name}"
        self.is_json = name == "json"

    def keys(self, wanted: list[bytes]) -> Any:
        """Keys as this encoding's usual client sends them."""
        return [each.hex() for each in wanted] if self.is_json else b"".join(wanted)

    def key(self, wanted: bytes) -> Any:
        return wanted.hex() if self.is_json else wanted

    def column(self, values: list[int], kind: str) -> Any:
        return values if self.is_json else struct.pack(f"<{len(values)}{kind}", *values)

    def flags(self, values: list[bool]) -> Any:
        return values if self.is_json else bytes(values)

    def encode(self, body: Any) -> bytes:
        return msgspec.json.encode(body) if self.is_json else msgspec.msgpack.encode(body)

    def decode(self, content: bytes) -> Any:
        return msgspec.json.decode(content) if self.is_json else msgspec.msgpack.decode(content)


JSON, MSGPACK = Speech("json"), Speech("msgpack")


class House:
    """A running service and a client that speaks to it."""

    def __init__(self, replica: Replica, app: App, server: ApiServer, http: httpx.AsyncClient) -> None:
        self.replica = replica
        self.shard = replica.shard(0)
        self.app = app
        self.server = server
        self.http = http
        self.speech = JSON

    @property
    def port(self) -> int:
        return self.server.bound_port

    async def send(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """One request in the house's current encoding; `body` None: without one."""
        sent = {"accept": self.speech.media}
        content = b""
        if body is not None:
            content = body if isinstance(body, bytes) else self.speech.encode(body)
            sent["content-type"] = self.speech.media
        sent.update({name.replace("_", "-"): value for name, value in headers.items()})
        return await self.http.request(method, path, content=content, headers=sent)

    async def ask(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        """The decoded body of a request that must be answered with `status`."""
        reply = await self.send(method, path, body)
        assert reply.status_code == status, f"{method} {path}: {reply.status_code} {reply.text[:500]}"
        if status >= 400:
            expected = "application/problem+json" if self.speech.is_json else "application/msgpack"
            assert reply.headers["content-type"] == expected
        else:
            assert reply.headers["content-type"] == self.speech.media
        return self.speech.decode(reply.content)

    async def problem(self, method: str, path: str, body: Any = None) -> tuple[int, str, str]:
        """Status, code and field of a request that must be refused."""
        reply = await self.send(method, path, body)
        assert reply.status_code >= 400, f"{method} {path} was taken: {reply.text[:500]}"
        problem = self.speech.decode(reply.content)
        assert problem["status"] == reply.status_code
        assert problem["type"] == f"urn:ucm:problem:{problem['code']}"
        assert problem["title"] and problem["detail"] and problem["request_id"]
        return reply.status_code, problem["code"], problem.get("field", "")

    async def furnish(self, instance: str = "m1", fingerprint: dict[str, Any] | None = None) -> None:
        """A tenant, two storages, a group, an instance, an engine and a worker."""
        speech, self.speech = self.speech, JSON
        try:
            await self.put("/v1/tenants/acme", {})
            for storage in ("s1", "s2"):
                await self.put(
                    f"/v1/storages/{storage}", {"kind": "posix", "options": {"root": f"/{storage}"}}
                )
            await self.put("/v1/groups/chat", {"tenant": "acme", "storages": ["s1", "s2"]})
            body = {"group": "chat", "fingerprint": fingerprint or FINGERPRINT}
            await self.put(f"/v1/instances/{instance}", body)
            await self.ask("PUT", "/v1/engines/e1", {"incarnation": "i1", "instance": instance})
            await self.ask("PUT", "/v1/workers/w1", {"incarnation": "j1", "storages": ["s1", "s2"]})
        finally:
            self.speech = speech

    async def put(self, path: str, body: Any) -> Any:
        """Register something; it may be there already."""
        reply = await self.send("PUT", path, body)
        assert reply.status_code in (200, 201), reply.text
        return self.speech.decode(reply.content)

    async def lookup(self, wanted: list[bytes], instance: str = "m1", **more: Any) -> Any:
        """The reply to a lookup that must be answered."""
        body = {"keys": self.speech.keys(wanted), **more}
        return await self.ask("POST", f"/v1/instances/{instance}/lookup", body)

    async def start(self, wanted: list[bytes], instance: str = "m1", **more: Any) -> Any:
        """The reply to a start-write that must be answered."""
        body = {**OWNER, "keys": self.speech.keys(wanted), **more}
        return await self.ask("POST", f"/v1/instances/{instance}/writes", body)

    async def finish(self, started: Any, **more: Any) -> Any:
        """Finish everything of a started write whose outcomes were all `write`."""
        rows = len(numbers(started["locations"], "Q"))
        sums = self.speech.column([7] * rows * len(started["parts"]), "Q")
        body = {
            **OWNER,
            "locations": started["locations"],
            "generations": started["generations"],
            "checksums": sums,
            **more,
        }
        return await self.ask("POST", f"/v1/writes/{started['session']}/finish", body)

    async def fill(self, count: int, start: int = 0, instance: str = "m1", **more: Any) -> None:
        """Write and finish a chain of blocks."""
        parent = {"parent": self.speech.key(key(start - 1))} if start else {}
        await self.finish(await self.start(keys(count, start), instance, **parent, **more))


@asynccontextmanager
async def open_house(
    *,
    limits: Limits = LIMITS,
    settings: ApiSettings | None = None,
    tracer: Tracer | None = None,
    metrics: Metrics | None = None,
    shards: int = 1,
    events: EventsPort | None = None,
) -> AsyncIterator[House]:
    """A running service on a free port; it is stopped at the end. `events`: its publisher, if it has one."""
    settings = settings or ApiSettings()
    metrics = metrics or Metrics(monotonic_s)
    peers = Peers("r1", settings)
    replica = lone_replica(limits, metrics, peers, shards)
    await replica.start()
    app = build_app(replica, metrics, tracer or open_tracer(False), settings, peers, events)
    async with listening(app, settings) as server:
        base = f"http://127.0.0.1:{server.bound_port}"
        async with httpx.AsyncClient(base_url=base, timeout=20.0, trust_env=False, verify=False) as http:
            yield House(replica, app, server, http)
    await replica.stop()
    await peers.close()


def lone_replica(limits: Limits, metrics: Metrics, peers: Peers, shards: int) -> Replica:
    """A replica that leads all its shards, on journals in memory."""
    store = MemoryStore()

    def make_shards(hooks: Hooks) -> list[Shard]:
        made = []
        for number in range(shards):
            clock = ShardClock()
            made.append(
                Shard(
                    number,
                    MemoryJournal(store, number),
                    limits,
                    Clock(clock.start, clock.now_ms, monotonic_s),
                    metrics,
                    lambda: "cluster1",
                    shards=shards,
                    hooks=hooks,
                )
            )
        return made

    url = "http://127.0.0.1:1"
    return Replica(
        "r1",
        url,
        make_shards,
        SingleLeadership("r1", url, shards),
        limits,
        metrics,
        monotonic_s,
        pace=Pace(),
        courier=peers.errand,
    )


@asynccontextmanager
async def listening(app: App, settings: ApiSettings, port: int = 0) -> AsyncIterator[ApiServer]:
    """The application behind a socket; port 0: on a free one."""
    server = ApiServer(app, "127.0.0.1", port, settings)
    started = asyncio.Event()
    running = asyncio.create_task(server.run_until_stopped(lambda port: started.set()))
    try:
        await asyncio.wait(
            [running, asyncio.create_task(started.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        yield server
    finally:
        server.request_stop()
        await asyncio.wait_for(running, 20)
