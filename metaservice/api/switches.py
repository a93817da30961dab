"""The switch of an instance, told to engines as soon as it changes."""

from msgspec import Struct

from metaservice.core.model import SwitchMode
from metaservice.wire.switches import WatchSwitchReply, WatchSwitchRequest

from . import render
from .call import Call, Table
from .errors import taken
from .polls import LongPolls
from .routing import Routing


class SwitchHandlers:
    """Watching switches. The leader of the instance's shard answers: it alone knows the newest."""

    def __init__(self, routing: Routing, polls: LongPolls) -> None:
        self._routing = routing
        self._polls = polls

    def table(self) -> Table:
        """The route of switches that engines watch."""
        path = "/v1/instances/{instance}/switch"
        yield "GET", path, WatchSwitchRequest, WatchSwitchReply, self.watch_switch

    async def watch_switch(self, call: Call, body: WatchSwitchRequest) -> Struct:
        instance = call.segments[3]
        shard, _ = self._routing.instance(call, instance)
        known = SwitchMode[body.known] if body.known else None
        wait_ms = self._polls.granted_ms(body.wait_ms)
        held = None
        if wait_ms:
            watching = shard.watch_switch(instance, known, wait_ms)
            held = await self._polls.until(call.request, watching, wait_ms)
        if held is None:  # nothing was waited for, or the wait was cut short, or all is normal: as it is now
            held = await shard.watch_switch(instance, known, 0)
        switch = render.switch(taken(held))
        mode = SwitchMode.normal.name if switch is None else switch.mode
        return WatchSwitchReply(mode=mode, switch=switch)
