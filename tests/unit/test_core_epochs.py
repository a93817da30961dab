"""Snapshots of one of several shards, states that are compared, and the end of an epoch by plan."""

import base64
import zlib

import msgspec
import pytest

from metaservice.core import commands as cmd
from metaservice.core.capture import restore
from metaservice.core.events import Event, HotBlocks, StateChecked
from metaservice.core.machine import Machine
from metaservice.core.model import EvictionPolicy, Limits, Quota
from metaservice.core.summary import StateDiverged
from tests.sim.fleet import Fleet, key
from tests.unit.core_realm import LIMITS, Realm

RELEASED = (
    "c-oDXy>HV%6u|H7fGSj}DH407GK8f{BGHwqLm3%R1x&_GE{WyDj(nG<MGO_~#z35!Hbn?*NJ5*^h%PW8S;(DG5F1Oy|G>bA#"
    "QALJ<I)x`(b@OjyLWf*-tT$aI)SfF!8Hh`VLOw|<q-M?rXGBt-Qof;w*@Ef7@{DWmP4MjSBiQ@#fjF+IziY4bvI$|IvBLdI#"
    "$*;db0@|n0s^vF&!LPyP<VY{MZw>0Ia*N*>Dsm|MZv{NLYD<B%-TG!|`@T)?{PdZlN_|$Q$jvp;yY-+-$0fmIX~sE}>?wQY;"
    "=-=~%By!4lxGAmf6BGX+#aZCsGkH|Gxm5kgrf*-_EDR76^y6yp2ps+1+`Wz<~BrRG~DJ&THAUzQDm>zl!Tue8|OY&Ev-TT)J"
    "5piAu=XjQ?At~n|G=-`X#AG=m>yg?}^6~wk?gBl&DhsQK9>d=@*G3Ehp*)sP8HWT(LNvi!+_F^Icz>7h@htO<52$+R8NhQD+"
    "3%+U+h9hR^&#9Spfx1{qoWR)^!1Cg1a&DwiNoq`z<|Wlp!JOs(k0)w0ydk!!m>`Jo4EY2In>QndZ~QZA^c2x6j3&he&e)5`!"
    "naG2gt`Xjv}m?BYkD&ai&JdCKcjXc{y7EH)&bFVRnk|H!EP|($?6cK$r_Q$6~Yvhq#!YRQ+Ajs>D}&1C7VY?${W-aWdje;A="
    "D<_IK)IZ<UAU<7=do@faT*r8xk0%UzCj@fxGV&4HH?*47u}h9A;rCnMZ*+gV|xa{sCfySRbfyp8C4fxNcAm`h_4U3|u+jst6"
    "wk6Yd<-?J63Q43t+eK}HyGhL8=;SEqgT^W&;+sL0^eKD#vRw3;4O4TT_yM%n1!B?oYlr-f&QXU=smWczZMuVTNWKVY*Uz3c}"
    "2$tjwG3(<x+chMX#$+N_h#B)Ry_SuK#tJYZApobc+WP)GK*nhD3MmM-N8toEgD{xG!2DN`T5G^Han-;?JS&MEzaVBX3CCyFj"
    "bZ}K689!Tt+4SoN9mDDrbQ0zk`#5?m0^USa2fP{mSMJ`{joR1y-|t*~tarik_1`-`^q;pszrJffyJbE63sX*ME&"
)
"""A snapshot's chunks, the journal's events and the digest, as a release before several shards wrote them."""


def test_what_a_release_before_several_shards_wrote_is_read_and_means_the_same() -> None:
    data = zlib.decompress(base64.b85decode(RELEASED))
    chunks, journal, digest = msgspec.msgpack.decode(data, type=tuple[list[bytes], bytes, bytes])
    assert Machine.restore(chunks, 0, Limits()).digest() == digest
    replica = Machine(0, Limits())
    for event in msgspec.msgpack.decode(journal, type=list[Event]):
        replica.apply(event)
    assert replica.digest() == digest
    assert replica.state.tenants["t"].usage.budget_blocks == 40
    assert replica.state.storages["s"].usage.budget_bytes == 9_000


def test_a_snapshot_of_another_number_of_shards_is_refused() -> None:
    realm = Realm(2)
    realm.furnish(tenant=Quota(blocks=80))
    chunks = realm.nodes[1].machine.capture()
    assert Machine.restore(chunks, 1, LIMITS, 2).digest() == realm.nodes[1].machine.digest()
    for shards in (1, 3):
        with pytest.raises(ValueError, match="shards"):
            restore(chunks, LIMITS, shards)
    with pytest.raises(ValueError, match="shards"):
        restore(Fleet().machine.capture(), LIMITS, 2)


def test_i6_a_replica_that_adds_up_to_something_else_is_found_out() -> None:
    fleet = Fleet(LIMITS)
    fleet.put([key("a")])
    fleet.tick(LIMITS.hot_summary_ms)
    checks = [row for row, one in enumerate(fleet.events) if isinstance(one, StateChecked)]
    assert len(checks) == 1
    fleet.replayed()
    replica = Machine(0, LIMITS)
    for event in fleet.events[: checks[0]]:
        replica.apply(event)
    replica.state.tenants["t"].usage.bytes += 1
    with pytest.raises(StateDiverged):
        replica.apply(fleet.events[checks[0]])


def test_states_are_compared_only_when_something_happened() -> None:
    fleet = Fleet(LIMITS)
    for _ in range(5):
        fleet.tick(LIMITS.hot_summary_ms)
    assert sum(isinstance(one, StateChecked) for one in fleet.events) == 1
    for name in "abc":
        fleet.put([key(name)])
        fleet.tick(1)
    assert sum(isinstance(one, StateChecked) for one in fleet.events) == 2, "not too often"
    fleet.tick(LIMITS.hot_summary_ms)
    assert sum(isinstance(one, StateChecked) for one in fleet.events) == 3
    assert not any(isinstance(one, HotBlocks) for one in fleet.events), "nothing was looked up"


def test_a_leader_that_stands_down_by_plan_is_a_follower() -> None:
    fleet = Fleet(LIMITS, quota=Quota(blocks=3), eviction=EvictionPolicy.lru, high_permille=1000)
    fleet.tick(1_000)
    fleet.put([key("a")])
    fleet.put([key("b")])
    fleet.put([key("c")])
    held = fleet.lookup([key("a"), key("b")], mode="each", lease_ms=500)
    fleet.remove([key("b"), key("c")])
    fleet.tick(100)
    assert [len(task.locations) for task in fleet.take()] == [1], "b is leased"
    digest = fleet.machine.digest()
    machine = fleet.machine
    machine.stand_down()
    assert machine.digest() == digest and not any(machine.state.index.pins)
    assert machine.gauges()["leases_held"] == 0
    fleet.take_over()
    fleet.done(cmd.RegisterEngine(engine="e1", incarnation="1"))
    assert fleet.ask(cmd.ReleaseLeases(leases=(held.lease or "",))).outcomes == b"\x03", "unknown"
    assert fleet.take() == [], "what the leader before promised is waited for"
    fleet.tick(1_000)
    assert sum(len(task.locations) for task in fleet.take()) == 2, "what was in work, or leased, is offered"
    machine.check()


def test_d4_readers_of_followers_are_waited_for_from_when_a_removal_is_durable() -> None:
    fleet = Fleet(LIMITS)
    fleet.put([key("a")])
    fleet.tick(2_000)
    fleet.auto = False
    fleet.remove([key("a")])
    fleet.now_ms += 10_000  # the append hung; followers went on showing the block
    fleet.machine.mark_durable(len(fleet.events), fleet.now_ms)
    assert fleet.take() == []
    fleet.now_ms += LIMITS.reclaim_delay_ms
    assert [len(task.locations) for task in fleet.take()] == [1]
