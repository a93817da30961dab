"""What the service announces, for this engine to publish with its own KV cache events.

Some routers hear one source for each engine and no more: what is in the pool reaches them only through the
engine. So a thread follows the service's streams for the engine's instances, and a step takes what is ready.
An engine that takes no steps publishes nothing; what waits for it is bounded, and told as a whole afterwards.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Event, Lock, Thread
from typing import Any, Generic, TypeVar

import zmq

from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.pool_stream import PoolStream, StreamAt
from engine_adapters.vllm.pool_wire import Told
from metaservice.client.results import now_ms

log = logging.getLogger(__name__)

READY_BLOCKS = 1_024
"""A step publishes about as many blocks at the most."""
FIND_MS = 10_000
"""The service is asked this often where its streams are."""
FIND_SOON_MS = 1_000
"""While one is not known, or is silent."""
SILENT_MS = 3_000
"""Each stream says something every second."""
TURN_MS = 20
IDLE_TURN_MS = 200
IDLE_MS = 1_000
"""An engine that has taken nothing for so long is idle."""

E = TypeVar("E")


class PoolFollower(Generic[E]):
    """`take` and `cleared` are the engine's thread's, and wait for nothing; all else happens in a thread of
    its own."""

    def __init__(
        self,
        find: Callable[[], Sequence[StreamAt] | None],
        event_of: Callable[[Told], E | None],
        secure: Callable[[Any], None],
        counts: Counts,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        """`find`: the streams there are, None when nobody knows now. `event_of`: an event as the engine
        publishes it; None for one that it must not. `secure` gives a socket what it needs to be let in."""
        self._find = find
        self._event_of = event_of
        self._secure = secure
        self._counts = counts
        self._clock = clock
        self._context: zmq.Context[Any] = zmq.Context()
        self._streams: dict[str, PoolStream] = {}
        self._ended: deque[Told] = deque()
        self._lock = Lock()
        self._ready: list[E] = []
        self._ready_blocks = 0
        self._taken_ms = clock()
        self._clears = 0
        self._seen_clears = 0
        self._renewals = 0
        self._seen_renewals = 0
        self._find_ms = 0
        self._closing = Event()
        self._thread = Thread(target=self._run, name="ucm-pool-events", daemon=True)

    # --------------------------------------------------------------------------------------- for the engine

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def take(self) -> list[E]:
        """What is to be published with this step."""
        with self._lock:
            ready, self._ready, self._ready_blocks = self._ready, [], 0
            self._taken_ms = self._clock()
        return ready

    def cleared(self) -> None:
        """The engine has told its followers that all of its blocks are gone, and they take that for the
        pool's too: what is announced is told them again, all of it."""
        with self._lock:
            self._clears += 1
            self._ready, self._ready_blocks = [], 0

    def renew(self) -> None:
        """The engine is of another instance: what was announced of the one before is not its any more."""
        with self._lock:
            self._renewals += 1

    def close(self, wait_s: float = 1.0) -> None:
        """Stop."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(wait_s)

    # ---------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    self._turn()
                except Exception:
                    log.exception("following the service's events failed; it goes on")
                    self._closing.wait(FIND_SOON_MS / 1_000)
        finally:
            for stream in self._streams.values():
                stream.close()
            self._context.destroy(linger=0)

    def _turn(self) -> None:
        self._forget()
        now = self._clock()
        if now >= self._find_ms:
            self._find_ms = now + self._look()
        for stream in self._streams.values():
            stream.turn()
        self._make_ready()
        idle = self._idle()
        for stream in self._streams.values():
            if not idle:
                stream.resume()
            elif stream.full:
                stream.pause()
        self._rest(idle)

    def _idle(self) -> bool:
        """Whether the engine publishes nothing now."""
        with self._lock:
            return self._ready_blocks >= READY_BLOCKS and self._clock() - self._taken_ms > IDLE_MS

    def _forget(self) -> None:
        with self._lock:
            clears, renewals = self._clears, self._renewals
        if renewals != self._seen_renewals:
            self._seen_renewals = renewals
            self._end(list(self._streams))
            self._find_ms = 0
        if clears != self._seen_clears:
            self._seen_clears = clears
            self._ended.clear()
            for stream in self._streams.values():
                stream.cleared()

    def _rest(self, idle: bool) -> None:
        """Until something has come or is to be done."""
        poller = zmq.Poller()
        waiting = False
        for stream in self._streams.values():
            waiting = waiting or stream.waiting
            if (socket := stream.socket()) is not None:
                poller.register(socket, zmq.POLLIN)
        poller.poll(TURN_MS if waiting and not idle else IDLE_TURN_MS)

    # ---------------------------------------------------------------------------------------------- streams

    def _look(self) -> int:
        """See where the streams are. Returns for how long that holds."""
        found = self._find()
        if found is None:
            return FIND_SOON_MS
        for at in found:
            known = self._streams.get(at.name)
            if known is None:
                log.info("the service's events are followed: %s at %s", at.name, ", ".join(at.endpoints))
                self._streams[at.name] = PoolStream(at, self._open_socket, self._counts, self._clock)
            else:
                known.move(at)
        self._end(self._streams.keys() - {at.name for at in found})
        now = self._clock()
        silent = any(not one.paused and now - one.heard_ms > SILENT_MS for one in self._streams.values())
        return FIND_SOON_MS if silent or not found else FIND_MS

    def _end(self, names: Iterable[str]) -> None:
        for name in names:
            self._ended.extend(self._streams.pop(name).end())

    def _open_socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RECONNECT_IVL, 100)
        socket.set(zmq.RECONNECT_IVL_MAX, 1_000)
        self._secure(socket)
        return socket

    # ----------------------------------------------------------------------------------------------- events

    def _make_ready(self) -> None:
        """Hand on what waits, as far as the next steps take it. What was told as a whole before the engine
        cleared its caches is not handed on any more."""
        with self._lock:
            room = READY_BLOCKS - self._ready_blocks
        made: list[E] = []
        blocks = 0
        while blocks < room and (told := self._next()) is not None:
            event = self._event_of(told)
            if event is None:
                self._counts.add("pool_events_invalid")
                continue
            made.append(event)
            blocks += len(told.block_hashes)
        if not made:
            return
        with self._lock:
            if self._clears == self._seen_clears:
                self._ready += made
                self._ready_blocks += blocks
        self._counts.add("pool_events", len(made))
        self._counts.add("pool_event_blocks", blocks)

    def _next(self) -> Told | None:
        if self._ended:
            return self._ended.popleft()
        for stream in self._streams.values():
            if (told := stream.pop()) is not None:
                return told
        return None
