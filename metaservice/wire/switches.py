"""What is said on the wire about the switch that holds on an instance."""

from typing import Annotated, Literal

from msgspec import Meta

from .schemas import Reply, Request, SwitchRef


class WatchSwitchRequest(Request, kw_only=True):
    """`GET /v1/instances/{id}/switch`, these in the query: long poll. Answered at once when the mode of the
    strictest switch on the instance is not `known` (without it: in any case), else as soon as it changes, or
    after `wait_ms`."""

    known: Literal["", "normal", "read_only", "bypass"] = ""
    wait_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0


class WatchSwitchReply(Reply, kw_only=True):
    """The strictest switch on the instance now; `switch` says where it is set (null: `mode` is `normal`)."""

    mode: str
    switch: SwitchRef | None = None
