"""Waking those who wait for something that changes seldom: no turn of the loop is spent until it does."""

import asyncio


class Bell:
    """One event loop uses it."""

    def __init__(self) -> None:
        self._rung: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake everybody who waits now."""
        rung, self._rung = self._rung, None
        if rung is not None and not rung.done():
            rung.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Return when it rings, or when the time is over."""
        if self._rung is None:
            self._rung = asyncio.get_running_loop().create_future()
        # The future is shared: whoever stops waiting leaves it to the others.
        await asyncio.wait([self._rung], timeout=max(0.0, seconds))
