"""Pieces of the OpenAPI document that routes name."""

from typing import Any

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
    422: "A field is wrong",
    431: "The headers are too large",
    503: "Not now; Retry-After says when",
}
PROBLEM_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": _PROBLEM_CONTENT} for status, text in _STATUSES.items()
}


def _view(name: str) -> dict[str, Any]:
    schema = {"schema": {"$ref": f"#/components/schemas/{name}"}}
    return {"description": "Done", "content": {"application/json": schema, "application/msgpack": schema}}


def viewed() -> dict[str, Any]:
    """A response that shows one registered thing."""
    return _view("View")


def listed() -> dict[str, Any]:
    """A response that shows a page of registered things."""
    return _view("Page")
