"""What clients were told, held against what the journals say.

Of a leader's answer at (shard, epoch e, seq s), asked for at t and come at u:

- *One history.* The batch of seq s is of epoch e: a leader's first batch of an epoch is its take-over, and it
  answers nothing before that is durable. Whoever asks after another answer of a leader came gets no smaller
  seq and no smaller epoch; whoever asks after the take-over of a later epoch was committed hears nothing of
  epoch e any more. (Of a request that was under way during the take-over nothing can be said from outside;
  see the zombie in `cluster_faults.py`, whose requests are sent before it wakes.)
- *Commits.* A block that a finish called serving is in the journal, of that key at that place, published at
  p <= s: acknowledged after it was durable, whichever epoch gave the first answer. It was not lost: a later
  lookup that lacks it is right only if the journal removed it at r <= s, or was about to: what a leader has
  decided to remove is hidden before that is durable, which is at most what its next appends hold
  (`APPENDS_AHEAD`), or what went down with it.
- *Lookups.* Every place in an answer served at s: published at p <= s and not removed at any r <= s. Not "at
  s or later": the leader shows what is durable, and hides what it has decided to remove.
- *Bytes.* A place that was found has its bytes until the promise ends: the lease, from before it was asked
  for; without a lease `reclaim_delay_ms`, for the bytes go no sooner after a removal that was not durable
  yet. So `LocationsGone`, which a worker confirms after it deleted, is committed after that. And always
  `reclaim_delay_ms` after the removal, whoever had looked.

A follower's answer of staleness d at its applied seq s: places served at s; nothing that was committed before
t - d is missing from s, so the batch after s was committed later (`COMMIT_S` of grace: a commit is visible a
moment after its own time); its promise is shorter by d.

Quotas: over the journals merged in the order of their commits, what is written or serves never passes a
limit, and no budget is lost, doubled, or used without a grant (`tests/sim/cluster_escrow.py`). Replicas are
equal: replaying each journal comes to the sums that its leaders journaled (`StateChecked`), and to the digest
of every snapshot that any replica cut.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from metaservice.core import events as ev
from metaservice.core.ids import location_base
from metaservice.core.machine import Machine
from metaservice.core.model import Limits
from metaservice.journal.codec import decode_batch
from tests.sim.cluster_witness import Copy, Witness
from tests.sim.rows import Violation
from tests.torture.cluster_journals import Journals
from tests.torture.cluster_record import Commit, Looked, Place, Position, Record

APPENDS_AHEAD = 3
COMMIT_S = 0.1
SHOWN = 12

LOST, DIRTY, EARLY, QUOTA, FORKS, OTHER = "lost", "dirty", "early", "quota", "forks", "other"
_KIND = {"I1": LOST, "I2": DIRTY, "I3": EARLY, "I4": QUOTA, "escrow": QUOTA, "I5": FORKS, "I6": FORKS}


@dataclass
class Verdict:
    """How often each thing happened that must not, and in words."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    used_max: int = 0
    """The most blocks of the tenant that were ever in use at once."""
    batches: int = 0
    events: int = 0
    checked_states: int = 0
    checked_digests: int = 0

    def wrong(self, kind: str, what: str) -> None:
        """Count it; the first few of each kind are told."""
        self.counts[kind] += 1
        if self.counts[kind] <= SHOWN:
            self.problems.append(f"{kind}: {what}")


class Judge:
    """One judgement. `judge` does it all."""

    def __init__(self, record: Record, journals: Journals, tenant: str, reclaim_delay_ms: int) -> None:
        self.verdict = Verdict()
        self._record = record
        self._journals = journals
        self._tenant = tenant
        self._reclaim_delay_s = reclaim_delay_ms / 1_000
        self._witness = Witness(journals.shards)
        self._removed_s: dict[Place, float] = {}
        self._gone_s: dict[Place, float] = {}
        self._takeovers: list[list[tuple[int, float]]] = [[] for _ in range(journals.shards)]
        """By shard, (epoch, when)."""

    def judge(self) -> Verdict:
        """Everything."""
        record, wrong = self._record, self.verdict.wrong
        for kind, found in ((DIRTY, record.dirty), (EARLY, record.early), (OTHER, record.faults)):
            for what in found:
                wrong(kind, what)
        for what in self._journals.faults:
            wrong(FORKS, what)
        try:
            self._read()
        except Violation as error:
            text = str(error)
            wrong(_KIND.get(text.partition(":")[0], OTHER), f"{text}; what clients were told is not judged")
            return self.verdict
        self._histories()
        for commit in record.commits:
            self._commit(commit)
        self._lookups()
        self._spans()
        self._equal()
        return self.verdict

    # ------------------------------------------------------------ the journals

    def _read(self) -> None:
        slots: list[dict[int, Place]] = [{} for _ in range(self._journals.shards)]
        used = self._witness.used
        for told in self._journals.merged():
            self._witness.told(told.shard, told.batch)
            in_use = used.get(("tenant", self._tenant))
            if in_use is not None:
                self.verdict.used_max = max(self.verdict.used_max, in_use[1])
            base, place_of = location_base(told.shard), slots[told.shard]
            takeovers = self._takeovers[told.shard]
            if not takeovers or takeovers[-1][0] < told.batch.epoch:
                takeovers.append((told.batch.epoch, told.commit_s))
            for event in decode_batch(told.batch.payload):
                if isinstance(event, ev.WriteStarted):
                    generations = array("I", event.generations)
                    for slot, generation in zip(array("I", event.slots), generations, strict=True):
                        place_of[slot] = (base + slot, generation)
                elif isinstance(event, ev.BlocksRemoved):
                    for slot in array("I", event.slots):
                        self._removed_s[place_of[slot]] = told.commit_s
                elif isinstance(event, ev.LocationsGone):
                    for slot in array("I", event.slots):
                        self._gone_s[place_of[slot]] = told.commit_s
        self.verdict.batches, self.verdict.events = self._witness.batches, self._witness.events

    def _histories(self) -> None:
        """One history, as far as answers tell."""
        for shard in range(self._journals.shards):
            answers = [one for one in self._record.positions if one.shard == shard and one.leader]
            told = self._journals.told[shard]
            for at in answers:
                row = bisect_left(told, at.seq, key=lambda one: one.batch.last_seq)
                epoch = told[row].batch.epoch if row < len(told) else 0
                if epoch != at.epoch:
                    self.verdict.wrong(
                        FORKS, f"{at}, and the journal's seq {at.seq} is of epoch {epoch or 'nobody'}"
                    )
                for later, when_s in self._takeovers[shard]:
                    if later > at.epoch and when_s < at.sent_s:
                        late_ms = (at.sent_s - when_s) * 1_000
                        self.verdict.wrong(
                            DIRTY, f"{at} was asked for {late_ms:.0f} ms after epoch {later} began"
                        )
                        break
            self._never_back(answers)

    def _never_back(self, answers: list[Position]) -> None:
        came = sorted(answers, key=lambda one: one.received_s)
        seen = Position(0, 0, 0, 0.0, 0.0, leader=True)
        row = 0
        for at in sorted(answers, key=lambda one: one.sent_s):
            while row < len(came) and came[row].received_s < at.sent_s:
                if (came[row].epoch, came[row].seq) > (seen.epoch, seen.seq):
                    seen = came[row]
                row += 1
            if at.seq < seen.seq or at.epoch < seen.epoch:
                self.verdict.wrong(FORKS, f"{at} was asked for after {seen} had come")

    # ------------------------------------------------------------ clients

    def _copy(self, place: Place) -> Copy | None:
        return self._witness.copies.get(place)

    def _commit(self, commit: Commit) -> None:
        copy = self._copy(commit.place)
        if copy is None or copy.key != commit.key or not copy.published_seq:
            self.verdict.wrong(LOST, f"{commit} was acknowledged, and the journal says {copy}")
        elif copy.published_seq > commit.at.seq:
            self.verdict.wrong(LOST, f"{commit} was acknowledged before it was durable: {copy}")

    def _lookups(self) -> None:
        acked: dict[bytes, Commit] = {}
        for commit in self._record.commits:
            acked.setdefault(commit.key, commit)
        for looked in self._record.lookups:
            self._found(looked)
            for key in looked.absent:
                known = acked.get(key)
                if known is not None and known.at.received_s < looked.at.sent_s and looked.at.leader:
                    self._missing(looked, known)
            if not looked.at.leader:
                self._fresh(looked)

    def _found(self, looked: Looked) -> None:
        for key, place in looked.rows:
            copy = self._copy(place)
            if copy is None or copy.key != key or not copy.served_at(looked.at.seq):
                self.verdict.wrong(DIRTY, f"{key.hex()} at {place} was answered at {looked.at}: {copy}")
            gone_s = self._gone_s.get(place)
            if gone_s is not None and gone_s < looked.until_s:
                short_ms = (looked.until_s - gone_s) * 1_000
                self.verdict.wrong(EARLY, f"{place} is gone {short_ms:.0f} ms before the end of {looked}")

    def _missing(self, looked: Looked, commit: Commit) -> None:
        copy = self._copy(commit.place)
        if copy is None or not copy.served_at(looked.at.seq):
            return  # lost and told already, or removed in time
        told = self._journals.told[looked.at.shard]
        row = bisect_left(told, looked.at.seq + 1, key=lambda one: one.batch.first_seq)
        ahead = told[row : row + APPENDS_AHEAD]
        if not ahead or ahead[0].batch.epoch != looked.at.epoch:
            return
        if not 0 < copy.removed_seq <= ahead[-1].batch.last_seq:
            self.verdict.wrong(LOST, f"{commit} is not found by {looked}: {copy}")

    def _fresh(self, looked: Looked) -> None:
        told = self._journals.told[looked.at.shard]
        row = bisect_left(told, looked.at.seq + 1, key=lambda one: one.batch.first_seq)
        if row < len(told):
            behind_s = looked.at.sent_s - looked.staleness_ms / 1_000 - told[row].commit_s
            if behind_s > COMMIT_S:
                self.verdict.wrong(DIRTY, f"{looked} is {behind_s * 1_000:.0f} ms older than it says")

    def _spans(self) -> None:
        """Removed to gone."""
        for place, gone_s in self._gone_s.items():
            removed_s = self._removed_s.get(place)
            if removed_s is not None and gone_s - removed_s < self._reclaim_delay_s:
                span_ms = (gone_s - removed_s) * 1_000
                self.verdict.wrong(EARLY, f"{place} is gone {span_ms:.0f} ms after it was removed")

    # ------------------------------------------------------------ replicas

    def _equal(self) -> None:
        """Replay says what leaders and snapshots say."""
        for shard, told in enumerate(self._journals.told):
            machine = Machine(shard, Limits(), self._journals.shards)
            for one in told:
                try:
                    for event in decode_batch(one.batch.payload):
                        machine.apply(event)
                        self.verdict.checked_states += isinstance(event, ev.StateChecked)
                except AssertionError as error:
                    self.verdict.wrong(FORKS, f"I6: shard {shard} seq {one.batch.first_seq}: {error!r}")
                    break
                machine.mark_durable(machine.seq)
                digest = self._journals.digests.get((shard, machine.seq))
                if digest is not None:
                    self.verdict.checked_digests += 1
                    if machine.digest() != digest:
                        self.verdict.wrong(FORKS, f"I6: the snapshot of shard {shard} at seq {machine.seq}")

    # ------------------------------------------------------------ for those who ask further, after `judge`

    def settled(self) -> None:
        """With nobody writing any more, no budget is on its way for ever."""
        under_way = self._witness.escrow.under_way()
        if under_way:
            self.verdict.wrong(QUOTA, f"with nobody writing any more, {under_way}")

    def used(self) -> int:
        """Blocks of the tenant that are in use at the end."""
        return self._witness.used.get(("tenant", self._tenant), [0, 0])[1]

    @property
    def moves(self) -> int:
        """How often budget moved."""
        return self._witness.escrow.moves
