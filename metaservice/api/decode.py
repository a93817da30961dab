"""From bytes of a body to a request struct, or to plain data for the admin routes; every failure is an
ApiError.
"""

import json
from typing import Any, Generic, NoReturn, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Raw, Struct

from .errors import ApiError, decoding_error
from .http import HttpRequest
from .media import MSGPACK, body_is_msgpack, refuse_encoded

_Body = TypeVar("_Body", bound=Struct)
FIELDS_MAX = 16
"""A query has no more fields than this."""


class _Member(str):
    """A member's name that equals only itself, so that a dict keeps the same name twice."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


def _member(kind: type, value: Any) -> Any:
    return kind(value)


_json_members = msgspec.json.Decoder(dict[_Member, Raw], dec_hook=_member)
_msgpack_members = msgspec.msgpack.Decoder(dict[_Member, Raw], dec_hook=_member)
_json_any = msgspec.json.Decoder()
_msgpack_any = msgspec.msgpack.Decoder()


class BodyDecoder(Generic[_Body]):
    """Decodes one kind of request body in both encodings."""

    __slots__ = ("_empty", "_json", "_msgpack")

    def __init__(self, kind: type[_Body]) -> None:
        self._json = msgspec.json.Decoder(kind)
        self._msgpack = msgspec.msgpack.Decoder(kind)
        required = any(field.required for field in msgspec.structs.fields(kind))
        self._empty = None if required else kind

    def decode(self, request: HttpRequest) -> tuple[_Body, bool]:
        """The body and whether it was msgpack.

        A request whose fields all have defaults may have no body at all.
        """
        body = request.body
        if not body:
            if self._empty is not None:
                return self._empty(), bool(request.content_type) and body_is_msgpack(request.content_type)
            _refuse_empty(request)
        as_msgpack = body_is_msgpack(request.content_type)
        if request.content_encoding:
            refuse_encoded(request.content_encoding)
        try:
            if as_msgpack:
                decoded = self._msgpack.decode(body)
                members = _msgpack_members.decode(body)
            else:
                decoded = self._json.decode(body)
                members = _json_members.decode(body)
        except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError) as failure:
            raise decoding_error(failure, body) from None
        _refuse_duplicates(members)
        return decoded, as_msgpack


class QueryDecoder(Generic[_Body]):
    """Decodes the query of one kind of GET: names and values as the fields of a struct whose fields all have
    defaults.
    """

    __slots__ = ("_kind",)

    def __init__(self, kind: type[_Body]) -> None:
        self._kind = kind

    def decode(self, request: HttpRequest) -> tuple[_Body, bool]:
        """The query as a struct, and whether the content type says msgpack (there is no body)."""
        try:
            pairs = parse_qsl(
                request.query.decode("ascii"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=FIELDS_MAX,
            )
        except ValueError as failure:
            raise ApiError("bad_request", f"the query cannot be read: {failure}") from None
        try:
            return msgspec.convert(
                _unique([*pairs]), self._kind, strict=False
            ), request.content_type == MSGPACK
        except msgspec.ValidationError as failure:
            raise decoding_error(failure, b"") from None


def plain_body(request: HttpRequest) -> Any:
    """The body of an admin request as plain data (dict, list, str, int, bool, None; bytes when msgpack has
    them).
    """
    body = request.body
    if not body:
        _refuse_empty(request)
    as_msgpack = body_is_msgpack(request.content_type)
    refuse_encoded(request.content_encoding)
    try:
        if as_msgpack:
            data = _msgpack_any.decode(body)
            if isinstance(data, dict):
                _refuse_duplicates(_msgpack_members.decode(body))
        else:
            data = _json_any.decode(body)  # stricter than json: no NaN, no invalid UTF-8
            json.loads(body, object_pairs_hook=_unique)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError) as failure:
        raise decoding_error(failure, body) from None
    if not isinstance(data, dict):
        raise ApiError("bad_request", "the body has to be one object of named fields")
    return data


def _refuse_empty(request: HttpRequest) -> NoReturn:
    if not request.sized:
        raise ApiError(
            "length_required", "this request needs a body, with Content-Length or chunked encoding"
        )
    if request.content_type:
        body_is_msgpack(request.content_type)
    raise ApiError("malformed_body", "the body is empty")


def _refuse_duplicates(members: dict[_Member, Raw]) -> None:
    names = [*map(str.__str__, members)]
    if len(set(names)) != len(names):
        name = next(name for at, name in enumerate(names) if name in names[:at])
        raise ApiError("invalid_field", "this field is given twice", name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ApiError("invalid_field", "this field is given twice", name)
        found[name] = value
    return found
