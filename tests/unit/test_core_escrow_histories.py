"""Seeded histories of several shards: writers everywhere, limits that change, leaders that crash and lose
what was not durable, messages that are lost, doubled and late. Then all of it heals, and nearly all of every
limit can be used."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from metaservice.core import commands as cmd
from metaservice.core.model import EvictionPolicy, Quota, SwitchMode, SwitchScope
from metaservice.core.rejections import Rejection
from metaservice.core.replies import Started, Tasks
from tests.sim.fleet import FINGERPRINT, key
from tests.unit.core_realm import Realm

BLOCK_BYTES = 20
NAMES = "ab"


class History:
    """One seed's history."""

    def __init__(self, seed: int, *, changing: bool) -> None:
        self.random = random.Random(seed)
        self.changing = changing
        self.realm = Realm(self.random.choice((2, 3, 4)), auto=False)
        self.policy = self.random.choice((EvictionPolicy.reject, EvictionPolicy.lru))
        self.realm.furnish(
            NAMES,
            tenant=self.quota(),
            group=self.quota(),
            capacity_bytes=self.random.choice((None, 200 * BLOCK_BYTES)),
            eviction=self.policy,
            high_permille=1000,
            low_permille=900,
        )
        self.post: list[tuple[int, Any]] = []
        """(shard, command): messages under way."""
        self.open: list[tuple[int, int, Started]] = []
        """(shard, its epoch, start)"""

    def quota(self) -> Quota:
        """Some limit, or none."""
        choose = self.random.choice
        return Quota(choose((None, 150 * BLOCK_BYTES, 400 * BLOCK_BYTES)), choose((None, 100, 300)))

    # ------------------------------------------------------------ acts

    def run(self, acts: int) -> None:
        """So many things happen, and everything holds at every moment."""
        for number in range(acts):
            self.act()
            self.realm.check()
            if not number % 20:
                self.realm.check_machines()
        self.realm.check_replay()

    def act(self) -> None:
        """One thing happens."""
        acts: list[tuple[Callable[[], None], int]] = [
            (self.write, 10), (self.finish, 6), (self.remove, 3), (self.delete, 2), (self.tick, 3),
            (self.flush, 8), (self.crash, 1), (self.capture, 1), (self.feed, 6), (self.sync, 1),
            (self.errand, 8), (self.deliver, 16),
        ]  # fmt: skip
        if self.changing:
            acts += [
                (self.change_limit, 2),
                (self.change_instance, 1),
                (self.change_scope, 1),
                (self.change_engine, 1),
            ]
        self.random.choices([act for act, _ in acts], [weight for _, weight in acts])[0]()

    def shard(self) -> int:
        return self.random.randrange(len(self.realm.nodes))

    def write(self) -> None:
        shard = self.shard()
        keys = [key(f"n{self.realm.key_number + row}") for row in range(self.random.choice((1, 4, 20)))]
        self.realm.key_number += len(keys)
        instances = [
            one.id for one in self.realm.nodes[shard].machine.state.instances.values() if one.shard == shard
        ]
        if not instances:
            return
        instance = self.random.choice(instances)
        command = cmd.StartWrite(instance=instance, engine="e", incarnation="1", keys=keys)
        if self.realm.nodes[shard].machine.short(command) and self.random.random() < 0.7:
            self.errand(shard)
        reply = self.realm.send(shard, command)
        if isinstance(reply, Started) and reply.session is not None:
            self.open.append((shard, self.realm.nodes[shard].epoch, reply))

    def finish(self) -> None:
        if self.open:
            shard, epoch, started = self.open.pop(self.random.randrange(len(self.open)))
            node = self.realm.nodes[shard]
            if epoch == node.epoch and started.session in node.machine.state.sessions:
                self.realm.finish(shard, started)

    def remove(self) -> None:
        shard = self.shard()
        state = self.realm.nodes[shard].machine.state
        known = [(id, list(one.primary.slots)) for id, one in state.instances.items() if one.primary.slots]
        if known:
            id, keys = self.random.choice(known)
            self.realm.send(shard, cmd.Remove(instance=id, keys=self.random.sample(keys, min(5, len(keys)))))

    def delete(self) -> None:
        shard = self.shard()
        machine = self.realm.nodes[shard].machine
        reply = machine.read(cmd.TakeTasks(worker="k", incarnation="1"), self.realm.now_ms)
        if isinstance(reply, Tasks):
            for task in reply.tasks:
                self.realm.send(shard, cmd.ConfirmTask(worker="k", incarnation="1", task=task.task))

    def tick(self) -> None:
        self.realm.now_ms += self.random.choice((1, 50, 300, 2_000))
        self.realm.send(self.shard(), cmd.Tick())

    def flush(self) -> None:
        self.realm.flush(self.shard())

    def crash(self) -> None:
        self.realm.crash(self.shard(), from_capture=self.random.random() < 0.5)

    def capture(self) -> None:
        self.realm.capture(self.shard())

    def feed(self) -> None:
        shard = self.shard()
        news = self.realm.news(shard) if shard else None
        if news is not None:
            cut = self.random.randrange(len(news.events) + 1)
            if cut < len(news.events) and self.random.random() < 0.3:
                news = self.cut(news, cut) or news
            self.post.append((shard, news))

    def cut(self, news: cmd.TakeCatalogue, count: int) -> cmd.TakeCatalogue | None:
        """Only the first so many of the events, and the version that they lead to."""
        if not count:
            return None
        last = news.events[count - 1]
        events = self.realm.nodes[0].events
        version = next(seq for seq in range(news.since + 1, news.version + 1) if events[seq - 1] is last)
        return cmd.TakeCatalogue(since=news.since, version=version, events=news.events[:count])

    def sync(self) -> None:
        shard = self.shard()
        if shard:
            self.post.append((shard, cmd.SyncCatalogue(view=self.realm.view())))

    def errand(self, shard: int | None = None) -> None:
        shard = self.shard() if shard is None else shard
        errands = self.realm.nodes[shard].machine.errands(self.realm.now_ms)
        if errands is not None:
            self.post.append((0, cmd.Settle(errands=errands)))

    def deliver(self) -> None:
        """A message arrives, or is lost; it may come again later."""
        if not self.post:
            return
        at = self.random.randrange(len(self.post)) if self.random.random() < 0.3 else 0
        shard, command = self.post[at]
        if self.random.random() < 0.85:
            self.post.pop(at)
        if self.random.random() < 0.1:
            return
        reply = self.realm.send(shard, command)
        if isinstance(command, cmd.Settle):
            assert not isinstance(reply, Rejection)
            self.realm.flush(0)  # an answer is given once it is durable
            self.post.append((command.errands.shard, cmd.GiveBudget(settled=reply)))
        del self.post[:-40]

    # ------------------------------------------------------------ the operator

    def change_limit(self) -> None:
        name = self.random.choice(NAMES)
        state = self.realm.catalogue.state
        which = self.random.randrange(3)
        if which == 0 and f"t{name}" in state.tenants:
            new = self.quota()
            self.note(SwitchScope.tenant, f"t{name}", state.tenants[f"t{name}"].quota, new)
            self.realm.send(0, cmd.PutTenant(tenant=f"t{name}", quota=new))
        elif which == 1 and f"g{name}" in state.groups:
            new = self.quota()
            group = state.groups[f"g{name}"]
            self.note(SwitchScope.group, f"g{name}", group.quota, new)
            self.realm.send(
                0,
                cmd.PutGroup(
                    group=f"g{name}", tenant=f"t{name}", storages=group.storages, quota=new,
                    eviction=self.policy, high_permille=1000,
                ),
            )  # fmt: skip
        elif which == 2 and f"s{name}" in state.storages:
            storage = state.storages[f"s{name}"]
            new_bytes = self.random.choice((None, 100 * BLOCK_BYTES, 300 * BLOCK_BYTES))
            self.note(SwitchScope.storage, storage.id, Quota(storage.capacity_bytes), Quota(new_bytes))
            self.realm.send(
                0, cmd.PutStorage(storage=storage.id, kind="posix", options={}, capacity_bytes=new_bytes)
            )

    def note(self, scope: SwitchScope, id: str, old: Quota, new: Quota) -> None:
        """Whether more may be in use than the new limit allows."""
        for before, after in ((old.bytes, new.bytes), (old.blocks, new.blocks)):
            if after is not None and (before is None or after < before):
                self.realm.lowered.add((scope, id))

    def change_instance(self) -> None:
        state = self.realm.catalogue.state
        name, number = self.random.choice(NAMES), self.random.randrange(4)
        if self.random.random() < 0.5:
            self.realm.send(0, cmd.DeleteInstance(instance=f"{name}{number}"))
        elif f"g{name}" in state.groups:
            self.realm.send(
                0,
                cmd.PutInstance(
                    instance=f"{name}{number}", group=f"g{name}", fingerprint=FINGERPRINT,
                    quota=Quota(blocks=self.random.choice((None, 50))),
                ),
            )  # fmt: skip

    def change_scope(self) -> None:
        """Groups, tenants and storages go when nothing is in them, and come again under the same names."""
        name = self.random.choice(NAMES)
        state = self.realm.catalogue.state
        if self.random.random() < 0.5:
            for id in [id for id, one in state.instances.items() if one.group.id == f"g{name}"]:
                self.realm.send(0, cmd.DeleteInstance(instance=id))
        self.realm.send(0, cmd.DeleteGroup(group=f"g{name}"))
        self.realm.send(0, cmd.DeleteTenant(tenant=f"t{name}"))
        self.realm.send(0, cmd.DeleteStorage(storage=f"s{name}"))
        if self.random.random() < 0.8:
            self.restore(name)

    def restore(self, name: str) -> None:
        """What was deleted is there again."""
        state = self.realm.catalogue.state
        if f"t{name}" not in state.tenants:
            self.realm.lowered.discard((SwitchScope.tenant, f"t{name}"))
            self.realm.send(0, cmd.PutTenant(tenant=f"t{name}", quota=self.quota()))
        if f"s{name}" not in state.storages:
            self.realm.lowered.discard((SwitchScope.storage, f"s{name}"))
            self.realm.send(
                0, cmd.PutStorage(storage=f"s{name}", kind="posix", options={}, capacity_bytes=4_000)
            )
        if f"g{name}" not in state.groups:
            self.realm.lowered.discard((SwitchScope.group, f"g{name}"))
            self.realm.send(
                0,
                cmd.PutGroup(
                    group=f"g{name}", tenant=f"t{name}", storages=(f"s{name}",), quota=self.quota(),
                    eviction=self.policy, high_permille=1000,
                ),
            )  # fmt: skip

    def change_engine(self) -> None:
        """An engine that writes nothing comes, is replaced, is switched on and off, goes."""
        choose = self.random.choice
        send = self.realm.send
        if choose((True, False)):
            send(0, cmd.RegisterEngine(engine="x", incarnation=str(self.realm.now_ms), instance=""))
        else:
            known = self.realm.catalogue.state.engines.get("x")
            send(0, cmd.Deregister(kind="engine", id="x", incarnation=known.incarnation if known else "0"))
        send(0, cmd.SetSwitch(scope=SwitchScope.tenant, id="ta", mode=choose(list(SwitchMode))))

    # ------------------------------------------------------------ the end

    def heal(self) -> None:
        """Nothing is lost any more; all that is under way arrives or is forgotten."""
        realm = self.realm
        self.post.clear()
        for node in realm.nodes:
            realm.flush(node.shard)
        realm.auto = True
        for scope, id in [(SwitchScope.tenant, f"t{name}") for name in NAMES]:
            if id in realm.catalogue.state.tenants:
                realm.send(0, cmd.SetSwitch(scope=scope, id=id, mode=SwitchMode.normal))
        for _ in range(4):
            realm.tick(6_000)  # open sessions end
            for node in realm.nodes:
                realm.feed(node.shard)
                self.delete_all(node.shard)
            realm.rest(2)

    def delete_all(self, shard: int) -> None:
        """The worker deletes what there is to delete."""
        for _ in range(20):
            reply = self.realm.nodes[shard].machine.read(
                cmd.TakeTasks(worker="k", incarnation="1"), self.realm.now_ms
            )
            if isinstance(reply, Rejection) or not reply.tasks:
                return
            for task in reply.tasks:
                self.realm.done(shard, cmd.ConfirmTask(worker="k", incarnation="1", task=task.task))


FEW = [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 300))]


@pytest.mark.parametrize("seed", FEW)
def test_limits_that_stay_are_never_exceeded_and_can_be_used_up(seed: int) -> None:
    history = History(seed, changing=False)
    history.run(400)
    history.heal()
    fill(history)


@pytest.mark.parametrize("seed", FEW)
def test_no_budget_is_lost_or_doubled_while_limits_change(seed: int) -> None:
    history = History(seed, changing=True)
    history.run(400)
    history.heal()
    for name in NAMES:
        history.restore(name)
        for shard in range(len(history.realm.nodes)):
            history.realm.send(
                0,
                cmd.PutInstance(
                    instance=f"new-{name}{shard}", group=f"g{name}", fingerprint=FINGERPRINT, shard=shard
                ),
            )
    history.realm.rest()
    fill(history)


def fill(history: History) -> None:
    """Writers on all shards write until nothing gets in; then nearly all of what limits them is used."""
    realm = history.realm
    realm.check()
    realm.check_machines()
    for _ in range(40):
        for node in realm.nodes:
            for one in list(node.machine.state.instances.values()):
                if one.shard == node.shard and not one.retiring and one.quota.blocks is None:
                    keys = [key(f"n{realm.key_number + row}") for row in range(8)]
                    realm.key_number += 8
                    command = cmd.StartWrite(instance=one.id, engine="e", incarnation="1", keys=keys)
                    if node.machine.short(command):
                        realm.errand(node.shard)
                    started = realm.done(node.shard, command)
                    realm.finish(node.shard, started)
        realm.round()
        realm.check()
    realm.check_machines()
    for name in NAMES:
        assert best_use(realm, name) >= 0.95, f"{name}: {best_use(realm, name)}"
    realm.check_replay()


def best_use(realm: Realm, name: str) -> float:
    """How full the fullest limit is over the instances of a name (1: no limit)."""
    state = realm.catalogue.state
    limits = [
        (SwitchScope.tenant, f"t{name}", state.tenants[f"t{name}"].quota),
        (SwitchScope.group, f"g{name}", state.groups[f"g{name}"].quota),
        (SwitchScope.storage, f"s{name}", Quota(state.storages[f"s{name}"].capacity_bytes)),
    ]
    found = []
    for scope, id, limit in limits:
        used = realm.used(scope, id)
        found += [
            have / most
            for have, most in zip(used, (limit.bytes, limit.blocks), strict=True)
            if most is not None
        ]
    return max(found, default=1.0)
