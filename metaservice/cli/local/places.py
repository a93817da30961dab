"""Folders and ports for what runs on this machine."""

import fcntl
import os
import random
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "ucm-local-"
LOCK = "lock"
HOST = "127.0.0.1"
LOWEST_PORT = 15_000
YOUNG_S = 60.0
"""A folder younger than this may be in the making, and not locked yet."""

_given: set[int] = set()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder of this process, removed at the end unless it is to `keep`. What killed processes left behind
    of theirs goes first.

    Others may pass through it, though not look into it: a database may run as another user than its starter.
    """
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    folder.chmod(0o711)
    with (folder / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            if (folder / LOCK).exists():
                shutil.rmtree(folder, ignore_errors=True)


def keep(folder: Path) -> None:
    """Let a temporary folder stay, for good."""
    (folder / LOCK).unlink(missing_ok=True)


def sweep() -> None:
    """Remove folders of this user whose process is gone: the kernel freed their locks."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with suppress(OSError):
            found = folder.lstat()
            mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if mine and time.time() - found.st_mtime > YOUNG_S and _left_over(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _left_over(folder: Path) -> bool:
    """Whether it has a lock that nobody holds."""
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return False
    return True


def free_port() -> int:
    """A loopback TCP port that nobody listens on, another one on each call, below the range from which the
    kernel serves outgoing connections: a server that was killed finds its port free when it comes back.
    Raises OSError when none is found."""
    highest = _ephemeral_lowest() - 1
    chance = random.SystemRandom()
    for _ in range(1_000):
        port = chance.randint(min(LOWEST_PORT, highest), highest)
        if port not in _given and _free(port):
            _given.add(port)
            return port
    raise OSError(f"no free port between {LOWEST_PORT} and {highest}")


def _ephemeral_lowest() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return 32_768


def _free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def blocked_for_others(path: Path) -> Path | None:
    """The first folder on the way to `path` that other users may not pass through; None: they may."""
    for folder in reversed(path.resolve().parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None
