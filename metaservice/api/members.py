"""Engines and workers over the wire: registrations and heartbeats. The catalogue's leader answers all of
it.
"""

from typing import Any

from msgspec import Struct

from metaservice.core import commands, replies
from metaservice.wire import schemas_members as wire
from metaservice.wire.schemas import StorageRef

from . import convert, render
from .call import Call, Table
from .errors import taken
from .names import name
from .port import ShardPort
from .routing import Routing


class MemberHandlers:
    """Registrations and heartbeats."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._replica = routing.replica
        self._limits = routing.replica.limits

    def table(self) -> Table:
        """The routes of registrations and heartbeats."""
        engine, worker = "/v1/engines/{engine}", "/v1/workers/{worker}"
        yield "PUT", engine, wire.RegisterEngineRequest, wire.RegisterReply, self.register_engine
        yield "PUT", worker, wire.RegisterWorkerRequest, wire.RegisterReply, self.register_worker
        beat = (wire.HeartbeatRequest, wire.HeartbeatReply)
        yield "POST", f"{engine}/heartbeat", *beat, self.heartbeat_engine
        yield "POST", f"{worker}/heartbeat", *beat, self.heartbeat_worker

    async def register_engine(self, call: Call, body: wire.RegisterEngineRequest) -> Struct:
        engine = name(call.segments[3], "engine")
        command = convert.register_engine(engine, body)
        registered: replies.Registered = taken(await self._routing.registry(call).submit(command))
        return self._registered(registered, self._instance_storages(body.instance))

    async def register_worker(self, call: Call, body: wire.RegisterWorkerRequest) -> Struct:
        worker = name(call.segments[3], "worker")
        command = commands.RegisterWorker(
            worker=worker, incarnation=body.incarnation, storages=tuple(body.storages)
        )
        registered: replies.Registered = taken(await self._routing.registry(call).submit(command))
        return self._registered(registered, body.storages)

    def heartbeat_engine(self, call: Call, body: wire.HeartbeatRequest) -> Struct:
        return self._heartbeat(call, "engine", body)

    def heartbeat_worker(self, call: Call, body: wire.HeartbeatRequest) -> Struct:
        return self._heartbeat(call, "worker", body)

    def _heartbeat(self, call: Call, kind: str, body: wire.HeartbeatRequest) -> Struct:
        command = commands.Heartbeat(kind=kind, id=name(call.segments[3], kind), incarnation=body.incarnation)
        beat: replies.Beat = taken(self._routing.registry(call).read(command))
        return wire.HeartbeatReply(
            status=beat.status,
            heartbeat_ms=self._limits.heartbeat_ms,
            switch=render.switch(beat.switch),
        )

    def _registered(self, registered: replies.Registered, storages: list[str]) -> Struct:
        limits = self._limits
        return wire.RegisterReply(
            id=registered.id,
            incarnation=registered.incarnation,
            heartbeat_ms=limits.heartbeat_ms,
            suspect_ms=limits.suspect_ms,
            expire_ms=limits.expire_ms,
            cluster=self._replica.cluster,
            epoch=self._routing.catalogue.epoch,
            storage_table=[
                ref
                for storage in storages
                if (ref := storage_ref(self._routing.catalogue, storage)) is not None
            ],
        )

    def _instance_storages(self, instance: str | None) -> list[str]:
        """Names of the storages that blocks of an instance may be in."""
        catalogue = self._routing.catalogue
        view: Any = catalogue.describe_one("instances", instance) if instance else None
        group: Any = None if view is None else catalogue.describe_one("groups", view.group)
        return [] if group is None else list(group.storages)


def storage_ref(shard: ShardPort, storage: str, pool: str | None = None) -> StorageRef | None:
    """What a worker or writer needs of a registered storage; None: the shard knows none of this name.
    `pool`: of a volatile storage, when another than the current one is meant.
    """
    view: Any = shard.describe_one("storages", storage)
    if view is None:
        return None
    options = dict(view.options)
    if view.volatile:
        options["pool"] = view.pool if pool is None else pool
    return StorageRef(name=storage, kind=view.kind, options=options)
