"""Names to addresses, so that no call waits for a name server longer than its own deadline.

A look-up cannot be interrupted, so it runs in a thread of its own, one at a time. Addresses that worked
are kept and used while a newer answer is awaited: a name server in trouble must not take the cache away
from engines that know the way.
"""

import socket
from concurrent.futures import Future
from ipaddress import ip_address
from threading import Lock, Thread

from . import forks
from .results import now_ms

Address = tuple[int, str, int]
"""(address family, host, port)"""

_FRESH_MS = 30_000
_AGAIN_MS = 1_000


class Resolver:
    """Addresses of one host. Thread safe."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._known: list[Address] = []
        self._renew_at_ms = 0
        self._pending: Future[list[Address]] | None = None
        self._lock = Lock()
        try:
            family = socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
        except ValueError:
            self._literal = False
        else:
            self._literal = True
            self._known = [(family, host, port)]
        forks.register(self)

    def after_fork(self) -> None:
        self._lock = Lock()
        self._pending = None

    def known(self) -> list[Address]:
        """The addresses known, at once; empty when none ever was. Starts a look-up when they are old."""
        if not self._literal and self._known and now_ms() >= self._renew_at_ms:
            self.look_up()
        return self._known

    def doubt(self) -> None:
        """No address of these could be reached: look the name up again soon."""
        self._renew_at_ms = min(self._renew_at_ms, now_ms() + _AGAIN_MS)

    def look_up(self) -> "Future[list[Address]]":
        """The look-up that runs now, or a new one. Its result is never empty; it fails with OSError."""
        with self._lock:
            if self._pending is None:
                self._pending = Future()
                Thread(
                    target=self._run, args=(self._pending,), name="metaservice-resolve", daemon=True
                ).start()
            return self._pending

    def _run(self, pending: "Future[list[Address]]") -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            addresses: list[Address] = [(family, str(at[0]), int(at[1])) for family, _, _, _, at in found]
        except Exception as error:  # whatever it is, somebody waits for the answer
            self._finish(_AGAIN_MS)
            pending.set_exception(error if isinstance(error, OSError) else OSError(str(error)))
        else:
            self._known = addresses
            self._finish(_FRESH_MS)
            pending.set_result(addresses)

    def _finish(self, renew_in_ms: int) -> None:
        self._renew_at_ms = now_ms() + renew_in_ms
        with self._lock:
            self._pending = None
