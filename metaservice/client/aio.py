"""The asyncio client: the blocking client's calls, awaited."""

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from types import TracebackType
from typing import Any, Self, TypeVar

from metaservice.wire.schemas import TokenRow
from metaservice.wire.schemas_members import EngineEndpoints

from . import admin
from .aio_operators import AsyncOperators
from .aiotransport import AsyncTransport
from .base import Calling
from .calls import Call, Who
from .config import ClientConfig, Keepalive
from .errors import CallFailed
from .holder import Registration
from .http import JSON, Reply
from .lease_shards import by_shard, joined
from .member_calls import Cluster, Heartbeat, Leave, Register
from .messages import Member, engine_member
from .read_calls import Lookup, ReleaseLeases, RenewLeases, WatchSwitch
from .results import (
    AbortResult,
    ClusterResult,
    FinishResult,
    HeartbeatResult,
    LeasesResult,
    LeaveResult,
    LookupResult,
    RemoveResult,
    RenewResult,
    SwitchResult,
    WriteResult,
    now_ms,
)
from .routers import AsyncRouters
from .tasks import AsyncTasks
from .write_calls import Abort, Finish, Remove, RenewWrite, StartWrite

T = TypeVar("T")


class AsyncClient(AsyncOperators, AsyncTasks, AsyncRouters):
    """Asks the service and awaits; else as `Client`, with the same methods. May be used in several event
    loops, each with connections of its own. A cancelled call ends as cancelled and gives its connection
    up; a lease or session it may have got ends by itself. Background renewal does not run in the event
    loop, so a busy loop does not let leases expire.
    """

    def __init__(self, config: ClientConfig | None = None) -> None:
        self.config = config or ClientConfig()
        self._calling = Calling(self.config, AsyncTransport, AsyncTransport.retire)
        self._finalizer = weakref.finalize(self, self._calling.keeps.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, *, cut: bool = False) -> None:
        """Stop renewing and close the connections of this event loop; calls fail from now on. Leases and
        sessions end by themselves. Calls in progress end with their answer or deadline; with `cut` they fail
        at once."""
        await asyncio.to_thread(self._calling.keeps.close, 0 if cut else self.config.timeout_ms)
        for endpoint in self._calling.endpoints.all:
            await endpoint.transport.close(cut=cut)

    async def _run(self, call: Call[T], timeout_ms: int | None) -> T:
        nothing = call.nothing()
        if nothing is not None:
            return nothing
        began_ms = now_ms()
        timeout_ms = timeout_ms or self.config.timeout_ms
        try:
            try:
                return await self._try(call, began_ms, timeout_ms)
            except CallFailed as failed:
                return await self._try_again(call, failed, began_ms, timeout_ms)
        except CallFailed as failed:
            return self._calling.came_to_nothing(call, failed)
        except asyncio.CancelledError:
            self._calling.cancelled()
            raise
        except Exception:
            return self._calling.broke(call)

    async def _try_again(self, call: Call[T], failed: CallFailed, began_ms: int, timeout_ms: int) -> T:
        """More tries, where that is wanted. Raises CallFailed."""
        calling = self._calling
        patience = calling.patience(call, failed)
        while patience is not None:
            pause_ms = calling.retry_in_ms(failed, began_ms, patience)
            if not pause_ms:
                break
            await asyncio.sleep(pause_ms / 1_000)
            sent_ms = now_ms()
            try:
                return await self._try(call, sent_ms, calling.left_ms(began_ms, sent_ms, timeout_ms))
            except CallFailed as again:
                failed = again
        raise failed

    async def _try(self, call: Call[T], sent_ms: int, timeout_ms: int) -> T:
        """One try, at as many replicas as it takes. Raises CallFailed."""
        calling = self._calling
        trip = calling.begin(call, sent_ms, timeout_ms)
        while True:
            try:
                reply = await trip.endpoint.transport.exchange(trip.request(), trip.until_ms, call.repeatable)
                return calling.judged(call, trip, reply)
            except CallFailed as failed:
                pause_ms = calling.go_on(call, trip, failed)
            except asyncio.CancelledError:
                trip.abandon()
                raise
            await asyncio.sleep(pause_ms / 1_000)

    # -- engines and workers

    @property
    def who(self) -> Who:
        """For whom it speaks now."""
        return self._calling.who

    @property
    def registration(self) -> Registration | None:
        """What was registered last."""
        return self._calling.keeps.registration

    async def register_engine(
        self,
        engine: str,
        *,
        instance: str = "",
        incarnation: str | None = None,
        rank: int = 0,
        endpoints: EngineEndpoints | Mapping[str, Any] | None = None,
        canary: str = "",
        keepalive: Keepalive | None = "thread",
        on_lost: Callable[[Registration], None] | None = None,
        timeout_ms: int | None = None,
    ) -> Registration:
        """Register an engine process; needed before it writes. Another incarnation under the same id is
        fenced.

        With `keepalive` heartbeats go on in the background, and when the service does not know it any
        more it is registered again under a new incarnation: write sessions from before are lost, and
        `on_lost` is called, from another thread. Where the service cannot be reached now, the background
        goes on trying.

        `endpoints`: where the engine is, for routers (the fields of EngineEndpoints).
        `canary`: how it hashes the probe block; one that is not the instance's is refused.
        """
        member = engine_member(engine, incarnation or token_hex(8), instance, rank, endpoints, canary)
        answer = await self._run(Register.of(member), timeout_ms)
        return self._calling.registered(member, answer, keepalive, on_lost)

    async def register_worker(
        self,
        worker: str,
        storages: Sequence[str],
        *,
        incarnation: str | None = None,
        keepalive: Keepalive | None = "thread",
        on_lost: Callable[[Registration], None] | None = None,
        timeout_ms: int | None = None,
    ) -> Registration:
        """Register a process that can delete the bytes in `storages`; else as `register_engine`."""
        member = Member(
            kind="worker", id=worker, incarnation=incarnation or token_hex(8), storages=list(storages)
        )
        answer = await self._run(Register.of(member), timeout_ms)
        return self._calling.registered(member, answer, keepalive, on_lost)

    async def heartbeat(self, *, timeout_ms: int | None = None) -> HeartbeatResult:
        """One heartbeat, for owners that registered without `keepalive`."""
        return await self._run(Heartbeat(), timeout_ms)

    async def deregister(self, *, timeout_ms: int | None = None) -> LeaveResult:
        """Leave on purpose: the registration is over at once, and with it the engine's open write
        sessions."""
        result = await self._run(Leave(), timeout_ms)
        self._calling.keeps.leave()
        return result

    def act_as(self, engine: str, incarnation: str) -> None:
        """Speak for an engine that another process registered and keeps alive (a worker process of that
        engine): no heartbeats are sent. With the incarnation "" it speaks for nobody."""
        self._calling.keeps.act_as("engine", engine, incarnation)

    # -- blocks

    async def lookup(
        self,
        instance: str,
        keys: list[bytes],
        *,
        mode: str = "prefix",
        group: str | None = None,
        window_blocks: int | None = None,
        limit: int | None = None,
        parent: bytes | None = None,
        lease_ms: int = 0,
        renew: bool = False,
        staleness_ms_max: int | None = None,
        traceparent: str = "",
        timeout_ms: int | None = None,
    ) -> LookupResult:
        """Which of these blocks are readable, and where; modes `prefix`, `window`, `state`, `each`.

        With `lease_ms` the blocks found stay readable so long; with `renew` the lease is renewed in the
        background until `release` (no longer than the config's `keep_ms_max`). What is returned is one
        answer of one moment: a later call may say less, and then only that counts. With `staleness_ms_max`
        (never with a lease) any replica may answer whose state is no older. `traceparent`: the trace
        context (W3C) in which the service's own spans are to be.
        """
        call = Lookup(
            instance,
            keys,
            mode,
            group,
            window_blocks,
            limit,
            parent,
            lease_ms,
            renew,
            staleness_ms_max,
            traceparent,
        )
        return await self._run(call, timeout_ms)

    async def start_write(
        self,
        instance: str,
        keys: list[bytes],
        *,
        parents: list[bytes | None] | None = None,
        parent: bytes | None = None,
        group: str | None = None,
        sizes: list[int] | None = None,
        ttl_ms: int = 0,
        renew: bool = False,
        request_id: str | None = None,
        traceparent: str = "",
        tokens: list[TokenRow] | None = None,
        lora: str = "",
        salt: str = "",
        timeout_ms: int | None = None,
    ) -> WriteResult:
        """Ask for places to write blocks to. Without `parents` the keys are a chain under `parent` (None:
        from a root).

        The session holds for `ttl_ms` (0: the service's default); with `renew` it is renewed in the
        background until it is finished or aborted. After a failure the same call with the result's
        `request_id` gets the first answer, should there have been one. With `tokens` (a row a key: its token
        ids, packed as in `wire.tokens` or a list; None: this block not) routers are told of the blocks, under
        the adapter `lora` and the cache salt `salt`.
        """
        call = StartWrite(
            instance,
            keys,
            parents,
            parent,
            group,
            sizes,
            ttl_ms,
            renew,
            request_id,
            traceparent,
            tokens,
            lora,
            salt,
        )
        return await self._run(call, timeout_ms)

    async def finish(
        self,
        write: WriteResult | str,
        locations: Sequence[int],
        generations: Sequence[int],
        *,
        parts: list[str] | None = None,
        ok: Sequence[bool] | None = None,
        checksums: Sequence[int] | None = None,
        sizes: list[int] | None = None,
        request_id: str | None = None,
        traceparent: str = "",
        timeout_ms: int | None = None,
    ) -> FinishResult:
        """Say that `parts` (None: all) of these locations are written, or failed where `ok` is False.

        `ok` and `checksums` (u64) have a row per location and part, location-major. A block serves once
        its last part is in. Given a session id instead of the result, it must have been opened under the
        current incarnation.
        """
        call = Finish(write, locations, generations, parts, ok, checksums, sizes, request_id, traceparent)
        return await self._run(call, timeout_ms)

    async def renew_write(
        self, write: WriteResult | str, *, ttl_ms: int = 0, timeout_ms: int | None = None
    ) -> RenewResult:
        """Keep a write session open for `ttl_ms` from now (0: the service's default)."""
        return await self._run(RenewWrite(write, ttl_ms), timeout_ms)

    async def abort(
        self, write: WriteResult | str, *, request_id: str | None = None, timeout_ms: int | None = None
    ) -> AbortResult:
        """Give a write session up: its unfinished locations are freed, what is published stays."""
        return await self._run(Abort(write, request_id), timeout_ms)

    async def renew_leases(
        self,
        leases: Sequence[str],
        *,
        ttl_ms: int = 0,
        locations: Sequence[int] | None = None,
        timeout_ms: int | None = None,
    ) -> LeasesResult:
        """Renew leases in one call; with `locations`, and one lease, only these blocks of it."""
        parts = by_shard(leases)
        return joined(
            leases, [await self._run(RenewLeases(part, ttl_ms, locations), timeout_ms) for part in parts]
        )

    async def release(self, leases: str | Sequence[str], *, timeout_ms: int | None = None) -> LeasesResult:
        """End leases. The answer is also the last proof: what was read under a lease that is not `held`
        in the result must be thrown away, for its place may have been used for other blocks."""
        named = [leases] if isinstance(leases, str) else leases
        parts = by_shard(named)
        return joined(named, [await self._run(ReleaseLeases(part), timeout_ms) for part in parts])

    def held(self, id: str) -> bool:
        """Whether a lease or write session that is renewed in the background is known to hold now. Asks
        nobody."""
        return self._calling.keeps.held(id)

    async def remove(
        self,
        instance: str,
        keys: list[bytes],
        *,
        group: str | None = None,
        lease: str | None = None,
        request_id: str | None = None,
        timeout_ms: int | None = None,
    ) -> RemoveResult:
        """Remove blocks; `lease`: the caller's own, released in the same step."""
        return await self._run(Remove(instance, keys, group, lease, request_id), timeout_ms)

    async def watch_switch(
        self, instance: str, known: str = "", *, wait_ms: int = 0, timeout_ms: int | None = None
    ) -> SwitchResult:
        """The strictest switch on the instance: at once when its mode is not `known` (`normal`,
        `read_only`, `bypass`; "": in any case), else as soon as it changes, or after `wait_ms` (besides the
        deadline, at most 60,000)."""
        return await self._run(WatchSwitch(instance, known, wait_ms), timeout_ms)

    # -- the service

    async def cluster(self, *, timeout_ms: int | None = None) -> ClusterResult:
        """What the replica that is asked sees of the cluster: its members and shards."""
        return await self._run(Cluster(), timeout_ms)

    # -- operators

    async def _ask(self, ask: admin.Ask, accept: str = JSON) -> Reply:
        trip = self._calling.ask(ask, accept)
        while True:
            try:
                reply = await trip.endpoint.transport.exchange(trip.request(), trip.until_ms, ask.repeatable)
                reply = admin.passed(reply)
            except CallFailed as failed:
                await asyncio.sleep(self._calling.ask_on(trip, failed) / 1_000)
            else:
                trip.arrived()
                return reply
