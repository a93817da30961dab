"""Read leases over the wire: a request may name many, and they may be of several shards."""

from typing import Any

import msgspec
from msgspec import Struct

from metaservice.core import commands, replies
from metaservice.core.model import Limits
from metaservice.telemetry.metrics import Metrics
from metaservice.wire import schemas as wire

from . import convert, render
from .call import Call, Table
from .errors import taken
from .forward import Forwarder, nonsense
from .names import name
from .routing import Routing

_reply = msgspec.msgpack.Decoder(wire.LeaseReply)


class LeaseHandlers:
    """Renewing and releasing read leases."""

    def __init__(self, routing: Routing, forwarder: Forwarder, metrics: Metrics) -> None:
        self._routing = routing
        self._forwarder = forwarder
        self._metrics = metrics
        self._limits: Limits = routing.replica.limits

    def table(self) -> Table:
        """The routes of leases."""
        lease = "/v1/leases/{lease}"
        yield "POST", f"{lease}/renew", wire.LeaseRenewRequest, wire.LeaseReply, self.renew
        yield "POST", f"{lease}/release", wire.LeaseReleaseRequest, wire.LeaseReply, self.release

    def renew(self, call: Call, body: wire.LeaseRenewRequest) -> Any:
        command = convert.renew_leases(name(call.segments[3], "lease"), body, self._limits)
        return self._answered(call, command, "renew", body.ttl_ms)

    def release(self, call: Call, body: wire.LeaseReleaseRequest) -> Any:
        command = convert.release_leases(name(call.segments[3], "lease"), body, self._limits)
        return self._answered(call, command, "release", 0)

    def _answered(
        self, call: Call, command: commands.RenewLeases | commands.ReleaseLeases, verb: str, ttl_ms: int
    ) -> Any:
        leases = command.leases
        first = self._routing.lease(leases[0])
        if len(leases) > 1:
            rows_of: dict[int, list[int]] = {}
            for row, lease in enumerate(leases):
                rows_of.setdefault(self._routing.lease(lease), []).append(row)
            if len(rows_of) > 1:
                return self._over_shards(call, leases, rows_of, verb, ttl_ms)
        call.shard = first
        reply: replies.LeasesAnswered = taken(self._routing.shards[first].read(command))
        self._metrics.leases(reply.outcomes)
        return render.leases(reply, call.as_msgpack)

    async def _over_shards(
        self, call: Call, leases: tuple[str, ...], rows_of: dict[int, list[int]], verb: str, ttl_ms: int
    ) -> Struct:
        """Each shard's leader is asked for its own leases, one after another. When one cannot be asked
        the whole call fails, and may be repeated: renewed leases can be renewed again, released ones stay
        released.
        """
        outcomes = bytearray(len(leases))
        changed = [0] * len(leases)
        merged = wire.LeaseReply(leases=list(leases), outcomes=b"", changed=b"")
        for shard, rows in rows_of.items():
            named = tuple(leases[row] for row in rows)
            if self._routing.replica.leads(shard):
                told = self._here(shard, named, verb, ttl_ms)
            else:
                told = await self._there(call, shard, named, verb, ttl_ms)
            try:
                columns = zip(rows, told.outcomes, render.unpacked("I", told.changed), strict=True)
                for row, outcome, count in columns:
                    outcomes[row] = wire.LeaseOutcome(outcome)
                    changed[row] = count
            except (TypeError, ValueError):
                raise nonsense(shard) from None
            merged.ttl_ms = told.ttl_ms
            merged.switch = merged.switch or told.switch
        self._metrics.leases(bytes(outcomes))
        merged.outcomes = render.codes(wire.LeaseOutcome, bytes(outcomes), call.as_msgpack)
        merged.changed = render.numbers("I", changed) if call.as_msgpack else changed
        return merged

    def _here(self, shard: int, named: tuple[str, ...], verb: str, ttl_ms: int) -> wire.LeaseReply:
        command: commands.Command = (
            commands.RenewLeases(leases=named, ttl_ms=ttl_ms)
            if verb == "renew"
            else commands.ReleaseLeases(leases=named)
        )
        return render.leases(taken(self._routing.shards[shard].read(command)), True)

    async def _there(
        self, call: Call, shard: int, named: tuple[str, ...], verb: str, ttl_ms: int
    ) -> wire.LeaseReply:
        body: Struct = (
            wire.LeaseRenewRequest(ttl_ms=ttl_ms, also=list(named[1:]))
            if verb == "renew"
            else wire.LeaseReleaseRequest(also=list(named[1:]))
        )
        answer = await self._forwarder.on_behalf(
            call.request, shard, f"/v1/leases/{named[0]}/{verb}", msgspec.msgpack.encode(body)
        )
        try:
            return _reply.decode(answer)
        except msgspec.MsgspecError:
            raise nonsense(shard) from None
