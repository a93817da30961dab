"""Leadership in a PostgreSQL that is frozen, killed, read-only, failed over and pooled, and its races."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import count
from random import Random

import asyncpg
import pytest

from metaservice.cli.local.postgres import LocalPostgres
from metaservice.clock import monotonic_s
from metaservice.leadership.errors import LeadershipRefused, LeadershipUnavailable, ReplicaSuperseded
from metaservice.leadership.port import Holder
from metaservice.leadership.sql_lease import RETIRE_TTLS, SqlLeadership, SqlLeaseSettings
from tests.contract.leadership_benches import REPORT, TIMEOUT_MS, TTL_MS, SqlBench, make_tables

CALL_MAX_S = 2 * TIMEOUT_MS / 1000 + 0.5
MINE = {0: Holder("a", "http://a")}
THEIRS = {0: Holder("b", "http://b")}
_numbers = count(1)


@pytest.fixture
async def bench(postgres: str) -> AsyncIterator[SqlBench]:
    """The run's PostgreSQL, which goes on running."""
    await make_tables(postgres)
    bench = SqlBench(postgres)
    yield bench
    await bench.close()


@pytest.fixture(scope="module")
def own_server() -> Iterator[LocalPostgres]:
    with LocalPostgres() as server:
        yield server


@pytest.fixture
async def own(own_server: LocalPostgres) -> AsyncIterator[tuple[LocalPostgres, SqlBench]]:
    """A server of this module's own, which runs again after each test."""
    dsn = own_server.create_database(f"own_{next(_numbers)}")
    await make_tables(dsn)
    bench = SqlBench(dsn)
    yield own_server, bench
    own_server.thaw()
    await bench.close()


@pytest.fixture
async def by_hand(postgres: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection for what a test does itself."""
    connection = await asyncpg.connect(postgres)
    yield connection
    connection.terminate()


async def pair(bench: SqlBench) -> tuple[SqlLeadership, SqlLeadership]:
    """`a` holds shard 0, `b` is there."""
    a, b = bench.replica("a"), bench.replica("b")
    await a.renew(REPORT)
    await b.renew(REPORT)
    assert await a.acquire(0)
    return a, b


async def fails_in_time(renewing: SqlLeadership) -> str:
    started_s = monotonic_s()
    with pytest.raises(LeadershipUnavailable) as error:
        await renewing.renew(REPORT)
    assert monotonic_s() - started_s < CALL_MAX_S
    return error.value.reason


async def recovered(renewing: SqlLeadership) -> None:
    end_s = monotonic_s() + 10
    while True:
        try:
            await renewing.renew(REPORT)
        except LeadershipUnavailable:
            assert monotonic_s() < end_s
            await asyncio.sleep(0.05)
        else:
            return


# --- who judges, and by which clock --------------------------------------------------------------------


async def test_a_candidate_takes_only_what_stood_still_for_a_ttl_of_its_own_clock(bench: SqlBench) -> None:
    a, b = await pair(bench)
    ttl_s = TTL_MS / 1000
    await b.look()
    bench.made[b].shift_s += ttl_s - 0.5
    await b.look()
    assert not await b.acquire(0)
    await a.renew(REPORT)
    await b.look()  # sees the new beat: the count begins anew
    bench.made[b].shift_s += ttl_s - 0.5
    assert not await b.acquire(0)
    bench.made[b].shift_s += 0.5
    assert await b.acquire(0)


async def test_who_has_just_come_gives_everybody_a_ttl(bench: SqlBench) -> None:
    a, _ = await pair(bench)
    await bench.pass_s(5 * TTL_MS / 1000, but=a)
    c = bench.replica("c")
    view = await c.renew(REPORT)
    assert view.holders == MINE, "it cannot know how long a has been dead"
    assert not await c.acquire(0)
    await bench.pass_s(TTL_MS / 1000, but=a)
    assert await c.acquire(0)


async def test_clocks_that_differ_by_hours_or_run_on_agree(bench: SqlBench) -> None:
    """The bench gives each replica a clock an hour off the next; one of them is set forward by a day."""
    a, b = await pair(bench)
    bench.made[a].shift_s += 86_400
    assert (await a.renew(REPORT)).holders == MINE
    assert (await b.renew(REPORT)).holders == MINE
    assert not await b.acquire(0)


async def test_a_beat_that_moves_is_alive_even_if_nobody_looked_for_long(bench: SqlBench) -> None:
    a, b = await pair(bench)
    await b.look()
    await a.renew(REPORT)
    bench.made[b].shift_s += 3 * TTL_MS / 1000
    # By b's clock the beat that it saw has stood still for long; the row says otherwise, under its lock.
    assert not await b.acquire(0)
    assert (await b.look()).holders == MINE


# --- races ---------------------------------------------------------------------------------------------


async def test_a_renewal_that_waits_for_a_take_over_sees_it(
    bench: SqlBench, by_hand: asyncpg.Connection
) -> None:
    """One statement for renewing and reading would read the seats as they were before the wait."""
    a, b = await pair(bench)
    lives = {row["replica"]: row["life"] for row in await by_hand.fetch("SELECT * FROM ucm.replica")}
    async with by_hand.transaction():
        await by_hand.execute("SELECT FROM ucm.replica WHERE life = $1 FOR NO KEY UPDATE", lives["a"])
        renewing = asyncio.create_task(a.renew(REPORT))
        await asyncio.sleep(0.2)
        assert not renewing.done()
        await by_hand.execute("UPDATE ucm.seat SET life = $1 WHERE shard = 0", lives["b"])
    assert (await renewing).holders == THEIRS
    assert (await b.renew(REPORT)).holders == THEIRS


async def test_a_take_over_that_waits_for_a_renewal_takes_nothing(
    bench: SqlBench, by_hand: asyncpg.Connection
) -> None:
    a, b = await pair(bench)
    await b.look()
    bench.made[b].shift_s += TTL_MS / 1000
    async with by_hand.transaction():
        await by_hand.execute("UPDATE ucm.replica SET beat = beat + 1 WHERE replica = 'a'")
        taking = asyncio.create_task(b.acquire(0))
        await asyncio.sleep(0.2)
        assert not taking.done()
    assert not await taking
    assert (await a.renew(REPORT)).holders == MINE


async def test_a_candidate_that_stops_in_the_middle_holds_no_renewal_up_for_long(
    bench: SqlBench, by_hand: asyncpg.Connection
) -> None:
    a, b = await pair(bench)
    await by_hand.execute(b.begin)
    await by_hand.execute("SELECT FROM ucm.replica WHERE replica = 'a' FOR NO KEY UPDATE")
    await recovered(a)
    # the server ended its session; the driver says so in one of three ways, by how far it has noticed
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)):
        await by_hand.execute("UPDATE ucm.seat SET life = NULL")
    assert (await a.renew(REPORT)).holders == MINE


async def test_who_lost_the_shard_never_hears_that_it_holds_it(bench: SqlBench, seed: int) -> None:
    """Three replicas whose clocks jump take the shard from each other. A renewal that begins after another
    one has taken it must not name the one that lost it."""
    chance = Random(seed)
    replicas = {name: bench.replica(name) for name in "abc"}
    for replica in replicas.values():
        await replica.renew(REPORT)
    takes: list[str] = []
    checked = 0

    async def goes_on(name: str, replica: SqlLeadership) -> None:
        nonlocal checked
        for _ in range(40):
            if chance.random() < 0.3:
                await replica.look()
                bench.made[replica].shift_s += TTL_MS / 1000  # who does not renew just now is dead
            if await replica.acquire(0) and takes[-1:] != [name]:
                takes.append(name)
            await asyncio.sleep(chance.random() * 0.01)
            before = len(takes)
            holder = (await replica.renew(REPORT)).holders.get(0)
            if holder is not None and holder.replica == name and len(takes) == before:
                assert takes[-1] == name
                checked += 1

    await asyncio.gather(*(goes_on(name, replica) for name, replica in replicas.items()))
    assert len(takes) > 5
    assert checked > 20


async def test_two_processes_that_start_at_once_under_one_name_do_not_both_stay(
    bench: SqlBench, by_hand: asyncpg.Connection
) -> None:
    async def stays(twin: SqlLeadership) -> bool:
        for _ in range(10):
            with suppress(LeadershipUnavailable):
                try:
                    await twin.renew(REPORT)
                except ReplicaSuperseded:
                    return False
                return True
        raise AssertionError("it never renewed")

    for number in range(5):
        twins = [bench.replica(f"twin{number}") for _ in range(3)]
        await asyncio.gather(*map(stays, twins))
        assert [await stays(twin) for twin in twins].count(True) == 1
    names = "SELECT count(*), count(DISTINCT replica) FROM ucm.replica WHERE NOT superseded"
    assert tuple(await by_hand.fetchrow(names) or ()) == (5, 5)


async def test_takes_in_both_directions_do_not_deadlock(bench: SqlBench, by_hand: asyncpg.Connection) -> None:
    """Each of two locks both rows. Somebody keeps one of them until both wait: who had locked the other row
    first would now wait for ever."""
    a, b = await pair(bench)
    assert await b.acquire(1)
    for replica in (a, b):
        await replica.look()
        bench.made[replica].shift_s += TTL_MS / 1000
    for name in "ab":
        async with by_hand.transaction():
            await by_hand.execute("SELECT FROM ucm.replica WHERE replica = $1 FOR NO KEY UPDATE", name)
            takes = [asyncio.create_task(take) for take in (a.acquire(1), b.acquire(0))]
            await asyncio.sleep(0.2)
        assert await asyncio.gather(*takes) == [True, True]
        await a.resign(1)
        await b.resign(0)
        assert await a.acquire(0)
        assert await b.acquire(1)


# --- rows ----------------------------------------------------------------------------------------------


async def test_c11_rows_of_the_dead_go(bench: SqlBench, by_hand: asyncpg.Connection) -> None:
    keeper = bench.replica("keeper")
    await keeper.renew(REPORT)
    dead = [bench.replica(f"r{number % 7}") for number in range(30)]
    for replica in dead:
        await replica.renew(REPORT)
        await replica.acquire(0)
    everybody, bench.made = bench.made, {keeper: bench.made[keeper]}
    await bench.pass_s((RETIRE_TTLS + 1) * TTL_MS / 1000)
    assert await by_hand.fetchval("SELECT count(*) FROM ucm.replica") == 1
    assert await by_hand.fetchval("SELECT count(*) FROM ucm.seat WHERE life IS NOT NULL") == 0
    bench.made = everybody
    woken = await dead[-1].renew(REPORT)
    assert "keeper" in woken.members
    assert woken.holders == {}, "what it held went with its row"
    with pytest.raises(ReplicaSuperseded):
        await dead[1].renew(REPORT)  # another life of its name is there by now


# --- the server ----------------------------------------------------------------------------------------


async def test_d4_a_frozen_server_costs_the_deadline_and_no_connection(
    own: tuple[LocalPostgres, SqlBench],
) -> None:
    server, bench = own
    a, b = await pair(bench)
    tasks = len(asyncio.all_tasks())
    server.freeze()
    for _ in range(3):
        await fails_in_time(a)
    with pytest.raises(LeadershipUnavailable):
        await b.acquire(1)
    server.thaw()
    await recovered(a)
    await recovered(b)
    await asyncio.sleep(0.1)
    assert len(asyncio.all_tasks()) == tasks
    assert (await b.look()).holders == MINE
    assert int(server.execute(CONNECTIONS)) <= 2


CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'ucm-meta leadership'"


async def test_i1_calls_that_are_cancelled_leak_no_connection(own: tuple[LocalPostgres, SqlBench]) -> None:
    server, bench = own
    a, _ = await pair(bench)
    chance = Random(1)
    for _ in range(60):
        call = asyncio.create_task(a.renew(REPORT))
        await asyncio.sleep(chance.random() * 0.006)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
    assert (await a.renew(REPORT)).holders == MINE
    await asyncio.sleep(0.2)
    assert int(server.execute(CONNECTIONS)) <= 2


async def test_a_killed_server_comes_back_with_who_held_what(own: tuple[LocalPostgres, SqlBench]) -> None:
    server, bench = own
    a, b = await pair(bench)
    server.crash()
    await fails_in_time(a)
    await fails_in_time(b)
    server.start()
    await recovered(b)
    assert (await b.look()).holders == MINE
    assert (await a.renew(REPORT)).holders == MINE


async def test_a_killed_connection_costs_nothing_but_another(own: tuple[LocalPostgres, SqlBench]) -> None:
    server, bench = own
    a, _ = await pair(bench)
    server.execute(CONNECTIONS.replace("count(*)", "pg_terminate_backend(pid)"))
    await recovered(a)
    assert (await a.renew(REPORT)).holders == MINE


async def test_a_primary_that_became_read_only_is_left(own: tuple[LocalPostgres, SqlBench]) -> None:
    server, bench = own
    a, _ = await pair(bench)
    server.configure(default_transaction_read_only="on")
    await asyncio.sleep(0.3)
    # READ WRITE is asked for in each transaction, so only a standby would refuse; a new connection finds out.
    server.execute(CONNECTIONS.replace("count(*)", "pg_terminate_backend(pid)"))
    for _ in range(2):
        await fails_in_time(a)
    server.configure(default_transaction_read_only="off")
    await asyncio.sleep(0.3)
    await recovered(a)
    assert (await a.renew(REPORT)).holders == MINE


async def test_d4_a_frozen_primary_is_replaced_by_its_standby() -> None:
    with LocalPostgres() as primary, primary.standby() as standby:
        await make_tables(primary.dsn)
        bench = SqlBench(primary.dsn, standby.dsn)
        a, b = await pair(bench)
        primary.freeze()
        await fails_in_time(a)
        standby.promote()
        await recovered(a)
        await recovered(b)
        assert (await b.look()).holders == MINE, "what was committed was on the standby too"
        assert not await b.acquire(0)
        started_s = monotonic_s()
        await a.renew(REPORT)
        assert monotonic_s() - started_s < TIMEOUT_MS / 1_000, "the frozen one is not asked any more"
        await bench.close()
        primary.thaw()


# --- what it says, and where it works ------------------------------------------------------------------


async def test_what_the_database_will_not_allow_is_said(postgres: str) -> None:
    bench = SqlBench(postgres)
    with pytest.raises(LeadershipRefused, match=r"ucm\.replica"):
        await bench.replica("a").renew(REPORT)
    wrong = SqlBench(postgres.replace("ucm:", "ucm:wrong"))
    with pytest.raises(LeadershipRefused, match="password"):
        await wrong.replica("a").renew(REPORT)
    nowhere = SqlBench(postgres.rpartition("/")[0] + "/nowhere")
    with pytest.raises(LeadershipRefused, match="nowhere"):
        await nowhere.replica("a").renew(REPORT)
    for each in (bench, wrong, nowhere):
        await each.close()


async def test_nobody_there_and_unknown_hosts_are_said_in_time() -> None:
    for host in ("127.0.0.1:1", "postgres.invalid:5432"):
        bench = SqlBench(f"postgresql://u:geheim@{host}/d")
        assert "geheim" not in await fails_in_time(bench.replica("a"))
    assert "geheim" not in repr(SqlLeaseSettings(("postgresql://u:geheim@h/d",)))


@pytest.mark.parametrize("schema", ["", "Ucm", 'u"; DROP', "1u"])
def test_schemas_that_are_no_plain_names_are_refused(schema: str) -> None:
    with pytest.raises(ValueError, match="schema"):
        SqlLeaseSettings(("postgresql://h/d",), schema)


async def test_servers_with_another_default_isolation_keep_the_contract(
    postgres: str, by_hand: asyncpg.Connection
) -> None:
    await make_tables(postgres, "other")
    name = await by_hand.fetchval("SELECT current_database()")
    await by_hand.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    bench = SqlBench(postgres, schema="other")
    a, b = await pair(bench)
    await asyncio.gather(*(replica.renew(REPORT) for replica in (a, b) for _ in range(10)))
    await bench.lapse(a)
    assert await b.acquire(0)
    assert (await a.renew(REPORT)).holders == THEIRS
    await bench.close()
