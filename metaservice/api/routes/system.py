"""Switches, one block for people, and the state of the service."""

import platform
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

import metaservice
from metaservice.core import commands
from metaservice.core.model import SwitchMode, SwitchScope
from metaservice.core.replies import BlockDetail
from metaservice.core.views import SwitchView
from metaservice.wire.columns import key_of

from ..documents import Status, listed, viewed
from ..errors import taken
from ..models import Name, SwitchBody
from ..respond import Stale, reader, respond
from ..routing import Routing
from ..settings import ApiSettings

Scope = Literal["tenant", "group", "instance", "storage"]
WIRE_VERSION = 1


def add_system_routes(router: APIRouter, routing: Routing, settings: ApiSettings) -> None:
    """Routes of switches, blocks and status."""
    replica = routing.replica
    _switches(router, routing, settings)

    @router.get(
        "/v1/instances/{instance}/blocks/{key}", tags=["blocks"], responses={200: viewed(BlockDetail)}
    )
    async def get_block(
        request: Request,
        instance: Name,
        key: Annotated[str, "hex text"],
        group: Annotated[Name | None, Query(description="Attention group; default: the primary one.")] = None,
        stale: Stale = False,
    ) -> Response:
        """Everything that is known of one block."""
        number = replica.home(instance)
        if number is None:
            await replica.refresh()
            number = replica.home(instance)
        if number is None:
            raise routing.unknown(instance)
        shard, headers = reader(routing.shards[number], stale, settings)
        info = shard.instance(instance)
        if info is None:
            await replica.refresh()
            info = shard.instance(instance)
        if info is None:
            raise routing.unknown(instance)
        detail = taken(shard.block(instance, group, key_of(key, info.key_length, "key")))
        return respond(request, detail, headers=headers)

    @router.get("/v1/status", tags=["status"], responses={200: viewed(Status)})
    async def get_status(request: Request) -> Response:
        """What this replica is and does, and how far it is in the catalogue's journal; answered in every
        state.
        """
        catalogue = routing.catalogue
        status = Status(
            replica=replica.id,
            shard=catalogue.number,
            role=str(catalogue.role),
            status=replica.status,
            reason=replica.reason,
            ready=replica.ready,
            cluster=replica.cluster,
            epoch=catalogue.epoch,
            seq=catalogue.durable_seq,
            versions={
                "service": metaservice.__version__,
                "wire": str(WIRE_VERSION),
                "python": platform.python_version(),
            },
        )
        return respond(request, status)


def _switch(scope: SwitchScope, id: str, mode: SwitchMode, reason: str) -> SwitchView:
    path = f"{scope.name}/{id}" if id else scope.name
    return SwitchView(id=path, scope=scope, name=id, mode=mode, reason=reason)


def _switches(router: APIRouter, routing: Routing, settings: ApiSettings) -> None:
    async def put(request: Request, scope: SwitchScope, id: str, body: SwitchBody) -> Response:
        command = commands.SetSwitch(scope=scope, id=id, mode=SwitchMode[body.mode], reason=body.reason)
        taken(await routing.catalogue.submit(command))
        return respond(request, _switch(scope, id, SwitchMode[body.mode], body.reason))

    def get(request: Request, scope: SwitchScope, id: str, stale: bool) -> Response:
        shard, headers = reader(routing.catalogue, stale, settings)
        found = shard.describe_one("switches", f"{scope.name}/{id}" if id else scope.name)
        return respond(request, found or _switch(scope, id, SwitchMode.normal, ""), headers=headers)

    @router.get("/v1/switches", tags=["switches"], responses={200: listed(SwitchView)})
    async def list_switches(request: Request, stale: Stale = False) -> Response:
        """All switches that are not normal."""
        shard, headers = reader(routing.catalogue, stale, settings)
        page = {"items": shard.describe("switches"), "next_page_token": ""}
        return respond(request, page, headers=headers)

    @router.put("/v1/switches/cluster", tags=["switches"], responses={200: viewed(SwitchView)})
    async def put_cluster_switch(request: Request, body: SwitchBody) -> Response:
        """Set the switch of the whole cluster."""
        return await put(request, SwitchScope.cluster, "", body)

    @router.get("/v1/switches/cluster", tags=["switches"], responses={200: viewed(SwitchView)})
    async def get_cluster_switch(request: Request, stale: Stale = False) -> Response:
        """The switch of the whole cluster."""
        return get(request, SwitchScope.cluster, "", stale)

    @router.put("/v1/switches/{scope}/{id}", tags=["switches"], responses={200: viewed(SwitchView)})
    async def put_switch(request: Request, scope: Scope, id: Name, body: SwitchBody) -> Response:
        """Set the switch of a tenant, group, instance or storage."""
        return await put(request, SwitchScope[scope], id, body)

    @router.get("/v1/switches/{scope}/{id}", tags=["switches"], responses={200: viewed(SwitchView)})
    async def get_switch(request: Request, scope: Scope, id: Name, stale: Stale = False) -> Response:
        """The switch of a tenant, group, instance or storage."""
        return get(request, SwitchScope[scope], id, stale)
