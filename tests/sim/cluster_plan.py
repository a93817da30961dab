"""What happens in a clustered history: clients' acts and faults, each with its time and its own small seed,
so that any of them can be left out."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from .cluster_net import Host
from .cluster_setting import HISTORY_MS, TTL_MS, volatile_of
from .cluster_world import HOUR_MS, World


class Act(NamedTuple):
    """One thing to do."""

    at_ms: int
    kind: str
    seed: int


CLIENTS = ("write",) * 10 + ("read",) * 9 + ("remove",)
ODD = ("change", "engine", "engine", "worker")
FAULTS = (
    "crash", "crash", "crash_leader", "crash_leader", "pause", "pause_leader", "pause_leader", "isolate",
    "isolate_leader", "cut_journal", "cut_journal", "cut_elector", "cut_clients", "noise", "noise", "clock",
    "clock", "clock", "slow_follower", "no_hints", "journal_stalls", "journal_down", "journal_full",
    "shard_held_up", "shard_held_up", "elector_stalls", "elector_down", "snapshot", "snapshot", "snapshot",
    "hand_over", "hand_over",
)  # fmt: skip


def plan(seed: int) -> list[Act]:
    """What a seed has happen, in the order of time."""
    rng = Random(seed * 7919 + 1)
    calm = rng.random() < 0.1
    acts = [
        Act(rng.randint(0, HISTORY_MS), rng.choice(CLIENTS), rng.getrandbits(32))
        for _ in range(rng.randint(110, 160))
    ]
    acts += [Act(rng.randint(0, HISTORY_MS), rng.choice(ODD), rng.getrandbits(32)) for _ in range(4)]
    if not calm:
        acts += [
            Act(rng.randint(0, HISTORY_MS), rng.choice(FAULTS), rng.getrandbits(32))
            for _ in range(rng.randint(3, 10))
        ]
        if rng.random() < 0.3:
            acts += [Act(rng.randint(0, HISTORY_MS), "snapshot", rng.getrandbits(32)) for _ in range(4)]
    if volatile_of(seed):  # its bytes come and go with workers
        count = rng.randint(2, 5)
        acts += [Act(rng.randint(0, HISTORY_MS), "worker", rng.getrandbits(32)) for _ in range(count)]
    return sorted(acts)


def begin(world: World, act: Act) -> None:
    """Let an act happen now."""
    rng = Random(act.seed)
    if act.kind not in CLIENTS:
        world.tell(f"-- {act.kind}")
    ACTS[act.kind](world, rng)


# ---------------------------------------------------------------- clients


def write(world: World, rng: Random) -> None:
    """An engine writes."""
    rng.choice(world.engines).write(rng.getrandbits(32))


def read(world: World, rng: Random) -> None:
    """An engine reads."""
    rng.choice(world.engines).read(rng.getrandbits(32))


def remove(world: World, rng: Random) -> None:
    """An engine removes blocks."""
    rng.choice(world.engines).remove(rng.getrandbits(32))


def change(world: World, rng: Random) -> None:
    """The operator changes a limit or a switch."""
    world.operator.change(rng.getrandbits(32))


def engine(world: World, rng: Random) -> None:
    """An engine dies in the middle of whatever it does, and a new one comes under its name."""
    rng.choice(world.engines).start()


def worker(world: World, rng: Random) -> None:
    """A worker dies, and a new one comes under its name."""
    rng.choice(world.workers).start()


# ---------------------------------------------------------------- replicas


def some(world: World, rng: Random) -> str:
    """Any replica."""
    return rng.choice(world.names)


def leader(world: World, rng: Random) -> str:
    """One that leads a shard, if there is one."""
    leading = [
        name
        for name, replica in world.replicas.items()
        if replica.up and any(seat.pipeline is not None for seat in replica.seats)
    ]
    return rng.choice(leading or world.names)


def crashing(pick: Callable[[World, Random], str]) -> Callable[[World, Random], None]:
    """A replica dies, and comes back."""

    def act(world: World, rng: Random) -> None:
        replica = world.replicas[pick(world, rng)]
        if not replica.up:
            return
        replica.down()
        if rng.random() < 0.3:
            replica.clock.ahead_ms = rng.choice((-HOUR_MS, HOUR_MS, 0))
        world.heap.after(rng.choice((20, 400, 2_500)), restart, replica)

    def restart(replica: Host) -> None:
        if not replica.up:
            replica.start()  # type: ignore[attr-defined]

    return act


def pausing(pick: Callable[[World, Random], str]) -> Callable[[World, Random], None]:
    """A replica stands still, and goes on as if nothing had been."""

    def act(world: World, rng: Random) -> None:
        replica = world.replicas[pick(world, rng)]
        if replica.up and not replica.paused:
            replica.pause()
            wait_ms = rng.choice((150, TTL_MS, TTL_MS + rng.randint(0, 600), 3 * TTL_MS))
            world.heap.after(wait_ms, waking(replica, replica.life))

    return act


def waking(host: Host, life: int) -> Callable[[], None]:
    """Wake a host, if it is still the one that was put to sleep."""

    def wake() -> None:
        if host.life == life:
            host.wake()

    return wake


def cutting(
    pick: Callable[[World, Random], str], ends: Callable[[World, str], list[str]]
) -> Callable[[World, Random], None]:
    """Lines from and to a replica are cut for a while, in one or both directions."""

    def act(world: World, rng: Random) -> None:
        name = pick(world, rng)
        way = rng.choice((1, 2, 3, 3))
        lines: set[tuple[str, str]] = set()
        for end in ends(world, name):
            lines |= {(name, end)} if way & 1 else set()
            lines |= {(end, name)} if way & 2 else set()
        world.net.cut |= lines
        world.heap.after(rng.choice((120, 500, TTL_MS, 2 * TTL_MS)), world.net.cut.difference_update, lines)

    return act


def everybody(world: World, name: str) -> list[str]:
    """All but the replica itself."""
    return [*(other for other in world.names if other != name), "journal", "elector", *outside(world, name)]


def outside(world: World, _: str) -> list[str]:
    """The clients."""
    return [host.name for host in (world.operator, *world.engines, *world.workers)]


def clock(world: World, rng: Random) -> None:
    """A wall clock is set, by an hour or a little."""
    replica = world.replicas[rng.choice((some, leader))(world, rng)]
    replica.clock.ahead_ms += rng.choice((-HOUR_MS, HOUR_MS, -2_000, 2_000))


def slow_follower(world: World, rng: Random) -> None:
    """A replica looks for news seldom."""
    replica = world.replicas[some(world, rng)]
    before_ms, replica.poll_ms = replica.poll_ms, rng.choice((400, 1_200))
    world.heap.after(1_500, setattr, replica, "poll_ms", before_ms)


def hand_over(world: World, rng: Random) -> None:
    """An operator moves a shard."""
    world.hand_over(rng.randrange(world.shards), rng.choice(("", *world.names)))


def snapshot(world: World, rng: Random) -> None:
    """A follower cuts a snapshot of everything, and the journal behind is trimmed."""
    replica = world.replicas[some(world, rng)]
    if replica.up and not replica.paused:
        for seat in replica.seats:
            seat.cut()


# ---------------------------------------------------------------- what all depend on


def noise(world: World, rng: Random) -> None:
    """Messages get lost, doubled and late for a while."""
    net = world.net
    net.lost, net.doubled, net.late = rng.choice(((0.05, 0.1, 0.1), (0.2, 0.0, 0.0), (0.0, 0.4, 0.3)))
    world.heap.after(rng.choice((300, 1_500)), quiet, world)


def quiet(world: World) -> None:
    """The noise is over."""
    world.net.lost = world.net.doubled = world.net.late = 0.0


def no_hints(world: World, _: Random) -> None:
    """Nobody is told that there is news."""
    world.hints = False
    world.heap.after(1_200, setattr, world, "hints", True)


def journal_full(world: World, _: Random) -> None:
    """The database has no space."""
    world.store.full = True
    world.heap.after(500, setattr, world.store, "full", False)


def shard_held_up(world: World, rng: Random) -> None:
    """Something holds the row of a shard: its appends take long, some so long that nobody waits for them."""
    shard = rng.randrange(world.shards)
    world.held_up_ms[shard] = rng.choice((60, 250, 350))
    world.heap.after(rng.choice((400, 1_200)), world.held_up_ms.clear)


def stalling(name: str) -> Callable[[World, Random], None]:
    """A server stands still; what was sent to it is done when it goes on."""

    def act(world: World, rng: Random) -> None:
        host: Host = getattr(world, name)
        if host.up and not host.paused:
            host.pause()
            world.heap.after(rng.choice((100, 400, 1_300)), waking(host, host.life))

    return act


def failing(name: str) -> Callable[[World, Random], None]:
    """A server is gone and comes back with what it had."""

    def act(world: World, rng: Random) -> None:
        host: Host = getattr(world, name)
        if host.up:
            host.down()
            world.heap.after(rng.choice((100, 600, 1_500)), setattr, host, "up", True)

    return act


ACTS: dict[str, Callable[[World, Random], None]] = {
    "write": write,
    "read": read,
    "remove": remove,
    "change": change,
    "engine": engine,
    "worker": worker,
    "crash": crashing(some),
    "crash_leader": crashing(leader),
    "pause": pausing(some),
    "pause_leader": pausing(leader),
    "isolate": cutting(some, everybody),
    "isolate_leader": cutting(leader, everybody),
    "cut_journal": cutting(leader, lambda *_: ["journal"]),
    "cut_elector": cutting(leader, lambda *_: ["elector"]),
    "cut_clients": cutting(leader, outside),
    "noise": noise,
    "clock": clock,
    "slow_follower": slow_follower,
    "no_hints": no_hints,
    "journal_stalls": stalling("store"),
    "journal_down": failing("store"),
    "journal_full": journal_full,
    "shard_held_up": shard_held_up,
    "elector_stalls": stalling("elector"),
    "elector_down": failing("elector"),
    "snapshot": snapshot,
    "hand_over": hand_over,
}
