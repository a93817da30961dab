"""What goes on in the background, wherever it runs: heartbeats, renewals, and registering again.

The same machine runs in a thread or in a child process. It is told messages and tells events, and has
connections of its own. It holds nothing for ever: whatever it is told to keep has an end, so that what an
engine forgot ends by itself.
"""

import logging
from collections.abc import Callable
from secrets import token_hex

from metaservice.wire.schemas import LeaseOutcome

from .asking import Asking
from .breaker import Backoff, new_random
from .calls import Who, shard_of
from .config import ClientConfig
from .endpoints import CATALOGUE
from .errors import REJECTED, CallFailed
from .member_calls import Heartbeat, Register
from .messages import (
    Doubt,
    Drop,
    Event,
    Forget,
    Joined,
    KeepLease,
    KeepSession,
    Kept,
    Left,
    Lost,
    Member,
    Message,
    Renewed,
    Said,
    Stop,
)
from .read_calls import RenewLeases
from .results import WriteResult, now_ms
from .write_calls import RenewWrite

WAIT_MS_MAX = 1_000
"""A keeper looks up at least this often."""

_RENEW_AT = 0.4
"""Renewed after this part of the time to live: more than half is left for tries after a failure."""
_EARLY = 0.15
"""What is due within this part of its time to live goes with what is due now, in one call."""
_LEASES_A_CALL = 1_000
_REJOIN_MS_MIN = 100
_REJOIN_MS_MAX = 60_000
_REJECTED_AT_ALL = frozenset({400, 403, 404, 409, 422})


class _Kept:
    __slots__ = ("deadline_ms", "due_ms", "shard", "ttl_ms", "until_ms", "write")

    def __init__(
        self, id: str, ttl_ms: int, deadline_ms: int, until_ms: int, write: WriteResult | None = None
    ) -> None:
        self.shard = shard_of(id)
        self.ttl_ms = ttl_ms
        self.deadline_ms = deadline_ms
        self.until_ms = until_ms
        self.due_ms = 0
        self.write = write


class Keeping:
    """The machine. One thread calls `handle` and `step`; `emit` is called from it and must not wait."""

    def __init__(self, config: ClientConfig, emit: Callable[[Event], None]) -> None:
        self._config = config
        self._emit = emit
        self._who = Who()
        self._random = new_random()
        self._asking = Asking(config, self._who, self._random, self._say)
        self._rejoin = Backoff(_REJOIN_MS_MIN, _REJOIN_MS_MAX, self._random)
        self._member: Member | None = None
        self._beat_ms = 0
        self._joined_ms = 0
        self._leases: dict[str, _Kept] = {}
        self._sessions: dict[str, _Kept] = {}
        self._next_ms = 0
        self.stopped = False

    def close(self) -> None:
        """Give the connections up."""
        self._asking.close()

    # -- what it is told

    def handle(self, message: Message) -> None:
        """Take one message. Never waits."""
        match message:
            case KeepLease(lease, ttl_ms, deadline_ms, until_ms):
                self._keep(self._leases, lease, _Kept(lease, ttl_ms, deadline_ms, until_ms))
            case KeepSession(session, engine, incarnation, ttl_ms, deadline_ms, until_ms):
                write = WriteResult(session=session, engine=engine, incarnation=incarnation)
                self._keep(self._sessions, session, _Kept(session, ttl_ms, deadline_ms, until_ms, write))
            case Kept(items, fresh):
                if fresh:
                    self._leases.clear()
                    self._sessions.clear()
                for item in items:
                    self.handle(item)
            case Drop(leases, sessions):
                for lease in leases:
                    self._leases.pop(lease, None)
                for session in sessions:
                    self._sessions.pop(session, None)
            case Member():
                self._join(message)
            case Doubt():
                self._beat_ms = self._next_ms = 0
            case Forget():
                self._member = None
            case Stop():
                self.stopped = True

    def _keep(self, kept: dict[str, _Kept], id: str, item: _Kept) -> None:
        item.due_ms = self._due(item.deadline_ms - item.ttl_ms, item.ttl_ms)
        kept[id] = item
        self._next_ms = min(self._next_ms, item.due_ms)

    def _join(self, member: Member) -> None:
        self._member = member
        self._who.kind, self._who.id, self._who.incarnation = member.kind, member.id, member.incarnation
        now = self._joined_ms = now_ms()
        self._beat_ms = now + self._jittered(member.heartbeat_ms) if member.registered else now
        self._next_ms = min(self._next_ms, self._beat_ms)

    # -- what it does

    def step(self) -> int:
        """Do what is due. Returns in how many ms the next thing is, at most WAIT_MS_MAX. Waits for the
        service, each call with its own deadline."""
        now = now_ms()
        if now >= self._next_ms:
            for shard in self._due_shards(now):
                if now_ms() < self._asking.not_before_ms(shard):
                    continue
                try:
                    if shard == CATALOGUE:
                        self._beat()
                    self._renew_leases(shard)
                    self._renew_sessions(shard)
                except CallFailed as failed:
                    self._asking.hold_off(shard, failed)
                else:
                    self._asking.answered(shard)
            self._give_up()
            self._next_ms = self._earliest()
        return max(1, min(self._next_ms - now_ms(), WAIT_MS_MAX))

    def _due_shards(self, now: int) -> list[int]:
        """The shards about which something is due; registrations are the catalogue's, which goes first."""
        due = {
            item.shard
            for kept in (self._leases, self._sessions)
            for item in kept.values()
            if item.due_ms <= now
        }
        if self._member is not None and self._beat_ms <= now:
            due.add(CATALOGUE)
        return sorted(due)

    def _earliest(self) -> int:
        """When the next thing is due of what may be asked then."""
        later = self._asking.not_before_ms
        dues = [
            max(item.due_ms, later(item.shard))
            for kept in (self._leases, self._sessions)
            for item in kept.values()
        ]
        if self._member is not None:
            dues.append(max(self._beat_ms, later(CATALOGUE)))
        return min(dues, default=now_ms() + WAIT_MS_MAX)

    # -- heartbeats

    def _beat(self) -> None:
        member = self._member
        if member is None or now_ms() < self._beat_ms:
            return
        timeout_ms = max(1, min(self._config.timeout_ms, member.expire_ms // 5))
        if not member.registered:
            self._register(member, timeout_ms)
            return
        try:
            self._asking.ask(Heartbeat(), timeout_ms)
        except CallFailed as failed:
            if failed.failure != REJECTED + "reregister":
                raise
            self._leave(member)
        else:
            self._beat_ms = now_ms() + self._jittered(member.heartbeat_ms)

    def _leave(self, member: Member) -> None:
        lost = [
            id
            for id, item in self._sessions.items()
            if item.write and item.write.incarnation == member.incarnation
        ]
        for session in lost:
            del self._sessions[session]
        self._emit(Left(member.id, member.incarnation))
        if lost:
            self._emit(Lost(sessions=lost, why="the registration is gone"))
        now = now_ms()
        if now - self._joined_ms < 3 * member.expire_ms:
            # Two processes under one id would throw each other out for ever: each time later.
            self._beat_ms = now + self._rejoin.next_ms()
            self._say(
                logging.WARNING,
                f"{member.kind} {member.id} lost its registration soon after it got it: "
                "does another process use the same id?",
            )
        else:
            self._rejoin.reset()
            self._beat_ms = now
        member.registered = False
        member.incarnation = self._who.incarnation = token_hex(8)
        self._next_ms = 0

    def _register(self, member: Member, timeout_ms: int) -> None:
        try:
            answer = self._asking.ask(Register.of(member), timeout_ms)
        except CallFailed as failed:
            if failed.failure == REJECTED + "incarnation_retired":
                member.incarnation = self._who.incarnation = token_hex(8)
            if failed.status in _REJECTED_AT_ALL:
                # Say so and try again, with growing pauses: somebody may still create what is missing.
                self._beat_ms = now_ms() + max(member.heartbeat_ms, self._rejoin.next_ms())
                self._say(
                    logging.ERROR,
                    f"{member.kind} {member.id} cannot register: {failed.failure} {failed.detail}",
                )
                return
            raise
        member.registered = True
        member.heartbeat_ms = answer.heartbeat_ms
        member.expire_ms = answer.expire_ms
        self._joined_ms = now_ms()
        self._beat_ms = self._joined_ms + self._jittered(answer.heartbeat_ms)
        self._emit(
            Joined(
                id=member.id,
                incarnation=member.incarnation,
                heartbeat_ms=answer.heartbeat_ms,
                suspect_ms=answer.suspect_ms,
                expire_ms=answer.expire_ms,
                cluster=answer.cluster,
                epoch=answer.epoch,
                storage_table=answer.storage_table,
            )
        )

    # -- renewals

    def _renew_leases(self, shard: int) -> None:
        now = now_ms()
        ours = [(id, item) for id, item in self._leases.items() if item.shard == shard]
        for ttl_ms in {item.ttl_ms for _, item in ours if item.due_ms <= now}:
            soon = now + round(ttl_ms * _EARLY)
            ids = [id for id, item in ours if item.ttl_ms == ttl_ms and item.due_ms <= soon]
            for at in range(0, len(ids), _LEASES_A_CALL):
                self._renew_batch(ids[at : at + _LEASES_A_CALL], ttl_ms)

    def _renew_batch(self, ids: list[str], ttl_ms: int) -> None:
        sent_ms = now_ms()
        result = self._asking.ask(RenewLeases(ids, ttl_ms, None), self._timeout_ms(ttl_ms))
        held_ms = min(result.ttl_ms or ttl_ms, ttl_ms)
        renewed: dict[str, int] = {}
        lost: list[str] = []
        for id, outcome in zip(ids, result.outcomes, strict=True):
            if outcome == LeaseOutcome.renewed:
                item = self._leases[id]
                item.deadline_ms = renewed[id] = max(item.deadline_ms, sent_ms + held_ms)
                item.due_ms = self._due(sent_ms, held_ms)
            else:
                del self._leases[id]
                lost.append(id)
        if renewed:
            self._emit(Renewed(renewed))
        if lost:
            self._emit(Lost(leases=lost, why="the service says that they are over"))

    def _renew_sessions(self, shard: int) -> None:
        now = now_ms()
        ours = [(id, item) for id, item in self._sessions.items() if item.shard == shard]
        for id, item in [(id, item) for id, item in ours if item.due_ms <= now]:
            assert item.write is not None
            try:
                result = self._asking.ask(RenewWrite(item.write, item.ttl_ms), self._timeout_ms(item.ttl_ms))
            except CallFailed as failed:
                if failed.status not in _REJECTED_AT_ALL:
                    raise
                del self._sessions[id]
                self._emit(Lost(sessions=[id], why=failed.failure))
            else:
                item.deadline_ms = max(item.deadline_ms, result.deadline_ms)
                item.due_ms = self._due(result.deadline_ms - result.ttl_ms, result.ttl_ms)
                self._emit(Renewed({id: item.deadline_ms}))

    def _give_up(self) -> None:
        """Drop what ran out, and what was kept long enough."""
        now = now_ms()
        leases, forgotten = self._over(self._leases, now)
        sessions, forgotten_sessions = self._over(self._sessions, now)
        if leases or sessions:
            self._emit(Lost(leases=leases, sessions=sessions, why="not renewed in time"))
        if forgotten or forgotten_sessions:
            self._say(
                logging.WARNING,
                f"{len(forgotten)} leases and {len(forgotten_sessions)} write sessions were held for "
                f"{self._config.keep_ms_max} ms; they are renewed no longer",
            )

    @staticmethod
    def _over(kept: dict[str, _Kept], now: int) -> tuple[list[str], list[str]]:
        ran_out = [id for id, item in kept.items() if item.deadline_ms <= now]
        forgotten = [id for id, item in kept.items() if item.until_ms <= now < item.deadline_ms]
        for id in (*ran_out, *forgotten):
            del kept[id]
        return ran_out, forgotten

    # -- small things

    def _timeout_ms(self, ttl_ms: int) -> int:
        return max(1, min(self._config.timeout_ms, ttl_ms // 4))

    def _due(self, from_ms: int, ttl_ms: int) -> int:
        return from_ms + self._jittered(round(ttl_ms * _RENEW_AT))

    def _jittered(self, period_ms: int) -> int:
        """±20 %: engines that started together do not stay in step."""
        return max(1, round(period_ms * self._random.uniform(0.8, 1.2)))

    def _say(self, level: int, text: str) -> None:
        self._emit(Said(level, f"keeper {text.partition(':')[0]}", f"keeper: {text}"))
