"""Peers that misbehave in one way each, and good replies to spoil. Real sockets, real bytes."""

import socket
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any

import msgspec

from metaservice.wire.schemas import (
    FinishReply,
    LeaseReply,
    LookupReply,
    PartRef,
    StartWriteReply,
    StorageRef,
)
from metaservice.wire.schemas_members import RegisterReply

STORAGE = StorageRef(name="s", kind="posix", options={"root": "/nowhere"})
PARTS = [PartRef(name="tp0", bytes=100), PartRef(name="tp1", bytes=50)]


class Request:
    """One request as the peer got it. `connection` counts from 1; `number` is its place on that
    connection."""

    def __init__(
        self, peer: "Peer", link: socket.socket, connection: int, number: int, head: bytes, body: bytes
    ):
        self.peer = peer
        self.link = link
        self.connection = connection
        self.number = number
        self.line = head.split(b"\r\n", 1)[0].decode()
        self.head = head
        self.direct = b"\r\nx-ucm-direct: 1" in head.lower()
        self.body = body
        self.at_s = time.monotonic()

    @property
    def verb(self) -> str:
        """Last segment of the path."""
        return self.line.split(" ")[1].split("?")[0].rpartition("/")[2]

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.msgpack.decode(self.body) if self.body else {}
        return fields

    def header(self, name: str) -> str:
        """The value of a header, "" when it is absent."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.encode():
                return value.strip().decode()
        return ""

    def send(self, data: bytes) -> None:
        self.link.sendall(data)

    def reset(self) -> None:
        """Close with RST."""
        self.link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.link.close()

    def hang(self) -> None:
        """Say nothing until the peer is closed or the client goes."""
        self.link.settimeout(None)
        while self.link.recv(4096):
            pass


Behaviour = Callable[[Request], None]


class Peer:
    """Accepts connections, reads whole requests, and leaves the answer to `behave`. Everything it got is
    in `requests`."""

    def __init__(self, behave: Behaviour, port: int = 0) -> None:
        self.behave = behave
        self.requests: list[Request] = []
        self.connections = 0
        self.open_now = self.open_max = 0
        self._lock = Lock()
        self._links: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=256)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening and end all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self.open_now += 1
                self.open_max = max(self.open_max, self.open_now)
                self._links.add(link)
                number = self.connections
            Thread(target=self._serve, args=(link, number), daemon=True).start()

    def _serve(self, link: socket.socket, connection: int) -> None:
        kept = b""
        number = 0
        try:
            while True:
                while b"\r\n\r\n" not in kept:
                    data = link.recv(65_536)
                    if not data:
                        return
                    kept += data
                head, _, kept = kept.partition(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                while len(kept) < length:
                    data = link.recv(65_536)
                    if not data:
                        return
                    kept += data
                body, kept = kept[:length], kept[length:]
                number += 1
                request = Request(self, link, connection, number, head, body)
                with self._lock:
                    self.requests.append(request)
                self.behave(request)
        except OSError:
            pass
        finally:
            with self._lock:
                self.open_now -= 1
                self._links.discard(link)
            link.close()


@contextmanager
def peer(behave: Behaviour, port: int = 0) -> Iterator[Peer]:
    """A peer for the length of a test."""
    one = Peer(behave, port)
    try:
        yield one
    finally:
        one.close()


def http(
    body: bytes,
    status: int = 200,
    media: str = "application/msgpack",
    extra: Mapping[str, str] = {},
) -> bytes:
    """A whole HTTP reply."""
    head = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", f"Content-Type: {media}"]
    head += [f"{name}: {value}" for name, value in extra.items()]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def problem(status: int, code: str, extra: Mapping[str, str] = {}, **fields: object) -> bytes:
    """An RFC 9457 reply."""
    body = msgspec.json.encode({"status": status, "code": code, "title": code, **fields})
    return http(body, status, "application/problem+json", extra)


def looked(asked: int, hits: int | None = None, *, lease_ms: int = 0, **changes: Any) -> dict[str, Any]:
    """The fields of a good lookup reply with `hits` (default: all) hits, some of them changed."""
    n = asked if hits is None else hits
    reply = LookupReply(
        mode="prefix",
        asked=asked,
        hits=n,
        start=0,
        cut="none" if n == asked else "miss",
        cut_at=n,
        lease="r-0-1-1" if lease_ms and n else None,
        lease_ms=lease_ms if n else 0,
        locations=array("Q", range(1, n + 1)).tobytes(),
        generations=array("I", [1] * n).tobytes(),
        storages=bytes(2 * n),
        checksums=array("Q", range(n * len(PARTS))).tobytes(),
        storage_table=[STORAGE] if n else [],
        parts=PARTS if n else [],
        cluster="c",
    )
    fields: dict[str, Any] = msgspec.to_builtins(reply, builtin_types=(bytes,))
    return {**fields, **changes}


def started(asked: int, **changes: Any) -> dict[str, Any]:
    """The fields of a good start-write reply in which every row is to be written."""
    reply = StartWriteReply(
        session="w-0-1",
        ttl_ms=30_000,
        outcomes=bytes(asked),
        reasons=bytes(asked),
        wait_ms=bytes(4 * asked),
        locations=array("Q", range(1, asked + 1)).tobytes(),
        generations=array("I", [1] * asked).tobytes(),
        storages=bytes(2 * asked),
        storage_table=[STORAGE],
        parts=PARTS,
        cluster="c",
    )
    fields: dict[str, Any] = msgspec.to_builtins(reply, builtin_types=(bytes,))
    return {**fields, **changes}


def answer_to(request: Request) -> dict[str, Any]:
    """What a service that knows every block would answer, by route."""
    fields = request.fields
    match request.verb:
        case "lookup":
            return looked(len(fields["keys"]), lease_ms=fields.get("lease_ms", 0))
        case "writes":
            return started(len(fields["keys"]))
        case "finish":
            n = len(fields["locations"]) // 8
            finish: dict[str, Any] = msgspec.to_builtins(
                FinishReply(status=bytes(n), published=n, open=0), builtin_types=(bytes,)
            )
            return finish
        case "renew" | "release" as verb if "/leases/" in request.line:
            leases = [request.line.split("/")[3], *fields.get("also", [])]
            outcome = bytes([0 if verb == "renew" else 1])
            lease: dict[str, Any] = msgspec.to_builtins(
                LeaseReply(
                    leases=leases,
                    outcomes=outcome * len(leases),
                    changed=bytes(4 * len(leases)),
                    ttl_ms=fields.get("ttl_ms", 0),
                ),
                builtin_types=(bytes,),
            )
            return lease
        case "renew":
            return {"ttl_ms": fields.get("ttl_ms") or 30_000}
        case "abort":
            return {"freed": 1}
        case "remove":
            n = len(fields["keys"])
            return {"outcomes": b"\x01" * n, "removed": n}
        case "switch":
            return {"mode": "normal", "switch": None}
        case "heartbeat":
            return {"status": "active", "heartbeat_ms": 100, "switch": None}
        case "tasks":
            return {"tasks": [], "cluster": "c"}
        case "unknown":
            return {"unknown": bytes(len(fields["locations"]) // 8)}
        case name:
            register: dict[str, Any] = msgspec.to_builtins(
                RegisterReply(
                    id=name,
                    incarnation=fields["incarnation"],
                    heartbeat_ms=100,
                    suspect_ms=300,
                    expire_ms=3_000,
                    cluster="c",
                    epoch=1,
                    storage_table=[STORAGE],
                )
            )
            return register


def good(request: Request) -> None:
    """Answer as a service that knows every block."""
    request.send(http(msgspec.msgpack.encode(answer_to(request))))


def silent(request: Request) -> None:
    """Take the request and say nothing."""
    request.hang()


def trickling(request: Request) -> None:
    """A byte every 20 ms of a good reply: never silent, never done."""
    for byte in http(msgspec.msgpack.encode(answer_to(request))):
        request.send(bytes([byte]))
        time.sleep(0.02)


def resetting(request: Request) -> None:
    """RST instead of an answer."""
    request.reset()


def cut_off(request: Request) -> None:
    """Half an answer, then RST."""
    reply = http(msgspec.msgpack.encode(answer_to(request)))
    request.send(reply[: len(reply) // 2])
    request.reset()


def half_closed(request: Request) -> None:
    """Half an answer, then the end of its direction only."""
    reply = http(msgspec.msgpack.encode(answer_to(request)))
    request.send(reply[: len(reply) // 2])
    request.link.shutdown(socket.SHUT_WR)
    request.hang()


def overloaded(request: Request) -> None:
    """503, come again in a second."""
    request.send(problem(503, "overloaded", {"Retry-After": "1"}))


def html(request: Request) -> None:
    """Somebody else's page with status 200."""
    request.send(http(b"<html>it works</html>", 200, "text/html"))
