"""The publisher process: what its replica tells it, put where it belongs, and everybody's view of it."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio
from msgspec import Raw

from metaservice.core.windows import Run, Window

from . import attach, feed
from .attach import Attachment
from .curve import CurveServer
from .emitters.port import Emitter, Stream
from .emitters.vllm import VllmEmitter
from .errors import PublisherUnavailable
from .fence import FencePage
from .ingest.ingest import Ingest
from .pipe import Pipe
from .settings import PublishConfig
from .sockets import address
from .status import status
from .streams import Streams
from .tally import tally

log = logging.getLogger(__name__)

TICK_S: Final = 0.1
STATS_TICKS: Final = 10
RESTATE_S: Final = 1.0
"""The replica is not asked to tell an instance again more often: when a whole fleet clears its caches, once
is enough."""
SOCKETS_SPARE: Final = 512
"""For attachments and ourselves, beside two for each channel."""
LINGER_MS: Final = 200
"""What was sent last has so long to go when the process is told to stop."""
ASKS_MAX: Final = 256
"""Questions that are answered at the same time."""


class Process:
    """Everything in the publisher process, on one loop (a View). `take` gets the frames of the pipe."""

    def __init__(
        self, config: PublishConfig, fence: FencePage, pipe: Pipe, now_s: Callable[[], float]
    ) -> None:
        """Raises PublishRefused or AttachmentError. The pipe's frames go to `take`."""
        self._config = config
        self._fence = fence
        self._pipe = pipe
        self._now_s = now_s
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[feed.ToPublisher] = msgspec.msgpack.Decoder(feed.ToPublisher)
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * config.channels_max + SOCKETS_SPARE)
        self._curve = CurveServer.of(self._context, config)
        self._emitter = VllmEmitter()
        self._attachments: list[Attachment] = []
        self._streams = Streams(
            config, fence, self._context, self._curve, self._emitter, now_s,
            say=self.say, beat=self.beat, sent=self._sent, leading=self._leading, changed=self._changed,
        )  # fmt: skip
        self._ingest = Ingest(self._streams.announced, self._cleared, self.say, now_s, follow=config.ingest)
        self._attachments = [attach.make(row, self) for row in config.attachments]
        self._asks: set[asyncio.Task[None]] = set()
        self._restated_s: dict[tuple[int, str], float] = {}
        self._restates: dict[tuple[int, str], str] = {}
        self.restates = 0
        self.failures = 0
        self.unanswered = 0
        self.stopped = asyncio.Event()
        """Set when the replica said to stop."""

    async def start(self) -> None:
        """Begin to serve."""
        self._streams.replays.start()
        await self._ingest.start()
        for attachment in self._attachments:
            try:
                await attachment.start()
            except Exception:
                self._failed(f"start of attachment {attachment.name}")

    async def run(self) -> None:
        """Serve until told to stop."""
        ticks = 0
        while not self.stopped.is_set():
            self._streams.tick()
            self._settle_restates()
            if ticks % STATS_TICKS == 0:
                self._tell(feed.Stats(self.stats()))
            ticks += 1
            try:
                async with asyncio.timeout(TICK_S):
                    await self.stopped.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        """Close everything."""
        for attachment in self._attachments:
            await attachment.close()
        for task in self._asks:
            task.cancel()
        await self._ingest.close()
        await self._streams.replays.close()
        self._streams.close(LINGER_MS)
        if self._curve is not None:
            self._curve.close()
        self._context.destroy(linger=LINGER_MS)

    # ------------------------------------------------------------ what the replica tells

    def take(self, frame: memoryview) -> None:
        """One message of the replica's."""
        message = self._decoder.decode(frame)
        streams = self._streams
        match message:
            case Window():
                streams.window(message, bytes(frame))
            case feed.Standing():
                streams.standing(message.shard, message.runs)
            case feed.Tombstones():
                streams.tombstones(message.shard, message.gone)
            case feed.Begin():
                self._pass(self._ingest.forget, message.shard)
                streams.begin(message.shard, message.number)
            case feed.Ready():
                streams.ready(message.shard)
            case feed.Leads():
                streams.leads(message.shard, message.leads, message.epoch)
            case feed.InstanceUp():
                streams.instance(message)
                self._pass(self._ingest.instance_up, message)
            case feed.InstanceDown():
                if streams.instance_down(message.shard, message.instance):
                    self._pass(self._ingest.instance_down, message)
            case feed.EngineUp():
                streams.engine(message)
                self._pass(self._ingest.engine_up, message)
            case feed.EngineDown():
                if streams.engine_down(message.shard, message.engine):
                    self._pass(self._ingest.engine_down, message)
            case feed.Ask():
                self._asked(message)
            case feed.Stop():
                self.stopped.set()

    def _asked(self, ask: feed.Ask) -> None:
        if len(self._asks) >= ASKS_MAX:
            self._answer(ask, "overloaded", b"the publisher has too many questions at once")
            return
        task = asyncio.create_task(self._find_answer(ask), name=f"ask-{ask.id}")
        self._asks.add(task)
        task.add_done_callback(self._asks.discard)

    async def _find_answer(self, ask: feed.Ask) -> None:
        try:
            match ask.what:
                case "route":
                    body = await self._ingest.route(ask.body)
                case "report":
                    body = await self._ingest.report(ask.body)
                case "status":
                    body = status(self, self._streams, self._ingest, self._attachments, ask.body)
                case _:
                    raise PublisherUnavailable("not_found", f"the publisher knows nothing of {ask.what!r}")
        except PublisherUnavailable as error:
            self._answer(ask, error.code, error.message.encode())
        except Exception:
            log.exception("no answer to %s", ask.what)
            self._answer(ask, "internal", b"the publisher failed at this; its log says how")
        else:
            self._answer(ask, "", body)

    def _answer(self, ask: feed.Ask, problem: str, body: bytes) -> None:
        self._tell(feed.Answer(ask.id, problem, body))

    def _tell(self, message: feed.FromPublisher) -> None:
        if not self._pipe.send(self._encoder.encode(message)):
            self.unanswered += 1

    # ------------------------------------------------------------ what happens here

    def _sent(self, shard: int, window: Window) -> None:
        for attachment in self._attachments:
            self._pass(attachment.window, shard, window)

    def _leading(self, shard: int, leads: bool) -> None:
        for attachment in self._attachments:
            self._pass(attachment.leads, shard, leads)

    def _changed(self) -> None:
        for attachment in self._attachments:
            self._pass(attachment.changed)

    def _pass(self, call: Callable[..., None], *words: Any) -> None:
        """A fault of one part is not to stop the streams."""
        try:
            call(*words)
        except Exception:
            self._failed(getattr(call, "__qualname__", repr(call)))

    def _failed(self, what: str) -> None:
        self.failures += 1
        log.exception("%s failed", what)

    def _cleared(self, instance: str, engine: str) -> None:
        """An engine emptied its cache: routers forgot with it what they were told of the pool for it, of
        adapters too."""
        self.say("debug", f"engine {engine} cleared its cache; instance {instance} is told again")
        for one in self._streams.instances.values():
            if instance in (one.instance, one.base):
                self.restate(one.shard, one.instance, "cleared")

    def _settle_restates(self) -> None:
        waiting, self._restates = self._restates, {}
        for (shard, instance), why in waiting.items():
            self.restate(shard, instance, why)
        now_s = self._now_s()
        self._restated_s = {name: at_s for name, at_s in self._restated_s.items() if now_s - at_s < RESTATE_S}

    def stats(self) -> dict[str, float]:
        """Counters and gauges by metric name."""
        values = tally(self._streams, self._emitter, self._curve, self._now_s())
        values["restates_total"] = self.restates
        values["unheard_total"] = self.unanswered
        values["failures_total"] = self.failures
        values |= self._ingest.stats()
        for attachment in self._attachments:
            values |= attachment.stats()
        return values

    # ------------------------------------------------------------ the view

    @property
    def config(self) -> PublishConfig:
        return self._config

    @property
    def context(self) -> zmq.asyncio.Context:
        return self._context

    @property
    def curve(self) -> CurveServer | None:
        return self._curve

    @property
    def emitter(self) -> Emitter:
        return self._emitter

    @property
    def engines(self) -> Mapping[str, feed.EngineUp]:
        return self._streams.engines

    @property
    def instances(self) -> Mapping[str, feed.InstanceUp]:
        return self._streams.instances

    @property
    def streams(self) -> Mapping[int, Stream]:
        return self._streams.streams

    def endpoints(self, channel: int) -> tuple[str, str]:
        host, port = self._config.public_host, self._config.port(channel)
        return address(host, port), address(host, port + 1)

    def may_send(self, shard: int) -> bool:
        return self._streams.may_send(shard)

    def number(self, shard: int) -> int:
        _, newest = self._streams.reach(shard)
        return newest

    def epoch(self, shard: int) -> int:
        state = self._streams.shards.get(shard)
        return 0 if state is None else state.epoch

    def batch(self, channel: int, window: Window) -> bytes:
        return self._streams.speller.payload(self._streams.channels[channel].plan, window)

    def events(self, channel: int, window: Window) -> Sequence[Raw]:
        return self._streams.speller.events(self._streams.channels[channel].plan, window)

    def runs(self, channel: int) -> Iterator[Run]:
        for one in self._streams.channels[channel].plan.streams:
            yield from self._streams.announced.runs(one.instance, one.node)

    def snapshot(self, channel: int) -> Iterator[Sequence[Raw]]:
        return self._streams.speller.snapshot(self._streams.channels[channel].plan)

    def withdrawal(self, channel: int) -> Iterator[Sequence[Raw]]:
        return self._streams.speller.withdrawal(self._streams.channels[channel].plan)

    def restate(self, shard: int, instance: str, why: str) -> None:
        name, now_s = (shard, instance), self._now_s()
        if now_s - self._restated_s.get(name, -RESTATE_S) < RESTATE_S:
            self._restates[name] = why
            return
        self._restated_s[name] = now_s
        self.restates += 1
        self._tell(feed.Restate(shard, instance, why))

    def beat(self, shard: int) -> None:
        self._tell(feed.Beat(shard))

    def say(self, level: str, text: str) -> None:
        self._tell(feed.Said(level, text))

    def now_s(self) -> float:
        return self._now_s()


def opened(frame: memoryview, fence: FencePage, pipe: Pipe, now_s: Callable[[], float]) -> Process:
    """The process with the settings that come first through the pipe. Raises PublishRefused or
    AttachmentError."""
    config: Any = msgspec.msgpack.decode(frame, type=PublishConfig)
    return Process(config, fence, pipe, now_s)
