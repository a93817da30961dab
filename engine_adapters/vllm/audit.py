"""A record of each page that was moved, for those who have to find out what a wrong token was made of."""

import logging
import os
import time
from contextlib import suppress
from threading import Lock
from typing import Literal

import msgspec

from dataplane.integrity import checksum_of

log = logging.getLogger("ucm.vllm")

AUDIT_SIZE_BYTES_MAX = 1 << 30

What = Literal["copied", "written", "published", "loaded"]
"""`copied` out of the engine's memory; `written` to its place, where it may serve from then on; `published`:
the block serves since this rank's finish; `loaded` into the engine's memory."""


class PageEntry(msgspec.Struct, frozen=True):
    """One line. `checksum` is the xxh3_64 of the page's bytes as they were in our hands."""

    what: What
    key: str
    part: str
    checksum: int
    engine: str
    incarnation: str
    request: str
    time_ns: int
    location: int = 0
    generation: int = 0


class Audit:
    """JSON lines at the end of a file, which engines may share: each is one write, which survives the process
    that made it. Called from background threads only, since a disk may be slow. It ends by itself at
    `size_bytes_max`, and at the first error: an engine does not fail for its diary. `on`: whether anything
    is noted: what costs time to find out is not found out otherwise."""

    def __init__(self, path: str, size_bytes_max: int = AUDIT_SIZE_BYTES_MAX) -> None:
        """Without a path nothing is noted. Raises OSError when the file cannot be opened."""
        self._path = path
        self._lock = Lock()
        self._left = size_bytes_max
        self._engine = self._incarnation = ""
        self._descriptor = -1
        self.on = bool(path)
        if self.on:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o640)

    def act_as(self, engine: str, incarnation: str) -> None:
        """For whom pages are moved from now on."""
        self._engine, self._incarnation = engine, incarnation

    def note(
        self,
        what: What,
        key: bytes,
        part: str,
        *,
        request: str,
        data: memoryview | None = None,
        checksum: int = 0,
        location: int = 0,
        generation: int = 0,
    ) -> None:
        """Note one page; its checksum is made of `data` where that is given. Never raises."""
        if not self.on:
            return
        entry = PageEntry(
            what, key.hex(), part, checksum if data is None else checksum_of(data), self._engine,
            self._incarnation, request, time.time_ns(), location, generation,
        )  # fmt: skip
        line = msgspec.json.encode(entry) + b"\n"
        with self._lock:
            if not self.on:
                return
            self._left -= len(line)
            if self._left < 0:
                self._end("is full")
                return
            try:
                os.write(self._descriptor, line)
            except OSError as error:
                self._end(str(error))

    def _end(self, why: str) -> None:
        log.warning("no more is noted in %s: %s", self._path, why)
        self.on = False
        with suppress(OSError):
            os.close(self._descriptor)

    def close(self) -> None:
        """No more entries."""
        with self._lock:
            if self.on:
                self.on = False
                os.close(self._descriptor)
