"""One hard quota over four shards, whose leaders are killed every few seconds:
`python tests/torture/quota.py --seconds 60`.

Twelve writers fill and free the blocks of one tenant, each in every shard in turn, so that budget has to move
between shards all the time; nothing evicts for them. A leader of a shard is killed every five seconds and
started again. The journals, merged in the order of their commits, say whether the sum of what is in use ever
passed the quota, and whether budget was lost, doubled, or used without a grant. At the end the writers only
fill: 95 % of the quota must be theirs. The last line is one JSON object; the exit status is 1 when anything
was not as it must be.
"""

import argparse
import json
import logging
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
from metaservice.cli.local.replicas import LocalReplica
from metaservice.client import Client, ClientConfig
from tests.torture.cluster_journals import Journals
from tests.torture.cluster_judge import QUOTA, Judge, Verdict
from tests.torture.cluster_load import TENANT, Engine, instance_of
from tests.torture.cluster_record import Record
from tests.torture.cluster_site import SHARDS, Site, furnish, timing, worker
from tests.torture.cluster_speech import Routes

TURN_S = 4.0
"""How long a writer stays in a shard."""
DOWN_S = 1.0
FILL_TIMEOUT_S = 60.0
FILL_SHARE = 0.95
QUIET_S = 6.0
FREE_SHARE = 0.35
"""Of what a writer does while there are kills: free what it wrote. It frees less than it writes, so that the
quota is met all the time."""


class Filler(Engine):
    """A writer that goes from shard to shard, writes, and frees what it wrote there."""

    def __init__(self, number: int, routes: Routes, record: Record, root: str, ttl_ms: int) -> None:
        super().__init__(f"q{number}", number % SHARDS, routes, record, root, ttl_ms, ttl_ms)
        self.filling = False
        """Whether it only writes from now on."""
        self._first = number
        self._mine: dict[int, list[list[bytes]]] = {shard: [] for shard in range(SHARDS)}

    def _act(self) -> None:
        shard = (self._first + int(time.monotonic() / TURN_S)) % SHARDS
        if shard != self.shard:
            self.shard, self.instance = shard, instance_of(shard)
        mine = self._mine[shard]
        if not self.filling and mine and self._rng.random() < FREE_SHARE:
            self._remove(mine.pop(self._rng.randrange(len(mine))))
            return
        keys = [self._rng.randbytes(16) for _ in range(self._rng.randint(1, 6))]
        self.write(keys)
        mine.append(keys)


@dataclass
class Outcome:
    """The last line of a run."""

    kills: int
    shards: int
    writers: int
    acked_commits: int
    quota_blocks: int
    used_blocks_max: int
    quota_overshoot: int
    budget_moves: int
    """Grants and returns in the journals."""
    filled_blocks: int
    filled_share: float
    refused_blocks: int
    problems: int
    ttl_s: float
    seconds: float
    seed: int

    def good(self) -> bool:
        """Whether the run passes."""
        full = self.filled_share >= FILL_SHARE and self.refused_blocks > 0
        return not self.problems and not self.quota_overshoot and full and self.budget_moves > 0


@dataclass(frozen=True)
class Wanted:
    """What a run is to be."""

    seconds: float = 60.0
    every_s: float = 5.0
    writers: int = 12
    quota_blocks: int = 2_000
    ttl_ms: int = 2_000
    replicas: int = 3
    etcd_members: int = 3
    seed: int = 1


def run(folder: Path, wanted: Wanted, note: Callable[[str], None]) -> tuple[Outcome, Verdict]:
    """One run. Raises LocalFailed when the cluster cannot be started."""
    began_s = time.monotonic()
    settings = timing(wanted.ttl_ms)
    record = Record()
    with ExitStack() as stack:
        site = stack.enter_context(
            Site(
                folder,
                replicas=wanted.replicas,
                etcd_members=wanted.etcd_members,
                settings=settings,
            )
        )
        storage = folder / "storage"
        storage.mkdir()
        furnish(site.urls, str(storage), wanted.quota_blocks, eviction="reject")
        stack.callback(worker(site.urls, folder).kill)
        journals = Journals(site.dsn, SHARDS)
        routes = Routes(site.urls)
        writers = [
            Filler(number, routes, record, str(storage), wanted.ttl_ms) for number in range(wanted.writers)
        ]
        journals.start()
        for writer in writers:
            writer.start()
        try:
            kills = _kill(site, wanted, note)
            for replica in site.replicas:
                if not replica.running:
                    record.wrong("faults", f"{replica.name} ended by itself: see {replica.log}")
            site.await_ready()
            for writer in writers:
                writer.filling = True
            _fill(site, wanted.quota_blocks, note)
        finally:
            for writer in writers:
                writer.halt.set()
        for writer in writers:
            writer.join()
        time.sleep(QUIET_S)
        journals.stop()
    judge = Judge(record, journals, TENANT, settings["reclaim_delay_ms"])
    verdict = judge.judge()
    judge.settled()
    filled = judge.used()
    outcome = Outcome(
        kills=kills,
        shards=SHARDS,
        writers=wanted.writers,
        acked_commits=len(record.commits),
        quota_blocks=wanted.quota_blocks,
        used_blocks_max=verdict.used_max,
        quota_overshoot=verdict.counts[QUOTA] + max(0, verdict.used_max - wanted.quota_blocks),
        budget_moves=judge.moves,
        filled_blocks=filled,
        filled_share=round(filled / wanted.quota_blocks, 4),
        refused_blocks=record.refused.get("quota_tenant", 0),
        problems=sum(verdict.counts.values()),
        ttl_s=wanted.ttl_ms / 1_000,
        seconds=round(time.monotonic() - began_s, 1),
        seed=wanted.seed,
    )
    return outcome, verdict


def _kill(site: Site, wanted: Wanted, note: Callable[[str], None]) -> int:
    """Kill a leader every few seconds, each shard's in turn; how often it was done."""
    began_s = time.monotonic()
    kills = 0
    down: list[tuple[float, LocalReplica]] = []
    while time.monotonic() - began_s < wanted.seconds:
        now_s = time.monotonic()
        for since_s, replica in [one for one in down if now_s - one[0] >= DOWN_S]:
            replica.launch()
            down.remove((since_s, replica))
        if now_s - began_s >= (kills + 0.5) * wanted.every_s:
            victim = site.leader(kills % SHARDS)
            if victim is not None:
                victim.crash()
                kills += 1
                down.append((time.monotonic(), victim))
                note(f"kill {kills}: {victim.name}, leader of shard {(kills - 1) % SHARDS}")
        time.sleep(0.05)
    for _, replica in down:
        replica.launch()
    return kills


def _fill(site: Site, quota_blocks: int, note: Callable[[str], None]) -> None:
    """Until the quota is full as it must be, or it takes too long."""
    deadline_s = time.monotonic() + FILL_TIMEOUT_S
    with Client(ClientConfig(url=site.urls, admin_timeout_ms=20_000)) as operator:
        while time.monotonic() < deadline_s:
            used: int = operator.get_json(f"/v1/tenants/{TENANT}")["usage"]["blocks"]
            if used >= quota_blocks * FILL_SHARE:
                break
            time.sleep(0.2)
    note(f"the tenant uses {used} of {quota_blocks} blocks")


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="A hard quota over shards whose leaders are killed.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every-s", type=float, default=5.0)
    parser.add_argument("--writers", type=int, default=12)
    parser.add_argument("--quota-blocks", type=int, default=2_000)
    parser.add_argument("--ttl-ms", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    logging.getLogger("metaservice.client").setLevel(logging.CRITICAL)
    started_s = time.monotonic()

    def note(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - started_s:7.1f} s  {text}\n")
        sys.stderr.flush()

    wanted = Wanted(
        seconds=args.seconds,
        every_s=args.every_s,
        writers=args.writers,
        quota_blocks=args.quota_blocks,
        ttl_ms=args.ttl_ms,
        seed=args.seed,
    )
    with temporary_folder() as folder:
        try:
            outcome, verdict = run(folder, wanted, note)
        except LocalFailed as error:
            keep(folder)
            sys.stderr.write(f"error: {error}\ndata and logs are in {folder}\n")
            return 2
        for problem in verdict.problems:
            sys.stderr.write(problem[:1_000] + "\n")
        if not outcome.good():
            keep(folder)
            sys.stderr.write(f"data and logs are in {folder}\n")
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        return 0 if outcome.good() else 1


if __name__ == "__main__":
    sys.exit(main())
