"""A lock between processes that cannot be left behind: the kernel frees it when its holder dies."""

import fcntl
import os
import weakref
from pathlib import Path

from metaservice.journal.errors import JournalLocked

_held: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


class FileLock:
    """`flock` on a file that holds the pid of its holder.

    The file stays after release: removing it would let a third opener lock a name while a second one still
    waits on the removed file. Two objects in one process exclude each other as two processes do.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self, where: str) -> None:
        """Takes the lock at once or raises JournalLocked with the holder's pid; `where` names what it
        protects.
        """
        while self._fd is None:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _pid_in(fd)
                os.close(fd)
                raise JournalLocked(where, str(self._path), holder) from None
            except BaseException:
                os.close(fd)
                raise
            if _is_file_at(fd, self._path):
                self._fd = fd
            else:  # somebody removed the file meanwhile: what we hold protects nothing
                os.close(fd)
        _held.add(self)
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            # A full disk takes the pid from the message of the next opener, never the lock from this one.
            return

    def release(self) -> None:
        """Frees the lock; nothing happens when it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            _held.discard(self)


def _pid_in(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None


def _is_file_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _release_in_child() -> None:
    # A forked child shares the lock: it would keep the journal locked after its parent was killed.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
