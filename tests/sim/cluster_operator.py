"""The operator: registers everything, changes limits and switches, and at the end tries whether the cluster
serves."""

from array import array
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from metaservice.core import commands as cmd
from metaservice.core.model import Fingerprint, Part, Quota, SwitchMode, SwitchScope
from metaservice.core.rejections import Rejection
from metaservice.core.replies import Finished, Looked, Started

from .cluster_bytes import Content
from .cluster_caller import Caller
from .cluster_seat import Answered
from .rows import Violation

if TYPE_CHECKING:
    from .cluster_world import World

PROBE = Fingerprint("probe", "1", "bf16", 16, 16, "sha256", "0", (Part("tp0", 10),))


class Operator(Caller):
    """See the module."""

    def __init__(self, world: "World", name: str, rng: Random) -> None:
        super().__init__(world, name, rng)
        self.opened = False
        self.served_ms: dict[int, int] = {}
        """shard -> when it answered a write and a lookup, last time that was tried"""

    def begin(self, then: Callable[[], None]) -> None:
        """Register everything, one after the other."""
        probes: list[cmd.Command] = [
            cmd.PutTenant(tenant="probe"),
            cmd.PutStorage(storage="sp", kind="posix", options={"root": "/sp"}),
            cmd.PutGroup(group="probe", tenant="probe", storages=("sp",)),
        ]
        probes += [
            cmd.PutInstance(instance=f"p{shard}", group="probe", fingerprint=PROBE, shard=shard)
            for shard in range(self.world.shards)
        ]
        self._put([*probes, *self.world.setting.catalogue], then)

    def _put(self, left: list[cmd.Command], then: Callable[[], None]) -> None:
        if not left:
            self.opened = True
            then()
            return

        def done(result: Answered | None, _: int) -> None:
            if result is not None and isinstance(result.reply, Rejection):
                raise Violation(f"{left[0]} was rejected: {result.reply}")
            self._put(left[1:] if result is not None else left, then)

        self.ask(0, left[0], done)

    # ------------------------------------------------------------ changes

    def change(self, seed: int) -> None:
        """Another limit for something, or a switch."""
        rng = Random(seed)
        setting = self.world.setting
        match rng.randrange(4):
            case 0:
                tenant = rng.choice(setting.tenants)
                self.ask(0, replace(tenant, quota=self._other(rng, tenant.quota)), lambda *_: None)
            case 1:
                group = rng.choice(setting.groups)
                self.ask(0, replace(group, quota=self._other(rng, group.quota)), lambda *_: None)
            case 2:
                storage = rng.choice(setting.storages)
                quota = self._other(rng, Quota(bytes=storage.capacity_bytes))
                self.ask(0, replace(storage, capacity_bytes=quota.bytes), lambda *_: None)
            case _:
                mode = rng.choice((SwitchMode.read_only, SwitchMode.bypass, SwitchMode.normal))
                self.switch("t0", mode)
                self.after(rng.randint(100, 700), self.switch, "t0", SwitchMode.normal)

    @staticmethod
    def _other(rng: Random, quota: Quota) -> Quota:
        """Lower, higher, or a limit where there was none and none where there was one."""
        factor, turn = rng.choice((0.5, 0.8, 1.5)), rng.random() < 0.3

        def other(limit: int | None, new: int) -> int | None:
            if limit is None:
                return new if turn else None
            return None if turn else int(limit * factor)

        return Quota(
            bytes=other(quota.bytes, rng.randint(200, 900)), blocks=other(quota.blocks, rng.randint(8, 40))
        )

    def switch(self, tenant: str, mode: SwitchMode) -> None:
        """Set the switch of a tenant."""
        self.ask(0, cmd.SetSwitch(scope=SwitchScope.tenant, id=tenant, mode=mode), lambda *_: None)

    # ------------------------------------------------------------ trying

    def probe(self, shard: int) -> None:
        """Register, write a block, look it up: until that works."""
        self.served_ms.pop(shard, None)
        self._step(shard, f"op.{self.fresh_name('i')}")

    def _step(self, shard: int, incarnation: str) -> None:
        command = cmd.RegisterEngine(engine="op", incarnation="op.1")
        again = (shard, incarnation)

        def start(result: Answered | None, _: int) -> None:
            if result is None or isinstance(result.reply, Rejection):
                self._step(*again)
                return
            key = self.fresh_name("k").encode().ljust(16, b".")
            write = cmd.StartWrite(
                instance=f"p{shard}", engine="op", incarnation="op.1", keys=[key],
                request_id=self.fresh_name("q"),
            )  # fmt: skip
            self.ask(shard, write, lambda reply, _: finish(reply, key))

        def finish(result: Answered | None, key: bytes) -> None:
            if result is None or not isinstance(result.reply, Started) or result.reply.session is None:
                self._step(*again)
                return
            reply = result.reply
            assert reply.session is not None
            place = (reply.locations[0], reply.generations[0])
            owner = ("op.1", shard, reply.session)
            self.world.bytes.give(place, owner)
            self.world.bytes.write(place, owner, "tp0", Content(f"p{shard}", key))
            command = cmd.Finish(
                session=reply.session, engine="op", incarnation="op.1",
                locations=array("Q", [place[0]]), generations=array("I", [place[1]]),
                checksums=array("Q", [7]), request_id=self.fresh_name("q"),
            )  # fmt: skip
            self.ask(shard, command, lambda reply, _: look(reply, key))

        def look(result: Answered | None, key: bytes) -> None:
            if result is None or not isinstance(result.reply, Finished):
                self._step(*again)
                return
            self.ask(shard, cmd.Lookup(instance=f"p{shard}", keys=[key]), served)

        def served(result: Answered | None, _: int) -> None:
            if result is None or not isinstance(result.reply, Looked) or result.reply.hits != 1:
                self._step(*again)
                return
            self.served_ms[shard] = self.heap.now_ms

        self.ask(0, command, start)
