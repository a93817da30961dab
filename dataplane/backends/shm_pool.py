"""Pools: folders of memory that one worker owns. It alone makes and removes them; all others find them or do
not."""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from dataplane.backends import shm_layout as layout
from dataplane.backends import shm_slots as slots
from dataplane.port import OpenFailed

OPTIONS = ("dir", "slot_bytes", "pool", "threads")
"""The options of a storage of this kind. `dir`: an existing absolute folder, of a tmpfs to be of any use.
`slot_bytes`: the largest part of any block. `pool`: which worker's, given by the service. `threads`: of the
`*_many` calls, 4 unless said otherwise."""

_DIRECTORY = "/dev/shm"  # noqa: S108 - only folders are made in it, and none that is there already is used
_SLOT_BYTES_MAX = 1 << 40
_FOLDER_MODE = 0o770
_FILE_MODE = 0o660


class About(msgspec.Struct, frozen=True):
    """What a pool is: of which storage of which cluster, and how far its slots are apart."""

    cluster: str
    storage: str
    pool: str
    stride: int


def directory_of(options: Mapping[str, str]) -> str:
    """The folder that pools are in. Raises OpenFailed."""
    directory = options.get("dir", _DIRECTORY)
    if not directory.startswith("/") or "\0" in directory:
        raise OpenFailed("options.dir", f"an absolute path is needed, not {directory!r}")
    if not os.path.isdir(directory):
        raise OpenFailed("options.dir", f"no directory {directory!r}")
    return directory.rstrip("/")


def slot_bytes_of(options: Mapping[str, str]) -> int:
    """The largest payload that a slot is to take. Raises OpenFailed."""
    text = options.get("slot_bytes", "")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:18]) <= _SLOT_BYTES_MAX):
        raise OpenFailed("options.slot_bytes", f"a number in 1..{_SLOT_BYTES_MAX} is needed, not {text!r}")
    return int(text)


def pool_of(options: Mapping[str, str]) -> str:
    """Which pool. Raises OpenFailed, also where the storage has none."""
    pool = options.get("pool", "")
    if not pool:
        raise OpenFailed("options.pool", "the storage has no pool: no worker owns it now")
    if not layout.is_pool(pool):
        raise OpenFailed("options.pool", f"{pool!r} is not the name of a pool")
    return pool


def find(directory: str, pool: str) -> list[layout.Folder]:
    """The folders of this pool, one a cluster: one in all, unless a test or an operator made more.

    Raises OpenFailed when there is none, or when one is open to everybody, which no worker makes.
    """
    found = [folder for folder in _folders(directory) if folder.pool == pool and not folder.hidden]
    if not found:
        raise OpenFailed(
            "options.pool", f"no pool {pool!r} in {directory}: its worker is gone, or on another machine"
        )
    for folder in found:
        path = layout.folder_of(directory, folder.cluster, pool)
        with suppress(FileNotFoundError):
            mode = os.lstat(path).st_mode
            if not stat.S_ISDIR(mode) or mode & stat.S_IRWXO:
                raise OpenFailed("options.pool", f"{path} is open to everybody: not a pool")
    return found


def about(path: str) -> About | None:
    """What the pool in a folder is, None when it is gone or was never whole."""
    try:
        with open(f"{path}/{layout.ABOUT}", "rb") as file:
            return msgspec.json.decode(file.read(1 << 16), type=About)
    except (OSError, msgspec.MsgspecError):
        return None


def make(options: Mapping[str, str], cluster: str, storage: str) -> bool:
    """Make the pool that `options` name for this storage; False when it is there already.

    Raises OpenFailed: where the folder cannot give memory back, or holds another storage's pool of that name,
    so that a worker that owns several such storages has to give each a `dir` of its own.
    """
    directory, pool = directory_of(options), pool_of(options)
    whole = About(cluster, storage, pool, layout.stride_of(slot_bytes_of(options)))
    path = layout.folder_of(directory, cluster, pool)
    if os.path.isdir(path):
        there = about(path)
        if there is not None and there.storage != storage:
            raise OpenFailed(
                "options.dir", f"{directory} has a pool of storage {there.storage!r}: give each its own `dir`"
            )
        if there is not None:
            return False
    try:
        _remove_folder(directory, cluster, pool)
        hidden = layout.folder_of(directory, cluster, pool, hidden=True)
        os.mkdir(hidden, _FOLDER_MODE)
        # Whoever makes a file in it, it is of the folder's group: worker and engines may be different users.
        os.chmod(hidden, stat.S_IMODE(os.stat(hidden).st_mode) & ~stat.S_IRWXO | stat.S_ISGID)
        _prove(f"{hidden}/0.probe")
        with open(f"{hidden}/{layout.ABOUT}", "xb") as file:
            file.write(msgspec.json.encode(whole))
        os.rename(hidden, path)
    except OSError as error:
        raise OpenFailed("options.dir", f"no pool can be made in {directory}: {error.strerror}") from None
    return True


def remove(options: Mapping[str, str], cluster: str, storage: str) -> int:
    """Remove all pools of this storage of this cluster but the one that `options` name; returns how many.

    Their memory is given back at once, whoever has files of them open. Raises OpenFailed.
    """
    directory, keep = directory_of(options), options.get("pool", "")
    removed = 0
    try:
        for folder in list(_folders(directory)):
            if folder.cluster != cluster or folder.pool == keep:
                continue
            there = about(layout.folder_of(directory, cluster, folder.pool, folder.hidden))
            if there is not None and there.storage == storage:
                _remove_folder(directory, cluster, folder.pool)
                removed += 1
    except OSError as error:
        raise OpenFailed(
            "options.dir", f"a pool in {directory} cannot be removed: {error.strerror}"
        ) from None
    return removed


def _folders(directory: str) -> Iterator[layout.Folder]:
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise OpenFailed("options.dir", f"{directory}: {error.strerror}") from None
    for name in names:
        folder = layout.parse_folder(name)
        if folder is not None:
            yield folder


def _remove_folder(directory: str, cluster: str, pool: str) -> None:
    """Remove a pool, hidden or not; none is no error.

    It is hidden first, so that no writer can make another file in it; what says whose it is goes last, so
    that a removal that was cut off is carried on by the next.
    """
    hidden = layout.folder_of(directory, cluster, pool, hidden=True)
    _remove_hidden(hidden)
    try:
        os.rename(layout.folder_of(directory, cluster, pool), hidden)
    except FileNotFoundError:
        return
    _remove_hidden(hidden)


def _remove_hidden(path: str) -> None:
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    for name in sorted(names, key=lambda name: name == layout.ABOUT):
        with suppress(FileNotFoundError):
            if layout.parse_file(name) is not None:
                _give_back(f"{path}/{name}")
            os.unlink(f"{path}/{name}")
    os.rmdir(path)


def _give_back(path: str) -> None:
    """Free the memory of a file: unlinking alone leaves it to whoever has the file open."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EACCES):  # not ours to open; unlinking is all there is
            return
        raise
    try:
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _prove(path: str) -> None:
    """Raise OSError unless files of this folder can be locked in part and give single pages back."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    try:
        with slots.locked(descriptor, 0):
            slots.claim(descriptor, 0, 1, 1)
            slots.empty(descriptor, 0, layout.PAGE_BYTES)
            if not slots.is_empty(slots.read_front(descriptor, 0)):
                raise OSError(errno.EOPNOTSUPP, "holes are not empty")
    finally:
        os.close(descriptor)
        os.unlink(path)
