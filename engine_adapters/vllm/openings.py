"""Which storages can be opened on this machine. A mount that hangs costs a miss, never a thread that others
need."""

import logging
from collections.abc import Callable, Mapping
from threading import Condition, Thread

from dataplane.port import OpenFailed
from dataplane.registry import open_backend
from metaservice.client.results import now_ms
from metaservice.wire.schemas import StorageRef

log = logging.getLogger(__name__)

GOOD_MS = 10_000
BAD_MS = 1_000
"""How long an answer is believed. An old good one is still believed while the storage is tried again."""
SLOW_MS = 1_000
"""A storage that was good and does not open within this is not, until it does."""
TRIES_MAX = 4
"""So many storages are tried at once: those that hang would take all threads there are."""
STORAGES_MAX = 256

Opened = Callable[[str, Mapping[str, str]], object]
_Key = tuple[str, str, frozenset[tuple[str, str]]]


class Openings:
    """Thread safe."""

    def __init__(self, open_storage: Opened = open_backend, clock: Callable[[], int] = now_ms) -> None:
        self._open_storage = open_storage
        self._clock = clock
        self._changed = Condition()
        self._known: dict[_Key, tuple[bool, int]] = {}
        self._trying: dict[_Key, int] = {}

    def usable(self, storage: StorageRef, wait_ms: int) -> bool:
        """Whether it can be opened here. What is not known after `wait_ms` counts as no."""
        key = (storage.name, storage.kind, frozenset(storage.options.items()))
        with self._changed:
            good, until_ms = self._known.get(key, (False, 0))
            now = self._clock()
            if now < until_ms:
                return good
            self._try(key, storage, now)
            if good and now < self._trying.get(key, now) + SLOW_MS:
                return True
            if good:
                return False  # it hangs: whoever read there would hang too
            self._changed.wait_for(lambda: key not in self._trying, wait_ms / 1_000)
            return self._known.get(key, (False, 0))[0]

    def _try(self, key: _Key, storage: StorageRef, now: int) -> None:
        if key in self._trying or len(self._trying) >= TRIES_MAX:
            return
        self._trying[key] = now
        Thread(target=self._run, args=(key, storage), name="ucm-open", daemon=True).start()

    def _run(self, key: _Key, storage: StorageRef) -> None:
        good = False
        try:
            self._open_storage(storage.kind, storage.options)
            good = True
        except OpenFailed as failed:
            log.warning("storage %s cannot be opened here, its blocks are misses: %s", storage.name, failed)
        except Exception:
            log.exception("storage %s cannot be opened here, its blocks are misses", storage.name)
        with self._changed:
            self._known.pop(key, None)
            while len(self._known) >= STORAGES_MAX:
                del self._known[next(iter(self._known))]
            self._known[key] = (good, self._clock() + (GOOD_MS if good else BAD_MS))
            self._trying.pop(key, None)
            self._changed.notify_all()
