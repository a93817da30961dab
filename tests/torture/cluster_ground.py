"""What every fault needs: who leads what, when service is back, and everything whole again afterwards."""

import json
import random
import time
from collections.abc import Callable, Sequence
from urllib.request import Request, urlopen

from metaservice.cli.local.process import LocalFailed
from metaservice.cli.local.replicas import LocalReplica
from tests.torture.cluster_probe import Prober, Window
from tests.torture.cluster_record import Record
from tests.torture.cluster_site import Site
from tests.torture.cluster_speech import Routes

BACK_TIMEOUT_S = 60.0
WHOLE_TIMEOUT_S = 90.0
LOOK_S = 0.05
QUIET_S = 1.0


class Ground:
    """One cluster under torture."""

    def __init__(
        self,
        site: Site,
        routes: Routes,
        record: Record,
        probers: Sequence[Prober],
        ttl_s: float,
        rng: random.Random,
        note: Callable[[str], None],
    ) -> None:
        """`note` tells people what goes on."""
        self.site = site
        self.routes = routes
        self.record = record
        self.probers = probers
        self.ttl_s = ttl_s
        self.rng = rng
        self.note = note
        self.shards = tuple(range(site.shards))
        self._killed: set[str] = set()

    def leader(self) -> tuple[LocalReplica, dict[int, int]]:
        """The leader of a shard drawn by chance, and what it leads: shard -> epoch."""
        order = list(self.shards)
        self.rng.shuffle(order)
        for shard in order:
            replica = self.site.leader(shard)
            if replica is not None:
                led = self.led(replica)
                if led:
                    return replica, led
        raise LocalFailed("no shard has a leader")

    def led(self, replica: LocalReplica) -> dict[int, int]:
        """Shard -> epoch, of what a replica says that it leads."""
        said = replica.status() or {"shards": []}
        return {row["shard"]: row["epoch"] for row in said["shards"] if row["role"] == "leader"}

    def other_than(self, leader: LocalReplica) -> LocalReplica:
        """Any other one."""
        return self.rng.choice([one for one in self.site.replicas if one is not leader])

    def kill(self, victim: LocalReplica) -> None:
        """SIGKILL; it stays down until everything is mended."""
        self._killed.add(victim.name)
        victim.crash()

    def await_back(self, shards: Sequence[int], since_s: float) -> None:
        """Until a write and a lookup that were asked after `since_s` went well on each of the shards."""
        deadline_s = time.monotonic() + BACK_TIMEOUT_S
        waiting = set(shards)
        while waiting:
            waiting = {shard for shard in waiting if not self._back(shard, since_s)}
            if waiting and time.monotonic() > deadline_s:
                self.record.wrong("faults", f"shards {sorted(waiting)} are not back after {BACK_TIMEOUT_S} s")
                return
            time.sleep(LOOK_S)

    def _back(self, shard: int, since_s: float) -> bool:
        prober = self.probers[shard]
        return all(times and times[-1][0] >= since_s for times in (prober.writes, prober.lookups))

    def mend(self) -> None:
        """Undo every fault; returns once everything runs and every shard is served."""
        site = self.site
        site.proxies.heal()
        for replica in site.replicas:
            if replica.running:
                replica.thaw()
        if site.etcd is not None:
            site.etcd.thaw()
            site.etcd.start()
        site.postgres.thaw()
        if not self.database_answers():
            self.note("PostgreSQL is started again")
            site.postgres.stop()
            site.postgres.start()
        for replica in site.replicas:
            if not replica.running:
                if replica.name not in self._killed:
                    self.record.wrong("faults", f"{replica.name} ended by itself: see {replica.log}")
                replica.launch()
        self._killed.clear()
        try:
            site.await_ready(WHOLE_TIMEOUT_S)
        except LocalFailed as error:
            self.record.wrong("faults", f"the cluster did not become whole: {error}")
        self.await_back(self.shards, time.time())
        time.sleep(QUIET_S)

    def database_answers(self) -> bool:
        """Whether a statement goes through, past all links."""
        try:
            return self.site.postgres.execute("SELECT 1") == "1"
        except LocalFailed:
            return False

    def await_database(self) -> float:
        """Until it answers; when that was."""
        deadline_s = time.monotonic() + BACK_TIMEOUT_S
        while not self.database_answers():
            if time.monotonic() > deadline_s:
                self.record.wrong("faults", "PostgreSQL does not answer")
                break
            time.sleep(LOOK_S)
        return time.time()

    def hand_over(self, shard: int) -> Window:
        """A planned handover, to whom the leader likes."""
        window = Window(f"handover of shard {shard}", time.time(), (shard,), planned=True)
        body = json.dumps({"to": ""}).encode()
        url = f"{self.rng.choice(self.site.urls)}/v1/cluster/shards/{shard}/handover"
        asking = Request(url, body, {"content-type": "application/json"}, method="POST")
        try:
            with urlopen(asking, timeout=15) as answer:
                answer.read()
        except OSError as error:
            self.record.wrong("faults", f"handover of shard {shard}: {error!r}")
        self.await_back((shard,), time.time())
        time.sleep(QUIET_S)
        return window
