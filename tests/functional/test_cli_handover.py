"""`ucm-meta cluster` with several real replicas: who leads, who is silent, and handovers."""

import re
import time
from collections.abc import Iterator

import pytest

from metaservice.cli.local.cluster import LocalCluster
from metaservice.cli.local.replicas import Settings
from tests.functional.cli_house import cluster_status, leader_of, ucm_meta

TTL_MS = 3_000
SHARDS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    settings: Settings = {
        "lead_ttl_ms": TTL_MS,
        "staleness_ms_max": 1_000,
        "spread": False,
        "log_level": "warning",
    }
    with LocalCluster(replicas=3, shards=SHARDS, leadership="sql_lease", settings=settings) as running:
        yield running


def test_one_url_is_enough_to_see_everybody(cluster: LocalCluster) -> None:
    code, seen = cluster_status(cluster.urls[1])
    assert (code, seen["led"]) == (0, True)
    assert [(one["replica"], one["url"]) for one in seen["replicas"]] == [
        (one.name, one.url) for one in cluster.replicas
    ]
    assert all(one["answers"] and one["ready"] and one["journal_ok"] for one in seen["replicas"])
    assert [row["shard"] for row in seen["shards"]] == list(range(SHARDS))
    for row in seen["shards"]:
        assert 0 < row["lease_left_ms"] < TTL_MS
        assert len(row["followers"]) == 2
        assert {one["role"] for one in row["followers"]} == {"follower"}
        assert all(one["staleness_ms"] < TTL_MS for one in row["followers"])
    drawn = ucm_meta("cluster", "status", "--url", cluster.urls[0])
    assert drawn.returncode == 0
    for one in cluster.replicas:
        assert one.url in drawn.stdout


@pytest.mark.parametrize("named", [True, False], ids=["to-a-named-replica", "to-whom-the-leader-chooses"])
def test_a_shard_is_handed_over(cluster: LocalCluster, named: bool) -> None:
    _, before = cluster_status(*cluster.urls)
    old = leader_of(before, 1)
    to = next(one.name for one in cluster.replicas if one.name != old)
    words = ["--to", to] if named else []
    run = ucm_meta("cluster", "handover", "--shard", "1", *words, "--url", cluster.urls[0])
    assert (run.returncode, run.stderr) == (0, "")
    said = re.fullmatch(rf"shard 1: {old} \(epoch (\d+)\) -> (r\d) \(epoch (\d+)\) in (\d+) ms\n", run.stdout)
    assert said is not None, run.stdout
    assert said[2] == to if named else said[2] != old
    assert int(said[3]) > int(said[1]) == before["shards"][1]["epoch"]
    code, after = cluster_status(*cluster.urls)
    assert (code, leader_of(after, 1)) == (0, said[2])
    for shard in (0, 2):
        assert leader_of(after, shard) == leader_of(before, shard)


def test_handover_to_a_replica_that_is_not_there_moves_nothing(cluster: LocalCluster) -> None:
    _, before = cluster_status(*cluster.urls)
    run = ucm_meta("cluster", "handover", "--shard", "1", "--to", "r9", "--url", cluster.urls[0])
    assert (run.returncode, run.stderr) == (2, "error: no replica 'r9' answers: r1, r2, r3 do\n")
    _, after = cluster_status(*cluster.urls)
    assert [row["epoch"] for row in after["shards"]] == [row["epoch"] for row in before["shards"]]


def test_d4_frozen_leader_is_shown_as_silent_and_its_shards_as_led_again_once_they_are(
    cluster: LocalCluster,
) -> None:
    """A stopped process keeps its connections open: only a deadline tells."""
    _, before = cluster_status(*cluster.urls)
    frozen = cluster.replica(leader_of(before, 0))
    held = [row["shard"] for row in before["shards"] if row["leader"] == frozen.name]
    frozen.freeze()
    try:
        code, seen = cluster_status(*cluster.urls)
        silent = next(one for one in seen["replicas"] if not one["answers"])
        assert (silent["url"], silent["error"].partition(":")[0]) == (frozen.url, "timeout")
        if code == 1:
            unled = [row for row in seen["shards"] if not row["led"]]
            assert {row["shard"] for row in unled} <= set(held)
            assert all(row["note"] for row in unled)
        until_s = time.monotonic() + 20
        while code != 0:
            assert code == 1
            assert time.monotonic() < until_s, seen
            code, seen = cluster_status(*cluster.urls)
        assert frozen.name not in {row["leader"] for row in seen["shards"]}
        assert all(seen["shards"][shard]["epoch"] > before["shards"][shard]["epoch"] for shard in held)
    finally:
        frozen.thaw()
    until_s = time.monotonic() + 20
    while True:
        code, seen = cluster_status(*cluster.urls)
        if code == 0 and all(one["answers"] and one["ready"] for one in seen["replicas"]):
            break
        assert time.monotonic() < until_s, seen
    assert not [row["note"] for row in seen["shards"] if row["note"]]
