"""The asyncio transport: the same as the blocking one, without waiting for anybody."""

import asyncio
import socket
from collections import deque
from weakref import WeakKeyDictionary

from . import forks
from .config import ClientConfig
from .errors import CLOSED, CONNECTION_LOST, REFUSED_CONNECTION, CallFailed, Stale, late
from .http import Reply, ReplyReader
from .resolve import Address, Resolver
from .results import now_ms

_left_to_the_parent: list[object] = []
"""In the child of a fork: connections of the parent's event loops. They must never be finalised here:
closing one properly would take it out of the epoll set that the child shares with its parent."""


class _Link(asyncio.Protocol):
    """One connection. Its waiter is resolved exactly once a call: whole reply, failure, deadline, or
    cancellation."""

    def __init__(self, body_max_bytes: int) -> None:
        self._reader = ReplyReader(body_max_bytes)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.dead = False
        self.idle_since_ms = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            self.close()  # an answer that nobody waits for could be taken for the answer to the next request
            return
        try:
            if self._reader.feed(data):
                waiter.set_result(None)
        except CallFailed as failed:
            waiter.set_exception(failed)

    def connection_lost(self, error: Exception | None) -> None:
        self.dead = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(Stale() if self._reader.untouched else self._reader.ended())

    def close(self) -> None:
        """Close at once."""
        self.dead = True
        if self._transport is not None:
            self._transport.abort()

    def connected_to_itself(self) -> bool:
        """On loopback, connecting to a free port may meet itself."""
        assert self._transport is not None
        return bool(self._transport.get_extra_info("sockname") == self._transport.get_extra_info("peername"))

    async def exchange(self, request: bytes, deadline_ms: int) -> Reply:
        """Send and receive. Raises Stale or CallFailed; the connection is useless then, and also when
        cancelled."""
        assert self._transport is not None
        if self.dead:
            raise Stale
        loop = asyncio.get_running_loop()
        self._reader.begin()
        waiter = self._waiter = loop.create_future()
        timer = loop.call_later(max(0, deadline_ms - now_ms()) / 1_000, _expire, waiter)
        try:
            self._transport.write(request)
            await waiter
        finally:
            timer.cancel()
            self._waiter = None
        reply = self._reader.reply()
        if self._transport.get_write_buffer_size():
            reply.keep_alive = False  # answered before all was sent (a body refused for its size)
        return reply


def _expire(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_exception(late("waiting for the answer"))


class _Pool:
    """Connections of one event loop."""

    def __init__(self) -> None:
        self.idle: list[_Link] = []
        self.lent = 0
        self.busy: set[_Link] = set()
        self.waiting: deque[asyncio.Future[None]] = deque()

    def wake_one(self) -> None:
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def close_idle(self) -> None:
        for link in self.idle:
            link.close()
        self.idle.clear()


class AsyncTransport:
    """Calls to one replica over kept connections, `connections_max` at once and event loop. Each loop has
    connections of its own."""

    def __init__(self, config: ClientConfig, resolver: Resolver) -> None:
        self._config = config
        self._resolver = resolver
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool] = WeakKeyDictionary()
        self._closed = False
        self._cut = False
        forks.register(self)

    def after_fork(self) -> None:
        _left_to_the_parent.append(self._pools)
        self._pools = WeakKeyDictionary()

    async def close(self, *, cut: bool = False) -> None:
        """Close this loop's kept connections; calls in progress end by themselves (with `cut`: fail now),
        later ones fail."""
        self._closed = True
        self._cut |= cut
        pool = self._pools.get(asyncio.get_running_loop())
        if pool is not None:
            pool.close_idle()
            if cut:
                for link in pool.busy:
                    link.close()
            for _ in range(len(pool.waiting)):
                pool.wake_one()
        await asyncio.sleep(0)  # the loop closes the sockets in its next round

    def retire(self) -> None:
        """Close the kept connections of all loops, from whatever thread; nobody is sent here any more."""
        self._closed = True
        for loop, pool in list(self._pools.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(pool.close_idle)

    async def exchange(self, request: bytes, deadline_ms: int, repeatable: bool) -> Reply:
        """Send and receive before the deadline. Raises CallFailed. Repeats as the blocking transport does."""
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            pool = self._pools[loop] = _Pool()
        link = await self._borrow(pool, deadline_ms)
        reply: Reply | None = None
        try:
            if link is not None:
                pool.busy.add(link)
                try:
                    reply = await link.exchange(request, deadline_ms)
                except Stale:
                    pool.busy.discard(link)
                    link.close()
                    link = None
                    if self._cut:
                        raise CallFailed(CLOSED, "the client is closed") from None
                    if not repeatable:
                        raise CallFailed(CONNECTION_LOST, "closed before an answer") from None
            if reply is None:
                link = await self._connect(loop, deadline_ms)
                pool.busy.add(link)
                if self._cut:
                    raise CallFailed(CLOSED, "the client is closed")
                try:
                    reply = await link.exchange(request, deadline_ms)
                except Stale:
                    raise CallFailed(CONNECTION_LOST, "closed before an answer") from None
            return reply
        finally:
            pool.lent -= 1
            if link is not None:
                pool.busy.discard(link)
                if reply is not None and reply.keep_alive and not self._closed:
                    link.idle_since_ms = now_ms()
                    pool.idle.append(link)
                else:
                    link.close()
            pool.wake_one()

    async def _borrow(self, pool: _Pool, deadline_ms: int) -> _Link | None:
        """A kept connection, or None: the caller may open one."""
        while True:
            if self._closed:
                raise CallFailed(CLOSED, "the client is closed")
            now = now_ms()
            while pool.idle:
                link = pool.idle.pop()
                if not link.dead and now - link.idle_since_ms <= self._config.idle_ms_max:
                    pool.lent += 1
                    return link
                link.close()
            if pool.lent < self._config.connections_max:
                pool.lent += 1
                return None
            waiter = asyncio.get_running_loop().create_future()
            pool.waiting.append(waiter)
            try:
                async with asyncio.timeout(max(0, deadline_ms - now) / 1_000):
                    await waiter
            except TimeoutError:
                self._pass_on(pool, waiter)
                raise late("waiting for a free connection") from None
            except asyncio.CancelledError:
                self._pass_on(pool, waiter)
                raise

    @staticmethod
    def _pass_on(pool: _Pool, waiter: "asyncio.Future[None]") -> None:
        """Whoever was woken but does not go on must wake the next."""
        if waiter.done() and not waiter.cancelled():
            pool.wake_one()

    async def _connect(self, loop: asyncio.AbstractEventLoop, deadline_ms: int) -> _Link:
        addresses = self._resolver.known()
        if not addresses:
            try:
                async with asyncio.timeout(max(0, deadline_ms - now_ms()) / 1_000):
                    # Shielded: others may wait for the same look-up.
                    addresses = await asyncio.shield(asyncio.wrap_future(self._resolver.look_up()))
            except TimeoutError:
                raise late("looking up the name") from None
            except OSError as error:
                raise CallFailed(REFUSED_CONNECTION, f"looking up the name: {error}") from None
        failure = late("connecting")
        for tried, address in enumerate(addresses):
            share_ms = max(0, deadline_ms - now_ms()) // (len(addresses) - tried)
            try:
                async with asyncio.timeout(share_ms / 1_000):
                    return await self._connect_one(loop, address)
            except TimeoutError:
                failure = late("connecting")
            except OSError as error:
                failure = CallFailed(REFUSED_CONNECTION, str(error))
        self._resolver.doubt()
        raise failure

    async def _connect_one(self, loop: asyncio.AbstractEventLoop, address: Address) -> _Link:
        family, host, port = address
        _, link = await loop.create_connection(
            lambda: _Link(self._config.reply_size_max_bytes), host, port, family=socket.AddressFamily(family)
        )
        if link.connected_to_itself():
            link.close()
            raise OSError("connected to itself: nobody listens there")
        return link
