"""Pieces of the OpenAPI document that routes name."""

from typing import Any

from msgspec import Struct

from metaservice.core import replies, views
from metaservice.wire.schemas_cluster import ClusterReply
from metaservice.wire.schemas_events import EventsReply

_PROBLEM: dict[str, Any] = {"$ref": "#/components/schemas/Problem"}
_PROBLEM_CONTENT: dict[str, Any] = {
    "application/problem+json": {"schema": _PROBLEM},
    "application/msgpack": {"schema": _PROBLEM},
}
_STATUSES = {
    400: "The request cannot be understood",
    403: "It belongs to another",
    404: "It is not there",
    405: "The route has other methods",
    406: "No acceptable media type",
    408: "The request did not arrive in time",
    409: "It contradicts what is registered",
    411: "The body is missing",
    413: "The body is too large",
    415: "The content type is not read here",
    421: "Another replica leads the shard; only told to clients that send x-ucm-direct",
    422: "A field is wrong",
    431: "The headers are too large",
    503: "Not now; Retry-After says when",
}
PROBLEM_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": _PROBLEM_CONTENT} for status, text in _STATUSES.items()
}


REF = "#/components/schemas/{name}"


class Status(Struct, frozen=True):
    """What a replica is.

    `status` says what it does now and `reason` why. `role`, `epoch` and `seq` are those of `shard`, the
    catalogue's; `/v1/cluster` tells of all shards.
    """

    replica: str
    shard: int
    role: str
    status: str
    reason: str
    ready: bool
    cluster: str
    epoch: int
    seq: int
    versions: dict[str, str]


class HandedOver(Struct, frozen=True):
    """Who leads the shard next."""

    shard: int
    successor: str


class Gone(Struct, frozen=True):
    """What was deleted, or is being deleted."""

    id: str


VIEWS: tuple[type[Struct], ...] = (
    views.TenantView,
    views.StorageView,
    views.GroupView,
    views.InstanceView,
    views.MemberView,
    views.SwitchView,
    replies.BlockDetail,
    replies.Done,
    replies.InstanceRegistered,
    Status,
    HandedOver,
    Gone,
    ClusterReply,
    EventsReply,
)
"""Everything that admin routes answer with."""


def viewed(kind: type[Struct]) -> dict[str, Any]:
    """A response that shows one thing."""
    return _response({"$ref": REF.format(name=kind.__name__)})


def listed(kind: type[Struct]) -> dict[str, Any]:
    """A response that shows a page of things."""
    return _response(
        {
            "type": "object",
            "required": ["items", "next_page_token"],
            "properties": {
                "items": {"type": "array", "items": {"$ref": REF.format(name=kind.__name__)}},
                "next_page_token": {"type": "string", "description": "Empty on the last page."},
            },
        }
    )


def _response(schema: dict[str, Any]) -> dict[str, Any]:
    content = {"schema": schema}
    return {"description": "Done", "content": {"application/json": content, "application/msgpack": content}}
