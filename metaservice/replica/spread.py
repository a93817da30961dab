"""What several shards need of each other: the catalogue comes to the data shards led here, and their errands
go to the catalogue's leader, wherever that is.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from metaservice.core import commands as cmd
from metaservice.core.events import Event
from metaservice.journal.errors import JournalError

from .errand import Courier, run_errands
from .errors import ShardUnavailable
from .feed import CatalogueLog, feed
from .shard import Shard

log = logging.getLogger(__name__)

FEED_S = 1.0
"""How often the data shards are looked after although nothing new was seen."""
ERRAND_S = 0.1
SHORT_WAIT_S = 0.3
"""How long a write that needs more room than its shard has been granted waits for the catalogue's answer."""


class Spread:
    """Beside the shards of one replica."""

    def __init__(self, shards: Sequence[Shard], courier: Courier, catalogue_url: Callable[[], str]) -> None:
        self._shards = shards
        self._catalogue = shards[0]
        self._courier = courier
        self._catalogue_url = catalogue_url
        self._log = CatalogueLog()
        self._fed = asyncio.Event()
        self._feeding = [asyncio.Lock() for _ in shards]
        self._telling = [asyncio.Lock() for _ in shards]
        self._refreshing: asyncio.Task[None] | None = None

    def tasks(self) -> list[asyncio.Task[None]]:
        """What runs until it is cancelled."""
        return [
            asyncio.create_task(self._feed_for_ever(), name="feed"),
            *(asyncio.create_task(self._errands(one), name=f"errands-{one.number}") for one in self._shards),
        ]

    # ------------------------------------------------------------ the catalogue comes

    def applied(self, events: Sequence[Event], seq: int) -> None:
        """The catalogue says something new, up to this seq."""
        if self._log.add(events, seq):
            self._fed.set()

    def restarted(self) -> None:
        """The catalogue's state was built anew."""
        self._log.restart(self._catalogue.durable_seq)
        self._fed.set()

    def look_after(self) -> None:
        """A shard is led here from now on."""
        self._fed.set()

    async def _feed_for_ever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(FEED_S):
                    await self._fed.wait()
            self._fed.clear()
            try:
                await self._feed_all()
            except Exception:
                log.exception("bringing the catalogue to a data shard failed")

    async def _feed_all(self) -> None:
        for shard in self._shards[1:]:
            if shard.ready:
                try:
                    async with self._feeding[shard.number]:
                        await feed(self._log, self._catalogue, shard)
                except ShardUnavailable as error:  # it, or the catalogue; the others go on
                    log.debug("shard %d waits for the catalogue: %s", shard.number, error)

    async def refresh(self) -> None:
        """Catch up with the catalogue's journal, and bring the data shards led here up to it. Calls that come
        meanwhile share one, but none shares one that began before it."""
        before = self._refreshing
        if before is not None and not before.done():
            await asyncio.wait([before])
        if self._refreshing is before or self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())
            # whoever waited may be gone by then
            self._refreshing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._refreshing)

    async def _refresh(self) -> None:
        try:
            await self._catalogue.catch_up()
        except JournalError as error:
            raise ShardUnavailable("journal_unavailable", str(error)) from error
        await self._feed_all()

    # ------------------------------------------------------------ errands go

    async def _errands(self, shard: Shard) -> None:
        while True:
            await asyncio.sleep(ERRAND_S)
            if not shard.ready:
                continue
            try:
                await self._run_errands(shard)
            except ShardUnavailable as error:
                log.debug("shard %d: errands wait: %s", shard.number, error)
            except Exception:
                log.exception("shard %d: errands failed", shard.number)

    async def _run_errands(self, shard: Shard) -> None:
        """One at a time for a shard: who comes meanwhile waits, and finds less to tell."""
        async with self._telling[shard.number]:
            settled = await run_errands(shard, self._catalogue, self._catalogue_url(), self._courier)
            if settled is None:
                return
            if shard is not self._catalogue and settled.version > shard.machine.state.catalogue_version:
                await self.refresh()
            # The answer also acknowledges what was told, so it is taken even when it gives nothing.
            await shard.submit(cmd.GiveBudget(settled=settled))

    async def ask_for_room(self, shard: Shard) -> None:
        """Run the errands now, and wait a little for the answer."""
        with suppress(ShardUnavailable, TimeoutError):
            async with asyncio.timeout(SHORT_WAIT_S):
                await self._run_errands(shard)
