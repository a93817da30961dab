"""Several replicas: whom a call is for, and how the way there is learned."""

from array import array

import pytest

from metaservice.client import (
    Client,
    ClientConfig,
    ClientError,
    DeleteTask,
)
from metaservice.wire.schemas import LeaseOutcome, StorageRef
from tests.unit.client_cluster import KEYS, Look, both, cluster, writer
from tests.unit.client_peers import Request, good, peer, problem

HALF_S = 0.5
"""What a stopped replica may cost: half of the deadline."""
SLACK_S = 0.3


@both
def test_the_leader_is_learned_and_asked_straight_from_then_on(look: Look) -> None:
    with cluster() as house:
        results = look(house.config(), 20)
        assert [result.hits for result in results] == [8] * 20
        asked = house.asked("lookup")
        assert asked[-20:] == [1] * 20
        assert len(asked) <= 21, "told once at most"


@both
def test_one_url_of_a_cluster_is_enough(look: Look) -> None:
    with cluster() as house:
        results = look(house.config(url=house.urls[0]), 5)
        assert [result.hits for result in results] == [8] * 5
        assert house.asked("lookup") == [0, 1, 1, 1, 1, 1]
        assert all(request.direct for _, request in house.got("lookup"))


def test_ids_carry_their_shard_and_registrations_are_the_catalogues() -> None:
    with cluster() as house, writer(house) as client:
        started = client.start_write("i2", KEYS)
        assert started.session == "w-2-1"
        house.peers[2].requests.clear()
        assert client.finish(started, started.locations, started.generations).failure is None
        assert client.renew_write(started).failure is None
        assert client.abort(started).failure is None
        lease = client.lookup("i2", KEYS, lease_ms=1_000).lease
        assert client.release(lease or "").held()
        assert [request.verb for request in house.peers[2].requests] == [
            "finish", "renew", "abort", "lookup", "release",
        ]  # fmt: skip
        assert client.heartbeat().failure is None
        assert house.asked("heartbeat") == [0]


def test_worker_calls_go_to_the_shard_they_are_about() -> None:
    with cluster() as house, Client(house.config()) as client:
        assert client.register_worker("w", ["s"], keepalive=None).active
        for shard in (0, 1, 2, 2):
            assert client.take_tasks(shard=shard).failure is None
        assert [one.fields.get("shard") for number, one in house.got("tasks") if number == 2][-2:] == [2, 2]
        task = DeleteTask(
            task="t-1-3-4",
            storage=StorageRef(name="s", kind="posix", options={}),
            parts=("tp0",),
            locations=array("Q", [1]),
            generations=array("I", [1]),
            ttl_ms=1_000,
            deadline_ms=0,
        )
        assert client.confirm_task(task).gone == 1
        assert house.asked("confirm") == [1]
        assert client.unknown_places("s", [(2 << 44) + 7], [1]).failure is None
        assert house.asked("unknown")[-1] == 2
        mixed = client.unknown_places("s", [7, (2 << 44) + 7], [1, 1])
        assert (mixed.failure, mixed.unknown) == ("invalid_request", b"\0\0"), "nothing may go"


def test_leases_of_several_shards_are_ended_in_one_call_each_by_its_leader() -> None:
    def third_gone(number: int, request: Request) -> None:
        if number == 2 and request.verb in ("release", "renew"):
            request.send(problem(500, "internal"))
        else:
            behave(number, request)

    with cluster() as house, Client(house.config()) as client:
        leases = ["r-1-5-1", "r-0-5-1", "r-1-5-2", "r-2-5-1"]
        ended = client.release(leases)
        assert (ended.failure, ended.leases) == (None, leases)
        assert all(ended.held(row) for row in range(4))
        at_one = [
            request for number, request in house.got("release") if "/r-1-" in request.line and number == 1
        ]
        assert [request.fields["also"] for request in at_one] == [["r-1-5-2"]], "both in one request"
        behave, house._behave = house._behave, third_gone  # type: ignore[method-assign]
        some = client.renew_leases(leases, ttl_ms=500)
        assert some.failure == "rejected:internal"
        renewed, unknown = LeaseOutcome.renewed, LeaseOutcome.unknown
        assert list(some.outcomes) == [renewed, renewed, renewed, unknown]


def test_one_answer_moves_all_instances_of_a_shard() -> None:
    with cluster() as house, Client(house.config()) as client:
        for _ in range(2):
            assert client.lookup("i1", KEYS).hits == client.lookup("j1", KEYS).hits == 8
        house.leads[1] = 2
        before = house.count()[1]
        assert client.lookup("i1", KEYS).hits == client.lookup("j1", KEYS).hits == 8
        told = house.count()[1] - before
        assert told <= 2
        assert client.lookup("j1", KEYS).hits == 8
        assert house.asked("lookup")[-2:] == [2, 2]


def test_operators_ask_any_replica_which_passes_on() -> None:
    def answer(request: Request) -> None:
        got.append(request)
        request.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")

    got: list[Request] = []
    with (
        peer(answer) as one,
        peer(answer) as other,
        Client(ClientConfig(url=(one.url, other.url), raise_errors=True)) as client,
    ):
        assert client.put_tenant("t") == {}
        one.close()
        assert client.put_instance("i", "g", {}, shard=2) == {}
        assert client.get_json("/v1/tenants") == {}
        other.close()
        with pytest.raises(ClientError, match=r"refused_connection|connection_lost"):
            client.get_json("/v1/tenants")
    assert not any(request.direct for request in got)
    assert b'"shard":2' in got[1].body


def test_cluster_tells_of_shards_and_members() -> None:
    def answer(request: Request) -> None:
        rows = b",".join(
            b'{"shard":%d,"role":"leader","status":"","reason":"","ready":true,' % n
            + b'"leader":"a","leader_url":"http://a:1","epoch":3,"seq":4}'
            for n in shards
        )
        body = (
            b'{"replica":"a","url":"http://a:1","cluster":"c","status":"ready","reason":"","ready":true,'
            b'"members":[],"shards":[' + rows + b"]}"
        )
        request.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )

    shards = [0, 1]
    with peer(answer) as one, Client(ClientConfig(url=one.url)) as client:
        seen = client.cluster()
        assert (seen.failure, seen.replica, len(seen.shards), seen.shards[1].epoch) == (None, "a", 2, 3)
        shards = [0, 2]
        assert client.cluster().failure == "protocol"


def test_questions_that_allow_old_answers_are_answered_by_any_replica() -> None:
    with cluster() as house, Client(house.config()) as client:
        house.kill(1)
        for _ in range(5):
            found = client.lookup("i1", KEYS, staleness_ms_max=100)
            assert (found.failure, found.hits, found.staleness_ms) == (None, 8, 30)
        assert len(set(house.asked("lookup"))) == 1, "who answered is asked again"
        house.staleness_ms = 101
        assert client.lookup("i1", KEYS, staleness_ms_max=100).failure == "protocol", "older than allowed"
        house.start(1)
        house.behind = {0, 1, 2}
        found = client.lookup("i1", KEYS, staleness_ms_max=100)
        assert (found.failure, found.hits, found.staleness_ms) == (None, 8, 0), "then it is the leader's"
        assert house.asked("lookup")[-1] == 1


# -- settings


def test_urls_are_one_or_several() -> None:
    both_ways = ("http://a:1", "http://b:2/x")
    assert ClientConfig(url="http://a:1/, http://b:2/x/ ,http://a:1").urls == both_ways
    assert ClientConfig(url=both_ways).urls == both_ways
    for wrong in ("", ",", (), "http://a:1,ftp://b", ("http://a:1", "http://b:99999"), "http://a b"):
        with pytest.raises(ValueError, match=r"url|[Pp]ort"):
            ClientConfig(url=wrong)
    with pytest.raises(ValueError, match="retry_ms"):
        ClientConfig(retry_ms=-1)


def test_good_peer_alone_is_asked_straight_too() -> None:
    with peer(good) as one, Client(ClientConfig(url=one.url)) as client:
        assert client.lookup("i", KEYS).hits == 8
        assert one.requests[0].direct
