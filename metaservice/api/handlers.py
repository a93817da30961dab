"""What each hot route does: one command made from the request, one question to the shard, one reply made of
its answer.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from typing import Any

from msgspec import Struct

from metaservice.core import commands, replies
from metaservice.telemetry.metrics import Metrics
from metaservice.telemetry.tracing import Span
from metaservice.wire import schemas as wire

from . import convert, render
from .errors import ApiError, taken
from .http import HttpRequest
from .names import name
from .port import InstanceInfo, ShardPort
from .settings import ApiSettings

Reply = Struct | Coroutine[Any, Any, Struct]
Handler = Callable[["Call", Any], Reply]
TableRow = tuple[str, str, type[Struct], type[Struct], Handler]

_numbers = count(1)


class Call:
    """One request on its way: what handlers need besides the body."""

    __slots__ = ("_id", "as_msgpack", "attributes", "request", "segments", "span")

    def __init__(self, request: HttpRequest, segments: list[str]) -> None:
        self.request = request
        self.segments = segments
        self.as_msgpack = False
        self.span: Span | None = None
        self.attributes: dict[str, Any] = {}
        self._id = ""

    @property
    def request_id(self) -> str:
        """The client's X-Request-Id when it is a decent one, else a number of this process; made when first
        asked.
        """
        if not self._id:
            self._id = request_id_of(self.request)
        return self._id


def request_id_of(request: HttpRequest) -> str:
    """What names this request in problems and in the log."""
    given = request.request_id
    if given and len(given) <= 64 and given.isascii() and given.decode("ascii").isprintable():
        return given.decode("ascii")
    return f"req-{next(_numbers)}"


class Handlers:
    """The hot routes' work over one shard. A handler returns a reply, a coroutine of one, or raises."""

    def __init__(self, shard: ShardPort, metrics: Metrics, settings: ApiSettings) -> None:
        self._shard = shard
        self._metrics = metrics
        self._settings = settings
        self._parts: dict[tuple[str, str], tuple[Any, list[wire.PartRef]]] = {}
        self._polls = 0
        self.stopping = asyncio.Event()
        """Set when the service stops: long polls are answered at once, with nothing."""

    def table(self) -> Iterator[TableRow]:
        """Method, path template, request, reply and handler of every hot route."""
        instance, session, lease = "/v1/instances/{instance}", "/v1/writes/{session}", "/v1/leases/{lease}"
        engine, worker = "/v1/engines/{engine}", "/v1/workers/{worker}"
        yield "POST", f"{instance}/lookup", wire.LookupRequest, wire.LookupReply, self.lookup
        yield "POST", f"{instance}/writes", wire.StartWriteRequest, wire.StartWriteReply, self.start_write
        yield "POST", f"{instance}/remove", wire.RemoveRequest, wire.RemoveReply, self.remove
        yield "POST", f"{session}/finish", wire.FinishRequest, wire.FinishReply, self.finish
        yield "POST", f"{session}/renew", wire.RenewWriteRequest, wire.RenewWriteReply, self.renew_write
        yield "POST", f"{session}/abort", wire.AbortRequest, wire.AbortReply, self.abort
        yield "POST", f"{lease}/renew", wire.LeaseRenewRequest, wire.LeaseReply, self.renew_leases
        yield "POST", f"{lease}/release", wire.LeaseReleaseRequest, wire.LeaseReply, self.release_leases
        yield "PUT", engine, wire.RegisterEngineRequest, wire.RegisterReply, self.register_engine
        yield "POST", f"{engine}/heartbeat", wire.HeartbeatRequest, wire.HeartbeatReply, self.heartbeat_engine
        yield "PUT", worker, wire.RegisterWorkerRequest, wire.RegisterReply, self.register_worker
        yield "POST", f"{worker}/heartbeat", wire.HeartbeatRequest, wire.HeartbeatReply, self.heartbeat_worker
        yield "POST", f"{worker}/tasks", wire.TakeTasksRequest, wire.TakeTasksReply, self.take_tasks
        yield (
            "POST",
            f"{worker}/tasks/{{task}}/confirm",
            wire.ConfirmTaskRequest,
            wire.ConfirmTaskReply,
            self.confirm_task,
        )
        yield "POST", f"{worker}/unknown", wire.UnknownRequest, wire.UnknownReply, self.unknown_places

    # ------------------------------------------------------------ blocks

    def lookup(self, call: Call, body: wire.LookupRequest) -> Reply:
        shard = self._shard
        instance = call.segments[3]
        info = self._instance(instance)
        looked: replies.Looked = taken(shard.read(convert.lookup(instance, info, body, shard.limits)))
        self._metrics.looked(looked.mode, looked.cut, looked.asked, looked.hits, looked.lease is not None)
        if call.span is not None:
            call.attributes.update(
                {
                    "ucm.instance": instance,
                    "ucm.mode": looked.mode,
                    "ucm.cut": looked.cut,
                    "requested_blocks": looked.asked,
                    "hit_blocks": looked.hits,
                    "hit_rate": looked.hits / looked.asked if looked.asked else 0.0,
                }
            )
        found = self._located(instance, info, looked.group, looked.located, call.as_msgpack)
        reply = render.looked(looked, found, call.as_msgpack, shard.cluster, shard.epoch, shard.durable_seq)
        state = None
        if looked.state is not None:
            state = self._located(instance, info, looked.state_group, looked.state, call.as_msgpack)
            reply.state = render.located(state, shard.cluster)
        return reply if call.as_msgpack else self._with_uris(reply, found, state)

    async def start_write(self, call: Call, body: wire.StartWriteRequest) -> Struct:
        shard = self._shard
        instance = call.segments[3]
        info = self._instance(instance)
        started: replies.Started = taken(
            await shard.submit(convert.start_write(instance, info, body, shard.limits))
        )
        self._metrics.started(started.outcomes, started.reasons)
        if call.span is not None:
            granted = started.outcomes.count(wire.WriteOutcome.write)
            call.attributes.update(
                {
                    "ucm.instance": instance,
                    "requested_blocks": len(started.outcomes),
                    "granted_blocks": granted,
                }
            )
        written = replies.Located(started.locations, started.generations, started.storages, b"")
        found = self._located(instance, info, started.group, written, call.as_msgpack)
        reply = render.started(started, found, call.as_msgpack, shard.cluster, shard.number)
        return reply if call.as_msgpack else await self._with_uris(reply, found, None)

    async def finish(self, call: Call, body: wire.FinishRequest) -> Struct:
        command = convert.finish(self._id(call, "session"), body, self._shard.number, self._shard.limits)
        finished: replies.Finished = taken(await self._shard.submit(command))
        self._metrics.finished(finished.status, finished.published)
        if call.span is not None:
            call.attributes.update(
                {"requested_blocks": len(finished.status), "published_blocks": finished.published}
            )
        return render.finished(finished, call.as_msgpack)

    async def renew_write(self, call: Call, body: wire.RenewWriteRequest) -> Struct:
        command = convert.renew_write(self._id(call, "session"), body, self._shard.number)
        renewed: replies.Renewed = taken(await self._shard.submit(command))
        return wire.RenewWriteReply(ttl_ms=renewed.ttl_ms)

    async def abort(self, call: Call, body: wire.AbortRequest) -> Struct:
        command = convert.abort(self._id(call, "session"), body, self._shard.number)
        aborted: replies.Aborted = taken(await self._shard.submit(command))
        self._metrics.aborted(aborted.freed)
        return wire.AbortReply(freed=aborted.freed)

    async def remove(self, call: Call, body: wire.RemoveRequest) -> Struct:
        instance = call.segments[3]
        info = self._instance(instance)
        removed: replies.Removed = taken(
            await self._shard.submit(convert.remove(instance, info, body, self._shard.limits))
        )
        self._metrics.removed(removed.outcomes)
        return render.removed(removed, call.as_msgpack)

    def renew_leases(self, call: Call, body: wire.LeaseRenewRequest) -> Struct:
        command = convert.renew_leases(self._id(call, "lease"), body, self._shard.limits)
        return self._leases(call, self._shard.read(command))

    def release_leases(self, call: Call, body: wire.LeaseReleaseRequest) -> Struct:
        command = convert.release_leases(self._id(call, "lease"), body, self._shard.limits)
        return self._leases(call, self._shard.read(command))

    def _leases(self, call: Call, answered: Any) -> Struct:
        reply: replies.LeasesAnswered = taken(answered)
        self._metrics.leases(reply.outcomes)
        return render.leases(reply, call.as_msgpack)

    # ------------------------------------------------------------ membership

    async def register_engine(self, call: Call, body: wire.RegisterEngineRequest) -> Struct:
        engine = self._id(call, "engine")
        command = commands.RegisterEngine(
            engine=engine, incarnation=body.incarnation, instance=body.instance or "", rank=body.rank
        )
        registered: replies.Registered = taken(await self._shard.submit(command))
        return self._registered(registered, self._instance_storages(body.instance))

    async def register_worker(self, call: Call, body: wire.RegisterWorkerRequest) -> Struct:
        worker = self._id(call, "worker")
        command = commands.RegisterWorker(
            worker=worker, incarnation=body.incarnation, storages=tuple(body.storages)
        )
        registered: replies.Registered = taken(await self._shard.submit(command))
        return self._registered(registered, body.storages)

    def heartbeat_engine(self, call: Call, body: wire.HeartbeatRequest) -> Struct:
        return self._heartbeat(self._id(call, "engine"), "engine", body)

    def heartbeat_worker(self, call: Call, body: wire.HeartbeatRequest) -> Struct:
        return self._heartbeat(self._id(call, "worker"), "worker", body)

    def _heartbeat(self, id: str, kind: str, body: wire.HeartbeatRequest) -> Struct:
        command = commands.Heartbeat(kind=kind, id=id, incarnation=body.incarnation)
        beat: replies.Beat = taken(self._shard.read(command))
        return wire.HeartbeatReply(
            status=beat.status,
            heartbeat_ms=self._shard.limits.heartbeat_ms,
            switch=render.switch(beat.switch),
        )

    def _registered(self, registered: replies.Registered, storages: list[str]) -> Struct:
        limits = self._shard.limits
        return wire.RegisterReply(
            id=registered.id,
            incarnation=registered.incarnation,
            heartbeat_ms=limits.heartbeat_ms,
            suspect_ms=limits.suspect_ms,
            expire_ms=limits.expire_ms,
            cluster=self._shard.cluster,
            epoch=self._shard.epoch,
            storage_table=[ref for storage in storages if (ref := self._storage_ref(storage)) is not None],
        )

    # ------------------------------------------------------------ deletion tasks

    async def take_tasks(self, call: Call, body: wire.TakeTasksRequest) -> Struct:
        worker = self._id(call, "worker")
        command = commands.TakeTasks(worker=worker, incarnation=body.incarnation, limit=body.limit)
        wait_ms = body.wait_ms
        if self.stopping.is_set() or self._polls >= self._settings.long_polls_max:
            wait_ms = 0
        if wait_ms:
            answer = await self._poll(call.request, command, wait_ms)
        else:
            answer = self._shard.read(command)
        tasks: replies.Tasks = taken(answer)
        known = {task.storage: self._storage_ref(task.storage) for task in tasks.tasks}
        return wire.TakeTasksReply(
            tasks=[
                render.task(task, storage, call.as_msgpack)
                for task in tasks.tasks
                if (storage := known[task.storage]) is not None
            ],
            cluster=self._shard.cluster,
        )

    async def _poll(self, request: HttpRequest, command: commands.TakeTasks, wait_ms: int) -> Any:
        """Wait for tasks, but neither past the service's stop nor for a worker that hung up."""
        request.wait_ms = wait_ms
        gone = asyncio.Event()
        request.on_gone = gone.set
        self._polls += 1
        work = asyncio.ensure_future(self._shard.take_tasks(command, wait_ms))
        ends = [asyncio.ensure_future(event.wait()) for event in (self.stopping, gone)]
        try:
            await asyncio.wait([work, *ends], return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else replies.Tasks(tasks=[])
        finally:
            self._polls -= 1
            request.on_gone = None
            for task in (work, *ends):
                task.cancel()
            await asyncio.gather(work, *ends, return_exceptions=True)

    async def confirm_task(self, call: Call, body: wire.ConfirmTaskRequest) -> Struct:
        worker = self._id(call, "worker")
        task = name(call.segments[5], "task")
        confirmed: replies.Confirmed = taken(
            await self._shard.submit(convert.confirm_task(worker, task, body, self._shard.limits))
        )
        return wire.ConfirmTaskReply(gone=confirmed.gone, again=confirmed.again)

    def unknown_places(self, call: Call, body: wire.UnknownRequest) -> Struct:
        command = convert.unknown_places(self._id(call, "worker"), body, self._shard.limits)
        found: replies.UnknownPlaces = taken(self._shard.read(command))
        return wire.UnknownReply(unknown=render.flags(found.unknown, call.as_msgpack))

    # ------------------------------------------------------------ helpers

    @staticmethod
    def _id(call: Call, field: str) -> str:
        return name(call.segments[3], field)

    def _instance(self, instance: str) -> InstanceInfo:
        info: InstanceInfo | None = self._shard.instance(instance)
        if info is None:
            name(instance, "instance")
            raise ApiError("instance_unknown", "no instance of this name is registered", "instance")
        return info

    def _part_refs(self, instance: str, info: InstanceInfo, group: str) -> list[wire.PartRef]:
        key = (instance, group)
        parts = info.groups[group].parts
        known = self._parts.get(key)
        if known is not None and known[0] is parts:
            return known[1]
        refs = [wire.PartRef(name=part.name, bytes=part.bytes) for part in parts]
        if len(self._parts) >= 4096:
            self._parts.clear()
        self._parts[key] = (parts, refs)
        return refs

    def _located(
        self, instance: str, info: InstanceInfo, group: str, located: replies.Located | None, as_msgpack: bool
    ) -> render.Places:
        parts = self._part_refs(instance, info, group) if group else []
        if located is None:
            empty: bytes | list[int] = b"" if as_msgpack else []
            return render.Places(empty, empty, empty, empty, [], parts)
        return render.places(
            self._shard,
            parts,
            located.locations,
            located.generations,
            located.storages,
            located.checksums,
            as_msgpack,
        )

    async def _with_uris(
        self,
        reply: wire.LookupReply | wire.StartWriteReply,
        found: render.Places,
        state: render.Places | None,
    ) -> Struct:
        rows = self._settings.uri_rows_per_slice
        reply.uris = await render.uris(found, self._shard.cluster, rows)
        if state is not None and isinstance(reply, wire.LookupReply) and reply.state is not None:
            reply.state.uris = await render.uris(state, self._shard.cluster, rows)
        return reply

    def _storage_ref(self, storage: str) -> wire.StorageRef | None:
        view: Any = self._shard.describe_one("storages", storage)
        if view is None:
            return None
        return wire.StorageRef(name=storage, kind=view.kind, options=dict(view.options))

    def _instance_storages(self, instance: str | None) -> list[str]:
        """Names of the storages that blocks of an instance may be in."""
        view: Any = self._shard.describe_one("instances", instance) if instance else None
        group: Any = None if view is None else self._shard.describe_one("groups", view.group)
        return [] if group is None else list(group.storages)
