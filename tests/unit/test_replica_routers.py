"""What a replica tells its publisher, and when: never what may not be in the journal."""

import asyncio
from typing import Any

import msgspec

from metaservice.core.commands import Announce, Deregister, PutInstance, RegisterEngine
from metaservice.core.machine import Machine
from metaservice.core.windows import Window
from metaservice.publish import feed
from metaservice.replica.routers import Routers
from tests.sim.fleet import FINGERPRINT, chain, key
from tests.unit.core_told import PUBLICATION, Told


class Heard:
    """Stands where the publisher process is: keeps what it was told, as it would come through the pipe."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.backlog_bytes = 0
        self.on_begin: Any = None
        self.on_restate: Any = None
        self.on_beat: Any = None

    def tell(self, message: feed.ToPublisher) -> None:
        """One message."""
        self.told.append(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=feed.ToPublisher))

    def fence(self, shard: int, epoch: int, until_s: float) -> None:
        """The page is another test's."""

    def kinds(self) -> list[str]:
        """What it was told, by kind; instances and engines left out."""
        kinds = [type(one).__name__ for one in self.told]
        return [one for one in kinds if one not in ("InstanceUp", "EngineUp")]


class OneShard:
    """As much of a shard as is asked for what it holds."""

    def __init__(self, machine: Machine, number: int = 0) -> None:
        self.number = number
        self.loaded: Machine | None = machine


def made(told: Told) -> tuple[Heard, Routers, OneShard]:
    """A replica's routers over the machine of `told`."""
    heard, shard = Heard(), OneShard(told.machine)
    routers = Routers(heard)  # type: ignore[arg-type]
    routers.attach([shard])  # type: ignore[list-item]
    return heard, routers, shard


def step(told: Told) -> None:
    """Decide a window, which is not durable yet."""
    told.now_ms += 5
    told.done(Announce())


async def test_nothing_is_begun_with_what_is_not_durable() -> None:
    told = Told()
    told.write(chain(2))
    told.tell()
    told.write([key("k2")], parent=key("k1"))
    told.auto = False
    step(told)
    heard, routers, _ = made(told)
    heard.on_begin()
    await asyncio.sleep(0.01)
    assert heard.kinds() == [], "the window that is on its way may never be in the journal"
    told.flush()
    routers.applied(0, told.events[-1:])
    await asyncio.sleep(0.01)
    assert heard.kinds() == ["Begin", "Leads", "Standing", "Tombstones", "Ready"]
    begin = next(one for one in heard.told if isinstance(one, feed.Begin))
    assert begin.number == told.machine.window
    told.write([key("more")], parent=key("k2"))
    told.flush()
    step(told)
    told.flush()
    routers.applied(0, told.events[-1:])
    (window,) = [one for one in heard.told if isinstance(one, Window)]
    assert window.number == begin.number + 1, "each window is told once"


async def test_what_stands_is_ready_once_all_that_was_read_is_durable() -> None:
    told = Told()
    told.write(chain(2))
    told.tell()
    told.write([key("k2")], parent=key("k1"))
    heard, routers, shard = made(told)
    heard.on_begin()
    told.auto = False
    step(told)
    await asyncio.sleep(0.01)
    assert heard.kinds() == ["Begin", "Leads", "Standing"]
    told.flush()
    routers.applied(0, told.events[-1:])
    assert heard.kinds() == ["Begin", "Leads", "Standing", "Window", "Tombstones", "Ready"]
    shard.loaded = None
    heard.on_begin()
    assert heard.kinds()[6:] == [], "there is nothing to tell while the state is built anew"


async def test_an_instance_is_down_behind_its_last_removal() -> None:
    told = Told()
    told.write(chain(20))
    told.tell()
    heard, routers, _ = made(told)
    heard.on_begin()
    await asyncio.sleep(0.01)
    first = len(told.events)
    told.done(PutInstance(instance="i", group="g", fingerprint=FINGERPRINT))
    routers.applied(0, told.events[first:])
    assert "InstanceDown" not in heard.kinds()
    for _ in range(2):
        step(told)
        routers.applied(0, told.events[-1:])
    assert heard.kinds()[-3:] == ["Window", "Window", "InstanceDown"]
    assert PUBLICATION.entries_max > 20


async def test_an_engine_that_another_shard_has_by_now_is_not_gone() -> None:
    told, other = Told(), Told()
    for fleet, engine in ((told, "moves"), (other, "stays")):
        fleet.done(RegisterEngine(engine=engine, incarnation="1", instance="i"))
    heard = Heard()
    routers = Routers(heard)  # type: ignore[arg-type]
    shards = [OneShard(told.machine, 0), OneShard(other.machine, 1)]
    routers.attach(shards)  # type: ignore[arg-type]
    heard.on_begin()
    await asyncio.sleep(0.01)
    first = len(other.events)
    other.done(RegisterEngine(engine="moves", incarnation="1", instance="i"))
    routers.applied(1, other.events[first:])
    first = len(told.events)
    told.done(Deregister(kind="engine", id="moves", incarnation="1"))
    routers.applied(0, told.events[first:])
    assert not any(isinstance(one, feed.EngineDown) for one in heard.told)
    first = len(other.events)
    other.done(Deregister(kind="engine", id="moves", incarnation="1"))
    routers.applied(1, other.events[first:])
    (down,) = [one for one in heard.told if isinstance(one, feed.EngineDown)]
    assert (down.shard, down.engine, down.why) == (1, "moves", "left")
