"""Torture of a whole cluster: `python tests/torture/cluster.py --kills 25 --pauses 10 --partitions 5`.

Three replicas, PostgreSQL, three etcd members and a worker, all real processes, on the loopback address.
Engines write blocks whose bytes prove themselves, look up, hold leases and read, under a hard quota of a
tenant over all shards; a prober a shard tells how long it was away. Meanwhile replicas, PostgreSQL and etcd
are killed, stopped and cut off, one fault at a time, and in the end the journals say whether every answer was
right (see cluster_judge.py). The last line is one JSON object; the exit status is 1 when anything was not.

`unavailable_*_s`: from a fault until both a write and a lookup with a lease that were asked for afterwards
went well on a shard that it hit (p50), and the longest time that any shard was away for any reason (max).
Where a fault cuts everybody off, the time counts from its end, because nobody could do any better before:
writes, while PostgreSQL is down, stopped or full (lookups go on and count from the fault); both, while all of
etcd is stopped, or one process of PostgreSQL is, which may hold the row that everybody needs.
"""

import argparse
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from metaservice.cli.local.places import keep, temporary_folder
from metaservice.cli.local.process import LocalFailed
from metaservice.client import Client, ClientConfig
from tests.torture.cluster_faults import chosen, fill_disk
from tests.torture.cluster_ground import Ground
from tests.torture.cluster_journals import Journals
from tests.torture.cluster_judge import DIRTY, EARLY, FORKS, LOST, QUOTA, Judge, Verdict
from tests.torture.cluster_load import TENANT, Engine, instance_of
from tests.torture.cluster_probe import PROBE, Prober, Window, median
from tests.torture.cluster_record import Record
from tests.torture.cluster_site import SHARDS, Site, furnish, timing, worker
from tests.torture.cluster_speech import Routes, Unanswered

WARM_S = 3.0
QUOTA_BLOCKS = 480
DELETED_TIMEOUT_S = 60.0
SWEEP_KEYS = 400
LOOKUPS_S = 2.0
"""Lookups that go on without a database are answered within so long, on a busy machine."""
FAULTY = ("Traceback", "StateDiverged", "(I6)", "CorruptJournal")
"""What no replica may ever log."""


@dataclass
class Outcome:
    """The last line of a run."""

    kills: int
    pauses: int
    partitions: int
    acked_commits: int
    lost_commits: int
    dirty_reads: int
    early_reclaims: int
    quota_overshoot: int
    forks: int
    unavailable_p50_s: float
    unavailable_max_s: float
    ttl_s: float
    handover_max_s: float
    problems: int
    """Everything that must not happen and did, the above included."""
    lookups: int
    blocks_read: int
    journal_events: int
    used_blocks_max: int
    quota_blocks: int
    disk_full: str
    seconds: float
    seed: int

    def good(self) -> bool:
        """Whether the run passes."""
        late = self.unavailable_p50_s > self.ttl_s + 1 or self.unavailable_max_s > self.ttl_s + 3
        idle = not (self.acked_commits and self.lookups and self.blocks_read)
        return not (self.problems or late or idle or self.handover_max_s > 1.0)


@dataclass(frozen=True)
class Wanted:
    """What a run is to be."""

    kills: int = 1
    pauses: int = 0
    partitions: int = 0
    handovers: int = 1
    disk: bool = False
    ttl_ms: int = 5_000
    engines: int = 8
    replicas: int = 3
    etcd_members: int = 3
    seed: int = 1


@dataclass
class Evidence:
    """What a run leaves to be judged."""

    record: Record
    journals: Journals
    windows: list[Window]
    reclaim_delay_ms: int


class Torture:
    """One run."""

    def __init__(self, folder: Path, wanted: Wanted, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._wanted = wanted
        self._note = note
        self._rng = random.Random(wanted.seed)
        self._settings = timing(wanted.ttl_ms)
        self._disk = "not asked for"

    def run(self) -> tuple[Outcome, Verdict, Evidence]:
        """Start everything, hurt it, judge. Raises LocalFailed when it cannot be started."""
        began_s = time.monotonic()
        wanted = self._wanted
        with ExitStack() as stack:
            site = stack.enter_context(
                Site(
                    self._folder,
                    replicas=wanted.replicas,
                    etcd_members=wanted.etcd_members,
                    settings=self._settings,
                )
            )
            self._note(f"{wanted.replicas} replicas lead {SHARDS} shards; logs are in {self._folder}")
            evidence = self._hurt(site, stack)
            self._logs(site, evidence.record)
        self._note("judging")
        verdict = Judge(evidence.record, evidence.journals, TENANT, evidence.reclaim_delay_ms).judge()
        return self._outcome(verdict, evidence, time.monotonic() - began_s), verdict, evidence

    # ------------------------------------------------------------ the run

    def _hurt(self, site: Site, stack: ExitStack) -> Evidence:
        storage = self._folder / "storage"
        storage.mkdir()
        furnish(site.urls, str(storage), QUOTA_BLOCKS)
        stack.callback(worker(site.urls, self._folder).kill)
        journals = Journals(site.dsn, SHARDS)
        record, routes = Record(), Routes(site.urls)
        count = self._wanted.engines
        engines = [self._engine(number, routes, record, str(storage)) for number in range(count)]
        probers = [Prober(shard, routes, record) for shard in range(SHARDS)]
        journals.start()
        threads: list[Engine | Prober] = [*engines, *probers]
        for thread in threads:
            thread.start()
        ground = Ground(site, routes, record, probers, self._wanted.ttl_ms / 1_000, self._rng, self._note)
        windows: list[Window] = []
        try:
            ground.await_back(ground.shards, time.time())
            time.sleep(WARM_S)
            self._faults(ground, windows)
        finally:
            for thread in threads:
                thread.halt.set()
        for thread in threads:
            thread.join()
        for window in windows:
            window.judge(probers)
        self._settle(site, record, self._engine(count, routes, record, str(storage)))
        journals.stop()
        self._caught_up(site, journals, record)
        return Evidence(record, journals, windows, self._settings["reclaim_delay_ms"])

    def _engine(self, number: int, routes: Routes, record: Record, root: str) -> Engine:
        settings = self._settings
        return Engine(
            f"e{number}",
            number % SHARDS,
            routes,
            record,
            root,
            settings["reclaim_delay_ms"],
            settings["lease_ms_max"],
        )

    def _faults(self, ground: Ground, windows: list[Window]) -> None:
        wanted = self._wanted
        faults = chosen(wanted.kills, wanted.pauses, wanted.partitions, etcd=wanted.etcd_members > 0)
        self._rng.shuffle(faults)
        if wanted.disk:
            self._disk = f"skipped: {ground.site.no_disk}" if ground.site.no_disk else "done"
            faults += [] if ground.site.no_disk else [fill_disk]
        for number, fault in enumerate(faults, 1):
            troubles = ground.record.troubles
            window = fault(ground)
            self._close(ground, windows, window)
            found = ground.record.troubles - troubles
            trouble = f"; {found} PROBLEMS" if found else ""
            self._note(f"{number}/{len(faults)} {window.what}: {window.worst}{trouble}")
        for number in range(wanted.handovers):
            window = ground.hand_over(number % SHARDS)
            self._close(ground, windows, window)
            self._note(f"{window.what}: away for {window.away_s[number % SHARDS]:.2f} s")

    @staticmethod
    def _close(ground: Ground, windows: list[Window], window: Window) -> None:
        if not window.planned:
            ground.mend()
        window.end_s = time.time()
        windows.append(window)
        window.judge(ground.probers)
        if window.stopped_s > max(LOOKUPS_S, ground.ttl_s / 2):
            what = f"{window.what}: lookups did not go on, but stopped for {window.stopped_s:.1f} s"
            ground.record.wrong("faults", what)

    # ------------------------------------------------------------ the end

    def _settle(self, site: Site, record: Record, reader: Engine) -> None:
        """With nobody writing: every block that was ever acknowledged is looked up, those found are read, and
        what was removed is deleted in time."""
        by_shard: dict[int, list[bytes]] = {shard: [] for shard in range(SHARDS)}
        for commit in record.commits:
            if not commit.key.startswith(PROBE):
                by_shard[commit.at.shard].append(commit.key)
        for shard, keys in by_shard.items():
            reader.shard, reader.instance = shard, instance_of(shard)
            try:
                for at in range(0, len(keys), SWEEP_KEYS):
                    reader.look_up(list(dict.fromkeys(keys[at : at + SWEEP_KEYS])), 1_000)
            except Unanswered as error:
                record.wrong("faults", f"the last look at shard {shard}: {error}")
        deadline_s = time.monotonic() + DELETED_TIMEOUT_S
        with Client(ClientConfig(url=site.urls, admin_timeout_ms=20_000)) as operator:
            while (left := operator.get_json(f"/v1/tenants/{TENANT}")["usage"]["deleting_blocks"]) > 0:
                if time.monotonic() > deadline_s:
                    record.wrong("faults", f"{left} blocks are not deleted after {DELETED_TIMEOUT_S:g} s")
                    break
                time.sleep(0.2)

    def _caught_up(self, site: Site, journals: Journals, record: Record) -> None:
        """Every replica has applied what the journals hold; each checked every sum in them on its way."""
        deadline_s = time.monotonic() + 20
        while True:
            heads = journals.heads()
            behind = []
            for replica in site.replicas:
                said = replica.status() or {"shards": []}
                seqs = {row["shard"]: row["seq"] for row in said["shards"]}
                behind += [
                    f"{replica.name} is at seq {seqs.get(shard)} of shard {shard}, which ends at {head}"
                    for shard, head in enumerate(heads)
                    if seqs.get(shard, 0) < head
                ]
            if not behind:
                return
            if time.monotonic() > deadline_s:
                for what in behind:
                    record.wrong("faults", what)
                return
            time.sleep(0.2)

    @staticmethod
    def _logs(site: Site, record: Record) -> None:
        for replica in site.replicas:
            for line in replica.log.read_text(encoding="utf-8", errors="replace").splitlines():
                if any(word in line for word in FAULTY):
                    record.wrong("faults", f"{replica.log} has: {line[:200]}")

    def _outcome(self, verdict: Verdict, evidence: Evidence, seconds: float) -> Outcome:
        wanted, record = self._wanted, evidence.record
        hurt = [one for one in evidence.windows if not one.planned]
        hit = [away_s for one in hurt for shard, away_s in one.away_s.items() if shard in one.shards]
        return Outcome(
            kills=wanted.kills,
            pauses=wanted.pauses,
            partitions=wanted.partitions,
            acked_commits=len(record.commits),
            lost_commits=verdict.counts[LOST],
            dirty_reads=verdict.counts[DIRTY],
            early_reclaims=verdict.counts[EARLY],
            quota_overshoot=verdict.counts[QUOTA] + max(0, verdict.used_max - QUOTA_BLOCKS),
            forks=verdict.counts[FORKS],
            unavailable_p50_s=round(median(hit), 2),
            unavailable_max_s=round(max((max(one.away_s.values()) for one in hurt), default=0.0), 2),
            ttl_s=wanted.ttl_ms / 1_000,
            handover_max_s=round(
                max((one.away_s[one.shards[0]] for one in evidence.windows if one.planned), default=0.0), 2
            ),
            problems=sum(verdict.counts.values()),
            lookups=len(record.lookups),
            blocks_read=record.reads,
            journal_events=verdict.events,
            used_blocks_max=verdict.used_max,
            quota_blocks=QUOTA_BLOCKS,
            disk_full=self._disk,
            seconds=round(seconds, 1),
            seed=wanted.seed,
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Hurt a cluster under load, and hold it to its word.")
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--pauses", type=int, default=10)
    parser.add_argument("--partitions", type=int, default=5)
    parser.add_argument("--handovers", type=int, default=8)
    parser.add_argument("--no-disk", action="store_true", help="do not fill PostgreSQL's disk")
    parser.add_argument("--ttl-ms", type=int, default=5_000)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--no-etcd", action="store_true", help="PostgreSQL's rows are the leases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave data and logs behind")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    args = parse(arguments)
    logging.getLogger("metaservice.client").setLevel(logging.CRITICAL)
    started_s = time.monotonic()

    def note(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - started_s:7.1f} s  {text}\n")
        sys.stderr.flush()

    wanted = Wanted(
        kills=args.kills,
        pauses=args.pauses,
        partitions=args.partitions,
        handovers=args.handovers,
        disk=not args.no_disk,
        ttl_ms=args.ttl_ms,
        engines=args.engines,
        etcd_members=0 if args.no_etcd else 3,
        seed=args.seed,
    )
    with temporary_folder() as folder:
        try:
            outcome, verdict, evidence = Torture(folder, wanted, note).run()
        except LocalFailed as error:
            keep(folder)
            sys.stderr.write(f"error: {error}\ndata and logs are in {folder}\n")
            return 2
        for problem in verdict.problems:
            sys.stderr.write(problem[:1_000] + "\n")
        note(
            f"{verdict.checked_states} sums and {verdict.checked_digests} snapshots agree; refused writes "
            f"{evidence.record.refused}; {evidence.record.unanswered} calls unanswered"
        )
        if args.keep or not outcome.good():
            keep(folder)
            sys.stderr.write(f"data and logs are in {folder}\n")
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        return 0 if outcome.good() else 1


if __name__ == "__main__":
    sys.exit(main())
