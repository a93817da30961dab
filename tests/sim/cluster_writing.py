"""One write, from its start to whatever end it comes to: slow writers, lost answers, halves, wrong
generations."""

from array import array
from random import Random
from typing import TYPE_CHECKING

from metaservice.core import commands as cmd
from metaservice.core.outcomes import FinishStatus
from metaservice.core.replies import Finished, Renewed, Started

from .cluster_bytes import Content, Owner
from .cluster_seat import Answered
from .cluster_setting import LIMITS, chain, tokens_of
from .cluster_witness import Place

if TYPE_CHECKING:
    from .cluster_engine import Engine

CAREFUL = 0.98
"""A client counts on so much of what it was promised: its clock may be the slower one."""


class Writing:
    """See the module."""

    def __init__(self, engine: "Engine", rng: Random) -> None:
        self.engine = engine
        self.world = engine.world
        self.rng = rng
        self.incarnation = engine.incarnation
        self.deployment = rng.choice(self.world.deployments)
        self.shard = self.world.home(self.deployment.name)
        self.parts = tuple(self.deployment.parts("full"))
        self.session = 0
        self.owner: Owner = ("", 0, 0)
        self.keys: dict[Place, bytes] = {}
        self.until_ms = 0
        keys = chain(self.deployment, rng)
        self.command = cmd.StartWrite(
            instance=self.deployment.name,
            engine=engine.name,
            incarnation=self.incarnation,
            keys=keys,
            tokens=tokens_of(keys) if self.world.setting.published else None,
            ttl_ms=rng.choice((0, 0, LIMITS.write_ttl_ms_min, 3_500)),
            request_id=engine.fresh_name("q"),
        )
        self.first_sent_ms = engine.heap.now_ms
        engine.ask(self.shard, self.command, self._started, rng.choice((1_000, 2_500)))

    def _started(self, result: Answered | None, _: int) -> None:
        if result is None or not isinstance(result.reply, Started) or result.reply.session is None:
            return
        reply = result.reply
        assert reply.session is not None
        self.session = reply.session
        self.owner = (self.incarnation, self.shard, self.session)
        for key, location, generation in zip(
            self.command.keys, reply.locations, reply.generations, strict=True
        ):
            if generation:
                self.keys[location, generation] = key
        for place in self.keys:
            self.world.bytes.give(place, self.owner)
        for location, generation, storage in zip(
            reply.locations, reply.generations, reply.storages, strict=True
        ):
            if generation and storage in reply.pools:
                self.world.bytes.pools.setdefault((location, generation), reply.pools[storage])
        self.until_ms = self.first_sent_ms + int(reply.ttl_ms * CAREFUL)
        slow = self.rng.random()
        step_ms = 2 if slow < 0.7 else self.rng.randint(40, 400)
        self.engine.after(step_ms, self._write, list(self.keys), step_ms)
        if step_ms > 100 and self.rng.random() < 0.7:
            self.engine.after(500, self._renew)

    def _write(self, left: list[Place], step_ms: int) -> None:
        """The next place, part by part."""
        if not left:
            self._written()
            return
        if self.engine.heap.now_ms >= self.until_ms:
            self.keys = {}
            return  # the session is over for all we know: nobody will read what we wrote
        place, *rest = left
        if self.world.bytes.lost(place):
            self.keys = {}
            return  # a writer that cannot write says nothing more, or that it failed
        content = Content(self.deployment.name, self.keys[place])
        for part in self.parts:
            self.world.bytes.write(place, self.owner, part, content)
        self.engine.after(step_ms, self._write, rest, step_ms)

    def _renew(self) -> None:
        if self.engine.heap.now_ms < self.until_ms and self.keys:
            command = cmd.RenewWrite(
                session=self.session, engine=self.engine.name, incarnation=self.incarnation
            )
            self.engine.ask(self.shard, command, self._renewed, 600)

    def _renewed(self, result: Answered | None, sent_ms: int) -> None:
        if result is not None and isinstance(result.reply, Renewed):
            self.until_ms = max(self.until_ms, sent_ms + int(result.reply.ttl_ms * CAREFUL))
            self.engine.after(900, self._renew)

    def _written(self) -> None:
        fate, places, self.keys = self.rng.random(), list(self.keys), {}
        if fate < 0.06:
            command = cmd.Abort(
                session=self.session,
                engine=self.engine.name,
                incarnation=self.incarnation,
                request_id=self.engine.fresh_name("q"),
            )
            self.engine.ask(self.shard, command, lambda *_: None)
        elif fate < 0.9:
            half = self.rng.randrange(len(places)) if self.rng.random() < 0.3 else 0
            for some in (places[:half], places[half:]):
                if some:
                    self._finish(some, wrong=1 if self.rng.random() < 0.04 else 0)
        # or the writer forgets: its session ends by itself

    def _finish(self, places: list[Place], wrong: int) -> None:
        parts = self.parts
        command = cmd.Finish(
            session=self.session,
            engine=self.engine.name,
            incarnation=self.incarnation,
            locations=array("Q", [location for location, _ in places]),
            generations=array("I", [generation + wrong for _, generation in places]),
            checksums=array("Q", range(1, 1 + len(places) * len(parts))),
            request_id=self.engine.fresh_name("q"),
        )
        named = [(location, generation + wrong) for location, generation in places]
        self.engine.ask(self.shard, command, lambda result, _: self._finished(result, named))

    def _finished(self, result: Answered | None, places: list[Place]) -> None:
        if result is not None and isinstance(result.reply, Finished):
            for place, status in zip(places, result.reply.status, strict=True):
                if status == FinishStatus.serving:
                    self.world.acknowledged(place, result)
