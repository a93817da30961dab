"""`ucm-meta events verify` on two replicas: both replay the same, also when the leader is killed."""

import json
import threading
import time
from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from metaservice.cli.local.cluster import LocalCluster
from metaservice.cli.local.process import LocalFailed, until
from metaservice.cli.local.replicas import LocalReplica, Settings
from tests.functional.cli_house import ucm_meta
from tests.functional.events_service import EventsService, Prompt, Refused, eventually, free_ports

TIMES: Settings = {
    "lead_ttl_ms": 2_000,
    "lead_renew_ms": 300,
    "lead_timeout_ms": 300,
    "lead_margin_ms": 200,
    "expire_ms": 60_000,
    "events_channels_max": 8,
}


class Fleet(EventsService):
    """Who speaks with one of the replicas of a cluster."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=20.0, trust_env=False)
        self._readers = []
        self._lives = {}


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    ports = [free_ports(16), free_ports(16)]
    with LocalCluster(
        replicas=2,
        shards=1,
        leadership="sql_lease",
        settings=TIMES,
        own=lambda number: {"events_port_base": ports[number - 1]},
    ) as cluster:
        yield cluster


def leader(cluster: LocalCluster) -> LocalReplica:
    for _ in until(time.monotonic() + 20):
        found = cluster.leader(0)
        if found is not None:
            return found
    raise LocalFailed("nobody leads")


def published(fleet: Fleet) -> bool:
    try:
        return bool(fleet.streams())
    except Refused:
        return False


@pytest.mark.slow
def test_streams_hold_over_a_failover_and_all_replicas_replay_the_same(cluster: LocalCluster) -> None:
    first = leader(cluster)
    fleets = [Fleet(url) for url in cluster.urls]
    fleet = fleets[cluster.replicas.index(first)]
    fleet.furnish()
    fleet.write(Prompt(1, 40))
    for one in fleets:
        eventually(partial(published, one), "the streams are known to both", within_s=20)
    urls = ",".join(cluster.urls)
    quiet = ucm_meta("events", "verify", "--url", urls, "--seconds", "2")
    report = json.loads(quiet.stdout.splitlines()[-1])
    assert (quiet.returncode, report["faults"], report["announced"]) == (0, {}, 40), quiet.stderr
    assert report["replays"] >= 3  # one to begin with, one of each replica in the end
    killer = threading.Timer(1.5, first.crash)
    killer.start()
    failover = ucm_meta("events", "verify", "--url", urls, "--seconds", "9", "--silence-ms-max", "8000")
    killer.join()
    report = json.loads(failover.stdout.splitlines()[-1])
    # The killed one answers nothing in the end, which is said and is no fault: the streams went on.
    assert (failover.returncode, report["faults"]) == (0, {}), failover.stderr
    assert len(report["unanswered"]) == 1
    assert report["announced"] == 40
    assert report["longest_silence_ms"] < 8_000
    alive = next(url for url in cluster.urls if url != first.url)
    after = ucm_meta("events", "verify", "--url", alive, "--seconds", "2")
    report = json.loads(after.stdout.splitlines()[-1])
    assert (after.returncode, report["announced"], report["faults"]) == (0, 40, {}), after.stderr
