"""The naive model's catalogue and membership: what is registered and by whom."""

from metaservice.core.commands import (
    DeleteGroup,
    DeleteInstance,
    DeleteStorage,
    DeleteTenant,
    Deregister,
    PutGroup,
    PutInstance,
    PutStorage,
    PutTenant,
    RegisterEngine,
    RegisterWorker,
    SetSwitch,
)
from metaservice.core.model import Fingerprint, Publication, SessionState, SwitchMode, SwitchScope
from metaservice.core.replies import Done, InstanceRegistered, Registered

from .pools import Pools
from .rows import InstanceRow, Member, Refuse


class Catalogue(Pools):
    """Predicts the replies of catalogue and membership commands."""

    def on_put_tenant(self, command: PutTenant, now_ms: int, reply: object) -> None:
        """Idempotent."""
        self.agree("reply", Done(created=command.tenant not in self.state.tenants), reply)
        self.state.tenants[command.tenant] = command.quota

    def on_delete_tenant(self, command: DeleteTenant, now_ms: int, reply: object) -> None:
        """Only when no group is left."""
        if command.tenant not in self.state.tenants:
            raise Refuse("tenant_unknown")
        if any(group.tenant == command.tenant for group in self.state.groups.values()):
            raise Refuse("in_use")
        del self.state.tenants[command.tenant]
        self.state.switches.pop((SwitchScope.tenant, command.tenant), None)

    def on_put_storage(self, command: PutStorage, now_ms: int, reply: object) -> None:
        """Kind and options stay while groups name it."""
        known = self.state.storages.get(command.storage)
        moved = known is not None and (known.kind, known.options) != (command.kind, command.options)
        if moved and self.storage_used(command.storage):
            raise Refuse("storage_mismatch")
        self.agree("reply", Done(created=known is None), reply)
        self.state.storages[command.storage] = command

    def storage_used(self, name: str) -> bool:
        """Whether a group names the storage, a block lies in it or a worker holds it."""
        named = any(name in group.storages for group in self.state.groups.values())
        used = any(copy.storage == name for copy in self.state.copies.values())
        return named or used or name in self.state.pools

    def on_delete_storage(self, command: DeleteStorage, now_ms: int, reply: object) -> None:
        """Only when no group names it and no block lies in it."""
        if command.storage not in self.state.storages:
            raise Refuse("storage_unknown")
        if self.storage_used(command.storage):
            raise Refuse("in_use")
        del self.state.storages[command.storage]
        self.state.switches.pop((SwitchScope.storage, command.storage), None)

    def on_put_group(self, command: PutGroup, now_ms: int, reply: object) -> None:
        """A group never changes its tenant."""
        if command.tenant not in self.state.tenants:
            raise Refuse("tenant_unknown")
        if not command.storages or not 1 <= command.low_permille <= command.high_permille <= 1000:
            raise Refuse("invalid_field")
        if any(name not in self.state.storages for name in command.storages):
            raise Refuse("storage_unknown")
        known = self.state.groups.get(command.group)
        if known is not None and known.tenant != command.tenant:
            raise Refuse("tenant_mismatch")
        self.agree("reply", Done(created=known is None), reply)
        self.state.groups[command.group] = command

    def on_delete_group(self, command: DeleteGroup, now_ms: int, reply: object) -> None:
        """Only when no instance is left."""
        if command.group not in self.state.groups:
            raise Refuse("group_unknown")
        if any(row.group == command.group for row in self.state.instances.values()):
            raise Refuse("in_use")
        del self.state.groups[command.group]
        self.state.switches.pop((SwitchScope.group, command.group), None)

    def on_put_instance(self, command: PutInstance, now_ms: int, reply: object) -> None:
        """An instance never changes its group nor its fingerprint."""
        if command.group not in self.state.groups:
            raise Refuse("group_unknown")
        known = self.state.instances.get(command.instance)
        mixed = self.mixed(command)
        if mixed and known is None:
            raise Refuse("hash_space_mixed")
        if known is not None:
            if known.retiring:
                raise Refuse("instance_retiring", *(["hash_space_mixed"] if mixed else []))
            differs = {"group_mismatch": known.group != command.group}
            differs["fingerprint_mismatch"] = known.fingerprint != command.fingerprint
            differs["hash_space_mixed"] = mixed
            if any(differs.values()):
                raise Refuse(*(code for code, differ in differs.items() if differ))
        storages = tuple(self.state.groups[command.group].storages)
        self.agree("reply", InstanceRegistered(known is None, storages), reply)
        self.state.instances[command.instance] = InstanceRow(
            command.group, command.fingerprint, command.quota, publication=command.publication
        )

    def mixed(self, command: PutInstance) -> bool:
        """Whether another instance is announced in the same routing group and names blocks otherwise."""
        wanted = command.publication

        def way(fingerprint: Fingerprint, publication: Publication) -> tuple[object, ...]:
            names = ("hash_scheme", "hash_seed", "canary", "key_length", "block_size_tokens")
            return (*(getattr(fingerprint, name) for name in names), publication.hash_of)

        return wanted is not None and any(
            (other.publication.routing_group or other.publication.model)
            == (wanted.routing_group or wanted.model)
            and way(other.fingerprint, other.publication) != way(command.fingerprint, wanted)
            for name, other in self.state.instances.items()
            if name != command.instance and other.publication is not None and not other.retiring
        )

    def on_delete_instance(self, command: DeleteInstance, now_ms: int, reply: object) -> None:
        """From now on it answers nobody."""
        row = self.state.instances.get(command.instance)
        if row is None:
            raise Refuse("instance_unknown")
        self.state.instances[command.instance] = row._replace(retiring=True)

    def on_set_switch(self, command: SetSwitch, now_ms: int, reply: object) -> None:
        """One switch a scope and id."""
        known: dict[SwitchScope, tuple[object, str]] = {
            SwitchScope.cluster: ({""}, "invalid_field"),
            SwitchScope.tenant: (self.state.tenants, "tenant_unknown"),
            SwitchScope.group: (self.state.groups, "group_unknown"),
            SwitchScope.instance: (self.state.instances, "instance_unknown"),
            SwitchScope.storage: (self.state.storages, "storage_unknown"),
        }
        names, code = known[command.scope]
        assert isinstance(names, dict | set)
        if command.id not in names:
            raise Refuse(code)
        if command.mode == SwitchMode.normal:
            self.state.switches.pop((command.scope, command.id), None)
        else:
            self.state.switches[(command.scope, command.id)] = command.mode

    # ------------------------------------------------------------ membership

    def on_register_engine(self, command: RegisterEngine, now_ms: int, reply: object) -> None:
        """Another incarnation fences the one before: its write sessions are over."""
        if command.instance and command.instance not in self.state.instances:
            raise Refuse("instance_unknown")
        of = (command.instance, command.rank)
        fenced = self.register("engine", command.engine, command.incarnation, of, now_ms)
        self.agree("reply", Registered(command.engine, command.incarnation, fenced), reply)
        for number, session in list(self.state.sessions.items()):
            of_another = session.engine == command.engine and session.incarnation != command.incarnation
            if session.open and of_another:
                self.end_session(number, SessionState.aborted, now_ms)

    def on_register_worker(self, command: RegisterWorker, now_ms: int, reply: object) -> None:
        """Another incarnation fences the one before; what that held in volatile storages is gone."""
        if any(name not in self.state.storages for name in command.storages):
            raise Refuse("storage_unknown")
        self.refuse_incarnation("worker", command.worker, command.incarnation)
        self.refuse_pools(command)
        fenced = self.register("worker", command.worker, command.incarnation, command.storages, now_ms)
        self.begin_pools(command, now_ms)
        self.agree("reply", Registered(command.worker, command.incarnation, fenced), reply)

    def register(self, kind: str, name: str, incarnation: str, of: object, now_ms: int) -> str:
        """Enter a member; the incarnation that it fences, or ''."""
        self.refuse_incarnation(kind, name, incarnation)
        known = self.members(kind).get(name, Member(""))
        self.memory.seen_ms[(kind, name)] = now_ms
        fenced = known.incarnation if known.incarnation not in ("", incarnation) else ""
        retired = (*known.retired, fenced) if fenced else known.retired
        self.members(kind)[name] = Member(incarnation, of, retired)
        return fenced

    def refuse_incarnation(self, kind: str, name: str, incarnation: str) -> None:
        """What was replaced cannot come back."""
        if not incarnation:
            raise Refuse("invalid_field")
        if incarnation in self.members(kind).get(name, Member("")).retired:
            raise Refuse("incarnation_retired")

    def on_deregister(self, command: Deregister, now_ms: int, reply: object) -> None:
        """It leaves on purpose; what an engine had open is over."""
        known = self.members(command.kind).get(command.id)
        if known is None:
            raise Refuse(f"{command.kind}_unknown")
        if command.incarnation and known.incarnation != command.incarnation:
            raise Refuse("reregister")
        if not command.incarnation and not known.expired_ms:
            raise Refuse("not_expired")
        del self.members(command.kind)[command.id]
        if command.kind == "worker":
            self.end_pools(command.id, now_ms)
        for number, session in list(self.state.sessions.items()):
            if command.kind == "engine" and session.open and session.engine == command.id:
                self.end_session(number, SessionState.aborted, now_ms)
