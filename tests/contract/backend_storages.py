"""The storages that every backend test runs on. A new backend joins by one row in `STORAGES`."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from dataplane import Backend, Place, open_backend
from dataplane.backends import shm_layout, shm_pool
from dataplane.backends.posix_layout import path_of
from dataplane.integrity import HEADER_BYTES
from dataplane.port import ReadReason


class Object(Protocol):
    """The raw bytes of a place, header and payload, as a test reads and damages them."""

    def read(self) -> bytes: ...

    def write(self, whole: bytes) -> None:
        """Replace all of it."""

    def truncate(self, size_bytes: int) -> None:
        """Lose what is behind the first `size_bytes`."""

    def append(self, more: bytes) -> None:
        """Put something behind it."""

    def take(self, other: "Object") -> None:
        """Become the other one, which is gone then."""


class Storage(NamedTuple):
    """A kind of storage under test: how to open it in a scratch folder, and the raw object of a place.

    `slots`: a location is one slot, so that of its generations one is there at a time, and a block has no
    length but what its header says. `prepare`: what a worker does before engines can open it.
    """

    kind: str
    options: dict[str, str]
    object_of: Callable[[Path, Place], Object]
    slots: bool = False
    prepare: Callable[[dict[str, str]], None] = lambda _: None

    def open(self, folder: Path) -> Backend:
        """Open it in `folder`; opened twice, it is the same storage."""
        self.prepare(self.filled(folder))
        return open_backend(self.kind, self.filled(folder))

    def filled(self, folder: Path) -> dict[str, str]:
        return {name: value.format(folder=folder) for name, value in self.options.items()}

    def cut_short(self, size_bytes: int) -> set[ReadReason]:
        """Why an object is refused of which only the first `size_bytes` are left. Of a slot the rest reads as
        zeros."""
        if not self.slots:
            return {"truncated"}
        if size_bytes == 0:
            return {"missing"}
        return {"malformed", "bad_checksum"} if size_bytes < HEADER_BYTES else {"bad_checksum"}


class _File:
    """An object that is a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> bytes:
        return self._path.read_bytes()

    def write(self, whole: bytes) -> None:
        self._path.write_bytes(whole)

    def truncate(self, size_bytes: int) -> None:
        os.truncate(self._path, size_bytes)

    def append(self, more: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(more)

    def take(self, other: Object) -> None:
        assert isinstance(other, _File)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        other._path.rename(self._path)


class _Slot:
    """An object that is a slot of a pool's file: the header in its front page, the payload behind that."""

    def __init__(self, path: Path, offset: int, size_bytes: int) -> None:
        self._path = path
        self._offset = offset
        self._size_bytes = size_bytes

    def read(self) -> bytes:
        with self._path.open("rb") as file:
            front = os.pread(file.fileno(), HEADER_BYTES, self._offset)
            at = self._offset + shm_layout.FRONT_BYTES
            return front + os.pread(file.fileno(), self._size_bytes, at)

    def write(self, whole: bytes) -> None:
        if not self._path.exists():
            self._path.touch()
        with self._path.open("r+b") as file:
            os.pwrite(file.fileno(), whole[:HEADER_BYTES], self._offset)
            os.pwrite(file.fileno(), whole[HEADER_BYTES:], self._offset + shm_layout.FRONT_BYTES)

    def truncate(self, size_bytes: int) -> None:
        self.write(self.read()[:size_bytes].ljust(HEADER_BYTES + self._size_bytes, b"\0"))

    def append(self, more: bytes) -> None:
        self.write(self.read() + more)

    def take(self, other: Object) -> None:
        assert isinstance(other, _Slot)
        whole = other.read()
        other.write(bytes(len(whole)))
        self.write(whole)


def _posix_object(folder: Path, place: Place) -> Object:
    return _File(Path(path_of(str(folder), place)))


SHM_OPTIONS = {"dir": "{folder}", "slot_bytes": "1048576", "pool": "f00d"}


def _shm_object(folder: Path, place: Place) -> Object:
    of = Path(shm_layout.folder_of(str(folder), place.cluster, SHM_OPTIONS["pool"]))
    offset = shm_layout.offset_of(place, shm_layout.stride_of(int(SHM_OPTIONS["slot_bytes"])))
    return _Slot(of / shm_layout.file_of(place), offset, min(place.size_bytes, 10_000))


def _make_pools(options: dict[str, str]) -> None:
    """What a worker of each of the tests' clusters does."""
    for cluster in ("c0", "c1", "c2"):
        shm_pool.make(options, cluster, "s1")


STORAGES = {
    "posix": Storage("posix", {"root": "{folder}"}, _posix_object),
    "posix-none": Storage("posix", {"root": "{folder}", "fsync": "none", "threads": "1"}, _posix_object),
    "posix-full": Storage("posix", {"root": "{folder}", "fsync": "full", "threads": "2"}, _posix_object),
    "shm": Storage("shm", SHM_OPTIONS, _shm_object, slots=True, prepare=_make_pools),
}

PLACE = Place("c1", 0x0012_3456, 3, "tp0", 10_000, bytes(range(32)))
DATA = random.Random(4).randbytes(PLACE.size_bytes)
