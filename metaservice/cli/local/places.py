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
UNLOCKED_AGE_S = 60.0
"""A folder without its lock may be in the making; older than this it is left over."""

_given: set[int] = set()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder of this process, removed at the end. What killed processes left behind of theirs goes first.

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
            shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove folders of this user whose process is gone: the kernel freed their locks."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            if _left_over(folder, time.time() - found.st_mtime):
                shutil.rmtree(folder, ignore_errors=True)


def _left_over(folder: Path, age_s: float) -> bool:
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return age_s > UNLOCKED_AGE_S
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return age_s > UNLOCKED_AGE_S


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
