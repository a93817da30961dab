"""Several shards' machines with their journals, and the messages between them, in a test's hands: durability,
crashes, and what is lost, doubled or late."""

from typing import Any

from metaservice.core import commands as cmd
from metaservice.core.escrow import effect, find_usage, granted, limit_of, take_effect
from metaservice.core.events import (
    GroupDeleted,
    GroupPut,
    SliceGranted,
    StorageDeleted,
    StoragePut,
    TenantDeleted,
    TenantPut,
)
from metaservice.core.machine import Machine
from metaservice.core.model import EvictionPolicy, Limits, Quota, SwitchScope
from metaservice.core.rejections import Rejection
from metaservice.core.replies import CatalogueView, Give, Settled, Started
from metaservice.core.spread import concerns
from metaservice.core.state import ScopeKey
from tests.sim.fleet import FINGERPRINT, key

LIMITS = Limits(
    lease_ms_max=1_000, reclaim_delay_ms=100, late_write_ms=100, expire_ms=1_000_000, errand_ms=500,
    write_ttl_ms_default=5_000, hot_summary_ms=2_000,
)  # fmt: skip
CLUSTER = "c0ffee"


class Node:
    """One shard: its machine, the events that it gave, and how many of them are durable."""

    def __init__(self, shard: int, shards: int, limits: Limits) -> None:
        self.shard = shard
        self.shards = shards
        self.limits = limits
        self.events: list[Any] = []
        self.durable = 0
        self.epoch = 0
        self.captured: tuple[int, list[bytes]] | None = None
        self.machine = Machine(shard, limits, shards)

    def replayed(self, from_capture: bool = False) -> Machine:
        """Another machine, from the journal as it is."""
        start, machine = 0, Machine(self.shard, self.limits, self.shards)
        if from_capture and self.captured is not None:
            start, chunks = self.captured
            machine = Machine.restore(chunks, self.shard, self.limits, self.shards)
        for event in self.events[start:]:
            machine.apply(event)
        machine.mark_durable(len(self.events))
        return machine


class Realm:
    """All shards. Every command's events are one batch; `auto`: durable at once."""

    def __init__(self, shards: int, limits: Limits = LIMITS, *, auto: bool = True) -> None:
        self.limits = limits
        self.auto = auto
        self.now_ms = 1_000_000
        self.nodes = [Node(shard, shards, limits) for shard in range(shards)]
        self.lowered: set[ScopeKey] = set()
        """Scopes whose limit was lowered, or set where none was: more may be in use, for a while."""
        for node in self.nodes:
            self.lead(node.shard)
        self.key_number = 0

    # ------------------------------------------------------------ one shard

    @property
    def catalogue(self) -> Machine:
        """The machine of shard 0."""
        return self.nodes[0].machine

    def send(self, shard: int, command: cmd.Command) -> Any:
        """Decide and apply; the reply."""
        node = self.nodes[shard]
        reply, events = node.machine.execute(command, self.now_ms)
        assert not (events and isinstance(reply, Rejection))
        node.events += events
        assert node.machine.seq == len(node.events)
        if self.auto:
            self.flush(shard)
        return reply

    def done(self, shard: int, command: cmd.Command) -> Any:
        """A command that must be accepted."""
        reply = self.send(shard, command)
        assert not isinstance(reply, Rejection), reply
        return reply

    def flush(self, shard: int) -> None:
        """All of the shard's events are durable."""
        node = self.nodes[shard]
        node.durable = len(node.events)
        node.machine.mark_durable(node.durable)

    def lead(self, shard: int) -> None:
        """The next epoch begins."""
        node = self.nodes[shard]
        node.epoch += 1
        self.send(shard, cmd.TakeOver(epoch=node.epoch, cluster="" if shard else CLUSTER))

    def crash(self, shard: int, *, from_capture: bool = False) -> None:
        """Lose what is not durable and all leader memory; another leader takes over."""
        node = self.nodes[shard]
        del node.events[node.durable :]
        if node.captured is not None and node.captured[0] > node.durable:
            node.captured = None
        node.machine = node.replayed(from_capture)
        self.lead(shard)

    def capture(self, shard: int) -> None:
        """Later crashes may start from here."""
        node = self.nodes[shard]
        node.captured = (len(node.events), node.machine.capture())

    # ------------------------------------------------------------ between shards

    def news(self, shard: int) -> cmd.TakeCatalogue | None:
        """What is durable of the catalogue and new to the shard."""
        catalogue, since = self.nodes[0], self.nodes[shard].machine.state.catalogue_version
        events = tuple(event for event in catalogue.events[since : catalogue.durable] if concerns(event))
        if not events:
            return None
        return cmd.TakeCatalogue(since=since, version=catalogue.durable, events=events)

    def view(self) -> CatalogueView:
        """The whole catalogue, as a follower that is at the durable end has it."""
        node = self.nodes[0]
        follower = Machine(0, self.limits, len(self.nodes))
        for event in node.events[: node.durable]:
            follower.apply(event)
        follower.mark_durable(node.durable)
        return follower.catalogue_view()

    def feed(self, shard: int) -> None:
        """The shard takes what is new."""
        news = self.news(shard) if shard else None
        if news is not None:
            self.done(shard, news)

    def errand(self, shard: int, after_ms: int = 0) -> Settled | None:
        """The shard's errands, with nothing lost on the way; the answer."""
        self.now_ms += after_ms
        errands = self.nodes[shard].machine.errands(self.now_ms)
        if errands is None:
            return None
        settled: Settled = self.done(0, cmd.Settle(errands=errands))
        self.feed(shard)
        self.done(shard, cmd.GiveBudget(settled=settled))
        return settled

    def round(self) -> None:
        """A round of errands of all shards, each told what is new."""
        self.now_ms += self.limits.errand_ms
        for node in self.nodes:
            self.feed(node.shard)
            self.errand(node.shard)
        for node in self.nodes:
            self.feed(node.shard)

    def rest(self, rounds: int = 8) -> None:
        """Let everything settle."""
        for _ in range(rounds):
            self.round()

    def tick(self, after_ms: int = 0) -> None:
        """Time passes for everybody."""
        self.now_ms += after_ms
        for node in self.nodes:
            self.done(node.shard, cmd.Tick())

    # ------------------------------------------------------------ what is registered

    def furnish(
        self,
        names: str = "a",
        *,
        tenant: Quota | None = None,
        group: Quota | None = None,
        capacity_bytes: int | None = None,
        eviction: EvictionPolicy = EvictionPolicy.reject,
        **more: Any,
    ) -> None:
        """A tenant, a storage, a group and an instance in every shard, under each of the names; an engine
        and a worker."""
        for name in names:
            self.done(0, cmd.PutTenant(tenant=f"t{name}", quota=tenant or Quota()))
            self.done(
                0, cmd.PutStorage(storage=f"s{name}", kind="posix", options={}, capacity_bytes=capacity_bytes)
            )
            self.done(
                0,
                cmd.PutGroup(
                    group=f"g{name}", tenant=f"t{name}", storages=(f"s{name}",), quota=group or Quota(),
                    eviction=eviction, **more,
                ),
            )  # fmt: skip
            for shard in range(len(self.nodes)):
                self.done(
                    0, cmd.PutInstance(instance=f"{name}{shard}", group=f"g{name}", fingerprint=FINGERPRINT)
                )
        self.done(0, cmd.RegisterEngine(engine="e", incarnation="1"))
        self.done(
            0, cmd.RegisterWorker(worker="k", incarnation="1", storages=tuple(f"s{name}" for name in names))
        )
        self.flush(0)
        for node in self.nodes:
            self.feed(node.shard)
            self.flush(node.shard)

    def start(self, shard: int, count: int = 1, name: str = "a", ask: bool = True) -> Started:
        """Ask to write new blocks in the shard, asking the catalogue first when they do not fit."""
        keys = [key(f"n{self.key_number + row}") for row in range(count)]
        self.key_number += count
        command = cmd.StartWrite(instance=f"{name}{shard}", engine="e", incarnation="1", keys=keys)
        if ask and self.nodes[shard].machine.short(command):
            self.errand(shard)
        reply: Started = self.done(shard, command)
        return reply

    def put(self, shard: int, count: int = 1, name: str = "a", ask: bool = True) -> int:
        """Write new blocks; how many got in."""
        started = self.start(shard, count, name, ask)
        return self.finish(shard, started)

    def finish(self, shard: int, started: Started) -> int:
        """All of it is written."""
        from array import array

        rows = [row for row, generation in enumerate(started.generations) if generation]
        if started.session is None:
            return 0
        self.done(
            shard,
            cmd.Finish(
                session=started.session, engine="e", incarnation="1",
                locations=array("Q", [started.locations[row] for row in rows]),
                generations=array("I", [started.generations[row] for row in rows]),
                checksums=array("Q", bytes(16 * len(rows))),
            ),
        )  # fmt: skip
        return len(rows)

    # ------------------------------------------------------------ what holds

    def used(self, scope: SwitchScope, id: str) -> tuple[int, int]:
        """(bytes, blocks) used of the scope in all shards."""
        usages = [
            usage for node in self.nodes if (usage := find_usage(node.machine.state, scope, id)) is not None
        ]
        return sum(usage.bytes for usage in usages), sum(usage.blocks for usage in usages)

    def check_machines(self) -> None:
        """Every machine is consistent in itself."""
        for node in self.nodes:
            node.machine.check()

    def check(self) -> None:
        """Limits hold over all shards, and no budget is lost or doubled."""
        state = self.catalogue.state
        for scope_key in state.held:
            limit = limit_of(state, *scope_key)
            pairs = granted(state, scope_key)
            used = self.used(*scope_key)
            for at in range(2):
                most = limit[at]
                amounts = [pair[at] for pair in pairs]
                if most is None:
                    assert amounts == [None] * len(amounts)
                elif scope_key not in self.lowered:
                    assert None not in amounts
                    total = sum(amount or 0 for amount in amounts)
                    assert total <= most, f"{total} of {most} granted: {scope_key}"
                    assert used[at] <= most, f"{used[at]} of {most} used: {scope_key}"
        for node in self.nodes[1:]:
            self.check_slices(node)

    def check_slices(self, node: Node) -> None:
        """What the catalogue granted a shard is what the shard has, gave up, or has under way to it."""
        catalogue, state = self.catalogue.state, node.machine.state
        reset: set[ScopeKey] = set()
        coming: dict[ScopeKey, list[int]] = {}
        for event in self.nodes[0].events[state.catalogue_version :]:
            if isinstance(event, SliceGranted):
                if event.shard == node.shard:
                    amounts = coming.setdefault((event.scope, event.id), [0, 0])
                    amounts[0] += event.bytes
                    amounts[1] += event.blocks
            else:
                reset |= _sets_limit(event)
        for scope_key, held in catalogue.held.items():
            if scope_key in reset:
                continue  # the shard knows another limit; what it has will be looked at anew
            usage = find_usage(state, *scope_key)
            assert usage is not None
            limit = limit_of(catalogue, *scope_key)
            pair = granted(catalogue, scope_key)[node.shard]
            for number, one in state.outstanding.items():
                if number > catalogue.returns_taken[node.shard] and (one.scope, one.id) == scope_key:
                    take_effect(pair, effect(one, held.made_seq, held.since, limit, pair), one.kept)
            have = [
                None if budget is None else budget + more
                for budget, more in zip(
                    (usage.budget_bytes, usage.budget_blocks), coming.get(scope_key, (0, 0)), strict=True
                )
            ]
            assert have == pair, f"shard {node.shard} has {have} of {scope_key}, the catalogue says {pair}"

    def check_replay(self) -> None:
        """Whoever applies the same events, from the start or from a snapshot, has the same state."""
        for node in self.nodes:
            digest = node.machine.digest()
            assert node.replayed().digest() == digest
            assert node.replayed(from_capture=True).digest() == digest
            restored = Machine.restore(node.machine.capture(), node.shard, self.limits, node.shards)
            assert restored.digest() == digest


def _sets_limit(event: Any) -> set[ScopeKey]:
    """The scopes whose limit the event may change."""
    if isinstance(event, TenantPut | TenantDeleted):
        return {(SwitchScope.tenant, event.tenant)}
    if isinstance(event, GroupPut | GroupDeleted):
        return {(SwitchScope.group, event.group)}
    if isinstance(event, StoragePut | StorageDeleted):
        return {(SwitchScope.storage, event.storage)}
    return set()


TENANT = (SwitchScope.tenant, "ta")


def slices(realm: Realm, at: int = 1, scope: ScopeKey = TENANT) -> list[int | None]:
    """What each shard may use of a scope, as the shards say."""
    usages = [find_usage(node.machine.state, *scope) for node in realm.nodes]
    assert None not in usages
    return [(one.budget_bytes, one.budget_blocks)[at] for one in usages if one is not None]


def limit(realm: Realm, quota: Quota) -> None:
    """The operator sets the tenant's limit."""
    realm.lowered.add(TENANT)
    realm.done(0, cmd.PutTenant(tenant="ta", quota=quota))


def give(realm: Realm, shard: int, *gives: Give) -> None:
    """The shard is asked to give, whatever the catalogue thinks."""
    realm.done(shard, cmd.GiveBudget(settled=Settled(0, 0, 0, 0, (), gives)))


def blocks(amount: int, evict: bool = False) -> Give:
    """So many blocks of the tenant's."""
    return Give(*TENANT, 0, amount, evict)
