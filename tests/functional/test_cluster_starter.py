"""Who starts a cluster may be killed: the kernel ends all of it. `make cluster` ends in order when asked."""

import json
import signal
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_make_cluster_leaves_nothing_behind_when_it_is_interrupted(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "metaservice.cli.local.topology"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        folder = Path()
        for line in run.stdout:
            folder = Path(line.partition("logs are in ")[2].strip()) if "logs are in " in line else folder
            if "engines start" in line:
                break
        below = descendants(run.pid)
        assert len(below) > 3 + 3 + 3
        run.send_signal(number)
        run.stdout.read()
    assert run.returncode == 130
    assert [title(pid) for pid in below if title(pid)] == []
    assert not folder.exists()


def descendants(pid: int) -> list[int]:
    """The children of a process, their children, and so on."""
    tasks = (Path("/proc") / str(pid) / "task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]
