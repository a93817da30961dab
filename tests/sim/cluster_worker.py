"""The worker: deletes what it is told to, sometimes much later, and what no block has at the end."""

from array import array
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from metaservice.core import commands as cmd
from metaservice.core.rejections import Rejection
from metaservice.core.replies import Task, Tasks, UnknownPlaces

from .cluster_caller import Caller
from .cluster_seat import Answered
from .cluster_setting import LIMITS
from .cluster_witness import Place

if TYPE_CHECKING:
    from .cluster_world import World

TAKE_MS = 360


class Worker(Caller):
    """One data-plane process."""

    def __init__(self, world: "World", name: str, rng: Random) -> None:
        super().__init__(world, name, rng)
        self.incarnation = ""
        self.storages: tuple[str, ...] = ()
        self.diligent = False
        """Whether it deletes at once."""

    def start(self) -> None:
        """A new process with a new incarnation. What the one before had in memory is gone."""
        if self.incarnation:
            self.world.bytes.bury(self.incarnation)
        if self.up and self.incarnation:
            self.down()
        self.up = True
        self.storages = self.world.storages
        self.incarnation = f"{self.name}.{self.life}"
        self._register()
        self.after(self.rng.randint(1, 400), self._beat)
        for shard in range(self.world.shards):
            self.after(self.rng.randint(1, TAKE_MS), self._take, shard)

    def _register(self) -> None:
        command = cmd.RegisterWorker(worker=self.name, incarnation=self.incarnation, storages=self.storages)
        self.ask(0, command, self._registered)

    def _registered(self, result: Answered | None, _: int) -> None:
        if result is None:
            self._register()
        elif isinstance(result.reply, Rejection) and result.reply.code == "incarnation_retired":
            self.start()  # a late message of an earlier life came after ours, or our pool is gone
        elif isinstance(result.reply, Rejection) and result.reply.code == "storage_owned":
            volatile = self.world.setting.volatile
            self.storages = tuple(name for name in self.world.storages if name != volatile)
            self._register()

    def _beat(self) -> None:
        command = cmd.Heartbeat(kind="worker", id=self.name, incarnation=self.incarnation)
        self.ask(0, command, self._beaten, 450)
        self.after(LIMITS.heartbeat_ms, self._beat)

    def _beaten(self, result: Answered | None, _: int) -> None:
        if result is not None and isinstance(result.reply, Rejection) and result.reply.code == "reregister":
            self._register()

    def _take(self, shard: int) -> None:
        command = cmd.TakeTasks(worker=self.name, incarnation=self.incarnation, limit=8)
        self.ask(shard, command, partial(self._taken, shard), 300)
        self.after(2 * TAKE_MS if self.world.closing else TAKE_MS, self._take, shard)

    def _taken(self, shard: int, result: Answered | None, _: int) -> None:
        if result is None or not isinstance(result.reply, Tasks):
            return
        for task in result.reply.tasks:
            slow = self.rng.random()
            late_ms = self.rng.randint(300, 2_000) if slow < 0.1 and not self.diligent else 3
            self.after(late_ms, self._delete, shard, task)

    def _delete(self, shard: int, task: Task) -> None:
        ok = bytes(self.diligent or self.rng.random() < 0.95 for _ in task.locations)
        places = zip(task.locations, task.generations, strict=True)
        self.world.bytes.delete((place for place, done in zip(places, ok, strict=True) if done), self.name)
        command = cmd.ConfirmTask(worker=self.name, incarnation=self.incarnation, task=task.task, ok=ok)
        self.ask(shard, command, lambda *_: None, 600)

    def sweep(self, shard: int, storage: str, places: list[Place]) -> None:
        """Delete what no block of a shard has, of these places of a storage."""
        command = cmd.Unknown(
            worker=self.name,
            incarnation=self.incarnation,
            storage=storage,
            locations=array("Q", [location for location, _ in places]),
            generations=array("I", [generation for _, generation in places]),
        )
        self.ask(shard, command, lambda result, _: self._swept(result, places))

    def _swept(self, result: Answered | None, places: list[Place]) -> None:
        if result is not None and isinstance(result.reply, UnknownPlaces):
            gone = [place for place, unknown in zip(places, result.reply.unknown, strict=True) if unknown]
            self.world.bytes.delete(gone, self.name)
