"""The naive model's reads: lookups with their leases, and what becomes of leases."""

from array import array
from collections.abc import Callable

from metaservice.core.commands import Heartbeat, Lookup, ReleaseLeases, RenewLeases, Unknown
from metaservice.core.model import GroupKind, SwitchMode, SwitchScope
from metaservice.core.outcomes import LeaseOutcome
from metaservice.core.replies import Beat, LeasesAnswered, Located, Looked, Switched, UnknownPlaces

from .facts import Facts
from .rows import Copy, InstanceRow, Lease, Refuse, Violation

Seen = tuple[Copy | None, str]
"""The visible copy of one asked row, or why there is none: `miss` or `switch`."""


class Reads(Facts):
    """Predicts every reply to a read exactly."""

    # ------------------------------------------------------------ lookup

    def on_lookup(self, command: Lookup, now_ms: int, reply: object) -> None:
        """Which blocks are readable, and a lease over exactly them."""
        row = self.instance(command.instance)
        if command.engine:
            self.member("engine", command.engine, command.incarnation)
        self.batch(row, command.keys)
        if command.parent is not None and len(command.parent) != row.fingerprint.key_length:
            raise Refuse("key_length")
        if command.lease_ms and not (
            self.limits.lease_ms_min <= command.lease_ms <= self.limits.lease_ms_max
        ):
            raise Refuse("ttl_out_of_range")
        group = self.group(row, command.group, command.mode)
        if command.mode == "state" and row.first(GroupKind.state) is None:
            raise Refuse("mode_not_applicable")
        assert isinstance(reply, Looked), reply
        asked = (f"{command.engine}/{command.incarnation}", command.request_id)
        if command.request_id and asked in self.memory.asked:
            first = self.memory.asked[asked]
            lease = self.memory.leases.get(first.lease)
            if lease is not None and lease.state == "held" and not lease.lost:
                self.same_lease(first, reply)
                self.renew_lease(first.lease, now_ms + command.lease_ms, now_ms, None)
                return
        mode, scopes = self.strictest(command.instance)
        want = self.found(command, row, group)
        if mode == SwitchMode.bypass:
            count = len(command.keys)
            want = Looked(command.mode, count, 0, 0, "switch", 0, group)
            want.hit = bytes(count) if command.mode == "each" else b""
        self.compare_looked(command, want, reply)
        if mode != SwitchMode.bypass and reply.cut == "switch":
            mode, scopes = SwitchMode.bypass, self.bypassed_storages()
        if mode != SwitchMode.normal:
            self.check_switch(reply.switch, mode, scopes)
        else:
            self.agree("switch", None, reply.switch)
        named = self.named(reply)
        self.touch([self.state.copies[location] for location in named], now_ms)
        if command.lease_ms and named:
            self.new_lease(command, reply, named, now_ms)
        else:
            self.agree("lease", (None, 0), (reply.lease, reply.lease_ms))

    def new_lease(self, command: Lookup, reply: Looked, named: list[int], now_ms: int) -> None:
        """The lease holds exactly the blocks returned."""
        if reply.lease is None or reply.lease in self.memory.leases:
            raise Violation(f"lease {reply.lease!r} is not a new one")
        self.agree("lease_ms", command.lease_ms, reply.lease_ms)
        until = now_ms + command.lease_ms
        rows = {location: (self.state.copies[location].generation, until) for location in named}
        self.memory.leases[reply.lease] = Lease(rows)
        if command.request_id:
            self.memory.asked[(f"{command.engine}/{command.incarnation}", command.request_id)] = reply

    def same_lease(self, first: Looked, reply: Looked) -> None:
        """A repeat names the same lease and the same blocks, and counts from now on."""
        self.agree("repeated lease", first.lease, reply.lease)
        self.agree("repeated blocks", self.named(first), self.named(reply))
        self.agree(
            "repeated hits", (first.hits, first.start, first.hit), (reply.hits, reply.start, reply.hit)
        )

    def found(self, command: Lookup, row: InstanceRow, group: str) -> Looked:
        """What the lookup finds when no switch on the path hides it."""
        search: Callable[[Lookup, list[Seen], InstanceRow], tuple[list[Copy], int, str, int]] = {
            "prefix": self.prefix,
            "window": self.window,
            "each": self.each,
            "state": self.with_state,
        }[command.mode]
        seen = self.seen(command, group)
        copies, start, cut, cut_at = search(command, seen, row)
        looked = Looked(command.mode, len(command.keys), len(copies), start, cut, cut_at, group)
        if command.mode == "each":
            ones = {copy.key for copy in copies}
            left = len(copies)
            hit = bytearray()
            for key in command.keys:
                hit.append(1 if key in ones and left > 0 else 0)
                left -= hit[-1]
            looked.hit = bytes(hit)
        if copies:
            looked.located = self.located(copies)
            if command.mode == "state":
                tail = self.state_copy(command, row, len(copies) - 1)
                assert tail is not None
                looked.state = self.located([tail])
                looked.state_group = tail.group
        return looked

    def seen(self, command: Lookup, group: str) -> list[Seen]:
        """Per asked row its readable copy, or why there is none."""
        live = self.live()
        rows: list[Seen] = []
        before = command.parent
        for key in command.keys:
            copy = live.get((command.instance, group, key))
            chained = command.mode == "each" or (copy is not None and copy.parent == before)
            if copy is None or not self.visible(copy) or not chained:
                rows.append((None, "miss"))
            elif self.hidden(copy):
                rows.append((None, "switch"))
            else:
                rows.append((copy, ""))
            before = key
        return rows

    @staticmethod
    def run(seen: list[Seen]) -> list[Copy]:
        """The readable run from the first row on."""
        copies = []
        for copy, _ in seen:
            if copy is None:
                break
            copies.append(copy)
        return copies

    def prefix(self, command: Lookup, seen: list[Seen], row: InstanceRow) -> tuple[list[Copy], int, str, int]:
        """From row 0 to the first row that is not readable."""
        run = self.run(seen)
        if command.limit is not None and command.limit < len(run):
            return run[: command.limit], 0, "limit", command.limit
        return run, 0, "none" if len(run) == len(seen) else seen[len(run)][1], len(run)

    def window(self, command: Lookup, seen: list[Seen], row: InstanceRow) -> tuple[list[Copy], int, str, int]:
        """The right-most run of w rows, else all of a sequence shorter than that."""
        attention = row.attention(self.group(row, command.group, "window"))
        wide = command.window_blocks or (attention.window_blocks if attention else 0)
        if not wide:
            raise Refuse("mode_not_applicable", "invalid_field")
        best: tuple[int, list[Copy]] = (0, [])
        for start in range(len(seen) - wide, -1, -1):
            run = self.run(seen[start : start + wide])
            if len(run) == wide:
                best = (start, run)
                break
        else:
            best = (0, self.run(seen[:wide]))
        start, run = best
        if not run:
            return [], 0, seen[0][1], 0
        if command.limit is not None and command.limit < len(run):
            return [], 0, "limit", 0
        end = start + len(run)
        return run, start, "none" if end == len(seen) else seen[end][1], end

    def with_state(
        self, command: Lookup, seen: list[Seen], row: InstanceRow
    ) -> tuple[list[Copy], int, str, int]:
        """The longest prefix that has a state block at its end."""
        run, _, cut, _ = self.prefix(command, seen, row)
        hits = len(run)
        while hits and self.state_copy(command, row, hits - 1) is None:
            hits -= 1
        if hits == len(run):
            return run, 0, cut, hits
        return run[:hits], 0, "miss", hits

    def state_copy(self, command: Lookup, row: InstanceRow, at: int) -> Copy | None:
        """The readable state block of one asked row."""
        group = row.first(GroupKind.state)
        assert group is not None
        return self.seen(command, group)[at][0]

    def each(self, command: Lookup, seen: list[Seen], row: InstanceRow) -> tuple[list[Copy], int, str, int]:
        """Every readable row, whatever stands between."""
        copies: list[Copy] = []
        cut, cut_at = "none", len(seen)
        for at, (copy, why) in enumerate(seen):
            full = command.limit is not None and len(copies) >= command.limit
            if copy is not None and not full:
                copies.append(copy)
            elif cut == "none":
                cut, cut_at = why or "limit", at
        return copies, 0, cut, cut_at

    def located(self, copies: list[Copy]) -> Located:
        """The columns of the copies' places; storage numbers are filled in by `compare_looked`."""
        located = Located(array("Q"), array("I"), array("H"), b"")
        for copy in copies:
            located.locations.append(copy.location)
            located.generations.append(copy.generation)
            for checksum in copy.parts:
                assert checksum is not None
                located.checksums += checksum.to_bytes(8, "little")
        return located

    def compare_looked(self, command: Lookup, want: Looked, got: Looked) -> None:
        """Everything but the lease and the switch."""
        names = ("mode", "asked", "hits", "start", "cut", "cut_at", "group", "hit", "state_group")
        for name in names:
            if name == "state_group" and not want.hits:
                continue
            if name == "cut" and not want.hits and {want.cut, got.cut} <= {"miss", "switch"}:
                continue  # which of several reasons is named then is left open
            self.agree(name, getattr(want, name), getattr(got, name))
        for one, other in ((want.located, got.located), (want.state, got.state)):
            if one is None:
                self.agree("located", 0, len(other.locations) if other else 0)
                continue
            if other is None:
                raise Violation("blocks without places")
            self.agree("locations", list(one.locations), list(other.locations))
            self.agree("generations", list(one.generations), list(other.generations))
            self.agree("checksums", one.checksums, bytes(other.checksums))
            self.agree("storages", len(one.locations), len(other.storages))

    @staticmethod
    def named(reply: Looked) -> list[int]:
        """The locations that a reply names."""
        located = list(reply.located.locations) if reply.located else []
        return located + (list(reply.state.locations) if reply.state else [])

    def check_switch(
        self, got: Switched | None, mode: SwitchMode, scopes: list[tuple[SwitchScope, str]]
    ) -> None:
        """The reply names the strictest switch on the path."""
        if got is None or got.mode != mode or (got.scope, got.id) not in scopes:
            raise Violation(f"switch {got} is not the strictest: {mode.name} at {scopes}")

    @staticmethod
    def agree(what: str, want: object, got: object) -> None:
        """The machine gave what the rules give."""
        if want != got:
            raise Violation(f"{what}: the rules give {want!r}, the machine {got!r}")

    # ------------------------------------------------------------ leases, heartbeats, places

    def on_renew_leases(self, command: RenewLeases, now_ms: int, reply: object) -> None:
        """A renewal never shortens a lease, nor brings one back."""
        ttl_ms = command.ttl_ms or self.limits.lease_ms_max // 2
        if not self.limits.lease_ms_min <= ttl_ms <= self.limits.lease_ms_max:
            raise Refuse("ttl_out_of_range")
        if not command.leases:
            raise Refuse("empty_batch")
        if command.locations is not None and len(command.leases) > 1:
            raise Refuse("invalid_field")
        assert isinstance(reply, LeasesAnswered), reply
        self.end_leases(now_ms)
        outcomes = bytearray()
        only = None if command.locations is None else set(command.locations)
        for name in command.leases:
            lease = self.memory.leases.get(name)
            if lease is not None and lease.state == "held":
                self.renew_lease(name, now_ms + ttl_ms, now_ms, only)
                outcomes.append(LeaseOutcome.renewed)
            else:
                outcomes.append(self.ended_outcome(lease))
        self.agree("outcomes", list(outcomes), list(reply.outcomes))
        self.agree("changed", [self.changed(name, now_ms) for name in command.leases], list(reply.changed))

    def renew_lease(self, name: str, until_ms: int, now_ms: int, only: set[int] | None) -> None:
        """Prolong what is still held of a lease, or of some of its blocks."""
        lease = self.memory.leases[name]
        rows = {
            location: (generation, max(deadline, until_ms))
            if deadline > now_ms and (only is None or location in only)
            else (generation, deadline)
            for location, (generation, deadline) in lease.rows.items()
        }
        self.memory.leases[name] = lease._replace(rows=rows)

    def on_release_leases(self, command: ReleaseLeases, now_ms: int, reply: object) -> None:
        """Releasing is idempotent and touches no other lease."""
        assert isinstance(reply, LeasesAnswered), reply
        self.end_leases(now_ms)
        outcomes = bytearray()
        for name in command.leases:
            lease = self.memory.leases.get(name)
            if lease is not None and lease.state == "held":
                self.memory.leases[name] = lease._replace(state="released")
                outcomes.append(LeaseOutcome.released)
            else:
                outcomes.append(self.ended_outcome(lease))
        self.agree("outcomes", list(outcomes), list(reply.outcomes))
        self.agree("changed", [self.changed(name, now_ms) for name in command.leases], list(reply.changed))

    @staticmethod
    def ended_outcome(lease: Lease | None) -> LeaseOutcome:
        """What is said of a lease that does not hold."""
        if lease is None:
            return LeaseOutcome.unknown
        return LeaseOutcome.released if lease.state == "released" else LeaseOutcome.expired

    def changed(self, name: str, now_ms: int) -> int:
        """Blocks of an expired lease that are no longer what was leased, of others what went with its
        pool."""
        lease = self.memory.leases.get(name)
        if lease is None or lease.state != "expired":
            return 0 if lease is None else len(lease.lost)
        copies = self.state.copies
        return sum(
            location not in copies or copies[location].generation != generation
            for location, (generation, _) in lease.rows.items()
        )

    def on_heartbeat(self, command: Heartbeat, now_ms: int, reply: object) -> None:
        """Silence is the only thing that is never answered."""
        self.member(command.kind, command.id, command.incarnation)
        assert isinstance(reply, Beat), reply
        instance = self.state.engines[command.id].of[0] if command.kind == "engine" else ""
        mode: SwitchMode = SwitchMode.normal
        scopes: list[tuple[SwitchScope, str]] = []
        if instance in self.state.instances:
            mode, scopes = self.strictest(instance)
        if mode != SwitchMode.normal:
            self.check_switch(reply.switch, mode, scopes)
        else:
            self.agree("switch", None, reply.switch)
        self.memory.seen_ms[(command.kind, command.id)] = now_ms

    def on_unknown(self, command: Unknown, now_ms: int, reply: object) -> None:
        """Which of these places no block has, in any state."""
        self.member("worker", command.worker, command.incarnation)
        if command.storage not in self.state.storages:
            raise Refuse("storage_unknown")
        assert isinstance(reply, UnknownPlaces), reply
        want = []
        for location, generation in zip(command.locations, command.generations, strict=True):
            copy = self.state.copies.get(location)
            known = copy is not None and (copy.generation, copy.storage) == (generation, command.storage)
            want.append(0 if known else 1)
        self.agree("unknown", want, list(reply.unknown))
