"""Leader memory: what only the leader knows and may lose at any moment without any replica being wrong.

Read leases, heartbeats, deletion tasks, recency summaries, the queue of what is applied but not yet durable.
"""

from array import array
from collections import deque
from heapq import heappop, heappush

from .deletion import Deletions
from .errander import Errander
from .leases import Leases
from .model import REMEMBERED_REQUESTS, Limits
from .replies import Started
from .reports import Reports
from .state import State, Usage
from .telling import Telling
from .windows import Window


class Memory:
    """Beside a State, never part of its digest."""

    def __init__(self, state: State, limits: Limits) -> None:
        self.state = state
        self.limits = limits
        self.leases = Leases(state.index, limits, state.shard)
        self.deletions = Deletions(state.index, limits, state.shard)
        self.unrevealed: deque[tuple[int, array[int]]] = deque()
        """(seq of the publishing event, slots): serving, and visible once that seq is durable."""
        self.undeleted: deque[tuple[int, array[int], int]] = deque()
        """(seq of the removing event, slots, not before): bytes may go once that seq is durable, and not
        before: a removal that a crash undoes must find its bytes."""
        self.session_deadlines: list[tuple[int, int]] = []
        self.beats: dict[tuple[str, str], int] = {}
        """(kind, id) -> when it was last heard of."""
        self.pressed: set[Usage] = set()
        """Scopes that went over their high watermark."""
        self.touched: dict[int, int] = {}
        """slot -> when, since the last hot summary."""
        self.hot_summary_at_ms = 0
        self.unjournaled: dict[tuple[str, str], Started] = {}
        """Answers to start-writes that changed nothing (everything present or refused), for a retry."""

        self.telling = Telling()
        self.windows: deque[Window] | None = None
        """What routers are to be told, until somebody takes it; None: nobody does here."""
        self.spans = state.shards > 1
        """Whether there are other shards: then it is noted what they have to be told."""
        self.spread_seq = state.seq
        """The last event that data shards take copies of."""
        self.durable_seq = state.seq
        self.checked_seq = state.seq
        """The last time that replicas compared what their states add up to."""
        self.checked_at_ms = 0
        self.took_over()

    def took_over(self) -> None:
        """A new epoch: what shards told each other before is told again."""
        self.errander = Errander(self.state, self.limits, self.deletions.overdue_bytes)
        self.reports = Reports(self.state, self.limits)

    def stand_down(self) -> None:
        """Leases, heartbeats, tasks and answers belong to the epoch that is over."""
        self.leases.drop()
        self.deletions.take_back()
        self.beats.clear()
        self.touched = {}
        self.telling.rest()
        self.unjournaled.clear()
        self.took_over()

    def forget(self, usage: Usage) -> None:
        """A tenant, group, instance or storage is gone."""
        self.pressed.discard(usage)
        if self.spans:
            self.errander.forget(usage)
            self.reports.forget((usage.scope, usage.id))

    def limit_changed(self, usage: Usage) -> None:
        """A limit that spans shards, or what the catalogue granted of it, is another one."""
        self.errander.limit_changed(usage)
        self.reports.limit_changed((usage.scope, usage.id))

    def remember_unjournaled(self, request: tuple[str, str], reply: Started) -> None:
        """Keep an answer that no event carries, bounded like the journaled ones."""
        self.unjournaled[request] = reply
        if len(self.unjournaled) > REMEMBERED_REQUESTS:
            del self.unjournaled[next(iter(self.unjournaled))]

    def touch(self, slots: "array[int]", span: tuple[int, int] | None, now_ms: int, chain: bool) -> None:
        """The blocks in these slots were used. `span`: (first, end) when they are one run. Of a `chain` only
        the deepest block goes into the next hot summary: what it needs is as hot."""
        used = self.state.index.used_ms
        if span is not None:
            used[slice(*span)] = array("Q", (now_ms,)) * len(slots)
        else:
            for slot in slots:
                used[slot] = now_ms
        for slot in slots[-1:] if chain else slots:
            if len(self.touched) < self.limits.hot_summary_max:
                self.touched[slot] = now_ms

    def reveal(self, durable_seq: int, now_ms: int | None = None) -> None:
        """Everything up to this seq is durable (since `now_ms`): readers may see what it published, bytes it
        removed may go.

        Followers show a block until its removal reaches them, which is after it is durable, however long
        that took: what they promised to readers counts from now. A replay has no now; what it finds waits
        for the take-over."""
        self.durable_seq = durable_seq
        if self.spans:
            self.errander.reveal(durable_seq)
        while self.unrevealed and self.unrevealed[0][0] <= durable_seq:
            slots = self.unrevealed.popleft()[1]
            self.state.index.reveal(slots)
            self.telling.revealed(slots)
        while self.undeleted and self.undeleted[0][0] <= durable_seq:
            _, slots, not_before_ms = self.undeleted.popleft()
            ready_ms = not_before_ms
            if now_ms is not None:
                ready_ms = max(not_before_ms, now_ms + self.limits.reclaim_delay_ms)
            # in replay they may be gone (and even in use) again by now
            deleting = self.state.deleting
            self.deletions.queue([slot for slot in slots if deleting.get(slot) == not_before_ms], ready_ms)

    def lost(self, storage: int, slots: "array[int]", deleting: "array[int]") -> None:
        """These locations (some of them deleting) were all that the storage held, and are gone with their
        bytes. Their slots may be used again before that is durable: nothing that was queued for the earlier
        use may reach the next."""
        self.leases.lost(slots)
        self.deletions.lost(storage, deleting)
        gone = set(slots)

        def rest(those: "array[int]") -> "array[int]":
            return array("I", [slot for slot in those if slot not in gone])

        self.unrevealed = deque((seq, rest(those)) for seq, those in self.unrevealed)
        self.undeleted = deque((seq, rest(those), at_ms) for seq, those, at_ms in self.undeleted)
        self.touched = {slot: at_ms for slot, at_ms in self.touched.items() if slot not in gone}

    def watch_session(self, number: int, deadline_ms: int) -> None:
        """The session's deadline is (now) this."""
        heappush(self.session_deadlines, (deadline_ms, number))

    def overdue_sessions(self, now_ms: int, count_max: int) -> list[int]:
        """Open sessions past their deadline."""
        found: list[int] = []
        heap = self.session_deadlines
        while heap and heap[0][0] <= now_ms and len(found) < count_max:
            deadline_ms, number = heappop(heap)
            session = self.state.sessions.get(number)
            if session is None or session.deadline_ms != deadline_ms:
                continue  # ended, or renewed: the newer deadline has its own entry
            found.append(number)
        return list(dict.fromkeys(found))  # the same deadline may have been noted twice
