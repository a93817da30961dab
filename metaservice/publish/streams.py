"""All streams of a replica: windows in, batches out, for the shards that it leads and as long as it does."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from metaservice.core.windows import Gone, Run, Window

from .announced import Announced
from .channel import Channel, ChannelPlan
from .emitters.port import Emitter, Stream
from .feed import EngineUp, InstanceUp
from .fence import FencePage
from .plan import numbers, plan
from .replay import Replays
from .ring import Ring, RingBudget
from .segments import Segment, Segments
from .settings import PublishConfig
from .shard import ShardState
from .spelling import Speller, blocks_told
from .view import Curve

BURST_MAX = 64
"""Windows sent in one go when several are due."""
BEAT_S = 0.05
"""The replica is not asked for windows more often."""


class Streams:
    """Only for the loop that it was made on."""

    def __init__(
        self,
        config: PublishConfig,
        fence: FencePage,
        context: "zmq.Context[Any]",
        curve: Curve | None,
        emitter: Emitter,
        now_s: Callable[[], float],
        *,
        say: Callable[[str, str], None],
        beat: Callable[[int], None],
        sent: Callable[[int, Window], None],
        leading: Callable[[int, bool], None],
        changed: Callable[[], None],
    ) -> None:
        """`sent` is called with every window after the streams sent it, `leading` when a shard's streams
        begin to be served, and when they are no more, `changed` when engines or instances did."""
        self._config = config
        self._fence = fence
        self._context = context
        self._curve = curve
        self._now_s = now_s
        self._say = say
        self._beat = beat
        self._on_sent = sent
        self._on_leading = leading
        self._on_changed = changed
        self._loop = asyncio.get_running_loop()
        self._budget = RingBudget(config.ring_bytes_max)
        self.announced = Announced()
        self.speller = Speller(emitter, self.announced)
        self.segments = Segments(self.speller, now_s)
        self.replays = Replays(self, now_s)
        self.shards: dict[int, ShardState] = {}
        self.engines: dict[str, EngineUp] = {}
        self.instances: dict[str, InstanceUp] = {}
        self.channels: dict[int, Channel] = {}
        self._by_shard: dict[int, list[Channel]] = {}
        self.streams: dict[int, Stream] = {}
        """By channel."""
        self._replanned = True
        self._serving: set[int] = set()
        self._trouble: dict[int, str] = {}
        self.retired: Counter[str] = Counter()
        """What channels counted that are no more."""
        self.beyond = 0
        """Channels with numbers that are not served."""
        self.counts: Counter[str] = Counter(
            windows=0, batches=0, blocks=0, unsent=0, lapses=0, beats=0, resets=0, jumps=0, bind_failures=0
        )

    # ------------------------------------------------------------ what the replica tells

    def begin(self, shard: int, number: int) -> None:
        """All of a shard is told anew. Its streams stay as they are until it stands."""
        state = self._shard(shard)
        if number < state.number:
            self._say(
                "warning",
                f"shard {shard} went back from window {state.number} to {number}: its history was lost, and "
                "consumers are told to forget theirs",
            )
            for channel in self._channels(shard):
                channel.forget_from(number)
        state.number = number
        state.stands = state.leads = False
        state.ring.clear()
        self.announced.forget(shard)
        for channel in self._channels(shard):
            self.segments.forget(channel.channel)
            self.speller.forget(channel.channel)
        self.engines = {name: one for name, one in self.engines.items() if one.shard != shard}
        self.instances = {name: one for name, one in self.instances.items() if one.shard != shard}

    def standing(self, shard: int, runs: Sequence[Run]) -> None:
        """A part of what is announced already."""
        self.announced.standing(shard, runs, self._shard(shard).number)

    def tombstones(self, shard: int, gone: Sequence[Gone]) -> None:
        """What is not announced any more, lately."""
        self.announced.tombstones(shard, gone)

    def ready(self, shard: int) -> None:
        """All that stands was told."""
        if self._replanned:
            self._replan()  # those streams were there before
        self._shard(shard).stands = True
        self._replanned = True
        self.settle()
        self.flush(shard)

    def engine(self, up: EngineUp) -> None:
        """An engine came, or is otherwise."""
        self.engines[up.engine] = up
        self._replanned = True

    def engine_down(self, shard: int, name: str) -> bool:
        """It is gone; False when it is of another shard by now."""
        known = self.engines.get(name)
        if known is None or known.shard != shard:
            return False
        del self.engines[name]
        self._replanned = True
        return True

    def instance(self, up: InstanceUp) -> None:
        """An instance is announced from now on, or is announced otherwise."""
        self.instances[up.instance] = up
        self.announced.admit(up.shard, up.instance)
        self._replanned = True

    def instance_down(self, shard: int, name: str) -> bool:
        """It is announced no more; False when it is of another shard by now."""
        known = self.instances.get(name)
        if known is None or known.shard != shard:
            return False
        del self.instances[name]
        self.announced.forget_instance(name)
        self._replanned = True
        return True

    def leads(self, shard: int, leads: bool, epoch: int) -> None:
        """This replica leads the shard from now on, or not any more. What comes from now on is sent; what
        came before may have been sent by somebody else, and is not."""
        state = self._shard(shard)
        if leads and not (state.leads and state.epoch == epoch):
            state.due = state.number + 1
        state.leads, state.epoch = leads, epoch
        self.settle()

    def window(self, window: Window, frame: bytes) -> None:
        """The next window, and its bytes as they came."""
        state = self._shard(window.shard)
        if window.number != state.number + 1:
            self.counts["jumps"] += 1
        self.counts["windows"] += 1
        state.number, state.now_ms, state.heard_s = window.number, window.now_ms, self._now_s()
        state.ring.add(window.number, frame)
        self.announced.apply(window)
        self.settle()
        if state.leads and state.stands and state.due == window.number:
            if self.may_send(window.shard):
                self._send(state, window)
        else:
            self.flush(window.shard)

    # ------------------------------------------------------------ sending

    def may_send(self, shard: int) -> bool:
        """Whether this replica leads the shard at this very moment."""
        state = self.shards.get(shard)
        return state is not None and state.leads and self._fence.holds(shard, state.epoch, self._now_s())

    def flush(self, shard: int) -> None:
        """Send what is due and was not sent yet."""
        state = self._shard(shard)
        for _ in range(BURST_MAX):
            if not (state.leads and state.stands) or state.due > state.number or not self.may_send(shard):
                return
            oldest, _ = self.reach(shard)
            if state.due < oldest:
                self.counts["unsent"] += oldest - state.due
                state.due = oldest
                continue
            frame = state.ring.get(state.due)
            if frame is None:
                return
            self._send(state, self.speller.window(frame))
        self._loop.call_soon(self.flush, shard)

    def _send(self, state: ShardState, window: Window) -> None:
        """One window, to all streams of its shard. The fence is looked at for each of them, last of all: a
        process can be stopped anywhere. Those that were reached before it fell are passed over when it holds
        again."""
        shard = window.shard
        for channel in self._channels(shard):
            if channel.number == window.number and not channel.end_due:
                continue
            payload = self.speller.payload(channel.plan, window)
            now_s = self._now_s()
            if not self._fence.holds(shard, state.epoch, now_s):
                return
            if channel.forgets(window.number):
                channel.send_end(self.speller.empty(channel.plan, window.now_ms))
            channel.send(window.number, payload, now_s)
            self.counts["batches"] += 1
        state.due = window.number + 1
        self.counts["blocks"] += blocks_told(window)
        self._on_sent(shard, window)

    def tick(self) -> None:
        """Some times a second: what was not possible may be now, and what was allowed may not be any more."""
        self.settle(retry=True)
        self.segments.tidy()
        now_s = self._now_s()
        for shard, state in self.shards.items():
            self.flush(shard)
            if state.beat_due and now_s - state.beat_s >= BEAT_S:
                self._ask_beat(shard, state, now_s)

    # ------------------------------------------------------------ streams open and close

    def settle(self, retry: bool = False) -> None:
        """Open and close what the shards' standing asks for."""
        serving = {shard for shard, state in self.shards.items() if state.stands and self.may_send(shard)}
        if not self._replanned and serving == self._serving and not retry:
            return
        replanned = self._replanned
        if replanned:
            self._replan()
        self.counts["lapses"] += sum(self.shards[shard].leads for shard in self._serving - serving)
        for shard, channels in self._by_shard.items():
            state, serves = self._shard(shard), shard in serving
            for channel in channels:
                if state.stands:
                    channel.settle(serves, serves or not self._config.shared_address)
                elif not self._fence.holds(shard, state.epoch, self._now_s()):
                    channel.mute()
                self._complain(channel)
        changed = serving ^ self._serving
        self._serving = serving
        if replanned:
            self._on_changed()
        for shard in changed:
            self._on_leading(shard, shard in serving)

    def _replan(self) -> None:
        self._replanned = False
        plans = plan(self.engines.values(), self.instances, self._config.channels_max)
        most = self._config.channels_max
        beyond = len({number for number in numbers(self.engines.values()) if number >= most})
        if beyond > self.beyond:
            self._say("error", f"{beyond} streams from number {most} on are not served: raise channels_max")
        self.beyond = beyond
        for number, channel in list(self.channels.items()):
            if number not in plans and self.stands(channel.plan.shard):
                self._close(number)
        for number, wish in plans.items():
            known = self.channels.get(number)
            if known is None:
                made = self.channels[number] = self._new_channel(wish)
                if self.stands(wish.shard):
                    # The number may have been another stream's, whose consumers are still there.
                    made.forget_from(self._shard(wish.shard).number)
            elif known.plan != wish:
                self._change(known, wish)
        self._by_shard = {}
        for channel in self.channels.values():
            self._by_shard.setdefault(channel.plan.shard, []).append(channel)
        self.streams = {number: channel.plan.stream for number, channel in self.channels.items()}

    def _new_channel(self, wish: ChannelPlan) -> Channel:
        return Channel(wish, self._config, self._context, self._curve, self._joined, self.replays.request)

    def _change(self, channel: Channel, wish: ChannelPlan) -> None:
        """The channel is for something else, or for one adapter more."""
        number, before = channel.channel, channel.plan
        self.segments.forget(number)
        if (wish.shard, wish.tenant, wish.stream) == (before.shard, before.tenant, before.stream):
            channel.plan = wish
            return
        self._close(number)
        after = self.channels[number] = self._new_channel(wish)
        after.forget_from(self._shard(wish.shard).number)

    def _close(self, number: int, linger_ms: int = 0) -> None:
        channel = self.channels.pop(number)
        channel.close(linger_ms)
        self.retired.update(channel.counts)
        self.replays.forget(number)
        self.segments.forget(number)
        self.speller.forget(number)
        self._trouble.pop(number, None)

    def _complain(self, channel: Channel) -> None:
        """Once a trouble, and once it is over."""
        before = self._trouble.get(channel.channel, "")
        if channel.trouble:
            self.counts["bind_failures"] += 1
        if channel.trouble == before:
            return
        self._trouble[channel.channel] = channel.trouble
        if channel.trouble:
            self._say("warning", f"{channel.trouble}; it is tried again")
        else:
            self._say("info", f"stream {channel.channel} is open now")

    def close(self, linger_ms: int) -> None:
        """Close every socket. What waits for subscribers has so long to go."""
        while self.channels:
            self._close(next(iter(self.channels)), linger_ms)

    # ------------------------------------------------------------ who listens

    def _joined(self, channel: Channel) -> None:
        """Somebody subscribed: with the next batch it sees what it missed."""
        shard = channel.plan.shard
        state = self._shard(shard)
        if state.number < channel.young_until:
            channel.end_due = True
            self.counts["resets"] += 1
        now_s = self._now_s()
        if now_s - state.beat_s >= BEAT_S:
            self._ask_beat(shard, state, now_s)
        else:
            state.beat_due = True

    def _ask_beat(self, shard: int, state: ShardState, now_s: float) -> None:
        state.beat_s, state.beat_due = now_s, False
        self.counts["beats"] += 1
        self._beat(shard)

    # ------------------------------------------------------------ for replays (a Source)

    def reach(self, shard: int) -> tuple[int, int]:
        state = self.shards.get(shard)
        if state is None or state.number < 0:
            return 0, -1
        oldest = state.ring.oldest
        return (state.number + 1 if oldest is None else oldest), state.number

    def stands(self, shard: int) -> bool:
        state = self.shards.get(shard)
        return state is not None and state.stands

    def batch_of(self, channel: Channel, number: int) -> bytes | None:
        kept = self.speller.kept(channel.channel, number)
        if kept is not None:
            return kept
        frame = self.shards[channel.plan.shard].ring.get(number)
        return None if frame is None else self.speller.payload(channel.plan, self.speller.window(frame))

    def segment(self, channel: Channel, start: int) -> Segment:
        wish = channel.plan
        state = self.shards[wish.shard]
        oldest, newest = self.reach(wish.shard)
        blocks, gone = self.told_blocks(channel), self.announced.tombstone_count
        return self.segments.get(wish, newest, state.now_ms, start, oldest, blocks, gone)

    # ------------------------------------------------------------ within

    def _shard(self, shard: int) -> ShardState:
        state = self.shards.get(shard)
        if state is None:
            state = self.shards[shard] = ShardState(Ring(self._config.ring_windows, self._budget))
        return state

    def _channels(self, shard: int) -> Sequence[Channel]:
        return self._by_shard.get(shard, ())

    def told_blocks(self, channel: Channel) -> int:
        """How many blocks are announced on a channel."""
        return sum(self.announced.blocks(one.instance, one.node) for one in channel.plan.streams)

    def lag_s(self, channel: Channel, now_s: float) -> float:
        """Since its newest batch was sent; where another replica sends: since this one heard of a window.
        There is one each second at least."""
        shard = channel.plan.shard
        at_s = channel.sent_s if shard in self._serving and channel.sent_s else self._shard(shard).heard_s
        return max(0.0, now_s - at_s) if at_s else 0.0

    @property
    def ring_bytes(self) -> int:
        """Of all shards' rings."""
        return self._budget.held_bytes
