"""What a replica tells those who measure it. `main` hands an observer in; nothing here knows who listens."""

from typing import Protocol


class Observer(Protocol):
    """Called from the event loop, so every method has to be cheap and must not raise."""

    def batch(self, *, commands: int, events: int, payload_bytes: int, append_ms: float, queued: int) -> None:
        """A batch became durable; `queued` commands wait behind it."""
        ...

    def expired(self, kind: str, count: int) -> None:
        """kind: `session`, `lease`, `engine`, `worker` or `task`."""
        ...

    def evicted(self, reason: str, blocks: int, size_bytes: int) -> None:
        """reason: `quota`, `watermark` or `retired`."""
        ...

    def loop_lag(self, lag_ms: float) -> None:
        """How much later than asked the loop came back."""
        ...

    def rebuilt(self, reason: str) -> None:
        """The state was thrown away and built anew from the journal."""
        ...
