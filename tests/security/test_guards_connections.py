"""The bounds of a connection, met byte by byte: each is answered with its problem, and costs no more."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from metaservice.api.app import build_app
from metaservice.api.peers import Peers
from metaservice.api.server import ApiServer, RemoteRefused, check_host
from metaservice.api.settings import ApiSettings
from metaservice.clock import monotonic_s
from metaservice.telemetry.metrics import Metrics
from metaservice.telemetry.tracing import open_tracer
from tests.functional.api_house import listening, until
from tests.security.fake_shard import FakeReplica, FakeShard

pytestmark = pytest.mark.security

QUICK = {
    "sweep_ms": 20,
    "header_timeout_ms": 200,
    "body_timeout_ms": 200,
    "idle_timeout_ms": 300,
    "response_timeout_ms": 300,
    "request_timeout_ms": 300,
    "linger_ms": 200,
    "header_bytes_max": 2048,
    "headers_max": 20,
    "body_bytes_max": 10_000,
    "buffered_bytes_max": 30_000,
    "pipelined_max": 4,
}
BODY = b'{"keys":["' + b"6b" * 16 + b'"]}'
LIVE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


def post(
    path: str = "/v1/instances/m1/lookup", body: bytes = BODY, *more: str, length: int | None = None
) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        *more,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


RENEW = post("/v1/writes/w-0-1/renew", b'{"engine":"e","incarnation":"i"}')


class Peer:
    """One raw connection to the service."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def reply(self, *, head_only: bool = False) -> tuple[int, dict[str, str], Any]:
        """Status, headers and decoded body of the next response. IncompleteReadError when there is none."""
        async with asyncio.timeout(5):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            body = b""
            if not head_only:
                body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(first.split()[1]), headers, json.loads(body) if body else None

    async def code(self) -> str:
        """The problem code of the next response, which must be the connection's last."""
        status, headers, body = await self.reply()
        assert body["status"] == status and headers["connection"] == "close"
        await self.ends()
        return str(body["code"])

    async def ends(self) -> None:
        """The service closes the connection, without another byte."""
        async with asyncio.timeout(5):
            with suppress(ConnectionError):
                assert await self.reader.read() == b""


class Door:
    """A guarded service over the fake shard."""

    def __init__(self, server: ApiServer, shard: FakeShard, metrics: Metrics) -> None:
        self.server = server
        self.shard = shard
        self.metrics = metrics

    async def knock(self) -> Peer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.bound_port)
        return Peer(reader, writer)


@asynccontextmanager
async def open_door(**changes: int) -> AsyncIterator[Door]:
    settings = ApiSettings(**{**QUICK, **changes})
    metrics = Metrics(monotonic_s)
    replica = FakeReplica()
    app = build_app(replica, metrics, open_tracer(False), settings, Peers(replica.id, settings))
    async with listening(app, settings) as server:
        yield Door(server, replica.shard(0), metrics)
        gate = server.gate
        await until(lambda: gate.in_flight == 0)
        assert gate.buffered_bytes == 0, "every byte of every body is given back"


async def test_slow_heads_bodies_and_idle_connections_end() -> None:
    async with open_door() as door:
        silent, head, trickle, body, idle = [await door.knock() for _ in range(5)]
        await head.send(b"POST /v1/instances/m1/lookup HTTP/1.1\r\nHos")
        await body.send(post(body=BODY[:10], length=len(BODY)))
        await idle.send(LIVE)
        assert (await idle.reply())[0] == 200

        async def drip() -> None:
            for byte in post():
                await trickle.send(bytes([byte]))
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert await head.code() == "header_timeout"
        assert await body.code() == "body_timeout"
        assert await trickle.code() == "header_timeout"
        dripping.cancel()
        await silent.ends()
        await idle.ends()
        await until(lambda: not door.server.gate.connections)


async def test_heads_that_are_too_large() -> None:
    async with open_door() as door:
        for head in (
            post("/" + "a" * 3000),
            post("/livez", b"", "X: " + "a" * 3000),
            post("/livez", b"", *[f"X{n}: 1" for n in range(30)]),
            b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 5000,
            b"GET /" + b"a" * 5000,
            post("/livez", b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
            + b"1\r\nx\r\n0\r\nTrailer: " + b"a" * 3000 + b"\r\n\r\n",
        ):  # fmt: skip
            peer = await door.knock()
            await peer.send(head)
            assert await peer.code() == "header_too_large", head[:40]


async def test_bodies_that_are_too_large_are_refused_before_they_are_read() -> None:
    async with open_door() as door:
        declared = await door.knock()
        await declared.send(post(body=b"", length=10_001))
        assert await declared.code() == "body_too_large"
        huge = await door.knock()
        await huge.send(post(body=b"", length=10**17))
        assert await huge.code() == "body_too_large"
        chunked = await door.knock()
        await chunked.send(chunks(b"x" * 1000, 11))
        assert await chunked.code() == "body_too_large"
        framing = await door.knock()
        await framing.send(chunks(b"x", 9000, extension=b";" + b"y" * 10))
        assert await framing.code() == "body_too_large"
        assert door.metrics.refused.value("body_too_large") == 4


def chunks(piece: bytes, count: int, extension: bytes = b"") -> bytes:
    head = post(body=b"").replace(b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n")
    return head + (b"%x%b\r\n%b\r\n" % (len(piece), extension, piece)) * count


async def test_a_chunked_body_within_the_limit_is_taken() -> None:
    async with open_door() as door:
        peer = await door.knock()
        head = post(body=b"").replace(b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n")
        pieces = [b"%x\r\n%b\r\n" % (1, BODY[at : at + 1]) for at in range(len(BODY))]
        await peer.send(head, *pieces, b"0\r\nTrailer: ignored\r\n\r\n")
        status, _, body = await peer.reply()
        assert (status, body["hits"]) == (200, 1)


async def test_bodies_of_all_connections_together_are_bounded() -> None:
    async with open_door(body_timeout_ms=2000) as door:
        peers = [await door.knock() for _ in range(4)]
        for peer in peers:
            await peer.send(post(body=b"x" * 9000, length=9500))
        assert await peers[3].code() == "overloaded"
        for peer in peers[:3]:
            peer.writer.close()
        await until(lambda: door.server.gate.buffered_bytes == 0)


async def test_too_many_connections_are_told() -> None:
    async with open_door(connections_max=3) as door:
        peers = [await door.knock() for _ in range(3)]
        for peer in peers:
            await peer.send(LIVE)
            assert (await peer.reply())[0] == 200
        late = await door.knock()
        await late.send(LIVE)
        status, headers, body = await late.reply()
        assert (status, body["code"]) == (503, "overloaded")
        assert int(headers["retry-after"]) >= 1
        await late.ends()
        peers[0].writer.close()
        await until(lambda: len(door.server.gate.connections) == 2)
        again = await door.knock()
        await again.send(LIVE)
        assert (await again.reply())[0] == 200


async def test_too_many_requests_at_once_are_told() -> None:
    async with open_door(requests_max=2) as door:
        door.shard.delay_s = 0.2
        peers = [await door.knock() for _ in range(3)]
        for peer in peers:
            await peer.send(RENEW)
        assert await peers[2].code() == "overloaded"
        for peer in peers[:2]:
            assert (await peer.reply())[0] == 200
        assert door.metrics.refused.value("overloaded") == 1


async def test_pipelined_requests_are_answered_in_order_and_bounded() -> None:
    async with open_door() as door:
        peer = await door.knock()
        await peer.send(RENEW + post() + RENEW + LIVE)
        bodies = [(await peer.reply())[2] for _ in range(4)]
        assert [next(iter(body)) for body in bodies] == ["ttl_ms", "locations", "ttl_ms", "status"]
        door.shard.delay_s = 0.05
        await peer.send(RENEW + LIVE * 20)
        statuses: list[int] = []
        while not statuses or statuses[-1] == 200:
            statuses.append((await peer.reply())[0])
        assert len(statuses) < 10 and statuses[-1] == 503
        await peer.ends()


async def test_what_arrives_while_a_request_is_worked_on_is_kept_in_bounds() -> None:
    async with open_door() as door:
        door.shard.delay_s = 0.1
        peer = await door.knock()
        await peer.send(RENEW)
        await asyncio.sleep(0.02)
        for piece in (post()[:50], post()[50:], LIVE):
            await peer.send(piece)
            await asyncio.sleep(0.005)
        assert [(await peer.reply())[0] for _ in range(3)] == [200, 200, 200]


async def test_a_request_that_takes_too_long_is_cut() -> None:
    async with open_door() as door:
        door.shard.delay_s = 30
        peer = await door.knock()
        await peer.send(RENEW)
        assert await peer.code() == "overloaded"


async def test_a_long_poll_may_wait_longer_than_a_request() -> None:
    async with open_door() as door:
        peer = await door.knock()
        await peer.send(post("/v1/workers/w/tasks", b'{"incarnation":"i","wait_ms":900}'))
        assert (await peer.reply())[2]["tasks"] == []


async def test_a_client_that_reads_no_answer_is_dropped() -> None:
    async with open_door(
        body_bytes_max=2_000_000, buffered_bytes_max=4_000_000, body_timeout_ms=2000
    ) as door:
        keys = b",".join([b'"' + b"6b" * 16 + b'"'] * 15_000)
        peer = await door.knock()
        for _ in range(12):
            peer.writer.write(post(body=b'{"keys":[' + keys + b"]}"))
        await until(lambda: not door.server.gate.connections, 10)


async def test_requests_that_other_parsers_would_read_differently_are_refused() -> None:
    hosts = post("/livez", b"", "Host: y")
    unhosted = b"GET /livez HTTP/1.1\r\n\r\n"
    both = post("/livez", BODY, "Transfer-Encoding: chunked")
    coded = post("/livez", b"", "Transfer-Encoding: gzip, chunked").replace(b"Content-Length: 0\r\n", b"")
    twice = post("/livez", BODY, "Content-Length: 3")
    garbage = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n"
    http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    folded = b"GET /livez HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n"
    spaced = b"GET /livez HTTP/1.1\r\nHost : x\r\n\r\n"
    nul = b"GET /livez HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n"
    minus = post("/livez", b"", length=-1)
    tunnel = b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n"
    async with open_door() as door:
        for head in (hosts, unhosted, both, coded, twice, garbage, http2, folded, spaced, nul, minus, tunnel):
            peer = await door.knock()
            await peer.send(head)
            assert await peer.code() == "bad_request", head[:60]


async def test_ordinary_variants_of_http_are_taken() -> None:
    async with open_door() as door:
        old = await door.knock()
        await old.send(b"GET /livez HTTP/1.0\r\n\r\n")
        assert (await old.reply())[0] == 200
        await old.ends()
        peer = await door.knock()
        await peer.send(b"\r\n" + LIVE)
        assert (await peer.reply())[0] == 200
        await peer.send(b"GET http://x/livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await peer.reply())[0] == 200
        await peer.send(LIVE.replace(b"GET", b"HEAD"))
        status, headers, _ = await peer.reply(head_only=True)
        assert (status, headers["content-length"]) == (200, "17")
        await peer.send(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await peer.reply())[0] in (204, 404)
        await peer.send(post(body=b"", length=len(BODY)).replace(b"Host", b"Expect: 100-continue\r\nHost"))
        assert (await peer.reply())[0] == 100
        await peer.send(BODY)
        assert (await peer.reply())[0] == 200
        await peer.send(LIVE.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"))
        assert (await peer.reply())[0] == 200
        await peer.ends()
        closing = await door.knock()
        await closing.send(post("/livez", b"", "Connection: close").replace(b"POST", b"GET"))
        assert (await closing.reply())[1]["connection"] == "close"
        await closing.ends()


async def test_a_fault_of_ours_is_logged_and_told_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_door() as door:
        peer = await door.knock()
        with caplog.at_level(logging.ERROR):
            await peer.send(post("/v1/leases/r-0-1-666/release", b"{}", "X-Request-Id: the-one"))
            status, _, body = await peer.reply()
        assert (status, body["code"], body["request_id"]) == (500, "internal", "the-one")
        assert "planted" not in json.dumps(body) and "Traceback" not in json.dumps(body)
        assert "a planted fault" in caplog.text and "the-one" in caplog.text
        await peer.send(LIVE)
        assert (await peer.reply())[0] == 200


async def test_a_stall_of_the_service_ends_nobody() -> None:
    """Deadlines count sweeps, and a sweep that comes late is one sweep."""
    async with open_door() as door:
        peer = await door.knock()
        await peer.send(b"GET /livez HTTP/1.1\r\n")
        await asyncio.sleep(0.05)
        stall()
        await peer.send(b"Host: x\r\n\r\n")
        assert (await peer.reply())[0] == 200


def stall() -> None:
    """Hold the loop for longer than any deadline."""
    until_s = monotonic_s() + 0.6
    while monotonic_s() < until_s:
        pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", "127.0.0.1.evil.org", ""])
def test_other_addresses_than_loopback_need_an_explicit_word(host: str) -> None:
    with pytest.raises(RemoteRefused, match="credentials"):
        check_host(host, allow_remote=False)
    check_host(host, allow_remote=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    check_host(host, allow_remote=False)


@pytest.mark.parametrize("change", [{"body_bytes_max": 0}, {"sweep_ms": -1}, {"buffered_bytes_max": 5}])
def test_settings_that_admit_nothing_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        ApiSettings(**change)
