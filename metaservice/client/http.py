"""The message layer: one request to bytes, bytes to one reply. No sockets here; both transports stand on
it."""

import re

import httptools

from .errors import CONNECTION_LOST, PROTOCOL, CallFailed

MSGPACK = "application/msgpack"
JSON = "application/json"

DIRECT = "X-Ucm-Direct: 1\r\n"
"""Says that the sender knows what to do with the leader's address."""

_INTERIM = 200
_TRACEPARENT = re.compile(r"\A[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")
_OVERHEAD_MAX_BYTES = 65_536
"""Head and framing of a reply, on top of the body's own limit."""


def _traced(traceparent: str) -> str:
    """The header line of a trace context; nothing for a text that is none: tracing never costs a call, and
    nothing else may come into the head of a request."""
    return f"traceparent: {traceparent}\r\n" if traceparent and _TRACEPARENT.match(traceparent) else ""


class Reply:
    """One HTTP reply. `media` is the media type without parameters; `retry_after_ms` 0 when not given."""

    __slots__ = ("body", "keep_alive", "media", "retry_after_ms", "status")

    def __init__(self, status: int, media: str, body: bytes, retry_after_ms: int, keep_alive: bool) -> None:
        self.status = status
        self.media = media
        self.body = body
        self.retry_after_ms = retry_after_ms
        self.keep_alive = keep_alive


class Heads:
    """Writes requests to one replica. The caller vouches for method and path: no space, no control
    character."""

    __slots__ = ("_asked_straight", "_base_path", "_fixed")

    def __init__(self, host: str, port: int, base_path: str) -> None:
        named = f"[{host}]" if ":" in host else host
        self._base_path = base_path
        self._fixed = f" HTTP/1.1\r\nHost: {named}:{port}\r\n"
        msgpack = f"Content-Type: {MSGPACK}\r\nAccept: {MSGPACK}\r\n"
        self._asked_straight = f"{self._fixed}{DIRECT}{msgpack}Content-Length: "

    def request(self, method: str, path: str, body: bytes, traceparent: str = "") -> bytes:
        """A whole request in msgpack, to be answered with the leader's address by a replica that is not
        the leader."""
        head = (
            f"{method} {self._base_path}{path}{self._asked_straight}{len(body)}\r\n{_traced(traceparent)}\r\n"
        )
        return head.encode("ascii") + body

    def forwarded(
        self,
        method: str,
        path: str,
        body: bytes,
        media: str = MSGPACK,
        accept: str = MSGPACK,
        traceparent: str = "",
    ) -> bytes:
        """A whole request that a replica passes on where it is not the leader."""
        head = (
            f"{method} {self._base_path}{path}{self._fixed}Content-Type: {media}\r\nAccept: {accept}\r\n"
            f"Content-Length: {len(body)}\r\n{_traced(traceparent)}\r\n"
        )
        return head.encode("ascii") + body


class ReplyReader:
    """Reads replies of one connection, one at a time, from whatever pieces they come in.

    `begin` before each request. `feed` returns True once the reply is whole; then `reply` builds it. Raises
    CallFailed(protocol) for anything that is not one HTTP reply of bounded size.
    """

    __slots__ = (
        "_body",
        "_body_max_bytes",
        "_complete",
        "_extra",
        "_keep_alive",
        "_length",
        "_media",
        "_parser",
        "_received_bytes",
        "_retry_after",
        "_status",
    )

    def __init__(self, body_max_bytes: int) -> None:
        self._body_max_bytes = body_max_bytes
        self._parser = httptools.HttpResponseParser(self)
        self.begin()

    def begin(self) -> None:
        """Forget the reply before."""
        self._received_bytes = 0
        self._complete = self._extra = self._keep_alive = False
        self._status = 0
        self._reset()

    def _reset(self) -> None:
        self._body: list[bytes] = []
        self._media = b""
        self._retry_after = b""
        self._length = 0

    @property
    def untouched(self) -> bool:
        """No byte of a reply has come."""
        return not self._received_bytes

    def feed(self, data: bytes) -> bool:
        """Take what was received; True once the reply is whole."""
        self._received_bytes += len(data)
        if self._received_bytes > self._body_max_bytes + _OVERHEAD_MAX_BYTES:
            raise CallFailed(PROTOCOL, f"a reply of more than {self._body_max_bytes} bytes")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise CallFailed(PROTOCOL, f"not an HTTP reply: {error}") from None
        if self._length > self._body_max_bytes:
            raise CallFailed(PROTOCOL, f"a reply of more than {self._body_max_bytes} bytes")
        if self._extra:
            # What follows could be taken for the answer to the next request.
            raise CallFailed(PROTOCOL, "more than one reply to one request")
        return self._complete

    def ended(self) -> CallFailed:
        """The failure when the peer closed before the reply was whole. A body that ends with the
        connection counts as cut off: whether it is whole cannot be told."""
        if self.untouched:
            return CallFailed(CONNECTION_LOST, "closed before an answer")
        return CallFailed(CONNECTION_LOST, "closed in the middle of an answer")

    def reply(self) -> Reply:
        """The whole reply."""
        media = self._media.partition(b";")[0].strip().lower().decode("latin-1")
        text = self._retry_after.strip()
        seconds = int(text) if text.isdigit() and len(text) < 8 else 0
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        return Reply(self._status, media, body, seconds * 1_000, self._keep_alive)

    # -- called by the parser

    def on_message_begin(self) -> None:
        if self._complete:
            self._extra = True
        self._reset()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._media = value
        elif name == b"content-length":
            self._length = int(value) if value.isdigit() else 0
        elif name == b"retry-after":
            self._retry_after = value

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._status >= _INTERIM:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()
