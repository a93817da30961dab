"""LoRA adapters: each has an instance of its own, named by what its files say and not by what it is called.

An engine reads an adapter's files once, and nobody is told when it reads them again. So files that change
under a name that is in use leave it open which of both the engine computes with: that adapter has no cache
from then on. Another version needs another name or path.
"""

import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Thread

from engine_adapters.namespace import Away, Refused, Registered
from engine_adapters.namespace.contents import ContentsRefused, adapter_folder
from metaservice.client.results import now_ms

log = logging.getLogger(__name__)

ADAPTERS_MAX = 1_024
LOOK_MS = 200
"""While an adapter is used its files are looked at this often."""
AGAIN_MS = 1_000
"""An instance that could not be registered is tried again after so long."""
NO_INSTANCE = ""
"""Of an adapter that has no cache."""

Adapter = tuple[str, str]
"""Name and path, as the request has them."""
Stamp = tuple[tuple[str, int, int], ...]
Register = Callable[[str, str], Registered | Refused | Away]


def stamp_of(folder: Path) -> Stamp:
    """Names, sizes and times of an adapter's files. Raises OSError."""
    with os.scandir(folder) as entries:
        stats = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


class _Known:
    __slots__ = ("digest", "instance", "looked_ms", "path", "queued", "retry_ms", "stamp")

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.digest = ""
        self.stamp: Stamp = ()
        self.instance: str | None = None
        self.looked_ms = 0
        self.retry_ms = 0
        self.queued = False


class Adapters:
    """Thread safe. One thread reads files and registers instances, from the first adapter on."""

    def __init__(self, register: Register, clock: Callable[[], int] = now_ms) -> None:
        """`register` registers the instance of an adapter with this digest, called by this name first."""
        self._register = register
        self._clock = clock
        self._changed = Condition()
        self._known: dict[Adapter, _Known] = {}
        self._owners: dict[str, list[_Known]] = {}
        self._queue: deque[tuple[Adapter, _Known]] = deque()
        self._thread: Thread | None = None
        self._closing = False
        self._generation = 0

    def instance_of(self, adapter: Adapter) -> str | None:
        """Its instance; None while its files are read; NO_INSTANCE when it has no cache. Returns at once."""
        known = self._known.get(adapter)
        now = self._clock()
        if known is None:
            known = self._add(adapter)
        elif known.instance == NO_INSTANCE or now < known.looked_ms + LOOK_MS or now < known.retry_ms:
            return known.instance
        self._enqueue(adapter, known)
        return known.instance

    def _add(self, adapter: Adapter) -> _Known:
        with self._changed:
            while len(self._known) >= ADAPTERS_MAX:
                gone = self._known.pop(next(iter(self._known)))
                self._disown(gone)
            return self._known.setdefault(adapter, _Known(adapter[1]))

    def _disown(self, known: _Known) -> None:
        owners = self._owners.get(known.instance or "", [])
        if known in owners:
            owners.remove(known)
            if not owners:
                del self._owners[known.instance or ""]

    def _enqueue(self, adapter: Adapter, known: _Known) -> None:
        with self._changed:
            if known.queued or self._closing:
                return
            known.queued = True
            self._queue.append((adapter, known))
            if self._thread is None:
                self._thread = Thread(target=self._run, name="ucm-adapters", daemon=True)
                self._thread.start()
            self._changed.notify()

    def unchanged(self, instance: str) -> bool:
        """Whether the files of an adapter that has this instance are still those that it was named after.
        Looks at them; True for an instance of no adapter."""
        owners = list(self._owners.get(instance, ()))
        looks = [self._look(known) for known in owners]  # each of them: those that changed are noted
        return not looks or any(looks)

    def renew(self) -> None:
        """The base model is another: so is every adapter's instance."""
        with self._changed:
            self._generation += 1
            self._owners.clear()
            for known in self._known.values():
                if known.instance != NO_INSTANCE:
                    known.instance, known.retry_ms, known.looked_ms = None, 0, 0

    def close(self) -> None:
        """Stop; what is being read is read to its end."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, seconds: float) -> None:
        """Wait for the thread's end."""
        if self._thread is not None:
            self._thread.join(seconds)

    # ------------------------------------------------------------ in the background

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                adapter, known = self._queue.popleft()
            try:
                if self._look(known):
                    self._place(adapter, known)
            except Exception:
                log.exception("adapter %s has no cache", adapter[0])
                known.instance = NO_INSTANCE
            known.queued = False

    def _look(self, known: _Known) -> bool:
        """Whether its files are as they were, or were not read yet."""
        if known.instance == NO_INSTANCE:
            return False
        if known.digest:
            try:
                same = stamp_of(known.path) == known.stamp
            except OSError:
                same = False
            if not same:
                log.error("adapter %s changed while it was used: it has no cache any more", known.path)
                known.instance = NO_INSTANCE
                return False
        known.looked_ms = self._clock()
        return True

    def _place(self, adapter: Adapter, known: _Known) -> None:
        """Find its instance."""
        if known.instance is not None:
            return
        if not known.digest:
            try:
                before = stamp_of(known.path)
                digest = adapter_folder(known.path)
                if stamp_of(known.path) != before:
                    raise ContentsRefused("its files change while they are read")
            except (OSError, ContentsRefused) as failure:
                log.error("adapter %s has no cache: %s", adapter[0], failure)
                known.instance = NO_INSTANCE
                return
            known.digest, known.stamp = digest, before
        generation = self._generation
        outcome = self._register(known.digest, adapter[0])
        with self._changed:
            if generation != self._generation:
                return
            match outcome:
                case Registered(instance):
                    known.instance = instance
                    self._owners.setdefault(instance, []).append(known)
                case Refused(reason=reason):
                    log.error("adapter %s has no cache: %s", adapter[0], reason)
                    known.instance = NO_INSTANCE
                case Away():
                    known.retry_ms = self._clock() + AGAIN_MS
