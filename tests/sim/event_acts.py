"""What concerns routers: tokens, windows, instances announced in another way, storages that move.

Spliced into histories by a chance of their own, so that these are otherwise what they were without routers.
"""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from metaservice.core.commands import Announce, PutInstance, Restate, StartWrite
from metaservice.core.model import Endpoints, Publication
from metaservice.core.rejections import Rejection

from .announced import published
from .rows import Violation
from .setting import Deployment

if TYPE_CHECKING:
    from .world import World

Act = Callable[["World", Random], None]
BEAT_PATIENCE_MS = 100


def labelled(
    world: "World", rng: Random, command: StartWrite, deployment: Deployment, spoiled: bool
) -> StartWrite:
    """The same write with what routers know blocks by. What is wrong with tokens is not looked for in a write
    that something else is wrong with."""
    if rng.random() < 0.1:
        return command
    tokens = world.setting.tokens(
        deployment, [key.ljust(deployment.command.fingerprint.key_length, b".") for key in command.keys]
    )
    if not spoiled and command.keys and rng.random() < 0.03:
        tokens[rng.randrange(len(tokens))] = rng.choice((b"\x00", b"\x05" + bytes(80), b"\x01" * 3, b"\x02"))
    lora, salt = rng.choice((("", ""), ("", ""), ("poet", ""), ("", "t7")))
    return replace(command, tokens=tokens, lora=lora, salt=salt)


def publication(world: "World", instance: str) -> Publication | None:
    """How an instance is announced now, or was to be when the history began."""
    row = world.model.state.instances.get(instance)
    return row.publication if row is not None else world.deployment(instance).command.publication


def endpoints(engine: str) -> Endpoints:
    """Where an engine runs."""
    return Endpoints(node={"e0": "n0", "e1": "n1"}.get(engine, ""))


def announce(world: "World", rng: Random) -> None:
    """What the sequencer does whenever there is something to tell; a beat is due by itself."""
    judge, state = world.judge, world.model.state
    due = world.machine.announces(world.now_ms)
    last_ms = world.last_window_ms
    late_ms = world.now_ms - last_ms - world.limits.beat_ms
    if late_ms > BEAT_PATIENCE_MS and any(published(state, name) for name in state.instances) and not due:
        raise Violation(f"no beat since {last_ms}, it is {world.now_ms}; {judge.number}")
    if due or rng.random() < 0.2:
        world.send(Announce())


def announce_all(world: "World", rng: Random) -> None:
    """The same, several times, and durable: routers have heard of everything then."""
    for _ in range(rng.randint(2, 6)):
        world.now_ms += rng.choice((1, 50, 450))
        announce(world, rng)
        if rng.random() < 0.7:
            world.flush()


def restate(world: "World", rng: Random) -> None:
    """Somebody lost what he was told."""
    instance = rng.choice(("", "i0", "i1", "i2", "i9"))
    reply = world.send(Restate(instance=instance))
    if not isinstance(reply, Rejection):
        world.judge.restate_asked(instance, world.machine.state.window)


def publish(world: "World", rng: Random) -> None:
    """An instance is announced in another way, or no more, or again."""
    put = rng.choice(world.setting.deployments).command
    row = world.model.state.instances.get(put.instance)
    if row is None:
        return
    wanted = world.setting.publication(rng, put.instance)
    world.send(
        PutInstance(
            instance=put.instance,
            group=row.group,
            fingerprint=row.fingerprint,
            quota=row.quota,
            publication=wanted,
        )
    )


def move(world: "World", rng: Random) -> None:
    """A storage is known as another place from now on."""
    storage = world.model.state.storages.get(rng.choice(("s0", "s1")))
    if storage is not None:
        node, reach = f"n{rng.randrange(2)}", rng.choice(("", "pool", "node"))
        world.send(replace(storage, fault_domain=node, reach=reach))


def rotate(world: "World", rng: Random) -> None:
    """Quiet times: beats, one after the other."""
    for _ in range(rng.randint(5, 40)):
        world.now_ms += rng.choice((200, 410, 410))
        announce(world, rng)
        world.flush()


def succeed(world: "World", rng: Random) -> None:
    """The leader is gone with blocks that it published and did not announce; the next one finds them."""
    world.flush()
    world.now_ms += 1
    world.crash(from_capture=rng.random() < 0.5)
    world.flush()
    announce_all(world, rng)


ACTS: dict[str, tuple[int, Act]] = {
    "announce": (60, announce),
    "announce_all": (25, announce_all),
    "restate": (6, restate),
    "publish": (6, publish),
    "move": (4, move),
    "rotate": (4, rotate),
    "succeed": (3, succeed),
}


def spliced(seed: int, steps: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The acts of a history with these among them."""
    rng = Random(f"event acts {seed}")
    names = list(ACTS)
    count = len(steps) // 2
    for name in rng.choices(names, [ACTS[name][0] for name in names], k=count):
        steps.insert(rng.randint(0, len(steps)), (name, rng.getrandbits(32)))
    return steps
