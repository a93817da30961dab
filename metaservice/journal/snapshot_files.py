"""Snapshots as files: one directory a shard, one file a snapshot, visible only when whole.

    header: magic "UCMS" (4) | version (1) | digest length (1) | zero (2) | seq (8) | epoch (8)
            | chunks (8) | bytes (8) | digest (64) | crc32 (4)
    each chunk: length (4) | crc32 (4) | bytes

A file is written under a temporary name, made durable, read back and renamed, so a name that ends in
`.ucm` was whole once. Its checksums find what happened to it since.
"""

import errno
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from metaservice.journal.errors import CorruptSnapshot, JournalFailed, JournalFull, UnsupportedVersion
from metaservice.journal.lock import FileLock
from metaservice.journal.snapshots import (
    CHUNK_BYTES_MAX,
    DIGEST_BYTES_MAX,
    KEPT,
    SnapshotFault,
    SnapshotInfo,
    check_chunk,
    check_save,
    chunk_crc,
)

MAGIC = b"UCMS"
VERSION = 1

_FIELDS = struct.Struct(f">4sBB2xQQQQ{DIGEST_BYTES_MAX}s")
_CRC = struct.Struct(">I")
_CHUNK = struct.Struct(">II")
_HEADER_BYTES = _FIELDS.size + _CRC.size
_NAME = re.compile(r"snapshot-(\d{20})\.ucm")
_TEMPORARY = ".writing"
_WRITE_BUFFER_BYTES = 1 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_Signature = tuple[int, int, int]


class FileSnapshotStore:
    """The snapshots of one shard in `directory` (made when missing)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._faults: tuple[SnapshotFault, ...] = ()
        # A file that was read whole once is not read again as long as it is the same: a look costs a stat.
        self._verified: dict[str, tuple[_Signature, SnapshotInfo]] = {}

    @property
    def faults(self) -> tuple[SnapshotFault, ...]:
        """See SnapshotStore."""
        return self._faults

    def save(self, seq: int, epoch: int, digest: bytes, chunks: Iterable[bytes]) -> SnapshotInfo:
        """See SnapshotStore. The lock of a saver that was killed is free, and its unfinished file is
        removed here.
        """
        check_save(seq, epoch, digest)
        with self._translating():
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._directory / "save.lock")
            lock.acquire(f"saving a snapshot in {self._directory}")
        path = self._directory / f"snapshot-{seq:020d}.ucm"
        temporary = path.with_name(path.name + _TEMPORARY)
        try:
            with self._translating():
                for left in self._directory.glob(f"*{_TEMPORARY}"):
                    left.unlink(missing_ok=True)
            self._write(temporary, seq, epoch, digest, chunks)
            with self._translating():
                _verify(temporary, reread=True)
                temporary.rename(path)
                _sync_directory(self._directory)
                whole = self.list()
                if len(whole) >= KEPT:
                    self._remove_below(whole[KEPT - 1].seq)
                return _verify(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        finally:
            lock.release()

    def latest(self) -> SnapshotInfo | None:
        """See SnapshotStore. The first look at a file reads it whole; later ones cost a stat."""
        return next(iter(self._newest(1)), None)

    def list(self) -> tuple[SnapshotInfo, ...]:
        """See SnapshotStore."""
        return tuple(self._newest(None))

    def load(self, info: SnapshotInfo) -> Iterator[bytes]:
        """See SnapshotStore. The file is open from here on: a save that removes it does not disturb this
        load.
        """
        try:
            file = open(info.location, "rb")  # noqa: SIM115 - the iterator closes it
        except OSError as error:
            raise CorruptSnapshot(info.location, error.strerror or str(error)) from error
        return _load(file, info)

    def trim_limit(self) -> int:
        """See SnapshotStore."""
        whole = self._newest(KEPT)
        return whole[KEPT - 1].seq if len(whole) >= KEPT else 0

    def _newest(self, count: int | None) -> Sequence[SnapshotInfo]:
        whole: list[SnapshotInfo] = []
        faults: list[SnapshotFault] = []
        for _, path in reversed(self._files()):
            if count is not None and len(whole) >= count:
                break
            try:
                whole.append(self._verified_info(path))
            except FileNotFoundError:
                continue  # another process's save removed it: there are newer ones
            except CorruptSnapshot as error:
                faults.append(SnapshotFault(str(path), error.reason))
            except UnsupportedVersion as error:
                faults.append(SnapshotFault(str(path), str(error)))
        self._faults = tuple(faults)
        return whole

    def _files(self) -> Sequence[tuple[int, Path]]:
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return []
        found = [
            (int(match[1]), self._directory / name) for name in names if (match := _NAME.fullmatch(name))
        ]
        return sorted(found)

    def _verified_info(self, path: Path) -> SnapshotInfo:
        signature = _signature(path)
        known = self._verified.get(path.name)
        if known is not None and known[0] == signature:
            return known[1]
        info = _verify(path)
        self._verified[path.name] = (signature, info)
        return info

    def _remove_below(self, seq: int) -> None:
        for number, path in self._files():
            if number < seq:
                path.unlink(missing_ok=True)
                self._verified.pop(path.name, None)

    def _write(self, path: Path, seq: int, epoch: int, digest: bytes, chunks: Iterable[bytes]) -> None:
        # What `chunks` raises is not the disk's error, so only the steps that touch the file are translated.
        with self._translating():
            file = open(path, "xb", buffering=_WRITE_BUFFER_BYTES)  # noqa: SIM115 - closed below
        count = size = 0
        try:
            self._put(file, bytes(_HEADER_BYTES))
            for chunk in chunks:
                check_chunk(chunk)
                self._put(file, _CHUNK.pack(len(chunk), chunk_crc(count, chunk)), chunk)
                count += 1
                size += len(chunk)
            fields = _FIELDS.pack(MAGIC, VERSION, len(digest), seq, epoch, count, size, digest)
            with self._translating():
                file.seek(0)
                self._put(file, fields, _CRC.pack(zlib.crc32(fields)))
                file.flush()
                os.fsync(file.fileno())
        finally:
            with suppress(OSError):  # what a failed write left in the buffer fails again
                file.close()

    def _put(self, file: BinaryIO, *pieces: bytes) -> None:
        with self._translating():
            for piece in pieces:
                file.write(piece)

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f"snapshots in {self._directory}"
            if error.errno in _NO_SPACE:
                raise JournalFull(where, "saving a snapshot") from error
            raise JournalFailed(where, "saving a snapshot", error.strerror or str(error)) from error


def _signature(path: Path) -> _Signature:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _verify(path: Path, *, reread: bool = False) -> SnapshotInfo:
    """Reads a snapshot whole; with `reread`, from the disk as far as the kernel can be asked to."""
    with open(path, "rb") as file:
        if reread and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        info = _read_header(file, path)
        for _ in _read_chunks(file, info):
            pass
    return info


def _load(file: BinaryIO, expected: SnapshotInfo) -> Iterator[bytes]:
    with file:
        found = _read_header(file, Path(expected.location))
        if found != expected:
            raise CorruptSnapshot(expected.location, "it was replaced by another one")
        yield from _read_chunks(file, expected)


def _read_header(file: BinaryIO, path: Path) -> SnapshotInfo:
    raw = _read(file, _HEADER_BYTES, str(path), "header")
    magic, version, digest_length, seq, epoch, chunks, size, digest = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise CorruptSnapshot(str(path), "it does not begin as a snapshot does")
    if (zlib.crc32(raw[: _FIELDS.size]),) != _CRC.unpack_from(raw, _FIELDS.size):
        raise CorruptSnapshot(str(path), "the checksum of its header does not match")
    if version != VERSION:
        raise UnsupportedVersion(f"snapshot {path}", version, VERSION)
    return SnapshotInfo(seq, epoch, digest[:digest_length], chunks, size, str(path).removesuffix(_TEMPORARY))


def _read_chunks(file: BinaryIO, info: SnapshotInfo) -> Iterator[bytes]:
    size = 0
    for index in range(info.chunks):
        length, crc = _CHUNK.unpack(_read(file, _CHUNK.size, info.location, f"chunk {index}"))
        if length > min(CHUNK_BYTES_MAX, info.size_bytes - size):
            raise CorruptSnapshot(info.location, f"chunk {index} is longer than the whole")
        chunk = _read(file, length, info.location, f"chunk {index}")
        if chunk_crc(index, chunk) != crc:
            raise CorruptSnapshot(info.location, f"the checksum of chunk {index} does not match")
        size += length
        yield chunk
    if size != info.size_bytes or file.read(1):
        raise CorruptSnapshot(info.location, "its chunks are not as many bytes as its header says")


def _read(file: BinaryIO, count: int, location: str, what: str) -> bytes:
    try:
        raw = file.read(count)
    except OSError as error:
        raise CorruptSnapshot(location, f"{what} cannot be read ({error.strerror})") from error
    if len(raw) != count:
        raise CorruptSnapshot(location, f"it ends inside its {what}")
    return raw


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
