"""From a call to bytes and from a reply to a result, judging nothing but this one exchange."""

from typing import Any, TypeVar

import msgspec

from metaservice.wire.columns import ColumnError

from .calls import Call, Who
from .errors import INVALID_REQUEST, OVERLOADED, PROTOCOL, REJECTED, CallFailed
from .http import MSGPACK, Heads, Reply

T = TypeVar("T")

_BAD_ARGUMENT = (TypeError, ValueError, OverflowError, AttributeError, msgspec.MsgspecError, ColumnError)


class Problem(msgspec.Struct):
    """RFC 9457, as far as a client uses it."""

    code: str = ""
    title: str = ""
    detail: str = ""
    field: str = ""
    retry_after_ms: int = 0


_problem_json = msgspec.json.Decoder(Problem)
_problem_msgpack = msgspec.msgpack.Decoder(Problem)


def problem_of(reply: Reply) -> CallFailed:
    """What a reply other than a good one means."""
    problem = Problem()
    try:
        if reply.media.endswith("json"):
            problem = _problem_json.decode(reply.body)
        elif reply.media == MSGPACK:
            problem = _problem_msgpack.decode(reply.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # then it is no answer of this service, which the empty code says
    code, detail = problem.code, problem.detail or problem.title
    if reply.status < 400 or (not code and reply.status != 503):
        failure, detail = PROTOCOL, f"HTTP status {reply.status}, {reply.media or 'no media type'}"
    elif reply.status == 503 and code in ("", "overloaded"):
        failure = OVERLOADED
    elif code.isascii() and code.isidentifier() and len(code) <= 64:
        failure = REJECTED + code
    else:
        failure, detail = PROTOCOL, "a problem code that is none"
    return CallFailed(
        failure,
        detail,
        status=reply.status,
        field=problem.field,
        retry_after_ms=max(0, problem.retry_after_ms) or reply.retry_after_ms,
    )


def built(heads: Heads, who: Who, call: Call[Any]) -> bytes:
    """The request of a call. Raises CallFailed."""
    try:
        sending = call.request(who)
    except _BAD_ARGUMENT as error:
        raise CallFailed(INVALID_REQUEST, str(error)) from None
    return heads.request(sending.method, sending.path, sending.body)


def understood(call: Call[T], reply: Reply, sent_ms: int) -> T:
    """The result of a call from its reply. Raises CallFailed."""
    if not 200 <= reply.status <= 201:
        raise problem_of(reply)
    if reply.media != MSGPACK:
        raise CallFailed(PROTOCOL, f"answered with {reply.media or 'no media type'}", status=reply.status)
    return call.answer(reply.body, sent_ms)
