"""The addresses of a host, and what to do when the name service is slow, silent or wrong."""

import asyncio
import ipaddress
from collections.abc import Callable, Coroutine
from typing import Any

Lookup = Callable[[str], Coroutine[Any, Any, list[str]]]


class Addresses:
    """The addresses of one host, in the order to try them.

    What was once found is kept: while the name service is down, a host that we know stays reachable (case
    C9). A name is looked up again when a connection to its address failed, in the background and once at a
    time: each look-up may hold a thread for many seconds, and more of them would hold up the whole process.
    """

    def __init__(self, host: str, lookup: Lookup | None = None) -> None:
        """`lookup` is the system's unless given. A host that is an address is never looked up."""
        self._host = host
        self._lookup = lookup or system_lookup
        self._literal = _is_address(host)
        self._known: list[str] = [host] if self._literal else []
        self._running: asyncio.Task[list[str]] | None = None

    async def first(self) -> str:
        """The address to connect to. Waits for a look-up only when none is known. Raises OSError when the
        name service knows none."""
        if not self._known:
            await asyncio.shield(self._look())  # it keeps what it finds
        if not self._known:
            raise OSError("the name service gives no address")
        return self._known[0]

    def failed(self, address: str) -> None:
        """Nobody answered at `address`: another known one is next, and the name is looked up again."""
        if self._literal:
            return
        if self._known and self._known[0] == address:
            self._known.append(self._known.pop(0))
        self._look()

    def close(self) -> None:
        """Ends a look-up that still runs."""
        if self._running is not None:
            self._running.cancel()

    def _look(self) -> asyncio.Task[list[str]]:
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._lookup(self._host))
            self._running.add_done_callback(self._looked)
        return self._running

    def _looked(self, task: asyncio.Task[list[str]]) -> None:
        self._running = None
        if task.cancelled() or task.exception() is not None or not task.result():
            return  # what is known stays known
        found = task.result()
        if set(found) != set(self._known):
            self._known = list(found)


async def system_lookup(host: str) -> list[str]:
    """The addresses that the system gives for a name. Raises OSError when it gives none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
