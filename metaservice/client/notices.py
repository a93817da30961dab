"""Log lines that cannot flood: one a kind and minute, with the number of those left out."""

import logging
from threading import Lock

from .results import now_ms

log = logging.getLogger("metaservice.client")

_EVERY_MS = 60_000
_KINDS_MAX = 256


class Notices:
    """Rate limits log lines by kind. Thread safe."""

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        self._lock = Lock()
        self._next_ms: dict[str, int] = {}
        self._left_out: dict[str, int] = {}

    def say(self, level: int, kind: str, text: str) -> None:
        """Log `text` unless a line of this `kind` was logged within the last minute."""
        now = now_ms()
        with self._lock:
            if now < self._next_ms.get(kind, 0):
                self._left_out[kind] = self._left_out.get(kind, 0) + 1
                return
            if len(self._next_ms) >= _KINDS_MAX:
                self._next_ms.clear()
                self._left_out.clear()
            self._next_ms[kind] = now + _EVERY_MS
            left_out = self._left_out.pop(kind, 0)
        log.log(level, "%s%s", text, f" ({left_out} more like this since the last line)" if left_out else "")
