"""The journal on a PostgreSQL whose servers are killed, stopped, made read-only, filled up, failed over."""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from metaservice.cli.local.postgres import LocalPostgres
from metaservice.cli.local.process import LocalFailed
from metaservice.journal.errors import (
    FateUnknown,
    Fenced,
    JournalBusy,
    JournalFull,
    JournalRegressed,
    JournalUnavailable,
)
from metaservice.journal.postgres import PostgresJournal, open_reader
from metaservice.journal.postgres_settings import PostgresSettings
from tests.functional.postgres_house import (
    CALL_MAX_S,
    OURS,
    TIMEOUT_MS,
    body,
    get_in,
    killing,
    opened,
    settings_of,
    until,
)

SLOW_INSERTS = """
    CREATE FUNCTION ucm.slowly() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_sleep(0.3); RETURN NEW; END $$;
    CREATE TRIGGER slowly BEFORE INSERT ON ucm.journal FOR EACH ROW EXECUTE FUNCTION ucm.slowly()
"""


@pytest.fixture(scope="module")
def own_server() -> Iterator[LocalPostgres]:
    """A server that tests here may stop and change, and leave working."""
    with LocalPostgres() as server:
        yield server


@pytest.fixture
def server(own_server: LocalPostgres) -> LocalPostgres:
    own_server.execute("DROP SCHEMA IF EXISTS ucm CASCADE")
    return own_server


# ---------------------------------------------------------------- killed servers


def test_servers_killed_in_the_middle_of_appends_lose_nothing_and_double_nothing(
    server: LocalPostgres, seed: int
) -> None:
    rng = random.Random(seed)
    settings = settings_of(server.dsn)
    seq = 0
    with opened(settings) as journal, killing(server.dsn, 0.02) as kills:
        epoch = claimed(journal)
        while kills[0] < 100:
            seq += 1
            get_in(journal, seq, epoch, body((seq, "x" * rng.randrange(3_000))))
    with opened(settings) as journal:
        rng = random.Random(seed)
        assert journal.head() == seq
        found = [(batch.first_seq, batch.epoch, batch.payload) for batch in journal.read(0)]
        assert found == [(n, epoch, body((n, "x" * rng.randrange(3_000)))) for n in range(1, seq + 1)]
        assert journal.size().batches == seq


def test_i5_racing_writers_and_take_overs_make_one_history(server: LocalPostgres, seed: int) -> None:
    settings = settings_of(server.dsn)
    acked: dict[int, tuple[int, bytes]] = {}
    over = threading.Event()
    errors: list[BaseException] = []
    takeovers = [0]

    def write(name: int, journal: PostgresJournal) -> None:
        rng = random.Random(seed * 100 + name)
        try:
            while not over.is_set():
                lead(journal, rng, name)
        except BaseException as error:
            errors.append(error)

    def lead(journal: PostgresJournal, rng: random.Random, name: int) -> None:
        try:
            epoch = journal.claim()
            seq = journal.head()
        except (JournalUnavailable, JournalBusy):
            return
        takeovers[0] += 1
        for _ in range(rng.randrange(1, 30)):
            payload = body((name, epoch, seq + 1))
            try:
                get_in(journal, seq + 1, epoch, payload)
            except Fenced:
                return
            seq += 1
            assert seq not in acked
            acked[seq] = (epoch, payload)

    with ExitStack() as stack:
        journals = [stack.enter_context(opened(settings, holder=f"r{name}")) for name in range(4)]
        threads = [threading.Thread(target=write, args=item) for item in enumerate(journals)]
        kills = stack.enter_context(killing(server.dsn, 0.1))
        for thread in threads:
            thread.start()
        until(lambda: (len(acked) > 200 and kills[0] > 20) or bool(errors), 30)
        over.set()
        for thread in threads:
            thread.join(30)
    assert errors == []
    assert takeovers[0] > 10
    seq = epoch = 0
    with opened(settings) as journal:
        for batch in journal.read(0):
            assert batch.first_seq == seq + 1
            assert batch.epoch >= epoch
            seq, epoch = batch.last_seq, batch.epoch
            assert acked.get(seq, (batch.epoch, batch.payload)) == (batch.epoch, batch.payload)
    assert max(acked) <= seq


def test_a_whole_server_killed_loses_nothing_that_was_confirmed(server: LocalPostgres) -> None:
    settings = settings_of(server.dsn)
    with opened(settings) as journal:
        epoch = journal.claim()
        for seq in range(1, 21):
            get_in(journal, seq, epoch, body(seq))
            if seq % 7 == 0:
                server.crash()
                with pytest.raises((FateUnknown, JournalUnavailable)):
                    journal.append(seq + 1, seq + 1, epoch, body(seq + 1))
                server.start()
        assert [batch.payload for batch in journal.read(0)] == [body(seq) for seq in range(1, 21)]


def test_i1_a_connection_that_went_away_while_idle_costs_nothing(server: LocalPostgres) -> None:
    with opened(settings_of(server.dsn)) as journal:
        epoch = journal.claim()
        for seq in range(1, 6):
            server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OURS}")
            until(lambda: count(server) == 0)
            journal.append(seq, seq, epoch, body(seq))


def test_i1_calls_that_are_cut_off_leak_no_connection(server: LocalPostgres, seed: int) -> None:
    rng = random.Random(seed)
    settings = replace(settings_of(server.dsn), timeout_ms=60)
    journal = PostgresJournal(settings, 0, "r1")
    for _ in range(15):
        try:
            journal.open()
            epoch, head = journal.claim(), journal.head()
            for seq in range(head + 1, head + 4):
                frozen = rng.random() < 0.2
                if frozen:
                    for pid in server.backend_pids:
                        os.kill(pid, signal.SIGSTOP)
                try:
                    journal.append(seq, seq, epoch, body(seq))
                finally:
                    if frozen:
                        server.thaw()
        except (FateUnknown, Fenced, JournalUnavailable, JournalBusy):
            pass
        journal.close()
        assert count(server) < 10
    until(lambda: count(server) == 0)


# ---------------------------------------------------------------- stopped servers (case D4)


def test_d4_no_call_hangs_while_every_server_is_stopped(server: LocalPostgres) -> None:
    settings = settings_of(server.dsn, timeout_ms=TIMEOUT_MS)
    with opened(settings) as journal:
        epoch = journal.claim()
        journal.append(1, 1, epoch, body(1))
        journal.snapshots.save(1, epoch, b"", [b"state"])
        server.freeze()
        try:
            calls: list[Callable[[], object]] = [
                journal.head, journal.size, journal.claim, lambda: list(journal.read(0)),
                journal.snapshots.latest, lambda: journal.trim(1), lambda: journal.report_follower("r2", 1),
                lambda: open_reader(settings, 0), lambda: journal.snapshots.save(1, 1, b"", []),
            ]  # fmt: skip
            for call in calls:
                refused_soon(call, JournalUnavailable)
            # its connection was lost above, and none can be made: nothing was sent
            refused_soon(lambda: journal.append(2, 2, epoch, body(2)), JournalUnavailable)
        finally:
            server.thaw()
        get_in(journal, 2, claimed(journal), body(2))
        assert [batch.payload for batch in journal.read(0)] == [body(1), body(2)]


def test_d4_an_append_to_a_stopped_server_ends_and_is_settled_when_it_goes_on(server: LocalPostgres) -> None:
    with opened(settings_of(server.dsn, timeout_ms=TIMEOUT_MS)) as journal:
        epoch = journal.claim()
        journal.append(1, 1, epoch, body(1))
        journal.append(2, 2, epoch, body(2))
        server.freeze()
        try:
            said = refused_soon(lambda: journal.append(3, 3, epoch, body(3)), FateUnknown)
            assert f"no answer within {TIMEOUT_MS} ms" in said
            refused_soon(lambda: journal.resolve(3, body(3)), FateUnknown)
        finally:
            server.thaw()
        until(lambda: not unavailable(journal.head))
        written = settled(journal, 3, body(3))
        assert journal.head() == (3 if written else 2)
        get_in(journal, journal.head() + 1, epoch, body("next"))


def test_d4_a_stopped_postmaster_stops_only_new_connections(server: LocalPostgres) -> None:
    settings = settings_of(server.dsn, timeout_ms=TIMEOUT_MS)
    with opened(settings) as journal:
        epoch = journal.claim()
        os.kill(server.pids[0], signal.SIGSTOP)
        try:
            get_in(journal, 1, epoch, body(1))
            refused_soon(lambda: open_reader(settings, 0), JournalUnavailable)
            get_in(journal, 2, epoch, body(2))
        finally:
            os.kill(server.pids[0], signal.SIGCONT)


def test_d4_a_server_stopped_inside_an_append_leaves_no_queue_behind_it(server: LocalPostgres) -> None:
    """It holds the shard's row, so nobody can say; each try must end, here and in the database."""
    with opened(settings_of(server.dsn, timeout_ms=TIMEOUT_MS)) as journal:
        epoch = journal.claim()
        journal.append(1, 1, epoch, body(1))
        server.execute(SLOW_INSERTS)
        appending = Call(lambda: journal.append(2, 2, epoch, body(2)))
        until(lambda: bool(waiting_pids(server, "PgSleep")))
        (pid,) = waiting_pids(server, "PgSleep")
        os.kill(pid, signal.SIGSTOP)
        assert isinstance(appending.error(), FateUnknown)
        try:
            for _ in range(3):
                refused_soon(lambda: journal.resolve(2, body(2)), FateUnknown)
            assert count(server) <= 3
        finally:
            os.kill(pid, signal.SIGCONT)
        get_in(journal, 2, epoch, body(2))
        assert [batch.payload for batch in journal.read(0)] == [body(1), body(2)]


# ---------------------------------------------------------------- what the server will not do


def test_a_server_that_became_read_only_is_left_and_found_again(server: LocalPostgres) -> None:
    settings = settings_of(server.dsn)
    with opened(settings) as journal:
        epoch = journal.claim()
        journal.append(1, 1, epoch, body(1))
        reader = open_reader(settings, 0)
        server.configure(default_transaction_read_only="on")
        try:
            until(lambda: server.execute("SHOW default_transaction_read_only") == "on")
            for _ in range(2):
                with pytest.raises(JournalUnavailable):
                    journal.append(2, 2, epoch, body(2))
                with pytest.raises(JournalUnavailable):
                    reader.head()
                with pytest.raises(JournalUnavailable):
                    list(reader.read(0))
            with pytest.raises(JournalUnavailable):
                journal.claim()
            assert count(server) == 0
        finally:
            server.configure(default_transaction_read_only="off")
            until(lambda: server.execute("SHOW default_transaction_read_only") == "off")
        journal.append(2, 2, epoch, body(2))
        assert reader.head() == 2
        reader.close()


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 8 MiB that other users may enter. Skipped where this process may not mount one."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if os.geteuid() != 0 or mount is None or umount is None:
        pytest.skip("needs the right to mount a small file system")
    place = Path(tempfile.mkdtemp(prefix="ucm-small-"))
    place.chmod(0o755)
    command = [mount, "-t", "tmpfs", "-o", "size=8m,mode=777", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run([umount, str(place)], check=True)
        place.rmdir()


def test_a_full_disk_refuses_writes_and_recovers_unaided(small_disk: Path) -> None:
    with LocalPostgres() as server:
        settings = settings_of(server.dsn)
        space = small_disk / "space"
        space.mkdir()
        owner = Path(f"/proc/{server.pids[0]}").stat()
        os.chown(space, owner.st_uid, owner.st_gid)
        server.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
        for table in ("journal", "snapshot_chunk"):
            server.execute(f"ALTER TABLE ucm.{table} SET TABLESPACE small")
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(2_000_000))
        with opened(settings) as journal:
            epoch, seq = journal.claim(), 0
            large = body("x" * 4_000)
            with pytest.raises(JournalFull):
                while True:
                    journal.append(seq + 1, seq + 1, epoch, large)
                    seq += 1
            assert seq > 5
            for _ in range(3):
                with pytest.raises(JournalFull):
                    journal.append(seq + 1, seq + 1, epoch, large)
                with pytest.raises(JournalFull):
                    journal.snapshots.save(seq, epoch, b"", [os.urandom(3_000_000)])
            assert (journal.head(), journal.snapshots.latest()) == (seq, None)
            assert len(list(journal.read(0))) == seq
            ballast.unlink()
            journal.append(seq + 1, seq + 1, epoch, large)
            assert journal.head() == seq + 1


# ---------------------------------------------------------------- a standby


def test_a_commit_that_its_standby_has_not_is_never_confirmed(server: LocalPostgres) -> None:
    """An administrator cancels the statement: PostgreSQL then says that it succeeded, and warns."""
    with opened(settings_of(server.dsn, timeout_ms=3_000)) as journal:
        epoch = journal.claim()
        journal.append(1, 1, epoch, body(1))
        server.configure(synchronous_standby_names="'nobody'")
        try:
            until(lambda: server.execute("SHOW synchronous_standby_names") == "nobody")
            appending = Call(lambda: journal.append(2, 2, epoch, body(2)))
            until(lambda: bool(waiting_pids(server, "SyncRep")))
            server.execute(f"SELECT pg_cancel_backend({waiting_pids(server, 'SyncRep')[0]})")
            assert isinstance(appending.error(), FateUnknown)
            with pytest.raises(FateUnknown):  # the settling waits for the standby too
                journal.resolve(2, body(2))
        finally:
            server.configure(synchronous_standby_names="''")
        until(lambda: server.execute("SHOW synchronous_standby_names") == "")
        assert journal.resolve(2, body(2)) is True
        journal.append(3, 3, epoch, body(3))


def test_d4_i1_a_failover_to_a_synchronous_standby_loses_nothing() -> None:
    with LocalPostgres() as primary, primary.standby() as standby:
        settings = both(primary, standby)
        settings_of(primary.dsn)
        with opened(settings) as journal:
            epoch = journal.claim()
            for seq in range(1, 11):
                journal.append(seq, seq, epoch, body(seq))
            primary.freeze()
            refused_soon(lambda: journal.append(11, 11, epoch, body(11)), FateUnknown, 2 * CALL_MAX_S)
            standby.promote()
            get_in(journal, 11, epoch, body(11))
            assert [batch.payload for batch in journal.read(0)] == [body(seq) for seq in range(1, 12)]
            primary.crash()


@pytest.mark.slow
def test_a_failover_that_lost_the_newest_history_raises_the_alarm() -> None:
    with LocalPostgres() as primary, primary.standby(synchronous=False) as standby:
        settings = both(primary, standby)
        settings_of(primary.dsn)
        with opened(settings) as leader:
            epoch = leader.claim()
            leader.append(1, 1, epoch, body(1))
            until(lambda: "1" in tried(standby, "SELECT head_seq FROM ucm.shard"))
            standby.stop()
            leader.append(2, 2, epoch, body(2))
            follower = open_reader(settings, 0)
            assert len(list(follower.read(0))) == 2
            primary.crash()
            standby.start()
            standby.promote()
            until(lambda: not unavailable(leader.claim))
            with pytest.raises(JournalRegressed) as caught:
                leader.head()
            assert (caught.value.head_seq, caught.value.known_seq) == (1, 2)
            with pytest.raises(JournalRegressed):
                list(follower.read(2))
            follower.close()
            leader.close()
            assert leader.open().head_seq == 1
            leader.append(2, 2, leader.claim(), body("another"))


# ---------------------------------------------------------------- tools


def claimed(journal: PostgresJournal) -> int:
    while True:
        try:
            return journal.claim()
        except (JournalUnavailable, JournalBusy):
            continue


def settled(journal: PostgresJournal, seq: int, payload: bytes) -> bool:
    """Whether it is in, once that can be said."""
    while True:
        try:
            return journal.resolve(seq, payload)
        except FateUnknown:
            time.sleep(0.01)


def count(server: LocalPostgres) -> int:
    """How many servers serve journals now."""
    return int(server.execute(f"SELECT count(*) FROM pg_stat_activity WHERE {OURS}"))


def waiting_pids(server: LocalPostgres, event: str) -> list[int]:
    """Servers of journals that wait for this."""
    rows = server.execute(f"SELECT pid FROM pg_stat_activity WHERE {OURS} AND wait_event = '{event}'")
    return [int(row) for row in rows.split()]


def refused_soon(call: Callable[[], object], error: type[Exception], within_s: float = CALL_MAX_S) -> str:
    """It raises this, and ends within a connect's and a statement's deadline; its message."""
    begun = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    assert time.monotonic() - begun < within_s
    return str(caught.value)


def tried(server: LocalPostgres, sql: str) -> str:
    """What it answers, '' when it cannot yet."""
    try:
        return server.execute(sql)
    except LocalFailed:
        return ""


def unavailable(call: Callable[[], object]) -> bool:
    try:
        call()
    except JournalUnavailable:
        return True
    return False


def both(primary: LocalPostgres, standby: LocalPostgres) -> PostgresSettings:
    """One DSN for two hosts."""
    dsn = primary.dsn.replace(f":{primary.port}/", f":{primary.port},127.0.0.1:{standby.port}/")
    return PostgresSettings(dsn, timeout_ms=2 * TIMEOUT_MS)


class Call(threading.Thread):
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error

    def error(self) -> BaseException | None:
        """What it raised; it has ended."""
        self.join(10)
        assert not self.is_alive()
        return self._error
