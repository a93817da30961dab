"""One request and one response, as far as this service needs them: whole, bounded, without streaming."""

from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import Struct

Header = tuple[bytes, bytes]
Headers = list[Header]


class HttpRequest:
    """A complete request. `path` is as it was sent (percent-encoded); header values are raw bytes, absent
    ones empty.

    `on_gone` may be set by whoever works on the request: it is called once when the client went away
    meanwhile. `wait_ms` may be raised by a long poll: the connection allows it that much more time.

    `direct`: the client goes to leaders by itself and wants to be told where they are. `hop`: another
    replica passed this request on, and it must not travel further.
    """

    __slots__ = (
        "accept",
        "body",
        "content_encoding",
        "content_type",
        "direct",
        "headers",
        "hop",
        "keep_alive",
        "method",
        "on_gone",
        "path",
        "query",
        "request_id",
        "sized",
        "traceparent",
        "wait_ms",
    )

    def __init__(self, method: str, path: str, query: bytes, headers: Headers) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = b""
        self.content_type = b""
        self.content_encoding = b""
        self.accept = b""
        self.request_id = b""
        self.traceparent = b""
        self.direct = b""
        self.hop = b""
        self.sized = False
        self.keep_alive = True
        self.wait_ms = 0
        self.on_gone: Callable[[], None] | None = None


class HttpResponse(Struct, gc=False):
    """A complete response; `headers` come besides content-type and content-length, and so do `lines`,
    which are headers as they are sent (each with its end of line).
    """

    status: int
    content_type: bytes
    body: bytes
    headers: tuple[Header, ...] = ()
    close: bool = False
    lines: bytes = b""


Answer = HttpResponse | Coroutine[Any, Any, HttpResponse]
"""What the application returns for a request: at once where nothing has to be waited for."""

SPECIAL_HEADERS = {
    b"accept": "accept",
    b"content-type": "content_type",
    b"content-encoding": "content_encoding",
    b"x-request-id": "request_id",
    b"traceparent": "traceparent",
    b"x-ucm-direct": "direct",
    b"x-ucm-hop": "hop",
}
"""Headers that are kept as attributes of HttpRequest."""
