"""One end of the socket pair between a replica and its publisher: whole messages, never waiting."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from .feed import FRAME_BYTES_MAX, framed

BACKLOG_BYTES_MAX = 64 * 1024 * 1024
"""Bytes that may wait for the other side. Whoever wants to send more has to begin anew."""
READ_BYTES = 256 * 1024
"""Taken in one step: whoever reads does other things in between."""
_BUFFERS_MAX = 256
_SOCKET_BYTES = 1024 * 1024


class Pipe:
    """Sends and receives frames on its event loop. `on_frame` gets each one; `on_end` is called once when the
    other side is gone, or sent what is no frame."""

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[memoryview], None],
        on_end: Callable[[], None],
    ) -> None:
        """Takes over `sock`. The frame that `on_frame` gets is only good until it returns."""
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._socket = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_empty: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._read = bytearray()
        self._waiting: deque[memoryview] = deque()
        self._begun = False
        self._flushing = False
        self._open = True
        self.backlog_bytes = 0
        """Bytes that wait."""
        self._loop.add_reader(sock, self._readable)

    def send(self, encoded: bytes) -> bool:
        """Whether it will be sent, if the other side lives: False when too much waits already."""
        if not self._open or self.backlog_bytes + len(encoded) > BACKLOG_BYTES_MAX:
            return False
        frame = framed(encoded)
        self._waiting.append(memoryview(frame))
        self.backlog_bytes += len(frame)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return True

    def forget(self, on_empty: Callable[[], None]) -> None:
        """Drop all that waits but the frame that is half sent; `on_empty` is called once the other side has
        taken the rest."""
        kept = [self._waiting[0]] if self._begun and self._waiting else []
        self._waiting = deque(kept)
        self.backlog_bytes = sum(map(len, kept))
        self._on_empty = on_empty
        # Not before the other side has read something: what it was sent before still fills the socket.
        self._flushing = True
        self._loop.add_writer(self._socket, self._flush)

    def close(self) -> None:
        """Close this end; nothing more is called. May be called again."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._waiting.clear()
            self.backlog_bytes = 0

    def _flush(self) -> None:
        if not self._open:
            return
        try:
            while self._waiting:
                buffers = [self._waiting[at] for at in range(min(len(self._waiting), _BUFFERS_MAX))]
                self._sent(self._socket.sendmsg(buffers))
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            # The other side is gone; what it still sent is read before the end is told.
            self._waiting.clear()
            self.backlog_bytes = 0
        self._loop.remove_writer(self._socket)
        self._flushing = False
        if self._on_empty is not None:
            empty, self._on_empty = self._on_empty, None
            empty()

    def _sent(self, count: int) -> None:
        self.backlog_bytes -= count
        while count:
            first = self._waiting[0]
            if count < len(first):
                self._waiting[0] = first[count:]
                self._begun = True
                return
            count -= len(first)
            self._waiting.popleft()
            self._begun = False

    def _readable(self) -> None:
        try:
            read = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            read = b""
        if not read:
            self._end()
            return
        self._read += read
        taken = 0
        with memoryview(self._read) as view:
            while self._open and len(view) - taken >= 4:
                size = int.from_bytes(view[taken : taken + 4], "little")
                if size > FRAME_BYTES_MAX:
                    taken = -1
                    break
                if len(view) - taken - 4 < size:
                    break
                with view[taken + 4 : taken + 4 + size] as frame:
                    self._on_frame(frame)
                taken += 4 + size
        if taken < 0:
            self._end()
        elif taken:
            del self._read[:taken]

    def _end(self) -> None:
        if self._open:
            self.close()
            self._on_end()
