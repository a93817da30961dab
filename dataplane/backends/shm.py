"""Memory of one machine, owned by one worker and shared by the engines beside it.

The service's core gives out slots; a location's slot number is its slot in the pool's file, so there is no
table here. A write marks the slot as its own, copies the payload, and puts the header last; a read copies
first and verifies the copy. So whatever a writer does that was killed, stopped, or outlived by its session,
a reader gets the bytes of the place it asked for or a refusal.

Every call opens the file it needs by name: a pool that is gone is gone for everybody at once, nobody keeps
its memory, and a forked child shares nothing.
"""

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from dataplane import integrity
from dataplane.backends import shm_layout as layout
from dataplane.backends import shm_pool as pools
from dataplane.backends import shm_slots as slots
from dataplane.backends.one_by_one import OneByOne
from dataplane.backends.shm_scan import scan, stamp_of
from dataplane.buffers import payload_of, writable
from dataplane.integrity import HEADER_BYTES, BadPlace
from dataplane.port import (
    Buffer,
    Capabilities,
    DeleteFailed,
    DeleteReason,
    Found,
    OpenFailed,
    Place,
    ReadReason,
    ReadRefused,
    WriteFailed,
    WriteReason,
)

Result = TypeVar("Result")

_THREADS_MAX = 64
_FILE_MODE = 0o660
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CHANGE_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_READ_REASONS: dict[int, ReadReason] = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.EBUSY: "io_error",  # somebody has been writing there all the time
    errno.ELOOP: "malformed",
    errno.EISDIR: "malformed",
    errno.ENXIO: "malformed",
}
_WRITE_REASONS: dict[int, WriteReason] = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.ENOMEM: "no_space",
    errno.EFBIG: "no_space",
    errno.EROFS: "read_only",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.ENOENT: "root_missing",
    errno.ENOTDIR: "root_missing",
}
_DELETE_REASONS: dict[int, DeleteReason] = {
    errno.EROFS: "read_only",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
}
_PASSING = frozenset({"malformed", "bad_checksum", "truncated"})
"""Refusals that a reader gets too when the slot changes under it: the second look is under the lock."""
_GONE = "the pool is gone"


def open_shm(options: Mapping[str, str]) -> "Shm":
    """Find the pool that `options` name. Raises OpenFailed: for `options.pool` when no worker on this machine
    owns it now, which may pass."""
    directory = pools.directory_of(options)
    pools.slot_bytes_of(options)
    threads = options.get("threads", "4")
    if not (threads.isascii() and threads.isdigit() and 1 <= int(threads[:9]) <= _THREADS_MAX):
        raise OpenFailed("options.threads", f"{threads!r} is not a number in 1..{_THREADS_MAX}")
    pool = pools.pool_of(options)
    pools.find(directory, pool)
    return Shm(directory, pool, int(threads))


class _Slot(NamedTuple):
    """Where a part lies."""

    path: str
    offset: int
    stride: int

    @property
    def payload_bytes_max(self) -> int:
        return self.stride - layout.FRONT_BYTES


class Shm(OneByOne):
    """See the module. Made by `open_shm`."""

    def __init__(self, directory: str, pool: str, threads: int) -> None:
        self._directory = directory
        self._pool = pool
        super().__init__(threads, "shm-backend")
        self._strides: dict[str, int] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            kind="shm",
            memory=frozenset({"host"}),
            alignment_bytes=1,
            batch_places_max=1024,
            survives="process",
            volatile=True,
        )

    def _slot(self, place: Place) -> _Slot | None:
        """Where a checked place is; None when its pool is gone. Raises BadPlace."""
        folder = layout.folder_of(self._directory, place.cluster, self._pool)
        stride = self._strides.get(place.cluster)
        if stride is None:
            there = pools.about(folder)
            if there is None:
                return None
            stride = self._strides[place.cluster] = there.stride
        return _Slot(f"{folder}/{layout.file_of(place)}", layout.offset_of(place, stride), stride)

    # --- write -----------------------------------------------------------------------------------------

    def write(self, place: Place, data: Buffer) -> int:
        payload = payload_of(place, data)
        checksum = integrity.checksum_of(payload)
        try:
            header = integrity.encode_header(place, checksum)
            slot = self._slot(place)
        except BadPlace as error:
            raise WriteFailed("bad_place", place, str(error)) from None
        if slot is None:
            raise WriteFailed("root_missing", place, _GONE)
        if len(payload) > slot.payload_bytes_max:
            detail = f"{len(payload)} bytes, where slots take {slot.payload_bytes_max}"
            raise WriteFailed("wrong_length", place, detail)
        with _write_errors(place), _opened(slot.path, _CHANGE_FLAGS | os.O_CREAT) as descriptor:
            with slots.locked(descriptor, slot.offset):
                if self._free(descriptor, slot, place, checksum):
                    _put(descriptor, slot, place, header, payload)
            if os.fstat(descriptor).st_nlink == 0:
                raise WriteFailed("root_missing", place, _GONE)
        return checksum

    def _free(self, descriptor: int, slot: _Slot, place: Place, checksum: int) -> bool:
        """Under the lock: whether the slot may be filled now; False when the same bytes are there already.
        Raises WriteFailed."""
        front = slots.read_front(descriptor, slot.offset)
        if slots.is_empty(front):
            return True
        label = slots.label_of(front)
        if label is None:
            raise WriteFailed("exists", place, "what is there says not what it is")
        if label.generation > place.generation:
            raise WriteFailed("removed", place, f"the slot is at generation {label.generation}")
        if label.generation == place.generation and label.published:
            try:
                _copy(descriptor, slot, place, checksum)
            except ReadRefused as refused:
                raise WriteFailed("exists", place, refused.reason) from None
            return False
        # Of an earlier block, or cut off: no writer is alive there, and no reader may ask for it.
        slots.empty(descriptor, slot.offset, slot.stride)
        return True

    # --- read ------------------------------------------------------------------------------------------

    def read(self, place: Place, checksum: int | None = None) -> bytes:
        return self._settled(place, lambda descriptor, slot: _copy(descriptor, slot, place, checksum))

    def read_into(self, place: Place, buffer: bytearray | memoryview, checksum: int | None = None) -> None:
        view = writable(place, buffer)
        self._settled(place, lambda descriptor, slot: _copy_into(descriptor, slot, place, view, checksum))

    def _settled(self, place: Place, copy: Callable[[int, _Slot], Result]) -> Result:
        """What `copy` gives. A copy that does not verify may have been taken while the slot changed: then
        once more, with nobody at it."""
        try:
            integrity.check_place(place)
            integrity.check_content(place)
            slot = self._slot(place)
        except BadPlace as error:
            raise ReadRefused("bad_place", place, str(error)) from None
        if slot is None:
            raise ReadRefused("missing", place, _GONE)
        try:
            with _opened(slot.path, _READ_FLAGS) as descriptor:
                try:
                    return copy(descriptor, slot)
                except ReadRefused as refused:
                    if refused.reason not in _PASSING:
                        raise
                with slots.locked(descriptor, slot.offset, shared=True):
                    return copy(descriptor, slot)
        except OSError as error:
            reason = _READ_REASONS.get(error.errno or 0, "io_error")
            raise ReadRefused(reason, place, error.strerror or "") from None

    # --- delete and sweep ------------------------------------------------------------------------------

    def delete(self, place: Place) -> bool:
        try:
            integrity.check_place(place)
            slot = self._slot(place)
        except BadPlace as error:
            raise DeleteFailed("bad_place", str(place), str(error)) from None
        if slot is None:
            return False
        return _emptied(slot, lambda label: label is None or label.generation <= place.generation)

    def scan(self, cluster: str | None = None) -> Iterator[Found]:
        return scan(self._directory, self._pool, cluster)

    def discard(self, found: Found) -> bool:
        name = found.name.rpartition("/")[2].rpartition(":")[0]
        of = layout.parse_file(name)
        if found.place is None or of is None:
            raise DeleteFailed("foreign", found.name)
        slot = self._slot(found.place._replace(part=of[1]))
        if slot is None:
            return False
        return _emptied(slot, lambda label: label is not None and stamp_of(label) == found.stamp)


# --- slots ---------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, _FILE_MODE)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _put(descriptor: int, slot: _Slot, place: Place, header: bytes, payload: memoryview) -> None:
    """Fill an empty slot and publish it; whatever goes wrong, it is empty again."""
    try:
        slots.claim(descriptor, slot.offset, place.generation, len(payload))
        slots.fill(descriptor, slot.offset, payload)
        slots.publish(descriptor, slot.offset, header, place.generation, len(payload))
    except BaseException:
        with suppress(OSError):
            slots.empty(descriptor, slot.offset, slot.stride)
        raise


def _stored(descriptor: int, slot: _Slot, place: Place, checksum: int | None) -> int:
    """The checksum that the payload must have, after the header was verified. Raises ReadRefused."""
    header = slots.header_of(slots.read_front(descriptor, slot.offset))
    if slots.is_empty(header):
        raise ReadRefused("missing", place)
    try:
        stored = integrity.verify_header(place, header, checksum)
    except ReadRefused as refused:
        if refused.reason == "wrong_generation":  # evicted meanwhile, and its slot used again
            raise ReadRefused("missing", place, "the slot holds another block") from None
        raise
    integrity.verify_length(place, HEADER_BYTES + min(place.size_bytes, slot.payload_bytes_max))
    return stored


def _copy(descriptor: int, slot: _Slot, place: Place, checksum: int | None) -> bytes:
    stored = _stored(descriptor, slot, place, checksum)
    payload = slots.read_payload(descriptor, slot.offset, place.size_bytes)
    integrity.verify_length(place, HEADER_BYTES + len(payload))
    integrity.verify_payload(place, payload, stored)
    return payload


def _copy_into(descriptor: int, slot: _Slot, place: Place, view: memoryview, checksum: int | None) -> None:
    stored = _stored(descriptor, slot, place, checksum)
    try:
        copied = slots.read_payload_into(descriptor, slot.offset, view)
        integrity.verify_length(place, HEADER_BYTES + copied)
        integrity.verify_payload(place, view, stored)
    except BaseException:
        view[:] = bytes(len(view))
        raise


def _emptied(slot: _Slot, doomed: Callable[[layout.Label | None], bool]) -> bool:
    """Empty the slot if what stands there is `doomed`; False when nothing does, or something else."""
    try:
        with _opened(slot.path, _CHANGE_FLAGS) as descriptor, slots.locked(descriptor, slot.offset):
            front = slots.read_front(descriptor, slot.offset)
            if slots.is_empty(front) or not doomed(slots.label_of(front)):
                return False
            slots.empty(descriptor, slot.offset, slot.stride)
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False  # the pool is gone, or nobody has written this part
    except OSError as error:
        reason = _DELETE_REASONS.get(error.errno or 0, "io_error")
        raise DeleteFailed(reason, slot.path, error.strerror or "") from None


@contextmanager
def _write_errors(place: Place) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteFailed(
            _WRITE_REASONS.get(error.errno or 0, "io_error"), place, error.strerror or ""
        ) from None
