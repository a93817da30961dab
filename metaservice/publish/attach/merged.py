"""One merged stream: an engine's own events and those of the pool, for consumers that take one source a
worker.

It is the worker's only source, so it may say that all is void (AllBlocksCleared) and then tell all that
there is: at its beginning, when the engine began anew or lost something that no replay brings, and after the
engine itself said so, since a consumer forgets what the pool has together with what the engine had.

Numbers go up by one and begin, under each leader, at the number of the shard's newest window times 2**20: so
they never fall. Replays begin with what stands when more is asked for than is kept.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain

from msgspec import Raw
from msgspec.structs import replace

from metaservice.publish.attach.engine_events import CLEARED, EngineEvents
from metaservice.publish.channel import Channel, ChannelPlan
from metaservice.publish.emitters.port import Stream
from metaservice.publish.feed import EngineUp, InstanceUp
from metaservice.publish.ingest.follow import BadEndpoint, Follower, Inbox
from metaservice.publish.ingest.sequence import Step
from metaservice.publish.plan import topic as topic_of
from metaservice.publish.replay import Replays
from metaservice.publish.segments import PIECE_BYTES, Segment
from metaservice.publish.settings import PublishConfig
from metaservice.publish.view import View

NUMBER_SHIFT = 20
"""So many batches, as a power of two, fit between two windows: a million a second."""
EPOCH_FIRST = 1
ITEMS_IN_BATCH = 8
"""Pieces of a snapshot, of 64 blocks each, in one batch."""
WAITING_MAX = 2_000
"""Windows that may wait while a snapshot is told; beyond them all is told anew."""
RING_BYTES_MAX = 16 * 1024 * 1024
"""Of one engine: there may be many."""
PIECES_MAX = 4_096

Told = tuple[int, Sequence[Raw]]
"""When, in ms, and what."""


class Merged:
    """The stream of one engine. `index`: which of the attachment's streams it is, for its ports."""

    def __init__(
        self,
        index: int,
        engine: str,
        config: PublishConfig,
        view: View,
        inbox: Inbox,
        ring: int,
        replays: Replays,
    ) -> None:
        self.engine = engine
        self.index = index
        self.up: EngineUp | None = None
        self.channel: Channel | None = None
        self.bad: Counter[str] = Counter()
        self.counts: Counter[str] = Counter(batches=0, clears=0, overflows=0)
        self.fault = ""
        """Why the engine's own events are not followed."""
        self._config = config
        self._view = view
        self._inbox = inbox
        self._replays = replays
        self._ring: deque[bytes] = deque()
        self._ring_max = ring
        self._ring_bytes = 0
        self._next = 0
        """The number of the next batch; 0 until this replica leads."""
        self._shard = -1
        self._waiting: deque[Told] = deque()
        self._came = asyncio.Event()
        self._turn = asyncio.Lock()
        """What the engine says and what the pool says goes out one after the other."""
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ what is known of it

    @property
    def shard(self) -> int:
        """Whose leader publishes it; -1 until the engine was seen."""
        return self._shard

    @property
    def trouble(self) -> str:
        """What is wrong with it."""
        return self.fault or ("" if self.channel is None else self.channel.trouble)

    @property
    def reach(self) -> tuple[int, int]:
        """Numbers of the oldest batch that is kept and of the newest: -1 while it is not published."""
        if self._task is None or not self._ring:
            return self._next, -1
        return self._next - len(self._ring), self._next - 1

    def batch_of(self, number: int) -> bytes | None:
        """A batch that is kept."""
        at = number - (self._next - len(self._ring))
        return self._ring[at] if 0 <= at < len(self._ring) else None

    def segment(self, start: int) -> Segment:
        """All of the pool as it stands, told before the oldest batch that is kept: what has happened since is
        in those, and has the last word."""
        assert self.channel is not None
        stream = self.channel.plan.stream
        oldest, _ = self.reach
        items = chain([(CLEARED,)], self._pool())
        return Segment(
            oldest - 1,
            min(oldest - start, PIECES_MAX),
            PIECE_BYTES,
            items,
            lambda events: self._view.emitter.payload(stream, events, 0),
        )

    # ------------------------------------------------------------ what changes

    def settle(self, up: EngineUp | None, instance: InstanceUp | None, leads: bool) -> None:
        """The engine as it is now (None: it is gone), and whether this replica is to publish."""
        if up is not None and instance is not None:
            self._plan(up, instance)
        running = self._task is not None
        if leads and up is not None and instance is not None and (not running or up != self.up):
            self._stop()
            self.up, self._shard = up, up.shard
            self._task = asyncio.create_task(self._run(up, instance), name=f"merged {self.engine}")
        elif running and not leads:
            self._stop()
            self._ring.clear()
            self._ring_bytes = self._next = 0
        elif running and up is None and self.up is not None:
            self._stop()
            self.up = None
            self._task = asyncio.create_task(self._run(None, None), name=f"merged {self.engine}")
        if self.channel is not None:
            publishes = leads and self._task is not None
            self.channel.settle(publishes, publishes or not self._config.shared_address)

    def window(self, now_ms: int, events: Sequence[Raw]) -> None:
        """What a window says of the pool and of the engine's node."""
        if self._task is None:
            return
        if len(self._waiting) >= WAITING_MAX:
            self.counts["overflows"] += 1
            self._waiting.clear()
            self._waiting.append((now_ms, (CLEARED,)))
        self._waiting.append((now_ms, events))
        self._came.set()

    def joined(self) -> None:
        """Somebody subscribed: it sees at once what it missed."""
        if self._next:
            self._reset()
            self._waiting.append((0, ()))
            self._came.set()

    async def close(self) -> None:
        """End."""
        self._stop()
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self.channel is not None:
            self.channel.close()

    # ------------------------------------------------------------ inside

    def _plan(self, up: EngineUp, instance: InstanceUp) -> None:
        stream = Stream(
            channel=self.index,
            instance=instance.instance,
            model=instance.model,
            node="",
            rank=up.rank,
            block_size_tokens=instance.block_size_tokens,
            key_length=instance.key_length,
            hash_of=instance.hash_of,
            lora=instance.lora,
            topic=topic_of(up.engine, instance.model),
        )
        plan = ChannelPlan(self.index, instance.tenant, (stream,))
        if self.channel is not None and self.channel.plan == plan:
            return
        if self.channel is not None:
            self._replays.forget(self.index)
            self.channel.close()
        self.channel = Channel(
            plan,
            self._config,
            self._view.context,
            self._view.curve,
            lambda _: self.joined(),
            self._replays.request,
        )

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._ending.add(self._task)
            self._task.add_done_callback(self._ending.discard)
            self._task = None
        self._waiting.clear()

    async def _run(self, up: EngineUp | None, instance: InstanceUp | None) -> None:
        """Tell all that there is, then what comes."""
        follower: Follower | None = None
        try:
            self._begin()
            await self._tell_all()
            if up is not None and instance is not None and up.events:
                events = EngineEvents(up, instance, self.bad)
                follower = self._follow(up, events)
            while True:
                await self._came.wait()
                self._came.clear()
                while self._waiting:
                    async with self._turn:
                        if self._waiting:
                            await self._say(*self._waiting.popleft())
                    await asyncio.sleep(0)
        finally:
            if follower is not None:
                follower.stop()
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(follower.stopped())

    def _follow(self, up: EngineUp, events: EngineEvents) -> Follower | None:
        async def take(step: Step) -> None:
            async with self._turn:
                now_ms, said = (0, [CLEARED]) if step is None else events.read(step)
                await self._say(now_ms, said)

        self.fault = ""
        try:
            return Follower(up, take, lambda: None, self._inbox, self._view.context, self.bad, self._view.say)
        except BadEndpoint as error:
            self.fault = str(error)
            return None

    def _begin(self) -> None:
        """Numbers go on, or begin where no leader before us was."""
        if not self._next:
            self._next = max(self._view.number(self._shard), 1) << NUMBER_SHIFT
            self._reset()

    def _reset(self) -> None:
        """In a history that nobody led before consumers may remember higher numbers of another one."""
        channel = self.channel
        if channel is not None and self._view.epoch(self._shard) == EPOCH_FIRST:
            channel.send_end(self._view.emitter.payload(channel.plan.stream, (), 0))

    async def _say(self, now_ms: int, events: Sequence[Raw]) -> None:
        """Send these. Where all is void, what the pool has is told next."""
        gathered: list[Raw] = []
        for event in events:
            gathered.append(event)
            if event is CLEARED:
                self.counts["clears"] += 1
                self._send(now_ms, gathered)
                gathered = []
                await self._tell_pool()
        if gathered or not events:
            self._send(now_ms, gathered)

    async def _tell_all(self) -> None:
        async with self._turn:
            await self._say(0, (CLEARED,))

    async def _tell_pool(self) -> None:
        """All of the pool, in slices. Windows that come meanwhile wait: they have the last word."""
        gathered: list[Raw] = []
        for count, item in enumerate(self._pool(), 1):
            gathered += item
            if count % ITEMS_IN_BATCH == 0:
                self._send(0, gathered)
                gathered = []
                await asyncio.sleep(0)
        if gathered:
            self._send(0, gathered)

    def _pool(self) -> Iterator[Sequence[Raw]]:
        up = self.up
        if up is not None:
            for channel in (up.pool_channel, up.local_channel):
                if channel in self._view.streams:
                    yield from self._view.snapshot(channel)

    def _send(self, now_ms: int, events: Sequence[Raw]) -> None:
        channel = self.channel
        if channel is None:
            return
        payload = self._view.emitter.payload(channel.plan.stream, events, now_ms)
        number, self._next = self._next, self._next + 1
        self._ring.append(payload)
        self._ring_bytes += len(payload)
        while len(self._ring) > self._ring_max or self._ring_bytes > RING_BYTES_MAX:
            self._ring_bytes -= len(self._ring.popleft())
        if self._view.may_send(self._shard):
            channel.send(number, payload, self._view.now_s())
            self.counts["batches"] += 1


def with_ports(config: PublishConfig, port_base: int, count: int) -> PublishConfig:
    """The settings of the streams, for sockets from another port on."""
    return replace(config, port_base=port_base, channels_max=count)
