"""Which kinds of storage there are. A new backend joins by one row here and one in the conformance suite."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from dataplane.backends import posix
from dataplane.port import Backend, OpenFailed


class _Kind(NamedTuple):
    open: Callable[[Mapping[str, str]], Backend]
    options: tuple[str, ...]


_KINDS: Mapping[str, _Kind] = {
    "posix": _Kind(posix.open_posix, posix.OPTIONS),
}


def open_backend(kind: str, options: Mapping[str, str]) -> Backend:
    """Open a storage as the service describes it (`StorageRef.kind`, `.options`).

    Raises OpenFailed: for an unknown kind or option naming the known ones, and when the storage cannot be
    used as it is.
    """
    found = _KINDS.get(kind)
    if found is None:
        raise OpenFailed("kind", f"{kind!r} is not one of {', '.join(sorted(_KINDS))}")
    for name, value in options.items():
        if name not in found.options:
            raise OpenFailed(f"options.{name}", f"unknown; {kind} has {', '.join(found.options)}")
        if not isinstance(value, str):
            raise OpenFailed(f"options.{name}", f"text is needed, not {value!r}")
    return found.open(options)
