"""What the process says of itself to people: the answer to `GET /v1/events`."""

from collections.abc import Iterable

import msgspec

from metaservice.wire.schemas_events import AttachmentView, EngineView, EventsReply, EventsRequest, StreamView

from .attach import Attachment
from .attach.names import worker_number
from .channel import Channel
from .errors import PublisherUnavailable
from .feed import EngineUp
from .ingest.ingest import Ingest
from .streams import Streams
from .view import View


def status(
    view: View, streams: Streams, ingest: Ingest, attachments: Iterable[Attachment], body: bytes
) -> bytes:
    """An EventsReply for the EventsRequest in `body`, both msgpack. Raises PublisherUnavailable when it is
    none."""
    try:
        wanted = msgspec.msgpack.decode(body, type=EventsRequest).instance
    except msgspec.DecodeError as error:
        raise PublisherUnavailable("invalid_field", str(error)) from None
    now_s = view.now_s()
    told = [_stream(view, streams, channel, now_s) for _, channel in sorted(streams.channels.items())]
    tied: list[AttachmentView] = []
    for attachment in attachments:
        told += attachment.streams()
        tied.append(attachment.status())
    engines = [_engine(ingest, up) for _, up in sorted(streams.engines.items())]
    reply = EventsReply(
        streams=[one for one in told if wanted in (None, one.instance)],
        engines=[one for one in engines if wanted in (None, one.instance)],
        attachments=tied,
    )
    return msgspec.msgpack.encode(reply)


def _stream(view: View, streams: Streams, channel: Channel, now_s: float) -> StreamView:
    stream, shard = channel.plan.stream, channel.plan.shard
    endpoint, replay = view.endpoints(channel.channel)
    return StreamView(
        channel=channel.channel,
        shard=shard,
        kind="shared",
        instance=stream.instance,
        model=stream.model,
        node=stream.node,
        rank=stream.rank,
        topic=stream.topic.decode(errors="replace"),
        endpoint=endpoint,
        replay=replay,
        live=channel.publishing and view.may_send(shard),
        number=max(view.number(shard), 0),
        block_size_tokens=stream.block_size_tokens,
        announced=streams.told_blocks(channel),
        subscribers=channel.subscribers,
        lag_ms=int(streams.lag_s(channel, now_s) * 1000),
    )


def _engine(ingest: Ingest, up: EngineUp) -> EngineView:
    state, staleness_ms, blocks = ingest.engine_view(up.engine)
    return EngineView(
        engine=up.engine,
        incarnation=up.incarnation,
        instance=up.instance,
        rank=up.rank,
        node=up.node,
        address=up.address,
        worker_id=worker_number(up),
        events=up.events,
        replay=up.replay,
        dialect=up.dialect,
        pool_channel=up.pool_channel,
        local_channel=up.local_channel,
        state=state,
        staleness_ms=staleness_ms,
        blocks=blocks,
    )
