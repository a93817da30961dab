"""What replicas say of themselves, put together: who leads is what a leader says itself."""

from io import StringIO

from rich.console import Console

from metaservice.cli.cluster_picture import ClusterStatus, joined
from metaservice.cli.cluster_screen import draw
from metaservice.wire.schemas_cluster import ClusterMember, ClusterReply, ClusterShard


def shard(
    number: int,
    role: str,
    *,
    epoch: int = 3,
    seq: int = 100,
    leader: str = "",
    reason: str = "",
    lag: int = 0,
) -> ClusterShard:
    leads = role == "leader"
    return ClusterShard(
        shard=number,
        role=role,
        status=role,
        reason=reason,
        ready=leads,
        leader=leader,
        leader_url=f"http://{leader}:1" if leader else "",
        epoch=epoch,
        seq=seq,
        lag=lag,
        staleness_ms=0 if leads else 40,
        lease_left_ms=3_900 if leads else 0,
    )


def replica(name: str, *shards: ClusterShard) -> ClusterReply:
    return ClusterReply(
        replica=name,
        url=f"http://{name}:1",
        cluster="c1",
        status="serving",
        reason="",
        ready=True,
        members=[ClusterMember(replica=name, url=f"http://{name}:1", ready=True)],
        shards=list(shards),
    )


def drawn(seen: ClusterStatus) -> str:
    text = StringIO()
    draw(seen, Console(file=text, width=160))
    return text.getvalue()


def test_a_whole_cluster_is_led() -> None:
    seen = joined(
        [
            replica("r1", shard(0, "leader"), shard(1, "follower", seq=90, lag=10, leader="r2")),
            replica("r2", shard(0, "follower", leader="r1"), shard(1, "leader", epoch=5)),
        ],
        {},
        {},
    )
    assert seen.led
    assert [(row.shard, row.leader, row.leader_url, row.epoch) for row in seen.shards] == [
        (0, "r1", "http://r1:1", 3),
        (1, "r2", "http://r2:1", 5),
    ]
    assert [row.leads for row in seen.replicas] == [[0], [1]]
    assert [(row.replica, row.lag) for row in seen.shards[1].followers] == [("r1", 10)]
    assert seen.replicas[0].lag_max == 10
    text = drawn(seen)
    assert "r1 (10, 40)" in text
    assert "3,900" in text
    assert "!" not in text


def test_a_leader_that_does_not_answer_leads_nothing() -> None:
    """What others remember of it may be over: an operator must not be told that all is well."""
    seen = joined(
        [replica("r1", shard(0, "follower", leader="r2"))],
        {"http://r2:1": "timeout"},
        {"http://r2:1": "r2", "http://r1:1": "r1"},
    )
    assert not seen.led
    (row,) = seen.shards
    assert (row.led, row.leader, row.note) == (
        False,
        "r2",
        "r2 leads it, says r1, but does not answer",
    )
    silent = seen.replicas[-1]
    assert (silent.replica, silent.answers, silent.error) == ("r2", False, "timeout")
    text = drawn(seen)
    assert "none (r2?)" in text
    assert "r2 does not answer: timeout" in text


def test_a_follower_that_does_not_answer_leaves_the_shards_led() -> None:
    seen = joined([replica("r1", shard(0, "leader"))], {"http://r9:1": "refused"}, {})
    assert seen.led
    assert (seen.replicas[-1].replica, seen.replicas[-1].url) == ("", "http://r9:1")
    assert "http://r9:1 does not answer: refused" in drawn(seen)


def test_a_shard_in_between_says_why() -> None:
    seen = joined(
        [
            replica("r1", shard(0, "promoting", reason="replaying the journal's end"), shard(1, "leader")),
            replica("r2", shard(0, "follower", reason="the lease is taken"), shard(1, "follower")),
        ],
        {},
        {},
    )
    assert not seen.led
    assert seen.shards[0].note == "r1 is promoting: replaying the journal's end"
    assert seen.shards[1].led
    nobody = joined([replica("r1", shard(0, "follower", reason="etcd does not answer"))], {}, {})
    assert nobody.shards[0].note == "nobody leads it: etcd does not answer"
    assert joined([replica("r1", shard(0, "follower"))], {}, {}).shards[0].note == "nobody leads it"


def test_a_leader_whose_lease_ran_out_leads_nothing() -> None:
    row = shard(0, "leader", reason="not renewed in time")
    row = ClusterShard(**{name: getattr(row, name) for name in row.__struct_fields__} | {"ready": False})
    seen = joined([replica("r1", row)], {}, {})
    assert not seen.led
    assert seen.shards[0].note == "r1 is leader: not renewed in time"
    assert seen.replicas[0].leads == []


def test_of_two_that_led_when_asked_the_later_epoch_counts() -> None:
    seen = joined(
        [replica("r1", shard(0, "leader", epoch=3)), replica("r2", shard(0, "leader", epoch=4))], {}, {}
    )
    (row,) = seen.shards
    assert (row.led, row.leader, row.epoch) == (True, "r2", 4)
    assert row.note == "also led by r1 in epoch 3 when that was asked"


def test_what_a_replica_lacks_is_said() -> None:
    one = replica("r1", shard(0, "leader"))
    lonely = ClusterReply(
        **{name: getattr(one, name) for name in one.__struct_fields__}
        | {
            "ready": False,
            "reason": "the journal does not answer",
            "members": [ClusterMember(replica="r1", url="http://r1:1", ready=False, journal_ok=False)],
        }
    )
    seen = joined([lonely], {}, {})
    assert (seen.led, seen.replicas[0].ready, seen.replicas[0].journal_ok) == (True, False, False)
    assert "r1 does not reach the journal" in drawn(seen)
    assert "r1 is not ready: the journal does not answer" in drawn(seen)


def test_a_staleness_that_nobody_knows_is_no_number() -> None:
    row = shard(0, "follower")
    never = ClusterShard(
        **{name: getattr(row, name) for name in row.__struct_fields__} | {"staleness_ms": 1 << 53}
    )
    assert "r1 (0, ?)" in drawn(joined([replica("r1", never)], {}, {}))


def test_names_from_outside_cannot_draw() -> None:
    seen = joined(
        [replica("r1", shard(0, "follower", reason="[bold]x[/] [/nonsense]"))], {"[/x]": "[/y]"}, {}
    )
    text = drawn(seen)
    assert "[bold]x[/] [/nonsense]" in text
    assert "[/x] does not answer: [/y]" in text
