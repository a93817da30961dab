"""One stream's sockets, what goes through them, and who listens."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq
from msgspec import Struct

from .emitters.port import Stream
from .settings import PublishConfig
from .sockets import Watched, address, bind, publisher_socket, replay_socket
from .view import Curve

END: Final = b"\xff" * 8
"""The sequence number that ends a replay; on a stream it has every consumer forget how far it was."""
COPY_BYTES_MAX = 64 * 1024
"""A longer payload is handed over as it is; a shorter one is copied sooner than that is arranged."""
NUMBER_FIRST: Final = 1 << 20
"""Of the first window of a shard's history."""
YOUNG_WINDOWS: Final = 600
"""A history that is so short may follow one that was lost, of which consumers remember higher numbers. There
is a window each second at least."""
SUBSCRIPTIONS_MAX = 10_000
"""A peer that subscribes more often to one stream wants to fill our memory: the socket is made anew."""


class ChannelPlan(Struct, frozen=True):
    """What a channel is for. `streams`: of the instance whose engines read it, and then of those that hold
    adapters for it; all with the same topic, rank and node."""

    shard: int
    tenant: str
    streams: tuple[Stream, ...]

    @property
    def stream(self) -> Stream:
        """Of the instance whose engines read it."""
        return self.streams[0]

    @property
    def place(self) -> tuple[tuple[str, ...], str]:
        """What is told here: all that these instances have on this node."""
        return tuple(stream.instance for stream in self.streams), self.stream.node


class Channel:
    """Publishes and answers, or would: both sockets are open only when they shall be."""

    def __init__(
        self,
        plan: ChannelPlan,
        config: PublishConfig,
        context: "zmq.Context[Any]",
        curve: Curve | None,
        on_joined: Callable[["Channel"], None],
        on_request: Callable[["Channel", Sequence[bytes]], None],
    ) -> None:
        self.plan = plan
        self._config = config
        self._context = context
        self._curve = curve
        self._on_joined = on_joined
        self._on_request = on_request
        self._publisher: Watched | None = None
        self._replay: Watched | None = None
        self._subscriptions = 0
        self.number = -1
        """Of the batch that was sent last."""
        self.sent_s = 0.0
        """When."""
        self.end_due = False
        """Consumers have to forget how far they were before the next batch."""
        self.young_until = NUMBER_FIRST + YOUNG_WINDOWS
        """Whoever joins before this window has to forget too."""
        self.subscribers = 0
        self.counts: Counter[str] = Counter(sent_bytes=0, malformed=0, floods=0)
        self.trouble = ""
        """Why a socket is not open that shall be."""

    @property
    def channel(self) -> int:
        return self.plan.stream.channel

    @property
    def publishing(self) -> bool:
        """Whether consumers can subscribe now."""
        return self._publisher is not None

    @property
    def replay(self) -> Watched | None:
        """Where replays are answered; None while it is closed."""
        return self._replay

    # ------------------------------------------------------------ open and close

    def settle(self, publish: bool, replay: bool) -> None:
        """Open what shall be open, close what shall not. A port that is taken is tried again with the next
        call."""
        self.trouble = ""
        if replay and self._replay is None:
            socket = replay_socket(self._context, self._config, self._curve, self.plan.tenant)
            self._replay = self._bound(socket, self._port + 1, self._asked)
        elif not replay and self._replay is not None:
            self._replay.close()
            self._replay = None
        if publish and self._publisher is None:
            socket = publisher_socket(self._context, self._config, self._curve, self.plan.tenant)
            self._publisher = self._bound(socket, self._port, self._subscribed)
        elif not publish:
            self.mute()

    def mute(self, linger_ms: int = 0) -> None:
        """Close the stream: what waits for slow subscribers is lost, which is meant, for somebody else may
        lead."""
        if self._publisher is not None:
            self._publisher.close(linger_ms)
            self._publisher = None
        self.subscribers = self._subscriptions = 0

    def close(self, linger_ms: int = 0) -> None:
        """Both."""
        self.mute(linger_ms)
        self.settle(False, False)

    @property
    def _port(self) -> int:
        return self._config.port(self.channel)

    def _bound(
        self, socket: "zmq.Socket[bytes]", port: int, on_message: Callable[[Sequence[bytes]], None]
    ) -> Watched | None:
        self.trouble = bind(socket, address(self._config.host, port))
        if self.trouble:
            socket.close()
            return None
        return Watched(socket, on_message)

    # ------------------------------------------------------------ what goes through

    def forget_from(self, number: int) -> None:
        """Another history begins here, after window `number`: consumers have to forget the one before, also
        those that come back in a while."""
        self.end_due = True
        self.number = -1
        self.young_until = number + YOUNG_WINDOWS

    def forgets(self, number: int) -> bool:
        """Whether consumers have to forget how far they were before this batch, which they would take for
        old."""
        return self._publisher is not None and (self.end_due or number < self.number)

    def send_end(self, empty: bytes) -> None:
        """Have consumers forget how far they were. `empty`: a batch with no events in it."""
        if self._publisher is not None:
            self.end_due = False
            self._put(self._publisher, END, empty)

    def send(self, number: int, payload: bytes, now_s: float) -> None:
        """One batch to whoever listens. The caller has looked at the fence, at `now_s`."""
        if self._publisher is not None:
            self._put(self._publisher, number.to_bytes(8, "big"), payload)
            self.number, self.sent_s = number, now_s

    def _put(self, publisher: Watched, number: bytes, payload: bytes) -> None:
        # Never waits: an XPUB drops what a subscriber has no room for.
        frames = (self.plan.stream.topic, number, payload)
        publisher.socket.send_multipart(frames, zmq.NOBLOCK, copy=len(payload) < COPY_BYTES_MAX)
        self.counts["sent_bytes"] += len(payload)
        publisher.look()

    def _subscribed(self, frames: Sequence[bytes]) -> None:
        """A subscription (1) or the end of one (0) to topics that begin with what follows."""
        wish = frames[0]
        if len(frames) != 1 or wish[:1] not in (b"\x00", b"\x01"):
            self.counts["malformed"] += 1
            return
        joins = wish[:1] == b"\x01"
        self._subscriptions += 1 if joins else -1
        if self._subscriptions > SUBSCRIPTIONS_MAX:
            self.counts["floods"] += 1
            self.mute()
            return
        if self.plan.stream.topic.startswith(wish[1:]):
            self.subscribers = max(0, self.subscribers + (1 if joins else -1))
            if joins:
                self._on_joined(self)

    def _asked(self, frames: Sequence[bytes]) -> None:
        self._on_request(self, frames)
