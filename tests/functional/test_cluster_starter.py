"""Whoever starts a cluster may be killed: the kernel ends all of it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from metaservice.cli.local.process import processes_in, title

STARTER = """
import json, time
from metaservice.cli.local.cluster import LocalCluster

cluster = LocalCluster(replicas=2, shards=2)
cluster.start()
pids = [replica.pid for replica in cluster.replicas] + cluster.etcd.pids + cluster.postgres.pids
print(json.dumps({"pids": pids, "data": str(cluster.folder / "postgres" / "data")}), flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_nothing_of_a_cluster_runs_on_when_its_starter_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        try:
            started = json.loads(starter.stdout.readline())
            assert len(started["pids"]) > 2 + 3 + 3
            assert all(title(pid) for pid in started["pids"])
        finally:
            starter.kill()
    deadline = time.monotonic() + 10
    while any(title(pid) for pid in started["pids"]) or processes_in(Path(started["data"])):
        assert time.monotonic() < deadline, [title(pid) for pid in started["pids"]]
        time.sleep(0.05)
