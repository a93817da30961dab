"""All that is taken in from engines: their event streams, their reports, and who of them is alive."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import zmq
import zmq.asyncio

from metaservice.publish.errors import PublisherUnavailable
from metaservice.publish.feed import EngineDown, EngineUp, InstanceDown, InstanceUp
from metaservice.publish.holdings import Holdings, Member, Room
from metaservice.publish.route import Announced, Router

from .dialect import DIALECTS, VLLM, DialectReader
from .events import EngineEvents
from .follow import BadEndpoint, Inbox
from .limits import IngestLimits
from .reports import Reports
from .stream import EngineStream

_LOOK_MS = 1_000
_RETIRED_MAX = 4_096
_SOCKETS_PER_STREAM = 4
_SOCKETS_SPARE = 256
_COUNTED = (
    "stored",
    "removed",
    "cleared",
    "reports",
    "reports_refused",
    "reports_expired",
    "replays",
    "gaps",
    "gaps_lost",
    "restarts",
    "duplicates",
    "late",
)


class Ingest:
    """What this replica knows of engines' own caches. All calls are made on one loop, which it shares."""

    def __init__(
        self,
        announced: Announced,
        cleared: Callable[[str, str], None],
        say: Callable[[str, str], None],
        now_s: Callable[[], float],
        limits: IngestLimits | None = None,
        follow: bool = True,
    ) -> None:
        """`cleared(instance, engine)` is called when an engine emptied all its tiers: routers then forgot
        what they were told of the pool for it, too. `say(level, text)` is for the log. `follow`: whether
        engines' event streams are followed; reports are taken in any case."""
        self._limits = limits or IngestLimits()
        self._follow = follow
        self._cleared = cleared
        self._say = say
        self._now_s = now_s
        self._room = Room(
            self._limits.entries_max,
            self._limits.entries_per_engine_max,
            self._limits.orphans_per_engine_max,
        )
        self.holdings = Holdings(self._room)
        self.instances: dict[str, InstanceUp] = {}
        self._tally: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._closed: Counter[str] = Counter()
        """Counts of streams that are followed no more."""
        self._streams: dict[str, EngineStream] = {}
        self._since_s: dict[str, float] = {}
        self._retired: dict[tuple[str, str], None] = {}
        self._early: dict[str, EngineUp] = {}
        """Engines whose instance is not announced (yet)."""
        self._reports = Reports(self.holdings, self.instances, self._limits, self._tally, now_s)
        self._router = Router(self.holdings, self.instances, announced, now_s, self._limits.slice_blocks)
        self._inbox = Inbox(self._limits)
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS_PER_STREAM * self._limits.streams_max + _SOCKETS_SPARE)
        self._ending: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to look for engines that went silent."""
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Ends everything."""
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking
        for engine in list(self._streams):
            self._unfollow(engine)
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._context.destroy(linger=0)

    # ------------------------------------------------------------ who is there

    def instance_up(self, up: InstanceUp) -> None:
        """It is announced, or announced in another way: then its engines are followed from the beginning."""
        before = self.instances.get(up.instance)
        if before == up:
            return
        self.instances[up.instance] = up
        if before is not None:
            for member in self.holdings.of(up.instance):
                self._drop(member.up.engine)
                self._early[member.up.engine] = member.up
        for engine in [one for one in self._early.values() if one.instance == up.instance]:
            self.engine_up(engine)

    def instance_down(self, down: InstanceDown) -> None:
        """It is announced no more; nothing is remembered of its engines."""
        up = self.instances.get(down.instance)
        if up is None or up.shard != down.shard:
            return
        del self.instances[down.instance]
        for member in self.holdings.of(down.instance):
            self._drop(member.up.engine)
            self._early[member.up.engine] = member.up

    def engine_up(self, up: EngineUp) -> None:
        """It registered. Another incarnation or other endpoints: what was known of it is forgotten."""
        member = self.holdings.get(up.engine)
        if member is not None and member.up == up:
            return
        self._retired.pop((up.engine, up.incarnation), None)
        if member is not None:
            if member.up.incarnation != up.incarnation:
                self._retire(member.up)
            self._drop(up.engine)
        instance = self.instances.get(up.instance)
        self._early.pop(up.engine, None)
        if len(self.holdings) + len(self._early) >= self._limits.engines_max:
            self._bad["engines"] += 1
            return
        if instance is None:
            self._early[up.engine] = up
            return
        member = self.holdings.add(up, counted=up.dialect == VLLM)
        self._since_s[up.engine] = self._now_s()
        if up.events and self._follow:
            self._listen_to(member, instance)

    def _listen_to(self, member: Member, instance: InstanceUp) -> None:
        up = member.up
        if len(self._streams) >= self._limits.streams_max or up.dialect not in DIALECTS:
            self._bad["streams" if up.dialect in DIALECTS else "dialect"] += 1
            self._say("warning", f"events of engine {up.engine} are not followed (dialect {up.dialect!r})")
            return
        events = EngineEvents(member, instance, self._limits, self._tally, self._bad, self._cleared)
        reader = DialectReader(up.dialect, self._bad)
        try:
            self._streams[up.engine] = EngineStream(
                member, events, reader, self._inbox, self._context, self._bad, self._say, self._now_s
            )
        except BadEndpoint as error:
            self._bad["endpoint"] += 1
            self._say("warning", f"events of engine {up.engine} are not followed: {error}")

    def engine_down(self, down: EngineDown) -> None:
        """It is gone, and all that it held; nothing that its process still sends counts. A shard that it
        moved away from since says nothing about it."""
        early = self._early.get(down.engine)
        if early is not None and early.shard == down.shard:
            del self._early[down.engine]
        member = self.holdings.get(down.engine)
        if member is not None and member.up.shard == down.shard:
            self._retire(member.up)
            self._drop(down.engine)

    def forget(self, shard: int) -> None:
        """Everything of a shard, whose feed begins anew."""
        for member in self.holdings:
            if member.up.shard == shard:
                self._drop(member.up.engine)
        for engine in [one.engine for one in self._early.values() if one.shard == shard]:
            del self._early[engine]
        for name in [up.instance for up in self.instances.values() if up.shard == shard]:
            del self.instances[name]

    def _drop(self, engine: str) -> None:
        self._unfollow(engine)
        self._since_s.pop(engine, None)
        self._reports.forget(engine)
        self.holdings.drop(engine)

    def _unfollow(self, engine: str) -> None:
        stream = self._streams.pop(engine, None)
        if stream is None:
            return
        self._closed.update(_counts(stream))
        stream.stop()
        ending = asyncio.ensure_future(stream.stopped())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _retire(self, up: EngineUp) -> None:
        self._retired[up.engine, up.incarnation] = None
        if len(self._retired) > _RETIRED_MAX:
            del self._retired[next(iter(self._retired))]

    # ------------------------------------------------------------ what is asked

    async def report(self, body: bytes) -> bytes:
        """A ReportAsk, answered by a ReportReply. PublisherUnavailable when it is refused: `engine_unknown`,
        `reregister`, `incarnation_retired`, `invalid_field`."""
        try:
            return await self._reports.take(body)
        except PublisherUnavailable as refused:
            if refused.code in {"engine_unknown", "reregister"} and self._is_retired(body):
                raise PublisherUnavailable("incarnation_retired", "this incarnation is over") from None
            raise

    def _is_retired(self, body: bytes) -> bool:
        engine, incarnation = Reports.sender(body)
        return (engine, incarnation) in self._retired

    async def route(self, body: bytes) -> bytes:
        """A RouteAsk, answered by a RouteAnswer. PublisherUnavailable: `instance_unknown`, `key_length`,
        `invalid_field`."""
        return await self._router.route(body)

    def engine_view(self, engine: str) -> tuple[str, int, dict[str, int]]:
        """Its state as in `wire.schemas_events.EngineView`, for how many ms it was not heard of (-1: never
        heard), and its blocks by tier."""
        member = self.holdings.get(engine)
        if member is None:
            return "none", -1, {}
        heard_s = member.heard_s
        staleness_ms = -1 if heard_s is None else max(0, round((self._now_s() - heard_s) * 1_000))
        return self._state(engine, heard_s), staleness_ms, member.blocks()

    def _state(self, engine: str, heard_s: float | None) -> str:
        stream = self._streams.get(engine)
        reporter = self._reports.reporter(engine)
        if stream is not None:
            if heard_s is None and self._is_silent(engine):
                return "silent"
            return "following" if stream.connected and heard_s is not None else "connecting"
        if reporter is None:
            return "none"
        member = self.holdings.get(engine)
        if reporter.number is None:
            return "expired"
        return "reported" if member is not None and member.visible else "silent"

    def _is_silent(self, engine: str) -> bool:
        """Nothing was ever heard of its stream, for too long."""
        member = self.holdings.get(engine)
        if member is None or member.heard_s is not None:
            return False
        return (self._now_s() - self._since_s[engine]) * 1_000 > self._limits.silent_ms

    def stats(self) -> dict[str, float]:
        """Gauges and counters by metric name."""
        total = Counter(self._closed)
        found: dict[str, float] = {}
        now_s = self._now_s()
        for engine, stream in self._streams.items():
            total.update(_counts(stream))
            member = self.holdings.get(engine)
            heard_s = member.heard_s if member is not None else None
            label = f'{{engine="{engine}"}}'
            found |= {
                f"ingest_silent{label}": float(self._is_silent(engine)),
                f"ingest_staleness_seconds{label}": now_s - (heard_s or self._since_s[engine]),
            }
        total.update(self._tally)
        for name in _COUNTED:
            found[f"ingest_{name}_total"] = total[name]
        for reason, count in self._bad.items():
            found[f'ingest_invalid_total{{reason="{reason}"}}'] = count
        room = self._room
        return found | {
            "ingest_orphans": room.orphans,
            "ingest_orphans_total": room.orphaned,
            "ingest_orphans_dropped_total": room.orphans_dropped,
            "ingest_refused_total": room.refused,
            "ingest_conflicts_total": room.conflicts,
            "ingest_unknown_removed_total": room.unknown_removed,
            "ingest_inbox_bytes": self._inbox.bytes,
            "ingest_streams": len(self._streams),
            "ingest_streams_connected": sum(stream.connected for stream in self._streams.values()),
            "ingest_streams_partial": sum(not stream.sequencer.whole for stream in self._streams.values()),
            "holdings_engines": len(self.holdings),
            "holdings_entries": room.entries,
        }

    def look(self) -> None:
        """Hides and drops what nobody confirms any more. Once started this is done every second."""
        self._reports.look()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_MS / 1_000)
            self.look()


def _counts(stream: EngineStream) -> dict[str, int]:
    sequencer = stream.sequencer
    return {
        "replays": stream.replays,
        "gaps": sequencer.gaps,
        "gaps_lost": sequencer.lost,
        "restarts": sequencer.restarts,
        "duplicates": sequencer.duplicates,
        "late": sequencer.late,
    }
