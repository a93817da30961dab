"""What an attachment is.

An attachment ties the streams to one consumer that does not find them by itself: it registers them there, or
carries the events to a socket of its own. It decides nothing about what is announced.
"""

from typing import Protocol

from metaservice.core.windows import Window
from metaservice.wire.schemas_events import AttachmentView, StreamView


class Attachment(Protocol):
    """One consumer. All methods are called on the publisher's loop; only `start` and `close` may wait."""

    @property
    def name(self) -> str:
        """Its kind and where it leads to; unique among the attachments of a process."""
        ...

    async def start(self) -> None:
        """Begin. What cannot be reached is tried again for ever: a consumer that is down must not keep the
        others from theirs."""
        ...

    def window(self, shard: int, window: Window) -> None:
        """A window was sent by the streams."""
        ...

    def leads(self, shard: int, leads: bool) -> None:
        """This replica leads the shard from now on, and knows all that is announced and all its engines; or
        it does no more."""
        ...

    def changed(self) -> None:
        """Engines or instances came, went or are otherwise."""
        ...

    def status(self) -> AttachmentView:
        """How it stands, for people."""
        ...

    def streams(self) -> list[StreamView]:
        """The streams that it serves itself."""
        ...

    def stats(self) -> dict[str, float]:
        """Gauges and counters by metric name, with labels."""
        ...

    async def close(self) -> None:
        """End. What is registered elsewhere stays: the next leader takes it over."""
        ...
