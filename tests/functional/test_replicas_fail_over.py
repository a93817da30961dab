"""What replicas do when leaders change, stall, sleep, or find another journal than they knew."""

import asyncio
import subprocess
from typing import Any

import pytest

from metaservice import clock
from metaservice.cli.local.postgres import LocalPostgres
from metaservice.core import commands as cmd
from metaservice.core.outcomes import LeaseOutcome
from metaservice.core.replies import Looked, Started
from metaservice.replica.errors import NotLeader, ShardUnavailable
from tests.functional.replicas_house import TTL_MS, House, One, refused, until
from tests.unit.replica_house import chain, fill, finish_of, furnish, hits, start_of

pytestmark = pytest.mark.timeout(90)


def lookup(keys: list[bytes], **more: Any) -> cmd.Lookup:
    return cmd.Lookup(instance="i", keys=keys, mode="each", **more)


async def caught_up(house: House, one: One, shard: int = 0) -> None:
    """Every follower stands where the leader does."""
    seq = one.shard(shard).durable_seq
    await until(lambda: all(x.shard(shard).durable_seq >= seq for x in house.others(one)), "followers follow")


async def test_followers_follow_and_are_equal_i6(postgres: str) -> None:
    async with House(postgres).running() as house:
        a = await house.leader()
        await furnish(a.shard())
        await fill(a.shard(), chain(50))
        started: Started = await a.shard().submit(start_of(chain(3, 100), "r1"))
        assert started.session
        await caught_up(house, a)
        await until(
            lambda: (
                len({(x.shard().durable_seq, x.shard().state.digest()) for x in house.ones.values()}) == 1
            ),
            "the states are equal",
        )
        b = house.ones["b"]
        assert b.shard().look(lookup(chain(53))).hits == 50
        assert b.shard().staleness_ms < 1_000
        error = await refused(lambda: b.shard().read(lookup(chain(1), lease_ms=500)))
        assert (error.code, error.leader, error.leader_url) == ("not_leader", "a", "http://a")


async def test_a_planned_handover_loses_nothing_and_tells_where_to_go(postgres: str) -> None:
    async with House(postgres).running() as house:
        a = await house.leader()
        await furnish(a.shard())
        await fill(a.shard(), chain(20))
        started: Started = await a.shard().submit(start_of(chain(3, 100), "r1"))
        looked: Looked = a.shard().read(lookup(chain(20), lease_ms=900))
        assert looked.lease is not None
        before_s = clock.lease_s()
        assert await a.replica.handover(0, "c") == "c"
        assert clock.lease_s() - before_s < 2
        c = await house.leader()
        assert (c.name, c.shard().epoch) == ("c", 2)
        assert hits(c.shard(), chain(20)) == 20
        again: Started = await c.shard().submit(start_of(chain(3, 100), "r1"))
        assert (again.session, list(again.locations)) == (started.session, list(started.locations))
        assert (await c.shard().submit(finish_of(started))).published == 3
        answer = c.shard().read(cmd.RenewLeases(leases=(looked.lease,), ttl_ms=500))
        assert LeaseOutcome(answer.outcomes[0]) is LeaseOutcome.unknown
        error = await refused(lambda: a.shard().submit(cmd.PutTenant(tenant="x")))
        assert error.leader_url == "http://c"
        # the old leader goes on as a follower with the state that it had
        assert a.shard().rebuilds == 0
        await caught_up(house, c)
        assert a.shard().state.digest() == c.shard().state.digest()
        a.shard().state.check()
        assert not any(a.shard().state.state.index.pins)


async def test_d12_a_lease_that_vanished_costs_the_leadership_and_nothing_else(postgres: str) -> None:
    async with House(postgres).running() as house:
        a = await house.leader()
        await furnish(a.shard())
        await fill(a.shard(), chain(5))
        house.elector.revoke(a.life)
        b = await house.leader(but="a")
        assert hits(b.shard(), chain(5)) == 5
        await until(lambda: a.shard().role == "follower" and a.shard().has_state, "a follows")
        error = await refused(lambda: a.shard().read(lookup(chain(5))))
        assert error.leader_url == f"http://{b.name}"


async def test_c7_while_the_election_is_gone_it_serves_to_the_deadline_then_stale_then_recovers(
    postgres: str,
) -> None:
    async with House(postgres).running() as house:
        a = await house.leader()
        await furnish(a.shard())
        await fill(a.shard(), chain(5))
        for one in house.ones.values():
            one.leadership.reachable = False
        assert hits(a.shard(), chain(5)) == 5  # the lease still holds
        await until(lambda: not a.shard().ready, "the lease is over by its own clock", 2 * TTL_MS / 1000)
        assert (await refused(lambda: a.shard().read(lookup(chain(5))))).code == "not_ready"
        await asyncio.sleep(2 * TTL_MS / 1000)
        assert not any(one.shard().ready for one in house.ones.values()), "nobody leads without an election"
        for one in house.ones.values():
            assert one.shard().look(lookup(chain(5))).hits == 5  # as a follower's, with its age
        for one in house.ones.values():
            one.leadership.reachable = True
        again = await house.leader()
        assert hits(again.shard(), chain(5)) == 5


async def test_a_leader_that_slept_through_its_lease_answers_nothing_when_it_wakes(postgres: str) -> None:
    """A process that stood still finds requests waiting: they are read before anything else runs."""
    async with House(postgres).running() as house:
        a = await house.leader()
        await furnish(a.shard())
        await fill(a.shard(), chain(5))
        a.shard().lease_until_s = clock.lease_s() - 0.001  # what a sleep of a ttl leaves behind
        assert a.shard().role == "leader"
        assert (await refused(lambda: a.shard().read(lookup(chain(5))))).code == "not_ready"
        assert isinstance(await refused(lambda: a.shard().submit(cmd.PutTenant(tenant="x"))), NotLeader)


async def test_the_lease_is_looked_at_again_after_the_answer_was_made(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with House(postgres).running("a") as house:
        a = await house.leader()
        await furnish(a.shard())
        await fill(a.shard(), chain(5))
        machine, shard = a.shard().machine, a.shard()
        real = type(machine).read

        def slow(self: Any, command: Any, now_ms: int) -> Any:
            answer = real(self, command, now_ms)
            shard.lease_until_s = 0.0  # it stood still just here
            return answer

        monkeypatch.setattr(type(machine), "read", slow)
        await refused(lambda: shard.read(lookup(chain(5))))


async def test_a_fenced_leader_throws_its_state_away_and_follows(postgres: str) -> None:
    async with House(postgres).running("a") as house:
        a = await house.leader()
        await furnish(a.shard())
        await fill(a.shard(), chain(5))
        thief = house.ones["z"] = One(house, "z")
        await thief.replica.shard(0).load()
        await asyncio.to_thread(thief.journals[0].claim)  # somebody else's epoch, whatever the election says
        with pytest.raises(ShardUnavailable):
            await a.shard().submit(cmd.PutTenant(tenant="lost"))
        await until(lambda: a.shard().rebuilds == 1, "the state is thrown away")
        again = await house.leader()
        assert again.shard().describe_one("tenants", "lost") is None
        assert hits(again.shard(), chain(5)) == 5 and again.shard().epoch == 3
        del house.ones["z"]
        await thief.replica.shard(0).close()


async def test_a_leader_whose_appends_stall_hands_over_when_another_reaches_the_journal(
    postgres: str,
) -> None:
    async with House(postgres).running() as house:
        a = await house.leader()
        await furnish(a.shard())
        await fill(a.shard(), chain(5))
        a.journals[0].free.clear()
        waiting = asyncio.ensure_future(a.shard().submit(cmd.PutTenant(tenant="held")))
        b = await house.leader(but="a")
        assert hits(b.shard(), chain(5)) == 5
        a.journals[0].free.set()
        with pytest.raises(ShardUnavailable):
            await waiting
        await until(lambda: a.shard().has_state and a.shard().role == "follower", "a follows")
        await caught_up(house, b)
        assert a.shard().state.digest() == b.shard().state.digest()


async def test_when_nobody_reaches_the_journal_the_leader_stays_and_answers_lookups(postgres: str) -> None:
    async with House(postgres).running() as house:
        a = await house.leader()
        await furnish(a.shard())
        await fill(a.shard(), chain(5))
        epoch = a.shard().epoch
        with _unreachable(house):
            error: ShardUnavailable | None = None
            for _ in range(200):
                try:
                    await asyncio.wait_for(a.shard().submit(cmd.PutTenant(tenant="x")), 5)
                except ShardUnavailable as refusal:
                    error = refusal
                    break
            assert error is not None and error.code == "journal_unavailable" and error.retry_after_ms > 0
            await asyncio.sleep(3 * TTL_MS / 1000)
            assert a.shard().ready and hits(a.shard(), chain(5)) == 5
        await until(lambda: not a.shard().stuck, "writes are taken again")
        await a.shard().submit(cmd.PutTenant(tenant="y"))
        assert (a.shard().epoch, a.shard().rebuilds) == (epoch, 0)


async def test_d4_while_the_database_hangs_for_everybody_the_leader_stays_and_answers_lookups() -> None:
    """Stopped, not dead: nothing is refused, calls just do not come back. Nobody may take the word of one
    who has not noticed yet."""
    with LocalPostgres() as server:
        async with House(server.dsn).running() as house:
            a = await house.leader()
            await furnish(a.shard())
            await fill(a.shard(), chain(5))
            await caught_up(house, a)
            epoch = a.shard().epoch
            server.freeze()
            try:
                writing = asyncio.ensure_future(a.shard().submit(cmd.PutTenant(tenant="x")))
                end_s = clock.lease_s() + 6
                while clock.lease_s() < end_s:
                    assert a.shard().ready and hits(a.shard(), chain(5)) == 5
                    await asyncio.sleep(0.05)
                with pytest.raises(ShardUnavailable) as told:
                    await writing
                assert told.value.code == "journal_unavailable"
            finally:
                server.thaw()
            await until(lambda: not a.shard().stuck, "writes are taken again")
            await a.shard().submit(cmd.PutTenant(tenant="y"))
            assert (a.shard().epoch, a.shard().rebuilds) == (epoch, 0)


class _unreachable:
    """Every journal of every replica says that it cannot be reached."""

    def __init__(self, house: House) -> None:
        self._journals = [journal for one in house.ones.values() for journal in one.journals]

    def __enter__(self) -> None:
        from metaservice.journal.errors import JournalUnavailable

        def fail(*_: object) -> Any:
            raise JournalUnavailable("journal", "asking", "it was unplugged")

        for journal in self._journals:
            for name in ("append", "read", "head", "claim", "size", "report_follower"):
                setattr(journal, name, fail)

    def __exit__(self, *_: object) -> None:
        for journal in self._journals:
            for name in ("append", "read", "head", "claim", "size", "report_follower"):
                delattr(journal, name)


async def test_a_journal_that_went_backwards_is_an_alarm_and_a_reload(
    postgres_server: LocalPostgres, postgres: str
) -> None:
    """What a failover to an asynchronous standby does: the newest batches were never there."""
    async with House(postgres).running("ab") as house:
        a = await house.leader()
        await furnish(a.shard())
        await fill(a.shard(), chain(5))
        await caught_up(house, a)
        kept = a.shard().durable_seq
        await fill(a.shard(), chain(5, 10))
        await caught_up(house, a)
        seen_epoch = a.shard().epoch
        database = postgres.rpartition("/")[2].partition("?")[0]
        postgres_server.execute(
            f"DELETE FROM ucm.journal WHERE shard = 0 AND first_seq > {kept};"
            f"UPDATE ucm.shard SET head_seq = {kept}, token = gen_random_uuid() WHERE id = 0",
            database,
        )
        await until(lambda: all(one.shard().rebuilds for one in house.ones.values()), "both throw it away")
        again = await house.leader()
        assert again.shard().epoch > seen_epoch
        assert hits(again.shard(), chain(5)) == 5 and hits(again.shard(), chain(5, 10)) == 0
        reasons = [reason for one in house.ones.values() for reason in one.told.reasons]
        assert any("backwards" in reason for reason in reasons), reasons
        await fill(again.shard(), chain(5, 20))
        again.shard().state.check()


async def test_d5_a_follower_below_the_trim_point_starts_from_the_snapshot(
    postgres_server: LocalPostgres, postgres: str
) -> None:
    async with House(postgres, snapshot_batches=20).running("ab") as house:
        a = await house.leader()
        await furnish(a.shard())
        b = house.ones["b"]
        held = b.journals[0]
        held.deaf = True
        for number in range(60):
            await fill(a.shard(), chain(2, 10 * number))
        database = postgres.rpartition("/")[2].partition("?")[0]
        postgres_server.execute("DELETE FROM ucm.follower WHERE replica = 'b'", database)

        def trimmed() -> bool:
            postgres_server.execute("DELETE FROM ucm.follower WHERE replica = 'b'", database)
            found = postgres_server.execute("SELECT trimmed_seq FROM ucm.shard WHERE id = 0", database)
            return int(str(found).strip() or 0) > b.shard().durable_seq

        for number in range(60, 400):
            await fill(a.shard(), chain(2, 10 * number))
            if trimmed():
                break
        else:
            pytest.fail("nothing was trimmed")
        held.deaf = False
        await until(lambda: b.shard().rebuilds == 1, "it cannot follow from there")
        await caught_up(house, a)
        assert b.shard().state.digest() == a.shard().state.digest()


async def test_a_second_process_under_one_name_ends_the_first(postgres: str) -> None:
    async with House(postgres).running("ab") as house:
        first = house.ones.pop("a")
        second = await house.start("a")
        with pytest.raises(Exception, match="started later"):
            await asyncio.wait_for(first.replica.failed(), 10)
        await first.replica.stop()
        await house.leader()
        assert second.replica.ready


def test_the_service_ends_with_a_message_when_the_cluster_has_another_number_of_shards(
    postgres: str, tmp_path: Any
) -> None:
    from sys import executable

    from metaservice.journal.postgres_migrate import check_cluster, migrate
    from metaservice.journal.postgres_settings import PostgresSettings

    migrate(PostgresSettings(postgres))
    check_cluster(PostgresSettings(postgres), 4)
    command = [executable, "-m", "metaservice.main", "serve", "--data", str(tmp_path), "--port", "8655"]
    command += ["--journal", "postgres", "--leadership", "sql_lease", "--shards", "2", "--replica", "a"]
    command += ["--postgres-dsn", postgres]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1 and "4 shards" in ended.stderr and "Traceback" not in ended.stderr


def test_an_open_fate_of_an_earlier_epoch_does_not_hold_up_the_next(postgres: str) -> None:
    """A replica that lost a shard in the middle of an append takes it again later."""
    from metaservice.core.events import TookOver
    from metaservice.journal.codec import encode_batch
    from metaservice.journal.errors import FateUnknown
    from metaservice.journal.postgres import PostgresJournal
    from metaservice.journal.postgres_migrate import migrate
    from metaservice.journal.postgres_settings import PostgresSettings

    settings = PostgresSettings(postgres)
    migrate(settings)
    journal = PostgresJournal(settings, 0, "a")
    journal.open()
    epoch = journal.claim()
    journal._unknown = FateUnknown("journal", 1, "the connection was lost")
    batch = encode_batch([TookOver(1, epoch, "c")])
    with pytest.raises(FateUnknown):
        journal.append(1, 1, epoch, batch)
    journal.append(1, 1, journal.claim(), batch)
    journal.close()
