"""Following one engine's event stream: sockets, replays, and one task that hands it all over in order."""

import asyncio
import re
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from metaservice.publish.feed import EngineUp

from .limits import IngestLimits
from .sequence import END, Sequencer, Step

_ENDPOINT = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_AGAIN_MS = 1_000
_RECONNECT_MS = 200
_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_SEQ_BYTES = 8


class BadEndpoint(ValueError):
    """An engine's endpoint is no TCP address that can be connected to."""


def endpoint_of(told: str, address: str) -> str:
    """Where to connect. An engine tells what it binds: `*` is the host of its `address`. Anything but TCP is
    refused, for engines say where this process connects to."""
    match = _ENDPOINT.fullmatch(told)
    if match is None:
        raise BadEndpoint(f"{told!r} is no tcp://host:port")
    host, port = match.groups()
    if host in {"*", "0.0.0.0", "[::]"}:  # noqa: S104 - it is what another process bound
        host = address.rpartition(":")[0]
    if not host or not 0 < int(port) < 65_536:
        raise BadEndpoint(f"{told!r} names no host and port to connect to")
    return f"tcp://{host}:{port}"


class Inbox:
    """Frames that were read and wait for their turn: of each engine so many, of all so many bytes."""

    def __init__(self, limits: IngestLimits) -> None:
        self.limits = limits
        self.bytes = 0

    def full(self, waiting: int) -> bool:
        """Whether an engine with so many waiting frames has to wait itself."""
        return waiting >= self.limits.inbox_frames_max or self.bytes >= self.limits.inbox_bytes_max


class Follower:
    """Follows one engine until it is stopped. It connects again by itself and outlives everything that the
    engine sends."""

    def __init__(
        self,
        up: EngineUp,
        take: Callable[[Step], Awaitable[None]],
        heard: Callable[[], None],
        inbox: Inbox,
        context: zmq.asyncio.Context,
        bad: Counter[str],
        say: Callable[[str, str], None],
    ) -> None:
        """`take` gets each batch in order, and None where all that was said before is void; `heard` is called
        whenever the engine said anything. Raises BadEndpoint."""
        self._endpoint = endpoint_of(up.events, up.address)
        self._replay = endpoint_of(up.replay, up.address) if up.replay else ""
        self._engine = up.engine
        self._hand_over = take
        self._heard = heard
        self._limits = inbox.limits
        self._inbox = inbox
        self._context = context
        self._bad = bad
        self._say = say
        self.sequencer = Sequencer(bool(self._replay), inbox.limits)
        self.replays = 0
        self.connected = False
        self._waiting: deque[tuple[int, list[bytes]]] = deque()
        """(session of a replay, or 0 for live, frames). Without frames: that replay is over (below zero: it
        was not answered), or, with 0, the connection was made."""
        self._came = asyncio.Event()
        self._went = asyncio.Event()
        self._session: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Nothing is taken in from now on."""
        self._task.cancel()

    async def stopped(self) -> None:
        """After `stop`: its sockets are closed."""
        with suppress(asyncio.CancelledError):
            await self._task

    # ------------------------------------------------------------ tasks

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._listen())
                    tasks.create_task(self._take(tasks))
            except* Exception as failed:
                self._bad["failed"] += 1
                self._say("error", f"events of {self._engine}: {failed.exceptions[0]!r}")
            finally:
                self._drop_waiting()
                self._end_session()
            await asyncio.sleep(_AGAIN_MS / 1_000)

    async def _listen(self) -> None:
        """Reads what is published, with a new socket for each connection: libzmq makes none again of its own
        after one that ended with a message that was too long, or with a peer that does not speak ZMTP."""
        while True:
            with self._socket(zmq.SUB) as socket:
                socket.subscribe(b"")
                monitor = socket.get_monitor_socket(_WATCHED)
                reading = asyncio.create_task(self._read(socket))
                watching = asyncio.create_task(self._watch(monitor))
                try:
                    socket.connect(self._endpoint)
                    done, _ = await asyncio.wait((reading, watching), return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                    reading.cancel()
                    while await socket.poll(0):
                        await self._put(0, await socket.recv_multipart())
                finally:
                    self.connected = False
                    reading.cancel()
                    watching.cancel()
                    socket.disable_monitor()
                    monitor.close(linger=0)
            await asyncio.sleep(_RECONNECT_MS / 1_000)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            await self._put(0, await socket.recv_multipart())

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Notes that it is connected; returns when the connection ended, or failed."""
        while parse_monitor_message(await monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self._waiting.append((0, []))
            self._came.set()

    async def _ask(self, session: int, start: int) -> None:
        """One replay, with a socket of its own, so that no other answer is mixed in."""
        for _ in range(self._limits.replay_tries):
            self.replays += 1
            with self._socket(zmq.DEALER) as socket:
                socket.connect(self._replay)
                await socket.send_multipart([b"", start.to_bytes(_SEQ_BYTES, "big")])
                if await self._answered(session, socket):
                    return
        await self._put(-session, [])

    async def _answered(self, session: int, socket: zmq.asyncio.Socket) -> bool:
        """False when it stopped before the end."""
        while await socket.poll(self._limits.replay_idle_ms):
            frames = await socket.recv_multipart()
            ended = len(frames) > 1 and frames[-2] == END.to_bytes(_SEQ_BYTES, "big")
            await self._put(session, [] if ended else frames)
            if ended:
                return True
        return False

    async def _take(self, tasks: asyncio.TaskGroup) -> None:
        """Takes in everything, in order."""
        while True:
            self._follow_session(tasks)
            if not self._waiting:
                self._came.clear()
                await self._idle()
                continue
            session, frames = self._waiting.popleft()
            self._inbox.bytes -= sum(map(len, frames))
            self._went.set()
            if session > 0 or frames:
                self._heard()
            for step in self._steps(session, frames):
                await self._hand_over(step)
            await asyncio.sleep(0)

    # ------------------------------------------------------------ helpers

    async def _idle(self) -> None:
        """Returns when something came, or after looking whether anybody is there."""
        try:
            async with asyncio.timeout(self._limits.probe_ms / 1_000):
                await self._came.wait()
        except TimeoutError:
            self.sequencer.probe()

    def _steps(self, session: int, frames: list[bytes]) -> Iterator[Step]:
        sequencer = self.sequencer
        if session and abs(session) != sequencer.session:
            return
        if not frames:
            if session:
                yield from sequencer.ended() if session > 0 else sequencer.unanswered()
            else:
                sequencer.joined()
            return
        if len(frames) < 2 or len(frames) > 4 or len(frames[-2]) != _SEQ_BYTES:
            self._bad["frames"] += 1
            return
        number = int.from_bytes(frames[-2], "big")
        if session:
            yield from sequencer.replayed(number, frames[-1])
        else:
            yield from sequencer.live(number, frames[-1])

    def _follow_session(self, tasks: asyncio.TaskGroup) -> None:
        """Asks for the replay that is needed, instead of any before."""
        sequencer = self.sequencer
        name = f"replay {sequencer.session}"
        if sequencer.wanted is None:
            return
        if self._session is None or self._session.get_name() != name:
            self._end_session()
            self._session = tasks.create_task(self._ask(sequencer.session, sequencer.wanted), name=name)

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.cancel()
            self._session = None

    async def _put(self, session: int, frames: list[bytes]) -> None:
        """Frames wait for their turn. When this is cancelled while there is no room they are kept all the
        same: they were read."""
        try:
            while self._inbox.full(len(self._waiting)):
                self._went.clear()
                with suppress(TimeoutError):  # room may be made by another stream
                    async with asyncio.timeout(0.05):
                        await self._went.wait()
        finally:
            self._waiting.append((session, frames))
            self._inbox.bytes += sum(map(len, frames))
            self._came.set()

    def _drop_waiting(self) -> None:
        self._inbox.bytes -= sum(len(frame) for _, frames in self._waiting for frame in frames)
        self._waiting.clear()

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = self._limits.socket_frames_max
        socket.maxmsgsize = self._limits.message_bytes_max
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 2_000
        socket.ipv6 = "[" in self._endpoint + self._replay
        return socket
