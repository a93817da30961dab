"""The blocking transport: a pool of kept connections that any thread may use.

Sockets never block: each wait is a poll with what is left until the deadline, so a peer that sends a
byte now and then gains nothing by it.
"""

import errno
import select
import socket
from contextlib import suppress
from threading import Condition

from . import forks
from .config import ClientConfig
from .errors import CLOSED, CONNECTION_LOST, REFUSED_CONNECTION, CallFailed, Stale, late
from .http import Reply, ReplyReader
from .resolve import Address, Resolver
from .results import now_ms

_RECEIVE_BYTES = 65_536
_IN = select.POLLIN
_OUT = select.POLLOUT


class Connection:
    """One connection. Not thread safe: the pool lends it to one caller at a time."""

    __slots__ = ("_poller", "_reader", "_socket", "idle_since_ms")

    def __init__(self, connected: socket.socket, body_max_bytes: int) -> None:
        self._socket = connected
        self._poller = select.poll()
        self._poller.register(connected, _IN)
        self._reader = ReplyReader(body_max_bytes)
        self.idle_since_ms = 0

    def close(self) -> None:
        self._socket.close()

    def cut(self) -> None:
        """End an exchange that goes on in another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def quiet(self) -> bool:
        """A kept connection has nothing to say: neither that it ended nor an answer that nobody waits for."""
        return not self._poller.poll(0)

    def exchange(self, request: bytes, deadline_ms: int) -> Reply:
        """Send and receive. Raises Stale or CallFailed; the connection is useless then."""
        self._reader.begin()
        try:
            whole = self._send(request, deadline_ms)
            answered_early = whole
            while not whole:
                if not self._poller.poll(max(0, deadline_ms - now_ms())):
                    raise late("waiting for the answer")
                whole = self._receive()
        except OSError as error:
            if self._reader.untouched:
                raise Stale from error
            raise CallFailed(CONNECTION_LOST, str(error)) from None
        reply = self._reader.reply()
        if answered_early:
            reply.keep_alive = False
        return reply

    def _send(self, request: bytes, deadline_ms: int) -> bool:
        """Send it all; True when the whole answer came before that (a body refused for its size)."""
        try:
            sent = self._socket.send(request)
        except BlockingIOError:
            sent = 0
        if sent == len(request):
            return False
        rest = memoryview(request)[sent:]
        self._poller.modify(self._socket, _IN | _OUT)
        while rest:
            ready = self._poller.poll(max(0, deadline_ms - now_ms()))
            if not ready:
                raise late("sending the request")
            if ready[0][1] & ~_OUT and self._receive():
                return True
            if ready[0][1] & _OUT:
                rest = rest[self._socket.send(rest) :]
        self._poller.modify(self._socket, _IN)
        return False

    def _receive(self) -> bool:
        data = self._socket.recv(_RECEIVE_BYTES)
        if data:
            return self._reader.feed(data)
        if self._reader.untouched:
            raise Stale
        raise self._reader.ended()


class Transport:
    """Calls to one replica over kept connections. Thread safe; at most `connections_max` calls at once."""

    def __init__(self, config: ClientConfig, resolver: Resolver) -> None:
        self._config = config
        self._resolver = resolver
        self._changed = Condition()
        self._idle: list[Connection] = []
        self._lent = 0
        self._open: set[Connection] = set()
        self._closed = False
        self._cut = False
        forks.register(self)

    def after_fork(self) -> None:
        """The parent goes on using these connections; closing our descriptors does not end them."""
        self._changed = Condition()
        self._lent = 0
        self._idle.clear()
        for connection in self._open:
            connection.close()
        self._open.clear()

    def close(self, *, cut: bool = False) -> None:
        """Close kept connections; calls in progress end by themselves (with `cut`: fail now), later ones
        fail."""
        with self._changed:
            self._closed = True
            self._cut |= cut
            self._close_idle()
            if cut:
                for connection in list(self._open):
                    connection.cut()
            self._changed.notify_all()

    def exchange(self, request: bytes, deadline_ms: int, repeatable: bool) -> Reply:
        """Send and receive before the deadline. Raises CallFailed.

        A kept connection that turns out to be dead is replaced by a new one and the request sent once
        more, within the same deadline and only when it is `repeatable`: the service may have read it.
        """
        connection = self._borrow(deadline_ms)
        reply: Reply | None = None
        try:
            if connection is not None:
                try:
                    reply = connection.exchange(request, deadline_ms)
                except Stale:
                    self._discard(connection)
                    connection = None
                    if self._cut:
                        raise CallFailed(CLOSED, "the client is closed") from None
                    if not repeatable:
                        raise CallFailed(CONNECTION_LOST, "closed before an answer") from None
            if reply is None:
                connected = connect(self._resolver, deadline_ms)
                connection = Connection(connected, self._config.reply_size_max_bytes)
                self._open.add(connection)
                if self._cut:
                    raise CallFailed(CLOSED, "the client is closed")
                try:
                    reply = connection.exchange(request, deadline_ms)
                except Stale:
                    raise CallFailed(CONNECTION_LOST, "closed before an answer") from None
            return reply
        finally:
            self._give_back(connection, reply is not None and reply.keep_alive)

    def _borrow(self, deadline_ms: int) -> Connection | None:
        """A kept connection, or None: the caller may open one."""
        with self._changed:
            while True:
                if self._closed:
                    raise CallFailed(CLOSED, "the client is closed")
                now = now_ms()
                while self._idle:
                    connection = self._idle.pop()
                    if now - connection.idle_since_ms <= self._config.idle_ms_max and connection.quiet():
                        self._lent += 1
                        return connection
                    self._discard(connection)
                if self._lent < self._config.connections_max:
                    self._lent += 1
                    return None
                if now >= deadline_ms or not self._changed.wait((deadline_ms - now) / 1_000):
                    raise late("waiting for a free connection")

    def _give_back(self, connection: Connection | None, usable: bool) -> None:
        with self._changed:
            self._lent -= 1
            if connection is not None:
                if usable and not self._closed:
                    connection.idle_since_ms = now_ms()
                    self._idle.append(connection)
                else:
                    self._discard(connection)
            self._changed.notify()

    def _close_idle(self) -> None:
        for connection in self._idle:
            self._discard(connection)
        self._idle.clear()

    def _discard(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.close()


def connect(resolver: Resolver, deadline_ms: int) -> socket.socket:
    """A connected socket that does not block. Raises CallFailed."""
    addresses = resolver.known()
    if not addresses:
        try:
            addresses = resolver.look_up().result(max(0, deadline_ms - now_ms()) / 1_000)
        except TimeoutError:
            raise late("looking up the name") from None
        except OSError as error:
            raise CallFailed(REFUSED_CONNECTION, f"looking up the name: {error}") from None
    failure = late("connecting")
    for tried, address in enumerate(addresses):
        now = now_ms()
        # An address that swallows everything must leave time for those after it.
        share_ms = max(0, deadline_ms - now) // (len(addresses) - tried)
        try:
            return _connect(address, now + share_ms)
        except CallFailed as error:
            failure = error
        except OSError as error:
            failure = CallFailed(REFUSED_CONNECTION, str(error))
    resolver.doubt()
    raise failure


def _connect(address: Address, deadline_ms: int) -> socket.socket:
    family, host, port = address
    connecting = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = connecting.connect_ex((host, port))
        if code == errno.EINPROGRESS:
            poller = select.poll()
            poller.register(connecting, _OUT)
            if not poller.poll(max(0, deadline_ms - now_ms())):
                raise late("connecting")
            code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, "connect failed"))
        if connecting.getsockname() == connecting.getpeername():
            raise OSError(errno.ECONNREFUSED, "connected to itself: nobody listens there")
    except BaseException:
        connecting.close()
        raise
    return connecting
