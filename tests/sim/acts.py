"""What clients do: each act draws its particulars from its own small seed.

So acts can be left out of a history without changing the others' draws.

Most calls are sensible. Some are late, repeated, foreign, stale or plainly wrong: those must be refused and
change nothing.
"""

from array import array
from collections.abc import Callable
from random import Random

from metaservice.core.commands import (
    Abort,
    ConfirmTask,
    Finish,
    Lookup,
    ReleaseLeases,
    Remove,
    RenewLeases,
    RenewWrite,
    StartWrite,
    TakeTasks,
)
from metaservice.core.outcomes import LeaseOutcome
from metaservice.core.rejections import Rejection
from metaservice.core.replies import Started

from . import event_acts
from .setting import TREE, Deployment
from .world import Place, Promise, World, Write

Act = Callable[[World, Random], None]
ENGINES = ("e0", "e1", "e2")
WORKERS = ("k0", "k1")
NAMES = tuple(TREE)


def chance(rng: Random, percent: float) -> bool:
    """True so often."""
    return rng.random() * 100 < percent


def pick_deployment(world: World, rng: Random) -> tuple[Deployment, str | None, str]:
    """A deployment, the group as it is asked for, and the group that is meant."""
    deployment = rng.choice(world.setting.deployments)
    if chance(rng, 50):
        return deployment, None, deployment.groups[0]
    group = rng.choice(deployment.groups)
    return deployment, group, group


def incarnation(world: World, rng: Random, member: str) -> str:
    """Mostly the current one."""
    known = world.incarnations[member]
    return rng.choice(known) if chance(rng, 3) else known[-1]


# ---------------------------------------------------------------- writers


def start(world: World, rng: Random) -> None:
    """An engine asks to write a run of a chain, or a handful of blocks with their parents."""
    deployment, asked, group = pick_deployment(world, rng)
    engine = rng.choice(ENGINES)
    chain = deployment.chain(rng.choice(NAMES))
    first = rng.randrange(len(chain)) if chance(rng, 30) else 0
    keys = chain[first:]
    parent = chain[first - 1] if first else None
    parents: list[bytes | None] | None = None
    if chance(rng, 25):
        rows = list(zip(keys, [parent, *keys[:-1]], strict=True))
        for name in rng.sample(NAMES, rng.randrange(3)):
            path = [None, *deployment.chain(name)]
            rows.append((deployment.key(name), path[-2]))
        rng.shuffle(rows)
        keys, parents, parent = [row[0] for row in rows], [row[1] for row in rows], None
    if chance(rng, 10):
        keys, parents = keys + keys[:1], (parents or [parent, *keys[:-1]]) + [(parents or [parent])[0]]
        parent = None
    ttl_ms = 0 if chance(rng, 40) else rng.randint(100, 4_000)
    sizes: tuple[int, ...] | None = None
    if chance(rng, 20):
        parts = deployment.command.fingerprint.parts
        sizes = tuple(part.bytes for part in parts if part.group == group)
    spoiled = chance(rng, 6)
    if spoiled:
        keys, parents, parent, ttl_ms, sizes = spoil(rng, deployment, keys, parents, parent, ttl_ms)
    command = StartWrite(
        instance=deployment.name,
        engine=engine,
        incarnation=incarnation(world, rng, engine),
        keys=keys,
        parents=parents,
        parent=parent,
        group="nothing" if chance(rng, 1) else asked,
        sizes=sizes,
        ttl_ms=ttl_ms,
        request_id=world.fresh_name("q") if chance(rng, 60) else "",
    )
    command = event_acts.labelled(world, Random(rng.random()), command, deployment, spoiled)
    send_start(world, command, deployment, group)


def spoil(
    rng: Random,
    deployment: Deployment,
    keys: list[bytes],
    parents: list[bytes | None] | None,
    parent: bytes | None,
    ttl_ms: int,
) -> tuple[list[bytes], list[bytes | None] | None, bytes | None, int, tuple[int, ...] | None]:
    """One thing about a start is wrong, or at least odd."""
    odd = deployment.key(rng.choice(NAMES))
    full: list[bytes | None] = list(parents) if parents is not None else [parent, *keys[:-1]]
    match rng.randrange(8):
        case 0:
            return [*keys[:-1], keys[-1][:-1]], parents, parent, ttl_ms, None
        case 1:
            return keys, parents, parent, rng.choice((1, 99, 8_001, 10**9)), None
        case 2:
            return keys, parents, parent, ttl_ms, (1, 2, 3)
        case 3:
            return [], None, None, ttl_ms, None
        case 4:
            return keys, [*full[:-1], odd], None, ttl_ms, None
        case 5:
            return keys, [odd, *full[1:]], None, ttl_ms, None
        case 6:
            return [*keys, keys[0]], [*full, odd], None, ttl_ms, None
        case _:
            return keys * 17, None, None, ttl_ms, None


def send_start(world: World, command: StartWrite, deployment: Deployment, group: str) -> None:
    """Send it; the engine will know its session once the answer is durable."""
    reply = world.send(command)
    if command.request_id:
        world.requests.append(command)
    if isinstance(reply, Started) and reply.session is not None:
        places = dict.fromkeys(
            (location, generation)
            for location, generation in zip(reply.locations, reply.generations, strict=True)
            if generation
        )
        world.writes.append(
            Write(
                reply.session,
                command.engine,
                command.incarnation,
                deployment,
                group,
                tuple(places),
                world.machine.seq,
                {
                    (location, generation): reply.pools[storage]
                    for location, generation, storage in zip(
                        reply.locations, reply.generations, reply.storages, strict=True
                    )
                    if generation and storage in reply.pools
                },
            )
        )


def finish(world: World, rng: Random) -> None:
    """An engine wrote some parts of some locations, and says so."""
    writes = world.known()[-8:]
    if not writes:
        return
    sessions = world.model.state.sessions
    opened = [write for write in writes if write.session in sessions and sessions[write.session].open]
    write = rng.choice(opened if opened and chance(rng, 80) else writes)
    names = write.deployment.parts(write.group)
    places = list(write.places)
    if chance(rng, 25):
        places = rng.sample(places, rng.randint(1, len(places)))
    parts: list[str] | None = None
    if chance(rng, 40):
        parts = rng.sample(names, rng.randint(1, len(names)))
    cells = [(place, part) for place in places for part in parts or names]
    ok = bytes(not chance(rng, 10) for _ in cells) if chance(rng, 30) else None
    lost = [world.unreachable(write, place) for place, _ in cells]
    if any(lost):
        ok = bytes(not gone and (ok is None or ok[row] > 0) for row, gone in enumerate(lost))
    said = [cell for row, cell in enumerate(cells) if ok is None or ok[row]]
    written = [world.put_bytes(write, place, part) for place, part in said]
    truly = all(written)
    engine, current = write.engine, write.incarnation
    checksums: array[int] | None = array("Q", [rng.getrandbits(64) for _ in cells])
    if chance(rng, 5):
        match rng.randrange(6):
            case 0:
                engine = rng.choice(ENGINES)
            case 1:
                current = world.incarnations[engine][0] + "x"
            case 2:
                places = [(place[0], place[1] + 1) for place in places]
            case 3:
                places = [(place[0] + 1_000, place[1]) for place in places]
            case 4:
                checksums = None
            case _:
                ok = b"\x01" * (len(cells) + 1)
    command = Finish(
        session=write.session + (50 if chance(rng, 1) else 0),
        engine=engine,
        incarnation=current,
        locations=array("Q", [location for location, _ in places]),
        generations=array("I", [generation for _, generation in places]),
        parts=tuple(parts) if parts is not None else None,
        ok=ok,
        checksums=checksums,
        request_id=world.fresh_name("q") if chance(rng, 50) else "",
    )
    world.send(command)
    if command.request_id and truly:
        world.requests.append(command)


def late_bytes(world: World, rng: Random) -> None:
    """A writer whose session is over writes on for a little while."""
    writes = world.known()[-12:]
    if writes:
        write = rng.choice(writes)
        world.put_bytes(write, rng.choice(write.places), rng.choice(write.deployment.parts(write.group)))


def renew_write(world: World, rng: Random) -> None:
    """A slow writer asks for more time."""
    if writes := world.known()[-6:]:
        write = rng.choice(writes)
        ttl_ms = rng.choice((0, 100, 1_500, 8_000, 9_000))
        world.send(
            RenewWrite(
                session=write.session, engine=write.engine, incarnation=write.incarnation, ttl_ms=ttl_ms
            )
        )


def abort(world: World, rng: Random) -> None:
    """A writer gives up."""
    if writes := world.known()[-6:]:
        write = rng.choice(writes)
        engine = rng.choice(ENGINES) if chance(rng, 10) else write.engine
        request_id = world.fresh_name("q") if chance(rng, 50) else ""
        world.send(
            Abort(session=write.session, engine=engine, incarnation=write.incarnation, request_id=request_id)
        )


def retry(world: World, rng: Random) -> None:
    """A client that got no answer, or believes so, asks the very same again."""
    if not world.requests:
        return
    command = rng.choice(world.requests[-16:])
    if isinstance(command, StartWrite):
        deployment = world.deployment(command.instance)
        send_start(world, command, deployment, command.group or deployment.groups[0])
        world.requests.pop()
    elif isinstance(command, Lookup):
        send_lookup(world, command)
    else:
        world.send(command)


# ---------------------------------------------------------------- readers


def lookup(world: World, rng: Random) -> None:
    """A reader asks what is there, and reads it."""
    deployment, asked, _ = pick_deployment(world, rng)
    modes = ["prefix", "prefix", "each"] + (
        ["window", "state", "state"] if len(deployment.groups) > 1 else []
    )
    mode = rng.choice(modes)
    chain = deployment.chain(rng.choice(("e", "z", "q", "s", *NAMES)))
    served = [copy for copy in world.model.state.copies.values() if world.model.visible(copy)]
    if served and chance(rng, 70):
        copy = rng.choice(served)
        deployment = world.deployment(copy.instance)
        asked = copy.group if asked is not None else None
        chain = deployment.chain(copy.key.rstrip(b".").decode())
        modes = modes if len(deployment.groups) > 1 else ["prefix", "each"]
        mode = rng.choice(modes)
    first = rng.randrange(len(chain)) if chance(rng, 15) else 0
    keys = chain[first:]
    if mode == "each" and chance(rng, 50):
        keys = [deployment.key(name) for name in rng.sample(NAMES, rng.randint(1, 8))]
    window = rng.randint(1, 4) if mode == "window" and chance(rng, 50) else None
    if mode in ("window", "state") and (window is None or asked is None):
        asked = None
    lease_ms = min(rng.choice((50, 400, 1_500, 2_000)), world.limits.lease_ms_max) if chance(rng, 60) else 0
    engine = rng.choice(ENGINES) if chance(rng, 40) else ""
    command = Lookup(
        instance=deployment.name if not chance(rng, 1) else "nobody",
        keys=keys if not chance(rng, 1) else [],
        mode=mode,
        group=asked,
        window_blocks=window,
        limit=rng.randrange(6) if chance(rng, 25) else None,
        parent=chain[first - 1] if first and not chance(rng, 5) else None,
        lease_ms=lease_ms if not chance(rng, 2) else rng.choice((1, 2_001)),
        engine=engine,
        incarnation=incarnation(world, rng, engine) if engine else "",
        request_id=world.fresh_name("l") if engine and chance(rng, 60) else "",
    )
    if command.request_id:
        world.requests.append(command)
    send_lookup(world, command)


def send_lookup(world: World, command: Lookup) -> None:
    """Ask, and read what is there."""
    reply = world.ask(command)
    if isinstance(reply, Rejection):
        return
    world.read_bytes(world.deployment(command.instance), command.keys, reply)
    if reply.lease is not None:
        world.leases.append(reply.lease)


def renew_leases(world: World, rng: Random) -> None:
    """A slow reader asks for more time, for some or all of its leases, or for some blocks of one."""
    names = some_leases(world, rng)
    held = [promise for promise in world.promises if promise.lease in names]
    only: set[Place] | None = None
    if chance(rng, 30) and held:
        names = [held[0].lease or ""]
        only = set(rng.sample(sorted(held[0].places), rng.randint(1, len(held[0].places))))
    ttl_ms = rng.choice((0, 50, 800, 2_000, 2_000, 2_001))
    locations = array("Q", [location for location, _ in sorted(only)]) if only is not None else None
    reply = world.ask(RenewLeases(leases=tuple(names), ttl_ms=ttl_ms, locations=locations))
    if isinstance(reply, Rejection):
        return
    for name, outcome in zip(names, reply.outcomes, strict=True):
        if outcome != LeaseOutcome.renewed:
            continue
        for promise in [p for p in world.promises if p.lease == name and p.until_ms > world.real_ms]:
            places = promise.places if only is None else promise.places & only
            world.promises.append(Promise(name, places, world.real_ms + reply.ttl_ms))


def some_leases(world: World, rng: Random) -> list[str]:
    """One to three leases that somebody holds or held."""
    known = world.leases[-4:] or ["r-0-1-77"]
    names = rng.sample(known, rng.randint(1, min(3, len(known))))
    return [*names, "r-0-9-9"] if chance(rng, 5) else names


def release(world: World, rng: Random) -> None:
    """A reader is done, perhaps for the second time."""
    names = some_leases(world, rng)
    world.ask(ReleaseLeases(leases=tuple(names)))
    world.promises = [promise for promise in world.promises if promise.lease not in names]


def remove(world: World, rng: Random) -> None:
    """Somebody wants blocks gone, whoever reads or writes them."""
    deployment, asked, _ = pick_deployment(world, rng)
    lease = rng.choice(world.leases[-4:]) if world.leases and chance(rng, 30) else ""
    keys = [deployment.key(name) for name in rng.choices(NAMES, k=rng.randint(1, 4))]
    read = [location for promise in world.promises for location, _ in sorted(promise.places)]
    copies = [world.model.state.copies[location] for location in read if location in world.model.state.copies]
    if copies and chance(rng, 50):
        copy = rng.choice(copies)
        deployment, asked, keys = world.deployment(copy.instance), copy.group, [copy.key]
    command = Remove(
        instance=deployment.name,
        keys=keys,
        group=asked,
        lease=lease,
        client="op" if chance(rng, 50) else "",
        request_id=world.fresh_name("q") if chance(rng, 50) else "",
    )
    reply = world.send(command)
    if command.request_id and command.client:
        world.requests.append(command)
    if not isinstance(reply, Rejection):
        world.promises = [promise for promise in world.promises if promise.lease != lease or not lease]


# ---------------------------------------------------------------- workers


def take_tasks(world: World, rng: Random) -> None:
    """A worker asks for work."""
    worker = rng.choice(WORKERS)
    current = incarnation(world, rng, worker)
    reply = world.ask(TakeTasks(worker=worker, incarnation=current, limit=rng.choice((1, 3, 1024))))
    if not isinstance(reply, Rejection):
        world.tasks += [(worker, current, task) for task in reply.tasks]


def confirm_task(world: World, rng: Random) -> None:
    """A worker deletes what it was told to, sometimes late or not all of it, and says so."""
    if not world.tasks:
        return
    worker, _, task = rng.choice(world.tasks[-5:])
    places = list(zip(task.locations, task.generations, strict=True))
    ok = bytes(not chance(rng, 25) for _ in places) if chance(rng, 30) else None
    world.drop_bytes(place for row, place in enumerate(places) if ok is None or ok[row])
    if chance(rng, 10):
        return
    if chance(rng, 5):
        worker = rng.choice(WORKERS)
    world.send(ConfirmTask(worker=worker, incarnation=world.incarnations[worker][-1], task=task.task, ok=ok))


def sweep(world: World, rng: Random) -> None:
    """A worker looks for bytes that nobody knows."""
    worker = rng.choice(WORKERS)
    world.sweep(worker, incarnation(world, rng, worker))
