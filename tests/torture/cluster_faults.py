"""What is done to a cluster. Each fault hurts, waits until service is back, and says when it may be expected
to be; `Ground.mend` heals."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

from metaservice.cli.local.process import LocalFailed, signal_all
from tests.torture.cluster_ground import Ground
from tests.torture.cluster_journals import NAME
from tests.torture.cluster_probe import Window
from tests.torture.cluster_proxy import BOTH, Direction
from tests.torture.cluster_zombie import zombie

Fault = Callable[[Ground], Window]

RESTART_S = 1.0
TERMINATIONS = 12
BALLAST = "ballast"
LEASE_LEFT = 0.6
"""At least so much of a lease is left at any time: it is renewed every fifth of it, and a margin is kept."""
SERVING = f"FROM pg_stat_activity WHERE datname = 'ucm' AND application_name <> '{NAME}'"


# ---------------------------------------------------------------- killed


def kill_leader(ground: Ground) -> Window:
    """SIGKILL to a replica that leads; it starts again."""
    victim, led = ground.leader()
    window = Window(f"kill {victim.name}, leader of {sorted(led)}", time.time(), tuple(led))
    ground.kill(victim)
    ground.await_back(window.shards, window.began_s)
    time.sleep(RESTART_S)
    return window


def kill_other(ground: Ground) -> Window:
    """SIGKILL to another replica than a leader drawn by chance, while that goes on; it may lead something
    itself."""
    leader, _ = ground.leader()
    victim = ground.other_than(leader)
    led = ground.led(victim)
    window = Window(f"kill {victim.name}, leader of {sorted(led)}", time.time(), tuple(led))
    ground.kill(victim)
    ground.await_back(ground.shards, window.began_s)
    time.sleep(RESTART_S)
    return window


def kill_backend(ground: Ground) -> Window:
    """SIGKILL to one process of PostgreSQL that serves a replica: PostgreSQL ends all others and recovers."""
    began_s = time.time()
    pid = ground.rng.choice(_backends(ground))
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    back_s = ground.await_database()
    ground.await_back(ground.shards, back_s)
    return _without_database(ground, f"kill PostgreSQL's process {pid}", began_s, back_s)


def terminate_backends(ground: Ground) -> Window:
    """pg_terminate_backend to all that serve replicas, several times: commits in flight end either way."""
    window = Window("terminate PostgreSQL's backends", time.time(), ())
    for _ in range(TERMINATIONS):
        with suppress(LocalFailed):
            ground.site.postgres.execute(f"SELECT count(pg_terminate_backend(pid)) {SERVING}")
        time.sleep(ground.rng.random() * 0.1)
    ground.await_back(ground.shards, time.time())
    return window


def kill_postmaster(ground: Ground) -> Window:
    """SIGKILL to all of PostgreSQL; it comes back a second later. Lookups go on."""
    began_s = time.time()
    ground.site.postgres.crash()
    time.sleep(RESTART_S)
    ground.site.postgres.start()
    back_s = ground.await_database()
    ground.await_back(ground.shards, back_s)
    return _without_database(ground, "kill PostgreSQL", began_s, back_s)


def kill_member(ground: Ground) -> Window:
    """SIGKILL to a member of etcd; two are left."""
    assert ground.site.etcd is not None
    member = ground.rng.choice(ground.site.etcd.members)
    window = Window(f"kill etcd member {member.name}", time.time(), ())
    member.crash()
    time.sleep(ground.ttl_s)
    ground.await_back(ground.shards, time.time())
    return window


# ---------------------------------------------------------------- stopped


def pause_leader(ground: Ground) -> Window:
    """SIGSTOP to a replica that leads, for less than its lease: nobody takes over, or only just."""
    victim, led = ground.leader()
    window = Window(f"pause {victim.name}, leader of {sorted(led)}", time.time(), tuple(led))
    victim.freeze()
    time.sleep(ground.ttl_s * ground.rng.uniform(0.3, 1.0))
    victim.thaw()
    ground.await_back(window.shards, time.time())
    return window


def pause_other(ground: Ground) -> Window:
    """SIGSTOP to another replica, for two leases."""
    leader, _ = ground.leader()
    victim = ground.other_than(leader)
    led = ground.led(victim)
    window = Window(f"pause {victim.name}, leader of {sorted(led)}", time.time(), tuple(led))
    victim.freeze()
    time.sleep(2 * ground.ttl_s)
    victim.thaw()
    ground.await_back(ground.shards, time.time())
    return window


def pause_backend(ground: Ground) -> Window:
    """SIGSTOP to a process of PostgreSQL that serves a replica, for less than a lease. When it holds a
    shard's row, nobody can write there: counted from its wakening."""
    began_s = time.time()
    pid = ground.rng.choice(_backends(ground))
    signal_all([pid], signal.SIGSTOP)
    time.sleep(ground.ttl_s * 0.8)
    signal_all([pid], signal.SIGCONT)
    back_s = time.time()
    ground.await_back(ground.shards, back_s)
    return Window(f"pause PostgreSQL's process {pid}", began_s, (), writes_s=back_s, lookups_s=back_s)


def pause_postgres(ground: Ground) -> Window:
    """SIGSTOP to all of PostgreSQL, for one lease and more. Lookups go on."""
    began_s = time.time()
    ground.site.postgres.freeze()
    time.sleep(ground.ttl_s + 1)
    ground.site.postgres.thaw()
    back_s = time.time()
    ground.await_back(ground.shards, back_s)
    return _without_database(ground, "pause PostgreSQL", began_s, back_s)


def pause_member(ground: Ground) -> Window:
    """SIGSTOP to a member of etcd, its leader by chance, for two leases."""
    assert ground.site.etcd is not None
    member = ground.rng.choice(ground.site.etcd.members)
    window = Window(f"pause etcd member {member.name}", time.time(), ())
    member.freeze()
    time.sleep(2 * ground.ttl_s)
    member.thaw()
    ground.await_back(ground.shards, time.time())
    return window


def pause_etcd(ground: Ground) -> Window:
    """SIGSTOP to all of etcd, for two leases: every leader stops in time and comes back by itself."""
    assert ground.site.etcd is not None
    began_s = time.time()
    ground.site.etcd.freeze()
    time.sleep(2 * ground.ttl_s)
    ground.site.etcd.thaw()
    back_s = time.time()
    ground.await_back(ground.shards, back_s)
    return Window("pause etcd", began_s, (), writes_s=back_s, lookups_s=back_s)


# ---------------------------------------------------------------- cut off


def cut(stores: tuple[str, ...], directions: tuple[Direction, ...] = BOTH, *, loud: bool = False) -> Fault:
    """A partition: a replica that leads is cut off from these stores, for two leases."""

    def fault(ground: Ground) -> Window:
        victim, led = ground.leader()
        how = "loudly" if loud else "silently"
        what = f"cut {victim.name} off {' and '.join(stores)} {how}, {'/'.join(directions)}"
        window = Window(f"{what}, leader of {sorted(led)}", time.time(), tuple(led))
        links = [link for store in stores for link in ground.site.links(victim.name, store)]
        ground.site.proxies.cut(links, directions, loud=loud)
        ground.await_back(window.shards, window.began_s + 2 * ground.ttl_s)
        ground.site.proxies.heal(links)
        return window

    return fault


# ---------------------------------------------------------------- full


def fill_disk(ground: Ground) -> Window:
    """No byte is left for PostgreSQL for a while. Lookups go on."""
    disk = ground.site.disk
    assert disk is not None
    began_s = time.time()
    ballast = disk / BALLAST
    _fill(ballast)
    time.sleep(ground.ttl_s)
    ballast.unlink()
    if not ground.site.postgres.pids:
        ground.site.postgres.start()
    back_s = ground.await_database()
    ground.await_back(ground.shards, back_s)
    return _without_database(ground, "PostgreSQL's disk is full", began_s, back_s)


def _without_database(ground: Ground, what: str, began_s: float, back_s: float) -> Window:
    """Nobody had PostgreSQL: writes count from its return, and lookups go on, as long as the leases hold.
    Where these are rows of PostgreSQL they end, too."""
    if ground.site.etcd is not None:
        return Window(what, began_s, (), writes_s=back_s, lookups_on_s=back_s)
    held_s = min(back_s, began_s + LEASE_LEFT * ground.ttl_s)
    return Window(what, began_s, (), writes_s=back_s, lookups_s=back_s, lookups_on_s=held_s)


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def _backends(ground: Ground) -> list[int]:
    """Processes of PostgreSQL that serve replicas. Raises LocalFailed when there are none."""
    found = ground.site.postgres.execute(f"SELECT pid {SERVING}")
    if not found:
        raise LocalFailed("no process of PostgreSQL serves a replica")
    return [int(line) for line in found.splitlines()]


KILLS: tuple[Fault, ...] = (
    kill_leader, kill_leader, kill_backend, kill_leader, kill_member, kill_leader, kill_postmaster,
    kill_leader, kill_other, terminate_backends,
)  # fmt: skip
PAUSES: tuple[Fault, ...] = (
    zombie, pause_leader, pause_postgres, zombie, pause_member, pause_backend, pause_etcd, zombie,
    pause_other, pause_leader,
)  # fmt: skip
POSTGRES_CUTS: tuple[Fault, ...] = (
    cut(("postgres",)),
    cut(("postgres",), ("in",)),
    cut(("postgres",), loud=True),
    cut(("postgres",), ("out",)),
)
PARTITIONS: tuple[Fault, ...] = (
    cut(("etcd",)),
    POSTGRES_CUTS[0],
    cut(("etcd", "postgres")),
    POSTGRES_CUTS[1],
    cut(("etcd",), ("in",)),
    POSTGRES_CUTS[2],
    cut(("etcd",), ("out",)),
    POSTGRES_CUTS[3],
    cut(("etcd",), loud=True),
)
"""Each is done in turn, as often as is asked for."""
OF_ETCD = frozenset({kill_member, pause_member, pause_etcd, *PARTITIONS}) - frozenset(POSTGRES_CUTS)


def chosen(kills: int, pauses: int, partitions: int, *, etcd: bool) -> list[Fault]:
    """So many faults of each kind; without etcd none of etcd's."""
    return [
        fault
        for faults, count in ((KILLS, kills), (PAUSES, pauses), (PARTITIONS, partitions))
        for fault in islice(cycle([one for one in faults if etcd or one not in OF_ETCD]), count)
    ]
