"""The storages that every backend test runs on. A new backend joins by one row in `STORAGES`."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dataplane import Backend, Place, open_backend
from dataplane.backends.posix_layout import path_of


class Storage(NamedTuple):
    """A kind of storage under test: how to open it in a scratch folder, and where the raw object of a place
    is."""

    kind: str
    options: dict[str, str]
    object_of: Callable[[Path, Place], Path]

    def open(self, folder: Path) -> Backend:
        """Open it in `folder`; opened twice, it is the same storage."""
        return open_backend(self.kind, self.filled(folder))

    def filled(self, folder: Path) -> dict[str, str]:
        return {name: value.format(folder=folder) for name, value in self.options.items()}


def _posix_object(folder: Path, place: Place) -> Path:
    return Path(path_of(str(folder), place))


STORAGES = {
    "posix": Storage("posix", {"root": "{folder}"}, _posix_object),
    "posix-none": Storage("posix", {"root": "{folder}", "fsync": "none", "threads": "1"}, _posix_object),
    "posix-full": Storage("posix", {"root": "{folder}", "fsync": "full", "threads": "2"}, _posix_object),
}

PLACE = Place("c1", 0x0012_3456, 3, "tp0", 10_000, bytes(range(32)))
DATA = random.Random(4).randbytes(PLACE.size_bytes)
