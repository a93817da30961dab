"""Plays a clustered history: the acts, then everything heals, and then nothing may be left over."""

from collections.abc import Callable

from metaservice.core.model import SwitchMode

from .cluster_plan import Act, begin
from .cluster_setting import HISTORY_MS, LIMITS, TTL_MS
from .cluster_witness import DELETING, SERVING
from .cluster_world import World
from .rows import Violation

QUIET_MS = 3 * LIMITS.write_ttl_ms_max + LIMITS.late_write_ms + 2 * LIMITS.lease_ms_max + 2_000
"""In which all ends that was begun, also when shards move meanwhile and everybody's time is counted anew."""

TELL_MS = 2_500
"""In which routers are told of everything."""


def play(seed: int, acts: list[Act], prepare: Callable[[World], None] | None = None) -> World:
    """Play these acts in the world of a seed. Raises Violation, or whatever the parts under test break
    with."""
    world = World(seed)
    if prepare is not None:
        prepare(world)
    world.start()
    start_ms = world.heap.now_ms
    for act in acts:
        world.heap.after(act.at_ms, begin, world, act)
    world.heap.run(start_ms + HISTORY_MS)
    heal(world)
    progress(world)
    settle(world)
    return world


def heal(world: World) -> None:
    """Every fault is over."""
    world.tell("-- everything heals")
    world.net.heal()
    world.store.full = False
    world.held_up_ms.clear()
    for host in (world.store, world.elector):
        host.up = True
        host.wake()
    for replica in world.replicas.values():
        if replica.up:
            replica.wake()
        else:
            replica.start()
    for worker in world.workers:
        worker.diligent = True
    world.hints = True
    world.operator.switch("t0", SwitchMode.normal)


def progress(world: World) -> None:
    """Every shard answers a new write and a lookup within two TTLs."""
    healed_ms = world.heap.now_ms
    for shard in range(world.shards):
        world.operator.probe(shard)
    served = world.operator.served_ms
    while len(served) < world.shards and world.heap.now_ms < healed_ms + 2 * TTL_MS:
        world.heap.run(world.heap.now_ms + 100)
    if len(served) < world.shards:
        roles = {
            name: [(seat.shard, seat.role.value, seat.warm) for seat in replica.seats]
            for name, replica in world.replicas.items()
        }
        missing = sorted(set(range(world.shards)) - served.keys())
        raise Violation(f"I8: two TTLs after everything healed shards {missing} do not serve: {roles}")


def settle(world: World) -> None:
    """Nobody asks for anything any more: what was promised ends by itself, and nothing is left over."""
    world.closing = True
    until_ms = world.heap.now_ms + QUIET_MS
    while world.heap.now_ms < until_ms and world.busy():
        world.heap.run(world.heap.now_ms + 250)
    left = list(world.witness.open_sessions())
    if left:
        raise Violation(f"I8: sessions (shard, number) never ended: {left}")
    for copy in world.witness.copies.values():
        if copy.state == DELETING:
            raise Violation(f"I8: never deleted: {copy}")
    for replica in world.replicas.values():
        for seat in replica.seats:
            if seat.leases:
                raise Violation(f"I8: {replica.name} still holds leases of shard {seat.shard}")
    if under_way := world.witness.escrow.under_way():
        raise Violation(f"I8: {under_way}")
    sweep(world)
    copies = world.witness.copies.values()
    want = {copy.place for copy in copies if copy.state == SERVING}
    allowed = want | {copy.place for copy in copies if copy.state == DELETING}
    have = world.bytes.disk.keys()
    if not want <= have <= allowed:
        raise Violation(f"I2: without bytes: {sorted(want - have)}; orphans: {sorted(have - allowed)}")
    compare(world)


def sweep(world: World) -> None:
    """A worker deletes the bytes that no block has."""
    world.bytes.promises.clear()
    for shard in range(world.shards):
        for storage in (*world.storages, "sp"):
            places = [
                place
                for place in world.bytes.disk
                if (copy := world.witness.copies[place]).storage == storage
                and world.home(copy.table.instance) == shard
            ]
            if places:
                world.workers[0].sweep(shard, storage, places)
    world.heap.run(world.heap.now_ms + 400)


def behind(world: World) -> bool:
    """Whether some replica does not stand at the end of some journal."""
    return any(
        seat.applied_seq != world.witness.histories[seat.shard].seq
        for replica in world.replicas.values()
        for seat in replica.seats
    )


def compare(world: World) -> None:
    """All replicas come to the end of every journal, and are equal."""
    world.heap.run(world.heap.now_ms + TELL_MS)
    world.silent = True
    for _ in range(20):
        if behind(world):
            world.heap.run(world.heap.now_ms + 53)
    copies = world.witness.copies.values()
    told = [world.windows.folded(shard, copies) for shard in range(world.shards)]
    for name, replica in world.replicas.items():
        for seat in replica.seats:
            machine, head_seq = seat.machine, world.witness.histories[seat.shard].seq
            if machine is None or seat.applied_seq != head_seq:
                raise Violation(f"I8: {name} stands at {seat.applied_seq} of {head_seq} of {seat.shard}")
            world.witness.compare(seat.shard, machine.seq, machine.digest(), name)
            world.compare_blocks(seat.shard, machine, name)
            world.windows.compare(seat.shard, machine, told[seat.shard], name)
