"""The OpenAPI document: FastAPI's part, and the hot routes from their wire structs, in both encodings."""

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from metaservice.core import model
from metaservice.wire import schemas as wire

from .convert import MODES
from .documents import PROBLEM_RESPONSES, REF, VIEWS
from .errors import ProblemBody
from .hot import Route
from .names import OPENAPI_NAME_PATTERN

_HEX = {"type": "string", "pattern": "^([0-9A-Fa-f]{2}){16,64}$", "description": "A block key as hex text."}
_INTEGER = {"type": "integer", "minimum": 0}


def _column(item: dict[str, Any], packed: str) -> dict[str, Any]:
    return {"type": "array", "items": item, "description": f"In msgpack: {packed}."}


def _names(kind: type[Any]) -> dict[str, Any]:
    return _column(
        {"type": "string", "enum": [member.name for member in kind]}, "u8 codes, in this order from 0"
    )


_KEYS = _column(_HEX, "a list of bytes, or all keys as one run of bytes")
_NULLABLE_KEY = {"anyOf": [_HEX, {"type": "null"}], "default": None}
_U64 = _column({**_INTEGER, "maximum": 2**64 - 1}, "packed little-endian u64")
_U32 = _column({**_INTEGER, "maximum": 2**32 - 1}, "packed little-endian u32")
_U16 = _column({**_INTEGER, "maximum": 2**16 - 1}, "packed little-endian u16")
_FLAGS = _column({"type": "boolean"}, "one byte each, 0 or 1")
_COLUMNS: dict[str, dict[str, Any]] = {
    "keys": _KEYS,
    "parent": _NULLABLE_KEY,
    "parents": {"anyOf": [{"type": "array", "items": _NULLABLE_KEY}, {"type": "null"}], "default": None},
    "locations": _U64,
    "checksums": _U64,
    "generations": _U32,
    "wait_ms": _U32,
    "changed": _U32,
    "storages": _U16,
    "ok": _FLAGS,
    "hit": _FLAGS,
    "unknown": _FLAGS,
    "hashes": _U64,
    "token_ids": _U32,
}
_NO_COLUMNS = {
    ("RegisterWorkerRequest", "storages"),
    ("TakeTasksRequest", "wait_ms"),
    ("StoredItem", "parent"),
}
_CODES: dict[tuple[str, str], type[Any]] = {
    ("StartWriteReply", "outcomes"): wire.WriteOutcome,
    ("StartWriteReply", "reasons"): wire.RefusedReason,
    ("FinishReply", "status"): wire.FinishStatus,
    ("LeaseReply", "outcomes"): wire.LeaseOutcome,
    ("RemoveReply", "outcomes"): wire.RemoveOutcome,
}
_NAMED: dict[str, type[IntEnum]] = {
    kind.__name__: kind
    for kind in (model.GroupKind, model.SwitchMode, model.SwitchScope, model.EvictionPolicy)
}
"""Enumerations that are told by name."""


def document(app: FastAPI, routes: Iterable[Route]) -> bytes:
    """The whole document as JSON."""
    routes = list(routes)
    openapi = get_openapi(
        title=app.title,
        version=app.version,
        summary="The replicated metadata service that knows every KV block of an inference fleet",
        routes=app.routes,
    )
    kinds = [route.reply for route in routes] + [route.request for route in routes if route.method != "GET"]
    _, schemas = msgspec.json.schema_components([*kinds, ProblemBody], ref_template=REF)
    for name, schema in schemas.items():
        _complete(name, schema)
    _, viewed = msgspec.json.schema_components([*VIEWS], ref_template=REF)
    for name, schema in viewed.items():
        if name in _NAMED:
            schema.clear()
            schema.update(type="string", enum=[member.name for member in _NAMED[name]])
    viewed["BlockDetail"]["properties"].update(key=_HEX, parent=_NULLABLE_KEY)
    components = openapi.setdefault("components", {}).setdefault("schemas", {})
    components.update(viewed)
    components.update(schemas)
    components["Problem"] = components.pop("ProblemBody")
    for route in routes:
        openapi["paths"].setdefault(route.template, {})[route.method.lower()] = _operation(route)
    for path in openapi["paths"].values():
        for operation in path.values():
            _both_encodings(operation)
    openapi["paths"].update(_probes())
    return msgspec.json.encode(openapi)


def _query(route: Route) -> list[dict[str, Any]]:
    """What a GET reads from its query, as parameters."""
    _, schemas = msgspec.json.schema_components([route.request], ref_template=REF)
    schema = schemas[route.request.__name__]
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": described}
        for name, described in schema["properties"].items()
    ]


def _operation(route: Route) -> dict[str, Any]:
    reads = (
        {}
        if route.method == "GET"
        else {
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {"schema": {"$ref": REF.format(name=route.request.__name__)}}
                },
            }
        }
    )
    names = [piece[1:-1] for piece in route.template.split("/") if piece.startswith("{")]
    summary, _, description = (route.request.__doc__ or "").partition(". ")
    return {
        "tags": ["hot"],
        "operationId": route.name,
        "summary": route.name.replace("_", " "),
        "description": f"{summary}. {description}" if description else summary,
        "parameters": [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "string", "pattern": OPENAPI_NAME_PATTERN},
            }
            for name in names
        ]
        + (_query(route) if route.method == "GET" else []),
        **reads,
        "responses": {
            "200": {
                "description": (route.reply.__doc__ or "").partition("\n")[0],
                "content": {
                    media: {"schema": {"$ref": REF.format(name=route.reply.__name__)}}
                    for media in ("application/json", "application/msgpack")
                },
            },
            **{str(status): response for status, response in PROBLEM_RESPONSES.items()},
        },
    }


def _both_encodings(operation: dict[str, Any]) -> None:
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" in content:
        content["application/msgpack"] = content["application/json"]
    # Ours is told as problem+json; FastAPI adds a description of its own.
    operation["responses"]["422"] = PROBLEM_RESPONSES[422]


def _complete(name: str, schema: dict[str, Any]) -> None:
    """Columns are `Any` to msgspec; say what they hold. Patterns in the dialect of OpenAPI."""
    if name == "LookupRequest":
        schema["properties"]["mode"]["enum"] = [*MODES]
    for field, described in schema.get("properties", {}).items():
        if (kind := _CODES.get((name, field))) is not None:
            schema["properties"][field] = _names(kind)
        elif field in _COLUMNS and (name, field) not in _NO_COLUMNS:
            schema["properties"][field] = _COLUMNS[field]
        else:
            _patterns(described)


def _patterns(schema: Any) -> None:
    if isinstance(schema, dict):
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            schema["pattern"] = pattern.replace(r"\A", "^").replace(r"\Z", "$")
        for value in schema.values():
            _patterns(value)
    elif isinstance(schema, list):
        for value in schema:
            _patterns(value)


def _probes() -> dict[str, Any]:
    def probe(text: str, media: str) -> dict[str, Any]:
        ok = {"description": text, "content": {media: {"schema": {}}}}
        return {
            "get": {
                "tags": ["probes"],
                "summary": text,
                "responses": {"200": ok, "503": PROBLEM_RESPONSES[503]},
            }
        }

    return {
        "/livez": probe("The process answers", "application/json"),
        "/readyz": probe("The service can serve", "application/json"),
        "/metrics": probe("Metrics for Prometheus", "text/plain"),
    }
