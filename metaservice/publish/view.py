"""What the parts of the publisher process see of it: attachments, ingest, and whoever else is handed in."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import zmq
import zmq.asyncio
from msgspec import Raw

from metaservice.core.windows import Run, Window

from .emitters.port import Emitter, Stream
from .feed import EngineUp, InstanceUp
from .settings import PublishConfig


class Curve(Protocol):
    """The encryption of our sockets."""

    def serve(self, socket: "zmq.Socket[Any]", tenant: str) -> None:
        """Make `socket` a CURVE server that lets in whoever may see `tenant`; call it before the socket is
        bound."""
        ...

    def dial(self, socket: "zmq.Socket[Any]", server_key: str) -> None:
        """Make `socket` a CURVE client of the server with this public key (Z85); call it before it connects.
        Our own key pair says who we are."""
        ...


class View(Protocol):
    """The publisher as it stands. Only to be used on its event loop; nothing here blocks or waits."""

    @property
    def config(self) -> PublishConfig: ...

    @property
    def context(self) -> zmq.asyncio.Context:
        """Where every socket of this process is made: its end is waited for once."""
        ...

    @property
    def curve(self) -> Curve | None:
        """None: streams are not encrypted."""
        ...

    @property
    def emitter(self) -> Emitter:
        """The canonical dialect."""
        ...

    @property
    def engines(self) -> Mapping[str, EngineUp]:
        """Those alive, of all shards."""
        ...

    @property
    def instances(self) -> Mapping[str, InstanceUp]:
        """Those announced, of all shards."""
        ...

    @property
    def streams(self) -> Mapping[int, Stream]:
        """The streams that there are, by channel."""
        ...

    def endpoints(self, channel: int) -> tuple[str, str]:
        """Where consumers subscribe to a stream and where they ask for its replays. None may be bound now:
        that goes by who leads."""
        ...

    def may_send(self, shard: int) -> bool:
        """Whether this replica leads the shard at this very moment. To be asked before every send."""
        ...

    def number(self, shard: int) -> int:
        """Of the newest window of the shard that is known here; -1: the shard has not begun."""
        ...

    def epoch(self, shard: int) -> int:
        """In which this replica leads the shard, or led it last; 0: never."""
        ...

    def batch(self, channel: int, window: Window) -> bytes:
        """The payload of one window on one stream; it is made once."""
        ...

    def events(self, channel: int, window: Window) -> Sequence[Raw]:
        """The events in it."""
        ...

    def runs(self, channel: int) -> Iterator[Run]:
        """All that is announced on a stream, parents before their children. May be gone through bit by bit:
        what comes meanwhile may be in it or not, what goes meanwhile too."""
        ...

    def snapshot(self, channel: int) -> Iterator[Sequence[Raw]]:
        """A stream's state from nothing (`Emitter.snapshot`). May be gone through bit by bit, as `runs`."""
        ...

    def withdrawal(self, channel: int) -> Iterator[Sequence[Raw]]:
        """Everything that is announced on a stream, told as removed. May be gone through bit by bit, as
        `runs`."""
        ...

    def restate(self, shard: int, instance: str, why: str) -> None:
        """Have the replica tell all of an instance ("": of every instance of the shard) again. `why`:
        `cleared` or `joined`."""
        ...

    def beat(self, shard: int) -> None:
        """Have the replica make a window now."""
        ...

    def say(self, level: str, text: str) -> None:
        """A line for the replica's log. `level`: `debug`, `info`, `warning` or `error`."""
        ...

    def now_s(self) -> float:
        """The clock that leases are judged by."""
        ...
