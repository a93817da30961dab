"""A proxy in front of PostgreSQL that understands where messages end, and can go wrong at a chosen one."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from socket import IPPROTO_TCP, SHUT_RDWR, TCP_NODELAY, create_connection, create_server, socket
from typing import Self
from urllib.parse import urlsplit

STARTUP = ""
BIND = "B"
COMMAND_COMPLETE = "C"


class PostgresProxy:
    """Forwards TCP on a port of its own to the server that `dsn` names. A context manager."""

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 5432)
        self._listener = create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        credentials = parts.netloc.rpartition("@")[0]
        self.dsn = parts._replace(netloc=f"{credentials}@127.0.0.1:{port}", query="sslmode=disable").geturl()
        self._lock = threading.Lock()
        self._pairs: list[_Pair] = []
        self._cut_before = ""
        self._cut_after: list[str] = []
        self._held = threading.Event()
        self._held.set()
        self.refusing = False
        """Whether new connections are closed at once."""
        self.connections = 0
        """Connections taken so far."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.set()
        with suppress(OSError):
            self._listener.shutdown(SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Closes every connection."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.close()

    def cut_before(self, kind: str) -> None:
        """The next message of this kind from a client is not forwarded; its connection is closed instead."""
        self._cut_before = kind

    def cut_after(self, kind: str, count: int = 1) -> None:
        """Once the server has sent `count` messages of this kind, the last one does not arrive and the
        connection is closed."""
        self._cut_after = [kind] * count

    def hold(self) -> None:
        """Nothing is forwarded any more over the connections that there are, either way, and they stay open
        to the server. New ones work."""
        self._held = threading.Event()
        with self._lock:
            for pair in self._pairs:
                pair.gate = self._held

    def let_go(self) -> None:
        """What was held is forwarded, late."""
        self._held.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.refusing:
                client.close()
                continue
            try:
                server = create_connection(self._server)
            except OSError:
                client.close()
                continue
            for one in (client, server):
                one.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            pair = _Pair(client, server)
            with self._lock:
                self._pairs.append(pair)
            for of_client in (True, False):
                threading.Thread(target=self._pump, args=(pair, of_client), daemon=True).start()

    def _pump(self, pair: "_Pair", of_client: bool) -> None:
        source, sink = (pair.client, pair.server) if of_client else (pair.server, pair.client)
        messages = _Messages(started=not of_client)
        with suppress(OSError):
            while data := source.recv(1 << 16):
                pair.gate.wait()
                if any(self._cuts(kind, of_client) for kind in messages.kinds(data)):
                    break
                sink.sendall(data)
        pair.close()

    def _cuts(self, kind: str, of_client: bool) -> bool:
        if of_client:
            if kind != self._cut_before or not kind:
                return False
            self._cut_before = ""
            return True
        if self._cut_after and self._cut_after[0] == kind:
            self._cut_after.pop(0)
            return not self._cut_after
        return False


class _Pair:
    """A connection from a client and the one to the server."""

    def __init__(self, client: socket, server: socket) -> None:
        self.client = client
        self.server = server
        self.gate = threading.Event()
        self.gate.set()

    def close(self) -> None:
        for one in (self.client, self.server):
            with suppress(OSError):
                one.shutdown(SHUT_RDWR)
            one.close()


class _Messages:
    """Finds the kinds of the messages in one direction of a connection."""

    def __init__(self, *, started: bool) -> None:
        self._started = started
        self._skip = 0
        self._head = b""

    def kinds(self, data: bytes) -> Iterator[str]:
        """The kinds of the messages whose heads end in `data`."""
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            size = 5 if self._started else 4
            step = min(size - len(self._head), len(data) - at)
            self._head += data[at : at + step]
            at += step
            if len(self._head) == size:
                kind = chr(self._head[0]) if self._started else STARTUP
                self._skip = int.from_bytes(self._head[-4:], "big") - 4
                self._head, self._started = b"", True
                yield kind
