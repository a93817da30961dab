"""The service in plain Python, for tests of the connector's worker side: blocks, write sessions, and answers
to requests that are repeated. Storages are real."""

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any, cast

from dataplane import Place, open_backend
from metaservice.client import AbortResult, FinishResult, Places, RenewResult, WriteResult
from metaservice.client.results import now_ms
from metaservice.wire.schemas import FinishStatus, PartRef, StorageRef, WriteOutcome

PAGE_BYTES = 96


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "big"), digest_size=32).digest()


def content(key: bytes, part: str, size_bytes: int = PAGE_BYTES) -> bytes:
    """What the page of a block has to hold."""
    return (blake2b(key + part.encode(), digest_size=32).digest() * (size_bytes // 32 + 1))[:size_bytes]


class _Session:
    def __init__(self, name: str, who: tuple[str, str], reply: WriteResult) -> None:
        self.name = name
        self.who = who
        self.reply = reply
        self.open = True


class MemoryService:
    """Blocks, write sessions and answers to repeated requests, as the service has them. `fail[call]` are
    failures that the next such calls meet instead; `before[call]` runs first, in the caller's thread."""

    def __init__(self, root: Path, parts: Sequence[str]) -> None:
        self.storage = StorageRef(name="s", kind="posix", options={"root": str(root), "fsync": "none"})
        self.parts = list(parts)
        self.lock = RLock()
        self.blocks: dict[tuple[str, bytes], dict[str, Any]] = {}
        self.sessions: dict[str, _Session] = {}
        self.answers: dict[tuple[Any, ...], Any] = {}
        self.told: dict[tuple[Any, ...], tuple[list[bytes] | None, str, str]] = {}
        """By request: what its writer tells of its blocks, for routers."""
        self.tokens: dict[bytes, tuple[bytes, str, str]] = {}
        """By key: the packed token ids, adapter and salt that came first."""
        self.numbers = count(1)
        self.calls: list[str] = []
        self.fail: dict[str, list[str]] = {}
        self.before: dict[str, Callable[[], None]] = {}
        self.ttl_ms = 0
        self.finish_ids: list[str] = []
        self.finishes_lost = 0
        """So many finishes are done, and their answers lost."""

    def entered(self, call: str) -> str | None:
        self.before.get(call, lambda: None)()
        with self.lock:
            self.calls.append(call)
            return self.fail[call].pop(0) if self.fail.get(call) else None

    def serves(self, key: bytes, instance: str = "i") -> bool:
        with self.lock:
            block = self.blocks.get((instance, key))
            return block is not None and len(block["sums"]) == len(self.parts)

    def forget(self, key: bytes, instance: str = "i") -> None:
        with self.lock:
            self.blocks.pop((instance, key), None)

    @property
    def sessions_open(self) -> int:
        with self.lock:
            return sum(session.open for session in self.sessions.values())

    def places(self, keys: Sequence[bytes], instance: str = "i") -> Places:
        """The places of blocks that serve."""
        with self.lock:
            found = [self.blocks[instance, key] for key in keys]
            return Places(
                keys=list(keys),
                locations=array("Q", [block["location"] for block in found]),
                generations=array("I", [1] * len(found)),
                storages=array("H", bytes(2 * len(found))),
                checksums=array("Q", [block["sums"][part] for block in found for part in self.parts]),
                storage_table=[self.storage],
                parts=[PartRef(name=part, bytes=PAGE_BYTES) for part in self.parts],
                cluster="c",
            )

    def stored(self, key: bytes, part: str, instance: str = "i") -> bytes:
        """The bytes that readers of a block get."""
        places = self.places([key], instance)
        ref = places.place(0, part)
        return open_backend("posix", self.storage.options).read(Place.of(ref), ref.checksum)

    def holds_only_right_bytes(self) -> int:
        """How many blocks serve; each holds what its key stands for."""
        serving = [key for instance, key in list(self.blocks) if self.serves(key, instance)]
        for key in serving:
            for part in self.parts:
                assert self.stored(key, part) == content(key, part)
        return len(serving)

    def put(self, keys: Sequence[bytes]) -> Places:
        """Blocks that others stored."""
        backend = open_backend("posix", self.storage.options)
        for key in keys:
            location = next(self.numbers)
            sums = {
                part: backend.write(Place("c", location, 1, part, PAGE_BYTES, key), content(key, part))
                for part in self.parts
            }
            self.blocks["i", key] = {"location": location, "sums": sums, "session": ""}
        backend.close()
        return self.places(keys)

    def path(self, key: bytes, part: str) -> Path:
        """The file of one part."""
        location = self.blocks["i", key]["location"]
        root = Path(self.storage.options["root"])
        (found,) = root.rglob(f"{location:016x}-1.{part}")
        return found


class MemoryClient:
    """The calls of a worker process."""

    def __init__(self, service: MemoryService) -> None:
        self.service = service
        self.who = ("", "")
        self.closed = False
        self._numbers = count(1)

    def act_as(self, engine: str, incarnation: str) -> None:
        self.who = (engine, incarnation)

    def close(self) -> None:
        self.closed = True

    def start_write(
        self,
        instance: str,
        keys: list[bytes],
        *,
        parents: list[bytes | None],
        ttl_ms: int,
        request_id: str,
        traceparent: str,
        tokens: list[bytes] | None,
        lora: str,
        salt: str,
    ) -> WriteResult:
        service = self.service
        failure = service.entered("start")
        who = self.who
        if self.closed:
            failure = "closed"
        if failure or not who[1]:
            return WriteResult(
                keys=keys, engine=who[0], incarnation=who[1], failure=failure or "not_registered"
            )
        assert len(parents) == len(keys)
        assert tokens is None or len(tokens) == len(keys)
        with service.lock:
            told = (tokens, lora, salt)
            assert service.told.setdefault((who, request_id), told) == told, "ranks tell different things"
            for row, key in enumerate(keys):
                service.tokens.setdefault(key, (tokens[row] if tokens else b"", lora, salt))
            known = service.answers.get((who, request_id))
            if known is not None:
                assert list(known.keys) == keys, "a request id was used twice"
                return cast(WriteResult, known)
            name = f"w-0-{next(service.numbers)}"
            outcomes, locations = [], []
            for key in keys:
                block = service.blocks.get((instance, key))
                if block is None:
                    location = next(service.numbers)
                    service.blocks[instance, key] = {"location": location, "sums": {}, "session": name}
                    outcomes.append(WriteOutcome.write)
                    locations.append(location)
                else:
                    done = len(block["sums"]) == len(service.parts)
                    outcomes.append(WriteOutcome.present if done else WriteOutcome.in_progress)
                    locations.append(0)
            writes = WriteOutcome.write in outcomes
            ttl_ms = service.ttl_ms or ttl_ms
            reply = WriteResult(
                keys=keys,
                locations=array("Q", locations),
                generations=array("I", [int(location > 0) for location in locations]),
                storages=array("H", bytes(2 * len(keys))),
                storage_table=[service.storage],
                parts=[PartRef(name=part, bytes=PAGE_BYTES) for part in service.parts],
                cluster="c",
                session=name if writes else None,
                engine=who[0],
                incarnation=who[1],
                ttl_ms=ttl_ms,
                deadline_ms=now_ms() + ttl_ms,
                outcomes=bytes(outcomes),
                reasons=bytes(len(keys)),
                request_id=request_id,
            )
            service.answers[who, request_id] = reply
            if writes:
                service.sessions[name] = _Session(name, who, reply)
            return reply

    def _session(self, started: WriteResult) -> _Session | None:
        session = self.service.sessions.get(started.session or "")
        return session if session is not None and session.open else None

    def renew_write(self, started: WriteResult, *, ttl_ms: int) -> RenewResult:
        failure = self.service.entered("renew")
        if failure is None and self._session(started) is None:
            failure = "rejected:session_expired"
        return RenewResult(ttl_ms=ttl_ms, deadline_ms=0 if failure else now_ms() + ttl_ms, failure=failure)

    def finish(
        self,
        started: WriteResult,
        locations: Sequence[int],
        generations: Sequence[int],
        *,
        parts: list[str],
        ok: Sequence[bool],
        checksums: Sequence[int],
        request_id: str | None,
        traceparent: str,
    ) -> FinishResult:
        service = self.service
        request_id = request_id or f"{id(self)}-{next(self._numbers)}"
        failure = service.entered("finish")
        service.finish_ids.append(request_id)
        if failure:
            return FinishResult(
                status=bytes([FinishStatus.pending]) * len(locations), failure=failure, request_id=request_id
            )
        with service.lock:
            known = service.answers.get((self.who, request_id))
            if known is None:
                known = self._finish(started, locations, parts, ok, checksums, request_id)
                service.answers[self.who, request_id] = known
            if service.finishes_lost:
                service.finishes_lost -= 1
                return FinishResult(failure="connection_lost", request_id=request_id)
            return cast(FinishResult, known)

    def _finish(
        self,
        started: WriteResult,
        locations: Sequence[int],
        parts: list[str],
        ok: Sequence[bool],
        checksums: Sequence[int],
        request_id: str,
    ) -> FinishResult:
        service = self.service
        session = self._session(started)
        if session is None:
            return FinishResult(
                status=bytes([FinishStatus.removed]) * len(locations),
                failure="rejected:session_expired",
                request_id=request_id,
            )
        status = []
        by_location = {block["location"]: at for at, block in service.blocks.items()}
        for row, location in enumerate(locations):
            at = by_location.get(location)
            if at is None:
                status.append(FinishStatus.freed)
                continue
            block = service.blocks[at]
            for index, part in enumerate(parts):
                if at not in service.blocks:
                    continue
                if ok[row * len(parts) + index]:
                    block["sums"][part] = checksums[row * len(parts) + index]
                else:
                    del service.blocks[at]
            if at not in service.blocks:
                status.append(FinishStatus.freed)
            else:
                whole = len(block["sums"]) == len(service.parts)
                status.append(FinishStatus.serving if whole else FinishStatus.pending)
        serving = status.count(FinishStatus.serving)
        return FinishResult(status=bytes(status), published=serving, request_id=request_id)

    def abort(self, started: WriteResult) -> AbortResult:
        service = self.service
        failure = service.entered("abort")
        if failure:
            return AbortResult(failure=failure)
        with service.lock:
            session = self._session(started)
            if session is None:
                return AbortResult(failure="rejected:session_expired")
            session.open = False
            unfinished = [
                at
                for at, block in service.blocks.items()
                if block["session"] == session.name and len(block["sums"]) < len(service.parts)
            ]
            for at in unfinished:
                del service.blocks[at]
            return AbortResult(freed=len(unfinished))
