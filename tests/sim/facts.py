"""What follows from the rows: every number and relation is computed anew each time it is asked for."""

from collections.abc import Iterable, Iterator

from metaservice.core.model import GroupKind, Limits, LocationState, Quota, SwitchMode, SwitchScope

from .rows import Copy, InstanceRow, Member, Memory, Refuse, State

Block = tuple[str, str, bytes]
"""(instance, attention group, key)"""
Scope = tuple[SwitchScope, str]


class Facts:
    """The rows of the model and what they mean together."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.state = State()
        self.memory = Memory()
        self.durable = 0

    # ------------------------------------------------------------ blocks

    def live(self) -> dict[Block, Copy]:
        """The copy that each key names now."""
        return {(c.instance, c.group, c.key): c for c in self.state.copies.values() if c.live}

    def visible(self, copy: Copy | None) -> bool:
        """Whether readers may see the copy: it serves, and the event that published it is durable."""
        return copy is not None and copy.state == LocationState.serving and copy.seq <= self.durable

    def needs(self, copy: Copy) -> Block:
        """The block that must not go before this one; for a root, one that cannot exist."""
        primary = self.state.instances[copy.instance].primary
        if copy.group == primary:
            return (copy.instance, primary, copy.parent or b"")
        return (copy.instance, primary, copy.key)

    def children(self, copy: Copy) -> list[Copy]:
        """The live copies that need this one."""
        block = (copy.instance, copy.group, copy.key)
        return [c for c in self.state.copies.values() if c.live and self.needs(c) == block]

    def ancestors(self, copy: Copy) -> Iterator[Copy]:
        """The copies that this one needs, nearest first."""
        live = self.live()
        at = live.get(self.needs(copy))
        while at is not None:
            yield at
            at = live.get(self.needs(at))

    def touch(self, copies: Iterable[Copy], now_ms: int) -> None:
        """The blocks were used: so were those that they need."""
        for copy in copies:
            self.memory.own_ms[copy.location] = now_ms
            for used in (copy, *self.ancestors(copy)):
                self.memory.used_ms[used.location] = now_ms

    # ------------------------------------------------------------ leases

    def lease_end(self, copy: Copy) -> int:
        """When the last lease over a copy ends; 0 without one."""
        none = (0, 0)
        return max(
            (
                lease.rows[copy.location][1]
                for lease in self.memory.leases.values()
                if lease.state == "held" and lease.rows.get(copy.location, none)[0] == copy.generation
            ),
            default=0,
        )

    def leased(self, copy: Copy, now_ms: int) -> bool:
        """Whether a lease holds the copy now."""
        return self.lease_end(copy) > now_ms

    def end_leases(self, now_ms: int) -> None:
        """Leases end by time: each of its blocks by itself, and the lease with the last of them."""
        for name, lease in self.memory.leases.items():
            if lease.state == "held" and all(deadline <= now_ms for _, deadline in lease.rows.values()):
                self.memory.leases[name] = lease._replace(state="expired")

    # ------------------------------------------------------------ room

    def path(self, instance: str) -> list[Scope]:
        """The scopes of an instance, narrowest first."""
        row = self.state.instances[instance]
        tenant = self.state.groups[row.group].tenant
        return [
            (SwitchScope.instance, instance),
            (SwitchScope.group, row.group),
            (SwitchScope.tenant, tenant),
        ]

    def quota(self, scope: Scope) -> Quota:
        """The hard limit of a scope."""
        kind, name = scope
        if kind == SwitchScope.instance:
            return self.state.instances[name].quota
        if kind == SwitchScope.group:
            return self.state.groups[name].quota
        if kind == SwitchScope.tenant:
            return self.state.tenants[name]
        return Quota(bytes=self.state.storages[name].capacity_bytes)

    def counted(self, scope: Scope) -> list[Copy]:
        """The copies that a scope pays for: what is written and serves; in a storage also what is overdue."""
        kind, name = scope
        if kind == SwitchScope.storage:
            return [
                c
                for c in self.state.copies.values()
                if c.storage == name and (c.live or c.location in self.memory.stuck)
            ]
        inside = {instance for instance in self.state.instances if scope in self.path(instance)}
        return [c for c in self.state.copies.values() if c.instance in inside and c.live]

    def used(self, scope: Scope) -> tuple[int, int]:
        """(bytes, blocks) that a scope uses."""
        copies = self.counted(scope)
        return sum(c.size_bytes for c in copies), len(copies)

    def fits(self, scope: Scope, size_bytes: int) -> int:
        """How many more blocks of that size a scope has room for."""
        quota = self.quota(scope)
        used_bytes, used_blocks = self.used(scope)
        room = [1 << 30]
        if quota.bytes is not None:
            room.append((quota.bytes - used_bytes) // size_bytes)
        if quota.blocks is not None:
            room.append(quota.blocks - used_blocks)
        return max(0, min(room))

    # ------------------------------------------------------------ switches

    def mode(self, scope: SwitchScope, name: str) -> SwitchMode:
        """The switch set at one scope."""
        return self.state.switches.get((scope, name), SwitchMode.normal)

    def strictest(self, instance: str) -> tuple[SwitchMode, list[Scope]]:
        """The mode that holds for an instance and the scopes that have it; storages are apart."""
        path: list[Scope] = [(SwitchScope.cluster, ""), *self.path(instance)]
        mode = max(self.mode(*scope) for scope in path)
        return mode, [scope for scope in path if self.mode(*scope) == mode]

    def bypassed_storages(self) -> list[Scope]:
        """The storages that are switched off for readers."""
        kind = SwitchScope.storage
        return [(kind, name) for name in self.state.storages if self.mode(kind, name) == SwitchMode.bypass]

    def hidden(self, copy: Copy) -> bool:
        """Whether the copy's storage is switched off for readers."""
        return self.mode(SwitchScope.storage, copy.storage) == SwitchMode.bypass

    # ------------------------------------------------------------ what a request names

    def instance(self, name: str) -> InstanceRow:
        """A registered instance that still answers."""
        row = self.state.instances.get(name)
        if row is None:
            raise Refuse("instance_unknown")
        if row.retiring:
            raise Refuse("instance_retiring")
        return row

    def member(self, kind: str, name: str, incarnation: str) -> None:
        """An engine or worker that is registered under this incarnation."""
        known = self.members(kind).get(name)
        if known is None or known.incarnation != incarnation or known.expired_ms:
            raise Refuse("reregister")

    def members(self, kind: str) -> dict[str, Member]:
        """The registered engines or workers."""
        return self.state.engines if kind == "engine" else self.state.workers

    def batch(self, row: InstanceRow, keys: list[bytes]) -> None:
        """Keys as a request may name them."""
        if not keys:
            raise Refuse("empty_batch")
        if len(keys) > self.limits.keys_per_request_max:
            raise Refuse("too_many_keys")
        if any(len(key) != row.fingerprint.key_length for key in keys):
            raise Refuse("key_length")

    def group(self, row: InstanceRow, group: str | None, mode: str = "prefix") -> str:
        """The attention group that a request is about."""
        if group is not None:
            if row.attention(group) is None:
                raise Refuse("unknown_group")
            return group
        if mode == "window":
            found = row.first(GroupKind.sliding_window)
            if found is None:
                raise Refuse("mode_not_applicable")
            return found
        return row.primary
