"""Bugs planted into a cluster, one at a time. Those of `planted` that a cluster has to notice as well are
here again; the others are bugs of replication.

They replace one function by a wrong one, and lean on insides on purpose: when a seam moves, the bug is no
longer caught and the run says so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from metaservice.core import apply
from metaservice.core import events as ev
from metaservice.core.apply_catalogue import APPLY
from metaservice.core.errander import Errander
from metaservice.core.memory import Memory
from metaservice.journal.codec import decode_batch
from metaservice.journal.port import Batch
from metaservice.replica.feed import CatalogueLog
from metaservice.replica.tail import Tail

from . import cluster_seat, planted, planted_events
from .cluster_replica import Replica
from .cluster_seat import Seat
from .cluster_store import Read, Rows, Store
from .planted import Planted


@contextmanager
def fence_removed() -> Iterator[None]:
    """The database takes a batch from whoever sends one."""

    def fenced(rows: Rows, batch: Batch) -> bool:
        return False

    with patch.object(Store, "fenced", staticmethod(fenced)):
        yield


@contextmanager
def ack_before_commit() -> Iterator[None]:
    """Callers are answered when the batch is sent, not when it is in."""
    known = Seat._append

    def append(self: Seat, batch: Batch, turn: int) -> None:
        waiting, self._waiting = self._waiting, type(self._waiting)()
        for _, reply, answer in waiting:
            answer(self._stamped(reply))
        known(self, batch, turn)

    with patch.object(Seat, "_append", append):
        yield


@contextmanager
def fate_guessed() -> Iterator[None]:
    """An append without an answer counts as done."""
    with patch.object(Seat, "_resolve", lambda self, *_: self._committed()):
        yield


@contextmanager
def fenced_state_kept() -> Iterator[None]:
    """A leader that was fenced goes on as a follower with what it has."""
    known = Seat.let_go

    def let_go(self: Seat, why: str) -> None:
        machine = self.machine
        known(self, why)
        if machine is not None and self.tail is not None:
            self.tail = Tail(machine)

    with patch.object(Seat, "let_go", let_go):
        yield


@contextmanager
def gap_skipped() -> Iterator[None]:
    """A follower behind the trim point goes on with what is still there."""
    known = Store.read

    def read(self: Store, shard: int, after_seq: int, count: int = 64) -> Read:
        return known(self, shard, max(after_seq, self.shards[shard].trimmed_seq), count)

    def checked(self: Tail, batch: Batch) -> list[Any]:
        self.epoch = batch.epoch
        self.machine.state.seq = batch.first_seq - 1
        return decode_batch(batch.payload)

    with patch.object(Store, "read", read), patch.object(Tail, "checked", checked):
        yield


@contextmanager
def follower_grants_leases() -> Iterator[None]:
    """A follower grants a read lease that no leader knows of."""
    with patch.object(cluster_seat, "follower_may", lambda _: True):
        yield


@contextmanager
def delay_counted_from_the_decision() -> Iterator[None]:
    """Bytes wait from when their removal was decided, however long it took to become durable."""
    known = Memory.reveal

    def reveal(self: Memory, durable_seq: int, _: int | None = None) -> None:
        known(self, durable_seq)

    with patch.object(Memory, "reveal", reveal):
        yield


@contextmanager
def lease_not_looked_at() -> Iterator[None]:
    """A leader answers until it is told that it no longer is one."""

    def leading(self: Seat) -> bool:
        return self.pipeline is not None and self.pipeline.led

    with patch.object(Seat, "leading", property(leading)):
        yield


@contextmanager
def lease_counted_from_the_answer() -> Iterator[None]:
    """A renewal counts from when its answer came, however long that took."""
    known = Replica._renewed

    def renewed(self: Replica, result: Any, _: int) -> None:
        known(self, result, self.clock.mono_ms)

    with patch.object(Replica, "_renewed", renewed):
        yield


@contextmanager
def grant_used_before_durable() -> Iterator[None]:
    """Data shards take what the catalogue has decided, whether the journal has it or not."""
    known = Seat._append

    def append(self: Seat, batch: Batch, turn: int) -> None:
        known(self, batch, turn)
        if self.shard == 0:
            self.replica.followed(0, decode_batch(batch.payload), batch.last_seq)

    committed = Replica.followed

    def followed(self: Replica, shard: int, events: Any, seq: int) -> None:
        if seq > self.spread._log.seq or shard:
            committed(self, shard, events, seq)

    with patch.object(Seat, "_append", append), patch.object(Replica, "followed", followed):
        yield


@contextmanager
def return_counted_before_durable() -> Iterator[None]:
    """A data shard tells the catalogue of returns that its own journal does not have yet."""
    known = Errander.returned

    def returned(self: Errander, number: int) -> None:
        known(self, number)
        self._returns_durable = number

    with patch.object(Errander, "returned", returned):
        yield


@contextmanager
def grant_taken_twice() -> Iterator[None]:
    """The last of the catalogue comes again with what is new, and grants count again."""
    known_since, known_grant = CatalogueLog.since, APPLY[ev.SliceGranted]

    def since(self: CatalogueLog, version: int) -> Any:
        news = known_since(self, version)
        return (known_since(self, version - 4) or news) if news else news

    def granted(state: Any, memory: Any, event: ev.SliceGranted) -> None:
        if state.shard:
            state.grant_next = event.grant
        known_grant(state, memory, event)

    with (
        patch.object(CatalogueLog, "since", since),
        patch.dict(apply._APPLY, {ev.SliceGranted: granted}),
    ):
        yield


PLANTED: dict[str, Planted] = {
    bug.__name__: bug
    for bug in (
        fence_removed,
        ack_before_commit,
        fate_guessed,
        fenced_state_kept,
        gap_skipped,
        follower_grants_leases,
        delay_counted_from_the_decision,
        lease_not_looked_at,
        lease_counted_from_the_answer,
        grant_used_before_durable,
        return_counted_before_durable,
        grant_taken_twice,
        planted.visible_before_durable,
        planted.quota_checked_after,
        planted.sessions_not_extended,
        planted.dedup_off,
        planted.retry_not_remembered,
        planted.place_given_away_early,
        planted.predecessor_forgotten,
        planted.generation_not_checked,
        planted.locations_survive_their_pool,
        planted_events.removal_forgotten,
        planted_events.followers_know_no_tombstones,
        planted_events.window_number_skipped,
        planted_events.restated_as_stored,
    )
}
