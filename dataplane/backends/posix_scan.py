"""Walks the files of a root while others write and delete in it."""

import os
from collections.abc import Iterator
from stat import S_ISREG

from dataplane.backends import posix_layout as layout
from dataplane.port import Found, Place, ScanFailed, Stamp


def stamp_of(status: os.stat_result) -> Stamp:
    """What `discard` compares."""
    return Stamp(status.st_ino, status.st_mtime_ns, status.st_size)


def scan(root: str, cluster: str | None) -> Iterator[Found]:
    """Every file below `<root>/<cluster>`, or below the whole root. Raises ScanFailed when the root cannot be
    read."""
    if cluster is not None:
        if not layout.is_cluster(cluster):
            raise ScanFailed(f"{cluster!r} cannot be the name of a cluster")
        if os.path.isdir(f"{root}/{cluster}"):
            yield from _scan_cluster(root, cluster)
        elif not os.path.isdir(root):
            raise ScanFailed(f"no directory {root!r}; is its file system mounted?")
        return
    now_ns = _now_ns(root)
    for entry in _entries(root):
        if layout.is_cluster(entry.name) and entry.is_dir(follow_symlinks=False):
            yield from _scan_cluster(root, entry.name)
        else:
            yield from _found(entry, entry.name, None, now_ns)


def _scan_cluster(root: str, cluster: str) -> Iterator[Found]:
    path = f"{root}/{cluster}"
    now_ns = _now_ns(path)
    for folder in _entries(path):
        if not (layout.is_folder(folder.name) and folder.is_dir(follow_symlinks=False)):
            yield from _found(folder, f"{cluster}/{folder.name}", None, now_ns)
            continue
        for entry in _entries(folder.path):
            place = layout.parse(cluster, folder.name, entry.name)
            yield from _found(entry, f"{cluster}/{folder.name}/{entry.name}", place, now_ns)


def _found(entry: os.DirEntry[str], name: str, place: Place | None, now_ns: int) -> Iterator[Found]:
    """What `entry` is, or nothing when it vanished. Only a plain file can be one of ours."""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ScanFailed(f"{entry.path}: {error.strerror}") from None
    age_ms = max(0, now_ns - status.st_mtime_ns) // 1_000_000
    if place is None or not S_ISREG(status.st_mode):
        yield Found("foreign", name, None, status.st_size, age_ms, stamp_of(status))
    else:
        state = "temporary" if layout.is_temporary(entry.name) else "published"
        yield Found(state, name, place, status.st_size, age_ms, stamp_of(status))  # type: ignore[arg-type]


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    """The entries of a folder, none when it vanished."""
    try:
        with os.scandir(path) as entries:
            yield from entries
    except FileNotFoundError:
        return
    except OSError as error:
        raise ScanFailed(f"{path}: {error.strerror}") from None


def _now_ns(path: str) -> int:
    """The file system's own time: a touch of the folder, which needs no space even on a full disk.

    Ages by this machine's clock would make a file look old, and ripe for deletion, that was written a moment
    ago on a server whose clock is behind.
    """
    try:
        os.utime(path)
        return os.stat(path).st_mtime_ns
    except OSError as error:
        raise ScanFailed(f"{path}: {error.strerror}") from None
