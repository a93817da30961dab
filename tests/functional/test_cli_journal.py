"""`ucm-meta journal verify|dump` on journals that hold and on journals that do not, in SQLite and in
PostgreSQL."""

import json
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metaservice.cli.local.postgres import LocalPostgres
from metaservice.core import commands as cmd
from metaservice.core.capture import capture
from metaservice.core.machine import Machine
from metaservice.core.model import Limits
from metaservice.journal.codec import encode_batch
from metaservice.journal.port import Journal
from metaservice.journal.postgres import PostgresJournal
from metaservice.journal.postgres_migrate import check_cluster, migrate
from metaservice.journal.postgres_settings import PostgresSettings
from metaservice.journal.sqlite import SqliteJournal
from metaservice.replica.cut import cut
from tests.functional.cli_house import ROOT, UCM_META, Ran, ucm_meta
from tests.unit.replica_house import FINGERPRINT, chain, finish_of, start_of

SECRET = "hunter2"
ROUNDS = 6


class House:
    """A journal with blocks in it, two snapshots and a trimmed begin, and how the command is told of it."""

    def __init__(
        self, journal: Journal, sql: Callable[[str], object], *options: str, **variables: str
    ) -> None:
        self.sql = sql
        self.options = options
        self.variables = variables
        journal.open()
        self._fill(journal)
        self.trimmed_seq = journal.trim(journal.head())
        self.head_seq = journal.head()
        self.batches = journal.size().batches
        journal.close()

    def _fill(self, journal: Journal) -> None:
        machine, now_ms = Machine(0, Limits()), 1_000_000
        epoch = journal.claim()
        done = 0

        def run(*commands: cmd.Command) -> list[Any]:
            nonlocal done
            replies, events = [], []
            for command in commands:
                reply, made = machine.execute(command, now_ms)
                replies.append(reply)
                events += made
            journal.append(done + 1, machine.seq, epoch, encode_batch(events))
            done = machine.seq
            machine.mark_durable(done)
            return replies

        run(
            cmd.TakeOver(epoch=epoch, cluster="c"),
            cmd.PutTenant(tenant="t"),
            cmd.PutStorage(
                storage="s", kind="s3", options={"root": "/s", "access_key": SECRET, "fsync": "none"}
            ),
            cmd.PutGroup(group="g", tenant="t", storages=("s",)),
            cmd.PutInstance(instance="i", group="g", fingerprint=FINGERPRINT),
            cmd.RegisterEngine(engine="e", incarnation="x", instance="i"),
        )
        for number in range(ROUNDS):
            (started,) = run(start_of(chain(4, 10 * number)))
            run(finish_of(started))
            if number in (2, 4):
                journal.snapshots.save(machine.seq, epoch, machine.digest(), capture(machine.state))

    def run(self, *words: str) -> Ran:
        command, *more = words
        return ucm_meta("journal", command, *self.options, *more, **self.variables)

    def verified(self) -> tuple[int, dict[str, Any]]:
        """Exit status, and the report on the one shard."""
        ran = self.run("verify", "--json")
        (report,) = json.loads(ran.stdout)["shards"]
        return ran.returncode, report

    def dumped(self, *words: str) -> list[dict[str, Any]]:
        ran = self.run("dump", *words)
        assert ran.returncode == 0, ran.stderr
        return [json.loads(line) for line in ran.stdout.splitlines()]


def in_sqlite(folder: Path) -> House:
    def sql(statement: str) -> object:
        connection = sqlite3.connect(folder / "journal.sqlite", isolation_level=None)
        try:
            return connection.execute(statement.replace("ucm.", "")).fetchall()
        finally:
            connection.close()

    return House(SqliteJournal(folder / "journal.sqlite", 0), sql, "--data", str(folder))


def in_postgres(dsn: str, server: LocalPostgres) -> House:
    settings = PostgresSettings(dsn)
    migrate(settings)
    check_cluster(settings, 1)
    database = dsn.rpartition("/")[2]
    return House(
        PostgresJournal(settings, 0, "r1"),
        lambda statement: server.execute(statement, database),
        UCM_POSTGRES_DSN=dsn,
    )


@pytest.fixture(params=["sqlite", "postgres"])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> House:
    if request.param == "sqlite":
        return in_sqlite(tmp_path)
    return in_postgres(request.getfixturevalue("postgres"), request.getfixturevalue("postgres_server"))


def test_a_journal_that_holds(house: House) -> None:
    status, report = house.verified()
    assert status == 0
    assert report["faults"] == []
    assert (report["first_seq"], report["head_seq"]) == (house.trimmed_seq + 1, house.head_seq)
    assert (report["batches"], report["epoch"]) == (house.batches, 1)
    assert [snapshot["replayed"] for snapshot in report["snapshots"]] == [False, True]
    text = house.run("verify").stdout
    assert f"seq {house.trimmed_seq + 1} to {house.head_seq}, epoch 1" in text
    assert "a replay comes to its digest" in text
    assert "FAULT" not in text


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("UPDATE ucm.journal SET crc = 1 WHERE first_seq = {last}", "checksum does not match"),
        ("DELETE FROM ucm.journal WHERE first_seq = {last}", "no batch begins here"),
        ("UPDATE ucm.journal SET epoch = 7 WHERE first_seq = {last}", "checksum does not match"),
    ],
)
def test_a_journal_that_does_not_hold(house: House, damage: str, fault: str) -> None:
    last = house.dumped()[-1]["seq"]
    house.sql(damage.format(last=last))
    status, report = house.verified()
    assert status == 1
    assert fault in report["faults"][0]
    ran = house.run("verify")
    assert (ran.returncode, "FAULT" in ran.stdout) == (1, True)
    assert house.run("dump").returncode == 1


def test_a_snapshot_whose_state_is_not_what_the_journal_says(tmp_path: Path, postgres: str) -> None:
    """Whole and well summed, yet of another history: only a replay tells."""
    settings = PostgresSettings(postgres)
    migrate(settings)
    check_cluster(settings, 1)
    journal = PostgresJournal(settings, 0, "r1")
    House(journal, lambda _: None)
    journal.open()
    machine, last = Machine(0, Limits()), journal.head()
    machine.execute(cmd.TakeOver(epoch=1, cluster="other"), 5)
    machine.state.seq = last
    journal.snapshots.save(last, 1, machine.digest(), capture(machine.state))
    journal.close()
    ran = ucm_meta("journal", "verify", "--json", UCM_POSTGRES_DSN=postgres)
    (report,) = json.loads(ran.stdout)["shards"]
    assert ran.returncode == 1
    assert "a replay comes to another digest" in report["faults"][0]


def test_a_damaged_snapshot_is_named(postgres: str, postgres_server: LocalPostgres) -> None:
    house = in_postgres(postgres, postgres_server)
    house.sql("UPDATE ucm.snapshot_chunk SET crc = crc + 1 WHERE number = 0")
    status, report = house.verified()
    assert status == 1
    assert "checksum of chunk 0" in " ".join(report["faults"])


def test_a_dump_is_the_events_one_a_line(house: House) -> None:
    events = house.dumped()
    assert [event["seq"] for event in events] == [*range(house.trimmed_seq + 1, house.head_seq + 1)]
    assert {event["epoch"] for event in events} == {1}
    some = house.dumped("--from", str(house.head_seq - 2), "--to", str(house.head_seq - 1))
    assert some == [event for event in events if event["seq"] in (house.head_seq - 2, house.head_seq - 1)]
    assert house.dumped("--from", str(house.head_seq + 1)) == []
    assert events[-1]["event"] == "write_finished"
    assert chain(1, 10 * (ROUNDS - 1))[0].hex() in json.dumps(events)


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
@pytest.mark.parametrize("tenants", [0, 2])
def test_d6_an_empty_journal_is_cut_verified_and_dumped(
    store: str, tenants: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    journal: Journal = SqliteJournal(tmp_path / "journal.sqlite", 0)
    where = {"UCM_DATA": str(tmp_path)}
    if store == "postgres":
        settings = PostgresSettings(request.getfixturevalue("postgres"))
        migrate(settings)
        check_cluster(settings, 1)
        journal = PostgresJournal(settings, 0, "r1")
        where = {"UCM_POSTGRES_DSN": settings.dsn}
    journal.open()
    machine = Machine(0, Limits())
    for number in range(tenants):
        first_seq = machine.seq + 1
        _, events = machine.execute(cmd.PutTenant(tenant=f"t{number}"), 1)
        journal.append(first_seq, machine.seq, journal.claim(), encode_batch(events))
        machine.mark_durable(machine.seq)
    for _ in range(2):
        assert cut(journal, 0, 1) == machine.seq
    journal.close()
    ran = ucm_meta("journal", "verify", "--json", **where)
    assert ran.returncode == 0
    (report,) = json.loads(ran.stdout)["shards"]
    assert (report["head_seq"], report["faults"]) == (machine.seq, [])
    assert [snapshot["seq"] for snapshot in report["snapshots"]] == [machine.seq]
    ran = ucm_meta("journal", "dump", **where)
    assert (ran.returncode, len(ran.stdout.splitlines())) == (0, machine.seq)


def test_no_secret_is_printed(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.sqlite", 0)
    house = House(journal, lambda _: None, "--data", str(tmp_path))
    ran = house.run("dump")
    assert SECRET not in ran.stdout
    whole = SqliteJournal(tmp_path / "whole" / "journal.sqlite", 0)
    whole.open()
    machine = Machine(0, Limits())
    _, events = machine.execute(
        cmd.PutStorage(storage="s", kind="s3", options={"root": "/s", "key": SECRET}), 1
    )
    whole.append(1, len(events), whole.claim(), encode_batch(events))
    whole.close()
    ran = ucm_meta("journal", "dump", "--data", str(tmp_path / "whole"))
    assert SECRET not in ran.stdout
    put = json.loads(ran.stdout.splitlines()[0])
    assert (put["event"], put["options"]) == ("storage_put", {"root": "/s", "key": "***"})


def test_a_trimmed_journal_begins_later(house: House) -> None:
    assert house.trimmed_seq > 0
    assert house.dumped("--from", "1", "--to", str(house.trimmed_seq)) == []
    assert house.dumped("--to", str(house.trimmed_seq + 1))[0]["seq"] == house.trimmed_seq + 1


@pytest.mark.parametrize("command", ["verify", "dump"])
def test_what_cannot_be_read_is_said_and_shows_no_password(command: str, tmp_path: Path) -> None:
    secret = {"UCM_POSTGRES_DSN": f"postgresql://u:{SECRET}@127.0.0.1:1/d"}
    for ran in (
        ucm_meta("journal", command),
        ucm_meta("journal", command, "--data", str(tmp_path)),
        ucm_meta("journal", command, "--data", str(tmp_path), **secret),
        ucm_meta("journal", command, "--timeout-ms", "500", **secret),
        ucm_meta("journal", command, "--dsn", f"mysql://u:{SECRET}@h/d"),
        ucm_meta("journal", command, "--help", **secret),
    ):
        assert ran.returncode == (0 if "Usage" in ran.stdout else 2)
        assert "ucm-meta journal" in ran.stderr + ran.stdout
        assert SECRET not in ran.stderr + ran.stdout


def test_a_database_without_a_cluster_is_said(postgres: str) -> None:
    ran = ucm_meta("journal", "verify", UCM_POSTGRES_DSN=postgres)
    assert ran.returncode == 2
    migrate(PostgresSettings(postgres))
    ran = ucm_meta("journal", "verify", UCM_POSTGRES_DSN=postgres)
    assert ran.returncode == 2
    assert "there is no cluster in" in ran.stderr


def test_a_dump_into_a_pipe_that_ends_early_is_quiet(tmp_path: Path) -> None:
    in_sqlite(tmp_path)
    command = [*UCM_META, "journal", "dump", "--data", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0
