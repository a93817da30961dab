"""The keeper as a process of its own: `python -m metaservice.client.keeper PARENT`, fed by its parent on
standard input.

It must never outlive its parent: an engine that is dead but renewed would hold blocks for ever. So it
ends when its input ends, when the kernel says that the parent died, and when it finds that it has
another parent.
"""

import ctypes
import os
import select
import signal
import socket
import sys
from collections import deque
from threading import Lock
from types import FrameType

from .hosts import ThreadHost
from .messages import Event, Renewed, Setup, encoder, message_decoder, setup_decoder

_LOOK_MS = 1_000
_MESSAGE_MAX_BYTES = 1 << 20
_EVENTS_MAX = 10_000
_PR_SET_PDEATHSIG = 1


class _Out:
    """Events to the parent, which may be too busy to read for a long time: they wait, and renewals may
    be left out."""

    def __init__(self, to_parent: socket.socket) -> None:
        self._to_parent = to_parent
        self._waiting: deque[Event] = deque()
        self._lock = Lock()

    def put(self, event: Event) -> None:
        with self._lock:
            if len(self._waiting) >= _EVENTS_MAX:
                # The parent then takes leases for shorter than they are, which costs it nothing but a miss.
                self._waiting = deque(kept for kept in self._waiting if not isinstance(kept, Renewed))
            self._waiting.append(event)
        self.flush()

    def flush(self) -> None:
        with self._lock:
            while self._waiting:
                try:
                    self._to_parent.send(encoder.encode(self._waiting[0]), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                except OSError:
                    os._exit(0)
                self._waiting.popleft()


def _end_with(parent: int) -> None:
    """End at once when `parent` dies."""

    def check(_signal: int = 0, _frame: FrameType | None = None) -> None:
        # The kernel signals as well when only the thread that started us ended: the parent is then the same.
        if os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGUSR1, check)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    check()  # it may have died before


def main(parent: int, from_parent: socket.socket) -> None:
    """Run until the parent is gone or says stop."""
    _end_with(parent)
    out = _Out(from_parent)
    first = from_parent.recv(_MESSAGE_MAX_BYTES)
    if not first:
        return
    setup = setup_decoder.decode(first)
    host = ThreadHost(setup.config, out.put)
    poller = select.poll()
    poller.register(from_parent, select.POLLIN)
    while os.getppid() == parent:
        if not poller.poll(_LOOK_MS):
            out.flush()
            continue
        data = from_parent.recv(_MESSAGE_MAX_BYTES)
        if not data:
            break
        message = message_decoder.decode(data)
        if isinstance(message, Setup):
            continue
        host.post(message)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), socket.socket(fileno=os.dup(0)))
