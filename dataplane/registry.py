"""Which kinds of storage there are. A new backend joins by one row here and one in the conformance suite."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from dataplane.backends import posix, shm, shm_pool
from dataplane.port import Backend, OpenFailed


class Pools(NamedTuple):
    """How the worker that owns a storage of a volatile kind makes and removes what the bytes are in.

    Both take the storage's options, with `pool` its owner's incarnation, the cluster and the storage's name;
    both raise OpenFailed and may be called again. `make` says whether there was none; `remove` takes all but
    that pool away, or all when `pool` is "", and says how many.
    """

    make: Callable[[Mapping[str, str], str, str], bool]
    remove: Callable[[Mapping[str, str], str, str], int]


class _Kind(NamedTuple):
    open: Callable[[Mapping[str, str]], Backend]
    options: tuple[str, ...]
    pools: Pools | None = None


_KINDS: Mapping[str, _Kind] = {
    "posix": _Kind(posix.open_posix, posix.OPTIONS),
    "shm": _Kind(shm.open_shm, shm_pool.OPTIONS, Pools(shm_pool.make, shm_pool.remove)),
}


def pools_of(kind: str) -> Pools | None:
    """How the pools of a volatile kind are owned; None for a kind whose bytes need no owner, or unknown."""
    found = _KINDS.get(kind)
    return None if found is None else found.pools


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
