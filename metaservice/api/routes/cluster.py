"""The cluster as this replica sees it, the planned handover of a shard, and what replicas tell each other."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Path
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from metaservice.wire.schemas_cluster import ClusterReply

from ..documents import HandedOver, viewed
from ..errors import ApiError, decoding_error
from ..http import HttpRequest
from ..media import MSGPACK
from ..models import HandoverBody
from ..peers import ERRANDS_PATH
from ..respond import respond
from ..routing import Routing


def add_cluster_routes(router: APIRouter, routing: Routing) -> None:
    """Routes of the cluster, handovers and errands."""
    replica = routing.replica

    @router.get("/v1/cluster", tags=["cluster"], responses={200: viewed(ClusterReply)})
    async def get_cluster(request: Request) -> Response:
        """The asked replica, the members it knows, and each shard; answered in every state, never passed
        on.
        """
        return respond(request, replica.cluster_status())

    @router.post("/v1/cluster/shards/{shard}/handover", tags=["cluster"], responses={200: viewed(HandedOver)})
    async def hand_over(
        request: Request, shard: Annotated[int, Path(ge=0, le=255)], body: HandoverBody
    ) -> Response:
        """The shard's leader makes durable what it has taken, and another replica leads."""
        if shard >= replica.shards:
            raise ApiError("invalid_field", f"the shards here are 0 to {replica.shards - 1}", "shard")
        return respond(request, HandedOver(shard, await replica.handover(shard, body.to)))

    async def settle(request: Request) -> Response:
        """What leaders of data shards tell the catalogue's leader. Between replicas only, and never
        passed on.
        """
        wire: HttpRequest = request.scope["ucm.request"]
        if not wire.hop:
            raise ApiError("bad_request", "only replicas speak here", "x-ucm-hop")
        if wire.content_type != MSGPACK:
            raise ApiError("unsupported_media_type", "errands are application/msgpack", "content-type")
        try:
            answer = await replica.settle(wire.body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as failure:
            raise decoding_error(failure, wire.body) from None
        return Response(answer, 200, {"cache-control": "no-store"}, "application/msgpack")

    # Not a WireRoute: the body is the replica's own.
    router.add_api_route(
        ERRANDS_PATH, settle, methods=["POST"], include_in_schema=False, route_class_override=APIRoute
    )
