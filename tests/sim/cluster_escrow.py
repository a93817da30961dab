"""Budgets over shards, as the journals tell them: no amount is lost, none is in two hands, none is used that
was not granted.

Followed in the simplest way: what the catalogue says that each shard was granted, what each shard says that
it has, and what is on its way between the two. For limits that nobody changed since they were made these
must agree at every moment; for the others what is in use must stay within what was ever allowed (see `count`
of the witness), and nothing may be taken or given by anybody who cannot know of it.
"""

from collections.abc import Sequence
from typing import Any

from metaservice.core import events as ev
from metaservice.core.model import SwitchScope

from .rows import Violation

Key = tuple[SwitchScope, str]
Amounts = list[int | None]
"""[bytes, blocks]; None: no limit"""


class Scope:
    """A limit that spans shards."""

    def __init__(self, limit: Amounts, shards: int) -> None:
        self.limit = limit
        self.steady = True
        """Whether the limit is still the first one."""
        self.granted: list[Amounts] = [[None if each is None else 0 for each in limit] for _ in range(shards)]
        """By shard, as the catalogue says."""
        self.had: list[Amounts] = [[None if each is None else 0 for each in limit] for _ in range(shards)]
        """By shard, as its own journal says (of shard 0 both are the same)."""


class Escrow:
    """Follows grants and returns."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.scopes: dict[Key, Scope] = {}
        self.head = 0
        """The catalogue's seq."""
        self.versions = [0] * shards
        self.grants: list[tuple[int, ev.SliceGranted]] = []
        """(seq of the catalogue, grant), all there ever were"""
        self.returns: list[dict[int, ev.SliceReturned]] = [{} for _ in range(shards)]
        """By shard: durable returns that the catalogue has not taken"""
        self.returned = [0] * shards
        self.moves = 0

    def told(self, shard: int, events: Sequence[Any], last_seq: int) -> None:
        """A batch of a shard is durable."""
        if self.shards == 1:
            return
        if shard == 0:
            self.head = last_seq
        touched: set[Key] = set()
        first_seq = last_seq - len(events) + 1
        for row, event in enumerate(events):
            if isinstance(event, ev.TenantPut):
                self._put(shard, (SwitchScope.tenant, event.tenant), [event.quota.bytes, event.quota.blocks])
            elif isinstance(event, ev.GroupPut):
                self._put(shard, (SwitchScope.group, event.group), [event.quota.bytes, event.quota.blocks])
            elif isinstance(event, ev.StoragePut):
                self._put(shard, (SwitchScope.storage, event.storage), [event.capacity_bytes, None])
            elif isinstance(event, ev.SliceGranted):
                touched.add((event.scope, event.id))
                self._granted(shard, event, first_seq + row)
            elif isinstance(event, ev.SliceReturned):
                touched.add((event.scope, event.id))
                self._returned(shard, event)
            elif isinstance(event, ev.ReturnTaken) and shard == 0:
                touched.add((event.scope, event.id))
                self._taken(event)
            elif isinstance(event, ev.SliceSet):
                touched.add((event.scope, event.id))
                self.scopes[event.scope, event.id].had[shard] = [event.bytes, event.blocks]
            elif isinstance(event, ev.CatalogueTaken):
                if event.version > self.head:
                    raise Violation(
                        f"escrow: shard {shard} takes the catalogue up to {event.version}, which ends at "
                        f"{self.head}"
                    )
                self.versions[shard] = event.version
        for key in touched:
            self.moves += 1
            self._check(key)

    def _put(self, shard: int, key: Key, limit: Amounts) -> None:
        """A limit is made or changed: in the catalogue first, in the shards when their copy comes."""
        scope = self.scopes.get(key)
        if scope is None:
            self.scopes[key] = Scope(limit, self.shards)
        elif scope.limit != limit:
            if shard == 0:
                scope.limit = limit
            scope.steady = False

    def _granted(self, shard: int, event: ev.SliceGranted, seq: int) -> None:
        scope = self.scopes[event.scope, event.id]
        if shard == 0:
            self.grants.append((seq, event))
            _add(scope.granted[event.shard], event, 1)
            if event.shard == 0:
                _add(scope.had[0], event, 1)
            return
        if event.shard != shard or not any(event.grant == known.grant for _, known in self.grants):
            raise Violation(f"escrow: shard {shard} takes {event}, which nobody granted it")
        _add(scope.had[shard], event, 1)

    def _returned(self, shard: int, event: ev.SliceReturned) -> None:
        scope = self.scopes[event.scope, event.id]
        rows = [scope.had[shard]] if shard else [scope.had[0], scope.granted[0]]
        for row in rows:
            _take(row, event)
            if any(amount is not None and amount < 0 for amount in row):
                raise Violation(f"escrow: shard {shard} gives up more than it has: {event}")
        if shard:
            self.returned[shard] += 1
            if event.number != self.returned[shard]:
                raise Violation(f"escrow: {event} of shard {shard} is its return {self.returned[shard]}")
            self.returns[shard][event.number] = event

    def _taken(self, event: ev.ReturnTaken) -> None:
        if self.returns[event.shard].pop(event.number, None) is None:
            raise Violation(f"escrow: the catalogue takes {event}, which its shard has not given up")
        scope = self.scopes.get((event.scope, event.id))
        if scope is not None:
            _take(scope.granted[event.shard], event)

    def _check(self, key: Key) -> None:
        scope = self.scopes[key]
        if not scope.steady:
            return
        for at, limit in enumerate(scope.limit):
            if limit is None:
                continue
            granted = sum(row[at] or 0 for row in scope.granted)
            if granted > limit:
                raise Violation(f"escrow: {granted} of {limit} are granted of {key}: {scope.granted}")
            for shard in range(1, self.shards):
                known = scope.granted[shard][at] or 0
                had, coming, going = self.whereabouts(key, shard, at)
                if known != had + coming + going:
                    raise Violation(
                        f"escrow: shard {shard} was granted {known} of {key}, and has {had}, {coming} "
                        f"coming, {going} going back"
                    )

    def whereabouts(self, key: Key, shard: int, at: int) -> tuple[int, int, int]:
        """(what a shard has of a limit, what is on its way to it, what is on its way back)."""
        version = self.versions[shard]
        coming = sum(
            (event.bytes, event.blocks)[at]
            for seq, event in self.grants
            if seq > version and event.shard == shard and (event.scope, event.id) == key
        )
        going = sum(
            (event.bytes, event.blocks)[at] or 0
            for event in self.returns[shard].values()
            if (event.scope, event.id) == key
        )
        return self.scopes[key].had[shard][at] or 0, coming, going

    def under_way(self) -> str:
        """What is on its way between a shard and the catalogue, in a sentence; "" for nothing."""
        for shard in range(1, self.shards):
            if self.returns[shard]:
                return f"the catalogue has not taken {list(self.returns[shard].values())} of shard {shard}"
            missing = [
                grant for seq, grant in self.grants if seq > self.versions[shard] and grant.shard == shard
            ]
            if missing:
                return f"shard {shard} has not taken {missing}"
        return ""


def _add(row: Amounts, event: ev.SliceGranted, sign: int) -> None:
    for at, amount in enumerate((event.bytes, event.blocks)):
        have = row[at]
        if have is not None:
            row[at] = have + sign * amount


def _take(row: Amounts, event: ev.SliceReturned | ev.ReturnTaken) -> None:
    for at, amount in enumerate((event.bytes, event.blocks)):
        have = row[at]
        if amount is not None and event.kept:
            row[at] = amount
        elif amount is not None and have is not None:
            row[at] = have - amount
