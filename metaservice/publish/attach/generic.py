"""`generic`: one stream in another dialect at a port of its own, for consumers that read neither vLLM's maps
nor ask for replays.

AIBrix reads arrays, Dynamo's router beside SGLang reads object keys (`mooncake`). Whoever joins is told
everything again: there is no other way to it for those that cannot ask.
"""

from collections import Counter

from msgspec.structs import replace

from metaservice.core.windows import Window
from metaservice.publish import emitters
from metaservice.publish.attach.names import metric
from metaservice.publish.attach.rows import Row
from metaservice.publish.channel import Channel, ChannelPlan
from metaservice.publish.emitters.port import Stream
from metaservice.publish.plan import POOL, topic
from metaservice.publish.sockets import address
from metaservice.publish.view import View
from metaservice.wire.schemas_events import AttachmentView, StreamView

AGAIN_S = 5.0
"""Everything is told again no more often."""


class Generic:
    """Options: `instance`, `node` ("": what every engine reaches), `rank`; `port`; `emitter` (`vllm`, `array`
    or `mooncake`; its options parted by `;`)."""

    def __init__(self, row: Row, view: View) -> None:
        self._row = row
        self._view = view
        self._instance = row.text("instance")
        self._config = replace(view.config, port_base=row.number("port"), channels_max=1)
        self._emitter = emitters.make(row.text("emitter").replace(";", ","))
        self._leads: set[int] = set()
        self._channel: Channel | None = None
        self._joined = False
        self._told_s = -AGAIN_S
        self._counts: Counter[str] = Counter(batches=0, restatements=0)

    @property
    def name(self) -> str:
        """Kind, port and dialect."""
        return f"{self._row.kind} {self._row.text('port')} {self._emitter.name}"

    async def start(self) -> None:
        """Opens its socket once this replica leads."""

    async def close(self) -> None:
        """Close it."""
        if self._channel is not None:
            self._channel.close()

    def window(self, shard: int, window: Window) -> None:
        """Say it in the other dialect."""
        self._settle()
        channel = self._channel
        if channel is None or shard != channel.plan.shard or not channel.publishing:
            return
        events = [event for one in channel.plan.streams for event in self._emitter.events(one, window)]
        payload = self._emitter.payload(channel.plan.stream, events, window.now_ms)
        if self._view.may_send(shard):
            channel.send(window.number, payload, self._view.now_s())
            self._counts["batches"] += 1
        if self._joined and self._view.now_s() - self._told_s >= AGAIN_S:
            self._joined, self._told_s = False, self._view.now_s()
            self._counts["restatements"] += 1
            self._view.restate(shard, self._instance, "joined")

    def leads(self, shard: int, leads: bool) -> None:
        """It is published by who leads."""
        (self._leads.add if leads else self._leads.discard)(shard)
        self._settle()

    def changed(self) -> None:
        """The instance may have come, or be another one."""
        self._settle()

    def status(self) -> AttachmentView:
        """`engines`: subscribers, of which nobody knows what they are."""
        channel = self._channel
        detail = f"there is no instance {self._instance}" if channel is None else channel.trouble
        return AttachmentView(
            name=self.name,
            kind=self._row.kind,
            target=address(self._config.public_host, self._config.port_base),
            ok=not detail,
            detail=detail or ("" if self._leads else "another replica leads, and publishes"),
            engines=0 if channel is None else channel.subscribers,
        )

    def streams(self) -> list[StreamView]:
        """None: it is no stream of ours that anybody may read."""
        return []

    def stats(self) -> dict[str, float]:
        """Counters."""
        counts = {f"{name}_total": count for name, count in self._counts.items()}
        counts["invalid_total"] = sum(self._emitter.invalid.values())
        counts["subscribers"] = 0 if self._channel is None else self._channel.subscribers
        return {
            metric(f"attachment_{name}", attachment=self.name): float(count) for name, count in counts.items()
        }

    def _settle(self) -> None:
        """The socket is open while this replica leads the instance's shard."""
        plan = self._plan()
        if plan is not None and (self._channel is None or self._channel.plan != plan):
            if self._channel is not None:
                self._channel.close()
            view = self._view
            self._channel = Channel(
                plan, self._config, view.context, view.curve, lambda _: self._join(), lambda *_: None
            )
        if self._channel is not None:
            self._channel.settle(plan is not None and plan.shard in self._leads, False)

    def _plan(self) -> ChannelPlan | None:
        instance = self._view.instances.get(self._instance)
        if instance is None:
            return None
        node, rank = self._row.text("node"), self._row.number("rank")
        streams = [
            Stream(0, one.instance, instance.model, node, rank, one.block_size_tokens, one.key_length,
                   one.hash_of, one.lora, topic(node or POOL, instance.model))
            for one in self._view.instances.values()
            if self._instance in (one.instance, one.base)
        ]  # fmt: skip
        streams.sort(key=lambda one: (one.instance != self._instance, one.instance))
        return ChannelPlan(instance.shard, instance.tenant, tuple(streams))

    def _join(self) -> None:
        self._joined = True
