"""From what went wrong to RFC 9457 `problem+json`: stable code, offending field, and what would have been
right.
"""

import re
from array import array
from itertools import count
from math import ceil
from typing import Any

import msgspec
from msgspec import Struct

from metaservice.core.rejections import Rejection
from metaservice.replica.errors import ShardUnavailable
from metaservice.wire.columns import ColumnError
from metaservice.wire.problems import PROBLEMS

from .http import Header, HttpResponse

FIELD_LENGTH_MAX = 200
MESSAGE_LENGTH_MAX = 500
FAULT = "this request met a fault of the service; its log has more"
NAME_RULE = "1 to 128 of A-Z a-z 0-9 . _ : @ + - and a letter or digit first"
TOKEN_RULE = "1 to 64 of A-Z a-z 0-9 . _ : @ + -"  # noqa: S105 - words for people, no secret
_NAMES = frozenset({"group", "engine", "instance", "storage", "storages", "parts", "name", "tenant"})
_RULES = {
    **dict.fromkeys(("lora", "salt", "canary", "node"), "without control characters"),
    **dict.fromkeys(("address", "events", "replay"), "printable ASCII without spaces"),
}
_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`\Z", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`", re.DOTALL)
_turns = count(1)


class ApiError(Exception):
    """A refusal that the API itself decides.

    `field` is JSON-pointer-like (`keys[3]`); `facts` are extra members.
    """

    def __init__(
        self,
        code: str,
        message: str,
        field: str = "",
        *,
        facts: dict[str, object] | None = None,
        retry_after_ms: int = 0,
        allow: tuple[str, ...] = (),
        headers: tuple[Header, ...] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.facts = facts
        self.retry_after_ms = retry_after_ms
        self.allow = allow
        self.headers = headers


class ProblemBody(Struct, kw_only=True, omit_defaults=True):
    """What a problem looks like on the wire (RFC 9457 with the members `code`, `field`, `facts`,
    `retry_after_ms`).
    """

    type: str
    title: str
    status: int
    detail: str
    code: str
    field: str = ""
    facts: dict[str, Any] | None = None
    retry_after_ms: int = 0
    request_id: str = ""


def error_of(failure: BaseException) -> ApiError | None:
    """The typed error for a failure that is the caller's or is foreseen; None for a fault of this service."""
    match failure:
        case ApiError():
            return failure
        case ColumnError():
            return ApiError(failure.code, failure.message, failure.field)
        case ShardUnavailable():
            # To be told of another leader is for the forwarder to say; here it did not get that far.
            code = "not_ready" if failure.code == "not_leader" else failure.code
            return ApiError(code, failure.message, retry_after_ms=failure.retry_after_ms)
    return None


def taken(answer: Any) -> Any:
    """The shard's reply; a rejection is raised as what the client is told."""
    if isinstance(answer, Rejection):
        raise ApiError(answer.code, answer.message, answer.field, facts=dict(answer.detail) or None)
    return answer


def decoding_error(failure: Exception, body: bytes) -> ApiError:
    """The typed error for a body that msgspec (or json) did not take."""
    if isinstance(failure, RecursionError):
        return ApiError(
            "nesting_too_deep", "the body is nested too deeply; requests here are two levels deep"
        )
    if isinstance(failure, msgspec.ValidationError):
        return _validation_error(str(failure))
    if not body:
        return ApiError("malformed_body", "the body is empty")
    return ApiError("malformed_body", str(failure))


def _validation_error(message: str) -> ApiError:
    at = _AT.search(message)
    place = at[1] if at else ""
    text = message[: at.start()] if at else message
    if unknown := _UNKNOWN.match(text):
        field = f"{place}.{unknown[1]}" if place else unknown[1]
        return ApiError("unknown_field", "this request has no such field", field)
    if missing := _MISSING.match(text):
        field = f"{place}.{missing[1]}" if place else missing[1]
        return ApiError("invalid_field", "this field is required", field)
    if not at:
        return ApiError("bad_request", f"the body has to be one object of named fields: {text}")
    name, leaf = re.split(r"[.\[]", place)[0], re.split(r"[.\[\]]", place)[-1]
    if "matching regex" in text:
        if name in _NAMES:
            return ApiError("invalid_name", f"a name is {NAME_RULE}", place)
        return ApiError("invalid_field", f"it has to be {_RULES.get(leaf, TOKEN_RULE)}", place)
    if name in ("ttl_ms", "lease_ms") and ("`int` >=" in text or "`int` <=" in text):
        return ApiError("ttl_out_of_range", f"a time to live in milliseconds: {text}", place)
    return ApiError("invalid_field", text, place)


def jittered_ms(base_ms: int) -> int:
    """0.5 to 1.5 times `base_ms`, evenly spread over successive calls, so that clients do not come back in
    step.

    Multiples of the golden ratio are spread evenly and need no source of chance.
    """
    return int(base_ms * (0.5 + next(_turns) * 0.6180339887498949 % 1.0))


def problem_response(
    error: ApiError, *, as_msgpack: bool, retry_after_ms: int, request_id: str = "", close: bool = False
) -> HttpResponse:
    """The response for a typed error; `retry_after_ms` is used for a retryable code that names no time
    itself.
    """
    problem = PROBLEMS[error.code]
    wait_ms = jittered_ms(error.retry_after_ms or retry_after_ms) if problem.retry else 0
    body = ProblemBody(
        type=f"urn:ucm:problem:{problem.code}",
        title=problem.title,
        status=problem.status,
        detail=_clean(error.message, MESSAGE_LENGTH_MAX),
        code=problem.code,
        field=_clean(error.field, FIELD_LENGTH_MAX),
        facts=None if error.facts is None else plain(error.facts),
        retry_after_ms=wait_ms,
        request_id=request_id,
    )
    headers: tuple[Header, ...] = ((b"cache-control", b"no-store"), *error.headers)
    if wait_ms:
        headers += ((b"retry-after", b"%d" % ceil(wait_ms / 1000)),)
    if error.allow:
        headers += ((b"allow", ", ".join(error.allow).encode("ascii")),)
    if as_msgpack:
        return HttpResponse(
            problem.status, b"application/msgpack", msgspec.msgpack.encode(body), headers, close
        )
    return HttpResponse(
        problem.status, b"application/problem+json", msgspec.json.encode(body), headers, close
    )


def plain(value: Any) -> Any:
    """`value` as what both encoders take: enumerations as names, bytes as hex text, structs and mappings as
    objects.
    """
    match value:
        case None | bool() | float():
            return value
        case int():
            return getattr(value, "name", value)
        case str():
            return _clean(value, len(value))
        case bytes():
            return value.hex()
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset() | array():
            return [plain(item) for item in value]
        case Struct():
            return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    return str(value)


def _clean(text: str, length: int) -> str:
    """`text` without what UTF-8 cannot say, at most `length` characters."""
    if len(text) > length:
        text = text[:length] + "..."
    return text.encode("utf-8", "replace").decode("utf-8")
