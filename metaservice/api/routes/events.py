"""Where the streams of cache events are, for those who want to subscribe."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from metaservice.wire.schemas_events import EventsReply, EventsRequest

from ..documents import viewed
from ..events_desk import EventsDesk
from ..models import Name
from ..respond import respond
from ..routing import Routing


def add_event_routes(router: APIRouter, routing: Routing, desk: EventsDesk) -> None:
    """The route of streams."""

    @router.get("/v1/events", tags=["events"], responses={200: viewed(EventsReply)})
    async def get_events(
        request: Request,
        instance: Annotated[Name | None, Query(description="Only what concerns this instance.")] = None,
    ) -> Response:
        """The streams of cache events, the engines they are for and the routers attached, as the asked
        replica knows them; never passed on.
        """
        told = await desk.ask("status", EventsRequest(instance=instance), EventsReply)
        told.replica = routing.replica.id
        return respond(request, told)
