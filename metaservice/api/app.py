"""The application: hot routes in front, probes beside them, FastAPI behind for what operators use."""

import logging
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from metaservice.telemetry.metrics import Metrics
from metaservice.telemetry.tracing import Tracer

from .admin import build_admin
from .call import NOWHERE, request_id_of
from .errors import FAULT, ApiError, error_of, problem_response
from .events_desk import EventsDesk
from .forward import Forwarder, led_elsewhere
from .hot import HotRoutes
from .http import SPECIAL_HEADERS, Answer, Header, Headers, HttpRequest, HttpResponse
from .media import JSON, MSGPACK
from .names import unquoted
from .peers import Peers
from .port import EventsPort, ReplicaPort
from .routing import Routing
from .settings import ApiSettings

log = logging.getLogger("metaservice.api")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_LIVE = HttpResponse(200, JSON, b'{"status":"live"}')
_READY = HttpResponse(200, JSON, b'{"status":"ready"}')
_PROBES = ("/livez", "/readyz", "/metrics")
_READS = frozenset({"GET", "HEAD"})
TRIES_MAX = 2
"""Once more when the leadership came here while a request was to be passed on."""


class App:
    """Answers whole requests (`answer`) for the connection guard, and is an ASGI application for any other
    server.
    """

    def __init__(
        self,
        replica: ReplicaPort,
        metrics: Metrics,
        tracer: Tracer,
        settings: ApiSettings,
        peers: Peers,
        events: EventsPort | None,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.draining = False
        self._replica = replica
        self._tracer = tracer
        self._forwarder = Forwarder(replica, peers, metrics, settings)
        routing = Routing(replica)
        desk = EventsDesk(events, settings)
        self._hot = HotRoutes(routing, self._forwarder, metrics, tracer, settings, desk)
        self._admin = build_admin(routing, settings, self._hot, desk)
        self._unmatched = metrics.route("any", "unmatched")
        self._probes = {path: metrics.route("GET", path) for path in _PROBES}
        catalogue = routing.catalogue
        # Totals over all shards are known to the catalogue's leader, and told by it alone.
        metrics.watch_usage(lambda kind: catalogue.usages(kind) if catalogue.ready else ())
        metrics.watch_gauges(replica.gauges)

    # ------------------------------------------------------------ requests

    def answer(self, request: HttpRequest) -> Answer:
        """The response to a complete request, at once or as a coroutine. Never raises."""
        path = request.path
        segments = path.split("/")
        route = self._hot.match(request, segments)
        if route is not None:
            return self._hot.answer(request, route, segments)
        if path in self._probes:
            return self._probe(request, path)
        return self._others(request, segments)

    def problem(self, error: ApiError, *, as_msgpack: bool = False, request_id: str = "") -> HttpResponse:
        """A problem that is met before a request is complete; the connection does not survive it."""
        return problem_response(
            error,
            as_msgpack=as_msgpack,
            retry_after_ms=self.settings.retry_after_ms,
            request_id=request_id,
            close=True,
        )

    def begin_drain(self) -> None:
        """From now on the service says that it is not ready; it still answers."""
        self.draining = True

    def end_polls(self) -> None:
        """Answer all waiting long polls, with nothing."""
        self._forwarder.stopping.set()

    # ------------------------------------------------------------ probes

    def _probe(self, request: HttpRequest, path: str) -> HttpResponse:
        started = self.metrics.now()
        stats = self._probes[path]
        try:
            if request.method == "OPTIONS":
                response = HttpResponse(204, JSON, b"", ((b"allow", b"GET, HEAD, OPTIONS"),))
            elif request.method not in _READS:
                error = ApiError(
                    "method_not_allowed", "only GET and HEAD here", allow=("GET", "HEAD", "OPTIONS")
                )
                response = self._told(request, error)
            elif path == "/livez":
                response = _LIVE
            elif path == "/readyz":
                response = self._ready(request)
            else:
                response = self._scrape(request)
        except Exception as failure:
            response = self._failed(request, failure)
        self.metrics.answered(stats, response.status, started)
        return response

    def _ready(self, request: HttpRequest) -> HttpResponse:
        if self.draining:
            return self._told(request, ApiError("not_ready", "the service is stopping"))
        replica = self._replica
        if not replica.ready:
            return self._told(request, ApiError("not_ready", f"{replica.status}: {replica.reason}"))
        return _READY

    def _scrape(self, request: HttpRequest) -> HttpResponse:
        content_type, body = self.metrics.expose(request.accept.decode("latin-1"))
        return HttpResponse(200, content_type.encode("latin-1"), body)

    # ------------------------------------------------------------ everything else

    async def _others(self, request: HttpRequest, segments: list[str]) -> HttpResponse:
        started = self.metrics.now()
        stats = self._unmatched
        span = None
        if self._tracer.enabled:
            span = self._tracer.start("admin", request.traceparent)
        template = ""
        try:
            response, template = await self._here_or_elsewhere(request, segments)
            if template:
                stats = self.metrics.route(request.method, template)
        except Exception as failure:
            response = self._failed(request, failure)
        self.metrics.answered(stats, response.status, started)
        if span is not None:
            attributes = {"http.request.method": request.method, "http.route": template}
            self._tracer.end(span, attributes, response.status)
        return response

    async def _here_or_elsewhere(self, request: HttpRequest, segments: list[str]) -> tuple[HttpResponse, str]:
        """The answer and the template of its route, from the leader where another replica leads."""
        for _ in range(TRIES_MAX):
            try:
                return await self._through_admin(request, segments)
            except Exception as error:
                failure = error
            shard = led_elsewhere(failure, NOWHERE, self._replica)
            if shard == NOWHERE:
                break
            response = await self._forwarder.elsewhere(request, shard)
            if response is not None:
                return response, ""
        raise self._forwarder.given_up(request, failure)

    async def _through_admin(self, request: HttpRequest, segments: list[str]) -> tuple[HttpResponse, str]:
        """Run the FastAPI application on a complete request; gives its response and the template of its
        route.
        """
        if not segments[-1] and len(segments) > 2:
            raise ApiError("not_found", "no such route; paths here have no slash at their end")
        if "%" in request.path:
            # A separator that was hidden by percent-encoding must not become one by decoding.
            segments = [unquoted(segment) for segment in segments]
            if any("/" in segment or "\0" in segment for segment in segments):
                raise ApiError(
                    "invalid_name", "a name in the path has a separator or a control character", "path"
                )
        method = request.method
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET" if method == "HEAD" else method,
            "scheme": "http",
            "path": "/".join(segments),
            "raw_path": request.path.encode("latin-1"),
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
            "state": {},
            "ucm.request": request,
        }
        events: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            return events.pop() if events else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._admin(scope, receive, send)
        template = getattr(scope.get("route"), "path_format", "")
        return _collected(sent), template

    def _told(self, request: HttpRequest, error: ApiError) -> HttpResponse:
        return problem_response(
            error,
            as_msgpack=request.accept == MSGPACK,
            retry_after_ms=self.settings.retry_after_ms,
            request_id=request_id_of(request),
        )

    def _failed(self, request: HttpRequest, failure: Exception) -> HttpResponse:
        error = error_of(failure)
        if error is None:
            log.error("fault in %s %s", request.method, ascii(request.path[:200]), exc_info=failure)
            error = ApiError("internal", FAULT)
        return self._told(request, error)

    # ------------------------------------------------------------ as ASGI

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """ASGI 3 for servers without our connection guard (tests, mostly): the body limit holds here too."""
        if scope["type"] != "http":
            raise ValueError(f"this application speaks http only, not {scope['type']}")
        path = scope.get("raw_path") or scope["path"].encode()
        request = HttpRequest(
            scope["method"], path.decode("latin-1"), scope["query_string"], list(scope["headers"])
        )
        read_headers(request)
        response = await self._received(request, receive)
        headers: Headers = [
            (b"content-type", response.content_type),
            (b"content-length", str(len(response.body)).encode()),
            *response.headers,
            *_split(response.lines),
        ]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send(
            {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else response.body}
        )

    async def _received(self, request: HttpRequest, receive: Receive) -> HttpResponse:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self.settings.body_bytes_max:
                return self.problem(ApiError("body_too_large", too_large(self.settings)))
            if not message.get("more_body", False):
                break
        request.body = body
        answer = self.answer(request)
        return await answer if isinstance(answer, Coroutine) else answer


def read_headers(request: HttpRequest) -> None:
    """Fill the attributes of a request that come from its headers (names are in lower case)."""
    for name, value in request.headers:
        attribute = SPECIAL_HEADERS.get(name)
        if attribute is not None:
            setattr(request, attribute, value)
        elif name in (b"content-length", b"transfer-encoding"):
            request.sized = True


def too_large(settings: ApiSettings) -> str:
    """What a client is told whose body is over the limit."""
    return f"at most {settings.body_bytes_max} bytes; split the request"


def _split(lines: bytes) -> list[Header]:
    found: list[Header] = []
    for line in lines.splitlines():
        name, _, value = line.partition(b": ")
        found.append((name, value))
    return found


def _collected(sent: list[Message]) -> HttpResponse:
    start, *bodies = sent
    content_type = b""
    headers: list[tuple[bytes, bytes]] = []
    for name, value in start["headers"]:
        if name == b"content-type":
            content_type = value
        elif name != b"content-length":
            headers.append((name, value))
    return HttpResponse(
        start["status"],
        content_type,
        b"".join(message.get("body", b"") for message in bodies),
        tuple(headers),
    )


def build_app(
    replica: ReplicaPort,
    metrics: Metrics,
    tracer: Tracer,
    settings: ApiSettings,
    peers: Peers,
    events: EventsPort | None = None,
) -> App:
    """The application over one replica. It holds no state of the domain and starts nothing by itself; `peers`
    reaches the other replicas and `events` the publisher (None: this replica publishes no cache events); both
    are closed by whoever made them.
    """
    return App(replica, metrics, tracer, settings, peers, events)
