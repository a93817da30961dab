"""A small fleet for tests of single cases: one tenant, storage, group and instance, two engines, a worker."""

from array import array
from typing import Any

from metaservice.core.commands import (
    ConfirmTask,
    Finish,
    Lookup,
    PutGroup,
    PutInstance,
    PutStorage,
    PutTenant,
    RegisterEngine,
    RegisterWorker,
    ReleaseLeases,
    Remove,
    RenewLeases,
    StartWrite,
    TakeTasks,
    Tick,
)
from metaservice.core.model import AttentionGroup, Fingerprint, GroupKind, Limits, Part, Quota
from metaservice.core.outcomes import FinishStatus, RemoveOutcome, WriteOutcome
from metaservice.core.rejections import Rejection
from metaservice.core.replies import BlockDetail, Finished, Looked, Started

from .house import House

BLOCK_BYTES = 20
FINGERPRINT = Fingerprint("model", "1", "bf16", 16, 16, "sha256", "0", (Part("tp0", 10), Part("tp1", 10)))
NO_QUOTA = Quota()


def key(name: str, length: int = 16) -> bytes:
    """A block key that can be read in a failure."""
    return name.encode().ljust(length, b".")


def chain(count: int, prefix: str = "k") -> list[bytes]:
    """So many keys, to be used as one chain."""
    return [key(f"{prefix}{number}") for number in range(count)]


class Fleet(House):
    """A House with a catalogue and shorthands. Calls must be accepted; see `refused` for the others."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        quota: Quota = NO_QUOTA,
        capacity_bytes: int | None = None,
        fingerprint: Fingerprint = FINGERPRINT,
        auto: bool = True,
        shard: int = 0,
        **group: Any,
    ) -> None:
        super().__init__(limits, auto=auto, shard=shard)
        self.done(PutTenant(tenant="t", quota=quota))
        self.done(PutStorage(storage="s", kind="posix", options={}, capacity_bytes=capacity_bytes))
        self.done(PutGroup(group="g", tenant="t", storages=("s",), **group))
        self.done(PutInstance(instance="i", group="g", fingerprint=fingerprint))
        for engine in ("e1", "e2"):
            self.done(RegisterEngine(engine=engine, incarnation="1"))
        self.done(RegisterWorker(worker="k", incarnation="1", storages=("s",)))
        self.flush()

    # ------------------------------------------------------------ calls

    def done(self, command: Any) -> Any:
        """A command that must be accepted."""
        reply = self.send(command)
        assert not isinstance(reply, Rejection), reply
        return reply

    def refused(self, command: Any) -> str:
        """The code of a command that must be refused, and that must change nothing."""
        before = self.machine.digest()
        read = isinstance(command, Lookup | RenewLeases | ReleaseLeases | TakeTasks)
        reply = self.ask(command) if read else self.send(command)
        assert isinstance(reply, Rejection), f"{command} was answered {reply}"
        assert self.machine.digest() == before
        return reply.code

    def tick(self, after_ms: int = 0) -> None:
        """Time passes, the sequencer ticks."""
        self.now_ms += after_ms
        self.done(Tick())

    def start(self, keys: list[bytes], engine: str = "e1", **more: Any) -> Started:
        """Ask to write a chain."""
        command = StartWrite(**{"instance": "i", "engine": engine, "incarnation": "1", "keys": keys} | more)
        reply: Started = self.done(command)
        return reply

    def finishing(self, started: Started, engine: str = "e1", **more: Any) -> Finish:
        """The finish of all that a start gave, with checksums that can be recognised."""
        rows = [row for row, generation in enumerate(started.generations) if generation]
        locations = array("Q", [started.locations[row] for row in rows])
        count = len(more.get("locations", rows)) * len(more.get("parts") or self.parts())
        return Finish(
            **{
                "session": started.session or 0,
                "engine": engine,
                "incarnation": "1",
                "locations": locations,
                "generations": array("I", [started.generations[row] for row in rows]),
                "checksums": array("Q", range(count)),
            }
            | more  # type: ignore[arg-type]
        )

    def finish(self, started: Started, engine: str = "e1", **more: Any) -> Finished:
        """All that a start gave is written."""
        reply: Finished = self.done(self.finishing(started, engine, **more))
        return reply

    def put(self, keys: list[bytes], engine: str = "e1", **more: Any) -> Started:
        """Write a chain and publish it."""
        started = self.start(keys, engine, **more)
        assert outcomes(started) == ["write"] * len(keys), started
        self.finish(started, engine)
        return started

    def lookup(self, keys: list[bytes], **more: Any) -> Looked:
        """What of a chain is readable?"""
        reply: Looked = self.ask(Lookup(**{"instance": "i", "keys": keys} | more))
        assert not isinstance(reply, Rejection), reply
        return reply

    def remove(self, keys: list[bytes], **more: Any) -> list[str]:
        """Remove blocks; the outcome of each by name."""
        reply = self.done(Remove(instance="i", keys=keys, **more))
        return [RemoveOutcome(outcome).name for outcome in reply.outcomes]

    def take(self) -> list[Any]:
        """The deletion tasks that the worker gets now."""
        return list(self.ask(TakeTasks(worker="k", incarnation="1")).tasks)

    def delete(self) -> list[int]:
        """The worker takes what there is, deletes it and confirms; the locations that are gone."""
        gone: list[int] = []
        for task in self.take():
            self.done(ConfirmTask(worker="k", incarnation="1", task=task.task))
            gone += task.locations
        return gone

    # ------------------------------------------------------------ what is there

    def parts(self) -> list[str]:
        """The names of the parts of a block."""
        return [part.name for part in self.machine.state.instances["i"].primary.parts]

    def used(self) -> int:
        """Blocks that the tenant pays for."""
        return int(self.machine.describe("tenants")[0].usage.blocks)  # type: ignore[attr-defined]

    def block(self, one: bytes) -> BlockDetail | None:
        """What is known of a block, None for an absent one."""
        found = self.machine.block("i", None, one)
        return None if isinstance(found, Rejection) else found


def outcomes(started: Started) -> list[str]:
    """The outcome of each row by name."""
    return [WriteOutcome(outcome).name for outcome in started.outcomes]


def statuses(finished: Finished) -> list[str]:
    """The status of each location by name."""
    return [FinishStatus(status).name for status in finished.status]


def windowed() -> Fingerprint:
    """A model with full attention on two ranks, a sliding window of two blocks, and a state."""
    parts = (Part("tp0", 10), Part("tp1", 10), Part("w", 5, "swa"), Part("m", 7, "mamba"))
    groups = (
        AttentionGroup("full"),
        AttentionGroup("swa", GroupKind.sliding_window, 2),
        AttentionGroup("mamba", GroupKind.state),
    )
    return Fingerprint("hybrid", "1", "bf16", 16, 16, "sha256", "0", parts, groups)
