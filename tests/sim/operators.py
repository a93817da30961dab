"""What is done to the service: registrations, switches, quotas, passing time, a lagging journal, crashes."""

from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from metaservice.core.commands import (
    DeleteGroup,
    DeleteInstance,
    DeleteStorage,
    DeleteTenant,
    Deregister,
    Heartbeat,
    PutGroup,
    PutInstance,
    PutStorage,
    PutTenant,
    RegisterEngine,
    RegisterWorker,
    SetSwitch,
    Tick,
)
from metaservice.core.model import Fingerprint, LocationState, SwitchMode, SwitchScope
from metaservice.core.rejections import Rejection

from . import acts, event_acts
from .acts import ENGINES, WORKERS, Act, chance
from .world import World

# ---------------------------------------------------------------- members


def register(world: World, rng: Random) -> None:
    """A member starts, says that it is still there, or comes back from the dead."""
    member = rng.choice((*ENGINES, *WORKERS))
    known = world.incarnations[member]
    if chance(rng, 30):
        world.restart(member)
    enter(world, rng, member, rng.choice(known) if chance(rng, 10) else known[-1])


def enter(world: World, rng: Random, member: str, incarnation: str) -> None:
    """Register a member under an incarnation."""
    if member in ENGINES:
        instance = rng.choice(("", "i0", "i1"))
        endpoints = event_acts.endpoints(member)
        world.send(
            RegisterEngine(engine=member, incarnation=incarnation, instance=instance, endpoints=endpoints)
        )
    else:
        storages = ("s0", "s1") if chance(rng, 70) else (rng.choice(("s0", "s1", "s2")),)
        reply = world.send(RegisterWorker(worker=member, incarnation=incarnation, storages=storages))
        code = getattr(reply, "code", "")
        if code == "storage_owned" and chance(rng, 80):  # there is another worker for that one
            rest = tuple(name for name in ("s0", "s1") if name != world.setting.volatile)
            world.send(RegisterWorker(worker=member, incarnation=incarnation, storages=rest))
        elif code == "incarnation_retired" and world.setting.volatile and chance(rng, 80):
            current = world.restart(member)
            world.send(RegisterWorker(worker=member, incarnation=current, storages=storages))


def beat(world: World, rng: Random) -> None:
    """Most members say that they are there; who is told to register again does so."""
    for member in (*ENGINES, *WORKERS):
        if chance(rng, 15):
            continue
        kind = "engine" if member in ENGINES else "worker"
        current = acts.incarnation(world, rng, member)
        reply = world.ask(Heartbeat(kind=kind, id=member, incarnation=current))
        if getattr(reply, "code", "") == "reregister" and chance(rng, 80):
            enter(world, rng, member, world.incarnations[member][-1])
    if world.setting.volatile and chance(rng, 15):
        worker = rng.choice(WORKERS)
        enter(world, rng, worker, world.restart(worker))


def deregister(world: World, rng: Random) -> None:
    """A member leaves on purpose."""
    member = rng.choice((*ENGINES, *WORKERS))
    kind = "engine" if member in ENGINES else "worker"
    current = acts.incarnation(world, rng, member)
    reply = world.send(Deregister(kind=kind, id=member, incarnation=current))
    if kind == "worker" and not isinstance(reply, Rejection):
        world.bury(current)


# ---------------------------------------------------------------- operators


def switch(world: World, rng: Random) -> None:
    """Somebody flips a switch; mostly back to normal."""
    ids = {
        SwitchScope.cluster: ("",),
        SwitchScope.tenant: ("t0", "t1", "t9"),
        SwitchScope.group: ("g0", "g1", "g2"),
        SwitchScope.instance: ("i0", "i1", "i2"),
        SwitchScope.storage: ("s0", "s1", "s2"),
    }
    on = list(world.model.state.switches)
    if on and chance(rng, 80):
        scope, name = rng.choice(on)
        mode = SwitchMode.normal
    else:
        scope = rng.choice(list(SwitchScope))
        name = rng.choice(ids[scope])
        mode = rng.choice((SwitchMode.read_only, SwitchMode.bypass))
    world.send(SetSwitch(scope=scope, id=name, mode=mode))


def quota(world: World, rng: Random) -> None:
    """A limit or policy changes, down or up."""
    setting = world.setting
    match rng.randrange(4):
        case 0:
            world.send(PutTenant(tenant=rng.choice(("t0", "t1")), quota=setting.quota(rng, 6, 18)))
        case 1:
            known = rng.choice(setting.groups)
            world.send(setting.group(rng, known.group, known.tenant, known.storages))
        case 2:
            put = rng.choice(setting.deployments).command
            group, fingerprint = put.group, put.fingerprint
            low = rng.choice((3, 8))
            world.send(
                PutInstance(
                    instance=put.instance,
                    group=group,
                    fingerprint=fingerprint,
                    quota=setting.quota(rng, low, 14),
                    publication=event_acts.publication(world, put.instance),
                )
            )
        case _:
            name = rng.choice(("s0", "s1"))
            options = {"root": f"/{name}"} if chance(rng, 90) else {"root": "/elsewhere"}
            capacity = setting.maybe(rng, 60, 400)
            storage = world.model.state.storages[name]
            world.send(replace(storage, options=options, capacity_bytes=capacity))


def odd_catalogue(world: World, rng: Random) -> None:
    """Something that must be refused, or that concerns nobody."""
    put = rng.choice(world.setting.deployments).command
    known = rng.choice(world.setting.groups)
    match rng.randrange(9):
        case 0:
            world.send(DeleteTenant(tenant=rng.choice(("t0", "t9"))))
        case 1:
            world.send(DeleteGroup(group=rng.choice(("g0", "g2", "g9"))))
        case 2:
            world.send(DeleteStorage(storage=rng.choice(("s0", "s1", "s2"))))
        case 3:
            fingerprint = put.fingerprint
            other = Fingerprint(
                fingerprint.model,
                "2",
                fingerprint.kv_dtype,
                16,
                fingerprint.key_length,
                "sha256",
                "0",
                fingerprint.parts,
                fingerprint.groups,
            )
            world.send(PutInstance(instance=put.instance, group=put.group, fingerprint=other))
        case 4:
            group = "g2" if put.group != "g2" else "g0"
            world.send(PutInstance(instance=put.instance, group=group, fingerprint=put.fingerprint))
        case 5:
            tenant = "t1" if known.tenant == "t0" else "t0"
            world.send(PutGroup(group=known.group, tenant=tenant, storages=known.storages))
        case 6:
            low, high = rng.choice(((900, 800), (0, 0), (1, 1001)))
            world.send(
                PutGroup(
                    group=known.group,
                    tenant=known.tenant,
                    storages=known.storages,
                    high_permille=high,
                    low_permille=low,
                )
            )
        case _:
            world.send(PutStorage(storage="s2", kind="posix", options={"root": f"/{rng.randrange(3)}"}))


def retire(world: World, rng: Random) -> None:
    """An instance is taken out of the fleet."""
    world.send(DeleteInstance(instance=rng.choice(("i0", "i1", "i2", "i9"))))


def restore(world: World, rng: Random) -> None:
    """What is not registered (any more) is registered (again)."""
    for command in world.setting.catalogue:
        if isinstance(command, PutInstance) and command.instance not in world.model.state.instances:
            world.send(command)


# ---------------------------------------------------------------- time, journal, crashes


def tick(world: World, rng: Random) -> None:
    """What the sequencer does several times a second."""
    world.send(Tick())


def advance(world: World, rng: Random) -> None:
    """Time passes: a little, a lot, or exactly to where something ends."""
    state, memory = world.model.state, world.model.memory
    ends = [session.deadline_ms for session in state.sessions.values() if session.open]
    ends += [copy.not_before_ms for copy in state.copies.values() if copy.state == LocationState.deleting]
    ends += [end for lease in memory.leases.values() for _, end in lease.rows.values()]
    ends += [task.deadline_ms for task in memory.tasks.values() if task.open]
    ends = [end for end in ends if end >= world.now_ms]
    if ends and chance(rng, 35):
        world.now_ms = max(world.now_ms, rng.choice(ends) + rng.choice((-1, 0, 0, 1)))
    elif chance(rng, 5):
        world.now_ms += rng.randint(2_000, 9_000)
    else:
        world.now_ms += rng.choice((1, 20, 100, 300, 700))


def flush(world: World, rng: Random) -> None:
    """The journal acknowledges some or all of what is waiting."""
    if world.boundaries:
        world.flush(rng.choice(world.boundaries) if chance(rng, 40) else world.boundaries[-1])


def crash(world: World, rng: Random) -> None:
    """The leader is gone; another takes over, now or a little later."""
    world.now_ms += rng.choice((1, 1, 500))
    world.crash(from_capture=chance(rng, 50), jump_ms=rng.choice((0, 0, 0, -3_000, 30_000)))
    if chance(rng, 70):
        world.flush()
    beat(world, rng)


def capture(world: World, rng: Random) -> None:
    """A snapshot is taken."""
    world.capture()


ACTS: dict[str, tuple[int, Act]] = {
    "start": (150, acts.start),
    "finish": (190, acts.finish),
    "late_bytes": (30, acts.late_bytes),
    "renew_write": (15, acts.renew_write),
    "abort": (15, acts.abort),
    "retry": (35, acts.retry),
    "lookup": (130, acts.lookup),
    "renew_leases": (25, acts.renew_leases),
    "release": (20, acts.release),
    "remove": (35, acts.remove),
    "take_tasks": (50, acts.take_tasks),
    "confirm_task": (60, acts.confirm_task),
    "sweep": (8, acts.sweep),
    "register": (12, register),
    "beat": (45, beat),
    "deregister": (3, deregister),
    "switch": (14, switch),
    "quota": (12, quota),
    "odd_catalogue": (6, odd_catalogue),
    "retire": (3, retire),
    "restore": (6, restore),
    "tick": (90, tick),
    "advance": (110, advance),
    "flush": (150, flush),
    "crash": (9, crash),
    "capture": (8, capture),
}

Step = tuple[str, int]
"""(name of the act, its own seed)"""


def plan(seed: int, steps: int | None = None) -> list[Step]:
    """The acts of a history: 60 to 200, or `steps`."""
    rng = Random(seed)
    count = steps if steps is not None else rng.randint(60, 200)
    names = list(ACTS)
    chosen = rng.choices(names, [ACTS[name][0] for name in names], k=count)
    return event_acts.spliced(seed, [(name, rng.getrandbits(32)) for name in chosen])


def act(name: str) -> Act:
    """The act of that name."""
    return event_acts.ACTS[name][1] if name in event_acts.ACTS else ACTS[name][1]


def play(seed: int, steps: list[Step], prepare: Callable[[World], None] | None = None) -> World:
    """Live through a history. Raises Violation, or whatever the machine breaks with."""
    world = World(seed)
    if prepare is not None:
        prepare(world)
    opening = Random(seed)
    for member in (*ENGINES, *WORKERS):
        enter(world, opening, member, world.incarnations[member][-1])
    world.now_ms += opening.choice((0, world.model.settled_ms()))
    world.flush()
    for name, own in steps:
        act(name)(world, Random(own))
    world.finish()
    return world
