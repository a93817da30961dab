"""The calls of engines and workers about themselves, and of workers about their tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.msgpack import Decoder

from metaservice.wire.columns import packed
from metaservice.wire.schemas import Reply
from metaservice.wire.schemas_cluster import ClusterReply
from metaservice.wire.schemas_members import (
    ConfirmTaskReply,
    ConfirmTaskRequest,
    EngineEndpoints,
    HeartbeatReply,
    HeartbeatRequest,
    RegisterEngineRequest,
    RegisterReply,
    RegisterWorkerRequest,
    TakeTasksReply,
    TakeTasksRequest,
    UnknownReply,
    UnknownRequest,
)
from metaservice.wire.schemas_members import DeleteTask as WireTask

from . import checks
from .calls import Call, Sending, Who, decoded, name, post, put, shard_of, shard_of_location, token
from .checks import between, codes, lying
from .endpoints import CATALOGUE, Route
from .errors import INVALID_REQUEST, CallFailed
from .http import JSON
from .messages import Member
from .results import (
    ClusterResult,
    ConfirmResult,
    DeleteTask,
    HeartbeatResult,
    LeaveResult,
    Registered,
    TasksResult,
    UnknownResult,
)


class NamedReply(Reply):
    """The answer to a request that ends something: its name."""

    id: str


_register = Decoder(RegisterReply)
_left = Decoder(NamedReply)
_heartbeat = Decoder(HeartbeatReply)
_tasks = Decoder(TakeTasksReply)
_confirm = Decoder(ConfirmTaskReply)
_unknown = Decoder(UnknownReply)
_cluster = msgspec.json.Decoder(ClusterReply)

_TTL_MS_MAX = 2**31


class Register(Call[Registered]):
    """`PUT /v1/engines/{id}` or `PUT /v1/workers/{id}` (when `storages` is not None)."""

    __slots__ = ("canary", "endpoints", "id", "incarnation", "instance", "rank", "storages")

    writes = True

    def __init__(
        self,
        id: str,
        incarnation: str,
        *,
        instance: str = "",
        rank: int = 0,
        storages: Sequence[str] | None = None,
        endpoints: Mapping[str, Any] | None = None,
        canary: str = "",
    ) -> None:
        self.id = id
        self.incarnation = incarnation
        self.instance = instance
        self.rank = rank
        self.storages = storages
        self.endpoints = endpoints
        self.canary = canary

    @classmethod
    def of(cls, member: Member) -> "Register":
        """The registration of a member."""
        return cls(
            member.id,
            member.incarnation,
            instance=member.instance,
            rank=member.rank,
            storages=member.storages,
            endpoints=member.endpoints,
            canary=member.canary,
        )

    def request(self, who: Who) -> Sending:
        if self.storages is not None:
            worker = RegisterWorkerRequest(incarnation=self.incarnation, storages=list(self.storages))
            return put(f"/v1/workers/{name(self.id, 'worker')}", worker)
        endpoints = None
        if self.endpoints is not None:
            endpoints = msgspec.convert(self.endpoints, EngineEndpoints)
        engine = RegisterEngineRequest(
            incarnation=self.incarnation,
            instance=self.instance or None,
            rank=self.rank,
            endpoints=endpoints,
            canary=self.canary,
        )
        return put(f"/v1/engines/{name(self.id, 'engine')}", engine)

    def answer(self, body: bytes, sent_ms: int) -> Registered:
        reply = decoded(_register, body)
        if reply.id != self.id or reply.incarnation != self.incarnation:
            raise lying("register: the answer to another question")
        expire_ms = between(reply.expire_ms, 1, _TTL_MS_MAX, "expire_ms")
        return Registered(
            id=reply.id,
            incarnation=reply.incarnation,
            # A heartbeat that could not be missed once would let a healthy engine expire.
            heartbeat_ms=between(reply.heartbeat_ms, 1, expire_ms // 2, "heartbeat_ms"),
            suspect_ms=between(reply.suspect_ms, 0, _TTL_MS_MAX, "suspect_ms"),
            expire_ms=expire_ms,
            cluster=checks.cluster(reply.cluster),
            epoch=reply.epoch,
            storage_table=[checks.storage(row) for row in reply.storage_table],
        )

    def failed(self, failure: str, detail: str) -> Registered:
        return Registered(id=self.id, incarnation=self.incarnation, failure=failure, detail=detail)


class Heartbeat(Call[HeartbeatResult]):
    """`POST /v1/engines/{id}/heartbeat` or `POST /v1/workers/{id}/heartbeat`."""

    __slots__ = ()

    def request(self, who: Who) -> Sending:
        id, incarnation = who.current(who.kind or "engine")
        path = f"/v1/{who.kind}s/{name(id, who.kind)}/heartbeat"
        return post(path, HeartbeatRequest(incarnation=incarnation))

    def answer(self, body: bytes, sent_ms: int) -> HeartbeatResult:
        reply = decoded(_heartbeat, body)
        heartbeat_ms = between(reply.heartbeat_ms, 1, _TTL_MS_MAX, "heartbeat_ms")
        return HeartbeatResult(status=reply.status, heartbeat_ms=heartbeat_ms, switch=reply.switch)

    def failed(self, failure: str, detail: str) -> HeartbeatResult:
        return HeartbeatResult(failure=failure, detail=detail)


class Leave(Call[LeaveResult]):
    """`DELETE /v1/engines/{id}` or `DELETE /v1/workers/{id}`, for this incarnation only. Not repeated by
    itself: the second answer would be that it is not registered."""

    __slots__ = ()

    writes = True
    repeatable = False

    def request(self, who: Who) -> Sending:
        id, incarnation = who.current(who.kind or "engine")
        path = f"/v1/{who.kind}s/{name(id, who.kind)}?incarnation={token(incarnation, 'incarnation')}"
        return Sending("DELETE", path, b"")

    def answer(self, body: bytes, sent_ms: int) -> LeaveResult:
        decoded(_left, body)
        return LeaveResult()

    def failed(self, failure: str, detail: str) -> LeaveResult:
        return LeaveResult(failure=failure, detail=detail)


class TakeTasks(Call[TasksResult]):
    """`POST /v1/workers/{id}/tasks`: of one shard, or of all that the replica leads that is asked. Not
    repeated by itself: tasks of a lost answer would be out until they time out."""

    __slots__ = ("limit", "shard", "wait_ms")

    repeatable = False

    def __init__(self, limit: int, wait_ms: int, shard: int | None) -> None:
        self.limit = limit
        self.wait_ms = wait_ms
        self.shard = shard

    @property
    def route(self) -> Route:
        return CATALOGUE if self.shard is None else self.shard

    def request(self, who: Who) -> Sending:
        id, incarnation = who.current("worker")
        body = TakeTasksRequest(
            incarnation=incarnation, limit=self.limit, wait_ms=self.wait_ms, shard=self.shard
        )
        return post(f"/v1/workers/{name(id, 'worker')}/tasks", body)

    def answer(self, body: bytes, sent_ms: int) -> TasksResult:
        reply = decoded(_tasks, body)
        if not reply.tasks:
            return TasksResult(cluster=reply.cluster)
        tasks = [self._task(task, sent_ms) for task in reply.tasks]
        between(sum(len(task.locations) for task in tasks), 1, self.limit, "tasks: locations")
        return TasksResult(tasks=tasks, cluster=checks.cluster(reply.cluster))

    @staticmethod
    def _task(task: WireTask, sent_ms: int) -> DeleteTask:
        if type(task.locations) is not bytes or not task.parts:
            raise lying("tasks: without locations or parts")
        if not all(map(checks.is_name, task.parts)):
            raise lying("tasks: parts are not names")
        rows = len(task.locations) // 8
        ttl_ms = between(task.ttl_ms, 1, _TTL_MS_MAX, "ttl_ms")
        return DeleteTask(
            task=checks.token(task.task, "task"),
            storage=checks.storage(task.storage),
            parts=tuple(task.parts),
            locations=checks.locations(task.locations, rows),
            generations=checks.generations(task.generations, rows),
            ttl_ms=ttl_ms,
            deadline_ms=sent_ms + ttl_ms,
        )

    def failed(self, failure: str, detail: str) -> TasksResult:
        return TasksResult(failure=failure, detail=detail)


class ConfirmTask(Call[ConfirmResult]):
    """`POST /v1/workers/{id}/tasks/{task}/confirm`. Repeating it gives the same answer."""

    __slots__ = ("ok", "rows", "task")

    writes = True

    @property
    def route(self) -> Route:
        return shard_of(self.task)

    def __init__(self, task: DeleteTask, ok: Sequence[bool] | None) -> None:
        self.task = task.task
        self.rows = len(task.locations)
        self.ok = ok

    def request(self, who: Who) -> Sending:
        id, incarnation = who.current("worker")
        body = ConfirmTaskRequest(incarnation=incarnation)
        if self.ok is not None:
            if len(self.ok) != self.rows:
                raise CallFailed(
                    INVALID_REQUEST, f"ok: {len(self.ok)} rows, the task has {self.rows}", field="ok"
                )
            body.ok = bytes(map(bool, self.ok))
        return post(f"/v1/workers/{name(id, 'worker')}/tasks/{token(self.task, 'task')}/confirm", body)

    def answer(self, body: bytes, sent_ms: int) -> ConfirmResult:
        reply = decoded(_confirm, body)
        gone = between(reply.gone, 0, self.rows, "gone")
        return ConfirmResult(gone=gone, again=between(reply.again, 0, self.rows - gone, "again"))

    def failed(self, failure: str, detail: str) -> ConfirmResult:
        return ConfirmResult(failure=failure, detail=detail)


class UnknownPlaces(Call[UnknownResult]):
    """`POST /v1/workers/{id}/unknown`, about places of one shard."""

    __slots__ = ("generations", "locations", "storage")

    def __init__(self, storage: str, locations: Sequence[int], generations: Sequence[int]) -> None:
        self.storage = storage
        self.locations = locations
        self.generations = generations

    @property
    def route(self) -> Route:
        return shard_of_location(self.locations[0])

    def nothing(self) -> UnknownResult | None:
        return None if len(self.locations) else UnknownResult()

    def request(self, who: Who) -> Sending:
        id, incarnation = who.current("worker")
        if len(set(map(shard_of_location, self.locations))) > 1:
            raise CallFailed(INVALID_REQUEST, "locations of more than one shard", field="locations")
        body = UnknownRequest(
            incarnation=incarnation,
            storage=self.storage,
            locations=packed("Q", self.locations),
            generations=packed("I", self.generations),
        )
        return post(f"/v1/workers/{name(id, 'worker')}/unknown", body)

    def answer(self, body: bytes, sent_ms: int) -> UnknownResult:
        return UnknownResult(
            unknown=codes(decoded(_unknown, body).unknown, len(self.locations), 1, "unknown")
        )

    def failed(self, failure: str, detail: str) -> UnknownResult:
        return UnknownResult(unknown=bytes(len(self.locations)), failure=failure, detail=detail)


class Cluster(Call[ClusterResult]):
    """`GET /v1/cluster`, which every replica answers for itself."""

    __slots__ = ()

    media = JSON

    def request(self, who: Who) -> Sending:
        return Sending("GET", "/v1/cluster", b"", JSON, JSON, straight=False)

    def answer(self, body: bytes, sent_ms: int) -> ClusterResult:
        reply = decoded(_cluster, body)
        if not reply.shards or [one.shard for one in reply.shards] != list(range(len(reply.shards))):
            raise lying("shards: not each of them once")
        return ClusterResult(
            cluster=reply.cluster,
            replica=reply.replica,
            url=reply.url,
            members=reply.members,
            shards=reply.shards,
        )

    def failed(self, failure: str, detail: str) -> ClusterResult:
        return ClusterResult(failure=failure, detail=detail)
