"""Long polls: how many may wait, and what ends them besides their answer."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from .http import HttpRequest
from .settings import ApiSettings

T = TypeVar("T")


class LongPolls:
    """All polls that wait in this replica. They end with the service, and when their caller hangs up."""

    def __init__(self, stopping: asyncio.Event, settings: ApiSettings) -> None:
        self._stopping = stopping
        self._settings = settings
        self._waiting = 0

    def granted_ms(self, wait_ms: int) -> int:
        """How long one more may wait: 0 while the service stops, or when enough wait already."""
        if self._stopping.is_set() or self._waiting >= self._settings.long_polls_max:
            return 0
        return wait_ms

    async def until(self, request: HttpRequest, work: Coroutine[Any, Any, T], wait_ms: int) -> T | None:
        """The result of `work`, which waits at most `wait_ms`; None when the service stops or the caller
        went away before it was there.
        """
        request.wait_ms = wait_ms
        gone = asyncio.Event()
        request.on_gone = gone.set
        self._waiting += 1
        task = asyncio.ensure_future(work)
        ends = [asyncio.ensure_future(event.wait()) for event in (self._stopping, gone)]
        try:
            await asyncio.wait([task, *ends], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            self._waiting -= 1
            request.on_gone = None
            for each in (task, *ends):
                each.cancel()
            await asyncio.gather(task, *ends, return_exceptions=True)
