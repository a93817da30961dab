"""Engines: processes that come and go, with heartbeats, and with writing and reading that a plan asks for."""

from random import Random
from typing import TYPE_CHECKING

from metaservice.core import commands as cmd
from metaservice.core.rejections import Rejection

from .cluster_caller import Caller
from .cluster_reading import Reading
from .cluster_seat import Answered
from .cluster_setting import LIMITS, chain
from .cluster_writing import Writing

if TYPE_CHECKING:
    from .cluster_world import World


class Engine(Caller):
    """One engine process, again and again under one id."""

    def __init__(self, world: "World", name: str, rng: Random) -> None:
        super().__init__(world, name, rng)
        self.incarnation = ""

    def start(self) -> None:
        """A new process with a new incarnation."""
        if self.up and self.incarnation:
            self.down()
        self.up = True
        self.incarnation = f"{self.name}.{self.life}"
        self._register()
        self.after(self.rng.randint(1, 400), self._beat)

    def _register(self) -> None:
        command = cmd.RegisterEngine(engine=self.name, incarnation=self.incarnation)
        self.ask(0, command, self._registered)

    def _registered(self, result: Answered | None, _: int) -> None:
        if result is None:
            self._register()
        elif isinstance(result.reply, Rejection) and result.reply.code == "incarnation_retired":
            self.start()  # a late message of an earlier life came after ours

    def _beat(self) -> None:
        command = cmd.Heartbeat(kind="engine", id=self.name, incarnation=self.incarnation)
        self.ask(0, command, self._beaten, 450)
        if not self.world.closing:
            self.after(LIMITS.heartbeat_ms, self._beat)

    def _beaten(self, result: Answered | None, _: int) -> None:
        if result is not None and isinstance(result.reply, Rejection) and result.reply.code == "reregister":
            self._register()

    # ------------------------------------------------------------ what a plan asks for

    def write(self, seed: int) -> None:
        """Write a run of a chain."""
        if self.up and not self.paused:
            Writing(self, Random(seed))

    def read(self, seed: int) -> None:
        """Look something up and read it."""
        if self.up and not self.paused:
            Reading(self, Random(seed))

    def remove(self, seed: int) -> None:
        """Have some blocks removed."""
        if not self.up or self.paused:
            return
        rng = Random(seed)
        deployment = rng.choice(self.world.deployments)
        keys = chain(deployment, rng)
        command = cmd.Remove(
            instance=deployment.name,
            keys=keys[rng.randrange(len(keys)) :],
            client=self.name,
            request_id=self.fresh_name("x"),
        )
        self.ask(self.world.home(deployment.name), command, lambda *_: None)
