"""The FastAPI application behind the hot routes: catalogue, membership views, switches, status, OpenAPI."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

import metaservice

from .call import request_id_of
from .documents import PROBLEM_RESPONSES
from .errors import ApiError, problem_response
from .events_desk import EventsDesk
from .hot import HotRoutes
from .http import HttpRequest
from .media import MSGPACK
from .openapi import document
from .respond import WireRoute, encoded
from .routes.catalogue import add_catalogue_routes
from .routes.cluster import add_cluster_routes
from .routes.events import add_event_routes
from .routes.system import add_system_routes
from .routing import Routing
from .settings import ApiSettings


def build_admin(routing: Routing, settings: ApiSettings, hot: HotRoutes, desk: EventsDesk) -> FastAPI:
    """The admin application. Its scope must carry the HttpRequest under `ucm.request`."""
    app = FastAPI(
        title="UcmMetaService",
        version=metaservice.__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=PROBLEM_RESPONSES,
    )
    app.router.route_class = WireRoute
    add_catalogue_routes(app.router, routing, settings)
    add_system_routes(app.router, routing, settings)
    add_cluster_routes(app.router, routing)
    add_event_routes(app.router, routing, desk)
    schema: list[bytes] = []

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi_json(request: Request) -> Response:
        if not schema:
            schema.append(document(app, hot.routes))
        return Response(schema[0], media_type="application/json")

    def told(request: Request, error: ApiError) -> Response:
        wire: HttpRequest = request.scope["ucm.request"]
        response = problem_response(
            error,
            as_msgpack=request.scope.get("ucm.msgpack", wire.accept == MSGPACK),
            retry_after_ms=settings.retry_after_ms,
            request_id=request_id_of(wire),
        )
        return encoded(response)

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return told(request, error)

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return told(request, first_error(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        methods = set(hot.methods(request.scope["path"].split("/")))
        methods |= _methods(routes, request)
        if not methods:
            return told(request, ApiError("not_found", "no such route"))
        allow = tuple(sorted(methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set())))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"allow": ", ".join(allow)})
        return told(
            request, ApiError("method_not_allowed", f"{request.method} is not a method here", allow=allow)
        )

    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)
    return app


def _methods(routes: list[APIRoute], request: Request) -> set[str]:
    found: set[str] = set()
    for route in routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return found


_CODES = {"extra_forbidden": "unknown_field", "invalid_name": "invalid_name"}
_PLACES = {"path", "query", "body"}


def first_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong, with its place as `fingerprint.parts[0].bytes`."""
    first = error.errors()[0]
    place = ""
    for step in (step for at, step in enumerate(first["loc"]) if at or step not in _PLACES):
        place += f"[{step}]" if isinstance(step, int) else f".{step}" if place else str(step)
    return ApiError(_CODES.get(first["type"], "invalid_field"), first["msg"], place)
