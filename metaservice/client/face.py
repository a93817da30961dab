"""What the parts of a client share: the way to run a call. The clients are put together of such parts."""

from abc import ABC, abstractmethod
from typing import TypeVar

from .calls import Call

T = TypeVar("T")


class Face(ABC):
    """A part of the blocking client."""

    @abstractmethod
    def _run(self, call: Call[T], timeout_ms: int | None) -> T:
        """The result of a call, good or not."""


class AsyncFace(ABC):
    """A part of the asyncio client."""

    @abstractmethod
    async def _run(self, call: Call[T], timeout_ms: int | None) -> T:
        """The result of a call, good or not."""
