"""The client, its keeper and a worker against a real cluster, from the side of an engine: what fails is a
miss in time, and what was acknowledged is found again."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplane import Backend, Place, open_backend
from metaservice.cli.local.cluster import LocalCluster
from metaservice.client import Client, ClientConfig, LookupResult, WriteResult
from metaservice.wire.schemas import WriteOutcome
from tests.functional.client_service import eventually, new_keys
from tests.functional.cluster_house import FAST, FINGERPRINT, TTL_S, instance_of, set_up

pytestmark = pytest.mark.slow

TIMEOUT_MS = 1_000
SLACK_S = 0.4
BACK_WITHIN_S = TTL_S + 4.0
PART = "kv"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(etcd_members=1, shards=2, settings=FAST) as one:
        asyncio.run(set_up(one))
        yield one


@pytest.fixture(autouse=True)
def whole(cluster: LocalCluster) -> None:
    """Every test finds three replicas and a leader everywhere."""
    for replica in cluster.replicas:
        if not replica.running:
            replica.launch()
    cluster.await_ready()


def client_of(cluster: LocalCluster, **changes: Any) -> Client:
    return Client(ClientConfig(**{"url": cluster.urls, "timeout_ms": TIMEOUT_MS, **changes}))


def registered(client: Client, name: str, **more: Any) -> Client:
    eventually(lambda: client.register_engine(name, **{"keepalive": "thread", **more}).active, 20)
    return client


def start(client: Client, instance: str, keys: list[bytes]) -> WriteResult:
    started = client.start_write(instance, keys)
    assert started.failure is None, (started.failure, started.detail)
    return started


def write(client: Client, instance: str, keys: list[bytes]) -> None:
    started = start(client, instance, keys)
    finished = client.finish(started, started.locations, started.generations, checksums=range(len(keys)))
    assert (finished.failure, finished.published) == (None, len(keys))


def blocks_used(client: Client, instance: str) -> int:
    usage = client.get_json(f"/v1/instances/{instance}")["usage"]
    return int(usage["blocks"] + usage["deleting_blocks"])


def looked_until_back(
    client: Client, instance: str, keys: list[bytes]
) -> tuple[LookupResult, list[float], float]:
    """Look up again and again until it is answered: the answer, how long each call took, and all of them."""
    began = time.monotonic()
    times_s = []
    while True:
        at = time.monotonic()
        found = client.lookup(instance, keys)
        times_s.append(time.monotonic() - at)
        if found.failure is None or time.monotonic() - began > BACK_WITHIN_S:
            return found, times_s, time.monotonic() - began
        time.sleep(0.01)


def test_d2_all_that_was_acknowledged_is_found_after_the_leader_was_killed(cluster: LocalCluster) -> None:
    instance = instance_of(1)
    with client_of(cluster) as client:
        registered(client, "d2")
        chains = [new_keys(20) for _ in range(20)]
        for keys in chains:
            write(client, instance, keys)
        victim = cluster.leader(1)
        assert victim is not None
        victim.crash()
        found, times_s, took_s = looked_until_back(client, instance, chains[0])
        assert (found.failure, found.hits) == (None, 20)
        assert took_s < BACK_WITHIN_S
        assert max(times_s) < TIMEOUT_MS / 1_000 + SLACK_S, "each miss in time"
        assert [client.lookup(instance, keys).hits for keys in chains] == [20] * 20
        assert client.registration is not None
        assert (client.registration.active, client.registration.lost) == (True, 0), "the engine stayed"
        write(client, instance, new_keys(5))


def test_d4_stopped_leader_is_gone_round_and_its_return_is_harmless(cluster: LocalCluster) -> None:
    instance = instance_of(1)
    keys = new_keys(8)
    with client_of(cluster) as client:
        registered(client, "d4")
        write(client, instance, keys)
        victim = cluster.leader(1)
        assert victim is not None
        victim.freeze()
        try:
            found, times_s, took_s = looked_until_back(client, instance, keys)
        finally:
            victim.thaw()
        assert (found.failure, found.hits) == (None, 8)
        assert took_s < BACK_WITHIN_S
        slow = [one_s for one_s in times_s if one_s > 0.2]
        assert max(times_s) < TIMEOUT_MS / 1_000 + SLACK_S
        assert len(slow) < 8 < len(times_s), f"the stopped replica is remembered: {times_s}"
        for _ in range(50):
            assert client.lookup(instance, keys).hits == 8
            time.sleep(0.02)


def test_a7_write_through_a_fail_over_is_allocated_once(cluster: LocalCluster) -> None:
    """The leader dies at any moment of the call; the retry has the same id."""
    instance = instance_of(0)
    with client_of(cluster, retry_ms=15_000) as client, client_of(cluster) as operator:
        registered(client, "a7")
        eventually(lambda: blocks_used(operator, instance) == 0, 30)
        written = 0
        for _ in range(2):
            victim = cluster.leader(0)
            assert victim is not None
            os.kill(victim.pid, signal.SIGKILL)  # not waited for: it may still take the call
            started = start(client, instance, new_keys(16))
            assert len(started.writable) == 16
            finished = client.finish(started, started.locations, started.generations, checksums=range(16))
            assert (finished.failure, finished.published) == (None, 16)
            written += 16
            victim.crash()
            victim.launch()
            cluster.await_ready()
        eventually(lambda: blocks_used(operator, instance) == written, 30)


def test_follower_answers_who_allows_it_to_be_behind(cluster: LocalCluster) -> None:
    instance = instance_of(1)
    keys = new_keys(6)
    follower = next(one for one in cluster.replicas if one is not cluster.leader(1))
    with client_of(cluster) as client, client_of(cluster, url=follower.url) as reader:
        registered(client, "behind")
        write(client, instance, keys)
        eventually(lambda: reader.lookup(instance, keys, staleness_ms_max=1_000).hits == 6, 5)
        assert len(reader._calling.endpoints.all) == 1, "it was told of no leader"
        assert reader.lookup(instance, keys).hits == 6
        assert len(reader._calling.endpoints.all) == 2


def test_c12_what_a_dead_engine_was_writing_is_free_for_others(cluster: LocalCluster) -> None:
    """Others are told how long to wait, may write everything else at once, and the same keys soon."""
    instance = instance_of(1)
    keys = new_keys(4)
    program = (
        "import sys, time\n"
        "from metaservice.client import Client, ClientConfig\n"
        "client = Client(ClientConfig(url=sys.argv[1], timeout_ms=5_000))\n"
        "assert client.register_engine('c12-dead', keepalive='process').wait_active(10_000)\n"
        "keys = [bytes.fromhex(key) for key in sys.argv[3:]]\n"
        "assert len(client.start_write(sys.argv[2], keys, ttl_ms=4_000, renew=True).writable) == 4\n"
        "print('writing', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, ",".join(cluster.urls), instance, *(key.hex() for key in keys)]
    with (
        client_of(cluster) as client,
        subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as dead,
    ):
        assert dead.stdout is not None
        assert dead.stdout.readline() == b"writing\n"
        dead.kill()
        dead.wait()
        registered(client, "c12")
        others = client.start_write(instance, [*keys, *new_keys(2)])
        assert list(others.outcomes[:4]) == [WriteOutcome.in_progress] * 4
        assert 0 < max(others.wait_ms) <= 4_000
        assert others.writable == [4, 5], "the rest lands elsewhere at once"
        time.sleep(max(others.wait_ms) / 1_000)
        eventually(lambda: start(client, instance, keys).writable == [0, 1, 2, 3], 5)


def test_one_worker_deletes_and_sweeps_for_all_shards(cluster: LocalCluster, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    backend = open_backend("posix", {"root": str(root), "fsync": "none"})
    names = [f"worked-{shard}" for shard in range(2)]
    with client_of(cluster, raise_errors=True) as client:
        client.put_storage("w", "posix", {"root": str(root), "fsync": "none"})
        client.put_group("wg", "t", ["w"])
        for shard, name in enumerate(names):
            client.put_instance(name, "wg", FINGERPRINT, shard=shard)
        registered(client, "worked")
        command = [sys.executable, "-m", "metaservice.cli.worker", "--url", ",".join(cluster.urls)]
        command += ["--worker", "one", "--storage", "w", "--poll-ms", "200", "--sweep-ms", "300"]
        command += ["--safe-age-ms", "2000", "--backoff-ms-max", "300"]
        with subprocess.Popen(command) as worker:
            try:
                for shard, name in enumerate(names):
                    gone, kept = new_keys(6), new_keys(3)
                    for keys in (gone, kept):
                        stored(client, backend, name, keys)
                    orphan = Place(cluster_id(client), (shard << 44) + 999_999, 1, PART, 100, kept[0])
                    backend.write(orphan, bytes(100))
                    assert client.remove(name, gone).removed == 6
                eventually(lambda: len(list(backend.scan())) == 6, 40)
                assert [client.lookup(name, kept).hits for name in names[-1:]] == [3]
                assert worker.poll() is None
            finally:
                worker.terminate()
                worker.wait(20)
    backend.close()


def stored(client: Client, backend: Backend, instance: str, keys: list[bytes]) -> None:
    """Write blocks, bytes and all."""
    started = start(client, instance, keys)
    sums = [backend.write(Place.of(started.place(row)), bytes(100)) for row in range(len(keys))]
    client.finish(started, started.locations, started.generations, checksums=sums)


def cluster_id(client: Client) -> str:
    return client.cluster().cluster
