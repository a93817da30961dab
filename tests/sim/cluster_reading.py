"""One read: a lookup of the leader with or without a lease, or of a follower, and the reading of the bytes
for as long as the answer allows."""

from random import Random
from typing import TYPE_CHECKING, Any

from metaservice.core import commands as cmd
from metaservice.core.outcomes import LeaseOutcome
from metaservice.core.replies import LeasesAnswered, Looked

from .cluster_bytes import Content, Promise
from .cluster_replica import Request
from .cluster_seat import Answered
from .cluster_setting import LIMITS, STALENESS_MS_MAX, chain
from .cluster_witness import Place
from .cluster_writing import CAREFUL

if TYPE_CHECKING:
    from .cluster_engine import Engine


class Reading:
    """See the module."""

    def __init__(self, engine: "Engine", rng: Random) -> None:
        self.engine = engine
        self.world = engine.world
        self.rng = rng
        self.deployment = rng.choice(self.world.deployments)
        self.shard = self.world.home(self.deployment.name)
        self.keys = chain(self.deployment, rng)
        self.lease_ms = rng.choice((0, 200, 800, LIMITS.lease_ms_max, LIMITS.lease_ms_max))
        self.promise: Promise | None = None
        self.lease = ""
        if rng.random() < 0.35:
            self.lease_ms = rng.choice((0, 0, self.lease_ms))
            self._look()
            return
        known = self.lease_ms and rng.random() < 0.5
        command = cmd.Lookup(
            instance=self.deployment.name,
            keys=self.keys,
            lease_ms=self.lease_ms,
            engine=engine.name if known else "",
            incarnation=engine.incarnation if known else "",
            request_id=engine.fresh_name("l") if known else "",
        )
        engine.ask(self.shard, command, self._looked, 900)

    def _look(self) -> None:
        """Ask any replica, perhaps for a lease that only the leader may grant."""
        command = cmd.Lookup(instance=self.deployment.name, keys=self.keys, lease_ms=self.lease_ms)
        target = self.world.replicas[self.rng.choice(self.world.names)]
        engine, net, sent_ms = self.engine, self.world.net, self.engine.heap.now_ms

        def answer(result: Any) -> None:
            net.send(target, engine, self._looked, result, sent_ms)

        request = Request(self.shard, command, answer, staleness_ms_max=STALENESS_MS_MAX)
        net.send(engine, target, target.request, request)
        engine.commands += 1

    def _looked(self, result: Any, sent_ms: int) -> None:
        if not isinstance(result, Answered) or not isinstance(result.reply, Looked):
            return
        located = result.reply.located
        if located is None or not located.locations:
            return
        reply = result.reply
        places = list(zip(located.locations, located.generations, strict=True))
        self.world.named(result, self.shard, self.keys, places)
        if reply.lease is not None:
            good_ms = int(reply.lease_ms * CAREFUL)
        else:
            good_ms = int((LIMITS.reclaim_delay_ms - result.staleness_ms) * CAREFUL)
        until_ms = sent_ms + good_ms
        if self.engine.heap.now_ms >= until_ms:
            return  # too late to read anything
        self.promise = self.world.bytes.promise(self.engine.name, reply.lease, places, until_ms)
        self._read(places)
        self.engine.after(
            int((until_ms - self.engine.heap.now_ms) * self.rng.random()), self._again, places, until_ms
        )
        if reply.lease is not None:
            self.lease = reply.lease
            if self.rng.random() < 0.4:
                self.engine.after(good_ms // 2, self._renew)

    def _read(self, places: list[Place]) -> None:
        contents = [Content(self.deployment.name, key) for key in self.keys]
        self.world.bytes.read(places, tuple(self.deployment.parts("full")), contents[: len(places)])

    def _again(self, places: list[Place], until_ms: int) -> None:
        """A slow reader reads once more before its time is over, and may then give its lease back."""
        if self.promise is None or self.engine.heap.now_ms >= until_ms:
            return
        self._read(places)
        if self.lease and self.rng.random() < 0.5:
            self.promise.until_ms = 0
            self.promise = None
            self.engine.ask(self.shard, cmd.ReleaseLeases(leases=(self.lease,)), lambda *_: None, 400)

    def _renew(self) -> None:
        if self.promise is not None and self.engine.heap.now_ms < self.promise.until_ms:
            command = cmd.RenewLeases(leases=(self.lease,), ttl_ms=self.lease_ms)
            self.engine.ask(self.shard, command, self._renewed, 400)

    def _renewed(self, result: Answered | None, sent_ms: int) -> None:
        if result is None or not isinstance(result.reply, LeasesAnswered) or self.promise is None:
            return
        if result.reply.outcomes[0] == LeaseOutcome.renewed:
            until_ms = sent_ms + int(result.reply.ttl_ms * CAREFUL)
            self.promise.until_ms = max(self.promise.until_ms, until_ms)
