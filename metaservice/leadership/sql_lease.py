"""Leadership in PostgreSQL, for clusters without etcd.

Tables (made by the migrations, beside the journal's):

    replica  one row a life: its name, URL, report, and `beat`, a number that grows by one with each renewal
    seat     one row a shard: the life that holds it (NULL: free; set to NULL when that life's row goes), and
             for whom the last holder resigned

A row of its own beside the journal's shard row, because that one changes with every append: whoever takes a
seat must not wait for appends, nor they for him.

Nobody's clock is compared with anybody else's, and the database's is never read. A candidate remembers when
*it* first saw a life's beat at its present number. The life counts as dead once the candidate's own clock has
passed `ttl_ms` since then, and the number is still the same. The holder's validity ends earlier by
construction: it counts from before it sent a renewal; the candidate's count starts after it received a reply
that could only be made after that renewal was committed.

The races, and what settles each:

- *Renewal against take-over.* Both lock the holder's `replica` row: the renewal by adding to the beat, the
  take-over by locking it and looking whether the beat is still the one it saw. If the renewal commits first,
  the take-over finds another beat and takes nothing. If the take-over commits first, the renewal waits for
  it, and reads the seats in a second statement, whose snapshot is newer: it finds the seat taken. One
  statement for both would read the seats as they were before it waited, and the old holder would go on for
  another ttl. For the same reason both run at READ COMMITTED, whatever the server's default is: at a stricter
  level they would fail there instead of looking again.
- *Take-over against take-over.* Both lock the `seat` row by an update that names the holder they saw; the
  second one finds another holder.
- *A holder that wakes up late.* Its renewal adds to the beat and then reads the seats. If somebody took its
  seat, it sees so. If nobody did, the seat is still its own, and from this renewal on it is as good as new;
  a candidate about to take it finds another beat. It has to judge by its own clock that it was not valid
  meanwhile.
- *An answer that is lost.* A renewal that may or may not have been committed does not prolong the holder's
  own count, only, perhaps, the patience of others. A take-over that may or may not have been committed shows
  in the next view. A take-over that the server executes late checks the beat at that moment, under the lock.
- *A candidate that stops in the middle* would keep the holder's row locked and so hold its renewals up. Every
  transaction therefore limits on the server how long it may idle, wait and run: one that idles is ended
  after half a timeout, and whoever waited for its locks goes on in time.
- *A dead life's row* is removed after several ttl, with its beat as condition, and its seats become free in
  the same transaction (ON DELETE SET NULL). If the life wakes up all the same, its renewal waits for that
  transaction, finds no row, and begins anew without seats.
- *Two processes under one name.* Rows are one a life, so the second has nothing of the first. It marks the
  other rows of its name as superseded before it adds its own; a unique index allows only one that is not, so
  of two that start at once one has to try again and then supersedes the other. A superseded life is told so
  at its next renewal. Its seats stay its own until its beat has stood still for a ttl.
- *Deadlocks.* Rows are locked in one order: `replica` rows sorted by life, then `seat` rows.
- *A PostgreSQL that failed over.* With a synchronous standby nothing committed is lost and nothing changes.
  Without one, beats and seats may step back: a seat may belong again to a replica that had lost it, while the
  one that took it still counts on its last renewal, for one ttl at most. Both then lead; the journal, which
  stepped back with them, accepts the appends of one epoch only. This is the same loss that start-up warns of
  when no synchronous standby is configured.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from metaservice.leadership.errors import LeadershipError, LeadershipRefused, ReplicaSuperseded
from metaservice.leadership.port import Holder, Leadership, Member, Report, View
from metaservice.leadership.sql_server import Connection, SqlLeaseSettings, SqlServer

__all__ = ["SqlLeadership", "SqlLeaseSettings"]

RETIRE_TTLS = 10
"""A row whose beat has stood still for so many ttl is removed."""


@dataclass(frozen=True, slots=True)
class _Life:
    """A row of `replica`."""

    life: str
    replica: str
    url: str
    beat: int
    report: str
    superseded: bool


@dataclass(frozen=True, slots=True)
class _Seat:
    """A row of `seat`."""

    shard: int
    life: str | None
    successor: str


class SqlLeadership(Leadership):
    """One life of a replica, over one connection of its own: a renewal must never wait for a pool."""

    def __init__(
        self,
        settings: SqlLeaseSettings,
        *,
        replica: str,
        url: str,
        life: str,
        shards: int,
        ttl_ms: int,
        timeout_ms: int,
        now_s: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        """`life` is a token that no other process has ever used. `now_s` is the clock by which this replica
        judges the leases of others: monotonic, and not standing still while the machine sleeps. `chance`
        returns numbers from 0 up to 1. Connects to nothing yet."""
        self._replica = replica
        self._url = url
        self._life = life
        self._shards = shards
        self._sql = _Sql(settings.schema)
        self._server = SqlServer(settings, timeout_ms, now_s, chance)
        self._seen = _Seen(now_s, ttl_ms / 1000)
        self._turn = asyncio.Lock()
        self.registered = False
        """Whether this life has renewed, and not closed since."""
        self._superseded = False

    @property
    def begin(self) -> str:
        """What begins each of its transactions."""
        return self._server.begin

    async def renew(self, report: Report) -> View:
        async with self._turn:
            if self._superseded:
                raise ReplicaSuperseded(self._replica)
            lives, seats = await self._server.transact("renewing", lambda to: self._renew(to, report))
            self.registered = True
            self._seen.note(lives)
            await self._remove_dead(lives)
            return self._view(lives, seats)

    async def look(self) -> View:
        async with self._turn:
            lives, seats = await self._server.transact("looking", self._read)
            self._seen.note(lives)
            return self._view(lives, seats)

    async def acquire(self, shard: int) -> bool:
        async with self._turn:
            if not self.registered or self._superseded or not 0 <= shard < self._shards:
                return False
            return await self._server.transact(f"taking shard {shard}", lambda to: self._acquire(to, shard))

    async def resign(self, shard: int, successor: str = "") -> None:
        async with self._turn:
            await self._server.transact(
                f"resigning shard {shard}",
                lambda to: to.execute(self._sql.resign, shard, self._life, successor),
            )

    async def close(self) -> None:
        async with self._turn:
            if self.registered:
                with suppress(LeadershipError):
                    await self._server.transact("closing", lambda to: to.execute(self._sql.leave, self._life))
                self.registered = False
            await self._server.close()

    # --- one transaction each ---------------------------------------------------------------------------

    async def _renew(self, to: Connection, report: Report) -> tuple[list[_Life], list[_Seat]]:
        """The beat first: what is read after it is newer than any take-over that it waited for."""
        text = msgspec.json.encode(report).decode()
        if await to.fetchval(self._sql.beat, self._life, self._url, text) is None:
            await self._register(to, text)
        return await self._read(to)

    async def _register(self, to: Connection, report: str) -> None:
        """Our row is not there, or another life of our name has superseded it."""
        there = await to.fetchval(self._sql.own, self._life) is not None
        if there or (self.registered and await to.fetchval(self._sql.others, self._replica)):
            self._superseded = True
            raise ReplicaSuperseded(self._replica)
        await to.execute(self._sql.supersede, self._replica)
        await to.execute(self._sql.register, self._life, self._replica, self._url, report)
        await to.execute(self._sql.make_seats, self._shards)

    async def _read(self, to: Connection) -> tuple[list[_Life], list[_Seat]]:
        lives = [_Life(*row) for row in await to.fetch(self._sql.lives)]
        seats = [_Seat(*row) for row in await to.fetch(self._sql.seats, self._shards)]
        return lives, seats

    async def _acquire(self, to: Connection, shard: int) -> bool:
        row = await to.fetchrow(self._sql.holder, shard)
        holder = None if row is None else row["life"]
        if row is None or holder == self._life:
            return row is not None
        beat = self._seen.beat_of_dead(holder) if holder is not None else None
        if holder is not None and beat is None:
            return False
        wanted = [self._life] if holder is None else [self._life, holder]
        locked = {found["life"]: found for found in await to.fetch(self._sql.lock, wanted)}
        if self._life not in locked or locked[self._life]["superseded"]:
            return False
        if holder is not None and (holder not in locked or locked[holder]["beat"] != beat):
            return False
        return await to.fetchval(self._sql.take, shard, self._life, holder) is not None

    async def _remove_dead(self, lives: Sequence[_Life]) -> None:
        for life in lives:
            if life.life != self._life and self._seen.retired(life.life):
                retire = partial(self._retire, life=life)
                with suppress(LeadershipError):  # any replica can do it at any other time
                    await self._server.transact("removing a dead replica", retire)

    async def _retire(self, to: Connection, life: _Life) -> None:
        await to.execute(self._sql.retire, life.life, life.beat)

    # --- the view ---------------------------------------------------------------------------------------

    def _view(self, lives: Sequence[_Life], seats: Sequence[_Seat]) -> View:
        alive = {life.life: life for life in lives if life.life == self._life or self._seen.alive(life.life)}
        members = {
            life.replica: Member(life.replica, life.url, self._report(life))
            for life in sorted(alive.values(), key=lambda life: life.replica)
            if not life.superseded
        }
        holders: dict[int, Holder] = {}
        for seat in seats:
            if seat.life is None:
                if seat.successor in members:
                    holders[seat.shard] = Holder("", "", seat.successor)
                continue
            life = alive.get(seat.life)
            if life is not None and (life.replica != self._replica or life.life == self._life):
                holders[seat.shard] = Holder(life.replica, life.url)
        return View(holders, members)

    def _report(self, life: _Life) -> Report:
        try:
            return msgspec.json.decode(life.report, type=Report)
        except msgspec.DecodeError as error:
            raise LeadershipRefused(
                "PostgreSQL", "reading", f"the report of replica {life.replica!r} is none ({error})"
            ) from error


class _Seen:
    """When each life's beat was first seen at its present number, by this replica's own clock."""

    def __init__(self, now_s: Callable[[], float], ttl_s: float) -> None:
        self._now_s = now_s
        self._ttl_s = ttl_s
        self._beats: dict[str, tuple[int, float]] = {}

    def note(self, lives: Sequence[_Life]) -> None:
        """To be called after the rows have arrived: counting from an earlier moment would count time against
        a life in which it may still have renewed."""
        now_s = self._now_s()
        before = self._beats
        self._beats = {life.life: (life.beat, now_s) for life in lives}
        for life, (beat, _) in self._beats.items():
            if life in before and before[life][0] == beat:
                self._beats[life] = before[life]

    def alive(self, life: str) -> bool:
        """Whether it may still count on its lease; so is whoever has only just been seen."""
        return life in self._beats and self._still_s(life) < self._ttl_s

    def beat_of_dead(self, life: str) -> int | None:
        """The number at which its beat stopped; None while it is alive, or when it was never seen."""
        return self._beats[life][0] if life in self._beats and not self.alive(life) else None

    def retired(self, life: str) -> bool:
        """Whether it has been dead for so long that its row can go."""
        return life in self._beats and self._still_s(life) >= RETIRE_TTLS * self._ttl_s

    def _still_s(self, life: str) -> float:
        return self._now_s() - self._beats[life][1]


class _Sql:
    """The statements, for one schema."""

    def __init__(self, schema: str) -> None:
        replica, seat = f'"{schema}".replica', f'"{schema}".seat'
        self.beat = (
            f"UPDATE {replica} SET beat = beat + 1, url = $2, report = $3"
            " WHERE life = $1 AND NOT superseded RETURNING beat"
        )
        self.own = f"SELECT superseded FROM {replica} WHERE life = $1"
        self.others = f"SELECT count(*) FROM {replica} WHERE replica = $1 AND NOT superseded"
        self.supersede = f"UPDATE {replica} SET superseded = true WHERE replica = $1 AND NOT superseded"
        self.register = f"INSERT INTO {replica} (life, replica, url, beat, report) VALUES ($1, $2, $3, 1, $4)"
        self.make_seats = (
            f"INSERT INTO {seat} (shard) SELECT generate_series(0, $1::int - 1) ON CONFLICT DO NOTHING"
        )
        self.lives = f"SELECT life, replica, url, beat, report, superseded FROM {replica}"
        self.seats = f"SELECT shard, life, successor FROM {seat} WHERE shard < $1 ORDER BY shard"
        self.holder = f"SELECT life FROM {seat} WHERE shard = $1"
        self.lock = (
            f"SELECT life, beat, superseded FROM {replica} WHERE life = ANY($1::text[])"
            " ORDER BY life FOR NO KEY UPDATE"
        )
        self.take = (
            f"UPDATE {seat} SET life = $2, successor = ''"
            " WHERE shard = $1 AND life IS NOT DISTINCT FROM $3 RETURNING shard"
        )
        self.resign = f"UPDATE {seat} SET life = NULL, successor = $3 WHERE shard = $1 AND life = $2"
        self.leave = f"DELETE FROM {replica} WHERE life = $1"
        self.retire = f"DELETE FROM {replica} WHERE life = $1 AND beat = $2"
