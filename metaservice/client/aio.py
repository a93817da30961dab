"""The asyncio client: the blocking client's calls, awaited."""

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from types import TracebackType
from typing import Any, Self, TypeVar

from . import admin
from .aiotransport import AsyncTransport
from .base import Calling
from .calls import Call
from .config import ClientConfig, Keepalive
from .errors import CallFailed, client_error
from .holder import Registration
from .http import JSON, Reply
from .member_calls import ConfirmTask, Heartbeat, Leave, Register, TakeTasks, UnknownPlaces
from .messages import Member
from .read_calls import Lookup, ReleaseLeases, RenewLeases
from .results import (
    AbortResult,
    ConfirmResult,
    DeleteTask,
    FinishResult,
    HeartbeatResult,
    LeasesResult,
    LeaveResult,
    LookupResult,
    RemoveResult,
    RenewResult,
    TasksResult,
    UnknownResult,
    WriteResult,
    now_ms,
)
from .write_calls import Abort, Finish, Remove, RenewWrite, StartWrite

T = TypeVar("T")


class AsyncClient:
    """Asks the service and awaits; else as `Client`, with the same methods. May be used in several event
    loops, each with connections of its own. A cancelled call ends as cancelled and gives its connection
    up; a lease or session it may have got ends by itself. Background renewal does not run in the event
    loop, so a busy loop does not let leases expire.
    """

    def __init__(self, config: ClientConfig | None = None) -> None:
        self.config = config or ClientConfig()
        self._calling = Calling(self.config)
        self._transport = AsyncTransport(self.config, self._calling.resolver)
        self._finalizer = weakref.finalize(self, self._calling.keeps.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop renewing and close the connections of this event loop; calls fail from now on. Leases and
        sessions end by themselves."""
        await asyncio.to_thread(self._calling.keeps.close, self.config.timeout_ms)
        await self._transport.close()

    async def _run(self, call: Call[T], timeout_ms: int | None) -> T:
        calling = self._calling
        nothing = call.nothing()
        if nothing is not None:
            return nothing
        sent_ms = now_ms()
        if calling.blocked(call, sent_ms):
            return calling.refused(call)
        try:
            request = calling.built(call)
            deadline_ms = sent_ms + (timeout_ms or self.config.timeout_ms) + call.wait_ms
            reply = await self._transport.exchange(request, deadline_ms, call.repeatable)
            return calling.judged(call, reply, sent_ms)
        except asyncio.CancelledError:
            calling.cancelled()
            raise
        except CallFailed as failed:
            return calling.came_to_nothing(call, failed, sent_ms)
        except Exception:
            return calling.broke(call)

    # -- engines and workers

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
        """
        member = Member(
            kind="engine", id=engine, incarnation=incarnation or token_hex(8), instance=instance, rank=rank
        )
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
        timeout_ms: int | None = None,
    ) -> LookupResult:
        """Which of these blocks are readable, and where; modes `prefix`, `window`, `state`, `each`.

        With `lease_ms` the blocks found stay readable so long; with `renew` the lease is renewed in the
        background until `release` (no longer than the config's `keep_ms_max`). What is returned is one
        answer of one moment: a later call may say less, and then only that counts.
        """
        call = Lookup(instance, keys, mode, group, window_blocks, limit, parent, lease_ms, renew)
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
        timeout_ms: int | None = None,
    ) -> WriteResult:
        """Ask for places to write blocks to. Without `parents` the keys are a chain under `parent` (None:
        from a root).

        The session holds for `ttl_ms` (0: the service's default); with `renew` it is renewed in the
        background until it is finished or aborted. After a failure the same call with the result's
        `request_id` gets the first answer, should there have been one.
        """
        call = StartWrite(instance, keys, parents, parent, group, sizes, ttl_ms, renew, request_id)
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
        timeout_ms: int | None = None,
    ) -> FinishResult:
        """Say that `parts` (None: all) of these locations are written, or failed where `ok` is False.

        `ok` and `checksums` (u64) have a row per location and part, location-major. A block serves once
        its last part is in. Given a session id instead of the result, it must have been opened under the
        current incarnation.
        """
        call = Finish(write, locations, generations, parts, ok, checksums, sizes, request_id)
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
        return await self._run(RenewLeases(leases, ttl_ms, locations), timeout_ms)

    async def release(self, leases: str | Sequence[str], *, timeout_ms: int | None = None) -> LeasesResult:
        """End leases. The answer is also the last proof: what was read under a lease that is not `held`
        in the result must be thrown away, for its place may have been used for other blocks."""
        return await self._run(ReleaseLeases([leases] if isinstance(leases, str) else leases), timeout_ms)

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

    # -- tasks of workers

    async def take_tasks(
        self, *, limit: int = 1024, wait_ms: int = 0, timeout_ms: int | None = None
    ) -> TasksResult:
        """Deletion tasks of at most `limit` locations, waiting up to `wait_ms` (besides the deadline)
        for some."""
        return await self._run(TakeTasks(limit, wait_ms), timeout_ms)

    async def confirm_task(
        self, task: DeleteTask, *, ok: Sequence[bool] | None = None, timeout_ms: int | None = None
    ) -> ConfirmResult:
        """Say which locations of a task have no bytes any more (None: all)."""
        return await self._run(ConfirmTask(task, ok), timeout_ms)

    async def unknown_places(
        self,
        storage: str,
        locations: Sequence[int],
        generations: Sequence[int],
        *,
        timeout_ms: int | None = None,
    ) -> UnknownResult:
        """Which of these places, found in `storage`, belong to no block."""
        return await self._run(UnknownPlaces(storage, locations, generations), timeout_ms)

    # -- operators; all raise ClientError

    async def _ask(self, ask: admin.Ask, accept: str = JSON) -> Reply:
        body = ask.encoded()
        request = self._calling.heads.request(ask.method, ask.path, body, JSON, accept)
        try:
            return await self._transport.exchange(
                request, now_ms() + self.config.admin_timeout_ms, ask.method in ("GET", "PUT")
            )
        except CallFailed as failed:
            raise client_error(failed) from None

    async def put_tenant(
        self, id: str, *, bytes_max: int | None = None, blocks_max: int | None = None
    ) -> Any:
        """Create or change a tenant; quotas None: no limit."""
        return admin.json_of(await self._ask(admin.tenant(id, bytes_max, blocks_max)))

    async def put_storage(
        self,
        id: str,
        kind: str,
        options: Mapping[str, str],
        *,
        capacity_bytes: int | None = None,
        fault_domain: str = "",
    ) -> Any:
        """Register a storage; kind and options cannot change while groups name it."""
        return admin.json_of(await self._ask(admin.storage(id, kind, options, capacity_bytes, fault_domain)))

    async def put_group(
        self,
        id: str,
        tenant: str,
        storages: Sequence[str],
        *,
        bytes_max: int | None = None,
        blocks_max: int | None = None,
        high_permille: int = 950,
        low_permille: int = 900,
        eviction: str = "lru",
    ) -> Any:
        """Create or change a group of instances; `eviction` is `lru` or `reject`."""
        ask = admin.group(id, tenant, storages, bytes_max, blocks_max, high_permille, low_permille, eviction)
        return admin.json_of(await self._ask(ask))

    async def put_instance(
        self,
        id: str,
        group: str,
        fingerprint: Mapping[str, Any],
        *,
        bytes_max: int | None = None,
        blocks_max: int | None = None,
    ) -> Any:
        """Register an instance; the same id with another fingerprint is refused, naming each field that
        differs."""
        return admin.json_of(await self._ask(admin.instance(id, group, fingerprint, bytes_max, blocks_max)))

    async def set_switch(self, scope: str, id: str, mode: str, *, reason: str = "") -> Any:
        """Set the switch of a scope (`cluster` with id "", `tenant`, `group`, `instance`, `storage`)."""
        return admin.json_of(await self._ask(admin.switch(scope, id, mode, reason)))

    async def get_json(self, path: str) -> Any:
        """`GET` of any route that answers with JSON; `path` as `/v1/...`."""
        return admin.json_of(await self._ask(admin.Ask("GET", path)))

    async def post_json(self, path: str, body: Any) -> Any:
        """`POST` to a route that takes and answers JSON, such as a handover. Sent once: whether one that got
        no answer was carried out is not known."""
        return admin.json_of(await self._ask(admin.Ask("POST", path, body)))

    async def get_text(self, path: str) -> str:
        """`GET` of any other route, such as `/metrics`."""
        return admin.text_of(await self._ask(admin.Ask("GET", path), "*/*"))

    async def delete(self, path: str) -> Any:
        """`DELETE` of a route such as `/v1/instances/{id}`."""
        return admin.json_of(await self._ask(admin.Ask("DELETE", path)))
