"""What routers ask and engines report: answered by every replica from what it has, so by followers too."""

from msgspec import Struct

from metaservice.core import commands, replies, views
from metaservice.wire import schemas_events as wire

from . import convert_events as convert
from .call import Call, Table
from .errors import ApiError, taken
from .events_desk import EventsDesk
from .names import name
from .port import ShardPort
from .routing import STALENESS, Routing, look, young_enough
from .settings import ApiSettings


class CacheEventHandlers:
    """Router queries, reports of engines, and telling routers again."""

    def __init__(self, routing: Routing, desk: EventsDesk, settings: ApiSettings) -> None:
        self._routing = routing
        self._desk = desk
        self._settings = settings
        self._limits = routing.replica.limits

    def table(self) -> Table:
        """The routes of cache events that are called all the time, or go to a shard's leader."""
        instance = "/v1/instances/{instance}"
        yield "POST", f"{instance}/route", wire.RouteRequest, wire.RouteReply, self.route
        yield "POST", f"{instance}/restate", wire.RestateRequest, wire.RestateReply, self.restate
        yield "POST", "/v1/engines/{engine}/cache", wire.ReportRequest, wire.ReportReply, self.report

    async def route(self, call: Call, body: wire.RouteRequest) -> Struct:
        instance = call.segments[3]
        shard, info = self._routing.instance(call, instance)
        ask = convert.route(instance, info, body, self._limits)
        if self._view(shard, instance).publication is None:
            raise ApiError(
                "not_published", "routers are told of this instance once it has a publication", "instance"
            )
        told = await self._desk.ask("route", ask, wire.RouteAnswer)
        staleness_ms = 0
        if not shard.ready:
            bound_ms = body.staleness_ms_max
            allowed_ms = self._settings.staleness_ms_max if bound_ms is None else bound_ms
            staleness_ms = young_enough(shard, allowed_ms, self._settings)
        keys = ask.keys or told.keys
        blocks = self._readable(shard, told.instance, keys) if keys else -1
        _, seq, call.lines = self._routing.position(call)
        if staleness_ms:
            call.lines += b"%b: %d\r\n" % (STALENESS, staleness_ms)
        return wire.RouteReply(
            asked=told.asked,
            block_size_tokens=told.block_size_tokens,
            engines=told.engines,
            pool=wire.PoolRoute(
                blocks=blocks, announced=told.announced, applied_seq=seq, staleness_ms=staleness_ms
            ),
        )

    @staticmethod
    def _readable(shard: ShardPort, instance: str, keys: list[bytes]) -> int:
        """How many of the first keys are readable. Nobody uses these blocks: a router only asks."""
        looked: replies.Looked = taken(look(shard, commands.Lookup(instance=instance, keys=keys)))
        return looked.hits

    async def restate(self, call: Call, body: wire.RestateRequest) -> Struct:
        instance = call.segments[3]
        shard, _ = self._routing.instance(call, instance)
        taken(await shard.submit(commands.Restate(instance=instance)))
        return wire.RestateReply(blocks=self._view(shard, instance).announced)

    async def report(self, call: Call, body: wire.ReportRequest) -> Struct:
        ask = convert.report(name(call.segments[3], "engine"), body)
        return await self._desk.ask("report", ask, wire.ReportReply)

    def _view(self, shard: ShardPort, instance: str) -> views.InstanceView:
        view = shard.describe_one("instances", instance)
        if not isinstance(view, views.InstanceView):
            raise self._routing.unknown(instance)
        return view
