"""`ucm-meta events attach dynamo-indexer`: what the attachment of that kind does all the time, done once."""

from collections.abc import Callable, Sequence

import httpx

from metaservice.client import Client, ClientConfig
from metaservice.publish.attach.indexer_plan import (
    Books,
    Call,
    Judged,
    Listed,
    Registration,
    Removal,
    Wish,
    listed_workers,
    plan,
)
from metaservice.publish.attach.names import DEFAULT_GROUP
from metaservice.publish.settings import CHANNELS_MAX
from metaservice.wire.schemas_events import EngineView, EventsReply, StreamView

DONE = (200, 201)
Say = Callable[[str], None]


class IndexerFailed(Exception):
    """The indexer does not answer, or not as one."""


def register(
    url: str,
    replies: Sequence[EventsReply],
    group_of: Callable[[str], str],
    say: Say,
    *,
    spare_rank: int,
    timeout_ms: int,
    remove: bool,
) -> int:
    """Register the streams of all engines at the indexer, or take all of ours away. Returns how many calls
    were refused, each of which is said. Raises IndexerFailed."""
    wishes = [] if remove else list(_wishes(replies, group_of, spare_rank))
    ranks = {
        stream.channel: stream.rank for reply in replies for stream in reply.streams if not stream.engine
    }

    def judge(_: int, rank: int, row: Listed) -> Judged | None:
        channel = rank - spare_rank
        if channel in ranks:
            return Judged((ranks[channel],), False)
        unknown = remove and 0 <= channel < CHANNELS_MAX
        return Judged(tuple(real for real in row.ranks if real < spare_rank), False) if unknown else None

    refused = 0
    try:
        with httpx.Client(base_url=url, timeout=timeout_ms / 1000, trust_env=False) as http:
            answer = http.get("/workers")
            answer.raise_for_status()
            listed = listed_workers(answer.json())
            calls = plan(wishes, listed, judge, Books(), engine_streams=False)
            for call in calls:
                refused += not _make(http, call, say)
    except (httpx.HTTPError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise IndexerFailed(f"{url} does not answer as Dynamo's indexer does: {error}") from None
    if not calls:
        say("nothing to do: all is as it should be")
    return refused


def groups(url: str, timeout_ms: int) -> Callable[[str], str]:
    """The routing group at the indexer of each instance, as the service at `url` has it."""
    known: dict[str, str] = {}

    def group_of(instance: str) -> str:
        if instance not in known:
            config = ClientConfig(url=url, raise_errors=True, admin_timeout_ms=timeout_ms)
            with Client(config) as client:
                told = client.get_json(f"/v1/instances/{instance}").get("publication") or {}
            group = told.get("routing_group", "")
            known[instance] = DEFAULT_GROUP if group in ("", told.get("model", "")) else group
        return known[instance]

    return group_of


def _wishes(
    replies: Sequence[EventsReply], group_of: Callable[[str], str], spare_rank: int
) -> Sequence[Wish]:
    streams: dict[int, StreamView] = {}
    engines: dict[str, EngineView] = {}
    for reply in replies:
        for stream in reply.streams:
            if not stream.engine and (stream.live or stream.channel not in streams):
                streams[stream.channel] = stream
        engines |= {engine.engine: engine for engine in reply.engines}
    wishes = []
    for engine in engines.values():
        channels = [channel for channel in (engine.pool_channel, engine.local_channel) if channel in streams]
        ours = tuple(
            Registration(
                engine.worker_id,
                spare_rank + channel,
                streams[channel].endpoint,
                streams[channel].replay,
                streams[channel].model,
                group_of(engine.instance),
                streams[channel].block_size_tokens,
            )
            for channel in channels
        )
        wishes.append(Wish(engine.worker_id, engine.rank, engine.incarnation, None, ours))
    return wishes


def _make(http: httpx.Client, call: Call, say: Say) -> bool:
    what = "unregister" if isinstance(call, Removal) else "register"
    answer = http.post(f"/{what}", json=call.body())
    fine = answer.status_code in DONE
    endpoint = f" at {call.endpoint}" if isinstance(call, Registration) else ""
    result = "" if fine else f": {answer.status_code} {answer.text[:300]}"
    say(f"{what} worker {call.worker} rank {call.rank}{endpoint}{result}")
    return fine
