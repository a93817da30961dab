"""What every elector keeps, over memory, PostgreSQL and etcd."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from metaservice.leadership.errors import ReplicaSuperseded
from metaservice.leadership.etcd import EtcdSettings
from metaservice.leadership.port import Holder, Member, Report
from metaservice.leadership.single import SingleLeadership
from tests.contract.leadership_benches import (
    REPORT,
    SHARDS,
    Bench,
    EtcdBench,
    MemoryBench,
    SqlBench,
    make_tables,
)


@pytest.fixture(params=["memory", "sql_lease", "etcd"])
async def electors(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """An elector that nobody has used yet."""
    bench: Bench
    if request.param == "memory":
        bench = MemoryBench()
    elif request.param == "sql_lease":
        dsn = request.getfixturevalue("postgres")
        await make_tables(dsn)
        bench = SqlBench(dsn)
    else:
        prefix = request.getfixturevalue("etcd_prefix")
        bench = EtcdBench(EtcdSettings(request.getfixturevalue("etcd"), prefix))
    yield bench
    await bench.close()


async def test_who_renews_is_seen_by_all_with_what_it_says(electors: Bench) -> None:
    a, b = electors.replica("a"), electors.replica("b")
    report = Report({0: 5, 3: 2**62}, journal_ok=False, ready=True)
    assert (await a.look()).members == {}
    view = await a.renew(report)
    assert view.members == {"a": Member("a", "http://a", report)}
    assert view.holders == {}
    assert (await b.look()).members == view.members
    view = await b.renew(REPORT)
    assert set(view.members) == {"a", "b"}
    await a.renew(REPORT)
    assert (await b.look()).members["a"].report == REPORT


async def test_one_has_a_shard_and_all_know_it(electors: Bench) -> None:
    a, b = electors.replica("a"), electors.replica("b")
    await a.renew(REPORT)
    await b.renew(REPORT)
    assert await a.acquire(0)
    assert not await b.acquire(0)
    assert await b.acquire(2)
    assert await a.acquire(0), "what is ours stays ours"
    expected = {0: Holder("a", "http://a"), 2: Holder("b", "http://b")}
    for view in (await a.renew(REPORT), await b.renew(REPORT), await a.look(), await b.look()):
        assert view.holders == expected


async def test_nobody_acquires_before_it_renewed_nor_a_shard_that_is_not(electors: Bench) -> None:
    a = electors.replica("a")
    assert not await a.acquire(0)
    await a.renew(REPORT)
    assert not await a.acquire(SHARDS)
    assert not await a.acquire(-1)
    assert (await a.renew(REPORT)).holders == {}


async def test_of_many_that_acquire_at_once_one_gets_it(electors: Bench) -> None:
    replicas = [electors.replica(f"r{number}") for number in range(5)]
    for replica in replicas:
        await replica.renew(REPORT)
    for shard in range(SHARDS):
        got = await asyncio.gather(*(replica.acquire(shard) for replica in replicas))
        assert got.count(True) == 1
        views = await asyncio.gather(*(replica.renew(REPORT) for replica in replicas))
        assert {view.holders[shard].replica for view in views} == {f"r{got.index(True)}"}


async def test_calls_that_overlap_are_taken_one_after_another(electors: Bench) -> None:
    a = electors.replica("a")
    await a.renew(REPORT)
    acquired = [a.acquire(shard) for shard in range(SHARDS)]
    results = await asyncio.gather(a.look(), *acquired, a.renew(REPORT), a.look())
    assert results[1:-2] == [True] * SHARDS
    assert set((await a.look()).holders) == set(range(SHARDS))


async def test_resigning_frees_and_names_a_successor(electors: Bench) -> None:
    a, b, c = (electors.replica(name) for name in "abc")
    for replica in (a, b, c):
        await replica.renew(REPORT)
    assert await a.acquire(1)
    await b.resign(1, "b")
    assert (await a.look()).holders == {1: Holder("a", "http://a")}, "only the holder resigns"
    await a.resign(1, "b")
    for view in (await a.renew(REPORT), await b.renew(REPORT), await c.look()):
        assert view.holders == {1: Holder("", "", "b")}
    assert await b.acquire(1)
    for view in (await a.renew(REPORT), await b.renew(REPORT), await c.look()):
        assert view.holders == {1: Holder("b", "http://b")}
    await b.resign(1)
    assert (await c.look()).holders == {}
    assert await c.acquire(1), "who resigned without a successor leaves it to anybody"


async def test_a_hint_to_a_replica_that_is_gone_is_none(electors: Bench) -> None:
    a, b = electors.replica("a"), electors.replica("b")
    await a.renew(REPORT)
    await b.renew(REPORT)
    assert await a.acquire(1)
    assert await a.acquire(2)
    await a.resign(1, "b")
    await a.resign(2, "nobody")
    assert (await a.look()).holders == {1: Holder("", "", "b")}
    await electors.lapse(b)
    assert (await a.renew(REPORT)).holders == {}
    assert await a.acquire(1)
    assert await a.acquire(2)


async def test_the_hint_outlives_the_one_that_resigned(electors: Bench) -> None:
    a, b, c = (electors.replica(name) for name in "abc")
    for replica in (a, b, c):
        await replica.renew(REPORT)
    assert await a.acquire(0)
    await a.resign(0, "b")
    await a.close()
    assert (await c.look()).holders == {0: Holder("", "", "b")}


async def test_a_lease_that_ran_out_is_free_and_no_error(electors: Bench) -> None:
    a, b = electors.replica("a"), electors.replica("b")
    await a.renew(REPORT)
    await b.renew(REPORT)
    assert await a.acquire(0)
    assert not await b.acquire(0)
    await electors.lapse(a)
    view = await b.renew(REPORT)
    assert view.holders == {}
    assert set(view.members) == {"b"}
    assert await b.acquire(0)
    view = await a.renew(REPORT)
    assert view.holders == {0: Holder("b", "http://b")}
    assert set(view.members) == {"a", "b"}
    assert not await a.acquire(0)
    await electors.lapse(b)
    await a.renew(REPORT)
    assert await a.acquire(0)


async def test_who_wakes_up_before_anybody_took_may_have_it_again(electors: Bench) -> None:
    a, b = electors.replica("a"), electors.replica("b")
    await a.renew(REPORT)
    await b.renew(REPORT)
    assert await a.acquire(0)
    await electors.lapse(a)
    holders = (await a.renew(REPORT)).holders
    assert holders in ({}, {0: Holder("a", "http://a")})
    assert await a.acquire(0)
    assert not await b.acquire(0), "it has just been renewed"
    assert (await b.renew(REPORT)).holders == (await a.renew(REPORT)).holders == {0: Holder("a", "http://a")}


async def test_another_life_of_a_name_waits_for_the_earlier_lease(electors: Bench) -> None:
    before, other = electors.replica("a"), electors.replica("b")
    await before.renew(REPORT)
    await other.renew(REPORT)
    assert await before.acquire(0)
    after = electors.replica("a")
    assert (await after.look()).holders == {}, "it would take the earlier life's shard for its own"
    view = await after.renew(REPORT)
    assert view.holders == {}
    assert set(view.members) == {"a", "b"}
    assert not await after.acquire(0)
    assert (await other.renew(REPORT)).holders == {0: Holder("a", "http://a")}
    await electors.lapse(before)
    await after.renew(REPORT)
    assert await after.acquire(0)
    assert (await other.look()).holders == (await after.look()).holders == {0: Holder("a", "http://a")}


async def test_c4_of_two_processes_under_one_name_the_later_one_stays(electors: Bench) -> None:
    before, other = electors.replica("a"), electors.replica("b")
    await before.renew(REPORT)
    assert await before.acquire(0)
    after = electors.replica("a")
    await after.renew(Report({0: 7}))
    assert not await before.acquire(1)
    for _ in range(2):
        with pytest.raises(ReplicaSuperseded, match="'a'"):
            await before.renew(REPORT)
    assert not await before.acquire(1)
    assert (await after.renew(Report({0: 7}))).members["a"].report == Report({0: 7})
    assert (await other.look()).members["a"].report == Report({0: 7})
    assert await after.acquire(1)


async def test_closing_lets_go_at_once(electors: Bench) -> None:
    a, b = electors.replica("a"), electors.replica("b")
    await a.renew(REPORT)
    await b.renew(REPORT)
    assert await a.acquire(0)
    await a.close()
    await a.close()
    view = await b.renew(REPORT)
    assert view.holders == {}
    assert set(view.members) == {"b"}
    assert await b.acquire(0)


async def test_single_leads_everything_alone() -> None:
    one = SingleLeadership("a", "http://a", SHARDS)
    mine = Holder("a", "http://a")
    assert (await one.renew(REPORT)).holders == dict.fromkeys(range(SHARDS), mine)
    assert await one.acquire(3)
    assert not await one.acquire(SHARDS)
    await one.resign(3, "b")
    assert set((await one.look()).holders) == {0, 1, 2}
    assert (await one.look()).members == {"a": Member("a", "http://a", REPORT)}
    assert await one.acquire(3)
    assert (await one.look()).holders[3] == mine
    await one.close()
    assert (await one.look()).holders == {}
