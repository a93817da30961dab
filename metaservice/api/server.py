"""The HTTP server: uvicorn's, with our connection in place of its own, a loopback check, and an end that is
bounded.
"""

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from socket import AF_INET, AF_INET6, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket
from typing import cast

import uvicorn

from .app import App
from .guards import Gate
from .protocol import Connection
from .settings import ApiSettings

log = logging.getLogger("metaservice.api")

DATE_S = 1.0
"""How often the date in responses is renewed."""
CUT_S = 1.0
"""How long a request that was cut may take to notice."""


class RemoteRefused(ValueError):
    """The address would be reachable from other machines, and nobody is asked for credentials yet."""


def check_host(host: str, allow_remote: bool) -> None:
    """Raises RemoteRefused for an address that is not loopback, unless that is explicitly allowed."""
    if allow_remote or host == "localhost":
        return
    try:
        if ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        pass
    raise RemoteRefused(
        f"{host!r} is not a loopback address: anybody who reaches it could read and change everything, since "
        "there are no credentials yet. Bind 127.0.0.1 (behind a proxy that authenticates), or allow remote "
        "addresses explicitly"
    )


class ApiServer(uvicorn.Server):
    """Serves one App until `request_stop`, then drains: not ready, polls answered, no new connections,
    bounded wait.
    """

    def __init__(
        self, app: App, host: str, port: int, settings: ApiSettings, *, allow_remote: bool = False
    ) -> None:
        check_host(host, allow_remote)
        self.gate = Gate(settings, app.metrics)
        self.bound_port = 0
        self._app = app
        self._settings = settings
        self._host = host
        self._port = port
        self._on_started: Callable[[int], None] | None = None
        self._stopping = asyncio.Event()
        connection = cast(type[asyncio.Protocol], partial(Connection, self.gate, app))
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=connection,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=settings.backlog,
            )
        )

    async def run_until_stopped(self, on_started: Callable[[int], None] | None = None) -> None:
        """Bind, call `on_started` with the port, serve until `request_stop`, drain.

        Raises OSError when it cannot bind. When it is cancelled it drains too, in the same bounded time.
        """
        listener = self._bind()
        self.bound_port = int(listener.getsockname()[1])
        self._on_started = on_started
        self.gate.start()
        try:
            await self.serve(sockets=[listener])
        except asyncio.CancelledError:
            if self.started:
                await self.shutdown([listener])
            raise
        finally:
            self.gate.stop()
            listener.close()

    def request_stop(self) -> None:
        """Begin to stop; may be called again, and from a signal handler of the loop."""
        self._app.begin_drain()
        self._stopping.set()

    async def main_loop(self) -> None:
        """Serve; called by uvicorn once it listens.

        Ends when the drain has begun and its delay has passed.
        """
        if self._on_started is not None:
            self._on_started(self.bound_port)
        while not self._stopping.is_set():
            await self.on_tick(0)  # the date of the responses
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), DATE_S)
        self._app.begin_drain()
        self._app.end_polls()
        if self._settings.drain_delay_ms:
            await asyncio.sleep(self._settings.drain_delay_ms / 1000)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Take no new connections, let requests in progress end, and cut what does not within the limit."""
        self._app.begin_drain()
        self._app.end_polls()
        self.gate.closing = True
        for listener in self.servers:
            listener.close()
        for connection in list(self.gate.connections):
            cast(Connection, connection).shutdown()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.gate.empty.wait(), self._settings.graceful_timeout_ms / 1000)
        if self.gate.connections:
            log.warning("%d connections did not end in time and were cut", len(self.gate.connections))
        for connection in list(self.gate.connections):
            cast(Connection, connection).abort()
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CUT_S)

    def _bind(self) -> socket:
        family = AF_INET6 if ":" in self._host else AF_INET
        listener = socket(family, SOCK_STREAM)
        listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        try:
            listener.bind((self._host, self._port))
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        return listener

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to whoever composed the process: uvicorn would raise them again before others could
        clean up.
        """
        yield
