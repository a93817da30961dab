"""Many places at a time: a small pool of threads, since reads, writes and checksums let go of the
interpreter's lock."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")
Error = TypeVar("Error", bound=Exception)

_INLINE_ROWS = 2
"""Up to so many rows are done by the caller itself: waking a thread costs more than it saves."""
_CHUNKS_PER_THREAD = 4
"""Rows go to threads in chunks: large enough to be cheap, small enough that no thread waits long for the
last."""


def kept(call: Callable[Args, Result], error: type[Error]) -> Callable[Args, Result | Error]:
    """`call`, returning an `error` that it raises: one bad row must not end a batch."""

    def run(*args: Args.args, **kwargs: Args.kwargs) -> Result | Error:
        try:
            return call(*args, **kwargs)
        except error as raised:
            return raised

    return run


class Batch:
    """Runs one call for each row of columns of equal length, in order of rows, on up to `threads` threads.

    Usable after a fork: threads do not cross it, so the child makes its own.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._executor = ThreadPoolExecutor(threads, name)
        self._pid = os.getpid()

    def run(self, call: Callable[..., Result], *columns: Sequence[object]) -> list[Result]:
        """The results of `call(*row)` for every row. What `call` raises ends the whole batch."""
        if len(set(map(len, columns))) > 1:
            raise ValueError(f"columns of {[len(column) for column in columns]} rows")
        rows = list(zip(*columns, strict=True))
        if self._threads == 1 or len(rows) <= _INLINE_ROWS:
            return _each(call, rows)
        size = -(-len(rows) // (self._threads * _CHUNKS_PER_THREAD))
        chunks = [rows[at : at + size] for at in range(0, len(rows), size)]
        results = self._pool().map(_each, [call] * len(chunks), chunks)
        return [result for chunk in results for result in chunk]

    def close(self) -> None:
        """End the threads once they are idle."""
        self._pool().shutdown()

    def _pool(self) -> ThreadPoolExecutor:
        if self._pid != os.getpid():
            self._executor = ThreadPoolExecutor(self._threads, self._name)
            self._pid = os.getpid()
        return self._executor


def _each(call: Callable[..., Result], rows: Iterable[tuple[object, ...]]) -> list[Result]:
    return [call(*row) for row in rows]
