"""Durable writes on PostgreSQL beside the embedded journal, in one run, and where the time goes.

The service is one process with one shard; PostgreSQL runs on the same machine with fsync on. What the journal
can take by itself is measured with batches of the same bytes and no service, so that one sees how far from
its limit it works.
"""

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from metaservice.cli.local.postgres import LocalPostgres
from metaservice.core.events import WriteFinished
from metaservice.journal.codec import decode_batch, encode_batch
from metaservice.journal.postgres import PostgresJournal, open_reader
from metaservice.journal.postgres_migrate import migrate
from metaservice.journal.postgres_settings import PostgresSettings
from tests.bench.bench_bare import BareServer
from tests.bench.bench_clients import Cell, Figures, Fleet
from tests.bench.bench_report import Fact
from tests.bench.bench_service import NEVER_SNAPSHOT, Service, set_up

CLIENTS = 4
KEYS = 256
ALONE_S = 1.0
_APPEND = "ucm_meta_journal_append_seconds"


class Profile(msgspec.Struct, kw_only=True):
    """Seconds of one measured cell, by who spent them."""

    wall_s: float
    appending_s: float
    """Wall time during which an append was in flight."""
    batches: int
    loop_cpu_s: float
    """Processor time of the thread that serves: HTTP, decoding, deciding, encoding."""
    journal_cpu_s: float
    """Processor time of the service's other threads: speaking to the journal."""
    database_cpu_s: float


def postgres_facts(directory: Path, seconds: float, repeats: int, say: Callable[[str], None]) -> list[Fact]:
    """Writes on both journals, and where PostgreSQL's time goes."""
    cell = Cell(what="write", keys=KEYS, clients=CLIENTS, seconds=seconds, blocks=0)
    facts: list[Fact] = []
    with LocalPostgres(fsync=True) as database, BareServer(directory, 1024) as bare:
        dsn = database.create_database("bench")
        flags = {
            "sqlite": (),
            "postgres": ("--journal", "postgres", "--postgres-dsn", dsn),
        }
        best: dict[str, Figures] = {}
        profile: Profile | None = None
        for kind, journal in flags.items():
            with Service(directory / kind, *NEVER_SNAPSHOT, *journal) as service:
                set_up(service.port)
                with Fleet(CLIENTS, service, bare) as fleet:
                    for turn in range(repeats):
                        say(f"writes on {kind}, turn {turn + 1}")
                        before = _Spent(service, database if kind == "postgres" else None)
                        figures = fleet.measure(cell, bare=False)
                        spent = before.since()
                        if kind not in best or figures.keys_per_s > best[kind].keys_per_s:
                            best[kind] = figures
                            profile = spent if kind == "postgres" else profile
        assert profile is not None
        facts += [_written(kind, figures) for kind, figures in best.items()]
        facts.append(
            Fact(
                name="PostgreSQL beside SQLite",
                value=best["postgres"].keys_per_s / best["sqlite"].keys_per_s,
                unit="times",
                note=f"start + finish of {KEYS} keys, {CLIENTS} clients, durable, one shard in one process",
            )
        )
        facts += _profile_facts(profile)
        say("the journal by itself")
        facts.append(_alone(dsn))
    return facts


def _written(kind: str, figures: Figures) -> Fact:
    return Fact(
        name=f"start + finish on {kind}",
        value=figures.keys_per_s,
        unit="keys/s",
        aim=">= 80k" if kind == "postgres" else "",
        note=f"{CLIENTS} clients, {KEYS} keys a call, durable; p50 {figures.p50_us / 1000:.1f} ms, "
        f"p99 {figures.p99_us / 1000:.1f} ms; server cpu {figures.cpu_us_per_key:.1f} us a key",
    )


class _Spent:
    """Clocks of everybody, read before; `since` gives the differences."""

    def __init__(self, service: Service, database: LocalPostgres | None) -> None:
        self._service = service
        self._database = database
        self._before = self._read()

    def _read(self) -> list[float]:
        told = httpx.get(f"http://127.0.0.1:{self._service.port}/metrics").text
        values = {
            line.rpartition(" ")[0].partition("{")[0]: float(line.rpartition(" ")[2])
            for line in told.splitlines()
            if line.startswith((f"{_APPEND}_sum", f"{_APPEND}_count"))
        }
        threads = {int(path.name): _cpu_s(path) for path in Path(f"/proc/{self._service.pid}/task").iterdir()}
        loop_s = threads.pop(self._service.pid)
        pids = self._database.pids if self._database is not None else ()
        return [
            time.perf_counter(), values[f"{_APPEND}_sum"], values[f"{_APPEND}_count"], loop_s,
            sum(threads.values()), sum(_cpu_s(Path(f"/proc/{pid}")) for pid in pids),
        ]  # fmt: skip

    def since(self) -> Profile:
        """What was spent since."""
        wall, appending, batches, loop, journal, database = (
            after - before for before, after in zip(self._before, self._read(), strict=True)
        )
        return Profile(
            wall_s=wall, appending_s=appending, batches=int(batches), loop_cpu_s=loop, journal_cpu_s=journal,
            database_cpu_s=database,
        )  # fmt: skip


def _cpu_s(process: Path) -> float:
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it ended meanwhile
    return (int(fields[11]) + int(fields[12])) / 100


def _profile_facts(profile: Profile) -> list[Fact]:
    wall = profile.wall_s
    shares = (
        ("time with an append in flight", profile.appending_s, "others decide and decode meanwhile"),
        (
            "serving thread busy",
            profile.loop_cpu_s,
            "HTTP, decoding, deciding, encoding: the limit when near 100",
        ),
        ("journal thread busy", profile.journal_cpu_s, "speaking to PostgreSQL"),
        ("PostgreSQL busy", profile.database_cpu_s, "all its processes"),
    )
    found = [
        Fact(name=name, value=100 * spent / wall, unit="% of wall", note=note) for name, spent, note in shares
    ]
    found.append(
        Fact(
            name="one append",
            value=1000 * profile.appending_s / max(1, profile.batches),
            unit="ms",
            note=f"{profile.batches} batches",
        )
    )
    return found


def _alone(dsn: str) -> Fact:
    """What the journal takes when nobody decides anything: batches as the service made them."""
    settings = PostgresSettings(dsn)
    source = open_reader(settings, 0)
    batches = [decode_batch(batch.payload) for batch in source.read(0)]
    source.close()
    events = [event for batch in batches[len(batches) // 2 :] for event in batch][:8]
    published = sum(event.published for event in events if isinstance(event, WriteFinished))
    payload = encode_batch(events)
    alone = PostgresSettings(dsn, "alone")
    migrate(alone)
    journal = PostgresJournal(alone, 0, "bench")
    journal.open()
    epoch, seq = journal.claim(), 0
    began_s, appends = time.perf_counter(), 0
    while time.perf_counter() - began_s < ALONE_S:
        journal.append(seq + 1, seq + len(events), epoch, payload)
        seq += len(events)
        appends += 1
    took_s = time.perf_counter() - began_s
    journal.close()
    return Fact(
        name="the journal by itself",
        value=appends * published / took_s,
        unit="keys/s",
        note=f"start + finish, {len(payload) / 1024:.0f} KiB an append, "
        f"{1000 * took_s / appends:.2f} ms each, fsync on",
    )
