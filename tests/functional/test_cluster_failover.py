"""A leader is killed, frozen, or asked to hand over: others serve within the lease and a few seconds, and
nothing that was acknowledged is lost. One PostgreSQL, three replicas, two shards, and etcd or no etcd."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from metaservice.cli.local.cluster import LocalCluster
from tests.functional.cluster_house import (
    FAST,
    TTL_S,
    Writers,
    epochs,
    eventually,
    instance_of,
    led,
    lost,
    set_up,
    writable_again,
)

BACK_WITHIN_S = TTL_S + 3.0
INSTANCES = [instance_of(0), instance_of(1)]


@pytest.fixture(scope="module", params=["etcd", pytest.param("sql_lease", marks=pytest.mark.slow)])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with LocalCluster(leadership=request.param, etcd_members=1, shards=2, settings=FAST) as cluster:
        asyncio.run(set_up(cluster))
        yield cluster


async def all_lead(cluster: LocalCluster) -> None:
    await eventually(lambda: len(led(cluster)) == cluster.shards, 20)


async def test_d2_service_is_back_within_the_lease_after_the_leader_was_killed(
    cluster: LocalCluster, seed: int
) -> None:
    writers = Writers(cluster, INSTANCES, seed)
    async with writers.running(2) as load:
        await eventually(lambda: load.commits >= 20, 20)
        victim = cluster.leader(1)
        assert victim is not None
        before = epochs(cluster)
        victim.crash()
        took_s = await writable_again(cluster, 1, BACK_WITHIN_S)
        assert took_s <= BACK_WITHIN_S
        at = load.commits
        await eventually(lambda: load.commits >= at + 20, 20)
    assert load.failures == []
    assert load.missing == []
    assert load.lookups > 0
    assert await lost(cluster, load) == []
    assert led(cluster)[1] != victim.name
    assert epochs(cluster)[1] > before[1]
    victim.launch()
    await eventually(victim.ready, 20)
    status = victim.status()
    assert status is not None
    assert {row["role"] for row in status["shards"]} <= {"follower", "promoting", "leader"}


async def test_a_planned_handover_takes_a_second_at_most_and_nobody_sees_an_error(
    cluster: LocalCluster, seed: int
) -> None:
    await all_lead(cluster)
    writers = Writers(cluster, INSTANCES, seed)
    async with writers.running(2) as load:
        await eventually(lambda: load.commits >= 20, 20)
        for shard in range(cluster.shards):
            was = led(cluster)[shard]
            writers.load.gaps_s[instance_of(shard)] = 0.0
            async with httpx.AsyncClient(timeout=10) as operator:
                url = f"{cluster.urls[shard]}/v1/cluster/shards/{shard}/handover"
                answer = await operator.post(url, json={})
            assert answer.status_code == 200, answer.text
            now = await asyncio.to_thread(led, cluster)
            assert now.get(shard) != was
            at = load.commits
            await eventually(lambda at=at: load.commits >= at + 20, 10)  # type: ignore[misc]
            assert load.gaps_s[instance_of(shard)] <= 1.0 + 0.5, "of two writers, each with a pause"
    assert load.failures == []
    assert load.missing == []
    assert await lost(cluster, load) == []


@pytest.mark.slow
async def test_a_frozen_leader_is_replaced_and_acknowledges_nothing_when_it_wakes(
    cluster: LocalCluster, seed: int
) -> None:
    await all_lead(cluster)
    victim = cluster.leader(0)
    assert victim is not None
    writers = Writers(cluster, INSTANCES, seed)
    async with writers.running(2) as load:
        await eventually(lambda: load.commits >= 20, 20)
        victim.freeze()
        try:
            await writable_again(cluster, 0, BACK_WITHIN_S)
            await asyncio.sleep(TTL_S)
        finally:
            victim.thaw()
        await eventually(lambda: victim.ready() and led(cluster).get(0) is not None, 20)
        at = load.commits
        await eventually(lambda: load.commits >= at + 20, 20)
    assert load.failures == []
    assert load.missing == []
    assert await lost(cluster, load) == []


def test_cluster_status_shows_every_replica_and_shard(cluster: LocalCluster) -> None:
    asyncio.run(all_lead(cluster))
    program = "from metaservice.cli.app import main; main()"
    command = [sys.executable, "-c", program, "cluster", "status", "--json", "--url", cluster.urls[0]]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert run.returncode == 0, run.stderr
    shown = json.dumps(json.loads(run.stdout))
    assert all(replica.name in shown and replica.url in shown for replica in cluster.replicas)
