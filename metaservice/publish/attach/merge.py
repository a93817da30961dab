"""`merge`: for some engines one stream each, of their own events and the pool's (`merged`).

For Dynamo's select_service, and for the relay of its frontend: both take exactly one source a worker.
"""

from metaservice.core.windows import Window
from metaservice.publish.announced import Announced
from metaservice.publish.attach.merged import Merged, with_ports
from metaservice.publish.attach.names import metric
from metaservice.publish.attach.rows import Row
from metaservice.publish.channel import Channel
from metaservice.publish.ingest.follow import Inbox
from metaservice.publish.ingest.limits import IngestLimits
from metaservice.publish.replay import Replays
from metaservice.publish.segments import Segment, Segments
from metaservice.publish.sockets import address
from metaservice.publish.spelling import Speller
from metaservice.publish.view import View
from metaservice.wire.schemas_events import AttachmentView, StreamView


class Merge:
    """Options: `engines` (their ids, parted by `;`); `port_base` (engine number n of them is published at it
    + 2n, its replays are asked for at the port after); `ring` (batches of each that are kept)."""

    def __init__(self, row: Row, view: View) -> None:
        self._row = row
        self._view = view
        engines = row.several("engines")
        self._config = with_ports(view.config, row.number("port_base"), len(engines))
        self._leads: set[int] = set()
        self._segments = Segments(Speller(view.emitter, Announced()), view.now_s)
        self._replays = Replays(self, view.now_s)
        inbox = Inbox(IngestLimits())
        self._merged = [
            Merged(index, engine, self._config, view, inbox, row.number("ring"), self._replays)
            for index, engine in enumerate(engines)
        ]

    @property
    def name(self) -> str:
        """Kind and first port."""
        return f"{self._row.kind} {self._row.text('port_base')}"

    async def start(self) -> None:
        """Begin to answer replays."""
        self._replays.start()

    async def close(self) -> None:
        """End."""
        await self._replays.close()
        for one in self._merged:
            await one.close()

    def window(self, shard: int, window: Window) -> None:
        """Each stream of the shard is told what the pool's say."""
        for one in self._merged:
            if one.shard == shard:
                up = one.up
                channels = () if up is None else (up.pool_channel, up.local_channel)
                told = [channel for channel in channels if channel in self._view.streams]
                events = [event for channel in told for event in self._view.events(channel, window)]
                one.window(window.now_ms, events)
        self._settle()

    def leads(self, shard: int, leads: bool) -> None:
        """Merged streams are published by who leads the engine's shard."""
        (self._leads.add if leads else self._leads.discard)(shard)
        self._settle()

    def changed(self) -> None:
        """Engines that came or went."""
        self._settle()

    def status(self) -> AttachmentView:
        """`engines`: those that are there."""
        faults = [f"{one.engine}: {fault}" for one in self._merged if (fault := one.trouble)]
        missing = [one.engine for one in self._merged if one.up is None] if self._leads else []
        if missing:
            faults.append(f"no engine {', '.join(missing)}")
        return AttachmentView(
            name=self.name,
            kind=self._row.kind,
            target=", ".join(one.engine for one in self._merged),
            ok=not faults,
            detail="; ".join(faults) or ("" if self._leads else "another replica leads, and publishes"),
            engines=len(self._merged) - len(missing),
        )

    def streams(self) -> list[StreamView]:
        """The merged streams of engines that are, or were, here."""
        return [self._shown(one, one.channel) for one in self._merged if one.channel is not None]

    def stats(self) -> dict[str, float]:
        """Counters by engine."""
        stats: dict[str, float] = {}
        for one in self._merged:
            counts = {f"{name}_total": count for name, count in one.counts.items()}
            subscribers = one.channel.subscribers if one.channel is not None else 0
            counts |= {"invalid_total": one.bad.total(), "subscribers": subscribers}
            stats |= {
                metric(f"attachment_{name}", attachment=self.name, engine=one.engine): float(count)
                for name, count in counts.items()
            }
        return stats

    # ------------------------------------------------------------ as replays need it

    @property
    def segments(self) -> Segments:
        """Only steps segments, which know themselves what is in them."""
        return self._segments

    def reach(self, shard: int) -> tuple[int, int]:
        """Of the stream with this index."""
        return self._merged[shard].reach

    def stands(self, shard: int) -> bool:
        """Whether it is published here."""
        return self._merged[shard].reach[1] >= 0

    def batch_of(self, channel: Channel, number: int) -> bytes | None:
        """A batch that is kept."""
        return self._merged[channel.channel].batch_of(number)

    def segment(self, channel: Channel, start: int) -> Segment:
        """What stands, told before what is kept."""
        return self._merged[channel.channel].segment(start)

    # ------------------------------------------------------------ inside

    def _settle(self) -> None:
        for one in self._merged:
            up = self._view.engines.get(one.engine)
            instance = None if up is None else self._view.instances.get(up.instance)
            shard = one.shard if up is None else up.shard
            one.settle(up, instance, shard in self._leads)

    def _shown(self, one: Merged, channel: Channel) -> StreamView:
        stream, up = channel.plan.stream, one.up
        host, port = self._config.public_host, self._config.port(one.index)
        return StreamView(
            channel=up.pool_channel if up is not None else -1,
            shard=one.shard,
            kind="merged",
            instance=stream.instance,
            model=stream.model,
            node="",
            rank=stream.rank,
            topic=stream.topic.decode(),
            endpoint=address(host, port),
            replay=address(host, port + 1),
            live=channel.publishing and self._view.may_send(one.shard),
            number=max(one.reach[1], 0),
            block_size_tokens=stream.block_size_tokens,
            announced=0,
            subscribers=channel.subscribers,
            engine=one.engine,
        )
