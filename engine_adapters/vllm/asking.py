"""Lookups in the background: a few threads, each question once, within the time that the scheduler waits.

An answer is what this engine can use of what the service said: it is cut before the first block whose storage
cannot be opened here. While a shard has no leader its followers are asked, who give no leases.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.openings import Openings
from metaservice.client import Client, LookupResult
from metaservice.client.errors import (
    BREAKER_OPEN,
    CONNECTION_LOST,
    NOT_LEADER,
    REFUSED_CONNECTION,
    REJECTED,
    TIMEOUT,
)

log = logging.getLogger(__name__)

THREADS = 2
WAITING_MAX = 4_096
"""Questions beyond this many are misses at once."""
KEYS_MAX = 16_384
"""What a lookup may name; of a longer prompt the beginning is looked up."""
LEFT_MS_MIN = 5
"""With less time than this left the service is not asked."""
LEADERLESS = frozenset(
    {TIMEOUT, REFUSED_CONNECTION, CONNECTION_LOST, BREAKER_OPEN, NOT_LEADER, REJECTED + "not_ready"}
)
"""Failures that a shard whose leader is gone shows."""
STALENESS_MS_MAX = 1_000
"""While nobody leads the instance's shard, a follower's answer may be so old. It comes without a lease."""
UNLEASED_MS = 2_000
"""How long such an answer is used. The service keeps bytes longer than any answer may be old; and what is
read is verified in any case, so the worst is a load that fails."""
_NS_PER_US = 1_000


class Answer(Struct, frozen=True):
    """`hits` blocks from the first key on can be loaded: their places are the rows of `found`, under a lease
    that is renewed until the ticket is released or dropped (a follower's answer has none).

    `cut` says what ended the run (`none`, `miss`, `limit`, `switch`, `storage`), `failure` why nothing is
    known (None: it is), `tier` the kind of storage of the first block. `began_ns`, `ended_ns`: of the call,
    by the wall clock; 0 without one.
    """

    hits: int
    found: LookupResult
    cut: str = "miss"
    failure: str | None = None
    tier: str = ""
    began_ns: int = 0
    ended_ns: int = 0


def miss(keys: int, *, cut: str = "miss", failure: str | None = None) -> Answer:
    """Nothing was found, or nothing was asked."""
    return Answer(0, LookupResult(asked=keys, cut=cut), cut, failure)


class Question:
    """One lookup. `answer` is set once; `lease` is what it came with."""

    __slots__ = (
        "answer", "asked_ms", "dropped", "generation", "instance", "keys", "lease", "traceparent", "until_ms",
    )  # fmt: skip

    def __init__(
        self, instance: str, keys: Sequence[bytes], traceparent: str, asked_ms: int, generation: int
    ) -> None:
        self.instance = instance
        self.keys = keys
        self.traceparent = traceparent
        self.asked_ms = asked_ms
        self.generation = generation
        self.answer: Answer | None = None
        self.lease: str | None = None
        self.until_ms = 0
        """Of an answer without a lease: when it is not used any more."""
        self.dropped = False


class Limits(Struct, frozen=True):
    """Of each lookup: how long one may wait for it, of which a call may take `timeout_ms`; and its lease."""

    wait_ms: int
    timeout_ms: int
    lease_ms: int


class Asking:
    """The threads and the questions that wait for them."""

    def __init__(
        self,
        client: Client,
        limits: Limits,
        openings: Openings,
        counts: Counts,
        clock: Callable[[], int],
        unchanged: Callable[[str], bool],
        answered: Callable[[Question, Answer], None],
        heard: Callable[[LookupResult], None],
    ) -> None:
        """`unchanged`: whether an instance still is what the engine computes with. `answered` takes each
        answer, `heard` each word of the service; both are called from these threads."""
        self._client = client
        self._limits = limits
        self._openings = openings
        self._counts = counts
        self._clock = clock
        self._unchanged = unchanged
        self._answered = answered
        self._heard = heard
        self._changed = Condition()
        self._waiting: deque[Question] = deque()
        self._closing = False
        self._busy = 0
        self._threads = [
            Thread(target=self._run, name=f"ucm-lookup-{number}", daemon=True) for number in range(THREADS)
        ]

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def put(self, question: Question) -> bool:
        """Leave a question; False when too many wait. Returns at once."""
        with self._changed:
            if self._closing or len(self._waiting) >= WAITING_MAX:
                return False
            self._waiting.append(question)
            self._changed.notify()
        return True

    def close(self) -> None:
        """Ask nothing more; what waits is a miss."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def rest(self, seconds: float) -> None:
        """Wait until no call is under way, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, seconds)

    def join(self, seconds: float) -> None:
        """Wait for the threads' end, at most so long in all."""
        until_s = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing and not self._waiting:
                    return
                question = self._waiting.popleft()
                self._busy += 1
            try:
                if not question.dropped:
                    self._answer(question)
            finally:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def _answer(self, question: Question) -> None:
        left_ms = question.asked_ms + self._limits.wait_ms - self._clock()
        if self._closing:
            answer = miss(len(question.keys), failure="closed")
        elif left_ms < LEFT_MS_MIN:
            answer = miss(len(question.keys), failure="late")
        else:
            answer = self._asked(question, left_ms)
        if answer.failure is not None:
            self._counts.add(f"lookup_failures_{answer.failure.removeprefix('rejected:')}")
        self._answered(question, answer)

    def _asked(self, question: Question, left_ms: int) -> Answer:
        keys = list(question.keys[:KEYS_MAX])
        if not self._unchanged(question.instance):
            return miss(len(keys), failure="adapter_changed")
        began_ns = time.time_ns()
        try:
            # With room for a second question: the leader may be gone.
            found = self._call(question, keys, left_ms * 3 // 5, lease_ms=self._limits.lease_ms, renew=True)
            question.lease = found.lease
            if found.failure in LEADERLESS:
                found = self._followed(question, keys, found)
            self._heard(found)
            answer = self._usable(found, question)
        except Exception:  # a fault of ours costs a miss, and the thread goes on
            log.exception("a lookup failed")
            return miss(len(keys), failure="internal")
        return replace(answer, began_ns=began_ns, ended_ns=time.time_ns())

    def _followed(self, question: Question, keys: list[bytes], found: LookupResult) -> LookupResult:
        """What a follower says, when no leader answered."""
        left_ms = question.asked_ms + self._limits.wait_ms - self._clock()
        if left_ms < LEFT_MS_MIN:
            return found
        stale = self._call(question, keys, left_ms, staleness_ms_max=STALENESS_MS_MAX)
        if stale.failure is not None:
            return found
        question.until_ms = self._clock() + UNLEASED_MS
        self._counts.add("lookups_by_followers")
        return stale

    def _call(self, question: Question, keys: list[bytes], patience_ms: int, **named: Any) -> LookupResult:
        at_ns = time.perf_counter_ns()
        found = self._client.lookup(
            question.instance,
            keys,
            traceparent=question.traceparent,
            timeout_ms=max(1, min(self._limits.timeout_ms, patience_ms)),
            **named,
        )
        took_us = (time.perf_counter_ns() - at_ns) // _NS_PER_US
        self._counts.add("lookup_calls")
        self._counts.add("lookup_us", took_us)
        self._counts.top("lookup_us_max", took_us)
        return found

    def _usable(self, found: LookupResult, question: Question) -> Answer:
        """What of it can be read here."""
        if found.failure is not None or not found.hits:
            return Answer(0, found, found.cut, found.failure)
        until_ms = question.asked_ms + self._limits.wait_ms
        good = [
            index not in found.storages or self._openings.usable(storage, max(1, until_ms - self._clock()))
            for index, storage in enumerate(found.storage_table)
        ]
        hits = found.hits
        if not all(good):
            hits = next((row for row, index in enumerate(found.storages) if not good[index]), hits)
        cut = found.cut
        if hits < found.hits:
            self._counts.add("unreachable_blocks", found.hits - hits)
            found, cut = first_rows(found, hits), "storage"
        tier = found.storage_table[found.storages[0]].kind if hits else ""
        return Answer(hits, found, cut, None, tier)


def first_rows(found: LookupResult, rows: int) -> LookupResult:
    """The answer without what comes behind the first `rows` blocks; the lease stays."""
    return replace(
        found,
        hits=rows,
        cut_at=rows,
        keys=found.keys[:rows],
        locations=found.locations[:rows],
        generations=found.generations[:rows],
        storages=found.storages[:rows],
        checksums=found.checksums[: rows * len(found.parts)],
    )
