"""Leadership against an etcd of which members are killed, frozen, emptied, compacted and tampered with."""

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from metaservice.cli.local.etcd import EtcdMember, LocalEtcd
from metaservice.clock import monotonic_s
from metaservice.leadership.errors import LeadershipRefused, LeadershipUnavailable
from metaservice.leadership.etcd import EtcdLeadership, EtcdSettings
from metaservice.leadership.port import Holder, Report, View
from tests.contract.leadership_benches import REPORT, TIMEOUT_MS, EtcdBench, new_life

CALL_MAX_S = 2 * TIMEOUT_MS / 1000 + 0.5
"""What a call may take at most, and a little for a machine that is busy."""
MINE = {0: Holder("a", "http://a")}


@pytest.fixture
async def one(etcd: tuple[str, ...], etcd_prefix: str) -> AsyncIterator[EtcdBench]:
    """The run's etcd, which goes on running."""
    bench = EtcdBench(EtcdSettings(etcd, etcd_prefix))
    yield bench
    await bench.close()


@pytest.fixture(scope="module")
def three_members() -> Iterator[LocalEtcd]:
    with LocalEtcd(members=3) as etcd:
        yield etcd


@pytest.fixture
async def three(three_members: LocalEtcd, etcd_prefix: str) -> AsyncIterator[tuple[LocalEtcd, EtcdBench]]:
    """Three members of this module's own, all of them running again after each test."""
    bench = EtcdBench(EtcdSettings(three_members.endpoints, etcd_prefix))
    yield three_members, bench
    three_members.thaw()
    three_members.start()
    await bench.close()


async def timed(renewing: EtcdLeadership) -> tuple[View, float]:
    started_s = monotonic_s()
    view = await renewing.renew(REPORT)
    return view, monotonic_s() - started_s


async def fails_in_time(renewing: EtcdLeadership) -> str:
    started_s = monotonic_s()
    with pytest.raises(LeadershipUnavailable) as error:
        await renewing.renew(REPORT)
    assert monotonic_s() - started_s < CALL_MAX_S
    return error.value.reason


async def recovered(renewing: EtcdLeadership, within_s: float = 10.0) -> View:
    end_s = monotonic_s() + within_s
    while True:
        try:
            return await renewing.renew(REPORT)
        except LeadershipUnavailable:
            assert monotonic_s() < end_s
            await asyncio.sleep(0.05)


def leader_of(etcd: LocalEtcd) -> EtcdMember:
    """The member that leads etcd, of members that all answer."""
    for member in etcd.members:
        status = httpx.post(f"{member.endpoint}/v3/maintenance/status", json={}, trust_env=False).json()
        if status["leader"] == status["header"]["member_id"]:
            return member
    raise AssertionError("etcd has no leader")


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


# --- leases and keys -----------------------------------------------------------------------------------


async def test_a_lease_runs_out_by_itself_and_not_before_its_time(
    etcd: tuple[str, ...], etcd_prefix: str
) -> None:
    settings = EtcdSettings(etcd, etcd_prefix)
    a, b = (
        EtcdLeadership(
            settings,
            replica=name,
            url="",
            life=new_life(),
            shards=1,
            ttl_ms=1_500,  # etcd rounds up to two seconds
            timeout_ms=TIMEOUT_MS,
            now_s=monotonic_s,
            chance=lambda: 0.5,
        )
        for name in "ab"
    )
    await b.renew(REPORT)
    renewed_s = monotonic_s()
    await a.renew(REPORT)
    assert await a.acquire(0)
    while not await b.acquire(0):
        await b.renew(REPORT)
        assert monotonic_s() - renewed_s < 6
        await asyncio.sleep(0.02)
    assert monotonic_s() - renewed_s >= 1.5
    view = await a.renew(REPORT)
    assert view.holders == {0: Holder("b", "")}
    assert set(view.members) == {"a", "b"}
    await asyncio.gather(a.close(), b.close())


async def test_d12_a_lease_that_etcd_forgets_is_made_anew(one: EtcdBench) -> None:
    a, b = one.replica("a"), one.replica("b")
    await b.renew(REPORT)
    for _ in range(3):
        await a.renew(REPORT)
        assert await a.acquire(0)
        lease = a.lease
        await one.lapse(a)
        assert not await a.acquire(1), "what is taken under a lease that is gone would go with nothing"
        view = await a.renew(REPORT)
        assert a.lease != lease
        assert set(view.members) == {"a", "b"}
        assert view.holders == {}


async def test_keys_that_somebody_deletes_come_back(one: EtcdBench) -> None:
    a = one.replica("a")
    await a.renew(REPORT)
    assert await a.acquire(0)
    lease = a.lease
    await one.post("/v3/kv/deleterange", {"key": b64(f"{one.settings.prefix}/replicas/a")})
    assert not await a.acquire(1), "who is not registered takes nothing"
    view = await a.renew(REPORT)
    assert set(view.members) == {"a"}
    assert view.holders == MINE
    await one.post("/v3/kv/deleterange", {"key": b64(f"{one.settings.prefix}/shards/0")})
    assert (await a.renew(REPORT)).holders == {}
    assert await a.acquire(0)
    assert (await a.renew(REPORT)).holders == MINE
    assert a.lease == lease


async def test_a_key_that_somebody_overwrote_is_named(one: EtcdBench) -> None:
    a = one.replica("a")
    await a.renew(REPORT)
    key = f"{one.settings.prefix}/shards/0"
    await one.post("/v3/kv/put", {"key": b64(key), "value": b64("mine now")})
    with pytest.raises(LeadershipRefused, match=key):
        await a.renew(REPORT)
    assert not await a.acquire(0)
    await one.post("/v3/kv/deleterange", {"key": b64(key)})
    await a.renew(REPORT)
    assert await a.acquire(0)


async def test_keys_of_a_later_release_are_left_alone(one: EtcdBench) -> None:
    a = one.replica("a")
    for key, value in (
        ("later/x", "?"),
        ("replicas/z", '{"life":"l","url":"u","zone":1,"report":{"applied":{},"load":3}}'),
        ("shards/99", '{"life":"l","replica":"z","url":"u"}'),
    ):
        await one.post("/v3/kv/put", {"key": b64(f"{one.settings.prefix}/{key}"), "value": b64(value)})
    view = await a.renew(REPORT)
    assert view.members["z"].report == Report()
    assert view.holders == {}


async def test_i7_compaction_cuts_nothing_off_for_nothing_watches(one: EtcdBench) -> None:
    a, b = one.replica("a"), one.replica("b")
    await a.renew(REPORT)
    assert await a.acquire(0)
    for _ in range(20):
        await a.renew(REPORT)
    status = (await one.post("/v3/maintenance/status", {})).json()
    compacted = await one.post(
        "/v3/kv/compaction", {"revision": status["header"]["revision"], "physical": True}
    )
    assert compacted.status_code == 200
    assert (await one.post("/v3/maintenance/defragment", {})).status_code == 200
    assert (await a.renew(REPORT)).holders == MINE
    assert (await b.look()).holders == MINE


# --- members -------------------------------------------------------------------------------------------


async def test_d4_a_frozen_member_costs_one_deadline_once(three: tuple[LocalEtcd, EtcdBench]) -> None:
    etcd, bench = three
    a = bench.replica("a")
    await a.renew(REPORT)
    assert await a.acquire(0)
    leader, slow = leader_of(etcd), 0
    for member in etcd.members:
        if member is leader:
            continue
        member.freeze()
        view, took_s = await timed(a)
        assert view.holders == MINE
        assert took_s < CALL_MAX_S
        slow += took_s > TIMEOUT_MS / 1_000
        view, took_s = await timed(a)
        assert took_s < TIMEOUT_MS / 1_000, "the next call goes to the member that answered"
        member.thaw()
        await asyncio.sleep(0.3)
    assert slow <= 1, "once it has found the leader it asks nobody else"


async def test_d4_a_frozen_etcd_leader_is_survived_with_the_lease(three: tuple[LocalEtcd, EtcdBench]) -> None:
    etcd, bench = three
    a = bench.replica("a")
    await a.renew(REPORT)
    assert await a.acquire(0)
    leader_of(etcd).freeze()
    frozen_s = monotonic_s()
    view = await recovered(a)
    assert view.holders == MINE
    assert monotonic_s() - frozen_s < 5, "the lease would have run out"


async def test_a_killed_etcd_leader_is_survived_with_the_lease(three: tuple[LocalEtcd, EtcdBench]) -> None:
    etcd, bench = three
    a = bench.replica("a")
    await a.renew(REPORT)
    assert await a.acquire(0)
    leader_of(etcd).crash()
    killed_s = monotonic_s()
    view = await recovered(a)
    assert view.holders == MINE
    assert monotonic_s() - killed_s < 5


async def test_a_member_without_the_others_renews_nothing(three: tuple[LocalEtcd, EtcdBench]) -> None:
    etcd, bench = three
    a = bench.replica("a")
    await a.renew(REPORT)
    assert await a.acquire(0)
    leader = leader_of(etcd)
    for member in etcd.members:
        if member is not leader:
            member.freeze()
    await fails_in_time(a)
    with pytest.raises(LeadershipUnavailable):
        await a.acquire(1)
    etcd.thaw()
    assert 0 in (await recovered(a)).holders or await a.acquire(0)


async def test_c7_all_members_down_and_back(three: tuple[LocalEtcd, EtcdBench]) -> None:
    etcd, bench = three
    a, b = bench.replica("a"), bench.replica("b")
    for replica in (a, b):
        await replica.renew(REPORT)
    assert await a.acquire(0)
    etcd.crash()
    for _ in range(3):
        assert "Connect" in await fails_in_time(a)
    etcd.start()
    view = await recovered(a)
    assert "a" in view.members
    await recovered(b)
    assert await a.acquire(0) or await b.acquire(0)
    assert set((await a.renew(REPORT)).members) == {"a", "b"}


async def test_d3_an_etcd_that_lost_its_data_is_filled_again(tmp_path: Path) -> None:
    with LocalEtcd(tmp_path / "etcd") as etcd:
        bench = EtcdBench(EtcdSettings(etcd.endpoints, "/d3"))
        a, b = bench.replica("a"), bench.replica("b")
        await a.renew(REPORT)
        await b.renew(REPORT)
        assert await a.acquire(0)
        etcd.crash()
        shutil.rmtree(tmp_path / "etcd" / etcd.members[0].name)
        etcd.start()
        c = bench.replica("c")
        assert set((await recovered(c)).members) == {"c"}
        assert (await recovered(a)).holders == {}
        assert set((await recovered(b)).members) == {"a", "b", "c"}
        assert await a.acquire(0)
        assert (await c.renew(REPORT)).holders == MINE
        await bench.close()


async def test_a_call_that_is_cancelled_leaves_nothing_behind(three: tuple[LocalEtcd, EtcdBench]) -> None:
    etcd, bench = three
    a = bench.replica("a")
    await a.renew(REPORT)
    before = len(asyncio.all_tasks())
    etcd.freeze()
    for _ in range(5):
        call = asyncio.create_task(a.renew(REPORT))
        await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    etcd.thaw()
    assert "a" in (await recovered(a)).members
    assert len(asyncio.all_tasks()) == before
