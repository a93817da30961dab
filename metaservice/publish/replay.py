"""Answers to consumers that missed something: `[peer, "", start]` is answered with batches and then END.

A consumer waits for END, some of them for ever; so END comes whoever is asked and whatever is wrong, at once
when there is nothing to tell. What there is to tell goes in slices between which everything else goes on, and
only as fast as the consumer reads.
"""

import asyncio
import errno
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final, Protocol

import zmq

from .channel import COPY_BYTES_MAX, END, Channel
from .segments import Segment, Segments

log = logging.getLogger(__name__)

SLICE_S = 0.003
"""What one answer may take before others have their turn."""
REQUESTERS_MAX = 1_024
"""Answers under way. Whoever asks beyond gets END at once, and asks again when it misses something."""
REQUESTS_MAX = 4
"""Of one requester, this many may wait behind the one that is being answered."""
STALL_S = 10.0
"""A requester that reads nothing for so long is dropped."""
RETRY_S = 0.005
PLANS_MAX = 4
"""A requester so slow that the ring overtakes it is told the state anew, so many times."""
_REQUEST_FRAMES = (2, 3)
_U64_BYTES = 8


class Source(Protocol):
    """The windows and what stands, as replays need them."""

    @property
    def segments(self) -> Segments: ...

    def reach(self, shard: int) -> tuple[int, int]:
        """Numbers of the oldest window that is kept and of the newest one; the newest is -1 while the shard
        has not begun. With none kept the oldest is the next one."""
        ...

    def stands(self, shard: int) -> bool:
        """Whether all that is announced is known."""
        ...

    def batch_of(self, channel: Channel, number: int) -> bytes | None:
        """A payload, None when its window is not kept any more."""
        ...

    def segment(self, channel: Channel, start: int) -> Segment:
        """The state as of a window from which the ring goes on, in messages that can be numbered from `start`
        on up to that window's number."""
        ...


class _Answer:
    """One requester and how far it is."""

    def __init__(self, channel: Channel, peer: bytes, now_s: float) -> None:
        self.channel = channel
        self.peer = peer
        self.moved_s = now_s
        self.waiting: deque[int] = deque()
        """Where its next requests start."""
        self.at = 0
        """The next number that it is told."""
        self.last = -1
        """The last window that it is told."""
        self.segment: Segment | None = None
        self.first = 0
        """The number that the segment's first piece has for it."""
        self.row = 0
        """The next piece of the segment."""
        self.plans = 0
        self.end = False
        """Nothing is left but END."""


class _Outcome(Enum):
    sent = auto()
    full = auto()
    gone = auto()


_Message = tuple[bytes, bytes, bytes]
"""Topic, number, payload."""
_END_MESSAGE: Final[_Message] = (b"", END, b"")


class Replays:
    """All answers of the process, one slice after the other."""

    def __init__(self, source: Source, now_s: Callable[[], float]) -> None:
        self._source = source
        self._now_s = now_s
        self._answers: dict[tuple[int, bytes], _Answer] = {}
        self._ready: deque[_Answer] = deque()
        self._blocked: list[_Answer] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter(
            requests=0, malformed=0, refused=0, batches=0, snapshots=0, stalled=0, gone=0
        )

    def start(self) -> None:
        """Begin to answer."""
        self._task = asyncio.create_task(self._run(), name="replays")

    async def close(self) -> None:
        """What is under way is not ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    @property
    def under_way(self) -> int:
        """Requesters that are being answered."""
        return len(self._answers)

    def request(self, channel: Channel, frames: Sequence[bytes]) -> None:
        """A message that came in: anything at all, from anybody."""
        if len(frames) not in _REQUEST_FRAMES or len(frames[-1]) != _U64_BYTES or any(frames[1:-1]):
            self.counts["malformed"] += 1
            return
        self.counts["requests"] += 1
        start = int.from_bytes(frames[-1], "big")
        name = channel.channel, frames[0]
        known = self._answers.get(name)
        if known is not None:
            if len(known.waiting) < REQUESTS_MAX:
                known.waiting.append(start)
            else:
                self.counts["refused"] += 1
            return
        answer = _Answer(channel, frames[0], self._now_s())
        answer.at = start
        self._plan(answer)
        if len(self._answers) >= REQUESTERS_MAX:
            self.counts["refused"] += 1
            self._send(answer, _END_MESSAGE)
        elif not answer.end or self._send(answer, _END_MESSAGE) is _Outcome.full:
            self._answers[name] = answer
            self._ready.appendleft(answer)  # whoever needs little is not behind those who need much
            self._wake.set()

    def forget(self, channel: int) -> None:
        """The channel is closed, or is for something else."""
        self._ready = deque(one for one in self._ready if one.channel.channel != channel)
        self._blocked = [one for one in self._blocked if one.channel.channel != channel]
        for name in [name for name in self._answers if name[0] == channel]:
            del self._answers[name]

    # ------------------------------------------------------------ one after the other

    async def _run(self) -> None:
        while True:
            if not self._ready and not self._blocked:
                self._wake.clear()
                await self._wake.wait()
            elif not self._ready:
                await asyncio.sleep(RETRY_S)
            self._unblock()
            if self._ready:
                answer = self._ready.popleft()
                try:
                    if self._slice(answer):
                        self._ready.append(answer)
                except Exception:
                    # Whoever comes after must not wait for ever because of this one.
                    log.exception("a replay of stream %d failed", answer.channel.channel)
                    self._send(answer, _END_MESSAGE)
                    self._drop(answer)
                await asyncio.sleep(0)

    def _unblock(self) -> None:
        """Those that could take no more try again; those that could not for long are dropped."""
        blocked, self._blocked = self._blocked, []
        now_s = self._now_s()
        for answer in blocked:
            if now_s - answer.moved_s > STALL_S:
                self.counts["stalled"] += 1
                self._drop(answer)
            else:
                self._ready.append(answer)

    def _slice(self, answer: _Answer) -> bool:
        """Whether it goes on at once."""
        until_s = self._now_s() + SLICE_S
        while True:
            message = self._next(answer)
            if message is not None:
                outcome = self._send(answer, message)
                if outcome is _Outcome.full:
                    self._blocked.append(answer)
                    return False
                if outcome is _Outcome.gone:
                    self.counts["gone"] += 1
                    self._drop(answer)
                    return False
                if message is _END_MESSAGE:
                    return self._ended(answer)
                self._sent(answer)
            now_s = self._now_s()
            if now_s >= until_s:
                return True

    def _ended(self, answer: _Answer) -> bool:
        """It got END; whether it asked for more meanwhile."""
        if not answer.waiting:
            self._drop(answer)
            return False
        answer.at, answer.plans, answer.end = answer.waiting.popleft(), 0, False
        self._plan(answer)
        return True

    def _drop(self, answer: _Answer) -> None:
        self._answers.pop((answer.channel.channel, answer.peer), None)

    # ------------------------------------------------------------ what it is told

    def _plan(self, answer: _Answer) -> None:
        """How it gets from `answer.at` to now."""
        source, shard = self._source, answer.channel.plan.shard
        oldest, newest = source.reach(shard)
        answer.segment, answer.last = None, newest
        if answer.at > newest:
            answer.end = True
        elif answer.at < oldest:
            answer.plans += 1
            if answer.plans > PLANS_MAX or not source.stands(shard):
                answer.end = True
                return
            answer.segment = source.segment(answer.channel, answer.at)
            answer.first, answer.row = answer.at, 0
            self.counts["snapshots"] += 1

    def _next(self, answer: _Answer) -> _Message | None:
        """What it is told next; None when that takes another step."""
        if answer.end:
            return _END_MESSAGE
        topic = answer.channel.plan.stream.topic
        segment = answer.segment
        if segment is not None:
            if segment.complete and answer.row == len(segment.pieces) - 1:
                number = segment.number
            elif answer.row < len(segment.pieces) - 1:
                number = answer.first + answer.row
            else:
                self._source.segments.step(segment)
                return None
            return topic, number.to_bytes(8, "big"), segment.pieces[answer.row]
        if answer.at > answer.last:
            answer.end = True
            return _END_MESSAGE
        payload = self._source.batch_of(answer.channel, answer.at)
        if payload is None:
            self._plan(answer)
            return None
        return topic, answer.at.to_bytes(8, "big"), payload

    def _sent(self, answer: _Answer) -> None:
        """It was told what was next."""
        self.counts["batches"] += 1
        segment = answer.segment
        if segment is None:
            answer.at += 1
            return
        segment.used_s = self._now_s()
        answer.row += 1
        if segment.complete and answer.row == len(segment.pieces):
            answer.segment = None
            answer.at = segment.number + 1
        else:
            answer.at = answer.first + answer.row

    def _send(self, answer: _Answer, message: _Message) -> _Outcome:
        socket = answer.channel.replay
        if socket is None:
            return _Outcome.gone
        try:
            frames = (answer.peer, b"", *message)
            socket.socket.send_multipart(frames, zmq.NOBLOCK, copy=len(message[2]) < COPY_BYTES_MAX)
        except zmq.Again:
            return _Outcome.full
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return _Outcome.gone
        finally:
            socket.look()
        answer.moved_s = self._now_s()
        return _Outcome.sent
