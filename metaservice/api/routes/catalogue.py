"""`PUT/GET/DELETE` of what is registered, and lists of it in pages."""

from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Path, Query
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from metaservice.core import commands, views
from metaservice.core.model import EvictionPolicy
from metaservice.core.replies import Done, InstanceRegistered

from ..documents import Gone, listed, viewed
from ..errors import ApiError, taken
from ..models import GroupBody, InstanceBody, Name, StorageBody, TenantBody
from ..respond import Stale, reader, respond
from ..routing import Routing
from ..settings import ApiSettings

KINDS = {
    "tenants": "tenant",
    "storages": "storage",
    "groups": "group",
    "instances": "instance",
    "engines": "engine",
    "workers": "worker",
}
MEMBERS = ("engines", "workers")
VIEW_OF: dict[str, type[Struct]] = {
    "tenants": views.TenantView,
    "storages": views.StorageView,
    "groups": views.GroupView,
    "instances": views.InstanceView,
    "engines": views.MemberView,
    "workers": views.MemberView,
}
_DELETES: dict[str, Callable[[str], commands.Command]] = {
    "tenants": lambda id: commands.DeleteTenant(tenant=id),
    "storages": lambda id: commands.DeleteStorage(storage=id),
    "groups": lambda id: commands.DeleteGroup(group=id),
    "instances": lambda id: commands.DeleteInstance(instance=id),
}
PageSize = Annotated[
    int, Query(ge=1, description="How many to return at most; the service may return fewer.")
]
Status = Annotated[
    Literal["active", "suspect", "expired"] | None,
    Query(description="Only those in this status. A page may be short, or empty, and others follow."),
]
PageToken = Annotated[str, Query(max_length=400, description="next_page_token of the page before.")]


def _put(kind: type[Struct]) -> dict[int | str, dict[str, Any]]:
    return {200: viewed(kind), 201: viewed(kind)}


def add_catalogue_routes(router: APIRouter, routing: Routing, settings: ApiSettings) -> None:
    """Routes of tenants, storages, groups, instances, engines and workers."""
    _puts(router, routing)
    for kind, label in KINDS.items():
        _reads(router, routing, settings, kind, label)
        if kind in _DELETES:
            _deletes(router, routing, kind, label)
        else:
            _leaves(router, routing, kind, label)


def _puts(router: APIRouter, routing: Routing) -> None:
    shard = routing.catalogue

    async def put(request: Request, command: commands.Command) -> Response:
        done = taken(await shard.submit(command))
        created = bool(done.created)
        headers = {"location": request.scope["path"]} if created else None
        return respond(request, done, 201 if created else 200, headers)

    @router.put("/v1/tenants/{tenant}", tags=["catalogue"], responses=_put(Done))
    async def put_tenant(request: Request, tenant: Name, body: TenantBody) -> Response:
        """Register a tenant or change its quota."""
        return await put(request, commands.PutTenant(tenant=tenant, quota=body.quota.core()))

    @router.put("/v1/storages/{storage}", tags=["catalogue"], responses=_put(Done))
    async def put_storage(request: Request, storage: Name, body: StorageBody) -> Response:
        """Register a storage or change its capacity. Kind and options stay while a group names it."""
        command = commands.PutStorage(
            storage=storage,
            kind=body.kind,
            options=body.options,
            capacity_bytes=body.capacity_bytes,
            fault_domain=body.fault_domain,
            reach=body.reach,
        )
        return await put(request, command)

    @router.put("/v1/groups/{group}", tags=["catalogue"], responses=_put(Done))
    async def put_group(request: Request, group: Name, body: GroupBody) -> Response:
        """Register an instance group or change its policy. Its tenant stays."""
        command = commands.PutGroup(
            group=group,
            tenant=body.tenant,
            storages=tuple(body.storages),
            quota=body.quota.core(),
            high_permille=body.high_permille,
            low_permille=body.low_permille,
            eviction=EvictionPolicy[body.eviction],
        )
        return await put(request, command)

    @router.put("/v1/instances/{instance}", tags=["catalogue"], responses=_put(InstanceRegistered))
    async def put_instance(request: Request, instance: Name, body: InstanceBody) -> Response:
        """Register an instance, or change its quota. The same id with another fingerprint is refused."""
        command = commands.PutInstance(
            instance=instance,
            group=body.group,
            fingerprint=body.fingerprint.core(),
            quota=body.quota.core(),
            shard=body.shard,
            publication=None if body.publication is None else body.publication.core(),
        )
        return await put(request, command)


def _reads(router: APIRouter, routing: Routing, settings: ApiSettings, kind: str, label: str) -> None:
    async def read_all(
        request: Request, page_size: PageSize = 100, page_token: PageToken = "", stale: Stale = False
    ) -> Response:
        size = min(page_size, settings.page_size_max)
        return _page(request, routing, settings, kind, _Wanted(size, size), page_token, stale)

    async def read_members(
        request: Request,
        status: Status = None,
        page_size: PageSize = 100,
        page_token: PageToken = "",
        stale: Stale = False,
    ) -> Response:
        # few of very many may have the status: one request looks at no more than it may for a whole page
        size = min(page_size, settings.page_size_max)
        wanted = _Wanted(size, settings.page_size_max, status) if status else _Wanted(size, size)
        return _page(request, routing, settings, kind, wanted, page_token, stale)

    async def read_one(
        request: Request, id: Annotated[Name, Path(alias=label)], stale: Stale = False
    ) -> Response:
        shard, headers = reader(routing.catalogue, stale, settings)
        view = shard.describe_one(kind, id)
        if view is None:
            raise ApiError(f"{label}_unknown", f"no {label} of this name is registered", label)
        return respond(request, view, headers=headers)

    read_all.__doc__ = read_members.__doc__ = f"All {kind}, by name, in pages."
    read_one.__doc__ = f"One {label}: how it is registered, and what it uses now."
    router.add_api_route(
        f"/v1/{kind}",
        read_members if kind in MEMBERS else read_all,
        methods=["GET"],
        tags=["catalogue"],
        name=f"list_{kind}",
        responses={200: listed(VIEW_OF[kind])},
    )
    router.add_api_route(
        f"/v1/{kind}/{{{label}}}",
        read_one,
        methods=["GET"],
        tags=["catalogue"],
        name=f"get_{label}",
        responses={200: viewed(VIEW_OF[kind])},
    )


class _Wanted(NamedTuple):
    """A page: at most `size` of the next `look` that are registered, in this status."""

    size: int
    look: int
    status: str = ""


def _page(
    request: Request,
    routing: Routing,
    settings: ApiSettings,
    kind: str,
    wanted: _Wanted,
    page_token: str,
    stale: bool,
) -> Response:
    shard, headers = reader(routing.catalogue, stale, settings)
    views: list[Any] = shard.describe(kind, _after(page_token), wanted.look + 1)
    page: list[Any] = []
    last = ""
    for view in views[: wanted.look]:
        if len(page) == wanted.size:
            break
        last = view.id
        if not wanted.status or view.status == wanted.status:
            page.append(view)
    more = bool(views) and last != views[-1].id
    token = urlsafe_b64encode(last.encode()).decode().rstrip("=") if more else ""
    return respond(request, {"items": page, "next_page_token": token}, headers=headers)


def _deletes(router: APIRouter, routing: Routing, kind: str, label: str) -> None:
    async def delete(request: Request, id: Annotated[Name, Path(alias=label)]) -> Response:
        taken(await routing.catalogue.submit(_DELETES[kind](id)))
        # Of an instance the blocks go first, in batches; it is gone when they are.
        return respond(request, Gone(id), 202 if kind == "instances" else 200)

    delete.__doc__ = f"Take the {label} out of the catalogue. Refused while others depend on it."
    status = 202 if kind == "instances" else 200
    router.add_api_route(
        f"/v1/{kind}/{{{label}}}",
        delete,
        methods=["DELETE"],
        tags=["catalogue"],
        name=f"delete_{label}",
        status_code=status,
        responses={status: viewed(Gone)},
    )


def _leaves(router: APIRouter, routing: Routing, kind: str, label: str) -> None:
    async def leave(
        request: Request,
        id: Annotated[Name, Path(alias=label)],
        incarnation: Annotated[
            str, Query(max_length=64, description="Without it, only what has expired is taken away.")
        ] = "",
    ) -> Response:
        taken(await routing.catalogue.submit(commands.Deregister(kind=label, id=id, incarnation=incarnation)))
        return respond(request, Gone(id))

    leave.__doc__ = f"The {label} leaves on purpose: its registration is over at once."
    router.add_api_route(
        f"/v1/{kind}/{{{label}}}",
        leave,
        methods=["DELETE"],
        tags=["membership"],
        name=f"deregister_{label}",
        responses={200: viewed(Gone)},
    )


def _after(page_token: str) -> str:
    try:
        padded = page_token + "=" * (-len(page_token) % 4)
        return b64decode(padded.encode("ascii"), b"-_", validate=True).decode("ascii")
    except ValueError:
        raise ApiError("invalid_field", "this is no next_page_token of a list", "page_token") from None
