"""Tells every replica what an engine holds in its own tiers, in the background, and again what was missed."""

import logging
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from threading import Event, Thread
from types import TracebackType
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from metaservice.wire.schemas_events import ReportOutcome

from .aio import AsyncClient
from .breaker import Backoff, new_random
from .cache_mirror import CacheMirror, Change, Changes, Items
from .client import Client
from .config import ClientConfig
from .errors import NOT_REGISTERED, PASSING, REJECTED
from .notices import Notices
from .results import now_ms
from .router_results import ReportResult

REPORT_BLOCKS_MAX = 4_096
REPORT_TOKENS_MAX = 1 << 20
"""Told in one report: a body of at most 4 MiB."""
REPORTS_A_TURN = 16
"""To one replica, before the others get their turn."""
_PENDING_SLACK = 10_000
_AGAIN_MS_MIN = 200
_AGAIN_MS_MAX = 10_000
_REFUSED_MS = 30_000
"""A replica that publishes no cache events, or knows no such engine, is asked this seldom."""
_BEATS = 4
"""Heartbeats within the time in which one must come."""


class ReporterStats(Struct, frozen=True):
    """What a reporter did: `reports` and `blocks` told (to each replica), `snapshots` among the reports,
    `refused` items, `left_out` blocks (beyond `blocks_max`, or of a salt or adapter that the
    service does not take), and the `replicas` that are up to date now."""

    reports: int
    blocks: int
    snapshots: int
    refused: int
    left_out: int
    replicas: int


class _Report(Struct):
    """A report as it is, or was, sent: when no answer came the very same is sent again."""

    number: int
    base: int | None
    items: Items
    cleared: bool


class _Replica:
    """One replica: what it was told, and what it still has to be told."""

    def __init__(self, url: str, config: ClientConfig) -> None:
        self.url = url
        self.client = Client(replace(config, url=url, raise_errors=False))
        self.told = 0
        """The number of the last report that it took; 0: a snapshot is next."""
        self.pending: dict[Change, None] = {}
        self.cleared = False
        self.unanswered: _Report | None = None
        self.beat_ms = 0
        self.again_ms = 0
        self.backoff = Backoff(_AGAIN_MS_MIN, _AGAIN_MS_MAX, new_random())

    def forget(self) -> None:
        """It has to be told all."""
        self.told = 0
        self.pending.clear()
        self.cleared = False
        self.unanswered = None

    def learn(self, changes: Changes, blocks: int) -> None:
        """Something changed. What it will be told in a snapshot anyway is not noted."""
        if not self.told and self.unanswered is None:
            return
        if changes.cleared:
            self.pending.clear()
            self.cleared = True
        self.pending.update(dict.fromkeys(changes.told))
        if len(self.pending) > 2 * blocks + _PENDING_SLACK:
            self.forget()  # it was away for so long that all there is is less


class CacheReporter:
    """Keeps what the engine says it holds and tells all replicas: changes soon after they came, everything to
    a replica that missed something, heartbeats in between. Its methods never wait for the service and never
    raise for it; they may be called from any thread or event loop. It speaks for whom its client speaks, and
    tells everything anew under each new incarnation.

    `start` it in the process that uses it (a thread does not survive a fork), `close` it at the end: what it
    told is then hidden within seconds.
    """

    def __init__(
        self,
        client: Client | AsyncClient,
        *,
        flush_ms: int = 50,
        find_ms: int = 10_000,
        blocks_max: int = 1_000_000,
    ) -> None:
        """It has connections of its own, made as `client`'s config says. `flush_ms`: changes are told that
        long after the first of them; `find_ms`: how often it looks for new replicas."""
        self._config = config = client.config
        self._who = client.who
        self._flush_s = flush_ms / 1_000
        self._find_ms = find_ms
        self._mirror = CacheMirror(blocks_max)
        self._notices = Notices()
        self._replicas = {url: _Replica(url, config) for url in config.urls}
        self._members: frozenset[str] = frozenset()
        self._found_ms = 0
        self._incarnation = ""
        self._number = time.time_ns() // 1_000
        """Above all numbers that an earlier reporter of the same incarnation used."""
        self._reports = self._blocks = self._snapshots = self._refused = 0
        self._changed = Event()
        self._stopping = False
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what the engine says

    def stored(
        self,
        tier: str,
        hashes: Sequence[int],
        token_ids: Sequence[int],
        *,
        parent: int | None = None,
        lora: str = "",
        salt: str = "",
    ) -> None:
        """Blocks that follow each other are in `tier` (`gpu`, `cpu`, `storage`) now, the first one below the
        block of event hash `parent` (None: it begins a prompt). `token_ids`: of all of them. Raises
        ValueError for what cannot be: a hash outside of u64 (make signed ones of it: modulo 2**64), a token
        id outside of u32, another number of ids than so many a block."""
        self._mirror.stored(tier, hashes, token_ids, parent, lora, salt)
        self._changed.set()

    def removed(self, tier: str, hashes: Iterable[int]) -> None:
        """Blocks are not in `tier` any more. Raises ValueError for a tier that cannot be."""
        self._mirror.removed(tier, hashes)
        self._changed.set()

    def cleared(self) -> None:
        """All tiers are empty."""
        self._mirror.cleared()
        self._changed.set()

    # -- its life

    def start(self) -> None:
        """Begin to tell. A second call does nothing."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="ucm-cache-reporter", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop. Waits for a call in progress, at most its deadline."""
        self._stopping = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join(self._config.timeout_ms / 1_000 + 1)
        for replica in self._replicas.values():
            replica.client.close(cut=True)

    @property
    def stats(self) -> ReporterStats:
        """What it did so far."""
        current = sum(
            bool(replica.told) and not replica.pending and replica.unanswered is None
            for replica in list(self._replicas.values())
        )
        return ReporterStats(
            self._reports, self._blocks, self._snapshots, self._refused, self._mirror.left_out, current
        )

    def _run(self) -> None:
        while not self._stopping:
            try:
                pause_ms = self.turn()
            except Exception:
                logging.getLogger("metaservice.client").exception("a fault of the cache reporter")
                pause_ms = _AGAIN_MS_MAX
            if self._changed.wait(pause_ms / 1_000) and not self._stopping:
                time.sleep(self._flush_s)  # what comes together is told together
            self._changed.clear()

    def turn(self) -> int:
        """Tell every replica what is due; in how many ms to look again."""
        engine, incarnation = self._who.id, self._who.incarnation
        changes = self._mirror.take()
        if self._who.kind != "engine" or not incarnation:
            for replica in self._replicas.values():
                replica.forget()
            return 1_000
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            for replica in self._replicas.values():
                replica.forget()
                replica.again_ms = 0
        self._find()
        next_ms = self._found_ms + self._find_ms
        direct = any(replica.told for replica in self._replicas.values() if replica.url in self._members)
        for replica in list(self._replicas.values()):
            if direct and replica.url not in self._members:
                replica.forget()  # a balancer's address: whoever is behind it is told by its own
                continue
            replica.client.act_as(engine, incarnation)
            replica.learn(changes, len(self._mirror))
            next_ms = min(next_ms, self._tell(replica))
        return max(1, min(1_000, next_ms - now_ms()))

    def _find(self) -> None:
        """Who the replicas are, now and then: each has to be told by itself."""
        if now_ms() < self._found_ms + self._find_ms:
            return
        self._found_ms = now_ms()
        for replica in list(self._replicas.values()):
            seen = replica.client.cluster()
            if seen.failure is not None:
                continue
            self._members = frozenset(member.url.rstrip("/") for member in seen.members if member.url)
            for url in self._members - self._replicas.keys():
                try:
                    self._replicas[url] = _Replica(url, self._config)
                except ValueError:
                    self._notices.say(logging.WARNING, "reporter url", f"a replica names {url[:200]!r}")
            for url in self._replicas.keys() - self._members - set(self._config.urls):
                self._replicas.pop(url).client.close(cut=True)
            return

    # -- to one replica

    def _tell(self, replica: _Replica) -> int:
        """Send it what it lacks; when it has to be told again at the latest."""
        for _ in range(REPORTS_A_TURN):
            now = now_ms()
            if now < replica.again_ms:
                return replica.again_ms
            report = replica.unanswered or self._next(replica)
            if report is None:
                return replica.beat_ms
            replica.unanswered = report
            result = replica.client.report_cache(
                report.number,
                report.base,
                stored=report.items.stored,
                removed=report.items.removed,
                cleared=report.cleared,
            )
            self._judge(replica, report, result)
        return now_ms()

    def _next(self, replica: _Replica) -> _Report | None:
        """What to say next; None: nothing yet."""
        snapshot = not replica.told
        if snapshot:
            replica.pending = dict.fromkeys(self._mirror.all())
        elif not (replica.pending or replica.cleared):
            if now_ms() < replica.beat_ms:
                return None
            return _Report(replica.told, replica.told, Items([], []), False)
        items = self._mirror.items(replica.pending, REPORT_BLOCKS_MAX, REPORT_TOKENS_MAX)
        for change in [*islice(replica.pending, items.changes)]:
            del replica.pending[change]
        self._number += 1
        cleared, replica.cleared = replica.cleared, False
        return _Report(self._number, None if snapshot else replica.told, items, cleared)

    def _judge(self, replica: _Replica, report: _Report, result: ReportResult) -> None:
        """What its answer means."""
        if result.failure is not None:
            self._failed(replica, result.failure, result.detail)
            return
        replica.backoff.reset()
        replica.unanswered = None
        replica.beat_ms = now_ms() + result.visible_ms // _BEATS
        if result.want or result.number > report.number:
            # It missed something, or has heard a later one than we know of.
            self._number = max(self._number, result.number)
            replica.forget()
            if result.number > report.number or report.base is None:
                replica.again_ms = now_ms() + replica.backoff.next_ms()
            return
        refused = [
            outcome
            for outcome in (*result.stored, *result.removed)
            if outcome not in (ReportOutcome.taken, ReportOutcome.held)
        ]
        if refused:
            self._refused += len(refused)
            self._notices.say(
                logging.WARNING, "reporter items", f"{len(refused)} items refused: {refused[0][:64]}"
            )
        replica.told = report.number
        self._reports += 1
        self._blocks += report.items.changes
        self._snapshots += report.base is None

    def _failed(self, replica: _Replica, failure: str, detail: str) -> None:
        if failure in PASSING:
            # Perhaps it was taken: the very same again.
            replica.again_ms = now_ms() + replica.backoff.next_ms()
            return
        replica.forget()
        if failure != NOT_REGISTERED:
            self._notices.say(
                logging.WARNING, f"reporter {failure}", f"{replica.url}: {failure} {detail}"[:500]
            )
        patient = failure in (REJECTED + "events_off", REJECTED + "not_published")
        replica.again_ms = now_ms() + (_REFUSED_MS if patient else replica.backoff.next_ms())
