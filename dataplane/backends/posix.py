"""A directory of files on a local disk, NFS or a 3FS mount.

A write goes to a temporary file in the folder of its target, is flushed as far as the policy says, and is
published by hard-linking it to the target's name: the one step that is atomic on all of these file systems
*and* fails when the name is taken, where a rename would silently replace what readers hold a promise on.
(Where there are no hard links, it looks first and renames.) A reader therefore finds all of a file or
nothing, whoever dies when.
"""

import errno
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from stat import S_ISREG
from typing import Literal, get_args

from dataplane import integrity
from dataplane.backends import posix_layout as layout
from dataplane.backends.one_by_one import OneByOne
from dataplane.backends.posix_scan import scan, stamp_of
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

Fsync = Literal["none", "data", "full"]

OPTIONS = ("root", "fsync", "threads")
"""The options of a storage of this kind. `root`: an existing absolute directory. `fsync`: `data` unless said
otherwise. `threads`: of the `*_many` calls, 4 unless said otherwise."""

_THREADS_MAX = 64
_FILE_MODE = 0o660
_FOLDER_MODE = 0o770
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

_READ_REASONS: dict[int, ReadReason] = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.ESTALE: "missing",  # NFS: deleted on the server after we opened it
    errno.ELOOP: "malformed",
    errno.EISDIR: "malformed",
    errno.ENXIO: "malformed",
}
_WRITE_REASONS: dict[int, WriteReason] = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EROFS: "read_only",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.ENOENT: "root_missing",
    errno.ENOTDIR: "root_missing",
}
_LINK_REASONS: dict[int, WriteReason] = {
    **_WRITE_REASONS,
    errno.ENOENT: "removed",
}
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What file systems without hard links (many FUSE mounts) answer."""
_DELETE_REASONS: dict[int, DeleteReason] = {
    errno.EROFS: "read_only",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
}


def open_posix(options: Mapping[str, str]) -> "Posix":
    """Open the directory that `options` name. Raises OpenFailed.

    The root is never created: a root that is absent is a file system that is not mounted, and what was
    written below its mount point would be lost to every reader.
    """
    root = options.get("root", "")
    if not root.startswith("/") or "\0" in root:
        raise OpenFailed("options.root", f"an absolute path is needed, not {root!r}")
    if not os.path.isdir(root):
        raise OpenFailed("options.root", f"no directory {root!r}; is its file system mounted?")
    fsync = options.get("fsync", "data")
    if fsync not in get_args(Fsync):
        raise OpenFailed("options.fsync", f"{fsync!r} is not one of {', '.join(get_args(Fsync))}")
    threads = options.get("threads", "4")
    if not (threads.isascii() and threads.isdigit() and 1 <= int(threads[:9]) <= _THREADS_MAX):
        raise OpenFailed("options.threads", f"{threads!r} is not a number in 1..{_THREADS_MAX}")
    return Posix(root, fsync, int(threads))  # type: ignore[arg-type]


class Posix(OneByOne):
    """See the module. Made by `open_posix`."""

    def __init__(self, root: str, fsync: Fsync, threads: int) -> None:
        self._root = root.rstrip("/")
        self._fsync = fsync
        super().__init__(threads, "posix-backend")
        self._token = secrets.token_hex(8)
        self._numbers = count()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            kind="posix",
            memory=frozenset({"host"}),
            alignment_bytes=1,
            batch_places_max=1024,
            survives="process" if self._fsync == "none" else "power",
        )

    # --- write -----------------------------------------------------------------------------------------

    def write(self, place: Place, data: Buffer) -> int:
        payload = payload_of(place, data)
        checksum = integrity.checksum_of(payload)
        try:
            header = integrity.encode_header(place, checksum)
        except BadPlace as error:
            raise WriteFailed("bad_place", place, str(error)) from None
        target = layout.path_of(self._root, place)
        temporary = layout.temporary_of(self._root, place, self._token, os.getpid(), next(self._numbers))
        try:
            self._fill(place, temporary, header, payload)
            published = self._publish(place, temporary, target)
        finally:
            with suppress(OSError):
                os.unlink(temporary)
        if not published:
            self._expect_same(place, checksum)
        if self._fsync == "full":
            with _write_errors(place, _WRITE_REASONS):
                _flush_folder(layout.folder_of(self._root, place))
        return checksum

    def _fill(self, place: Place, temporary: str, header: bytes, payload: memoryview) -> None:
        with _write_errors(place, _WRITE_REASONS):
            try:
                descriptor = os.open(temporary, _WRITE_FLAGS, _FILE_MODE)
            except FileNotFoundError:
                self._make_folders(place)
                descriptor = os.open(temporary, _WRITE_FLAGS, _FILE_MODE)
            try:
                _write_all(descriptor, header, payload)
                if self._fsync == "data":
                    os.fdatasync(descriptor)
                elif self._fsync == "full":
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)  # NFS reports a full or broken disk here at the latest

    def _publish(self, place: Place, temporary: str, target: str) -> bool:
        """Give the temporary file its name; False when the name is taken."""
        with _write_errors(place, _LINK_REASONS):
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # A rename is as atomic but would replace a file. Nobody but the holder of this place's write
                # session may be writing here, so that to look first is enough.
                if os.path.lexists(target):
                    return False
                os.rename(temporary, target)
        return True

    def _expect_same(self, place: Place, checksum: int) -> None:
        """A write that was repeated, or whose first answer was lost on the way, is success; anything else is
        not."""
        try:
            self.read(place, checksum)
        except ReadRefused as refused:
            raise WriteFailed("exists", place, refused.reason) from None

    def _make_folders(self, place: Place) -> None:
        """Make the folders below the root, whichever are absent; the root itself must be there."""
        cluster, folder = f"{self._root}/{place.cluster}", layout.folder_of(self._root, place)
        for path in (cluster, folder):
            with suppress(FileExistsError):
                os.mkdir(path, _FOLDER_MODE)
        if self._fsync == "full":
            _flush_folder(self._root)
            _flush_folder(cluster)

    # --- read ------------------------------------------------------------------------------------------

    def read(self, place: Place, checksum: int | None = None) -> bytes:
        with self._verified_header(place, checksum) as (descriptor, stored):
            payload = _read_all(descriptor, place.size_bytes)
        _expect_all(place, len(payload))
        integrity.verify_payload(place, payload, stored)
        return payload

    def read_into(self, place: Place, buffer: bytearray | memoryview, checksum: int | None = None) -> None:
        view = writable(place, buffer)
        with self._verified_header(place, checksum) as (descriptor, stored):
            try:
                _expect_all(place, _read_all_into(descriptor, view))
                integrity.verify_payload(place, view, stored)
            except BaseException:
                view[:] = bytes(len(view))
                raise

    @contextmanager
    def _verified_header(self, place: Place, checksum: int | None) -> Iterator[tuple[int, int]]:
        """(descriptor, checksum of the payload) of the file of `place`, its header and length verified."""
        try:
            integrity.check_place(place)
            integrity.check_content(place)
        except BadPlace as error:
            raise ReadRefused("bad_place", place, str(error)) from None
        try:
            descriptor = os.open(layout.path_of(self._root, place), _READ_FLAGS)
            try:
                status = os.fstat(descriptor)
                if not S_ISREG(status.st_mode):
                    raise ReadRefused("malformed", place, "not a file")
                stored = integrity.verify_header(place, os.pread(descriptor, HEADER_BYTES, 0), checksum)
                integrity.verify_length(place, status.st_size)
                yield descriptor, stored
            finally:
                os.close(descriptor)
        except OSError as error:
            reason = _READ_REASONS.get(error.errno or 0, "io_error")
            raise ReadRefused(reason, place, error.strerror or "") from None

    # --- delete and sweep ------------------------------------------------------------------------------

    def delete(self, place: Place) -> bool:
        try:
            integrity.check_place(place)
        except BadPlace as error:
            raise DeleteFailed("bad_place", str(place), str(error)) from None
        return self._unlink(layout.path_of(self._root, place))

    def scan(self, cluster: str | None = None) -> Iterator[Found]:
        return scan(self._root, cluster)

    def discard(self, found: Found) -> bool:
        if found.place is None:
            raise DeleteFailed("foreign", found.name)
        path = f"{self._root}/{found.name}"
        with _delete_errors(path):
            try:
                if stamp_of(os.lstat(path)) != found.stamp:
                    return False
            except FileNotFoundError:
                return False
        return self._unlink(path)

    def _unlink(self, path: str) -> bool:
        with _delete_errors(path):
            try:
                os.unlink(path)
            except FileNotFoundError:
                if not os.path.isdir(self._root):  # not mounted: the bytes are still there, out of sight
                    raise DeleteFailed("root_missing", path) from None
                return False
        return True


# --- bytes ---------------------------------------------------------------------------------------------


def _write_all(descriptor: int, header: bytes, payload: memoryview) -> None:
    done = os.pwritev(descriptor, [header, payload], 0)
    while done < HEADER_BYTES + len(
        payload
    ):  # a full disk or a signal can cut a write short without an error
        rest: list[Buffer] = [header[done:], payload[max(0, done - HEADER_BYTES) :]]
        done += os.pwritev(descriptor, rest, done)


def _read_all(descriptor: int, size_bytes: int) -> bytes:
    """The payload, shorter only where the file ends."""
    data = os.pread(descriptor, size_bytes, HEADER_BYTES)
    while 0 < len(data) < size_bytes:
        more = os.pread(descriptor, size_bytes - len(data), HEADER_BYTES + len(data))
        if not more:
            break
        data += more
    return data


def _read_all_into(descriptor: int, view: memoryview) -> int:
    """How many bytes of the payload are in `view` now; all, unless the file ends."""
    done = 0
    while done < len(view):
        more = os.preadv(descriptor, [view[done:]], HEADER_BYTES + done)
        if not more:
            break
        done += more
    return done


def _expect_all(place: Place, payload_bytes: int) -> None:
    integrity.verify_length(place, HEADER_BYTES + payload_bytes)


def _flush_folder(path: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- errors --------------------------------------------------------------------------------------------


@contextmanager
def _write_errors(place: Place, reasons: Mapping[int, WriteReason]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteFailed(reasons.get(error.errno or 0, "io_error"), place, error.strerror or "") from None


@contextmanager
def _delete_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = _DELETE_REASONS.get(error.errno or 0, "io_error")
        raise DeleteFailed(reason, path, error.strerror or "") from None
