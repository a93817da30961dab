"""ZeroMQ sockets on an event loop that is not ZeroMQ's.

Plain sockets and the descriptor that says when to look at them: asyncio's own wrappers make a future of every
send, and the live path sends hundreds of thousands of blocks a second through one. The descriptor only tells
of changes, so whoever sends or receives has to look again afterwards; `Watched` does.
"""

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from .settings import PublishConfig
from .view import Curve

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]

REQUEST_BYTES_MAX = 1_024
"""Peers send subscriptions and requests of a few bytes; one that sends more is disconnected."""
CONNECTIONS_WAITING_MAX = 1_024
READS_MAX = 64
"""Messages read in one go, so that a peer that floods us does not keep us from everything else."""
REPLIES_WAITING_MAX = 64
"""Messages of a replay that may wait for one requester."""
REQUESTS_WAITING_MAX = 64
"""Requests of one peer that may wait for us."""
KEEPALIVE_S = 30
_TAKEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)


def publisher_socket(
    context: "zmq.Context[Any]", config: PublishConfig, curve: Curve | None, tenant: str
) -> Socket:
    """An XPUB that is not bound yet. Every subscription and every end of one can be read from it."""
    socket = _socket(context, zmq.XPUB, config, curve, tenant)
    socket.setsockopt(zmq.XPUB_VERBOSER, 1)
    socket.setsockopt(zmq.SNDHWM, config.subscriber_hwm)
    return socket


def replay_socket(
    context: "zmq.Context[Any]", config: PublishConfig, curve: Curve | None, tenant: str
) -> Socket:
    """A ROUTER that is not bound yet. Sending to a peer that is gone or does not read raises, rather than
    losing what was sent."""
    socket = _socket(context, zmq.ROUTER, config, curve, tenant)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, REPLIES_WAITING_MAX)
    return socket


def _socket(
    context: "zmq.Context[Any]", kind: int, config: PublishConfig, curve: Curve | None, tenant: str
) -> Socket:
    socket: Socket = zmq.Context.socket(context, kind, socket_class=zmq.Socket)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
    socket.setsockopt(zmq.RCVHWM, REQUESTS_WAITING_MAX)
    socket.setsockopt(zmq.BACKLOG, CONNECTIONS_WAITING_MAX)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.IPV6, int(":" in config.host))
    if curve is not None:
        curve.serve(socket, tenant)
    return socket


def address(host: str, port: int) -> str:
    """An endpoint; an IPv6 address gets its brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"


def bind(socket: Socket, endpoint: str) -> str:
    """ "" when it is bound, else why not: somebody has the port, which may change. Raises zmq.ZMQError for
    everything else."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno in _TAKEN:
            return f"cannot listen on {endpoint}: {error}"
        raise
    return ""


class Watched:
    """A socket whose incoming messages are handed over on the loop. It is closed with this."""

    def __init__(self, socket: Socket, on_message: Callable[[Sequence[bytes]], None]) -> None:
        self.socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._open = True
        self._loop.add_reader(self._descriptor, self._read)
        self._again()

    def look(self) -> None:
        """To be called after every send: a message may have come in meanwhile, of which the descriptor does
        not tell any more."""
        if self._open and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._again()

    def close(self, linger_ms: int = 0) -> None:
        """What is not sent within `linger_ms` is lost; this does not wait for it. May be called again."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)
            self.socket.close(linger_ms)

    def _again(self) -> None:
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        for _ in range(READS_MAX):
            if not self._open:
                return
            try:
                message = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if error.errno == errno.EINTR:
                    continue
                raise
            try:
                self._on_message(message)
            except Exception:
                log.exception("a message of %d frames was not understood", len(message))
        self._again()
