"""What each hot route about blocks does: one command made from the request, one question to the shard,
one reply made of its answer.
"""

import asyncio
from typing import Any

from msgspec import Struct

from metaservice.core import replies
from metaservice.telemetry.metrics import Metrics
from metaservice.wire import schemas as wire

from . import convert, render
from .cache_events import CacheEventHandlers
from .call import Call, Reply, Table
from .errors import taken
from .events_desk import EventsDesk
from .forward import Forwarder
from .leases import LeaseHandlers
from .members import MemberHandlers
from .polls import LongPolls
from .port import InstanceInfo, ShardPort
from .routing import STALENESS, Routing, look, young_enough
from .settings import ApiSettings
from .switches import SwitchHandlers
from .tasks import TaskHandlers


class Handlers:
    """The hot routes' work over all shards. A handler returns a reply, a coroutine of one, or raises;
    NotLeader when another replica has to answer.
    """

    def __init__(
        self,
        routing: Routing,
        forwarder: Forwarder,
        metrics: Metrics,
        settings: ApiSettings,
        desk: EventsDesk,
    ) -> None:
        self._routing = routing
        self._replica = routing.replica
        self._limits = routing.replica.limits
        self._metrics = metrics
        self._settings = settings
        self._parts: dict[tuple[str, str], tuple[Any, list[wire.PartRef]]] = {}
        self.stopping: asyncio.Event = forwarder.stopping
        """Set when the service stops: long polls are answered at once, with nothing."""
        self.leases = LeaseHandlers(routing, forwarder, metrics)
        self.members = MemberHandlers(routing)
        polls = LongPolls(self.stopping, settings)
        self.switches = SwitchHandlers(routing, polls)
        self.tasks = TaskHandlers(routing, polls)
        self.cache_events = CacheEventHandlers(routing, desk, settings)

    def table(self) -> Table:
        """All hot routes."""
        instance, session = "/v1/instances/{instance}", "/v1/writes/{session}"
        yield "POST", f"{instance}/lookup", wire.LookupRequest, wire.LookupReply, self.lookup
        yield "POST", f"{instance}/writes", wire.StartWriteRequest, wire.StartWriteReply, self.start_write
        yield "POST", f"{instance}/remove", wire.RemoveRequest, wire.RemoveReply, self.remove
        yield "POST", f"{session}/finish", wire.FinishRequest, wire.FinishReply, self.finish
        yield "POST", f"{session}/renew", wire.RenewWriteRequest, wire.RenewWriteReply, self.renew_write
        yield "POST", f"{session}/abort", wire.AbortRequest, wire.AbortReply, self.abort
        for some in (self.leases, self.switches, self.members, self.tasks, self.cache_events):
            yield from some.table()

    def lookup(self, call: Call, body: wire.LookupRequest) -> Reply:
        instance = call.segments[3]
        shard, info = self._routing.instance(call, instance)
        command = convert.lookup(instance, info, body, self._limits)
        staleness_ms: int | None = None
        if body.staleness_ms_max is None or shard.ready:
            looked: replies.Looked = taken(shard.read(command))
        else:
            staleness_ms = young_enough(shard, body.staleness_ms_max, self._settings)
            looked = taken(look(shard, command))
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
        found = self._located(shard, instance, info, looked.group, looked.located, call.as_msgpack)
        cluster = self._replica.cluster
        epoch, seq, call.lines = self._routing.position(call)
        reply = render.looked(looked, found, call.as_msgpack, cluster, epoch, seq)
        if staleness_ms is not None:
            reply.applied_seq, reply.staleness_ms = seq, staleness_ms
            call.lines += b"%b: %d\r\n" % (STALENESS, staleness_ms)
        state = None
        if looked.state is not None:
            state = self._located(shard, instance, info, looked.state_group, looked.state, call.as_msgpack)
            reply.state = render.located(state, cluster)
        return reply if call.as_msgpack else self._with_uris(reply, found, state)

    async def start_write(self, call: Call, body: wire.StartWriteRequest) -> Struct:
        instance = call.segments[3]
        shard, info = self._routing.instance(call, instance)
        started: replies.Started = taken(
            await shard.submit(convert.start_write(instance, info, body, self._limits))
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
        found = self._located(shard, instance, info, started.group, written, call.as_msgpack, started.pools)
        reply = render.started(started, found, call.as_msgpack, self._replica.cluster, call.shard)
        return reply if call.as_msgpack else await self._with_uris(reply, found, None)

    async def finish(self, call: Call, body: wire.FinishRequest) -> Struct:
        shard, session = self._routing.session(call)
        finished: replies.Finished = taken(await shard.submit(convert.finish(session, body, self._limits)))
        self._metrics.finished(finished.status, finished.published)
        if call.span is not None:
            call.attributes.update(
                {"requested_blocks": len(finished.status), "published_blocks": finished.published}
            )
        return render.finished(finished, call.as_msgpack)

    async def renew_write(self, call: Call, body: wire.RenewWriteRequest) -> Struct:
        shard, session = self._routing.session(call)
        renewed: replies.Renewed = taken(await shard.submit(convert.renew_write(session, body)))
        return wire.RenewWriteReply(ttl_ms=renewed.ttl_ms)

    async def abort(self, call: Call, body: wire.AbortRequest) -> Struct:
        shard, session = self._routing.session(call)
        aborted: replies.Aborted = taken(await shard.submit(convert.abort(session, body)))
        self._metrics.aborted(aborted.freed)
        return wire.AbortReply(freed=aborted.freed)

    async def remove(self, call: Call, body: wire.RemoveRequest) -> Struct:
        instance = call.segments[3]
        shard, info = self._routing.instance(call, instance)
        removed: replies.Removed = taken(
            await shard.submit(convert.remove(instance, info, body, self._limits))
        )
        self._metrics.removed(removed.outcomes)
        return render.removed(removed, call.as_msgpack)

    # ------------------------------------------------------------ helpers

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
        self,
        shard: ShardPort,
        instance: str,
        info: InstanceInfo,
        group: str,
        located: replies.Located | None,
        as_msgpack: bool,
        pools: dict[int, str] | None = None,
    ) -> render.Places:
        parts = self._part_refs(instance, info, group) if group else []
        if located is None:
            empty: bytes | list[int] = b"" if as_msgpack else []
            return render.Places(empty, empty, empty, empty, [], parts)
        return render.places(
            shard,
            parts,
            located.locations,
            located.generations,
            located.storages,
            located.checksums,
            as_msgpack,
            pools,
        )

    async def _with_uris(
        self,
        reply: wire.LookupReply | wire.StartWriteReply,
        found: render.Places,
        state: render.Places | None,
    ) -> Struct:
        rows, cluster = self._settings.uri_rows_per_slice, self._replica.cluster
        reply.uris = await render.uris(found, cluster, rows)
        if state is not None and isinstance(reply, wire.LookupReply) and reply.state is not None:
            reply.state.uris = await render.uris(state, cluster, rows)
        return reply
