"""Walks the slots of a pool that have pages, while others write and delete in it."""

import os
import time
from collections.abc import Iterator

from dataplane.backends import shm_layout as layout
from dataplane.backends import shm_pool as pools
from dataplane.backends import shm_slots as slots
from dataplane.port import Found, OpenFailed, Place, ScanFailed, Stamp

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def stamp_of(label: layout.Label) -> Stamp:
    """What `discard` compares. No two writes of a slot have the same: they come one after the other."""
    return Stamp(label.writer, label.written_ns, label.size_bytes)


def scan(directory: str, pool: str, cluster: str | None) -> Iterator[Found]:
    """Every slot in use of the pool, of one cluster or of all. Raises ScanFailed when the pool is gone."""
    if cluster is not None and not layout.is_cluster(cluster):
        raise ScanFailed(f"{cluster!r} cannot be the name of a cluster")
    try:
        found = pools.find(directory, pool)
    except OpenFailed as failed:
        raise ScanFailed(str(failed)) from None
    for folder in found:
        if cluster in (None, folder.cluster):
            yield from _scan_folder(directory, folder)


def _scan_folder(directory: str, folder: layout.Folder) -> Iterator[Found]:
    path = layout.folder_of(directory, folder.cluster, folder.pool)
    there = pools.about(path)
    try:
        names = os.listdir(path)
    except OSError as error:
        raise ScanFailed(f"{path}: {error.strerror}") from None
    if there is None:
        raise ScanFailed(f"{path} does not say what pool it is")
    for name in names:
        of = layout.parse_file(name)
        try:
            if of is not None:
                yield from _scan_file(path, name, folder.cluster, of, there.stride)
            elif name != layout.ABOUT:
                yield _foreign(path, name)
        except FileNotFoundError:
            continue  # the pool is being removed
        except OSError as error:
            raise ScanFailed(f"{path}/{name}: {error.strerror}") from None


def _scan_file(path: str, name: str, cluster: str, of: tuple[int, str], stride: int) -> Iterator[Found]:
    shard, part = of
    descriptor = os.open(f"{path}/{name}", _FLAGS)
    try:
        at = slots.next_data(descriptor, 0)
        while at is not None:
            slot = at // stride
            front = slots.read_front(descriptor, slot * stride)
            at = slots.next_data(descriptor, (slot + 1) * stride)
            if slots.is_empty(front):
                continue  # it was given back just now
            called = f"{os.path.basename(path)}/{name}:{slot}"
            label = slots.label_of(front)
            if label is None:
                yield Found("foreign", called, None, layout.FRONT_BYTES, 0, Stamp(0, 0, 0))
                continue
            location = layout.location_of(shard, slot)
            yield Found(
                "published" if label.published else "temporary",
                called,
                Place(cluster, location, label.generation, part if label.published else ""),
                layout.FRONT_BYTES + label.size_bytes,
                max(0, time.time_ns() - label.written_ns) // 1_000_000,
                stamp_of(label),
            )
    finally:
        os.close(descriptor)


def _foreign(path: str, name: str) -> Found:
    status = os.lstat(f"{path}/{name}")
    age_ms = max(0, time.time_ns() - status.st_mtime_ns) // 1_000_000
    stamp = Stamp(status.st_ino, status.st_mtime_ns, status.st_size)
    return Found("foreign", f"{os.path.basename(path)}/{name}", None, status.st_size, age_ms, stamp)
