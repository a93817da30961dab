"""Serves requests from the cache as an engine's connector does, and checks what it gets as no engine could.

Look the prefix up under a lease, load and verify its bytes, compute what is missing, write it, finish,
release. Every failure on the way ends in computing: a request is always answered.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from dataplane import OpenFailed, Place, ReadRefused, WriteFailed, open_backend
from dataplane.port import Backend
from engine_adapters.replay import hashing, payload
from engine_adapters.replay.messages import Done, Job, Step
from metaservice.client import Client, LookupResult, PlaceRef, WriteResult
from metaservice.wire.schemas import StorageRef, WriteOutcome

BATCH_BLOCKS = 32
"""Blocks written between two looks at the session's deadline."""

Tell = Callable[[Step, int], None]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine knows of its own model, as it stands in the instance's fingerprint."""

    instance: str
    part: str
    part_bytes: int
    block_size_tokens: int
    hash_seed: str
    key_length: int


@dataclass(slots=True)
class _Account:
    """What is counted while one request is served."""

    written: int = 0
    present: int = 0
    in_progress: int = 0
    refused: int = 0
    dirty: int = 0
    lost: int = 0
    lookup_ms: float = 0.0
    load_ms: float = 0.0
    failures: list[str] = field(default_factory=list)


class Connector:
    """One engine's way to the cache. `client` has the engine registered. Used from one thread."""

    def __init__(self, client: Client, shape: ModelShape, *, lease_ms: int, write_ttl_ms: int) -> None:
        self._client = client
        self._shape = shape
        self._lease_ms = lease_ms
        self._write_ttl_ms = write_ttl_ms
        self._backends: dict[str, Backend] = {}

    def serve(self, job: Job, tell: Tell) -> Done:
        """Answer one request; `tell` hears each step. Raises nothing for whatever the service or a storage
        does."""
        started = time.perf_counter()
        account = _Account()
        keys = job.keys or hashing.chain(
            job.tokens,
            block_size_tokens=self._shape.block_size_tokens,
            seed=self._shape.hash_seed,
            key_length=self._shape.key_length,
        )
        hits = 0
        if keys:
            found = self._lookup(keys, account)
            if found.hits:
                tell("loading", found.hits)
                hits = self._load(found, account)
            if hits < len(keys):
                self._write_missing(keys, hits, account, tell)
            if found.lease is not None:
                self._client.release([found.lease])
        return Done(
            index=job.index,
            asked=len(keys),
            hits=hits,
            written=account.written,
            present=account.present,
            in_progress=account.in_progress,
            refused=account.refused,
            dirty=account.dirty,
            lost=account.lost,
            failures=account.failures,
            lookup_ms=account.lookup_ms,
            load_ms=account.load_ms,
            total_ms=_ms_since(started),
        )

    def close(self) -> None:
        """Let go of the storages."""
        for backend in self._backends.values():
            backend.close()

    # ------------------------------------------------------------------------------------------- loading

    def _lookup(self, keys: list[bytes], account: _Account) -> LookupResult:
        started = time.perf_counter()
        found = self._client.lookup(self._shape.instance, keys, lease_ms=self._lease_ms)
        account.lookup_ms = _ms_since(started)
        if found.failure is not None:
            account.failures.append(f"lookup: {found.failure}")
        return found

    def _load(self, found: LookupResult, account: _Account) -> int:
        """How many blocks of the found prefix are really there, byte for byte."""
        started = time.perf_counter()
        good = 0
        for refs in _runs(found.places(self._shape.part)):
            if (backend := self._backend(refs[0].storage, account)) is None:
                break
            loaded = backend.read_many([_place(ref) for ref in refs], [ref.checksum or 0 for ref in refs])
            verified = self._verified(refs, loaded, found, account)
            good += verified
            if verified < len(refs):
                break
        account.load_ms = _ms_since(started)
        return good

    def _verified(
        self,
        refs: Sequence[PlaceRef],
        loaded: Sequence[bytes | ReadRefused],
        found: LookupResult,
        account: _Account,
    ) -> int:
        """How many of `loaded` from the first on are what was computed for their keys.

        A block that the service named under a lease and that is not there, not whole or not the right one
        is `dirty`: an engine that trusted the service would have used it. Once the lease is over a block
        may be gone (`lost`).
        """
        for row, (ref, data) in enumerate(zip(refs, loaded, strict=True)):
            if isinstance(data, ReadRefused):
                if data.reason == "missing" and found.lease_left_ms() == 0:
                    account.lost += 1
                elif data.reason == "io_error":
                    account.failures.append(f"read: {data.reason}")
                else:
                    account.dirty += 1
                return row
            if data != payload.compute(ref.key, ref.part, ref.size_bytes):
                account.dirty += 1
                return row
        return len(refs)

    # ------------------------------------------------------------------------------------------- writing

    def _write_missing(self, keys: list[bytes], hits: int, account: _Account, tell: Tell) -> None:
        """Compute the blocks behind the hits and offer them to the others. What another engine is writing
        is computed all the same, and left to it."""
        missing = keys[hits:]
        computed = [payload.compute(key, self._shape.part, self._shape.part_bytes) for key in missing]
        started = self._client.start_write(
            self._shape.instance, missing, parent=keys[hits - 1] if hits else None, ttl_ms=self._write_ttl_ms
        )
        if started.failure is not None:
            account.failures.append(f"start_write: {started.failure}")
            return
        account.present += started.outcomes.count(WriteOutcome.present)
        account.in_progress += started.outcomes.count(WriteOutcome.in_progress)
        account.refused += started.outcomes.count(WriteOutcome.refused)
        if started.session is None:
            return
        rows = started.writable
        tell("writing", len(rows))
        checksums = self._write(started, rows, computed, account)
        tell("finishing", len(rows))
        finished = self._client.finish(
            started,
            [started.locations[row] for row in rows],
            [started.generations[row] for row in rows],
            ok=[checksum is not None for checksum in checksums],
            checksums=[checksum or 0 for checksum in checksums],
        )
        if finished.failure is not None:
            account.failures.append(f"finish: {finished.failure}")
        account.written += finished.published

    def _write(
        self, started: WriteResult, rows: Sequence[int], computed: Sequence[bytes], account: _Account
    ) -> list[int | None]:
        """The checksum of each row's bytes as written; None where they could not be."""
        checksums: list[int | None] = []
        contents = iter([computed[row] for row in rows])
        renew_at = time.monotonic() + started.ttl_ms / 2000
        for refs in _runs(started.place(row, self._shape.part) for row in rows):
            if time.monotonic() > renew_at:
                renewed = self._client.renew_write(started, ttl_ms=self._write_ttl_ms)
                if renewed.failure is not None:
                    account.failures.append(f"renew_write: {renewed.failure}")
                renew_at = time.monotonic() + started.ttl_ms / 2000
            data = list(islice(contents, len(refs)))
            if (backend := self._backend(refs[0].storage, account)) is None:
                checksums += [None] * len(refs)
                continue
            for outcome in backend.write_many([_place(ref) for ref in refs], data):
                if isinstance(outcome, WriteFailed):
                    account.failures.append(f"write: {outcome.reason}")
                    checksums.append(None)
                else:
                    checksums.append(outcome)
        return checksums

    def _backend(self, storage: StorageRef, account: _Account) -> Backend | None:
        backend = self._backends.get(storage.name)
        if backend is None:
            try:
                backend = open_backend(storage.kind, storage.options)
            except OpenFailed as error:
                account.failures.append(f"open storage: {error}")
                return None
            self._backends[storage.name] = backend
        return backend


def _runs(refs: Iterable[PlaceRef]) -> Iterator[list[PlaceRef]]:
    """`refs` in order, cut into runs that lie in one storage and hold at most `BATCH_BLOCKS`."""
    run: list[PlaceRef] = []
    for ref in refs:
        if run and (len(run) == BATCH_BLOCKS or ref.storage.name != run[0].storage.name):
            yield run
            run = []
        run.append(ref)
    if run:
        yield run


def _place(ref: PlaceRef) -> Place:
    return Place(ref.cluster, ref.location, ref.generation, ref.part, ref.size_bytes, ref.key)


def _ms_since(started_s: float) -> float:
    return round((time.perf_counter() - started_s) * 1000, 3)
