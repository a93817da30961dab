"""One worker process's way to the service and to the storages: the client, and the backends that are open.

Nothing here raises for what a service or a storage does; it says so in words. Called from background threads
only: every call may take as long as a storage does.
"""

import logging
from collections.abc import Sequence
from threading import Lock

from dataplane import OpenFailed, Place, ReadRefused, WriteFailed, open_backend
from dataplane.port import Backend
from engine_adapters.vllm.orders import Identity
from engine_adapters.vllm.settings import Settings
from metaservice.client import AbortResult, Client, FinishResult, PlaceRef, RenewResult, WriteResult
from metaservice.wire.schemas import StorageRef

log = logging.getLogger("ucm.vllm")


NOT_OPEN = "not_open"
"""The storage cannot be used from this machine."""


class _Opened:
    """A backend, and how many calls are using it. One that was replaced is closed by its last user."""

    __slots__ = ("backend", "description", "retired", "users")

    def __init__(self, backend: Backend, description: StorageRef) -> None:
        self.backend = backend
        self.description = description
        self.users = 0
        self.retired = False


class Mover:
    """Thread safe."""

    def __init__(self, settings: Settings, client: Client | None = None) -> None:
        self._client = client or Client(settings.client())
        self._lock = Lock()
        self._opened: dict[str, _Opened] = {}

    # ---------------------------------------------------------------------------------------- the service

    def act_as(self, identity: Identity | None) -> None:
        """For whom the service is spoken to from now on; None: for nobody. Waits for nothing."""
        if identity is None:
            self._client.act_as("", "")
        else:
            self._client.act_as(identity.engine, identity.incarnation)

    def start(
        self,
        instance: str,
        keys: list[bytes],
        parents: list[bytes | None],
        *,
        ttl_ms: int,
        request_id: str,
        traceparent: str = "",
        tokens: Sequence[bytes] | None = None,
        lora: str = "",
        salt: str = "",
    ) -> WriteResult:
        """See Client.start_write; `tokens` are packed, empty for a block that no router is told of."""
        return self._client.start_write(
            instance,
            keys,
            parents=parents,
            ttl_ms=ttl_ms,
            request_id=request_id,
            traceparent=traceparent,
            tokens=None if tokens is None else list(tokens),
            lora=lora,
            salt=salt,
        )

    def renew(self, started: WriteResult, ttl_ms: int) -> RenewResult:
        """See Client.renew_write."""
        return self._client.renew_write(started, ttl_ms=ttl_ms)

    def finish(
        self,
        started: WriteResult,
        rows: Sequence[int],
        *,
        parts: list[str],
        ok: Sequence[bool],
        checksums: Sequence[int],
        request_id: str | None = None,
        traceparent: str = "",
    ) -> FinishResult:
        """See Client.finish; `rows` are of `started`."""
        return self._client.finish(
            started,
            [started.locations[row] for row in rows],
            [started.generations[row] for row in rows],
            parts=parts,
            ok=ok,
            checksums=checksums,
            request_id=request_id,
            traceparent=traceparent,
        )

    def abort(self, started: WriteResult) -> AbortResult:
        """See Client.abort."""
        return self._client.abort(started)

    # --------------------------------------------------------------------------------------- the storages

    def read(self, refs: Sequence[PlaceRef], buffers: Sequence[memoryview]) -> list[str]:
        """Fill each buffer with the verified bytes of its place. Answers a word a row: empty where the buffer
        holds them, else why not (a ReadReason, or `not_open`)."""
        outcomes = [NOT_OPEN] * len(refs)
        for storage, rows in _by_storage(refs):
            opened = self._use(storage)
            if opened is None:
                continue
            try:
                answers = opened.backend.read_many_into(
                    [Place.of(refs[row]) for row in rows],
                    [buffers[row] for row in rows],
                    [refs[row].checksum or 0 for row in rows],
                )
            finally:
                self._used(opened)
            for row, answer in zip(rows, answers, strict=True):
                outcomes[row] = answer.reason if isinstance(answer, ReadRefused) else ""
        return outcomes

    def write(self, refs: Sequence[PlaceRef], data: Sequence[memoryview]) -> list[int | str]:
        """Write each place. Answers the checksum, or a word for why not (a WriteReason, or `not_open`)."""
        outcomes: list[int | str] = [NOT_OPEN] * len(refs)
        for storage, rows in _by_storage(refs):
            opened = self._use(storage)
            if opened is None:
                continue
            try:
                answers = opened.backend.write_many(
                    [Place.of(refs[row]) for row in rows], [data[row] for row in rows]
                )
            finally:
                self._used(opened)
            for row, answer in zip(rows, answers, strict=True):
                outcomes[row] = answer.reason if isinstance(answer, WriteFailed) else answer
        return outcomes

    def _use(self, storage: StorageRef) -> _Opened | None:
        """The backend of a storage as it is described now. Another description is another backend: of a pool
        that was lost and made again, say."""
        with self._lock:
            opened = self._opened.get(storage.name)
            if opened is not None and opened.description == storage:
                opened.users += 1
                return opened
        try:
            backend = open_backend(storage.kind, storage.options)  # not under the lock: a mount may hang
        except OpenFailed as error:
            log.warning("storage %s cannot be used here: %s", storage.name, error)
            return None
        with self._lock:
            before = self._opened.get(storage.name)
            made = self._opened[storage.name] = _Opened(backend, storage)
            made.users += 1
            if before is not None:
                before.retired = True
        self._close_unused(before)
        return made

    def _used(self, opened: _Opened) -> None:
        with self._lock:
            opened.users -= 1
        self._close_unused(opened)

    def _close_unused(self, opened: _Opened | None) -> None:
        with self._lock:
            if opened is None or not opened.retired or opened.users:
                return
            opened.retired = False  # so that it is closed once
        opened.backend.close()

    # ------------------------------------------------------------------------------------------------ end

    def hang_up(self) -> None:
        """Calls to the service fail from now on, also those under way."""
        self._client.close()

    def close(self) -> None:
        """Let go of the storages. What is being used is left to the end of the process."""
        with self._lock:
            opened, self._opened = list(self._opened.values()), {}
            for one in opened:
                one.retired = True
        for one in opened:
            self._close_unused(one)


def _by_storage(refs: Sequence[PlaceRef]) -> list[tuple[StorageRef, list[int]]]:
    """Rows by storage, in order."""
    found: dict[str, tuple[StorageRef, list[int]]] = {}
    for row, ref in enumerate(refs):
        found.setdefault(ref.storage.name, (ref.storage, []))[1].append(row)
    return list(found.values())
