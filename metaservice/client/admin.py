"""What operators and tools ask for: JSON, no breaker, and failures are exceptions."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .calls import Sending
from .endpoints import CATALOGUE, Route
from .errors import INVALID_REQUEST, PROTOCOL, CallFailed, client_error
from .http import JSON, Reply
from .speech import problem_of

_SCOPES = frozenset({"tenant", "group", "instance", "storage"})
_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:@+/?&=,%")


class Ask(msgspec.Struct, frozen=True):
    """A request of an operator; `body` None: without one."""

    method: str
    path: str
    body: Any = None

    @property
    def route(self) -> Route:
        """Nearly all that operators ask about is in the catalogue."""
        return CATALOGUE

    @property
    def repeatable(self) -> bool:
        """Whether it may be sent again when it is not known whether it was done."""
        return self.method in ("GET", "PUT")

    @property
    def wait_ms(self) -> int:
        """No replica waits on purpose before it answers."""
        return 0

    def sending(self, accept: str) -> Sending:
        """What to send. Raises CallFailed when the path or body cannot be sent."""
        if not self.path.startswith("/") or not _SAFE.issuperset(self.path.encode()):
            raise CallFailed(INVALID_REQUEST, "a path has characters that none may have", field="path")
        try:
            body = b"" if self.body is None else msgspec.json.encode(self.body)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise CallFailed(INVALID_REQUEST, str(error)) from None
        return Sending(self.method, self.path, body, JSON, accept, straight=False)


def tenant(id: str, bytes_max: int | None, blocks_max: int | None) -> Ask:
    return Ask("PUT", f"/v1/tenants/{id}", {"quota": _quota(bytes_max, blocks_max)})


def storage(
    id: str,
    kind: str,
    options: Mapping[str, str],
    capacity_bytes: int | None,
    fault_domain: str,
    reach: str,
) -> Ask:
    body = {
        "kind": kind,
        "options": dict(options),
        "capacity_bytes": capacity_bytes,
        "fault_domain": fault_domain,
        "reach": reach,
    }
    return Ask("PUT", f"/v1/storages/{id}", body)


def group(
    id: str,
    tenant: str,
    storages: Sequence[str],
    bytes_max: int | None,
    blocks_max: int | None,
    high_permille: int,
    low_permille: int,
    eviction: str,
) -> Ask:
    body = {
        "tenant": tenant,
        "storages": list(storages),
        "quota": _quota(bytes_max, blocks_max),
        "high_permille": high_permille,
        "low_permille": low_permille,
        "eviction": eviction,
    }
    return Ask("PUT", f"/v1/groups/{id}", body)


def instance(
    id: str,
    group: str,
    fingerprint: Mapping[str, Any],
    bytes_max: int | None,
    blocks_max: int | None,
    shard: int | None,
    publication: Mapping[str, Any] | None,
) -> Ask:
    body: dict[str, Any] = {
        "group": group,
        "fingerprint": dict(fingerprint),
        "quota": _quota(bytes_max, blocks_max),
    }
    if shard is not None:
        body["shard"] = shard
    if publication is not None:
        body["publication"] = dict(publication)
    return Ask("PUT", f"/v1/instances/{id}", body)


def switch(scope: str, id: str, mode: str, reason: str) -> Ask:
    if scope == "cluster" and not id:
        path = "/v1/switches/cluster"
    elif scope in _SCOPES and id:
        path = f"/v1/switches/{scope}/{id}"
    else:
        raise client_error(CallFailed(INVALID_REQUEST, f"scope {scope!r} with id {id!r}", field="scope"))
    return Ask("PUT", path, {"mode": mode, "reason": reason})


def _quota(bytes_max: int | None, blocks_max: int | None) -> dict[str, int | None]:
    return {"bytes": bytes_max, "blocks": blocks_max}


def passed(reply: Reply) -> Reply:
    """The reply, unless another replica may know better. Raises CallFailed then."""
    if reply.status == 503:
        raise problem_of(reply)
    return reply


def json_of(reply: Reply) -> Any:
    """The JSON of a good reply. Raises ClientError with the problem's code otherwise."""
    if not 200 <= reply.status < 300:
        raise client_error(problem_of(reply))
    if not reply.body:
        return None
    try:
        if reply.media != JSON:
            raise ValueError(f"answered with {reply.media or 'no media type'}")
        return msgspec.json.decode(reply.body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise client_error(CallFailed(PROTOCOL, str(error), status=reply.status)) from None


def text_of(reply: Reply) -> str:
    """The text of a good reply. Raises ClientError otherwise."""
    if not 200 <= reply.status < 300:
        raise client_error(problem_of(reply))
    return reply.body.decode("utf-8", "replace")
