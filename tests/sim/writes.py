"""The naive model's writes: start, finish, renew, abort, remove."""

from msgspec.structs import replace

from metaservice.core.commands import Abort, Finish, RenewWrite, StartWrite
from metaservice.core.model import LocationState, SessionState, SwitchMode, SwitchScope
from metaservice.core.outcomes import FinishStatus, RefusedReason, WriteOutcome
from metaservice.core.replies import Aborted, Finished, Renewed, Started

from .choices import Choices
from .facts import Block
from .rows import FREED, PENDING, REMOVED, SERVING, Copy, InstanceRow, Refuse, SessionRow, Violation

Answer = tuple[WriteOutcome, RefusedReason, int]
"""outcome, reason, wait_ms"""

STATUS = {
    SERVING: FinishStatus.serving,
    PENDING: FinishStatus.pending,
    FREED: FinishStatus.freed,
    REMOVED: FinishStatus.removed,
}
QUOTA = {
    SwitchScope.tenant: RefusedReason.quota_tenant,
    SwitchScope.group: RefusedReason.quota_group,
    SwitchScope.instance: RefusedReason.quota_instance,
}


class Writes(Choices):
    """Predicts who may write what; slots, session numbers and victims are the machine's choice."""

    # ------------------------------------------------------------ start

    def on_start_write(self, command: StartWrite, now_ms: int, reply: object) -> None:
        """One answer a requested key."""
        self.member("engine", command.engine, command.incarnation)
        remembered = (f"{command.engine}/{command.incarnation}", command.request_id)
        first = self.state.answers.get(remembered) or self.memory.answers.get(remembered)
        if command.request_id and first is not None:
            pools = {number: pool if self.has_pool(pool) else "" for number, pool in first.pools.items()}
            self.agree("first answer", replace(first, pools=pools), reply)
            return
        row = self.instance(command.instance)
        group = self.group(row, command.group)
        self.batch(row, command.keys)
        parents = self.parents(command)
        if any(parent is not None and len(parent) != row.fingerprint.key_length for parent in parents):
            raise Refuse("key_length", "invalid_key")
        ttl_ms = command.ttl_ms or self.limits.write_ttl_ms_default
        if not self.limits.write_ttl_ms_min <= ttl_ms <= self.limits.write_ttl_ms_max:
            raise Refuse("ttl_out_of_range")
        sizes = tuple(part.bytes for part in row.parts(group))
        if command.sizes is not None and command.sizes != sizes:
            raise Refuse("size_mismatch")
        self.check_tokens(command, row)
        wanted: dict[bytes, bytes | None] = {}
        for key, parent in zip(command.keys, parents, strict=True):
            if wanted.setdefault(key, parent) != parent:
                raise Refuse("duplicate_conflict")
        self.refuse_cycles(command.instance, group, wanted)
        assert isinstance(reply, Started), reply
        mode, scopes = self.strictest(command.instance)
        if mode != SwitchMode.normal:
            self.check_switch(reply.switch, mode, scopes)
            answers: dict[bytes, Answer] = dict.fromkeys(
                wanted, (WriteOutcome.refused, RefusedReason.switch, 0)
            )
            self.take(command, group, answers, wanted, ttl_ms, now_ms, reply)
            self.memory.answers[remembered] = reply
            return
        self.agree("switch", None, reply.switch)
        answers = self.answers(command.instance, group, wanted, now_ms)
        self.admit(command, row, group, wanted, answers, now_ms)
        self.take(command, group, answers, wanted, ttl_ms, now_ms, reply)
        (self.state.answers if reply.session is not None else self.memory.answers)[remembered] = reply

    @staticmethod
    def check_tokens(command: StartWrite, row: InstanceRow) -> None:
        """A row a key: nothing, or the packed ids of a whole block."""
        if command.tokens is None:
            return
        if len(command.tokens) != len(command.keys):
            raise Refuse("column_length")
        count = row.fingerprint.block_size_tokens
        for packed in filter(None, command.tokens):
            if packed[0] not in (1, 2, 3, 4) or len(packed) != 1 + packed[0] * count:
                raise Refuse("invalid_field")

    @staticmethod
    def parents(command: StartWrite) -> list[bytes | None]:
        """The parent of each requested row."""
        if command.parents is None:
            return [command.parent, *command.keys[:-1]]
        if len(command.parents) != len(command.keys):
            raise Refuse("column_length")
        return command.parents

    def refuse_cycles(self, instance: str, group: str, wanted: dict[bytes, bytes | None]) -> None:
        """No block may be its own ancestor, by this request or by it and those before.

        Across requests only where parents bind: in the primary group. What a block is recorded with is true
        there, whatever a request says of it.
        """
        known: dict[bytes, bytes | None] = {}
        if group == self.state.instances[instance].primary:
            known = {
                c.key: c.parent
                for c in self.state.copies.values()
                if c.live and (c.instance, c.group) == (instance, group)
            }
        for edges, starts in ((wanted, set(wanted)), (wanted | known, wanted.keys() - known.keys())):
            for key in starts:
                at, steps = edges[key], 0
                while at is not None and steps <= len(edges):
                    if at == key:
                        raise Refuse("parent_cycle")
                    at, steps = edges.get(at), steps + 1

    def answers(
        self, instance: str, group: str, wanted: dict[bytes, bytes | None], now_ms: int
    ) -> dict[bytes, Answer]:
        """What is said of each distinct key before anybody asks whether there is room."""
        live = self.live()
        answers: dict[bytes, Answer] = {}
        for key, parent in wanted.items():
            copy = live.get((instance, group, key))
            if copy is None:
                answers[key] = (WriteOutcome.write, RefusedReason.none, 0)
            elif copy.parent != parent:
                answers[key] = (WriteOutcome.refused, RefusedReason.parent_mismatch, 0)
            elif copy.state == LocationState.serving:
                answers[key] = (WriteOutcome.present, RefusedReason.none, 0)
            else:
                wait_ms = max(0, self.state.sessions[copy.session].deadline_ms - now_ms)
                answers[key] = (WriteOutcome.in_progress, RefusedReason.none, wait_ms)
        return answers

    def admit(
        self,
        command: StartWrite,
        row: InstanceRow,
        group: str,
        wanted: dict[bytes, bytes | None],
        answers: dict[bytes, Answer],
        now_ms: int,
    ) -> None:
        """Refuse the new rows that do not fit, once what may be evicted for them is gone."""
        new = [key for key, (outcome, _, _) in answers.items() if outcome == WriteOutcome.write]
        if not new:
            return
        size_bytes = row.block_bytes(group)
        usable = self.usable(row)
        if not usable:
            self.refuse(answers, new, RefusedReason.no_storage)
            return
        evicting = self.evicts(row.group)
        keep = self.protected(command.instance, group, wanted)
        left, reason = len(new), RefusedReason.none
        for scope in self.path(command.instance):
            while evicting and self.fits(scope, size_bytes) < left and self.evict_one(scope, keep, now_ms):
                pass
            if self.fits(scope, size_bytes) < left:
                left, reason = self.fits(scope, size_bytes), QUOTA[scope[0]]
        for name in usable:
            while evicting and self.storage_room(usable, size_bytes) < left:
                if not self.evict_one((SwitchScope.storage, name), keep, now_ms):
                    break
        if self.storage_room(usable, size_bytes) < left:
            stuck = any(self.state.copies[at].storage in usable for at in self.memory.stuck)
            left = self.storage_room(usable, size_bytes)
            reason = RefusedReason.deletion_backlog if stuck else RefusedReason.storage_full
        self.refuse(answers, new[left:], reason)

    @staticmethod
    def refuse(answers: dict[bytes, Answer], keys: list[bytes], reason: RefusedReason) -> None:
        """Refuse these keys."""
        for key in keys:
            answers[key] = (WriteOutcome.refused, reason, 0)

    def protected(self, instance: str, group: str, wanted: dict[bytes, bytes | None]) -> set[Block]:
        """The blocks that a request names, and those that they need."""
        live = self.live()
        primary = self.state.instances[instance].primary
        named: list[Block] = [(instance, group, key) for key in wanted]
        named += [(instance, group, parent) for parent in wanted.values() if parent is not None]
        if group != primary:
            named += [(instance, primary, key) for key in wanted]
        keep: set[Block] = set()
        for block in named:
            at: Block | None = block
            while at is not None and at not in keep:
                keep.add(at)
                copy = live.get(at)
                at = None if copy is None else self.needs(copy)
        return keep

    def take(
        self,
        command: StartWrite,
        group: str,
        answers: dict[bytes, Answer],
        wanted: dict[bytes, bytes | None],
        ttl_ms: int,
        now_ms: int,
        reply: Started,
    ) -> None:
        """Compare the reply and write down what was started."""
        keys = command.keys
        self.agree("group", group, reply.group)
        self.agree("evicted", self.evicted, reply.evicted)
        self.agree("outcomes", [answers[key][0] for key in keys], [WriteOutcome(o) for o in reply.outcomes])
        self.agree("reasons", [answers[key][1] for key in keys], [RefusedReason(r) for r in reply.reasons])
        waits = list(reply.wait_ms) or [0] * len(keys)
        self.agree("wait_ms", [answers[key][2] for key in keys], waits)
        written = {key for key, (outcome, _, _) in answers.items() if outcome == WriteOutcome.write}
        places: dict[bytes, tuple[int, int]] = {}
        for at, key in enumerate(keys):
            place = (reply.locations[at], reply.generations[at])
            if key not in written:
                self.agree("place of a row that is not written", (0, 0), place)
            elif places.setdefault(key, place) != place:
                raise Violation(f"one key, two places: {place} and {places[key]}")
        if not written:
            self.agree("session", None, reply.session)
            return
        number = reply.session
        if number is None or number in self.state.sessions:
            raise Violation(f"session {number!r} is not a new one")
        self.agree("ttl_ms", ttl_ms, reply.ttl_ms)
        row = self.state.instances[command.instance]
        tokens: dict[bytes, bytes] = {}
        if command.tokens is not None and row.publication is not None:  # else they would be kept for nobody
            tokens = dict(zip(reversed(keys), reversed(command.tokens), strict=True))
        rows: dict[int, tuple[int, str]] = {}
        pools: dict[int, str] = {}
        for key in (key for key in wanted if key in written):
            location, generation = places[key]
            self.check_new_place(location, generation)
            storage = self.chosen_storage(row, group, reply.storages[keys.index(key)])
            if self.volatile(storage):
                pools[reply.storages[keys.index(key)]] = self.state.pools[storage][1]
            self.state.copies[location] = Copy(
                command.instance, group, key, wanted[key], storage, location, generation,
                LocationState.writing, number, row.block_bytes(group), (None,) * len(row.parts(group)),
                tokens=tokens.get(key, b""), lora=command.lora, salt=command.salt,
            )  # fmt: skip
            self.state.generations[location] = generation
            rows[location] = (generation, PENDING)
        self.agree("pools", pools, reply.pools)
        self.state.sessions[number] = SessionRow(
            command.instance, group, command.engine, command.incarnation, ttl_ms, now_ms + ttl_ms,
            SessionState.open, rows,
        )  # fmt: skip

    def has_pool(self, incarnation: str) -> bool:
        """Whether that incarnation's pool is there."""
        return any(current == incarnation for _, current in self.state.pools.values())

    def check_new_place(self, location: int, generation: int) -> None:
        """A place is never given out twice."""
        if location in self.state.copies:
            raise Violation(f"location {location} is given out while {self.state.copies[location]} has it")
        self.agree("generation", self.state.generations.get(location, 0) + 1, generation)

    # ------------------------------------------------------------ finish, renew, abort

    def session(self, number: int, engine: str, incarnation: str) -> SessionRow:
        """A session that the caller may speak of."""
        session = self.state.sessions.get(number)
        if session is None:
            raise Refuse("session_unknown")
        if session.engine != engine:
            raise Refuse("foreign_session")
        if session.incarnation != incarnation:
            raise Refuse("reregister")
        return session

    def on_finish(self, command: Finish, now_ms: int, reply: object) -> None:
        """What became of each named location."""
        session = self.session(command.session, command.engine, command.incarnation)
        remembered = (f"{command.engine}/{command.incarnation}", command.request_id)
        if command.request_id and remembered in self.state.answers:
            self.agree("first answer", self.state.answers[remembered], reply)
            return
        if session.state == SessionState.expired:
            raise Refuse("session_expired")
        if session.state == SessionState.aborted:
            raise Refuse("session_aborted")
        count = len(command.locations)
        if not count:
            raise Refuse("empty_batch")
        if len(command.generations) != count:
            raise Refuse("column_length")
        if session.state == SessionState.finished:
            self.refuse_foreign(command, session)
            assert isinstance(reply, Finished), reply
            ended = [STATUS[session.rows[location][1]] for location in command.locations]
            self.agree("status", (ended, 0, 0), (list(reply.status), reply.published, reply.open))
            return
        every = self.state.instances[session.instance].parts(session.group)
        names = [part.name for part in every]
        parts = list(command.parts) if command.parts is not None else names
        if not parts or len(set(parts)) != len(parts) or not set(parts) <= set(names):
            raise Refuse("unknown_part", "invalid_field", "empty_batch")
        self.check_columns(command, count * len(parts))
        if command.sizes is not None:
            sizes = {part.name: part.bytes for part in every}
            if command.sizes != tuple(sizes[part] for part in parts):
                raise Refuse("size_mismatch")
        self.refuse_foreign(command, session)
        assert isinstance(reply, Finished), reply
        rows = dict(session.rows)
        published = 0
        touched = []
        for at, location in enumerate(command.locations):
            generation, status = rows[location]
            if status != PENDING:
                continue
            copy = self.state.copies[location]
            got = list(copy.parts)
            failed = False
            for column, part in enumerate(parts):
                cell = at * len(parts) + column
                ok = command.ok is None or command.ok[cell]
                if got[names.index(part)] is not None:
                    continue
                if ok:
                    assert command.checksums is not None
                    got[names.index(part)] = command.checksums[cell]
                else:
                    failed = True
            copy = copy._replace(parts=tuple(got))
            if failed:
                rows[location] = (generation, FREED)
                self.free(copy, now_ms + self.limits.late_write_ms)
            elif None not in got:
                rows[location] = (generation, SERVING)
                published += 1
                copy = copy._replace(state=LocationState.serving, session=0, seq=self.seq)
                self.state.copies[location] = copy
                touched.append(copy)
            else:
                self.state.copies[location] = copy
        self.touch(touched, now_ms)
        session = session._replace(rows=rows)
        if not session.open:
            session = session._replace(state=SessionState.finished)
        self.state.sessions[command.session] = session
        status_codes = [STATUS[rows[location][1]] for location in command.locations]
        self.agree("status", status_codes, [FinishStatus(code) for code in reply.status])
        self.agree("published", published, reply.published)
        self.agree("open", len(session.open), reply.open)
        if command.request_id and self.changed_state:
            self.state.answers[remembered] = reply

    @staticmethod
    def refuse_foreign(command: Finish, session: SessionRow) -> None:
        """Every named location is the session's own, in the generation that it was given."""
        for location, generation in zip(command.locations, command.generations, strict=True):
            if location not in session.rows:
                raise Refuse("foreign_location")
            if session.rows[location][0] != generation:
                raise Refuse("stale_generation")

    @staticmethod
    def check_columns(command: Finish, cells: int) -> None:
        """Columns that belong together have one length; what was written has checksums."""
        if command.ok is not None and len(command.ok) != cells:
            raise Refuse("column_length")
        if command.checksums is None:
            if command.ok is None or any(command.ok):
                raise Refuse("column_length", "invalid_field")
        elif len(command.checksums) != cells:
            raise Refuse("column_length")

    def on_renew_write(self, command: RenewWrite, now_ms: int, reply: object) -> None:
        """The deadline moves, never back."""
        session = self.session(command.session, command.engine, command.incarnation)
        ttl_ms = command.ttl_ms or session.ttl_ms
        self.refuse_ended(session)
        if not self.limits.write_ttl_ms_min <= ttl_ms <= self.limits.write_ttl_ms_max:
            raise Refuse("ttl_out_of_range")
        assert isinstance(reply, Renewed), reply
        deadline_ms = max(session.deadline_ms, now_ms + ttl_ms)
        self.state.sessions[command.session] = session._replace(deadline_ms=deadline_ms)
        self.agree("ttl_ms", deadline_ms - now_ms, reply.ttl_ms)

    @staticmethod
    def refuse_ended(session: SessionRow) -> None:
        """A session that is over cannot be renewed."""
        if session.state == SessionState.expired:
            raise Refuse("session_expired")
        if session.state == SessionState.aborted:
            raise Refuse("session_aborted")
        if session.state == SessionState.finished:
            raise Refuse("session_ended")

    def on_abort(self, command: Abort, now_ms: int, reply: object) -> None:
        """What is not published goes; what is stays."""
        session = self.session(command.session, command.engine, command.incarnation)
        if session.state == SessionState.expired:
            raise Refuse("session_expired")
        assert isinstance(reply, Aborted), reply
        if session.state == SessionState.open:
            self.end_session(command.session, SessionState.aborted, now_ms)
        self.agree("freed", self.state.sessions[command.session].freed, reply.freed)

    def end_session(self, number: int, state: SessionState, now_ms: int) -> None:
        """Expired, aborted or fenced: nothing of it will ever be published."""
        session = self.state.sessions[number]
        rows = dict(session.rows)
        for location in session.open:
            rows[location] = (rows[location][0], FREED)
            self.free(self.state.copies[location], now_ms + self.limits.late_write_ms)
        self.state.sessions[number] = session._replace(state=state, rows=rows, freed=len(session.open))
