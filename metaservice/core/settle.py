"""The catalogue's side of errands: returns taken, empty instances let go, budget granted to who wants it.

What is granted is what the limit leaves: never more than the limit together, whatever shards say of
themselves. Who wants what is leader memory, so that a grant may follow when somebody else gives.

Sharing: a write that is short goes before wishes for the future, and who has least goes first. When nothing
is free, shards that have more than they use are asked for it, and shards that are above their fair share (the
limit, divided by the shards that use or want it) for what they have above it, by evicting, but only for those
below theirs. So shards that fight over a limit come to rest at equal shares, and unused budget wanders to
where it is used.
"""

from collections.abc import Iterable

from .commands import Settle
from .escrow import DIMENSIONS, effect, find_usage, granted, limit_of, take_effect
from .events import Event, InstanceGone, ReturnTaken, SliceGranted
from .memory import Memory
from .rejections import Rejection
from .replies import Drained, Errands, Give, Returned, Settled, Want
from .state import Pair, ScopeKey, State

Decision = tuple[object, list[Event]]

SPARE_PARTS = 64
"""Of what it does not use, a shard may keep this part of its share of the limit when others are short."""


def settle(state: State, memory: Memory, command: Settle, now_ms: int) -> Decision:
    """Decide the errands of one shard. Idempotent, but for budget granted anew where wanted."""
    assert state.leads_catalogue, "errands are settled by the catalogue"
    errands = command.errands
    if not 0 <= errands.shard < state.shards:
        return Rejection("invalid_field", f"expected a shard of 0..{state.shards - 1}", "shard"), []
    memory.reports.take(errands, now_ms)
    ledger = _Ledger(state, memory, now_ms)
    events: list[Event] = [*_take_returns(state, ledger, errands, now_ms)]
    events += [
        InstanceGone(now_ms, one.instance) for one in errands.drained if _is_drained(state, errands, one)
    ]
    ledger.distribute()
    events += ledger.grants(state.grant_next)
    version = state.seq + len(events) if events else memory.spread_seq
    starved, give = ledger.answer(errands.shard)
    return Settled(errands.epoch, errands.number, state.epoch, version, starved, give), events


def _take_returns(state: State, ledger: "_Ledger", errands: Errands, now_ms: int) -> Iterable[ReturnTaken]:
    """Each once and in order; what comes again or out of turn is passed over."""
    due = state.returns_taken[errands.shard] + 1
    for one in errands.returns:
        if one.number != due:
            continue
        amounts = ledger.take(errands.shard, one)
        yield ReturnTaken(now_ms, errands.shard, due, one.scope, one.id, *amounts, one.kept)
        due += 1


def _is_drained(state: State, errands: Errands, drained: Drained) -> bool:
    """Whether it is still that instance, and there, that may go."""
    instance = state.instances.get(drained.instance)
    return (
        instance is not None
        and instance.retiring
        and instance.shard == errands.shard
        and instance.primary.number == drained.table
    )


class _Ledger:
    """What is granted, with what this step is about to change."""

    def __init__(self, state: State, memory: Memory, now_ms: int) -> None:
        self._state = state
        self._memory = memory
        self._now_ms = now_ms
        self._pairs: dict[ScopeKey, list[list[int | None]]] = {}
        self._granted: dict[tuple[ScopeKey, int], list[int]] = {}
        reports = memory.reports
        self._fresh = {
            shard: report
            for shard in range(state.shards)
            if (report := reports.fresh(shard, now_ms)) is not None
        }
        self._wants: dict[ScopeKey, dict[int, Want]] = {}
        for shard, report in self._fresh.items():
            for key, want in report.wants.items():
                if key in state.held:
                    self._wants.setdefault(key, {})[shard] = want

    # ------------------------------------------------------------ the books

    def pairs(self, key: ScopeKey) -> list[list[int | None]]:
        """[bytes, blocks] granted of the scope, by shard."""
        if key not in self._pairs:
            self._pairs[key] = granted(self._state, key)
        return self._pairs[key]

    def take(self, shard: int, returned: Returned) -> Pair:
        """Take a return; the amounts that count."""
        key = (returned.scope, returned.id)
        held = self._state.held.get(key)
        if held is None:
            return None, None
        limit = limit_of(self._state, *key)
        pair = self.pairs(key)[shard]
        amounts = effect(returned, held.made_seq, held.since, limit, pair)
        take_effect(pair, amounts, returned.kept)
        return amounts

    def _free(self, key: ScopeKey, at: int) -> int | None:
        """What the limit leaves (negative: more was granted, the limit was lowered); None: no limit, or a
        shard has not bound itself to it yet."""
        limit = limit_of(self._state, *key)[at]
        amounts = [pair[at] for pair in self.pairs(key)]
        if limit is None or None in amounts:
            return None
        return limit - sum(amount for amount in amounts if amount is not None)

    def grants(self, first: int) -> list[Event]:
        """The events of what was granted in this step."""
        return [
            SliceGranted(self._now_ms, first + row, shard, *key, amounts[0], amounts[1])
            for row, ((key, shard), amounts) in enumerate(self._granted.items())
        ]

    # ------------------------------------------------------------ who gets

    def distribute(self) -> None:
        """Grant what is free to who wants it: urgent wants first, of those who has least."""
        for key in sorted(self._wants):
            wants = self._wants[key]
            for at in range(DIMENSIONS):
                free = self._free(key, at)
                if free is None or free <= 0:
                    continue
                pairs = self.pairs(key)
                order = sorted(
                    wants, key=lambda shard: (not wants[shard].urgent, pairs[shard][at] or 0, shard)
                )
                for shard in order:
                    need = self._need(key, shard, at)
                    amount = min(need, free if wants[shard].urgent else free // 2)
                    if amount > 0:
                        self._grant(key, shard, at, amount)
                        free -= amount

    def _need(self, key: ScopeKey, shard: int, at: int) -> int:
        """What the shard lacks of the slice that it wants."""
        want = self._wants.get(key, {}).get(shard)
        have = self.pairs(key)[shard][at]
        if want is None or have is None:
            return 0
        return max(0, (want.bytes, want.blocks)[at] - have)

    def _grant(self, key: ScopeKey, shard: int, at: int, amount: int) -> None:
        pair = self.pairs(key)[shard]
        have = pair[at]
        assert have is not None
        pair[at] = have + amount
        self._granted.setdefault((key, shard), [0, 0])[at] += amount

    # ------------------------------------------------------------ who gives

    def answer(self, shard: int) -> tuple[tuple[ScopeKey, ...], tuple[Give, ...]]:
        """What the shard cannot have now, and what it should give."""
        starved = tuple(
            key
            for key, wants in sorted(self._wants.items())
            if shard in wants and any(self._starves(key, shard, at) for at in range(DIMENSIONS))
        )
        keys = {key for key, wants in self._wants.items() if any(other != shard for other in wants)}
        gives = (self._give(key, shard) for key in sorted(keys | self._overgranted()))
        return starved, tuple(give for give in gives if give.bytes or give.blocks)

    def _starves(self, key: ScopeKey, shard: int, at: int) -> bool:
        """It wants more, and nothing is free nor known to be unused elsewhere."""
        if not self._need(key, shard, at) or self._free(key, at) is None:
            return False
        urgent = self._wants[key][shard].urgent
        return not any(self._spare(key, other, at, urgent) for other in self._fresh if other != shard)

    def _give(self, key: ScopeKey, shard: int) -> Give:
        amounts, evict = [0, 0], False
        if shard in self._fresh:
            for at in range(DIMENSIONS):
                amounts[at], evicts = self._share_of(key, shard, at)
                evict = evict or evicts
        return Give(*key, amounts[0], amounts[1], evict)

    def _share_of(self, key: ScopeKey, shard: int, at: int) -> tuple[int, bool]:
        """The shard's part of what is to be given up, and whether it may evict for it."""
        free = self._free(key, at)
        limit = limit_of(self._state, *key)[at]
        if free is None or limit is None:
            return 0, False
        fair = limit // max(1, len(self._users(key, at)))
        over = max(0, -free)
        urgent = future = poor = 0
        for other, want in self._wants.get(key, {}).items():
            need = self._need(key, other, at) if other != shard else 0
            if want.urgent:
                urgent += need
                poor += min(need, max(0, fair - (self.pairs(key)[other][at] or 0)))
            else:
                future += need
        spare = {one: self._spare(key, one, at, True) for one in self._fresh}
        asked = _part(over + urgent, spare[shard], sum(spare.values()))
        soft = {one: max(0, self._spare(key, one, at, False)) for one in self._fresh}
        asked = max(asked, _part(future, soft[shard], sum(soft.values())))
        rich = {one: max(0, (self.pairs(key)[one][at] or 0) - spare[one] - fair) for one in self._fresh}
        evicted = _part(over + poor - sum(spare.values()), rich[shard], sum(rich.values()))
        return asked + evicted, evicted > 0

    def _users(self, key: ScopeKey, at: int) -> set[int]:
        """Shards that use the scope or want it."""
        using = {shard for shard in self._fresh if self._used(key, shard, at)}
        return using | self._wants.get(key, {}).keys()

    def _used(self, key: ScopeKey, shard: int, at: int) -> int | None:
        """What the shard uses, as far as it told (None: it did not)."""
        if shard == self._state.shard:
            usage = find_usage(self._state, *key)
            assert usage is not None
            return self._memory.errander.used(usage)[at]
        report = self._fresh.get(shard)
        if report is None or not report.complete:
            return None
        row = report.used.get(key)
        return 0 if row is None else row.blocks if at else row.bytes + row.overdue_bytes

    def _spare(self, key: ScopeKey, shard: int, at: int, urgent: bool) -> int:
        """What the shard could give up without evicting: for urgent needs nearly all that it does not use,
        unless it is short itself; for the future of others what leaves it its own reserve."""
        have = self.pairs(key)[shard][at]
        used = self._used(key, shard, at)
        limit = limit_of(self._state, *key)[at]
        if have is None or used is None or limit is None:
            return 0
        want = self._wants.get(key, {}).get(shard)
        if want is not None and want.urgent:  # also what it was granted for it just now
            used = max(used, (want.bytes, want.blocks)[at])
        free = self._free(key, at)
        reserve = limit // (SPARE_PARTS * self._state.shards) if urgent else -(-have // 4)
        if free is not None and free < 0:
            reserve = 0
        return max(0, have - used - reserve)

    def _overgranted(self) -> set[ScopeKey]:
        """Limits below what was granted of them: they were lowered, or set where more was in use."""
        reports = self._memory.reports
        suspects = reports.overgranted if reports.overgranted is not None else set(self._state.held)
        found: set[ScopeKey] = set()
        unsure: set[ScopeKey] = set()
        for key in suspects:
            limit = limit_of(self._state, *key)
            for at in range(DIMENSIONS):
                if limit[at] is None:
                    continue
                free = self._free(key, at)
                if free is None:
                    unsure.add(key)
                elif free < 0:
                    found.add(key)
        reports.overgranted = found | unsure
        return found


def _part(amount: int, mine: int, everybodys: int) -> int:
    """My part of an amount that is shared in proportion (rounded up), at most what is mine."""
    if amount <= 0 or mine <= 0:
        return 0
    return min(mine, -(-amount * mine // everybodys))
