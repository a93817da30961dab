"""The demo in a cluster: with process ids it kills the replica that leads, with URLs alone an engine only."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaservice.cli.local.cluster import LocalCluster
from tests.functional.test_demo_end_to_end import DEMO, run_demo

KEYS = [
    "requests", "blocks_asked", "blocks_hit", "hit_rate", "ideal_hit_rate", "dirty_reads",
    "hit_rate_drop_engine", "hit_rate_drop_leader", "hit_rate_drop", "unavailable_ms", "orphans", "seconds",
]  # fmt: skip
SETTINGS = {"lead_ttl_ms": 2_000, "lease_ms_max": 5_000, "staleness_ms_max": 1_000, "late_write_ms": 1_000}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(etcd_members=1, shards=3, settings=SETTINGS) as one:
        yield one


def test_the_leader_of_a_described_cluster_is_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    limits = {"write_ttl_ms": 4_000, "late_write_ms": 1_000, "lease_ms_max": 5_000}
    cluster.describe(file, storage_root=str(tmp_path / "storage"), ttl_ms=2_000, limits=limits)
    run = run_demo(*DEMO, "--cluster", str(file), "--requests", "400", timeout_s=200)
    assert run.returncode == 0, run.stdout + run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert list(figures) == KEYS
    assert (figures["requests"], figures["dirty_reads"], figures["orphans"]) == (400, 0, 0)
    assert figures["hit_rate_drop_engine"] < 0.15
    assert figures["hit_rate_drop_leader"] < 0.15
    assert 0 < figures["unavailable_ms"] < 2_000 + 3_000
    assert sum(not replica.running for replica in cluster.replicas) == 1
    assert "which led the instance's shard, was killed (SIGKILL)" in run.stdout
    assert "FAILED" not in run.stdout


def test_of_urls_alone_no_replica_is_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    where = ["--url", ",".join(cluster.urls), "--storage-root", str(tmp_path / "storage")]
    command = [sys.executable, "-c", "from metaservice.cli.app import main; main()", "demo", *where]
    run = run_demo(*command, "--requests", "200", timeout_s=200)
    assert run.returncode == 0, run.stdout + run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert list(figures) == KEYS
    assert (figures["requests"], figures["dirty_reads"], figures["orphans"]) == (200, 0, 0)
    assert (figures["unavailable_ms"], figures["hit_rate_drop_leader"]) == (0, 0.0)
    assert all(replica.running for replica in cluster.replicas)
