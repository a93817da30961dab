"""A pool on shared memory for tests, what they ask of it, and a writer that stops half-way."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane import Backend, Place, ReadRefused, WriteFailed
from dataplane.backends import shm_layout as layout

SIZE_BYTES = 50_000
PLACE = Place("c1", 7, 3, "tp0", SIZE_BYTES, bytes(range(32)))
DATA = random.Random(4).randbytes(SIZE_BYTES)
NEXT = PLACE._replace(generation=4, key=bytes(32))
"""The next block in the same slot."""
POOL = "0f5ca1ab1e"
SLOT_BYTES = 65_536
STRIDE = layout.stride_of(SLOT_BYTES)


def file_of(directory: Path, place: Place = PLACE, pool: str = POOL) -> Path:
    return Path(layout.folder_of(str(directory), place.cluster, pool)) / layout.file_of(place)


def held_bytes(directory: Path) -> int:
    """Memory that blocks take."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("[0-9]*.*"))


def reason_of_read(backend: Backend, place: Place = PLACE) -> str:
    with pytest.raises(ReadRefused) as refused:
        backend.read(place)
    return refused.value.reason


def reason_of_write(backend: Backend, place: Place = PLACE, data: bytes = DATA) -> str:
    with pytest.raises(WriteFailed) as failed:
        backend.write(place, data)
    return failed.value.reason


# Stops itself in the middle of the payload, so that its lock and half of its bytes are there.
_STOPPING_WRITER = """
import json, os, signal, sys
from dataplane import Place, WriteFailed, open_backend
options, place, fill = json.loads(sys.argv[1])
place = Place(*place[:5], bytes.fromhex(place[5]))
backend = open_backend("shm", options)
real, calls = os.pwrite, 0

def stopping(descriptor, data, offset):
    global calls
    calls += 1
    if calls == 2:
        done = real(descriptor, data[: len(data) // 2], offset)
        print("half", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        return done
    return real(descriptor, data, offset)

os.pwrite = stopping
try:
    backend.write(place, bytes([fill]) * place.size_bytes)
    print("written", flush=True)
except WriteFailed as failed:
    print(failed.reason, flush=True)
"""


class StoppedWriter:
    """A process that is stopped with half of a payload written."""

    def __init__(self, options: dict[str, str], place: Place, fill: int) -> None:
        arguments = json.dumps([options, [*place[:5], place.key.hex()], fill])
        command = [sys.executable, "-c", _STOPPING_WRITER, arguments]
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        assert self._child.stdout.readline() == "half\n"
        os.waitid(os.P_PID, self._child.pid, os.WSTOPPED)

    def go_on(self) -> str:
        """Wake it; what its write came to."""
        self._child.send_signal(signal.SIGCONT)
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        assert self._child.stdout is not None
        self._child.stdout.close()
