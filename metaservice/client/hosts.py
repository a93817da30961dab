"""Where the keeper runs: in a thread of this process, or in a process of its own."""

import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from threading import Event as Flag
from threading import Lock, Thread, current_thread
from time import sleep
from typing import Protocol

from . import forks
from .breaker import Backoff, new_random
from .config import ClientConfig, Keepalive
from .keeping import Keeping
from .messages import (
    Drop,
    Event,
    Joined,
    KeepLease,
    KeepSession,
    Kept,
    Left,
    Member,
    Message,
    Setup,
    Stop,
    encoder,
    event_decoder,
)
from .results import now_ms

log = logging.getLogger("metaservice.client")

KeptItems = Mapping[str, KeepLease | KeepSession]
"""What is kept, by lease or session; `deadline_ms` as last known."""

_NEVER_MS = 1 << 62
_MESSAGE_MAX_BYTES = 1 << 20
_A_MESSAGE = 500
_FEED_AGAIN_MS = 1_000
_PAUSE_AFTER_FAULT_S = 1.0
_RESPAWN_MS_MIN = 200
_RESPAWN_MS_MAX = 10_000


class Host(Protocol):
    """Where a keeper runs."""

    def post(self, message: Message) -> None:
        """Tell the keeper something. Never waits."""

    def close(self, patience_ms: int = 0) -> None:
        """Stop the keeper, waiting for its end at most so long. What was kept ends by itself."""


class ThreadHost:
    """A keeper in a daemon thread. It shares the interpreter lock: it goes on while others compute in
    Python, not while a C call holds the lock."""

    def __init__(self, config: ClientConfig, emit: Callable[[Event], None]) -> None:
        self._inbox: deque[Message] = deque()
        self._wake = Flag()
        self._wakes_ms = _NEVER_MS
        self._keeping = Keeping(config, emit)
        self._thread = Thread(target=self._run, name="metaservice-keeper", daemon=True)
        self._thread.start()

    def post(self, message: Message) -> None:
        self._inbox.append(message)
        if (
            _soonest_ms(message) < self._wakes_ms
        ):  # else it will look in time by itself; waking costs the caller
            self._wake.set()

    def close(self, patience_ms: int = 0) -> None:
        self._inbox.append(Stop())
        self._wake.set()
        if patience_ms and self._thread is not current_thread():
            self._thread.join(patience_ms / 1_000)

    def _run(self) -> None:
        keeping = self._keeping
        while not keeping.stopped:
            self._wakes_ms = _NEVER_MS  # whoever posts from here on wakes it
            self._wake.clear()
            try:
                while self._inbox:
                    keeping.handle(self._inbox.popleft())
                if keeping.stopped:
                    break
                wait_s = keeping.step() / 1_000
            except Exception:
                log.exception("the keeper failed; it goes on")
                wait_s = _PAUSE_AFTER_FAULT_S
            self._wakes_ms = now_ms() + round(wait_s * 1_000)
            self._wake.wait(wait_s)
        keeping.close()


def _soonest_ms(message: Message) -> int:
    """When a message may first need the keeper."""
    if isinstance(message, KeepLease | KeepSession):
        return message.deadline_ms - message.ttl_ms + message.ttl_ms // 4
    return _NEVER_MS - 1 if isinstance(message, Drop) else 0


class ProcessHost:
    """A keeper in a child process, fed over a socket pair. It goes on whatever this process does, ends
    when this process ends, and is started again when it dies."""

    def __init__(self, config: ClientConfig, emit: Callable[[Event], None], kept: KeptItems) -> None:
        """`kept` is the owner's; a child that is started again is told what is in it then. Raises
        OSError when no child can be started."""
        self._config = config
        self._emit = emit
        self._kept = kept
        self._lock = Lock()
        self._member: Member | None = None
        self._behind = False
        self._feed_again_ms = 0
        self._closing = False
        self._process, self._socket = _spawn()
        self._feed()
        self._listener = Thread(target=self._listen, name="metaservice-keeper-events", daemon=True)
        self._listener.start()
        forks.register(self)

    def after_fork(self) -> None:
        """The keeper is the parent's. An open copy of the socket here would hide the parent's death from
        it."""
        self._lock = Lock()
        self._closing = True
        self._socket.close()

    @property
    def pid(self) -> int:
        """The child process."""
        return self._process.pid

    def post(self, message: Message) -> None:
        with self._lock:
            if isinstance(message, Member):
                self._member = message
            if self._behind:
                if now_ms() >= self._feed_again_ms:
                    self._feed()
            elif isinstance(message, Drop):
                for at in range(0, max(len(message.leases), 1), _A_MESSAGE):
                    self._send(Drop(message.leases[at : at + _A_MESSAGE], message.sessions if not at else []))
            else:
                self._send(message)

    def close(self, patience_ms: int = 0) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._send(Stop())
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(max(patience_ms, 1) / 1_000)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it has nothing to lose
            self._process.wait()

    def _send(self, message: Message | Setup) -> None:
        try:
            self._socket.send(encoder.encode(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._behind = True  # it does not read now; it is fed anew when it does
        except OSError:
            pass  # it is dead: the listener starts another and feeds it

    def _feed(self) -> None:
        """Tell a keeper everything."""
        self._behind = False
        self._send(Setup(config=self._config))
        if self._member is not None:
            self._send(self._member)
        now = now_ms()
        self._feed_again_ms = now + _FEED_AGAIN_MS
        kept = [item for item in list(self._kept.values()) if item.deadline_ms > now]
        for at in range(0, max(len(kept), 1), _A_MESSAGE):
            self._send(Kept(kept[at : at + _A_MESSAGE], fresh=not at))

    def _listen(self) -> None:
        backoff = Backoff(_RESPAWN_MS_MIN, _RESPAWN_MS_MAX, new_random())
        while not self._closing:
            try:
                data = self._socket.recv(_MESSAGE_MAX_BYTES)
            except OSError:
                data = b""
            if data:
                self._heard(event_decoder.decode(data))
                backoff.reset()
            elif not self._closing:
                self._respawn(backoff)

    def _heard(self, event: Event) -> None:
        with self._lock:
            if self._member is not None and isinstance(event, Joined):
                self._member.incarnation, self._member.registered = event.incarnation, True
            elif self._member is not None and isinstance(event, Left):
                self._member.incarnation, self._member.registered = token_hex(8), False
            if self._behind:
                self._feed()
        self._emit(event)

    def _respawn(self, backoff: Backoff) -> None:
        """The child is gone though nobody asked for it."""
        self._socket.close()
        self._process.kill()
        code = self._process.wait()
        log.warning("the keeper process ended (exit status %d); starting another", code)
        while not self._closing:
            sleep(backoff.next_ms() / 1_000)
            try:
                process, fed = _spawn()
            except OSError as error:
                log.warning("no keeper process can be started: %s", error)
                continue
            with self._lock:
                self._process, self._socket = process, fed
                if self._closing:
                    fed.close()
                    process.kill()
                    process.wait()
                else:
                    self._feed()
            return


def _spawn() -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """A keeper process and our end of the socket pair to it, which is its standard input."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    if not sys.executable:
        raise OSError("the interpreter does not know its own program")
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "metaservice.client.keeper", str(os.getpid())],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the engine, which may want to finish its blocks
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def start_host(
    keepalive: Keepalive, config: ClientConfig, emit: Callable[[Event], None], kept: KeptItems
) -> Host:
    """A running keeper of what is in `kept`. Where no process can be started it is a thread, and the log
    says so."""
    if keepalive == "process":
        try:
            return ProcessHost(config, emit, kept)
        except OSError as error:
            log.warning("no keeper process can be started (%s): a thread keeps leases alive instead", error)
    host = ThreadHost(config, emit)
    host.post(Kept(list(kept.values())))
    return host
