"""Leadership in etcd: one lease per replica, and keys that go with it.

    <prefix>/replicas/<name>   who is alive: URL, life, report; written with each renewal
    <prefix>/shards/<number>   who holds the shard
    <prefix>/next/<number>     for whom the last holder resigned; goes with the lease of that replica, so that
                               a hint to a replica that is gone does not stay

Taking a shard is one transaction that makes its key if nobody has it. No key is ever watched: the view is
read with each renewal (one transaction writes the report and reads all keys) and whenever somebody looks, so
there is nothing that a compaction could cut off and no stream that could be silently dead (cases I7, E15).

One renewal is done at one member from start to end. A member that is cut off from the others may still answer
the keep-alive, but not the transaction; taking the two answers from two members would count a renewal that
the cluster never saw.

etcd decides nothing that must be safe. It may forget a lease that was just renewed (case D12), lose all its
data (case D3) or be wiped by hand: the replica then makes a new lease, and if two lead meanwhile, the epoch
in the journal fences one of them.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from metaservice.leadership.addresses import Lookup
from metaservice.leadership.errors import LeadershipError, LeadershipRefused, ReplicaSuperseded
from metaservice.leadership.etcd_gateway import EtcdGateway, EtcdSettings
from metaservice.leadership.etcd_gateway import Member as EtcdMember
from metaservice.leadership.etcd_messages import (
    FAILED_PRECONDITION,
    NOT_FOUND,
    EtcdRefusal,
    GrantReply,
    KeepAliveReply,
    KeyValue,
    RangeReply,
    TxnReply,
    below,
    delete,
    fetch,
    leased,
    put,
    unchanged,
)
from metaservice.leadership.port import Holder, Leadership, Member, Report, View
from metaservice.leadership.rota import PlaceFailed

__all__ = ["EtcdLeadership", "EtcdSettings"]

T = TypeVar("T")

TRIES = 4
"""How often one renewal starts over because a lease or key changed between two of its steps."""


class ReplicaValue(msgspec.Struct, frozen=True):
    """What a replica's key holds."""

    life: str
    url: str
    report: Report


class ShardValue(msgspec.Struct, frozen=True):
    """What a shard's key holds."""

    life: str
    replica: str
    url: str


class NextValue(msgspec.Struct, frozen=True):
    """What a successor's key holds."""

    replica: str


class EtcdLeadership(Leadership):
    """One life of a replica in one etcd cluster."""

    def __init__(
        self,
        settings: EtcdSettings,
        *,
        replica: str,
        url: str,
        life: str,
        shards: int,
        ttl_ms: int,
        timeout_ms: int,
        now_s: Callable[[], float],
        chance: Callable[[], float],
        lookup: Lookup | None = None,
    ) -> None:
        """`life` is a token that no other process has ever used. `now_s` paces retries and judges no lease;
        `chance` returns numbers from 0 up to 1. etcd counts whole seconds and gives two at least: a shard may
        be free that much later. `lookup` stands in for the system's name service.

        Connects to nothing yet. Raises OSError when a certificate file cannot be read.
        """
        self._replica = replica
        self._url = url
        self._life = life
        self._shards = shards
        self._ttl_s = -(-ttl_ms // 1000)
        self._gateway = EtcdGateway(settings, timeout_ms, now_s, chance, lookup)
        self._where = f"etcd under {settings.prefix}"
        self._keys = _Keys(settings.prefix)
        self._turn = asyncio.Lock()
        self._leases = 0
        self._granted = False
        self._registered = False
        self._superseded = False

    @property
    def lease(self) -> int:
        """The number of this replica's lease. It follows from the life, so that a grant that is repeated
        because its answer was lost does not leave a second lease behind."""
        digest = hashlib.sha256(f"{self._life}/{self._leases}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1 or 1

    async def renew(self, report: Report) -> View:
        async with self._turn:
            if self._superseded:
                raise ReplicaSuperseded(self._replica)
            return await self._gateway.run("renewing", lambda member: self._renew(member, report))

    async def look(self) -> View:
        async with self._turn:
            found = await self._gateway.run("looking", self._read)
            return self._view(found.kvs)

    async def acquire(self, shard: int) -> bool:
        async with self._turn:
            if not self._granted or self._superseded or not 0 <= shard < self._shards:
                return False
            return await self._gateway.run(
                f"taking shard {shard}", lambda member: self._acquire(member, shard)
            )

    async def resign(self, shard: int, successor: str = "") -> None:
        async with self._turn:
            if self._granted:
                await self._gateway.run(
                    f"resigning shard {shard}", lambda member: self._resign(member, shard, successor)
                )

    async def close(self) -> None:
        async with self._turn:
            if self._granted:
                with suppress(LeadershipError):
                    await self._gateway.run("closing", self._revoke)
                self._lose_lease()
            await self._gateway.close()

    # --- one piece of work at one member ----------------------------------------------------------------

    async def _renew(self, member: EtcdMember, report: Report) -> View:
        for _ in range(TRIES):
            if not await self._keep_alive(member):
                continue
            try:
                view = await self._write(member, report)
            except EtcdRefusal as refusal:
                if refusal.code != NOT_FOUND:
                    raise
                self._lose_lease()
                continue
            if view is not None:
                return view
        raise PlaceFailed(
            f"the lease or the key of replica {self._replica!r} vanished {TRIES} times in a row"
        )

    async def _keep_alive(self, member: EtcdMember) -> bool:
        """Whether the lease has its full time again, from some moment after this call's start."""
        if self._granted:
            kept = await member.ask("/v3/lease/keepalive", {"ID": str(self.lease)}, KeepAliveReply)
            if not kept.result.ttl_s:
                self._lose_lease()
                return False
            return self._long_enough(kept.result.ttl_s)
        try:
            body = {"ID": str(self.lease), "TTL": str(self._ttl_s)}
            granted = await member.ask("/v3/lease/grant", body, GrantReply)
        except EtcdRefusal as refusal:
            if refusal.code != FAILED_PRECONDITION:
                raise
            self._granted = True  # by an earlier try, whose answer was lost: how long ago is not known
            return False
        self._granted = True
        return self._long_enough(granted.ttl_s)

    def _long_enough(self, ttl_s: int) -> bool:
        if ttl_s < self._ttl_s:
            raise LeadershipRefused(
                self._where, "renewing", f"it gave {ttl_s} s where {self._ttl_s} s were asked for"
            )
        return True

    async def _write(self, member: EtcdMember, report: Report) -> View | None:
        """The view after the report was written under our lease; None when the key changed meanwhile."""
        key = self._keys.replica(self._replica)
        value = msgspec.json.encode(ReplicaValue(self._life, self._url, report))
        write = [put(key, value, self.lease), fetch(self._keys.all)]
        done = await self._transact(member, leased(key, self.lease), write, [fetch(self._keys.all)])
        if not done.succeeded:
            mine = next((kv for kv in done.kvs if kv.key == key), KeyValue())
            if self._registered and mine.value and self._keys.life(mine, self._where) != self._life:
                self._superseded = True
                raise ReplicaSuperseded(self._replica)
            done = await self._transact(member, unchanged(key, mine.mod_revision), write, [])
            if not done.succeeded:
                return None
        self._registered = True
        return self._view(done.kvs)

    async def _read(self, member: EtcdMember) -> RangeReply:
        return await member.ask("/v3/kv/range", self._keys.all, RangeReply)

    async def _acquire(self, member: EtcdMember, shard: int) -> bool:
        key = self._keys.shard(shard)
        value = msgspec.json.encode(ShardValue(self._life, self._replica, self._url))
        # Only the life that the replica's own key names may take: a superseded one, which does not know it
        # yet, would take what its successor is to have.
        registered = leased(self._keys.replica(self._replica), self.lease)
        take = [put(key, value, self.lease), delete(self._keys.next(shard))]
        body = {
            "compare": [registered, unchanged(key, 0)],
            "success": take,
            "failure": [fetch({"key": key})],
        }
        try:
            done = await member.ask("/v3/kv/txn", body, TxnReply)
        except EtcdRefusal as refusal:
            if refusal.code != NOT_FOUND:
                raise
            return False
        return done.succeeded or any(kv.lease == self.lease for kv in done.kvs)

    async def _resign(self, member: EtcdMember, shard: int, successor: str) -> None:
        key, hint = self._keys.shard(shard), self._keys.next(shard)
        lease = await self._lease_of(member, successor) if successor else 0
        steps = [delete(key)]
        if lease:
            steps.append(put(hint, msgspec.json.encode(NextValue(successor)), lease))
        try:
            await self._transact(member, leased(key, self.lease), steps, [])
        except EtcdRefusal as refusal:
            if refusal.code != NOT_FOUND:
                raise
            # The successor went between the two steps: the shard is free for anybody.
            await self._transact(member, leased(key, self.lease), [delete(key)], [])

    async def _lease_of(self, member: EtcdMember, replica: str) -> int:
        found = await member.ask("/v3/kv/range", {"key": self._keys.replica(replica)}, RangeReply)
        return found.kvs[0].lease if found.kvs else 0

    async def _revoke(self, member: EtcdMember) -> None:
        with suppress(EtcdRefusal):
            await member.ask("/v3/lease/revoke", {"ID": str(self.lease)}, RangeReply)

    async def _transact(
        self,
        member: EtcdMember,
        condition: dict[str, Any],
        success: list[dict[str, Any]],
        failure: list[dict[str, Any]],
    ) -> TxnReply:
        body = {"compare": [condition], "success": success, "failure": failure}
        return await member.ask("/v3/kv/txn", body, TxnReply)

    def _lose_lease(self) -> None:
        """The next one has another number: a request of ours that is still under way names the old one, and
        is refused."""
        self._granted = False
        self._leases += 1

    # --- the view ---------------------------------------------------------------------------------------

    def _view(self, kvs: Iterable[KeyValue]) -> View:
        held, members = self._keys.decoded(kvs, self._where)
        holders: dict[int, Holder] = {}
        for shard, value, lease in held:
            if shard >= self._shards:
                continue
            if isinstance(value, NextValue):
                holders.setdefault(shard, Holder("", "", value.replica))
            elif value.replica != self._replica or (self._granted and lease == self.lease):
                holders[shard] = Holder(value.replica, value.url)
            else:
                holders.pop(shard, None)
        return View(dict(sorted(holders.items())), members)


class _Keys:
    """The keys below one prefix, and what they hold."""

    def __init__(self, prefix: str) -> None:
        self._folder = f"{prefix.rstrip('/')}/"
        self.all = below(self._folder.encode())

    def replica(self, name: str) -> bytes:
        return f"{self._folder}replicas/{name}".encode()

    def shard(self, number: int) -> bytes:
        return f"{self._folder}shards/{number}".encode()

    def next(self, number: int) -> bytes:
        return f"{self._folder}next/{number}".encode()

    def life(self, kv: KeyValue, where: str) -> str:
        return _value(kv, ReplicaValue, where).life

    def decoded(
        self, kvs: Iterable[KeyValue], where: str
    ) -> tuple[list[tuple[int, ShardValue | NextValue, int]], dict[str, Member]]:
        """What the `next/` and `shards/` keys hold, in this order, with their leases; and who is alive.
        Keys of other kinds are a later release's business."""
        held: list[tuple[int, ShardValue | NextValue, int]] = []
        members: dict[str, Member] = {}
        for kv in kvs:
            kind, _, name = kv.key.decode(errors="replace").removeprefix(self._folder).partition("/")
            if kind == "replicas":
                value = _value(kv, ReplicaValue, where)
                members[name] = Member(name, value.url, value.report)
            elif kind == "shards" and name.isdecimal():
                held.append((int(name), _value(kv, ShardValue, where), kv.lease))
            elif kind == "next" and name.isdecimal():
                held.append((int(name), _value(kv, NextValue, where), kv.lease))
        return held, members


def _value(kv: KeyValue, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(kv.value, type=kind)
    except msgspec.DecodeError as error:
        key = kv.key.decode(errors="replace")
        raise LeadershipRefused(
            where, "reading", f"key {key!r} holds what no replica writes ({error}): delete it"
        ) from error
