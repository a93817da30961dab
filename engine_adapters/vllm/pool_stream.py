"""One of the service's streams of cache events, followed without a gap.

A stream's batches are numbered, one by one, whoever leads. What is missed is asked for again. What cannot be
made up for that way (a long absence, numbers that begin anew, an engine that forgot all) is told as a whole
by the service, and whatever was passed on before and is not in it any more is told as removed.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import zmq
from msgspec import Struct

from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.pool_wire import (
    END,
    NUMBER_BYTES,
    REMOVED_BLOCKS_MAX,
    Removed,
    Stored,
    Told,
    events_of,
)

log = logging.getLogger(__name__)

GAP_MAX = 1_000
"""After more batches than this were missed the service is asked for the whole: removals that long ago may
not be in what it still tells."""
WAITING_BYTES_MAX = 16 << 20
"""So much of a stream waits for the engine to publish it. Nothing more is read until the engine has."""
FRAMES_A_TURN = 64
SILENCE_MS = 2_000
"""A replay of which nothing came for so long is given up."""
AGAIN_MS = 1_000
"""Between a replay that came to nothing and the next."""
DEAF_MS = 5_000
"""A stream says something every second. One that says nothing for so long is connected to anew: libzmq does
not come back to an address at which something else answered for a moment."""
STALE_MS = 5_000
"""Numbers that were there before, for so long and none else: they begin anew, and the word of it was lost."""
_LIVE_HWM = 10_000
_REPLAY_HWM = 256


class StreamAt(Struct, frozen=True):
    """Where a stream is. `endpoints`: of every replica that may lead; one of them sends at a time. `replays`:
    whom to ask for what was missed, the likeliest first. `topic` empty: all that comes there is of it."""

    name: str
    topic: bytes
    endpoints: tuple[str, ...]
    replays: tuple[str, ...]


class _Replay:
    """One that is under way. `known` is what had been passed on before, when it is of the whole."""

    __slots__ = ("heard_ms", "known", "last", "start")

    def __init__(self, start: int, known: dict[str, set[int]] | None, now_ms: int) -> None:
        self.start = start
        self.last = start - 1
        self.known = known
        self.heard_ms = now_ms


class PoolStream:
    """One thread's."""

    def __init__(
        self,
        at: StreamAt,
        open_socket: Callable[[int], Any],
        counts: Counts,
        clock: Callable[[], int],
    ) -> None:
        """`open_socket` makes a socket of a ZMQ type that has what is needed to be let in."""
        self.at = at
        self.heard_ms = clock()
        """When anything came last."""
        self._open_socket = open_socket
        self._counts = counts
        self._clock = clock
        self._live: Any = None
        self._connected_ms = 0
        self._dealer: Any = None
        self._replay: _Replay | None = None
        self._asked = 0
        self._again_ms = 0
        self._stale_ms = 0
        self._cursor: int | None = None
        """The number up to which all is passed on; None: the whole is to be asked for."""
        self._known: dict[str, set[int]] = {}
        """By medium: what followers of the engine may believe to be there."""
        self._waiting: deque[tuple[Told, int]] = deque()
        self._waiting_bytes = 0
        self._connect()

    # ------------------------------------------------------------------------------------- what was heard

    def pop(self) -> Told | None:
        """The next event to pass on."""
        if not self._waiting:
            return None
        event, size = self._waiting.popleft()
        self._waiting_bytes -= size
        return event

    @property
    def paused(self) -> bool:
        """Whether it is not followed for now: too much waits for an engine that publishes nothing."""
        return self._live is None

    @property
    def full(self) -> bool:
        """Whether nothing more is read until some of what waits was passed on."""
        return self._waiting_bytes >= WAITING_BYTES_MAX

    @property
    def waiting(self) -> bool:
        """Whether there is something to pass on."""
        return bool(self._waiting)

    # ------------------------------------------------------------------------------------------ what to do

    def cleared(self) -> None:
        """Who follows the engine has forgotten all: tell it from the beginning."""
        self._known = {}
        self._drop_waiting()
        self._begin_anew()

    def move(self, at: StreamAt) -> None:
        """It is somewhere else now, too."""
        before, self.at = self.at, at
        if self._live is None or before == at:
            return
        for gone in set(before.endpoints) - set(at.endpoints):
            self._live.disconnect(gone)
        for new in set(at.endpoints) - set(before.endpoints):
            self._live.connect(new)
        self._asked = 0
        if self._replay is None:
            self._hang_up()

    def pause(self) -> None:
        """Too much waits for an engine that publishes nothing: forget it, and hear no more."""
        self._counts.add("pool_event_pauses")
        self._drop_waiting()
        self._begin_anew()
        self.close()

    def resume(self) -> None:
        """The engine publishes again: follow it from the whole on."""
        if self.paused:
            self._connect()
            self._begin_anew()

    def end(self) -> Iterator[Removed]:
        """Follow it no longer; what it told of is there no longer."""
        self._drop_waiting()
        self.close()
        yield from _removed(self._known)

    def close(self) -> None:
        """Let go of the sockets."""
        for socket in (self._live, self._dealer):
            if socket is not None:
                socket.close(linger=0)
        self._live = self._dealer = self._replay = None

    # --------------------------------------------------------------------------------------------- sockets

    def socket(self) -> Any:
        """From which something may be read next; None while nothing is to be."""
        if self.paused:
            return None
        if self.full:
            return None
        if self._replay is not None:
            return self._dealer
        return self._live if self._cursor is not None else None

    def turn(self) -> None:
        """Read what has come, some of it; ask for what is missing. Never waits."""
        if self.paused:
            return
        now = self._clock()
        if self._replay is not None:
            if self.full:
                self._replay.heard_ms = now  # we do not read; whether it is still there is seen afterwards
            else:
                self._read_replay(self._replay)
        elif self._cursor is None:
            if now >= self._again_ms:
                self._ask()
        else:
            self._read_live(self._cursor)
            if now - max(self.heard_ms, self._connected_ms) > DEAF_MS:
                self._live.close(linger=0)
                self._connect()

    def _connect(self) -> None:
        self._connected_ms = self._clock()
        self._live = self._open_socket(zmq.SUB)
        self._live.set_hwm(_LIVE_HWM)
        self._live.setsockopt(zmq.SUBSCRIBE, self.at.topic)
        for endpoint in self.at.endpoints:
            self._live.connect(endpoint)

    def _drop_waiting(self) -> None:
        """Nothing of it is passed on. What was to be told as removed may be believed to be there."""
        for event, _ in self._waiting:
            if isinstance(event, Removed):
                self._known.setdefault(event.medium, set()).update(event.block_hashes)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _begin_anew(self) -> None:
        if self._replay is not None:
            self._give_up(self._replay)
        self._cursor, self._again_ms, self._stale_ms = None, 0, 0

    # ------------------------------------------------------------------------------------------------ live

    def _read_live(self, cursor: int) -> None:
        for _ in range(FRAMES_A_TURN):
            if self.full:
                return
            try:
                frames = self._live.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
                self._counts.add("pool_events_invalid")
                continue
            topic, told, payload = frames
            if self.at.topic and topic != self.at.topic:
                continue
            self.heard_ms = self._clock()
            number = int.from_bytes(told, "big")
            if told == END or self._stale(number, cursor):
                self._begin_anew()
                return
            if number <= cursor:
                continue
            if number > cursor + 1:
                self._counts.add("pool_event_gaps")
                if number - cursor > GAP_MAX:
                    self._begin_anew()
                else:
                    self._ask()
                return
            self._take(payload)
            self._cursor = cursor = number

    def _stale(self, number: int, cursor: int) -> bool:
        """Whether nothing but numbers of before has come for long."""
        if number > cursor:
            self._stale_ms = 0
            return False
        now = self._clock()
        self._stale_ms = self._stale_ms or now
        return now - self._stale_ms > STALE_MS

    # ---------------------------------------------------------------------------------------------- replay

    def _ask(self) -> None:
        """For what comes after the cursor, or for the whole."""
        if (now := self._clock()) < self._again_ms:
            return
        whole = self._cursor is None
        start = 0 if self._cursor is None else self._cursor + 1
        if self._dealer is None:
            self._dealer = self._open_socket(zmq.DEALER)
            self._dealer.set_hwm(_REPLAY_HWM)
            self._dealer.connect(self.at.replays[self._asked % len(self.at.replays)])
        try:
            self._dealer.send_multipart([b"", start.to_bytes(NUMBER_BYTES, "big")], zmq.NOBLOCK)
        except zmq.Again:
            self._failed("nobody is there")
            return
        self._counts.add("pool_event_resyncs" if whole else "pool_event_replays")
        known = None
        if whole:
            known, self._known = self._known, {}
        self._replay = _Replay(start, known, now)

    def _read_replay(self, replay: _Replay) -> None:
        for _ in range(FRAMES_A_TURN):
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                if self._clock() - replay.heard_ms > SILENCE_MS:
                    self._give_up(replay)
                    self._failed("no answer")
                return
            replay.heard_ms = self.heard_ms = self._clock()
            if len(frames) != 4 or len(frames[2]) != NUMBER_BYTES:
                self._counts.add("pool_events_invalid")
            elif frames[2] == END:
                self._replayed(replay)
                return
            elif (number := int.from_bytes(frames[2], "big")) > replay.last:
                self._take(frames[3])
                replay.last = number
                if replay.known is None:
                    self._cursor = number
            if self.full:
                return

    def _replayed(self, replay: _Replay) -> None:
        """It came to its end."""
        if replay.last < replay.start:
            self._give_up(replay)
            self._failed("it has no more")
            return
        if replay.known is not None:
            for medium, told in self._known.items():
                replay.known.get(medium, set()).difference_update(told)
            for event in _removed(replay.known):
                self._wait(event, REMOVED_BLOCKS_MAX)
        self._replay, self._cursor = None, replay.last

    def _give_up(self, replay: _Replay) -> None:
        """What had been passed on before may still be believed."""
        for medium, known in (replay.known or {}).items():
            self._known.setdefault(medium, set()).update(known)
        self._replay = None

    def _failed(self, why: str) -> None:
        """Somebody else is asked, after a while."""
        log.debug("replay of %s from %s: %s", self.at.name, self.at.replays, why)
        self._again_ms = self._clock() + AGAIN_MS
        self._asked += 1
        self._hang_up()

    def _hang_up(self) -> None:
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None

    # ---------------------------------------------------------------------------------------------- events

    def _take(self, payload: bytes) -> None:
        for told in events_of(payload):
            if told is None:
                self._counts.add("pool_events_invalid")
                continue
            event, size = told
            known = self._known.setdefault(event.medium, set())
            if isinstance(event, Stored):
                known.update(event.block_hashes)
            else:
                known.difference_update(event.block_hashes)
            self._wait(event, size)

    def _wait(self, event: Told, size: int) -> None:
        self._waiting.append((event, size))
        self._waiting_bytes += size


def _removed(known: dict[str, set[int]]) -> Iterator[Removed]:
    for medium, blocks in known.items():
        left = sorted(blocks)
        for at in range(0, len(left), REMOVED_BLOCKS_MAX):
            yield Removed(left[at : at + REMOVED_BLOCKS_MAX], medium)
