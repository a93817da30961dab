"""A blocking HTTP client that sends what it is told, well-formed or not."""

import socket
from contextlib import suppress


class RawClient:
    """One kept connection at a time; it is opened again when the service closed it."""

    def __init__(self, host: str, port: int, timeout_s: float = 20.0) -> None:
        self._address = (host, port)
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._rest = b""

    def close(self) -> None:
        """Hang up."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
        self._socket = None
        self._rest = b""

    def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> int:
        """Send a request; gives the status, or 0 when the service hung up without an answer."""
        return self.exchange(request_bytes(method, path, body, headers or {}), head_only=method == "HEAD")[0]

    def exchange(self, data: bytes, *, head_only: bool = False) -> tuple[int, bytes]:
        """Send bytes and read one response: status and body.

        Retries once on a connection that was closed while idle.
        """
        for _ in range(2):
            fresh = self._socket is None
            try:
                return self._once(data, head_only)
            except ConnectionError:
                self.close()
                if fresh:
                    break
        return 0, b""

    def last_request(self, data: bytes) -> int:
        """Send bytes on a connection of their own and nothing after them; gives the status of the first
        answer, 0 without.

        What comes after a broken head could be read as part of it, or the service could wait for the rest of
        it.
        """
        with socket.create_connection(self._address, self._timeout_s) as one:
            with suppress(OSError):
                one.sendall(data)
                one.shutdown(socket.SHUT_WR)
            answer = b""
            with suppress(ConnectionError):
                while piece := one.recv(1 << 16):
                    answer += piece
        words = answer.split(b" ", 2)
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0

    def _once(self, data: bytes, head_only: bool) -> tuple[int, bytes]:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, self._timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # When the service answers and closes before all was sent, its answer is still there to read.
        with suppress(BrokenPipeError):
            self._socket.sendall(data)
        head = self._until_blank_line()
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        length = 0 if head_only or status == 204 else int(headers.get("content-length", "0"))
        body = self._exactly(length)
        if headers.get("connection") == "close":
            self.close()
        return status, body

    def _until_blank_line(self) -> bytes:
        while b"\r\n\r\n" not in self._rest:
            self._rest += self._more()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        return head

    def _exactly(self, count: int) -> bytes:
        while len(self._rest) < count:
            self._rest += self._more()
        body, self._rest = self._rest[:count], self._rest[count:]
        return body

    def _more(self) -> bytes:
        assert self._socket is not None
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionResetError("the service hung up")
        return data


def request_bytes(method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """A request as it goes over the wire. Nothing is checked: headers and path may be anything."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x"]
    if body or method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body
