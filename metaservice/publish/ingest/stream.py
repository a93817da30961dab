"""One engine's event stream, taken in."""

from collections import Counter
from collections.abc import Callable

import zmq.asyncio

from metaservice.publish.holdings import Member

from .dialect import DialectReader
from .events import EngineEvents
from .follow import Follower, Inbox
from .sequence import Step


class EngineStream:
    """What one engine publishes, put where it belongs, until it is stopped."""

    def __init__(
        self,
        member: Member,
        events: EngineEvents,
        reader: DialectReader,
        inbox: Inbox,
        context: zmq.asyncio.Context,
        bad: Counter[str],
        say: Callable[[str, str], None],
        now_s: Callable[[], float],
    ) -> None:
        """Raises BadEndpoint."""
        self._member = member
        self._events = events
        self._reader = reader
        self._now_s = now_s
        self._follower = Follower(member.up, self._take, self._heard, inbox, context, bad, say)
        self.sequencer = self._follower.sequencer

    @property
    def replays(self) -> int:
        """Replays that were asked for."""
        return self._follower.replays

    @property
    def connected(self) -> bool:
        """Whether the engine is there."""
        return self._follower.connected

    def stop(self) -> None:
        """Nothing is taken in from now on."""
        self._follower.stop()

    async def stopped(self) -> None:
        """After `stop`: its sockets are closed."""
        await self._follower.stopped()

    def _heard(self) -> None:
        self._member.heard_s = self._now_s()

    async def _take(self, step: Step) -> None:
        if step is None:
            self._member.own.clear()
            return
        batch = self._reader.read(step)
        if batch is not None:
            await self._events.take(batch)
