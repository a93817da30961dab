"""What the other shards told the catalogue's leader: use, wishes, how much of the catalogue they know. Leader
memory: after a take-over every shard tells all of it again."""

from .escrow import find_usage
from .model import Limits
from .replies import Errands, Used, Want
from .state import ScopeKey, State

ROUNDS = 4
"""A report that is so many rounds of errands old says nothing about what the shard could give now."""


class Report:
    """The last word of one shard. `complete`: `used` has every row that is not zero."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.number = 0
        self.version = 0
        self.at_ms = 0
        self.complete = False
        self.used: dict[ScopeKey, Used] = {}
        self.wants: dict[ScopeKey, Want] = {}


class Reports:
    """All shards' reports."""

    def __init__(self, state: State, limits: Limits) -> None:
        self._state = state
        self._limits = limits
        self._by_shard: dict[int, Report] = {}
        self.totals: dict[ScopeKey, list[int]] = {}
        """Use in the other shards together: bytes, blocks, deleting bytes, deleting blocks, overdue bytes."""
        self.overgranted: set[ScopeKey] | None = None
        """Limits that may be below what was granted of them. None: not looked yet."""

    def take(self, errands: Errands, now_ms: int) -> None:
        """Take in what a shard says of itself, unless something newer of it is known."""
        report = self._by_shard.get(errands.shard)
        if report is None or errands.epoch > report.epoch:
            self._drop_rows(report)
            report = self._by_shard[errands.shard] = Report(errands.epoch)
        if (errands.epoch, errands.number) <= (report.epoch, report.number):
            return
        report.number, report.at_ms = errands.number, now_ms
        report.version = max(report.version, errands.version)
        report.wants = {(want.scope, want.id): want for want in errands.wants}
        if not errands.base:
            self._drop_rows(report)
            report.used, report.complete = {}, True
        elif errands.base != self._state.epoch or not report.complete:
            return  # rows that build on what another leader was told
        for row in errands.used:
            key = (row.scope, row.id)
            if find_usage(self._state, *key) is None:
                continue  # it went meanwhile
            self._add(report.used.get(key), -1)
            report.used[key] = row
            self._add(row, 1)

    def forget(self, key: ScopeKey) -> None:
        """The scope is gone."""
        self.totals.pop(key, None)
        for report in self._by_shard.values():
            report.used.pop(key, None)
            report.wants.pop(key, None)
        if self.overgranted is not None:
            self.overgranted.discard(key)

    def limit_changed(self, key: ScopeKey) -> None:
        """The limit, or what was granted of it, is another one in a way that may not fit any more."""
        if self.overgranted is not None:
            self.overgranted.add(key)

    def of(self, shard: int) -> Report | None:
        """The shard's report, however old."""
        return self._by_shard.get(shard)

    def fresh(self, shard: int, now_ms: int) -> Report | None:
        """The shard's report, when the shard was heard of lately."""
        report = self._by_shard.get(shard)
        if report is None or now_ms - report.at_ms >= ROUNDS * self._limits.errand_ms:
            return None
        return report

    def _drop_rows(self, report: Report | None) -> None:
        if report is not None:
            for row in report.used.values():
                self._add(row, -1)

    def _add(self, row: Used | None, sign: int) -> None:
        if row is None:
            return
        totals = self.totals.setdefault((row.scope, row.id), [0] * 5)
        numbers = (row.bytes, row.blocks, row.deleting_bytes, row.deleting_blocks, row.overdue_bytes)
        for at, number in enumerate(numbers):
            totals[at] += sign * number
