"""Questions to the publisher of cache events, a bounded number at a time; every failure is an ApiError."""

from typing import TypeVar

import msgspec
from msgspec import Struct

from metaservice.publish.errors import PublisherUnavailable
from metaservice.wire.problems import PROBLEMS

from .errors import FAULT, ApiError
from .port import EventsPort
from .settings import ApiSettings

T = TypeVar("T", bound=Struct)


class EventsDesk:
    """What the API asks the publisher. It is another process: its answers take a moment, or do not come."""

    def __init__(self, events: EventsPort | None, settings: ApiSettings) -> None:
        self._events = events
        self._timeout_ms = settings.events_timeout_ms
        self._asks_max = settings.events_asks_max
        self._asks = 0

    async def ask(self, what: str, body: Struct, answer: type[T]) -> T:
        """The answer to one question. Raises ApiError: `events_off` when nothing is published here,
        `overloaded` when too many wait for answers, `events_unavailable` when none came, or what the
        publisher refused it for.
        """
        if self._events is None:
            raise ApiError("events_off", "this replica is not configured to publish cache events")
        if self._asks >= self._asks_max:
            raise ApiError("overloaded", f"{self._asks_max} requests wait for the publisher already")
        self._asks += 1
        try:
            told = await self._events.ask(what, msgspec.msgpack.encode(body), self._timeout_ms)
        except PublisherUnavailable as failure:
            if failure.code not in PROBLEMS:
                raise ApiError("internal", FAULT) from failure
            raise ApiError(failure.code, failure.message) from None
        finally:
            self._asks -= 1
        return msgspec.msgpack.decode(told, type=answer)
