"""What engines and workers say of themselves, and the tasks of workers."""

from typing import Annotated, Literal

from msgspec import Meta, field

from .schemas import U64, Column, Flags, Name, Reply, Request, StorageRef, SwitchRef, Text, Token

Address = Annotated[str, Meta(max_length=256, pattern=r"\A[!-~]*\Z")]
"""`ip:port`, or a ZMQ endpoint such as `tcp://10.0.0.1:5557`; "" where there is none."""


class EngineEndpoints(Request, kw_only=True):
    """Where an engine is, for routers. `node`: whose local storages it reaches (their `fault_domain`).
    `address`: `ip:port` as routers know it. `worker_id`: its number in Dynamo (0: made from its id). `events`
    and `replay`: where it publishes its own cache events and answers for those that were missed, in
    `dialect`."""

    node: Text = ""
    address: Address = ""
    worker_id: U64 = 0
    events: Address = ""
    replay: Address = ""
    dialect: Literal["vllm", "sglang"] = "vllm"


class RegisterEngineRequest(Request, kw_only=True):
    """`PUT /v1/engines/{id}`. Another incarnation under the same id fences the one before and ends its write
    sessions. `canary`: how the engine itself hashes the probe block; one that is not the fingerprint's is
    refused, for its blocks would be found by nobody."""

    incarnation: Token
    instance: Name | None = None
    rank: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    endpoints: EngineEndpoints | None = None
    canary: Text = ""


class RegisterWorkerRequest(Request, kw_only=True):
    """`PUT /v1/workers/{id}`: the storages whose bytes this worker can delete; of a volatile storage it
    becomes the one that holds them."""

    incarnation: Token
    storages: list[Name]


class RegisterReply(Reply, kw_only=True):
    """Heartbeat at least each `heartbeat_ms`; after `expire_ms` without one the registration is over."""

    id: str
    incarnation: str
    heartbeat_ms: int
    suspect_ms: int
    expire_ms: int
    cluster: str
    epoch: int
    storage_table: list[StorageRef] = field(default_factory=list)


class HeartbeatRequest(Request, kw_only=True):
    """`POST /v1/engines/{id}/heartbeat`, `POST /v1/workers/{id}/heartbeat`."""

    incarnation: Token


class HeartbeatReply(Reply, kw_only=True):
    """`status` is `active`; `switch` is the strictest switch on the engine's instance now."""

    status: str
    heartbeat_ms: int
    switch: SwitchRef | None = None


class TakeTasksRequest(Request, kw_only=True):
    """`POST /v1/workers/{id}/tasks`: long poll; answers at once when there is work, else after `wait_ms`.

    `shard`: only work of this one, from whoever leads it. Without it: of all that the asked replica leads.
    """

    incarnation: Token
    limit: Annotated[int, Meta(ge=1, le=65_536)] = 1024
    wait_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    shard: Annotated[int, Meta(ge=0, le=255)] | None = None


class DeleteTask(Reply, kw_only=True):
    """Delete the bytes of these locations from `storage`, all of `parts` each, then confirm within
    `ttl_ms`."""

    task: str
    storage: StorageRef
    parts: list[str]
    locations: Column
    generations: Column
    ttl_ms: int


class TakeTasksReply(Reply, kw_only=True):
    """Tasks handed to this worker."""

    tasks: list[DeleteTask]
    cluster: str


class ConfirmTaskRequest(Request, kw_only=True):
    """`POST /v1/workers/{id}/tasks/{task}/confirm`: per location whether its bytes are gone (default: all
    are)."""

    incarnation: Token
    ok: Flags | None = None


class ConfirmTaskReply(Reply, kw_only=True):
    """`gone`: locations now free; `again`: handed out once more later."""

    gone: int
    again: int


class UnknownRequest(Request, kw_only=True):
    """`POST /v1/workers/{id}/unknown`: which of these places, found in `storage`, does the service not
    know?

    All locations of one request are of one shard (`location >> 44`)."""

    incarnation: Token
    storage: Name
    locations: Column
    generations: Column


class UnknownReply(Reply, kw_only=True):
    """1 where no block in any state has that (location, generation): its bytes are an orphan."""

    unknown: Flags
