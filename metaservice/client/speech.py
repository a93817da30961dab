"""From a call to bytes and from a reply to a result, judging nothing but this one exchange."""

from typing import Any, TypeVar

import msgspec

from metaservice.wire.columns import ColumnError

from .calls import Call, Sending, Who
from .errors import INVALID_REQUEST, NOT_LEADER, OVERLOADED, PROTOCOL, REJECTED, CallFailed
from .http import MSGPACK, Reply

T = TypeVar("T")

_BAD_ARGUMENT = (TypeError, ValueError, OverflowError, AttributeError, msgspec.MsgspecError, ColumnError)


class Facts(msgspec.Struct):
    """What a replica that does not lead says: whose call it was, and who leads there."""

    shard: int = -1
    leader: str = ""


class Problem(msgspec.Struct):
    """RFC 9457, as far as a client uses it. `facts` differ from code to code."""

    code: str = ""
    title: str = ""
    detail: str = ""
    field: str = ""
    retry_after_ms: int = 0
    facts: Any = None


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
    facts = _facts(problem.facts) if failure == NOT_LEADER else Facts()
    return CallFailed(
        failure,
        detail,
        status=reply.status,
        field=problem.field,
        retry_after_ms=max(0, problem.retry_after_ms) or reply.retry_after_ms,
        shard=facts.shard,
        leader=facts.leader,
    )


def _facts(facts: Any) -> Facts:
    try:
        return msgspec.convert(facts, Facts)
    except msgspec.ValidationError:
        return Facts()


def spoken(who: Who, call: Call[Any]) -> Sending:
    """What to send for a call. Raises CallFailed."""
    try:
        return call.request(who)
    except _BAD_ARGUMENT as error:
        raise CallFailed(INVALID_REQUEST, str(error)) from None


def understood(call: Call[T], reply: Reply, sent_ms: int) -> T:
    """The result of a call from its reply. Raises CallFailed."""
    if not 200 <= reply.status <= 201:
        raise problem_of(reply)
    if reply.media != call.media:
        raise CallFailed(PROTOCOL, f"answered with {reply.media or 'no media type'}", status=reply.status)
    return call.answer(reply.body, sent_ms)
