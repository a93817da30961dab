"""Two replicas on one journal: one publishes, the other knows it all and sends nothing, until it leads."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from metaservice.cli.local.cluster import LocalCluster
from metaservice.cli.local.replicas import LocalReplica, Settings
from tests.functional.cluster_house import FAST, TTL_S
from tests.functional.events_reader import Reader
from tests.functional.events_service import (
    CHANNELS_MAX,
    Caller,
    Prompt,
    eventually,
    free_ports,
    known,
    wanted,
)

BACK_WITHIN_S = TTL_S + 4.0
END_WITHIN_S = 0.3
"""A tenth of a second, and a busy machine."""


def own(number: int) -> Settings:
    """Ports of a replica's streams."""
    return {"events_port_base": free_ports(2 * CHANNELS_MAX), "events_channels_max": CHANNELS_MAX}


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    settings: Settings = {**FAST, "expire_ms": 60_000}
    with LocalCluster(leadership="sql_lease", replicas=2, shards=1, settings=settings, own=own) as cluster:
        yield cluster


def pair(cluster: LocalCluster) -> tuple[LocalReplica, LocalReplica]:
    """(who leads, who follows)"""
    leader = cluster.leader(0)
    assert leader is not None
    (follower,) = [replica for replica in cluster.replicas if replica is not leader]
    return leader, follower


def view_of(caller: Caller) -> dict[str, Any] | None:
    """The stream of `m1` as that replica shows it."""
    found = [view for view in caller.streams() if view["instance"] == "m1"]
    return found[0] if found else None


def test_row_09_and_26_a_failover_goes_on_with_the_same_stream(cluster: LocalCluster) -> None:
    """The follower answers questions and replays all the time; when the leader is killed, it goes on with the
    next number, and what both ever sent under one number is the same."""
    leader, follower = pair(cluster)
    first, second = Caller(leader.url), Caller(follower.url)
    try:
        first.furnish("m1", publication={"model": "m1"})
        reader = first.reader("m1")
        prompt = Prompt(3_000, 30)
        first.write(prompt)
        reader.pump(lambda: reader.has(prompt.hashes))
        eventually(lambda: view_of(second) is not None, "the follower knows the stream")
        standby = view_of(second)
        assert standby is not None and not standby["live"]
        with Reader(standby["endpoint"], standby["replay"]) as deaf:
            assert not deaf._sub.poll(1_500), "a follower sends nothing"
            began_s = time.monotonic()
            deaf.replayed(0)
            assert time.monotonic() - began_s < END_WITHIN_S
        eventually(lambda: routed(second, prompt, 5_000)["pool"]["announced"] == 30, "it has heard of it")
        answer = routed(second, prompt, 5_000)
        assert answer["pool"]["blocks"] == 30 and 0 < answer["pool"]["staleness_ms"] <= 5_000
        assert answer["engines"][0]["tiers"]["external"] == 30
        assert routed(second, prompt, 0)["pool"]["staleness_ms"] == 0, "or it asks the leader"

        newest = reader.seq or 0
        leader.crash()
        after = Prompt(3_001, 5, after=prompt)
        other = Reader(standby["endpoint"], standby["replay"])
        took_s = other.pump(lambda: other.live > 0, BACK_WITHIN_S, "the other one leads")
        assert took_s <= BACK_WITHIN_S
        assert other.live > newest, "numbers never fall"
        assert known(other.index, "EXTERNAL") == wanted(prompt)
        second._lives.update(first._lives)
        eventually(lambda: written(second, after), "it takes writes", BACK_WITHIN_S)
        other.pump(lambda: other.has(after.hashes))
        assert known(other.index, "EXTERNAL") == wanted(prompt) | wanted(after)
        both = {batch.seq: batch for batch in other.replayed(newest - 2)}
        mine = {batch.seq: batch for batch in reader.batches if batch.seq in both}
        assert mine and all(both[seq] == batch for seq, batch in mine.items()), "the same bytes from both"
        other.close()
    finally:
        first.close()
        second.close()


def routed(caller: Caller, prompt: Prompt, staleness_ms_max: int) -> Any:
    """The answer of the asked replica."""
    body = {"keys": prompt.keys, "staleness_ms_max": staleness_ms_max}
    return caller.ask("POST", "/v1/instances/m1/route", body)


def written(caller: Caller, prompt: Prompt) -> bool:
    """Whether the prompt could be written."""
    try:
        caller.write(prompt)
    except AssertionError:
        return False
    return True


@pytest.mark.slow
def test_a_planned_handover_loses_no_batch(cluster: LocalCluster) -> None:
    """And nobody sends while the other does: numbers of both together are each there once."""
    leader, follower = pair(cluster)
    first = Caller(leader.url)
    try:
        first.furnish("m1", publication={"model": "m1"})
        reader = first.reader("m1")
        eventually(lambda: view_of(Caller(follower.url)) is not None, "the follower knows the stream")
        standby = view_of(Caller(follower.url))
        assert standby is not None
        other = Reader(standby["endpoint"], standby["replay"])
        prompts = [Prompt(3_100 + number, 2) for number in range(6)]
        for prompt in prompts[:3]:
            first.write(prompt)
        first.ask("POST", "/v1/cluster/shards/0/handover", {"to": follower.name})
        for prompt in prompts[3:]:
            eventually(lambda prompt=prompt: written(first, prompt), "writes go on")  # type: ignore[misc]
        wanted_all = {one for prompt in prompts for one in prompt.hashes}
        other.pump(lambda: other.has(wanted_all), 15.0, "all of it is told by the new leader")
        reader.drain(0.5)
        sent_by_first = {batch.seq for batch in reader.batches if batch.seq > 2**20}
        last = max(sent_by_first)
        numbers = [batch.seq for batch in other.replayed(last + 1)]
        assert numbers == [*range(last + 1, numbers[-1] + 1)], "the new leader goes on with the next number"
        assert reader.live < other.live
        other.close()
    finally:
        first.close()
