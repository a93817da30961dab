"""Background renewal with several replicas: each shard's leader is followed, and one shard's trouble is not
another's."""

import os
import signal
import time
from itertools import pairwise

import pytest

from metaservice.client import Client
from metaservice.client.config import Keepalive
from tests.unit.client_cluster import KEYS, FakeCluster, cluster
from tests.unit.client_keepers import eventually

LEASE_MS = 1_000


def renewals(house: FakeCluster, id: str) -> list[int]:
    """Which replicas were asked to renew this lease or session, alone or with others."""
    return [
        number
        for number, request in house.got("renew")
        if id in (request.line.split("/")[3], *request.fields.get("also", []))
    ]


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_heartbeats_and_renewals_go_to_their_leaders(mode: Keepalive) -> None:
    with cluster() as house, Client(house.config()) as client:
        assert client.register_engine("e", keepalive=mode).active
        found = client.lookup("i2", KEYS, lease_ms=LEASE_MS, renew=True)
        started = client.start_write("i1", KEYS, ttl_ms=LEASE_MS, renew=True)
        assert (found.lease, started.session) == ("r-2-1-1", "w-1-1")
        eventually(lambda: renewals(house, "r-2-1-1")[-2:] == [2, 2])
        eventually(lambda: house.asked("heartbeat")[-3:] == [0, 0, 0])
        assert client.held("r-2-1-1")
        house.kill(0)
        house.leads[0] = 1
        house.kill(2)
        house.leads[2] = 1
        eventually(lambda: house.asked("heartbeat")[-3:] == [1, 1, 1])
        eventually(lambda: renewals(house, "r-2-1-1")[-2:] == [1, 1])
        assert client.held("r-2-1-1"), "the lease did not notice"
        assert client.registration is not None
        assert (client.registration.active, client.registration.lost) == (True, 0)


def test_d4_stopped_leader_of_one_shard_does_not_let_others_expire() -> None:
    with cluster() as house, Client(house.config()) as client:
        client.register_engine("e", keepalive="thread")
        for instance in ("i1", "i2"):
            client.lookup(instance, KEYS, lease_ms=LEASE_MS, renew=True)
        eventually(lambda: renewals(house, "r-1-1-1") and renewals(house, "r-2-1-1"))
        house.stopped.add(1)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            assert client.held("r-2-1-1")
            time.sleep(0.02)
        beats = [request.at_s for _, request in house.got("heartbeat")]
        gaps = [later - sooner for sooner, later in pairwise(beats)]
        assert max(gaps) < 1.0, "registered all the while"
        assert not client.held("r-1-1-1"), "what nobody renewed is over, and known to be"


def test_catalogue_without_a_leader_does_not_stop_renewals() -> None:
    with cluster() as house, Client(house.config()) as client:
        client.register_engine("e", keepalive="thread")
        client.lookup("i1", KEYS, lease_ms=LEASE_MS, renew=True)
        eventually(lambda: house.asked("heartbeat"))
        house.leads[0] = None
        before = len(renewals(house, "r-1-1-1"))
        eventually(lambda: len(renewals(house, "r-1-1-1")) >= before + 3)
        assert client.held("r-1-1-1")
        house.leads[0] = 2
        eventually(lambda: house.asked("heartbeat")[-1] == 2)


def test_c12_keeper_of_a_stopped_engine_renews_nothing() -> None:
    """SIGSTOP of the engine: its keeper is a process of its own and goes on; SIGKILL: it ends with it."""
    with cluster() as house:
        child = os.fork()
        if child == 0:
            client = Client(house.config())
            client.register_engine("e", keepalive="process")
            client.lookup("i1", KEYS, lease_ms=LEASE_MS, renew=True)
            time.sleep(60)
            os._exit(0)
        try:
            eventually(lambda: renewals(house, "r-1-1-1"))
            os.kill(child, signal.SIGSTOP)
            before = len(renewals(house, "r-1-1-1"))
            eventually(lambda: len(renewals(house, "r-1-1-1")) > before)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        time.sleep(1.5)
        after = len(renewals(house, "r-1-1-1"))
        time.sleep(1.0)
        assert len(renewals(house, "r-1-1-1")) == after, "a dead engine holds no block"
