"""The routes that engines and workers call all the time, without a framework between the socket and the
shard.

`HotRoutes.answer` matches, decodes, asks the shard and encodes. Reads are answered at once, commands by a
coroutine, and so is what has to be asked elsewhere.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec
from msgspec import Struct

from metaservice.telemetry.metrics import Metrics, RouteStats
from metaservice.telemetry.tracing import Tracer

from .call import NOWHERE, Call, Handler
from .decode import BodyDecoder, QueryDecoder
from .errors import FAULT, ApiError, error_of, problem_response
from .events_desk import EventsDesk
from .forward import Forwarder, led_elsewhere
from .handlers import Handlers
from .http import Answer, HttpRequest, HttpResponse
from .media import JSON, MSGPACK, reply_is_msgpack
from .names import unquoted
from .port import CATALOGUE
from .routing import Routing
from .settings import ApiSettings

log = logging.getLogger("metaservice.api")

TRIES_MAX = 3
"""A call is asked here so often at most: once more when it was refused by a copy of the catalogue that
was behind, and once more when leadership came here meanwhile.
"""
_OF_THE_CATALOGUE = frozenset(
    {
        "instance_unknown", "group_unknown", "tenant_unknown", "storage_unknown", "engine_unknown",
        "worker_unknown", "reregister",
    }
)  # fmt: skip
"""What a shard refuses because of what is registered, as far as it knows."""

_HUNG_UP = HttpResponse(499, JSON, b"")
"""Nobody reads it: what is counted for a caller who did not wait for the answer."""

_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode


class Route:
    """One hot route: its template, the body (of a GET: the query) it reads, the handler that answers, and its
    statistics.
    """

    __slots__ = ("decoder", "handler", "method", "name", "reply", "request", "stats", "template")

    def __init__(
        self,
        method: str,
        template: str,
        request: type[Struct],
        reply: type[Struct],
        handler: Handler,
        stats: RouteStats,
    ) -> None:
        self.method = method
        self.template = template
        self.request = request
        self.reply = reply
        self.decoder: BodyDecoder[Any] | QueryDecoder[Any] = (
            QueryDecoder(request) if method == "GET" else BodyDecoder(request)
        )
        self.handler = handler
        self.name = handler.__name__
        self.stats = stats


Shape = tuple[str, int, str, str]
"""Collection, number of segments, the verb after the name, the verb after the second name."""


class HotRoutes:
    """All hot routes of a replica."""

    def __init__(
        self,
        routing: Routing,
        forwarder: Forwarder,
        metrics: Metrics,
        tracer: Tracer,
        settings: ApiSettings,
        desk: EventsDesk,
    ) -> None:
        self.handlers = Handlers(routing, forwarder, metrics, settings, desk)
        self._routing = routing
        self._replica = routing.replica
        self._forwarder = forwarder
        self._metrics = metrics
        self._tracer = tracer
        self._settings = settings
        self.routes: list[Route] = [
            Route(method, template, request, reply, handler, metrics.route(method, template))
            for method, template, request, reply, handler in self.handlers.table()
        ]
        self._by_shape: dict[Shape, dict[str, Route]] = {}
        for route in self.routes:
            self._by_shape.setdefault(_shape(route.template.split("/")), {})[route.method] = route

    def match(self, request: HttpRequest, segments: list[str]) -> Route | None:
        """The route of a request, None when it is not a hot one."""
        if len(segments) < 4 or segments[1] != "v1":
            return None
        methods = self._by_shape.get(_shape(segments))
        method = "GET" if request.method == "HEAD" else request.method
        return None if methods is None else methods.get(method)

    def methods(self, segments: list[str]) -> set[str]:
        """The methods that hot routes have on a path."""
        if len(segments) < 4 or segments[1] != "v1":
            return set()
        return set(self._by_shape.get(_shape(segments), ()))

    def answer(self, request: HttpRequest, route: Route, segments: list[str]) -> Answer:
        """The response, or a coroutine of it. Neither raises (but for cancellation)."""
        started = self._metrics.now()
        call = Call(request, segments)
        body: Any = None
        try:
            if "%" in request.path:
                segments[3:] = map(unquoted, segments[3:])
            if self._tracer.enabled:
                call.span = self._tracer.start(route.name, request.traceparent)
            # When the body cannot be read, the problem is still told in the client's own encoding.
            call.as_msgpack = request.content_type == MSGPACK
            if request.accept:
                call.as_msgpack = reply_is_msgpack(request.accept, call.as_msgpack)
            body, sent_msgpack = route.decoder.decode(request)
            if not request.accept:
                call.as_msgpack = sent_msgpack
            reply = route.handler(call, body)
            if isinstance(reply, Coroutine):
                return self._later(call, route, started, body, reply)
            response = self._told(call, reply)
        except Exception as failure:
            if body is not None and self._may_be_cured(call, failure):
                return self._later(call, route, started, body, _raising(failure))
            response = self._failed(call, failure)
        self._account(call, route, started, response)
        return response

    async def _later(
        self, call: Call, route: Route, started: float, body: Any, work: "Coroutine[Any, Any, Struct]"
    ) -> HttpResponse:
        try:
            response = await self._settled(call, route, body, work)
        except asyncio.CancelledError:
            self._account(call, route, started, _HUNG_UP)
            raise
        except Exception as failure:
            response = self._failed(call, failure)
        self._account(call, route, started, response)
        return response

    async def _settled(
        self, call: Call, route: Route, body: Any, work: "Coroutine[Any, Any, Struct]"
    ) -> HttpResponse:
        """The answer of this replica, or of the shard's leader. What was refused by a copy of the
        catalogue that was behind is asked once more. Raises what the caller is to be told.
        """
        refreshed = False
        for _ in range(TRIES_MAX):
            try:
                return self._told(call, await work)
            except Exception as error:
                failure = error
            shard = led_elsewhere(failure, call.shard, self._replica)
            if shard != NOWHERE:
                wait_ms = getattr(body, "wait_ms", 0)
                response = await self._forwarder.elsewhere(call.request, shard, wait_ms)
                if response is not None:
                    return response
            elif refreshed or not behind(failure, call):
                raise failure
            else:
                # Whatever this one learned: the copy may have caught up by itself since the refusal.
                await self._replica.refresh()
                refreshed = True
            call.shard, call.lines = NOWHERE, b""
            work = _awaited(route.handler, call, body)
        work.close()
        raise self._forwarder.given_up(call.request, failure)

    def _may_be_cured(self, call: Call, failure: Exception) -> bool:
        return led_elsewhere(failure, call.shard, self._replica) != NOWHERE or behind(failure, call)

    def _told(self, call: Call, reply: Struct) -> HttpResponse:
        lines = call.lines or self._routing.position(call)[2]
        if call.as_msgpack:
            return HttpResponse(200, MSGPACK, _to_msgpack(reply), lines=lines)
        return HttpResponse(200, JSON, _to_json(reply), lines=lines)

    def _failed(self, call: Call, failure: Exception) -> HttpResponse:
        error = error_of(failure)
        if error is None:
            log.error(
                "fault in %s %s (request %s)",
                call.request.method,
                ascii(call.request.path[:200]),
                call.request_id,
                exc_info=failure,
            )
            error = ApiError("internal", FAULT)
        if call.span is not None:
            call.attributes["error.type"] = error.code
        return problem_response(
            error,
            as_msgpack=call.as_msgpack,
            retry_after_ms=self._settings.retry_after_ms,
            request_id=call.request_id,
        )

    def _account(self, call: Call, route: Route, started: float, response: HttpResponse) -> None:
        self._metrics.answered(route.stats, response.status, started)
        if call.span is not None:
            self._tracer.end(call.span, call.attributes, response.status)


def _shape(segments: list[str]) -> Shape:
    count = len(segments)
    return segments[2], count, segments[4] if count > 4 else "", segments[6] if count > 6 else ""


def behind(failure: Exception, call: Call) -> bool:
    """Whether a call may have been refused only because a copy of the catalogue was behind."""
    return isinstance(failure, ApiError) and failure.code in _OF_THE_CATALOGUE and call.shard != CATALOGUE


async def _raising(failure: Exception) -> Struct:
    raise failure


async def _awaited(handler: Handler, call: Call, body: Any) -> Struct:
    reply = handler(call, body)
    return await reply if isinstance(reply, Coroutine) else reply
