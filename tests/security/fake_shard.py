"""A shard that knows nothing and answers at once: what guards keep out has nothing to do with its rules."""

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

from metaservice.core import commands, replies
from metaservice.core.model import Limits, Part

KEY = b"k" * 16
PARTS = (Part("tp0", 1024),)


class FakeShard:
    """Every lookup is a full hit; every command is done after `delay_s`."""

    number = 0
    cluster = "c1"
    epoch = 1
    durable_seq = 1
    ready = True
    status = "leading"
    reason = "epoch 1"
    limits = Limits()
    delay_s = 0.0

    def instance(self, name: str) -> Any:
        return SimpleNamespace(key_length=16, groups={"full": SimpleNamespace(parts=PARTS)})

    def storage(self, number: int) -> Any:
        return SimpleNamespace(name="s1", kind="posix", options={"root": "/s1"})

    def read(self, command: commands.Command) -> Any:
        if isinstance(command, commands.Lookup):
            count = len(command.keys)
            places = replies.Located(
                array("Q", range(count)),
                array("I", [1]) * count,
                array("H", [0]) * count,
                bytes(8 * count),
            )
            return replies.Looked(
                command.mode, count, count, 0, "none", count, "full", located=places, state_group=""
            )
        if isinstance(command, commands.TakeTasks):
            return replies.Tasks([])
        if isinstance(command, commands.ReleaseLeases):
            raise RuntimeError("a planted fault")
        return replies.Beat("active")

    async def submit(self, command: commands.Command) -> Any:
        await asyncio.sleep(self.delay_s)
        return replies.Renewed(1)

    async def take_tasks(self, command: commands.TakeTasks, wait_ms: int) -> Any:
        await asyncio.sleep(wait_ms / 1000)
        return replies.Tasks([])

    def describe(self, kind: str, after: str = "", limit: int | None = None) -> list[Any]:
        return []

    def gauges(self) -> dict[str, float]:
        return {}

    def usages(self, kind: str) -> list[tuple[str, tuple[int, int, int, int]]]:
        return []

    def describe_one(self, kind: str, id: str) -> Any:
        return None

    def block(self, instance: str, group: str | None, key: bytes) -> Any:
        return replies.Done()
