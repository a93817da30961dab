"""What a shard has to tell the catalogue, and what it was told: leader memory, whole or lost it does no harm.

Facts go out once they are durable: returns, the catalogue version, that an instance or a storage is empty
here. What was not acknowledged goes out again. Wishes (`Want`) say how large a slice the shard could use:

- urgent, when a write met a slice too small for it. The write's shard asks first and decides then;
- in time, when less than an eighth of a slice is free.

Wishes live for a few rounds, so that what others give up for them finds them still there. A scope is
*starved* after the catalogue answered that there is no more to be had: until it says otherwise the shard
makes do with its slice, and evicts in it. Otherwise a slice that is smaller than the limit is not full, only
not grown yet.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from .escrow import find_usage, limit_of
from .model import Limits, SwitchScope
from .replies import Drained, Errands, Settled, Used, Want
from .state import Group, Instance, ScopeKey, State, Storage, Tenant, Usage

ROUNDS = 4
"""So many rounds of errands a wish lives, and a report of another shard counts as fresh."""
RESERVE = 8
"""Less than one in so many parts of a slice free: ask for more in time."""
GROWTH = 4
"""Slices grow by one in so many parts at least, so that their number of steps is bounded."""


class Errander:
    """One shard's side of the errands, in one epoch."""

    def __init__(self, state: State, limits: Limits, overdue_bytes: dict[int, int]) -> None:
        self._state = state
        self._limits = limits
        self._overdue_bytes = overdue_bytes
        self.changed: set[Usage] = set()
        """Usages that changed since they were last looked at."""
        self.drained: dict[str, int] = {}
        """Retiring instance -> the seq at which it was found empty."""
        self._emptied: dict[Usage, int] = {}
        """Storage -> the seq at which its last location here went."""
        self._undurable: deque[tuple[int, int, int]] = deque()
        """(seq, return number or 0, catalogue version or 0) of what is not durable yet."""
        self._durable_seq = state.seq
        self._returns_durable = state.return_next - 1
        self._version_durable = state.catalogue_version
        self._asked: dict[Usage, list[int]] = {}
        self._wanted: dict[Usage, tuple[list[int], int]] = {}
        self._low: set[Usage] = set()
        self.starved: set[ScopeKey] = set()
        self._at_ms: int | None = None
        self._hurry = False
        self._number = 0
        self._base = 0
        self._sent: tuple[int, int, dict[Usage, Used]] = (0, 0, {})
        self._told: dict[Usage, Used] = {}
        self._returns_sent = 0
        self._drained_sent: set[str] = set()

    # ------------------------------------------------------------ what happens

    def reveal(self, durable_seq: int) -> None:
        """Everything up to this seq is in the journal."""
        self._durable_seq = durable_seq
        pending = self._undurable
        while pending and pending[0][0] <= durable_seq:
            _, number, version = pending.popleft()
            self._returns_durable = number or self._returns_durable
            self._version_durable = version or self._version_durable

    def returned(self, number: int) -> None:
        """Budget was given up by the event that is being applied."""
        self._undurable.append((self._state.seq, number, 0))

    def took_catalogue(self, version: int) -> None:
        """The event that is being applied brings the catalogue to this version."""
        self._undurable.append((self._state.seq, 0, version))

    def emptied(self, usage: Usage) -> None:
        """The event that is being applied took the last location out of the storage."""
        self._emptied[usage] = self._state.seq

    def forget(self, usage: Usage) -> None:
        """The scope is gone."""
        self._emptied.pop(usage, None)
        self._asked.pop(usage, None)
        self._wanted.pop(usage, None)
        self._told.pop(usage, None)
        self.changed.discard(usage)
        self._low.discard(usage)
        self.starved.discard((usage.scope, usage.id))

    def limit_changed(self, usage: Usage) -> None:
        """The scope's limit is another one: what was said about it may no longer hold."""
        self.starved.discard((usage.scope, usage.id))
        self.changed.add(usage)

    # ------------------------------------------------------------ wishes

    def used(self, usage: Usage) -> tuple[int, int]:
        """(bytes, blocks) that count against the slice: in a storage also what should have been deleted."""
        if usage.scope is SwitchScope.storage:
            number = self._state.storages[usage.id].number
            return usage.bytes + self._overdue_bytes.get(number, 0), usage.blocks
        return usage.bytes, usage.blocks

    def may_grow(self, usage: Usage) -> tuple[bool, bool]:
        """For bytes and blocks: whether the slice is not all that there is to be had."""
        if usage.scope is SwitchScope.instance or (usage.scope, usage.id) in self.starved:
            return False, False
        limit = limit_of(self._state, usage.scope, usage.id)
        budget_bytes, budget_blocks = usage.budget_bytes, usage.budget_blocks
        return (
            budget_bytes is not None and limit[0] is not None and budget_bytes < limit[0],
            budget_blocks is not None and limit[1] is not None and budget_blocks < limit[1],
        )

    def ask(self, usage: Usage, size_bytes: int, blocks: int, more: bool) -> bool:
        """A write needs so much room in the scope, more than its slice has. `more`: on top of what others
        asked for. Whether asking the catalogue may help."""
        if usage.scope is SwitchScope.instance:
            return False
        used = self.used(usage)
        lacks = [
            budget is not None and have + need > budget
            for budget, have, need in zip(
                (usage.budget_bytes, usage.budget_blocks), used, (size_bytes, blocks), strict=True
            )
        ]
        if not any(lacks):
            return False
        asked = self._asked.setdefault(usage, [0, 0])
        for at, need in enumerate((size_bytes, blocks)):
            asked[at] = asked[at] + need if more else max(asked[at], need)
        helps = any(lack and grows for lack, grows in zip(lacks, self.may_grow(usage), strict=True))
        self._hurry = self._hurry or helps
        return helps

    def _wants(self, now_ms: int) -> tuple[Want, ...]:
        """All wishes of now."""
        for usage, needs in self._asked.items():
            targets = [0, 0]
            budgets = (usage.budget_bytes, usage.budget_blocks)
            for at, (budget, have) in enumerate(zip(budgets, self.used(usage), strict=True)):
                if budget is not None:  # what it lacked may have come meanwhile, and must stay then
                    target = have + needs[at]
                    targets[at] = target + budget // GROWTH if target > budget else target
            self._wanted[usage] = (targets, now_ms)
        self._asked.clear()
        wants: dict[ScopeKey, Want] = {}
        keep_ms = ROUNDS * self._limits.errand_ms
        for usage, (targets, at_ms) in list(self._wanted.items()):
            want = self._wish(usage, targets, True)
            if want is None or now_ms - at_ms >= keep_ms:
                del self._wanted[usage]
            else:  # also when it was granted: what is granted for a write must wait for it
                wants[usage.scope, usage.id] = want
        for usage in self._low | self.changed:
            if usage.scope is SwitchScope.instance:
                continue
            want = self._wish(usage, self._reserve(usage), False)
            if want is None:
                self._low.discard(usage)
            else:
                self._low.add(usage)
                wants.setdefault((usage.scope, usage.id), want)
        return tuple(want for _, want in sorted(wants.items()))

    def _reserve(self, usage: Usage) -> list[int]:
        """The slice that the scope should have to be ready for more, by dimension (0: what it has will
        do)."""
        targets = [0, 0]
        budgets = (usage.budget_bytes, usage.budget_blocks)
        for at, (budget, have) in enumerate(zip(budgets, self.used(usage), strict=True)):
            if budget is not None and have and budget - have < budget // RESERVE:
                targets[at] = budget + budget // GROWTH
        return targets

    def _wish(self, usage: Usage, targets: list[int], urgent: bool) -> Want | None:
        """The wish for a slice of `targets`, within the limit; None for none. One that is not urgent is over
        once the slice is that large."""
        limit = limit_of(self._state, usage.scope, usage.id)
        wish = [0, 0]
        for at, budget in enumerate((usage.budget_bytes, usage.budget_blocks)):
            most = limit[at]
            if budget is not None and most is not None and (urgent or min(targets[at], most) > budget):
                wish[at] = min(targets[at], most)
        return Want(usage.scope, usage.id, wish[0], wish[1], urgent) if any(wish) else None

    # ------------------------------------------------------------ errands

    def errands(self, now_ms: int) -> Errands | None:
        """What there is to tell now: at once when it is news that somebody waits for, else once a round;
        None in between."""
        if not self._due(now_ms):
            return None
        state = self._state
        self._number += 1
        wants = self._wants(now_ms)
        rows, unsure = self._rows()
        self._sent = (self._number, self._base, rows)
        self.changed = unsure
        self._at_ms, self._hurry = now_ms, False
        self._returns_sent = self._returns_durable
        drained = self._drained()
        self._drained_sent = {one.instance for one in drained}
        return Errands(
            state.shard, state.epoch, self._number,
            self._version_durable, self._base,
            tuple(one for number, one in state.outstanding.items() if number <= self._returns_durable),
            wants, drained, tuple(sorted(rows.values(), key=_key)),
        )  # fmt: skip

    def _due(self, now_ms: int) -> bool:
        if self._at_ms is None or now_ms - self._at_ms >= self._limits.errand_ms:
            return True
        if self._hurry or self._returns_durable > self._returns_sent:
            return True
        return any(one.instance not in self._drained_sent for one in self._drained())

    def _drained(self) -> tuple[Drained, ...]:
        instances = self._state.instances
        return tuple(
            Drained(id, instances[id].primary.number)
            for id, seq in self.drained.items()
            if seq <= self._durable_seq
        )

    def _rows(self) -> tuple[dict[Usage, Used], set[Usage]]:
        """Rows that the catalogue does not know, and usages of which nothing final can be said yet. The
        catalogue's own shard has nothing to tell itself."""
        state = self._state
        if not state.shard:
            return {}, set()
        candidates = self.changed | set(self._sent[2]) if self._base else set(_usages(state))
        candidates |= {storage.usage for storage in state.storages.values()}
        told = self._told if self._base else {}
        rows: dict[Usage, Used] = {}
        unsure: set[Usage] = set()
        for usage in candidates:
            if find_usage(state, usage.scope, usage.id) is not usage:
                continue
            blocks, deleting, overdue = usage.blocks, usage.deleting_blocks, self.used(usage)[0] - usage.bytes
            if not (blocks or deleting) and self._emptied.get(usage, 0) > self._durable_seq:
                deleting = 1  # a crash would bring the location back
                unsure.add(usage)
            row = Used(usage.scope, usage.id, usage.bytes, blocks, usage.deleting_bytes, deleting, overdue)
            known = told.get(usage)
            if row != known and (known is not None or blocks or deleting):
                rows[usage] = row
        return rows, unsure

    def heard(self, settled: Settled) -> None:
        """The catalogue answered."""
        number, base, rows = self._sent
        if (settled.of_epoch, settled.number) != (self._state.epoch, number):
            return  # to other errands than the last ones
        if base in (0, settled.epoch):
            self._told = {**(self._told if base else {}), **rows}
            self._base = settled.epoch
        else:
            self._base = 0  # another leader, who knows nothing of us
        self._sent = (0, 0, {})
        self.starved = set(settled.starved)


def _key(one: Used) -> ScopeKey:
    return one.scope, one.id


def _usages(state: State) -> Iterator[Usage]:
    for registry in (state.tenants, state.groups, state.instances, state.storages):
        owners: Iterable[Tenant | Group | Instance | Storage] = registry.values()
        yield from (one.usage for one in owners)
