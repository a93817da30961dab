"""Replicas that take reports: real sockets and the publisher's real books, in the test's own process."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from metaservice.clock import monotonic_s
from metaservice.publish.errors import PublisherUnavailable
from metaservice.publish.feed import EngineUp, InstanceUp
from metaservice.publish.holdings import TIERS
from metaservice.publish.ingest.ingest import Ingest
from metaservice.publish.ingest.limits import IngestLimits
from tests.functional.fake_fleet import Fleet, open_fleet

BLOCK_SIZE = 16
INSTANCE = "m0"
Held = dict[str, set[int]]
"""Event hashes by tier."""


class NothingAnnounced:
    """A pool that no router was told of."""

    def find(self, instance: str, keys: Sequence[bytes]) -> Sequence[Collection[tuple[str, str]]]:
        return []


class Books:
    """What one replica knows of engines, as its publisher keeps it. `failure`: it refuses everything so;
    `late_s`: it answers that late, and has done what it was asked to."""

    def __init__(self, limits: IngestLimits) -> None:
        self._limits = limits
        self.asked = 0
        self.late_s = 0.0
        self.failure: PublisherUnavailable | None = None
        self.restart()

    def restart(self, incarnation: str = "i1") -> None:
        """The publisher forgot everything but who is registered."""
        self.ingest = Ingest(
            NothingAnnounced(), lambda *engine: None, lambda *line: None, monotonic_s, self._limits
        )
        self.ingest.instance_up(
            InstanceUp(0, INSTANCE, "acme", "m", "m", "", "tail64", BLOCK_SIZE, 16, "x", "", "")
        )
        self.register(incarnation)

    def register(self, incarnation: str) -> None:
        """The engine registered under this incarnation."""
        self.ingest.engine_up(EngineUp(0, "e1", incarnation, INSTANCE, 0, "n1", "", 1, "", "", "vllm", 0, -1))

    async def ask(self, what: str, body: bytes, timeout_ms: int) -> bytes:
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        answer = await (self.ingest.report(body) if what == "report" else self.ingest.route(body))
        await asyncio.sleep(self.late_s)
        return answer

    @property
    def held(self) -> Held:
        """What it believes that the engine holds."""
        member = self.ingest.holdings.get("e1")
        assert member is not None
        return {tier: set(member.reported.hashes(at)) for at, tier in enumerate(TIERS[:3])}

    @property
    def visible(self) -> bool:
        member = self.ingest.holdings.get("e1")
        return member is not None and member.visible


@asynccontextmanager
async def reporting(
    *ids: str, limits: IngestLimits | None = None
) -> AsyncIterator[tuple[Fleet, dict[str, Books]]]:
    """Replicas of these ids, and the books of each."""
    books = {id: Books(limits or IngestLimits()) for id in ids}
    async with open_fleet(*ids, events=dict(books)) as fleet:
        yield fleet, books
    for book in books.values():
        await book.ingest.close()
