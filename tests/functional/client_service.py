"""A service of its own for each test module, and a relay that loses answers."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from metaservice.client import Client, ClientConfig

ROOT = Path(__file__).resolve().parent.parent.parent
KEY_LENGTH = 16
FINGERPRINT: dict[str, Any] = {
    "model": "m",
    "revision": "r",
    "kv_dtype": "bf16",
    "block_size_tokens": 16,
    "key_length": KEY_LENGTH,
    "hash_scheme": "test",
    "hash_seed": "0",
    "groups": [{"name": "full", "kind": "full"}],
    "parts": [{"name": "tp0", "bytes": 100, "group": "full"}, {"name": "tp1", "bytes": 100, "group": "full"}],
}
PARTS = len(FINGERPRINT["parts"])


def new_keys(count: int) -> list[bytes]:
    """A chain of keys nobody has."""
    return [os.urandom(KEY_LENGTH) for _ in range(count)]


class Service:
    """`serve` in a process, on a port that stays the same when it is started again."""

    def __init__(self, folder: Path, port: int, *flags: str) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._ready = folder / "ready.json"
        self._log = folder / "serve.log"
        words = [
            "serve",
            "--data",
            str(folder / "data"),
            "--port",
            str(port),
            "--ready-file",
            str(self._ready),
        ]
        self._command = [sys.executable, "-m", "metaservice.main", *words, *flags]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it answers."""
        self._ready.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log)
        until = time.monotonic() + 30
        while not self._ready.exists():
            assert self.process.poll() is None and time.monotonic() < until, self._log.read_text()[-2_000:]
            time.sleep(0.02)
        assert msgspec.json.decode(self._ready.read_bytes())["pid"] == self.process.pid

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=15)
        finally:
            self.process.kill()
            self.process.wait()

    def set_up(self, instance: str = "i") -> None:
        """A tenant, a storage, a group and an instance."""
        with Client(ClientConfig(url=self.url)) as client:
            client.put_tenant("t")
            client.put_storage("s", "posix", {"root": "/nowhere"})
            client.put_group("g", "t", ["s"])
            client.put_instance(instance, "g", FINGERPRINT)

    def client(self, **changes: Any) -> Client:
        return Client(ClientConfig(**{"url": self.url, "timeout_ms": 5_000, **changes}))


def write(client: Client, keys: list[bytes], instance: str = "i") -> None:
    """Write a chain of blocks."""
    started = client.start_write(instance, keys)
    assert started.failure is None, (started.failure, started.detail)
    rows = started.writable
    assert len(rows) == len(keys)
    finished = client.finish(
        started, started.locations, started.generations, checksums=range(len(keys) * PARTS)
    )
    assert (finished.failure, finished.published, finished.open) == (None, len(keys), 0)


@contextmanager
def relay(target_port: int, lose: Callable[[int, bytes], bool]) -> Iterator[str]:
    """The URL of a relay. Each request goes to the service; its answer is lost with the connection when
    `lose` says so, given the number of the request on its connection and the request."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(near: socket.socket) -> None:
        number = 0
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", target_port)) as far:
            while request := near.recv(1 << 20):
                number += 1
                far.sendall(request)
                answer = far.recv(1 << 20)
                if lose(number, request):
                    return
                near.sendall(answer)

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            Thread(target=serve, args=(near,), daemon=True).start()

    Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def eventually(check: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait until `check` is true."""
    until = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)
