"""How admin routes read and answer: either encoding, by content type and Accept, on FastAPI's own routes."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec
from fastapi import Query
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from metaservice.replica.errors import NotLeader

from .decode import plain_body
from .errors import plain
from .http import HttpRequest, HttpResponse
from .media import JSON, MSGPACK, body_is_msgpack, reply_is_msgpack
from .port import ShardPort
from .routing import local_state
from .settings import ApiSettings

_READS = frozenset({"GET", "HEAD", "DELETE"})


class WireRoute(APIRoute):
    """A route whose body may be JSON or msgpack: FastAPI gets the decoded data as if it had been JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            wire: HttpRequest = request.scope["ucm.request"]
            scope = request.scope
            scope["ucm.msgpack"] = reply_is_msgpack(wire.accept, wire.content_type == MSGPACK)
            if request.method in _READS:
                return await answer(request)
            data = plain_body(wire)
            if not wire.accept:
                scope["ucm.msgpack"] = body_is_msgpack(wire.content_type)
            scope["headers"] = [header for header in scope["headers"] if header[0] != b"content-type"]
            scope["headers"].append((b"content-type", JSON))
            return await answer(_DecodedRequest(scope, request.receive, data))

        return handler


class _DecodedRequest(Request):
    """A request whose body was decoded already."""

    def __init__(self, scope: Any, receive: Any, data: Any) -> None:
        super().__init__(scope, receive)
        self._data = data

    async def json(self) -> Any:
        return self._data


Stale = Annotated[
    bool,
    Query(
        description="Take what this replica has, with its age in x-ucm-staleness-ms, also when it follows."
    ),
]


def reader(shard: ShardPort, stale: bool, settings: ApiSettings) -> tuple[ShardPort, dict[str, str]]:
    """The shard to answer a view from, and the headers that say how old it is. Raises NotLeader where
    only the leader may answer.
    """
    headers = local_state(shard, stale=stale, staleness_ms_max=settings.staleness_ms_max)
    if headers is None:
        raise NotLeader(shard.number, f"shard {shard.number} is led elsewhere")
    return shard, headers


def respond(
    request: Request, payload: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """`payload` (data or structs) in the encoding that the client wants."""
    data = plain(payload)
    if request.scope.get("ucm.msgpack", False):
        body, media = msgspec.msgpack.encode(data), "application/msgpack"
    else:
        body, media = msgspec.json.encode(data), "application/json"
    return Response(body, status, {"cache-control": "no-store", **(headers or {})}, media)


def encoded(response: HttpResponse) -> Response:
    """One of our own responses as Starlette's."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
    return Response(response.body, response.status, headers, response.content_type.decode("latin-1"))
