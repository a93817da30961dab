"""Volatile storages over several shards: the catalogue says whose the pool is, every shard drops what is its
own; and what a release before wrote."""

import base64
import zlib

import msgspec
import pytest

from metaservice.core import commands as cmd
from metaservice.core.events import PoolChanged
from metaservice.core.machine import Machine
from metaservice.core.model import EvictionPolicy, Limits, Quota, SwitchScope
from metaservice.core.state import Storage
from metaservice.journal.codec import decode_batch, encode_batch
from tests.sim.fleet import BLOCK_BYTES
from tests.unit.core_realm import LIMITS, Realm

RELEASED = (
    "c-rk)U2NM_6u#GXyJ{+3DmpQVmx>p7VT}vh+oaOIFwnFiF;z?g%S~<*H*p+nw_SNEjEA8KDREPlG9J>T?b@yF7($zb_=%8<7^p>J"
    "2nlKIWk}<p+7l0zK#1eNICY#hTL)B2Y+c*;oSWlw&b_(k^QTQrt}r)mq5T*gz;mJC;2<GuXy5U5xb*g*6y4O6&g518ow<Ry6pAUU"
    "I5j&krV^!yv|?C0Ul56i3rbXcyAT%S`K~Y->4IJ{htB5}9?d2tML0dahA@}PA#Exj;lWrMRF1)-ZElsmwo1Q?!D<mkiN+|yw*N3>"
    "49jHmd=LztyJ`;M6yYtxsZxw2l)zkwPw?_sZkC)@Wqy1vB1^+bC4FWlCM3dWCc%qjW^gzjUmAtJG|E{oL6@Vv66KUol!#<biSpft"
    "4lh_DLc-I*OEEIW#YrNfMg#M)5iYEbCCSXdAbWULl)@x#Uz5D7D%u&#<Gr)yyUn+m?=7gw;1)V|UM3@gB1nm8)*C$fI*lQ4h?}jq"
    "xG6Jk5$0R0tGH<^ZnoayW+3iVIy+6KS$ikSp_G=Lj+OO|Z6uqIi3KShc7?{S(W0Xj{AWg+!iE97`uJJUpZr$uKyYAa6f_zd15NM1"
    "wzRzIP3G7s%CJC}EVLTpW@vkiF|C_^0S0j@Gf^O2Z2nCi_SB_OSx^b5sE{aPx#)2S6^r-f)Lv9NEC)+BI1#+n%(3OdApg;_<-nkj"
    "5R|CnfgbR_P-l>Ph0_=}!(gyr2P66i<H?N?%vSkn#>hBz+D?|^v{>%6=<774w>XA%%5ILM6gVns8a6vxvw2&g`aeWjJ-`PKZaP51"
    "R!F)lB+peyp7%<`3d>@JWzl0fTYOj^6>D;!({ByYWle9PXo|uVjs3@Nn!bR$_Uwu5q3wRPJK9E`b&X<YSqCW3U_HRtPfaCBv;DNk"
    "k)WC^fy-!{16Pqdwsbj5!QWg%XmSz*N}=E>4Nz#3f|A@~b&5tuY;!t{u_ZlL>cOtnWOi2je=BMehO&qzKni`7(E!vSxUg7*atBW$"
    "i}k*=-qX{&&vc;L-8rhsS6Y5P*>|khim&CH!l4&4x6pyif+|TdP8uPywL91tFmp*I2|l56$zj!07#Psro?R%IT~gvgh;R`ZhC2HT"
    "GSY&=emV-<y32|x$$W&k=DlFi@8>jP>@@jl8SH4M7R-9%8h26W<`5jznOzhTu(2gVWe!=`vb^AxRjkcb(Wfw%m(Xphty4!!RkN~a"
    "mUL{T&aL^SYHwA4PtEs01#c$O82M&_t*<Ol_=Bt9uaF>|Od^7!64_o}My<=C$*ZH193ygt7J!L~M=Dl!)i0#VRqB5A_%2i539=w@"
    "{Y((;p9QwQvcTYK3(>~I<}#`Yf}Zdq5-%R{q7g3^@nWNY1=2ncl<nLOpSW-Ud&;~s!V5jTz{7>g*=1{TU_wMFr<R90V;H_zCYs6R"
    "bc}1l(?Ku9^8!3CzT6T1t{Ha+DzezQT^3!OUL{M-zFC@Bg6x1x@MjFgOvUkaJ@E8X;@!p9z6diHk92RGxb}<QITSnB)^_2^mtHva"
    ")5|vk??3U$;&*qxzjEW_u3v-ieRZ~jlsGQj;J6wbSA*kfa9ocZ$3^X!<6<5z$3;C#92e8zxOOeaMcI>F-k7r1;JEIe<2sn7+D(ot"
    "^<VN+Yi0b@m;0Z+e$<bj$~`zUwL|u)!7nxVrT?8@n!FO?RX#37h9L<&B*E0S+Fv!OK|eL<r(Huo`LEUX9I6R6Hh8Js#Y-^_UTSMz"
    ">ca0w>5c1uKeNn@-#(%*bm*NupT>V|-}tM2{q;YN4g7HT^Ed9@8|o{Z;_tk2`_-GD^$-06YWavI"
)
"""Chunks of a snapshot, journal and digest of two shards, as a release wrote them that knew no pools: blocks
in a storage `s` and in one of the kind `shm`, with answers that are remembered."""


class Hosts(Realm):
    """Two data shards and the catalogue, all with blocks in a volatile storage that worker `m` holds."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        super().__init__(3, limits)
        self.furnish(tenant=Quota(blocks=300), capacity_bytes=9_000)
        self.done(0, cmd.PutStorage(storage="mem", kind="shm", options={}, capacity_bytes=9_000))
        self.done(
            0,
            cmd.PutGroup(group="ga", tenant="ta", storages=("mem",), eviction=EvictionPolicy.reject),
        )
        self.restart("m1")
        self.rest(2)

    def restart(self, incarnation: str, worker: str = "m") -> None:
        """The worker starts (anew); no shard was told yet."""
        self.done(0, cmd.RegisterWorker(worker=worker, incarnation=incarnation, storages=("mem",)))

    def mem(self, shard: int) -> Storage:
        """The volatile storage as the shard knows it."""
        return self.nodes[shard].machine.state.storages["mem"]

    def pools(self) -> list[str]:
        """Whose life each shard believes in."""
        storages = [self.mem(node.shard) for node in self.nodes]
        return [one.pool.incarnation if one.pool is not None else "" for one in storages]

    def blocks(self) -> list[int]:
        """What each shard has in the storage, in whatever state."""
        usages = [self.mem(node.shard).usage for node in self.nodes]
        return [usage.blocks + usage.deleting_blocks for usage in usages]

    def sound(self) -> None:
        """Everything agrees, now and at every event of every journal."""
        self.check_machines()
        self.check()
        self.check_replay()
        for node in self.nodes:
            machine = Machine(node.shard, self.limits, node.shards)
            for event in node.events:
                machine.apply(event)
                machine.check()


def test_every_shard_drops_what_it_has_when_it_hears_of_it() -> None:
    hosts = Hosts()
    for shard in range(3):
        assert hosts.put(shard, 2 + shard) == 2 + shard
    pending = hosts.start(2, 3)
    hosts.restart("m2")
    assert (hosts.blocks(), hosts.pools()) == ([0, 3, 7], ["m2", "m1", "m1"])
    hosts.feed(2)
    assert (hosts.blocks(), hosts.pools()) == ([0, 3, 0], ["m2", "m1", "m2"])
    state = hosts.nodes[2].machine.state
    assert not state.sessions and not any(state.index.visible)
    assert pending.pools == {hosts.mem(2).number: "m1"}
    hosts.feed(1)
    hosts.rest(2)
    assert (hosts.blocks(), hosts.pools()) == ([0, 0, 0], ["m2"] * 3)
    assert hosts.used(SwitchScope.tenant, "ta") == (0, 0)
    assert hosts.put(1, 4) == 4
    hosts.sound()


@pytest.mark.parametrize("how", ["left", "expired"])
def test_without_a_pool_no_shard_takes_writes(how: str) -> None:
    hosts = Hosts(msgspec.structs.replace(LIMITS, expire_ms=15_000))
    hosts.put(1, 2)
    if how == "left":
        hosts.done(0, cmd.Deregister(kind="worker", id="m", incarnation="m1"))
    else:
        hosts.now_ms += 15_000
        hosts.done(0, cmd.Tick())
        hosts.done(0, cmd.RegisterEngine(engine="e", incarnation="1"))
    for shard in range(3):
        hosts.feed(shard)
        assert hosts.put(shard, 2) == 0
    assert (hosts.blocks(), hosts.pools()) == ([0, 0, 0], [""] * 3)
    hosts.restart("m2", worker="n")
    hosts.rest(1)
    assert [hosts.put(shard, 2) for shard in range(3)] == [2, 2, 2]
    hosts.sound()


def test_whole_batches_or_half_of_one_a_shard_is_sound_in_between() -> None:
    hosts = Hosts()
    hosts.put(1, 2)
    hosts.restart("m2")
    news = hosts.news(1)
    assert news is not None and len(news.events) == 3
    since = news.since
    for at, event in enumerate(news.events, 1):
        version = news.version - len(news.events) + at
        hosts.done(1, cmd.TakeCatalogue(since=since, version=version, events=(event,)))
        since = version
        hosts.check_machines()
    assert hosts.pools()[1] == "m2" and hosts.blocks()[1] == 0
    hosts.sound()


@pytest.mark.parametrize("lives", [("m2",), ("m2", "m3"), ("m2", ""), ("",)])
def test_a_shard_that_takes_the_whole_catalogue_drops_it_too(lives: tuple[str, ...]) -> None:
    hosts = Hosts()
    hosts.put(1, 3)
    hosts.put(2, 1)
    for life in lives:
        if life:
            hosts.restart(life)
        else:
            incarnation = hosts.catalogue.state.workers["m"].incarnation
            hosts.done(0, cmd.Deregister(kind="worker", id="m", incarnation=incarnation))
    hosts.done(1, cmd.SyncCatalogue(view=hosts.view()))
    assert hosts.pools()[1] == lives[-1] and hosts.blocks()[1] == 0
    hosts.feed(2)
    assert hosts.pools()[2] == lives[-1] and hosts.blocks()[2] == 0
    hosts.rest(1)
    hosts.sound()


def test_a_shard_that_takes_the_whole_catalogue_keeps_what_is_there() -> None:
    hosts = Hosts()
    hosts.put(1, 3)
    hosts.done(0, cmd.PutTenant(tenant="other"))
    before = len(hosts.nodes[1].events)
    hosts.done(1, cmd.SyncCatalogue(view=hosts.view()))
    assert not any(isinstance(event, PoolChanged) for event in hosts.nodes[1].events[before:])
    assert hosts.pools()[1] == "m1" and hosts.blocks()[1] == 3


def test_a_shard_made_from_the_whole_catalogue_knows_the_pools() -> None:
    hosts = Hosts()
    fresh = Machine(1, LIMITS, 3)
    fresh.execute(cmd.TakeOver(epoch=1, cluster=""), hosts.now_ms)
    fresh.execute(cmd.SyncCatalogue(view=hosts.view()), hosts.now_ms)
    pool = fresh.state.storages["mem"].pool
    assert pool is not None and (pool.worker, pool.incarnation) == ("m", "m1")
    fresh.check()


def test_d4_a_pool_that_was_lost_with_the_leader_reached_nobody() -> None:
    hosts = Hosts()
    hosts.put(1, 2)
    hosts.auto = False
    hosts.restart("m2")
    assert hosts.news(1) is None, "shards are told what is durable"
    hosts.crash(0)
    hosts.auto = True
    hosts.flush(0)
    assert hosts.pools() == ["m1"] * 3 and hosts.blocks()[1] == 2
    hosts.restart("m2")
    hosts.feed(1)
    hosts.crash(1, from_capture=True)
    assert hosts.pools()[1] == "m2" and hosts.blocks()[1] == 0
    hosts.rest(1)
    hosts.sound()


def test_slices_of_a_storage_count_what_is_gone_as_free() -> None:
    hosts = Hosts()
    hosts.done(0, cmd.PutStorage(storage="mem", kind="shm", options={}, capacity_bytes=60 * BLOCK_BYTES))

    def fill(shard: int) -> int:
        written = 0
        for _ in range(30):
            hosts.rest(1)
            written += hosts.put(shard, 5)
        return written

    hosts.rest()
    assert fill(0) >= 50 and fill(1) <= 10
    hosts.restart("m2")
    assert fill(1) >= 50, "shard 0 gave what it no longer needs"
    hosts.sound()


def test_a_storage_goes_only_when_all_shards_said_that_they_dropped_it() -> None:
    hosts = Hosts()
    hosts.put(1, 2)
    hosts.rest(2)
    hosts.done(0, cmd.PutGroup(group="ga", tenant="ta", storages=("sa",)))
    delete = cmd.DeleteStorage(storage="mem")
    assert "holds" in hosts.send(0, delete).message
    hosts.done(0, cmd.Deregister(kind="worker", id="m", incarnation="m1"))
    assert "has not reported" in hosts.send(0, delete).message
    hosts.rest(2)
    hosts.done(0, delete)
    hosts.rest(1)
    assert all("mem" not in node.machine.state.storages for node in hosts.nodes)
    hosts.sound()


# ---------------------------------------------------------------- journals


def released() -> list[tuple[list[bytes], bytes, bytes]]:
    """Snapshot, journal and digest of each shard, from the release before."""
    data = zlib.decompress(base64.b85decode(RELEASED))
    return msgspec.msgpack.decode(data, type=list[tuple[list[bytes], bytes, bytes]])


def test_what_a_release_before_pools_wrote_is_read_and_means_the_same() -> None:
    for shard, (chunks, journal, digest) in enumerate(released()):
        assert Machine.restore(chunks, shard, LIMITS, 2).digest() == digest
        replica = Machine(shard, LIMITS, 2)
        for event in decode_batch(journal):
            replica.apply(event)
        assert replica.digest() == digest
        assert decode_batch(encode_batch(decode_batch(journal))) == decode_batch(journal)
        assert replica.capture() == chunks


def test_what_it_left_in_a_volatile_storage_goes_with_the_first_take_over() -> None:
    for shard, (chunks, _, _) in enumerate(released()):
        machine = Machine.restore(chunks, shard, LIMITS, 2)
        usage = machine.state.storages["mem"].usage
        kept = machine.state.storages["sa"].usage.blocks
        assert usage.blocks == 2 and kept == 4
        now_ms = machine.state.now_ms
        _, events = machine.execute(cmd.TakeOver(epoch=machine.state.epoch + 1, cluster=""), now_ms)
        assert events[1:] == [PoolChanged(now_ms, "mem", "", "")]
        machine.check()
        assert (usage.blocks, usage.deleting_blocks) == (0, 0)
        assert machine.state.storages["sa"].usage.blocks == kept
        again = Machine.restore(chunks, shard, LIMITS, 2)
        for event in events:
            again.apply(event)
        assert again.digest() == machine.digest()


def test_its_worker_gets_the_pool_when_it_registers_again() -> None:
    chunks = released()[0][0]
    machine = Machine.restore(chunks, 0, LIMITS, 2)
    now_ms = machine.state.now_ms
    machine.execute(cmd.TakeOver(epoch=machine.state.epoch + 1, cluster=""), now_ms)
    same = cmd.RegisterWorker(worker="km", incarnation="old", storages=("mem",))
    _, events = machine.execute(same, now_ms)
    assert events == [PoolChanged(now_ms, "mem", "km", "old")]
    machine.check()


def test_a_change_of_pool_is_journaled_like_any_event() -> None:
    events = [PoolChanged(7, "mem", "m", "m1"), PoolChanged(8, "mem", "", "")]
    assert decode_batch(encode_batch(events)) == events
