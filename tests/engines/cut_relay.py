"""A wire between an engine and the service that can be cut, slowed down, or made to lie."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread


class CutRelay:
    """`url` leads to the service at `port`. `cut`: nothing passes any more, in either direction; what was on
    its way is lost. `delay_s`: each answer is held back that long. `lie`: may change an answer's bytes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay_s = 0.0
        self.lie: Callable[[bytes], bytes] | None = None
        self.requests: list[bytes] = []
        self._cut = False
        self._lock = Lock()
        self._open: set[socket.socket] = set()
        Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """The engine is gone, as far as the service can tell."""
        with self._lock:
            self._cut = True
            sockets, self._open = list(self._open), set()
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """What comes from now on passes again."""
        with self._lock:
            self._cut = False

    def close(self) -> None:
        """No more of it."""
        self.cut()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def count(self, path: bytes) -> int:
        """How many requests went to a path that contains these bytes."""
        return sum(path in line for line in self.requests)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            Thread(target=self._serve, args=(near,), daemon=True).start()

    def _keep(self, *sockets: socket.socket) -> bool:
        with self._lock:
            if self._cut:
                return False
            self._open.update(sockets)
            return True

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", self._port)) as far:
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not self._keep(near, far):
                return
            back = Thread(target=self._answers, args=(far, near), daemon=True)
            back.start()
            while request := near.recv(1 << 20):
                line = request.split(b"\r\n", 1)[0]
                if line.endswith(b"HTTP/1.1"):
                    self.requests.append(line)
                if self._cut:
                    break
                far.sendall(request)
            with suppress(OSError):
                far.shutdown(socket.SHUT_RDWR)
            back.join(5)
            with self._lock:
                self._open -= {near, far}

    def _answers(self, far: socket.socket, near: socket.socket) -> None:
        with suppress(OSError):
            while answer := far.recv(1 << 20):
                if self.delay_s:
                    time.sleep(self.delay_s)
                if self._cut:
                    break
                near.sendall(self.lie(answer) if self.lie else answer)
        with suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)
