"""One slot of a pool's file: who may change it, what stands at it, and how it is filled and emptied.

Bytes go by `pread` and `pwrite`, not through a mapping. On tmpfs both are one copy, and a fresh slot is
filled twice as fast so, since its pages need no faults. What decides is that these calls cannot kill: a load
or store through a mapping for whose page a full or shortened file has no memory is a SIGBUS of the engine,
where they answer with an error. They also let go of the interpreter's lock.

Who changes a slot holds the lock on its first byte, which the kernel takes back when the holder dies, however
it dies. Readers hold no lock: they copy, verify the copy, and look again under the lock only when it does not
verify.
"""

import ctypes
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dataplane.backends.shm_layout import (
    FRONT_BYTES,
    LABELLED_BYTES,
    Label,
    decode_label,
    encode_label,
)
from dataplane.integrity import HEADER_BYTES

LOCK_MS = 1_000
"""A copy of one part takes far less. Who cannot get at a slot for so long meets a writer that was stopped."""

_LOCK_LOOK_S_MIN, _LOCK_LOOK_S_MAX = 0.0002, 0.02
_FLOCK = struct.Struct("hhqqi0q")
"""`struct flock`: type, whence, start, length, process (0: the lock is the open file's)."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class SlotBusy(OSError):
    """Somebody else has been changing the slot for `LOCK_MS`."""

    def __init__(self) -> None:
        super().__init__(errno.EBUSY, "another process has been at the slot for too long")


@contextmanager
def locked(descriptor: int, offset: int, *, shared: bool = False) -> Iterator[None]:
    """Nobody else changes the slot at `offset` meanwhile; `shared`: nobody at all does. Raises SlotBusy and
    OSError.

    The lock belongs to the open file and not to the process: threads with descriptors of their own keep each
    other out too.
    """
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    request = _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0)
    end = time.monotonic() + LOCK_MS / 1_000
    pause_s = _LOCK_LOOK_S_MIN
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
            break
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        if time.monotonic() > end:
            raise SlotBusy
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOCK_LOOK_S_MAX)
    try:
        yield
    finally:
        # By name, not by closing: a child that was forked meanwhile holds the same open file.
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, offset, 1, 0))


def read_front(descriptor: int, offset: int) -> bytes:
    """Header and label of the slot, shorter where the file ends."""
    return os.pread(descriptor, LABELLED_BYTES, offset)


def is_empty(front: bytes) -> bool:
    """Whether nothing stands at a slot."""
    return not any(front)


def header_of(front: bytes) -> bytes:
    """The header in a front page."""
    return front[:HEADER_BYTES]


def label_of(front: bytes) -> Label | None:
    """The label in a front page, None when there is no whole one."""
    return decode_label(front)


def claim(descriptor: int, offset: int, generation: int, size_bytes: int) -> None:
    """Say that a write is under way: should it be cut off, a delete and a scan know whose it was."""
    label = Label(False, generation, size_bytes, time.time_ns(), os.getpid())
    _write_all(descriptor, memoryview(bytes(HEADER_BYTES) + encode_label(label)), offset)


def fill(descriptor: int, offset: int, payload: memoryview) -> None:
    """Put the payload behind the front page."""
    _write_all(descriptor, payload, offset + FRONT_BYTES)


def publish(descriptor: int, offset: int, header: bytes, generation: int, size_bytes: int) -> None:
    """The one step that makes a filled slot readable."""
    label = Label(True, generation, size_bytes, time.time_ns(), os.getpid())
    _write_all(descriptor, memoryview(header + encode_label(label)), offset)


def empty(descriptor: int, offset: int, stride: int) -> None:
    """Give the pages of a slot back: it reads as zeros from then on, its header first."""
    if _fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, stride) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def read_payload(descriptor: int, offset: int, size_bytes: int) -> bytes:
    """The payload, shorter only where the file ends."""
    at = offset + FRONT_BYTES
    data = os.pread(descriptor, size_bytes, at)
    while 0 < len(data) < size_bytes:
        more = os.pread(descriptor, size_bytes - len(data), at + len(data))
        if not more:
            break
        data += more
    return data


def read_payload_into(descriptor: int, offset: int, view: memoryview) -> int:
    """How many bytes of the payload are in `view` now; all, unless the file ends."""
    done = 0
    while done < len(view):
        more = os.preadv(descriptor, [view[done:]], offset + FRONT_BYTES + done)
        if not more:
            break
        done += more
    return done


def next_data(descriptor: int, offset: int) -> int | None:
    """Where, from `offset` on, there are pages again; None when there are none."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = os.pwrite(descriptor, data, offset)
    while done < len(data):  # a full file system or a signal can cut a write short without an error
        done += os.pwrite(descriptor, data[done:], offset + done)


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
