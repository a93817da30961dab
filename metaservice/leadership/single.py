"""The elector of one process alone: it always leads everything."""

from metaservice.leadership.port import Holder, Leadership, Member, Report, View


class SingleLeadership(Leadership):
    """For a journal that only one process can open. That process's lock on the journal takes the elector's
    place: a second process does not get as far as leading."""

    def __init__(self, replica: str, url: str, shards: int) -> None:
        self._replica = replica
        self._url = url
        self._shards = range(shards)
        self._report: Report | None = None
        self._resigned: set[int] = set()

    async def renew(self, report: Report) -> View:
        self._report = report
        return await self.look()

    async def look(self) -> View:
        holder = Holder(self._replica, self._url)
        members = (
            {} if self._report is None else {self._replica: Member(self._replica, self._url, self._report)}
        )
        return View({shard: holder for shard in self._shards if shard not in self._resigned}, members)

    async def acquire(self, shard: int) -> bool:
        self._resigned.discard(shard)
        return shard in self._shards

    async def resign(self, shard: int, successor: str = "") -> None:
        self._resigned.add(shard)

    async def close(self) -> None:
        self._report = None
        self._resigned.update(self._shards)
