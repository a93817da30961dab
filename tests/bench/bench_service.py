"""The service as an operator runs it, on a free loopback port, and what the kernel says it costs."""

import os
import platform
import socket
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from metaservice.client import Client, ClientConfig

ROOT = Path(__file__).resolve().parents[2]
INSTANCE = "bench"
KEY_LENGTH = 32
CHAIN_KEYS = 1024
"""Blocks of one chain, and keys of one request while the store is filled."""
NEVER_SNAPSHOT = ("--snapshot-bytes", str(1 << 40), "--snapshot-batches", str(1 << 40))
"""Snapshots are measured by themselves: one that is cut in the middle of a figure would be part of it."""
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
RECEIVE_BYTES = 65_536
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class BenchError(Exception):
    """A figure cannot be had: something did not start, or answered otherwise than it must."""


class Process:
    """A child process that measures itself by what the kernel says of it. Ends with its `with` block."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._child = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=errors, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._child.pid

    def stop(self) -> None:
        """Ask it to end, insist after a while. May be called twice."""
        if self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()

    def wait_for(self, ready: Path) -> bytes:
        """The contents of a file that the child writes once it is ready."""
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            if self._child.poll() is not None or time.monotonic() > give_up_s:
                told = self._log.read_text(errors="replace").strip().splitlines()[-5:]
                raise BenchError("did not start: " + " | ".join(told))
            time.sleep(0.002)
        return ready.read_bytes()

    def cpu_s(self) -> float:
        """Processor time of all its threads, user and system, in steps of the kernel's tick."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S

    def rss_bytes(self) -> int:
        """Memory it has resident now."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE_BYTES


class Ready(msgspec.Struct):
    """What the service writes to its ready file."""

    port: int


class Service(Process):
    """`serve` over `data`, ready when this returns. `started_s`: from the start of the process until then."""

    def __init__(self, data: Path, *flags: str) -> None:
        data.mkdir(parents=True, exist_ok=True)
        ready = data / "ready.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "metaservice.main", "serve", "--data", str(data), "--port", "0"]
        command += ["--ready-file", str(ready), "--log-level", "warning", *flags]
        began_s = time.monotonic()
        super().__init__(command, data / "service.log")
        try:
            self.port = msgspec.json.decode(self.wait_for(ready), type=Ready).port
        except BaseException:
            self.stop()
            raise
        self.started_s = time.monotonic() - began_s
        self.journal = data / "journal.sqlite"


def new_client(port: int) -> Client:
    """A client that waits rather than misses: a stall of the machine belongs to the figures."""
    config = ClientConfig(
        url=f"http://127.0.0.1:{port}", timeout_ms=30_000, breaker_slow_ms=30_000, breaker_failures=1_000
    )
    return Client(config)


def set_up(port: int) -> None:
    """One tenant, storage, group and instance, whose blocks have one part."""
    with new_client(port) as client:
        set_up_with(client)


def set_up_with(client: Client) -> None:
    """The same, through a client."""
    client.put_tenant("bench")
    client.put_storage("local", "posix", {"root": "/nowhere"})
    client.put_group("bench", "bench", ["local"])
    fingerprint = {
        "model": "bench", "revision": "1", "kv_dtype": "bf16", "block_size_tokens": 16,
        "key_length": KEY_LENGTH, "hash_scheme": "sha256", "hash_seed": "0",
        "parts": [{"name": "tp0", "bytes": 2 << 20}],
    }  # fmt: skip
    client.put_instance(INSTANCE, "bench", fingerprint)


def chain(number: int, count: int, first: int = 0) -> list[bytes]:
    """The keys `first` to `first + count - 1` of a chain; every process makes the same."""
    seed = number.to_bytes(8, "little")
    return [sha256(seed + row.to_bytes(4, "little")).digest() for row in range(first, first + count)]


class RawConnection:
    """One kept connection that sends bytes as they are and receives one HTTP reply: what any client pays."""

    def __init__(self, port: int) -> None:
        self._socket = blocking_socket(port)

    def close(self) -> None:
        self._socket.close()

    def exchange(self, request: bytes) -> bytes:
        """The whole reply, head and body."""
        self._socket.sendall(request)
        reply = self._socket.recv(RECEIVE_BYTES)
        head, _, body = reply.partition(b"\r\n\r\n")
        left = content_length(head) - len(body)
        if not left:
            return reply
        pieces = [reply]
        while left > 0:
            pieces.append(self._socket.recv(RECEIVE_BYTES))
            if not pieces[-1]:
                raise BenchError("closed in the middle of an answer")
            left -= len(pieces[-1])
        return b"".join(pieces)


def blocking_socket(port: int) -> socket.socket:
    """A socket without a timeout: with one, Python polls before it sends and receives."""
    connected = socket.create_connection(("127.0.0.1", port))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def content_length(head: bytes) -> int:
    """Of an HTTP head that has one."""
    return int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])


def lookup_request(body: bytes, media: str) -> bytes:
    """An HTTP lookup with this body."""
    head = (
        f"POST /v1/instances/{INSTANCE}/lookup HTTP/1.1\r\nHost: bench\r\nContent-Type: {media}\r\n"
        f"Accept: {media}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Machine(msgspec.Struct, kw_only=True):
    """Where the figures come from. `load`: runnable processes per minute before the run; `sync_us`: median
    time to make 4 KiB durable in the directory of the journal."""

    cores: int
    cpu: str
    memory_bytes: int
    system: str
    python: str
    load: float
    sync_us: float

    def line(self) -> str:
        """One line for people."""
        return (
            f"{self.cores} cores, {self.cpu}, {self.memory_bytes / 2**30:.0f} GiB, {self.system}, "
            f"Python {self.python}; 4 KiB durable in {self.sync_us:.0f} us"
        )


def machine_of(directory: Path) -> Machine:
    """This machine, with the disk under `directory`."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cpu=names[0] if names else platform.machine(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        load=os.getloadavg()[0],
        sync_us=_sync_us(directory / "sync"),
    )


def _sync_us(path: Path) -> float:
    times: list[int] = []
    with path.open("wb", buffering=0) as file:
        for _ in range(21):
            before_ns = time.perf_counter_ns()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            times.append(time.perf_counter_ns() - before_ns)
    path.unlink()
    return sorted(times)[len(times) // 2] / 1000
