"""One HTTP/1.1 connection: httptools parses, every bound is kept here, whole requests go to the application.

It takes the place of uvicorn's own protocol class, which keeps a connection with a slow head open for ever,
accepts megabytes of headers, and buffers a body of any size. Here a request reaches the application when it
is complete, a refusal is the connection's last answer, and each phase has a deadline:

    idle -> head -> body -> busy -> idle ...        any -> refused (what still comes is thrown away) -> closed
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from enum import IntEnum
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from .app import App, too_large
from .errors import FAULT, ApiError
from .guards import NEVER, Gate, Refusal, written
from .http import SPECIAL_HEADERS, HttpRequest, HttpResponse

log = logging.getLogger("metaservice.api")


class Phase(IntEnum):
    """What the connection waits for."""

    idle = 0
    head = 1
    body = 2
    refused = 3


class Connection(asyncio.Protocol):
    """A guarded connection.

    uvicorn's server makes one for each, closes it through `shutdown`, and counts its tasks.
    """

    def __init__(
        self,
        gate: Gate,
        app: App,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.due = NEVER
        self._gate = gate
        self._limits = gate.settings
        self._app = app
        self._state = server_state
        self._loop = _loop or asyncio.get_event_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._parser: Any = None
        self._phase = Phase.idle
        self._queue: deque[HttpRequest | Refusal] = deque()
        self._current: HttpRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._late: list[bytes] = []
        """What came while a request was worked on; reading is paused then, so it is one chunk or two."""
        self._writing_paused = False
        self._overran = False
        self._thrown_away = 0
        # of the request that is being received
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._fed_bytes = 0
        self._expects = False
        self._hosts = 0
        self._request: HttpRequest | None = None
        self._chunks: list[bytes] = []
        self._body_bytes = 0

    # ------------------------------------------------------------ the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._gate.join(self):
            self._phase = Phase.refused
            self._last_words(
                ApiError("overloaded", f"{self._limits.connections_max} connections are open already")
            )
            if not self._gate.linger(self):
                self._transport.close()
            return
        cast(set[Any], self._state.connections).add(self)
        self._parser = httptools.HttpRequestParser(self)
        self.due = self._gate.due_in(self._limits.header_timeout_ms)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.leave(self)
        cast(set[Any], self._state.connections).discard(self)
        self._forget_body()
        for waiting in self._queue:
            if isinstance(waiting, HttpRequest):
                self._gate.buffered_bytes -= len(waiting.body)
        self._queue.clear()
        self._late.clear()
        self.due = NEVER
        self._parser = None
        if self._current is not None and self._current.on_gone is not None:
            self._current.on_gone()

    def eof_received(self) -> None:
        return None  # the transport sends what was written and closes

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.refused:
            self._thrown_away += len(data)
            if self._thrown_away > self._limits.body_bytes_max:
                self._transport.abort()
            return
        if self._current is not None:
            self._late.append(data)
            self._transport.pause_reading()
            return
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        if self._phase is Phase.idle:
            self._fed_bytes = 0
        self._fed_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Another protocol was offered; this one answer is HTTP/1.1 all the same.
            self._keep_no_longer()
        except httptools.HttpParserCallbackError:
            log.exception("fault while a request was read")
            self._refuse(ApiError("internal", FAULT))
        except httptools.HttpParserError as failure:
            self._refuse(ApiError("bad_request", f"this is not HTTP/1.1: {failure}"))
        if self._phase is Phase.head and self._fed_bytes > self._limits.header_bytes_max:
            self._refuse(self._head_too_large())
        elif self._phase is Phase.body and self._fed_bytes > self._fed_bytes_max:
            # More framing than content: chunk extensions, trailers, chunks of one byte.
            self._refuse(ApiError("body_too_large", too_large(self._limits)))
        self._pump()

    @property
    def _fed_bytes_max(self) -> int:
        return 2 * self._limits.body_bytes_max + self._limits.header_bytes_max

    def pause_writing(self) -> None:
        self._writing_paused = True
        if self._current is None:
            self.due = self._gate.due_in(self._limits.response_timeout_ms)

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._current is None:
            self._await_next()
            self._pump()

    # ------------------------------------------------------------ the parser's side

    def on_message_begin(self) -> None:
        if self._phase is Phase.refused:
            return
        self._phase = Phase.head
        self._url = b""
        self._headers = []
        self._head_bytes = 0
        self._expects = False
        self._hosts = 0
        self._request = None
        self.due = self._gate.due_in(self._limits.header_timeout_ms)

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.header_bytes_max:
            self._refuse(self._head_too_large())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        headers = self._headers
        if self._head_bytes > self._limits.header_bytes_max or len(headers) >= self._limits.headers_max:
            self._refuse(self._head_too_large())
        if self._phase is not Phase.head:
            return  # refused; or a trailer: counted, not used
        name = name.lower()
        headers.append((name, value))
        if name == b"host":
            self._hosts += 1
        elif name == b"expect" and value.lower() == b"100-continue":
            self._expects = True

    def on_headers_complete(self) -> None:
        if self._phase is Phase.refused:
            return
        try:
            request = self._head()
        except ApiError as error:
            self._refuse(error)
            return
        self._request = request
        self._phase = Phase.body
        self._body_bytes = 0
        self.due = self._gate.due_in(self._limits.body_timeout_ms)
        if self._expects and request.sized:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _head(self) -> HttpRequest:
        """The request as its head describes it. Raises ApiError for a head that is refused."""
        version = self._parser.get_http_version()
        if version != "1.0" and self._hosts != 1:
            raise ApiError("bad_request", "exactly one Host header is needed", "host")
        path, _, query = self._url.partition(b"?")
        if not path.startswith(b"/"):
            path = self._absolute()
        request = HttpRequest(
            self._parser.get_method().decode("ascii"), path.decode("latin-1"), query, self._headers
        )
        request.keep_alive = version == "1.1" and self._parser.should_keep_alive()
        for name, value in self._headers:
            attribute = SPECIAL_HEADERS.get(name)
            if attribute is not None:
                setattr(request, attribute, value)
            elif name == b"content-length":
                request.sized = True
                if not value.isdigit():
                    raise ApiError("bad_request", "Content-Length is no number", "content-length")
                if len(value) > 18 or int(value) > self._limits.body_bytes_max:
                    raise ApiError("body_too_large", too_large(self._limits))
            elif name == b"transfer-encoding":
                request.sized = True
                if value.strip().lower() != b"chunked":
                    raise ApiError(
                        "bad_request", "the only transfer encoding here is chunked", "transfer-encoding"
                    )
        return request

    def _absolute(self) -> bytes:
        """The path of an absolute-form target (as a proxy sends it); `*` of OPTIONS is the root."""
        if self._url == b"*":
            return b"/"
        try:
            path: bytes | None = httptools.parse_url(self._url).path
        except httptools.HttpParserError:
            path = None
        if path is None:
            raise ApiError("bad_request", "the request target is no path")
        return path

    def on_body(self, body: bytes) -> None:
        if self._phase is not Phase.body:
            return
        self._body_bytes += len(body)
        self._gate.buffered_bytes += len(body)
        self._chunks.append(body)
        if self._body_bytes > self._limits.body_bytes_max:
            self._refuse(ApiError("body_too_large", too_large(self._limits)))
        elif self._gate.buffered_bytes > self._limits.buffered_bytes_max:
            self._refuse(ApiError("overloaded", "too many bodies are being received"))

    def on_message_complete(self) -> None:
        request = self._request
        if self._phase is not Phase.body or request is None:
            return
        request.body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks = []
        self._body_bytes = 0
        self._request = None
        self._phase = Phase.idle
        self.due = NEVER
        self._queue.append(request)
        if len(self._queue) > self._limits.pipelined_max:
            self._refuse(
                ApiError("overloaded", f"at most {self._limits.pipelined_max} requests may be pipelined")
            )

    # ------------------------------------------------------------ the application's side

    def _pump(self) -> None:
        """Answer the next request that is complete."""
        if (
            self._current is not None
            or self._writing_paused
            or not self._queue
            or self._transport.is_closing()
        ):
            return
        request = self._queue.popleft()
        if isinstance(request, Refusal):
            self._last_words(request.error)
            return
        if not self._gate.enter():
            error = ApiError("overloaded", f"{self._limits.requests_max} requests are being worked on")
            self._gate.buffered_bytes -= len(request.body)
            self._write(self._app.problem(error), close=True)
            self._transport.close()
            return
        self._current = request
        try:
            answer = self._app.answer(request)
        except Exception:
            log.exception("fault while a request was answered")
            answer = self._app.problem(ApiError("internal", FAULT))
        if isinstance(answer, HttpResponse):
            self._answered(request, answer)
            return
        self.due = self._gate.due_in(self._limits.request_timeout_ms)
        self._task = self._loop.create_task(self._run(request, answer))
        self._state.tasks.add(self._task)
        self._task.add_done_callback(self._state.tasks.discard)

    async def _run(self, request: HttpRequest, answer: "Coroutine[Any, Any, HttpResponse]") -> None:
        try:
            response = await answer
        except asyncio.CancelledError:
            reason = "the request took too long" if self._overran else "the service is stopping"
            response = self._app.problem(ApiError("overloaded" if self._overran else "not_ready", reason))
        except Exception:
            log.exception("fault while a request was answered")
            response = self._app.problem(ApiError("internal", FAULT))
        self._answered(request, response)

    def _answered(self, request: HttpRequest, response: HttpResponse) -> None:
        self._gate.exit()
        self._gate.buffered_bytes -= len(request.body)
        self._current = None
        self._task = None
        self._overran = False
        if self._transport.is_closing():
            return
        close = not request.keep_alive or response.close or self._gate.closing
        self._write(response, close=close, head_only=request.method == "HEAD")
        if close:
            self._transport.close()
            return
        self._await_next()
        if self._late:
            late, self._late = b"".join(self._late), []
            self._transport.resume_reading()
            self._loop.call_soon(self._resume, late)
        elif self._queue:
            # Another turn of the loop: a connection that pipelines does not get ahead of the others.
            self._loop.call_soon(self._pump)

    def _resume(self, late: bytes) -> None:
        if not self._transport.is_closing():
            self.data_received(late)

    def _await_next(self) -> None:
        if self._phase is Phase.idle:
            self.due = self._gate.due_in(self._limits.idle_timeout_ms)
        elif self._phase is Phase.head:
            self.due = self._gate.due_in(self._limits.header_timeout_ms)
        elif self._phase is Phase.body:
            self.due = self._gate.due_in(self._limits.body_timeout_ms)
        if self._writing_paused:
            self.due = self._gate.due_in(self._limits.response_timeout_ms)

    # ------------------------------------------------------------ ends

    def overdue(self) -> None:
        """The phase took too long: say so where an answer is awaited, else close."""
        if self._current is not None and self._task is not None:
            if self._current.wait_ms:
                self.due = self._gate.due_in(self._current.wait_ms)
                self._current.wait_ms = 0
            else:
                self.due = NEVER
                self._overran = True
                self._task.cancel()
        elif self._writing_paused or self._phase is Phase.refused or self._phase is Phase.idle:
            self._transport.abort()
        elif self._phase is Phase.head:
            self._refuse(
                ApiError("header_timeout", f"the head did not end within {self._limits.header_timeout_ms} ms")
            )
            self._pump()
        else:
            self._refuse(
                ApiError("body_timeout", f"the body did not end within {self._limits.body_timeout_ms} ms")
            )
            self._pump()

    def shutdown(self) -> None:
        """The server stops: close at once when nothing is being answered, else after that answer."""
        self._gate.closing = True
        if self._current is None and not self._queue and self._phase is not Phase.body:
            self._transport.close()

    def abort(self) -> None:
        """Close without regard for what is being sent."""
        self._transport.abort()

    def _keep_no_longer(self) -> None:
        for request in self._queue:
            if isinstance(request, HttpRequest):
                request.keep_alive = False

    def _refuse(self, error: ApiError) -> None:
        """Take nothing more from this connection; what is queued is answered first, then the problem, then it
        closes.
        """
        if self._phase is Phase.refused:
            return
        self._phase = Phase.refused
        self._gate.refused(error.code)
        self._forget_body()
        self._queue.append(Refusal(error))

    def _last_words(self, error: ApiError) -> None:
        self._write(self._app.problem(error), close=True)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        # Closing with unread input would reset the connection, and the client might never see the answer.
        self.due = self._gate.due_in(self._limits.linger_ms)

    def _forget_body(self) -> None:
        self._gate.buffered_bytes -= self._body_bytes
        self._body_bytes = 0
        self._chunks = []
        self._request = None

    def _head_too_large(self) -> ApiError:
        limits = self._limits
        return ApiError(
            "header_too_large", f"at most {limits.header_bytes_max} bytes in {limits.headers_max} headers"
        )

    def _write(self, response: HttpResponse, *, close: bool, head_only: bool = False) -> None:
        default = self._gate.head_lines(self._state.default_headers)
        self._transport.write(written(response, default, close=close, head_only=head_only))
