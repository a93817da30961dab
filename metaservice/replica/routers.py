"""Carries what the journal says to the publisher process, and what routers ask for back to the leader.

The publisher holds nothing of its own: whenever it starts, fell behind, or a shard's state was built anew,
the shard is told from the beginning (`Begin` to `Ready`), in steps, while new windows go on.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from metaservice.core import commands as cmd
from metaservice.core.events import (
    CatalogueTaken,
    EngineRegistered,
    Event,
    InstanceGone,
    InstancePut,
    InstanceRetired,
    MemberExpired,
    MemberLeft,
)
from metaservice.core.machine import Machine
from metaservice.core.windows import Announcement, EngineAt
from metaservice.publish import feed
from metaservice.publish.host import Publisher

from .errors import NotLeader, ShardUnavailable
from .shard import Shard

log = logging.getLogger(__name__)

SLOTS_PER_STEP = 4_096
BACKLOG_BYTES = 4 * 1024 * 1024
"""The publisher is not told more of what stands while it has so much to read."""
PAUSE_S = 0.01
FOR_EVER_S = 1e9
"""A lease that never ends, for a page of whole milliseconds."""
_MEMBERSHIP = {
    CatalogueTaken, EngineRegistered, InstanceGone, InstancePut, InstanceRetired, MemberExpired, MemberLeft,
}  # fmt: skip
"""Events after which there may be other instances or engines."""


class Routers:
    """All shards of a replica, one publisher."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self._feeds: list[_Feed] = []

    def attach(self, shards: Sequence[Shard]) -> None:
        """These are the shards. Once, before the publisher starts."""
        told_by: dict[tuple[str, str], int] = {}
        self._feeds = [_Feed(shard, self.publisher, told_by) for shard in shards]
        self.publisher.on_begin = self._begin
        self.publisher.on_restate = self._restate
        self.publisher.on_beat = self._beat

    def applied(self, shard: int, events: Sequence[Event]) -> None:
        """These events of the shard are durable and applied."""
        self._feeds[shard].applied(events)

    def restarted(self, shard: int) -> None:
        """The shard's state was built anew."""
        self._feeds[shard].begin()

    def leading(self, shard: int, epoch: int, until_s: float) -> None:
        """See `life.Hooks`."""
        self._feeds[shard].leading(epoch, until_s)

    def close(self) -> None:
        """Tell no more."""
        for one in self._feeds:
            one.stop()

    def _begin(self) -> None:
        for one in self._feeds:
            one.begin()

    def _restate(self, shard: int, instance: str, why: str) -> None:
        if shard < len(self._feeds):
            self._feeds[shard].restate(instance, why)

    def _beat(self, shard: int) -> None:
        if shard < len(self._feeds):
            self._feeds[shard].shard.beat()


class _Feed:
    """One shard's part."""

    def __init__(self, shard: Shard, publisher: Publisher, told_by: dict[tuple[str, str], int]) -> None:
        self.shard = shard
        self._publisher = publisher
        self._told_by = told_by
        """(kind, id) of every engine and instance -> the shard that told of it last. One may be of another
        shard now, and that shard's copy of the catalogue be ahead of this one's: then it is not gone."""
        self._instances: dict[str, Announcement] = {}
        self._engines: dict[str, EngineAt] = {}
        self._beginning: asyncio.Task[None] | None = None
        self._unsettled: Callable[[], None] | None = None
        """What waits for the moment at which the state says nothing that the journal does not."""
        self._epoch = 0
        """In which it leads; 0: it does not."""
        self._going = False
        """Whether an instance or engine went that the publisher has not been told of."""
        self._restating: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ from the beginning

    def begin(self) -> None:
        """Tell everything, from `Begin` on. What was told before is void."""
        self.stop()
        self._instances, self._engines = {}, {}
        machine = self.shard.loaded
        if machine is None:
            return  # it is told when it is there
        if not machine.settled:
            self._unsettled = self.begin
            return
        machine.collect_windows()
        machine.take_windows()  # they are in what stands
        self._publisher.tell(feed.Begin(self.shard.number, machine.window))
        self._ups(machine)
        self._tell_leads(self._epoch)
        self._beginning = asyncio.create_task(self._stand(machine), name=f"standing-{self.shard.number}")

    async def _stand(self, machine: Machine) -> None:
        at: int | None = 0
        while at is not None:
            if self._publisher.backlog_bytes > BACKLOG_BYTES:
                await asyncio.sleep(PAUSE_S)
                continue
            runs, at = machine.standing(at, SLOTS_PER_STEP)
            if runs:
                self._publisher.tell(feed.Standing(self.shard.number, runs))
            await asyncio.sleep(0)
        if machine.settled:
            self._end(machine)
        else:
            self._unsettled = partial(self._end, machine)

    def _end(self, machine: Machine) -> None:
        """What stands was told, and all of it is durable: what routers are told of it can be relied on."""
        self._publisher.tell(feed.Tombstones(self.shard.number, machine.tombstones()))
        self._publisher.tell(feed.Ready(self.shard.number))

    def stop(self) -> None:
        """Tell no more of what stands."""
        self._unsettled = None
        if self._beginning is not None:
            self._beginning.cancel()
            self._beginning = None

    # ------------------------------------------------------------ as it goes

    def applied(self, events: Sequence[Event]) -> None:
        """Instances and engines that came, then the windows, then those that went: a block's removal needs
        its instance."""
        machine = self.shard.loaded
        if machine is None or self._unsettled == self.begin:
            self._settle(machine)
            return
        if not _MEMBERSHIP.isdisjoint(map(type, events)):
            self._ups(machine)
            self._going = True
        for window in machine.take_windows():
            self._publisher.tell(window)
        if self._going:
            self._going = self._downs(machine)
        self._settle(machine)

    def _settle(self, machine: Machine | None) -> None:
        if self._unsettled is not None and machine is not None and machine.settled:
            then, self._unsettled = self._unsettled, None
            then()

    def _ups(self, machine: Machine) -> None:
        number = self.shard.number
        for instance in machine.publications():
            if self._instances.get(instance.instance) != instance:
                self._instances[instance.instance] = instance
                self._told_by["instance", instance.instance] = number
                self._publisher.tell(
                    feed.InstanceUp(
                        number, instance.instance, instance.tenant, instance.model, instance.routing_group,
                        instance.lora, instance.hash_of, instance.block_size_tokens, instance.key_length,
                        instance.hash_scheme, instance.hash_seed, instance.canary, instance.base,
                    )
                )  # fmt: skip
        for one in machine.announced_engines():
            if self._engines.get(one.engine) != one:
                self._engines[one.engine] = one
                self._told_by["engine", one.engine] = number
                at = one.endpoints
                self._publisher.tell(
                    feed.EngineUp(
                        number, one.engine, one.incarnation, one.instance, one.rank, at.node, at.address,
                        at.worker_id, at.events, at.replay, at.dialect, one.pool_channel, one.local_channel,
                    )
                )  # fmt: skip

    def _downs(self, machine: Machine) -> bool:
        """Whether something is left to be told as gone."""
        alive = {one.engine for one in machine.announced_engines()}
        for engine in [one for one in self._engines if one not in alive]:
            del self._engines[engine]
            why = "expired" if machine.knows_engine(engine) else "left"
            if self._gone("engine", engine):
                self._publisher.tell(feed.EngineDown(self.shard.number, engine, why))
        named = {one.instance for one in machine.publications()}
        going = [one for one in self._instances if one not in named]
        for instance in going:
            if machine.untold(instance):
                return True  # its blocks are told as removed first
            del self._instances[instance]
            if self._gone("instance", instance):
                self._publisher.tell(feed.InstanceDown(self.shard.number, instance))
        return False

    def _gone(self, kind: str, id: str) -> bool:
        """Whether no other shard has it now."""
        if self._told_by.get((kind, id)) != self.shard.number:
            return False
        del self._told_by[kind, id]
        return True

    # ------------------------------------------------------------ who leads

    def leading(self, epoch: int, until_s: float) -> None:
        """The fence first: what is told after it is sent only while it holds."""
        self._publisher.fence(self.shard.number, epoch, min(until_s, FOR_EVER_S))
        leads = epoch if until_s else 0
        if leads != self._epoch:
            if not leads:
                self._tell_leads(0, self._epoch)
            else:
                self._tell_leads(leads)
            self._epoch = leads

    def _tell_leads(self, epoch: int, before: int = 0) -> None:
        self._publisher.tell(feed.Leads(self.shard.number, bool(epoch), epoch or before))

    # ------------------------------------------------------------ what routers ask for

    def restate(self, instance: str, why: str) -> None:
        """Only the leader does it; others let it be."""
        if not self._epoch:
            return
        log.info("shard %d: routers are told again of instance %r (%s)", self.shard.number, instance, why)
        task = asyncio.create_task(self._restated(instance), name=f"restate-{self.shard.number}")
        self._restating.add(task)
        task.add_done_callback(self._restating.discard)

    async def _restated(self, instance: str) -> None:
        try:
            await self.shard.submit(cmd.Restate(instance=instance))
        except (NotLeader, ShardUnavailable) as error:
            log.debug("shard %d: not told again: %s", self.shard.number, error)
