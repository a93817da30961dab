"""Wakes followers when a leader has appended: LISTEN, on the service's own event loop.

Only a hint. It may be lost, late or doubled, so whoever listens polls too, and nothing rests on it.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from metaservice.journal.postgres_errors import DRIVER_ERRORS, text_of
from metaservice.journal.postgres_settings import Connection, PostgresSettings, connect
from metaservice.journal.postgres_statements import channel_of, statements_of

log = logging.getLogger(__name__)

CHECK_MS = 5_000
"""How often the connection is tried: one that is half open never says anything."""
RETRY_MS = 1_000
QUEUE_USED_MAX = 0.25
"""Above this part of the server's queue somebody is warned: a full one fails every commit that notifies."""


class PostgresHints:
    """Calls `callback(shard)` on the loop for every append that was told. Connects and reconnects by itself.

    Behind a transaction pooler there is nothing to listen to, and it does nothing.
    """

    def __init__(self, settings: PostgresSettings, callback: Callable[[int], None]) -> None:
        self._settings = settings
        self._callback = callback
        self._task: asyncio.Task[None] | None = None
        self.listening = False
        """Whether hints would arrive now."""

    def start(self) -> None:
        """Begins to listen, in a task of the running loop."""
        if not self._settings.pooler and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="journal hints")

    async def close(self) -> None:
        """Ends it. May be called twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            try:
                connection = await connect(self._settings)
                try:
                    await self._listen(connection)
                finally:
                    self.listening = False
                    connection.terminate()
            except (*DRIVER_ERRORS, ValueError) as error:
                log.debug("no hints from %s: %s", self._settings.place, text_of(error))
            await asyncio.sleep(RETRY_MS / 1000)

    async def _listen(self, connection: Connection) -> None:
        """Until the connection is lost: every call on it then fails."""
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        await self._within(
            connection, connection.add_listener(channel_of(self._settings.schema), self._heard)
        )
        self.listening = True
        question = statements_of(self._settings.schema).queue_usage
        while not lost.is_set():
            used = await self._within(connection, connection.fetchval(question.sql, *question.arguments({})))
            if used > QUEUE_USED_MAX:
                log.warning(
                    "the notification queue of %s is %d %% full: a listener there reads no more",
                    self._settings.place, used * 100,
                )  # fmt: skip
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_MS / 1000):
                    await lost.wait()

    async def _within(self, connection: Connection, call: Any) -> Any:
        expiry = asyncio.get_running_loop().call_later(self._settings.timeout_ms / 1000, connection.terminate)
        try:
            return await call
        finally:
            expiry.cancel()

    def _heard(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        shard = str(payload).partition(" ")[0]
        if shard.isascii() and shard.isdigit():  # anybody may notify
            self._callback(int(shard))
