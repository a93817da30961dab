"""The keeper's way to the service: to whichever replica leads what is to be renewed.

Shards fail one by one. One that gives no answer is left alone for a while, and the others are renewed
meanwhile.
"""

import logging
from collections.abc import Callable
from random import Random
from time import sleep
from typing import TypeVar

from .breaker import Backoff
from .calls import Call, Who
from .config import ClientConfig
from .endpoints import Endpoints
from .errors import CallFailed
from .results import now_ms
from .speech import spoken, understood
from .transport import Transport
from .trip import Trip

T = TypeVar("T")

Say = Callable[[int, str], None]

RETRY_MS_MAX = 2_000
_RETRY_MS_MIN = 100


class _Lane:
    """How one shard does."""

    __slots__ = ("not_before_ms", "retry", "trouble")

    def __init__(self, random: Random) -> None:
        self.retry = Backoff(_RETRY_MS_MIN, RETRY_MS_MAX, random)
        self.not_before_ms = 0
        self.trouble = ""


class Asking:
    """Asks and waits. One thread uses it."""

    def __init__(self, config: ClientConfig, who: Who, random: Random, say: Say) -> None:
        """`say(level, text)`: a line for the log."""
        self._who = who
        self._random = random
        self._say = say
        self._endpoints = Endpoints(config, Transport, Transport.close)
        self._lanes: dict[int, _Lane] = {}

    def close(self) -> None:
        """Give the connections up."""
        for endpoint in self._endpoints.all:
            endpoint.transport.close()

    def not_before_ms(self, shard: int) -> int:
        """When this shard may be asked again; 0 when nothing is wrong."""
        lane = self._lanes.get(shard)
        return lane.not_before_ms if lane is not None else 0

    def ask(self, call: Call[T], timeout_ms: int) -> T:
        """The result of a call. Raises CallFailed."""
        trip = Trip(self._endpoints, call, spoken(self._who, call), now_ms(), timeout_ms)
        while True:
            try:
                reply = trip.endpoint.transport.exchange(trip.request(), trip.until_ms, call.repeatable)
                result = understood(call, reply, trip.asked_ms)
            except CallFailed as failed:
                sleep(trip.go_on(failed) / 1_000)
            else:
                trip.arrived()
                return result

    def answered(self, shard: int) -> None:
        """All that was asked of this shard was answered."""
        lane = self._lanes.get(shard)
        if lane is not None:
            del self._lanes[shard]
            self._say(logging.INFO, f"service answers again about shard {shard}")

    def hold_off(self, shard: int, failed: CallFailed) -> None:
        """The service does not answer about this shard, or not well: the next try after a pause."""
        lane = self._lanes.get(shard)
        if lane is None:
            lane = self._lanes[shard] = _Lane(self._random)
        asked_ms = min(failed.retry_after_ms, RETRY_MS_MAX)
        lane.not_before_ms = now_ms() + max(lane.retry.next_ms(), lane.retry.spread_ms(asked_ms))
        if failed.failure != lane.trouble:
            lane.trouble = failed.failure
            self._say(logging.WARNING, f"{failed.failure}: {failed.detail} (shard {shard})")
