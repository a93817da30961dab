"""Rules about what is announced to routers: who may share a routing group, and which streams there are.

A router knows a block by its tokens and keeps the first name that it hears for them: two instances in one
routing group that name blocks differently would leave entries that nobody can remove, and hits that are none.
Nothing but a probe that each engine hashes itself (the canary) says for certain that they do not.
"""

from .commands import PutInstance, RegisterEngine
from .model import Publication
from .rejections import Rejection
from .starts import announceable
from .state import Instance, State
from .windows import Announcement, EngineAt

_NAMED_BY = ("hash_scheme", "hash_seed", "canary", "key_length", "block_size_tokens")
_HASHES = ("tail64", "head64")
MODEL_LENGTH_MAX = 256


def refuse(state: State, command: PutInstance) -> Rejection | None:
    """Why the instance cannot be announced like this."""
    wanted = command.publication
    if wanted is None:
        return None
    for field, value in (("model", wanted.model), ("routing_group", wanted.group), ("lora", wanted.lora)):
        if len(value) > MODEL_LENGTH_MAX or not value.isprintable() or (field == "model" and not value):
            least = " and at least one" if field == "model" else ""
            return Rejection(
                "invalid_field",
                f"expected at most {MODEL_LENGTH_MAX} printable characters{least}",
                f"publication.{field}",
            )
    if wanted.hash_of not in _HASHES:
        return Rejection("invalid_field", f"expected one of {', '.join(_HASHES)}", "publication.hash_of")
    known = state.instances.get(command.instance)
    if known is not None:
        refused = _renamed(known, wanted)
        if refused is not None:
            return refused
    if not 1 <= wanted.entries_max <= 100_000_000:
        return Rejection("invalid_field", "expected 1..100000000", "publication.entries_max")
    return (_misplaced(state, command, wanted) if wanted.base else None) or _mixed(state, command)


def _misplaced(state: State, command: PutInstance, wanted: Publication) -> Rejection | None:
    """Why its blocks cannot be told in the streams of its base: whoever reads those sees them."""
    base = state.instances.get(wanted.base)
    if base is None or wanted.base == command.instance:
        return Rejection("invalid_field", "expected another instance, registered before", "publication.base")
    if base.group.tenant.id != state.groups[command.group].tenant.id:
        return Rejection(
            "invalid_field",
            f"the base is of tenant {base.group.tenant.id!r}, whose routers would be told of these blocks",
            "publication.base",
        )
    if base.publication is not None and base.publication.base:
        return Rejection(
            "invalid_field",
            f"{wanted.base!r} is told in the streams of {base.publication.base!r} itself: name that one",
            "publication.base",
        )
    if not wanted.lora:
        return Rejection(
            "invalid_field",
            "expected the adapter's name: what else tells them from the base's",
            "publication.lora",
        )
    known = state.instances.get(command.instance)
    shard = known.shard if known is not None else command.shard
    if state.shards > 1 and shard not in (None, base.shard):
        return Rejection(
            "invalid_field",
            f"the base lives in shard {base.shard}: put this instance there too (shard: {base.shard})",
            "publication.base",
        )
    return None


def _renamed(known: Instance, wanted: Publication) -> Rejection | None:
    """What was told as stored under one hash, in one stream, cannot be told as removed under another."""
    before = known.publication
    for field in ("hash_of", "base"):
        if before is not None and getattr(before, field) != getattr(wanted, field):
            return Rejection(
                "invalid_field",
                f"it is {getattr(before, field)!r} and cannot change while the instance is announced: "
                "routers would keep what they were told; take the publication away first",
                f"publication.{field}",
            )
    return None


def _mixed(state: State, command: PutInstance) -> Rejection | None:
    wanted = command.publication
    assert wanted is not None
    mine = {**{name: getattr(command.fingerprint, name) for name in _NAMED_BY}, "hash_of": wanted.hash_of}
    for other in state.instances.values():
        known = other.publication
        if known is None or other.id == command.instance or other.retiring or known.group != wanted.group:
            continue
        theirs = {**{name: getattr(other.fingerprint, name) for name in _NAMED_BY}, "hash_of": known.hash_of}
        differs = {
            name: {"registered": theirs[name], "asked": mine[name]}
            for name in mine
            if theirs[name] != mine[name]
        }
        if differs:
            return Rejection(
                "hash_space_mixed",
                f"instance {other.id!r} is announced in routing group {wanted.group!r} and names blocks by "
                f"another {', '.join(differs)}: routers would keep blocks that nobody has; use another "
                "routing group, or the same hash",
                "publication.routing_group",
                {"instance": other.id, "differs": differs},
            )
    return None


def refuse_engine(state: State, command: RegisterEngine) -> Rejection | None:
    """Why this engine must not join its instance: it would name blocks by another hash."""
    instance = state.instances.get(command.instance)
    if instance is None or not command.canary or command.canary == instance.fingerprint.canary:
        return None
    return Rejection(
        "canary_mismatch",
        f"this engine's hash makes {command.canary!r} of the probe, those of instance {command.instance!r} "
        f"make {instance.fingerprint.canary!r}: they name blocks differently",
        "canary",
        {"registered": instance.fingerprint.canary, "asked": command.canary},
    )


def channels(state: State, command: RegisterEngine) -> tuple[int, int]:
    """The numbers of the streams for (instance, rank) and for those on the engine's node: those that others
    use already, else the first free ones."""
    if not command.instance:
        return -1, -1
    taken: set[int] = set()
    pool = local = -1
    node = command.endpoints.node
    for member in state.engines.values():
        taken.update((member.pool_channel, member.local_channel))
        if member.id != command.engine and (member.instance, member.rank) == (command.instance, command.rank):
            pool = max(pool, member.pool_channel)
            if node and member.endpoints.node == node:
                local = max(local, member.local_channel)
    me = state.engines.get(command.engine)
    if me is not None and (me.instance, me.rank) == (command.instance, command.rank):
        pool = pool if pool >= 0 else me.pool_channel
        if node and me.endpoints.node == node and local < 0:
            local = me.local_channel
    free = (number for number in range(2 * len(state.engines) + 4) if number not in taken)
    if pool < 0:
        pool = next(free)
    if node and local < 0:
        local = next(free)
    return pool, local


def _here(state: State, instance: Instance) -> bool:
    return state.shards == 1 or instance.shard == state.shard


def announcements(state: State) -> list[Announcement]:
    """The instances that this shard tells routers of."""
    return [
        Announcement(
            one.id, one.group.tenant.id, known.model, known.group, known.lora, known.hash_of,
            one.fingerprint.block_size_tokens, one.fingerprint.key_length, one.fingerprint.hash_scheme,
            one.fingerprint.hash_seed, one.fingerprint.canary, known.base,
        )
        for one in state.instances.values()
        if (known := one.publication) is not None and _here(state, one) and announceable(one.primary)
    ]  # fmt: skip


def engines(state: State) -> list[EngineAt]:
    """The live engines of this shard's instances."""
    return [
        EngineAt(
            one.id, one.incarnation, one.instance, one.rank, one.endpoints, one.pool_channel,
            one.local_channel,
        )
        for one in state.engines.values()
        if not one.expired_ms
        and (instance := state.instances.get(one.instance)) is not None
        and _here(state, instance)
    ]  # fmt: skip
