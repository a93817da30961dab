"""The naive model's passing of time: expiry, watermarks, retirement, removal, deletion tasks, take-over."""

from itertools import permutations

from metaservice.core.commands import ConfirmTask, Remove, TakeOver, TakeTasks, Tick
from metaservice.core.model import LocationState, SessionState, SwitchScope
from metaservice.core.outcomes import RemoveOutcome
from metaservice.core.replies import Confirmed, Removed, Tasks

from .catalogue import Catalogue
from .facts import Scope
from .rows import Copy, Memory, Refuse, TaskRow, Violation


class Passing(Catalogue):
    """Predicts what ends by itself, and when bytes may be deleted."""

    # ------------------------------------------------------------ tick

    def on_tick(self, command: Tick, now_ms: int, reply: object) -> None:
        """Everything whose time has come ends, at any load and with no caller."""
        for number, session in list(self.state.sessions.items()):
            if session.state == SessionState.open and session.deadline_ms <= now_ms:
                self.end_session(number, SessionState.expired, now_ms)
        self.end_leases(now_ms)
        self.expire_members(now_ms)
        self.expire_tasks(now_ms)
        self.shrink(now_ms)
        self.retire(now_ms)

    def expire_members(self, now_ms: int) -> None:
        """Who is silent for too long has to register again."""
        for kind in ("engine", "worker"):
            members = self.members(kind)
            for name, member in list(members.items()):
                silent_ms = now_ms - self.memory.seen_ms.get((kind, name), self.state.took_over_ms)
                if member.expired_ms and now_ms - member.expired_ms >= self.limits.forget_ms:
                    del members[name]
                elif not member.expired_ms and silent_ms >= self.limits.expire_ms:
                    self.end_pools(name, now_ms)
                    members[name] = member._replace(expired_ms=now_ms)

    def expire_tasks(self, now_ms: int) -> None:
        """A task that was not confirmed in time is taken back; what it should have deleted is overdue."""
        for name, task in list(self.memory.tasks.items()):
            if task.open and task.deadline_ms <= now_ms:
                self.memory.tasks[name] = task._replace(open=False)
                self.memory.stuck |= {location for location, at in task.places if self.deleting(location, at)}

    def deleting(self, location: int, generation: int) -> bool:
        """Whether the place waits for the deletion of its bytes."""
        copy = self.state.copies.get(location)
        return copy is not None and (copy.state, copy.generation) == (LocationState.deleting, generation)

    def retire(self, now_ms: int) -> None:
        """A retiring instance loses its blocks, then goes. How many at a time is the machine's choice."""
        for name, row in list(self.state.instances.items()):
            if not row.retiring:
                continue
            for copy in [c for c in self.state.copies.values() if c.live and c.instance == name]:
                if copy.location in self.retired:
                    self.retired.remove(copy.location)
                    self.remove(copy, now_ms)
            if name in self.instances_gone:
                if any(c.instance == name for c in self.state.copies.values()):
                    raise Violation(f"instance {name} went before its blocks")
                del self.state.instances[name]
                self.state.switches.pop((SwitchScope.instance, name), None)

    def watermarks(self, scope: Scope) -> tuple[int, int]:
        """(high, low) in permille of a scope."""
        kind, name = scope
        if kind in (SwitchScope.tenant, SwitchScope.storage):
            return self.limits.high_permille, self.limits.low_permille
        group = self.state.groups[name if kind == SwitchScope.group else self.state.instances[name].group]
        return group.high_permille, group.low_permille

    def above(self, scope: Scope, permille: int, used: tuple[int, int] | None = None) -> bool:
        """Whether a scope uses more than that many thousandths of a limit."""
        quota = self.quota(scope)
        used_bytes, used_blocks = used or self.live_use(scope)
        return (quota.bytes is not None and used_bytes > quota.bytes * permille // 1000) or (
            quota.blocks is not None and used_blocks > quota.blocks * permille // 1000
        )

    def live_use(self, scope: Scope) -> tuple[int, int]:
        """(bytes, blocks) being written or serving."""
        copies = [c for c in self.counted(scope) if c.live]
        return sum(c.size_bytes for c in copies), len(copies)

    def live_uses(self) -> dict[Scope, tuple[int, int]]:
        """(bytes, blocks) being written or serving in every scope, in one pass; narrowest scopes first."""
        scopes: list[Scope] = [(SwitchScope.instance, name) for name in self.state.instances]
        scopes += [(SwitchScope.group, name) for name in self.state.groups]
        scopes += [(SwitchScope.tenant, name) for name in self.state.tenants]
        scopes += [(SwitchScope.storage, name) for name in self.state.storages]
        uses = {scope: [0, 0] for scope in scopes}
        rows_of = {name: [uses[scope] for scope in self.path(name)] for name in self.state.instances}
        for copy in self.state.copies.values():
            if copy.live:
                for row in (*rows_of[copy.instance], uses[SwitchScope.storage, copy.storage]):
                    row[0] += copy.size_bytes
                    row[1] += 1
        return {scope: (row[0], row[1]) for scope, row in uses.items()}

    def shrink(self, now_ms: int) -> None:
        """What is above its high watermark comes down to the low one, as far as candidates allow; a storage
        not while all who fill it have another behind it that is not above its own."""
        uses = self.live_uses()
        pressed = [
            scope
            for scope, used in uses.items()
            if self.above(scope, self.watermarks(scope)[0], used) and not self.spills(scope, uses)
        ]
        before = (self.state.copies, self.memory.used_ms, self.memory.own_ms, self.victims)
        wrong: Violation | None = None
        for order in permutations(pressed):
            self.state.copies, self.memory.used_ms = dict(before[0]), dict(before[1])
            self.memory.own_ms = dict(before[2])
            self.victims = list(before[3])
            try:
                self.shrink_each(order, now_ms)
            except Violation as violation:
                wrong = wrong or violation
                continue
            if not self.victims:
                return
        if wrong is not None:
            raise wrong

    def spills(self, scope: Scope, uses: dict[Scope, tuple[int, int]]) -> bool:
        """Whether what is new goes to a later storage of every group that fills this one."""
        kind, name = scope
        if kind != SwitchScope.storage:
            return False
        behind = [
            group.storages[group.storages.index(name) + 1 :]
            for group in self.state.groups.values()
            if name in group.storages
        ]
        return bool(behind) and all(any(self.has_room(one, uses) for one in order) for order in behind)

    def has_room(self, storage: str, uses: dict[Scope, tuple[int, int]]) -> bool:
        """Whether a storage takes new blocks and is below its high watermark."""
        scope = (SwitchScope.storage, storage)
        limit = self.quota(scope).bytes
        below = limit is None or uses[scope][0] < limit * self.watermarks(scope)[0] // 1000
        return below and self.takes(storage)

    def shrink_each(self, scopes: tuple[Scope, ...], now_ms: int) -> None:
        """One scope after the other; which is first is the machine's choice."""
        for scope in scopes:
            low = self.watermarks(scope)[1]
            while (
                self.above(scope, low)
                and self.evicted - len(self.victims) < self.limits.evict_batch_max
                and self.evict_one(scope, set(), now_ms)
            ):
                pass

    # ------------------------------------------------------------ removal

    def on_remove(self, command: Remove, now_ms: int, reply: object) -> None:
        """Hidden at once; the bytes go when the last lease over them is over."""
        row = self.instance(command.instance)
        remembered = (command.client, command.request_id)
        if command.client and command.request_id and remembered in self.state.answers:
            self.agree("first answer", self.state.answers[remembered], reply)
            return
        group = self.group(row, command.group)
        self.batch(row, command.keys)
        assert isinstance(reply, Removed), reply
        lease = self.memory.leases.get(command.lease)
        if lease is not None and lease.state == "held":
            self.memory.leases[command.lease] = lease._replace(state="released")
        live = self.live()
        answers: dict[bytes, RemoveOutcome] = {}
        for key in command.keys:
            copy = live.get((command.instance, group, key))
            if key in answers:
                continue
            if copy is None:
                answers[key] = RemoveOutcome.absent
                continue
            held = self.lease_end(copy) > now_ms
            answers[key] = RemoveOutcome.waiting_for_lease if held else RemoveOutcome.removed
            self.remove(copy, now_ms)
        self.agree("outcomes", [answers[k] for k in command.keys], [RemoveOutcome(o) for o in reply.outcomes])
        self.agree("removed", sum(o != RemoveOutcome.absent for o in answers.values()), reply.removed)
        if command.client and command.request_id and self.changed_state:
            self.state.answers[remembered] = reply

    def remove(self, copy: Copy, now_ms: int) -> None:
        """Take a live copy out of service."""
        if copy.state == LocationState.writing:
            self.row_removed(copy)
            self.free(copy, now_ms + max(self.limits.late_write_ms, self.limits.reclaim_delay_ms))
        else:
            self.free(copy, now_ms + self.limits.reclaim_delay_ms)

    # ------------------------------------------------------------ deletion tasks

    def deletable(self, copy: Copy, now_ms: int) -> bool:
        """Whether nobody can be reading or writing the bytes, and no crash can bring the block back."""
        return (
            copy.state == LocationState.deleting
            and copy.seq <= self.durable
            and copy.not_before_ms <= now_ms
            and not self.leased(copy, now_ms)
            and now_ms >= self.state.took_over_ms + self.settled_ms()
        )

    def settled_ms(self) -> int:
        """How long after a take-over nothing is deleted: all earlier promises are waited for anew."""
        limits = self.limits
        return max(limits.lease_ms_max, limits.late_write_ms, limits.reclaim_delay_ms)

    def on_take_tasks(self, command: TakeTasks, now_ms: int, reply: object) -> None:
        """A worker gets what it can delete, no sooner than it may be deleted, and nobody else has it."""
        self.member("worker", command.worker, command.incarnation)
        assert isinstance(reply, Tasks), reply
        serves = self.state.workers[command.worker].of
        handed = {place for task in self.memory.tasks.values() if task.open for place in task.places}
        given: list[int] = []
        for task in reply.tasks:
            places = tuple(zip(task.locations, task.generations, strict=True))
            if task.task in self.memory.tasks:
                raise Violation(f"task {task.task} is not a new one")
            for location, generation in places:
                copy = self.state.copies.get(location)
                if copy is None or copy.generation != generation or not self.deletable(copy, now_ms):
                    raise Violation(f"handed out for deletion too early: {copy} at {now_ms}")
                if copy.storage != task.storage or copy.storage not in serves:
                    raise Violation(f"{copy} is not of a storage that the worker serves: {serves}")
                parts = self.state.instances[copy.instance].parts(copy.group)
                self.agree("parts", tuple(part.name for part in parts), task.parts)
                if (location, generation) in handed:
                    raise Violation(f"location {location} is in two tasks")
                given.append(location)
                handed.add((location, generation))
            self.memory.tasks[task.task] = TaskRow(command.worker, places, now_ms + task.ttl_ms)
        waiting = [
            c.location
            for c in self.state.copies.values()
            if self.deletable(c, now_ms - self.limits.late_write_ms)
            and not self.leased(c, now_ms)
            and c.storage in serves
            and (c.location, c.generation) not in handed
            and self.memory.retry_ms.get(c.location, 0) <= now_ms
        ]
        if waiting and len(given) < command.limit:
            raise Violation(f"could be deleted and was not handed out: {waiting}")
        if len(given) > command.limit:
            raise Violation(f"{len(given)} locations handed out, limit {command.limit}")

    def on_confirm_task(self, command: ConfirmTask, now_ms: int, reply: object) -> None:
        """What is deleted is gone; what is not is offered again."""
        self.member("worker", command.worker, command.incarnation)
        task = self.memory.tasks.get(command.task)
        if task is None:
            raise Refuse("task_unknown")
        if task.worker != command.worker:
            raise Refuse("foreign_task")
        if command.ok is not None and len(command.ok) != len(task.places):
            raise Refuse("column_length")
        assert isinstance(reply, Confirmed), reply
        if task.answer is not None:
            self.agree("first answer", task.answer, reply)
            return
        gone = again = 0
        for row, (location, generation) in enumerate(task.places):
            copy = self.state.copies.get(location)
            if copy is None or copy.generation != generation:
                gone += 1
            elif command.ok is None or command.ok[row]:
                gone += 1
                del self.state.copies[location]
                self.memory.stuck.discard(location)
            else:
                again += 1
                self.memory.retry_ms[location] = now_ms + self.limits.task_retry_ms
        self.agree("confirmed", Confirmed(gone, again), reply)
        self.memory.tasks[command.task] = task._replace(open=False, answer=reply)

    # ------------------------------------------------------------ take-over

    def on_take_over(self, command: TakeOver, now_ms: int, reply: object) -> None:
        """Nobody loses a write by the change, nor bytes that a lease of the leader before may still hold."""
        self.memory = Memory()
        self.state.epoch = command.epoch
        self.state.took_over_ms = now_ms
        for number, session in list(self.state.sessions.items()):
            if session.state == SessionState.open:
                deadline_ms = max(session.deadline_ms, now_ms + session.ttl_ms)
                self.state.sessions[number] = session._replace(deadline_ms=deadline_ms)
