"""What replicas need goes away and comes back: etcd, its leases, its data, PostgreSQL, the primary of a pair.
Nobody exits, nothing that was acknowledged is lost, and service comes back by itself."""

import asyncio
import shutil
from collections.abc import Iterator

import httpx
import pytest

from metaservice.cli.local.cluster import LocalCluster
from tests.functional.cluster_house import (
    FAST,
    TTL_S,
    Writers,
    client,
    epochs,
    eventually,
    instance_of,
    led,
    lost,
    restart,
    set_up,
    writable_again,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BACK_WITHIN_S = TTL_S + 3.0
SHARDS = 2
INSTANCES = [instance_of(shard) for shard in range(SHARDS)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    # Without planned handovers: who leads before and after is what some of these tests are about.
    with LocalCluster(shards=SHARDS, settings={**FAST, "spread": False}) as cluster:
        asyncio.run(set_up(cluster))
        yield cluster


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test finds everything running, and nobody exited meanwhile."""
    yield
    if "cluster" in request.fixturenames:
        cluster: LocalCluster = request.getfixturevalue("cluster")
        cluster.postgres.thaw()
        assert [replica.name for replica in cluster.replicas if not replica.running] == []


async def wrote(cluster: LocalCluster, seed: int) -> Writers:
    """Some acknowledged blocks in every shard."""
    writers = Writers(cluster, INSTANCES, seed)
    async with writers.running(2) as load:
        await eventually(lambda: all(len(chains) > 10 for chains in load.acked.values()), 30)
    assert load.failures == []
    return writers


async def all_back(cluster: LocalCluster, within_s: float = BACK_WITHIN_S) -> None:
    for shard in range(cluster.shards):
        await writable_again(cluster, shard, within_s)


async def test_c7_etcd_is_down_for_fifteen_seconds_and_everything_comes_back_by_itself(
    cluster: LocalCluster, seed: int
) -> None:
    assert cluster.etcd is not None
    writers = await wrote(cluster, seed)
    cluster.etcd.crash()
    await asyncio.sleep(TTL_S + 1)
    assert led(cluster) == {}, "a leader whose lease nobody renews stops by itself"
    async with client(cluster, timeout_ms=1_000) as anybody:
        assert (await anybody.start_write(instance_of(0), [b"x" * 16])).failure is not None
        chain = writers.load.acked[instance_of(0)][0]
        assert (await anybody.lookup(instance_of(0), chain)).hits == 0
        stale = await anybody.get_json("/v1/instances?stale=true")
        assert instance_of(0) in str(stale), "operators still see the last state"
    await asyncio.sleep(15 - TTL_S - 1)
    assert all(replica.running for replica in cluster.replicas)
    await asyncio.to_thread(cluster_start_etcd, cluster)
    await all_back(cluster)
    assert await lost(cluster, writers.load) == []


def cluster_start_etcd(cluster: LocalCluster) -> None:
    assert cluster.etcd is not None
    cluster.etcd.start()


async def test_d3_etcd_comes_back_empty_and_a_new_replica_joins(cluster: LocalCluster, seed: int) -> None:
    assert cluster.etcd is not None
    writers = await wrote(cluster, seed)
    newcomer = cluster.replicas[2]
    newcomer.crash()
    cluster.etcd.crash()
    for member in cluster.etcd.members:
        shutil.rmtree(cluster.folder / "etcd" / member.name)
    cluster.etcd.start()
    newcomer.launch()
    await eventually(newcomer.ready, 20)
    await all_back(cluster)

    def seen_by_all() -> bool:
        names = {one.name for one in cluster.replicas}
        said = [one.status() or {"members": []} for one in cluster.replicas]
        return all({row["replica"] for row in status["members"]} == names for status in said)

    await eventually(seen_by_all, 10)
    assert await lost(cluster, writers.load) == []


async def test_d12_all_leases_vanish_and_are_made_anew(cluster: LocalCluster, seed: int) -> None:
    assert cluster.etcd is not None
    writers = await wrote(cluster, seed)
    endpoint = cluster.etcd.endpoints[0]
    async with httpx.AsyncClient(timeout=5) as etcd:
        leases = (await etcd.post(f"{endpoint}/v3/lease/leases", json={})).json()["leases"]
        assert len(leases) >= len(cluster.replicas)
        for lease in leases:
            await etcd.post(f"{endpoint}/v3/lease/revoke", json={"ID": lease["ID"]})
    await all_back(cluster)
    async with Writers(cluster, INSTANCES, seed).running(2) as load:
        await eventually(lambda: load.commits >= 20, 20)
    assert (load.failures, load.missing) == ([], [])
    assert await lost(cluster, writers.load) == []


async def test_d4_a_frozen_etcd_member_stops_nobody(cluster: LocalCluster, seed: int) -> None:
    assert cluster.etcd is not None
    writers = Writers(cluster, INSTANCES, seed)
    async with writers.running(2) as load:
        for member in cluster.etcd.members:
            at = load.commits
            await eventually(lambda at=at: load.commits >= at + 10, 20)  # type: ignore[misc]
            member.freeze()
            try:
                await asyncio.sleep(2 * TTL_S)
            finally:
                member.thaw()
            await eventually(member.healthy, 20)
    assert (load.failures, load.missing) == ([], [])
    assert max(load.gaps_s.values()) <= BACK_WITHIN_S
    assert await lost(cluster, writers.load) == []


@pytest.mark.parametrize("how", ["freeze", "crash"])
async def test_d4_postgresql_hangs_or_is_gone_lookups_go_on_and_nobody_resigns(
    cluster: LocalCluster, how: str, seed: int
) -> None:
    await all_back(cluster)
    writers = await wrote(cluster, seed)
    leaders, before = led(cluster), epochs(cluster)
    getattr(cluster.postgres, how)()
    try:
        await asyncio.sleep(0.5)
        async with client(cluster, timeout_ms=1_500) as anybody:
            for _ in range(10):
                for instance, chains in writers.load.acked.items():
                    found = await anybody.lookup(instance, chains[-1])
                    assert found.failure is None, found
                    assert found.hits == len(chains[-1])
                await asyncio.sleep(0.3)
            started = await anybody.start_write(instance_of(0), [b"y" * 16], timeout_ms=3_000)
            assert started.failure is not None, "nothing can be durable now"
        assert led(cluster) == leaders
    finally:
        cluster.postgres.thaw()
        if not cluster.postgres.pids:
            cluster.postgres.start()
    await all_back(cluster)
    assert led(cluster) == leaders
    assert all(after <= before[shard] + 1 for shard, after in epochs(cluster).items())
    assert await lost(cluster, writers.load) == []


async def test_the_primary_dies_and_its_synchronous_standby_is_promoted(seed: int) -> None:
    with LocalCluster(etcd_members=1, shards=SHARDS, standby=True, settings=FAST) as cluster:
        await set_up(cluster)
        assert cluster.standby is not None
        writers = Writers(cluster, INSTANCES, seed)
        async with writers.running(2) as load:
            await eventually(lambda: load.commits >= 50, 30)
            cluster.postgres.crash()
            await asyncio.sleep(1)
            await asyncio.to_thread(cluster.standby.promote)
            at = load.commits
            await eventually(lambda: load.commits >= at + 20, 30)
        assert (load.failures, load.missing) == ([], [])
        assert await lost(cluster, load) == []


async def test_d7_rolling_restart_under_load_fails_no_request_that_retries(
    cluster: LocalCluster, seed: int
) -> None:
    await all_back(cluster)
    writers = Writers(cluster, INSTANCES, seed)
    async with writers.running(4) as load:
        await eventually(lambda: load.commits >= 50, 30)
        for replica in cluster.replicas:
            await restart(replica)
            at = load.commits
            await eventually(lambda at=at: load.commits >= at + 50, 30)  # type: ignore[misc]
    assert load.failures == []
    assert load.missing == []
    assert load.lookups > 100
    assert load.unanswered < load.lookups / 100, "the hit rate falls by less than a point"
    assert max(load.gaps_s.values()) <= BACK_WITHIN_S
    assert await lost(cluster, load) == []
