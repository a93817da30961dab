"""How the catalogue reaches the data shards that are led here.

Every replica follows the catalogue shard. What concerns others is kept in a short log; the leader of a data
shard journals copies of it into its own journal (`TakeCatalogue`), so that every shard's history stands
alone. A shard that is further behind than the log reaches takes the difference to the whole catalogue instead
(`SyncCatalogue`).
"""

from collections import deque
from collections.abc import Sequence

from metaservice.core import commands as cmd
from metaservice.core.events import Event
from metaservice.core.machine import Machine
from metaservice.core.spread import concerns

from .shard import Shard

EVENTS_MAX = 16_384


class CatalogueLog:
    """What the catalogue said lately, as far as it concerns data shards: durable events with their seqs."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, Event]] = deque()
        self._floor_seq = 0
        self.seq = 0
        """The last event that concerns anybody."""

    def restart(self, seq: int) -> None:
        """The catalogue's state was built anew, up to this seq: nothing is known of the way there."""
        self._events.clear()
        self._floor_seq = self.seq = seq

    def add(self, events: Sequence[Event], seq: int) -> bool:
        """Events that end at `seq`; whether any of them concerns data shards."""
        first_seq = seq - len(events) + 1
        found = [(first_seq + row, event) for row, event in enumerate(events) if concerns(event)]
        if not found:
            return False
        self._events += found
        self.seq = found[-1][0]
        while len(self._events) > EVENTS_MAX:
            self._floor_seq = self._events.popleft()[0]
        return True

    def since(self, version: int) -> list[tuple[int, Event]] | None:
        """What came after a version, None when the log does not reach back that far."""
        if version < self._floor_seq:
            return None
        return [(seq, event) for seq, event in self._events if seq > version]


async def feed(log: CatalogueLog, catalogue: Shard, shard: Shard) -> None:
    """Bring a data shard that is led here up to what the catalogue says.

    Raises ShardUnavailable when either cannot be asked now: the next call goes on from where this one ended.
    """
    version = shard.machine.state.catalogue_version
    if version and version >= log.seq:
        return
    news = log.since(version) if version else None
    if news is None:
        view = await catalogue.at_rest(Machine.catalogue_view)
        if view.version > version:
            await shard.submit(cmd.SyncCatalogue(view=view))
    elif news:
        events = tuple(event for _, event in news)
        await shard.submit(cmd.TakeCatalogue(since=version, version=news[-1][0], events=events))
