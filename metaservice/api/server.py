"""The HTTP server: uvicorn's, with our connection in place of its own, a loopback check, and an end that is
bounded.
"""

import asyncio
import ipaddress
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from socket import AF_INET, AF_INET6, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket
from typing import cast

import uvicorn

from .app import App
from .guards import Gate
from .protocol import Connection
from .settings import ApiSettings

log = logging.getLogger("metaservice.api")


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
        self._listening = asyncio.Event()
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
                timeout_graceful_shutdown=max(1, -(-settings.graceful_timeout_ms // 1000)),
            )
        )

    async def run_until_stopped(self, on_started: Callable[[int], None] | None = None) -> None:
        """Bind, call `on_started` with the port, serve until `request_stop`, drain.

        Raises OSError when it cannot bind.
        """
        listener = self._bind()
        self.bound_port = int(listener.getsockname()[1])
        self.gate.start()
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        try:
            await self._either(serving, self._listening)
            if on_started is not None and self.started:
                on_started(self.bound_port)
            await self._either(serving, self._stopping)
            await self._drain(serving)
        finally:
            self.should_exit = True
            self.gate.stop()
            listener.close()
            if not serving.done():
                serving.cancel()

    def request_stop(self) -> None:
        """Begin to stop; may be called again, and from a signal handler of the loop."""
        self._app.begin_drain()
        self._stopping.set()

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen; called by uvicorn."""
        await super().startup(sockets)
        self._listening.set()

    @staticmethod
    async def _either(serving: "asyncio.Task[None]", event: asyncio.Event) -> None:
        """Wait for the event, or for the server to end by itself."""
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    async def _drain(self, serving: "asyncio.Task[None]") -> None:
        settings = self._settings
        self._app.begin_drain()
        self._app.end_polls()
        if settings.drain_delay_ms:
            await asyncio.sleep(settings.drain_delay_ms / 1000)
        self.gate.closing = True
        self.should_exit = True
        # uvicorn waits for its tasks with its own limit; what is left after ours is cut.
        await asyncio.wait([serving], timeout=settings.graceful_timeout_ms / 1000)
        for connection in list(self.gate.connections):
            cast(Connection, connection).abort()
        if not serving.done():
            log.warning("%d requests did not end in time and were cut", len(self.server_state.tasks))
            for task in list(self.server_state.tasks):
                task.cancel()
            await asyncio.wait([serving], timeout=1.0)
        if serving.done() and not serving.cancelled():
            serving.result()

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


async def serve(
    app: App,
    host: str,
    port: int,
    settings: ApiSettings,
    on_started: Callable[[int], None] | None = None,
    *,
    allow_remote: bool = False,
    handle_signals: bool = False,
) -> None:
    """Serve `app` until SIGTERM or SIGINT (when `handle_signals`) or until this is cancelled, then drain.

    `on_started` gets the bound port (of `port` 0, the one that was found). Raises RemoteRefused for an
    address that is not loopback without `allow_remote`, OSError when the address cannot be bound.
    """
    server = ApiServer(app, host, port, settings, allow_remote=allow_remote)
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT) if handle_signals else ()
    for number in signals:
        loop.add_signal_handler(number, server.request_stop)
    try:
        await server.run_until_stopped(on_started)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
