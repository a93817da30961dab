"""GB/s of the POSIX backend beside plain system calls, on the file system of a folder of your choice, and of
shared memory.

    python tests/bench/bench_dataplane.py [--root DIR] [--shm DIR] [--total-mib 128] [--repeats 5]

`plain` writes and reads one file a block with open, pwrite or pread, and close: no header, checksum,
temporary name, link or verification. Every reader reads from the page cache, so that the figures show the
software's cost and not the disk's. The ways take turns within each repeat; the table has the median, and the
best in brackets.
"""

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from dataplane import Backend, Place, open_backend
from dataplane.backends import shm_pool

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20}
KEY = bytes(32)
BATCH = 64
"""Blocks in one `*_many` read, and buffers that are used again."""


class Plain:
    """The least that a file per block costs."""

    def __init__(self, root: str) -> None:
        self._root = root
        for number in range(256):
            os.mkdir(f"{root}/{number:02x}")

    def path(self, place: Place) -> str:
        return f"{self._root}/{place.location % 256:02x}/{place.location:016x}"

    def write(self, place: Place, data: bytes) -> None:
        descriptor = os.open(self.path(place), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o660)
        os.pwrite(descriptor, data, 0)
        os.close(descriptor)

    def read(self, place: Place) -> bytes:
        descriptor = os.open(self.path(place), os.O_RDONLY)
        data = os.pread(descriptor, place.size_bytes, 0)
        os.close(descriptor)
        return data


@contextmanager
def folder(root: str) -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="bench-", dir=root)
    yield path
    shutil.rmtree(path)


class Figures:
    """What one way of writing or reading reached."""

    def __init__(self) -> None:
        self.gb_per_s: list[float] = []
        self.cpu_us_per_block: list[float] = []

    def take(self, work: Callable[[], object], blocks: int, size_bytes: int) -> None:
        cpu, began = time.process_time(), time.perf_counter()
        work()
        self.gb_per_s.append(blocks * size_bytes / 1e9 / (time.perf_counter() - began))
        self.cpu_us_per_block.append((time.process_time() - cpu) * 1e6 / blocks)

    def __str__(self) -> str:
        if not self.gb_per_s:
            return ""
        rate = f"{median(self.gb_per_s):.2f} ({max(self.gb_per_s):.2f})"
        return f"{rate:>14} {median(self.cpu_us_per_block):7.0f} us"


def ways(
    plain: Plain, single: Backend, many: Backend, places: list[Place], data: list[bytes]
) -> list[tuple[str, Callable[[], object] | None, Callable[[], object]]]:
    """(name, write all or None where they are there, read all). Writers of `single` and `many` are on roots
    of their own."""
    buffers = [bytearray(len(data[0])) for _ in range(BATCH)]

    def each(call: Callable[[Place, bytes], object]) -> Callable[[], object]:
        return lambda: [call(place, block) for place, block in zip(places, data, strict=True)]

    def read_all(call: Callable[[Place], object]) -> Callable[[], object]:
        def work() -> None:
            for place in places:
                call(place)

        return work

    def read_into() -> None:
        for number, place in enumerate(places):
            single.read_into(place, buffers[number % BATCH])

    def read_many_into() -> None:
        for at in range(0, len(places), BATCH):
            many.read_many_into(places[at : at + BATCH], buffers[: len(places) - at])

    def read_many() -> None:
        for at in range(0, len(places), BATCH):
            many.read_many(places[at : at + BATCH])

    return [
        ("plain pwrite / pread", each(plain.write), read_all(plain.read)),
        ("write / read, verified", each(single.write), read_all(single.read)),
        ("(same) / read_into", None, read_into),
        ("write_many / read_many, 4 threads", lambda: many.write_many(places, data), read_many),
        ("(same) / read_many_into, 4 threads", None, read_many_into),
    ]


def opened(folder: str, fsync: str, size_bytes: int, threads: int) -> Backend:
    """A storage in an empty folder: shared memory where `fsync` is `shm`, else files."""
    if fsync != "shm":
        return open_backend("posix", {"root": folder, "fsync": fsync, "threads": str(threads)})
    options = {"dir": folder, "slot_bytes": str(size_bytes), "pool": "bench", "threads": str(threads)}
    shm_pool.make(options, "bench", "bench")
    return open_backend("shm", options)


def measure(
    root: str, size_bytes: int, total_bytes: int, repeats: int, fsync: str
) -> dict[str, tuple[Figures, Figures]]:
    """Each way's figures for writes and for reads."""
    count = max(1, total_bytes // size_bytes)
    data = [os.urandom(size_bytes) for _ in range(min(count, 16))]
    blocks = [data[number % len(data)] for number in range(count)]
    places = [Place("bench", number, 1, "tp0", size_bytes, KEY) for number in range(count)]
    figures: dict[str, tuple[Figures, Figures]] = {}
    for _ in range(repeats):
        with folder(root) as first, folder(root) as second, folder(root) as third:
            single, many = (
                opened(at, fsync, size_bytes, threads) for at, threads in ((second, 1), (third, 4))
            )
            for name, write, read in ways(Plain(first), single, many, places, blocks):
                writes, reads = figures.setdefault(name, (Figures(), Figures()))
                if write is not None:
                    writes.take(write, count, size_bytes)
                reads.take(read, count, size_bytes)
            single.close()
            many.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="GB/s of the POSIX backend beside plain system calls.")
    parser.add_argument("--root", default=tempfile.gettempdir(), help="folder on the file system to measure")
    parser.add_argument("--shm", default="/dev/shm", help="folder of shared memory to measure")
    parser.add_argument("--total-mib", type=int, default=128, help="data written and read in each way")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {options.root}")
    print("GB/s, median (best); CPU time per block\n")
    print(f"{'block':7} {'fsync':5} {'write / read':35} {'write':>25} {'read':>25}")
    runs = [
        (options.root, "none", options.total_mib),
        (options.root, "data", max(1, options.total_mib // 8)),
        (options.shm, "shm", options.total_mib),
    ]
    for root, fsync, total_mib in runs:
        for label, size_bytes in SIZES.items():
            figures = measure(root, size_bytes, total_mib << 20, options.repeats, fsync)
            for name, (writes, reads) in figures.items():
                if fsync != "data" or not name.startswith(("plain", "(same)")):
                    print(f"{label:7} {fsync:5} {name:35} {writes!s:>25} {reads!s:>25}")
            print()


if __name__ == "__main__":
    main()
