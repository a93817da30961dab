"""The one thread that makes a journal's blocking calls.

A `concurrent.futures` executor costs about 45 us a call and two locks more than this; with one append in
flight and nothing to cancel, a queue in and a callback out are enough.
"""

import asyncio
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

_Call = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class JournalThread:
    """Runs calls one after the other. Not to be used after `stop`."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, what: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """The result of `what(*args)`, or its exception. A caller that is cancelled does not stop the
        call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._calls.put((loop, future, what, args))
        return future

    def stop(self) -> None:
        """End the thread behind the calls that wait."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            loop, future, what, args = call
            try:
                result = what(*args)
            except BaseException as error:
                answer: tuple[Callable[..., None], Any] = (_fail, error)
            else:
                answer = (_resolve, result)
            try:
                loop.call_soon_threadsafe(answer[0], future, answer[1])
            except RuntimeError:
                return  # the loop is closed: nobody waits any more


def _resolve(future: "asyncio.Future[Any]", result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
