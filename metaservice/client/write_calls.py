"""The calls that write: start, finish, renew, abort, remove."""

from array import array
from collections.abc import Sequence

from msgspec.msgpack import Decoder

from metaservice.wire.columns import packed
from metaservice.wire.schemas import (
    AbortReply,
    AbortRequest,
    FinishReply,
    FinishRequest,
    FinishStatus,
    RefusedReason,
    RemoveOutcome,
    RemoveReply,
    RemoveRequest,
    RenewWriteReply,
    RenewWriteRequest,
    StartWriteReply,
    StartWriteRequest,
    TokenRow,
    WriteOutcome,
)

from . import checks
from .calls import Call, Keeps, Sending, Who, decoded, name, post, shard_of, token
from .checks import between, codes, lying
from .endpoints import Route
from .results import AbortResult, FinishResult, RemoveResult, RenewResult, WriteResult

_start = Decoder(StartWriteReply)
_finish = Decoder(FinishReply)
_renew = Decoder(RenewWriteReply)
_abort = Decoder(AbortReply)
_remove = Decoder(RemoveReply)

_COUNT_MAX = 2**53 - 1
_TTL_MS_MAX = 2**31
_WRITE = bytes([WriteOutcome.write])
_SERVING = bytes([FinishStatus.serving])


class StartWrite(Call[WriteResult]):
    """`POST /v1/instances/{id}/writes`."""

    __slots__ = (
        "engine",
        "group",
        "incarnation",
        "instance",
        "keys",
        "lora",
        "parent",
        "parents",
        "renew",
        "request_id",
        "salt",
        "sizes",
        "tokens",
        "traceparent",
        "ttl_ms",
    )

    writes = True

    def __init__(
        self,
        instance: str,
        keys: list[bytes],
        parents: list[bytes | None] | None,
        parent: bytes | None,
        group: str | None,
        sizes: list[int] | None,
        ttl_ms: int,
        renew: bool,
        request_id: str | None,
        traceparent: str = "",
        tokens: list[TokenRow] | None = None,
        lora: str = "",
        salt: str = "",
    ) -> None:
        self.instance = instance
        self.keys = keys
        self.parents = parents
        self.parent = parent
        self.group = group
        self.sizes = sizes
        self.ttl_ms = ttl_ms
        self.renew = renew
        self.request_id = request_id or ""
        self.traceparent = traceparent
        self.tokens = tokens
        self.lora = lora
        self.salt = salt
        self.engine = self.incarnation = ""

    @property
    def route(self) -> Route:
        return self.instance

    def nothing(self) -> WriteResult | None:
        return None if self.keys else WriteResult()

    def request(self, who: Who) -> Sending:
        self.engine, self.incarnation = who.current("engine")
        self.request_id = self.request_id or who.request_id()
        body = StartWriteRequest(
            engine=self.engine,
            incarnation=self.incarnation,
            keys=self.keys,
            parents=self.parents,
            parent=self.parent,
            group=self.group,
            sizes=self.sizes,
            ttl_ms=self.ttl_ms,
            request_id=self.request_id,
            tokens=self.tokens,
            lora=self.lora,
            salt=self.salt,
        )
        return post(f"/v1/instances/{name(self.instance, 'instance')}/writes", body, self.traceparent)

    def answer(self, body: bytes, sent_ms: int) -> WriteResult:
        reply = decoded(_start, body)
        asked = len(self.keys)
        outcomes = codes(reply.outcomes, asked, max(WriteOutcome), "outcomes")
        writes = outcomes.count(_WRITE)
        locations = checks.locations(reply.locations, asked)
        generations = checks.numbers(reply.generations, "I", asked, "generations")
        unplaced = generations.count(0)
        if unplaced != asked - writes or (
            unplaced
            and any((not outcome) != bool(gen) for outcome, gen in zip(outcomes, generations, strict=True))
        ):
            raise lying("generations: places for other rows than those to write")
        if bool(writes) != (reply.session is not None):
            raise lying("session: not given as needed")
        result = WriteResult(
            keys=self.keys,
            locations=locations,
            generations=generations,
            engine=self.engine,
            incarnation=self.incarnation,
            outcomes=outcomes,
            reasons=codes(reply.reasons, asked, max(RefusedReason), "reasons"),
            wait_ms=checks.numbers(reply.wait_ms, "I", asked, "wait_ms")
            if reply.wait_ms
            else array("I", bytes(4 * asked)),
            switch=reply.switch,
            evicted=reply.evicted,
            request_id=self.request_id,
        )
        if reply.session is not None:
            result.session = checks.token(reply.session, "session")
            result.ttl_ms = between(reply.ttl_ms, 1, _TTL_MS_MAX, "ttl_ms")
            result.deadline_ms = sent_ms + result.ttl_ms
            result.storages = checks.storages(reply.storages, asked, reply.storage_table)
            result.storage_table = reply.storage_table
            result.parts = checks.parts(reply.parts)
            result.cluster = checks.cluster(reply.cluster)
        return result

    def failed(self, failure: str, detail: str) -> WriteResult:
        asked = len(self.keys)
        return WriteResult(
            keys=self.keys,
            locations=array("Q", bytes(8 * asked)),
            generations=array("I", bytes(4 * asked)),
            engine=self.engine,
            incarnation=self.incarnation,
            outcomes=bytes([WriteOutcome.refused]) * asked,
            reasons=bytes(asked),
            wait_ms=array("I", bytes(4 * asked)),
            request_id=self.request_id,
            failure=failure,
            detail=detail,
        )

    def after(self, result: WriteResult, keeps: Keeps) -> None:
        if self.renew and result.session:
            keeps.keep_session(
                result.session, result.engine, result.incarnation, result.ttl_ms, result.deadline_ms
            )


class _OfSession:
    """What is said about a write session: by the engine and incarnation that opened it."""

    __slots__ = ("engine", "incarnation", "session")

    writes = True

    def __init__(self, write: WriteResult | str) -> None:
        if isinstance(write, str):
            self.session, self.engine, self.incarnation = write, "", ""
        else:
            self.session, self.engine, self.incarnation = write.session or "", write.engine, write.incarnation

    @property
    def route(self) -> Route:
        return shard_of(self.session)

    def path(self, who: Who, verb: str) -> str:
        if not self.engine:
            self.engine, self.incarnation = who.current("engine")
        return f"/v1/writes/{token(self.session, 'session')}/{verb}"


class Finish(_OfSession, Call[FinishResult]):
    """`POST /v1/writes/{session}/finish`."""

    __slots__ = (
        "checksums",
        "generations",
        "locations",
        "ok",
        "parts",
        "request_id",
        "sizes",
        "traceparent",
    )

    def __init__(
        self,
        write: WriteResult | str,
        locations: Sequence[int],
        generations: Sequence[int],
        parts: list[str] | None,
        ok: Sequence[bool] | None,
        checksums: Sequence[int] | None,
        sizes: list[int] | None,
        request_id: str | None,
        traceparent: str,
    ) -> None:
        super().__init__(write)
        self.locations = locations
        self.generations = generations
        self.parts = parts
        self.ok = ok
        self.checksums = checksums
        self.sizes = sizes
        self.request_id = request_id or ""
        self.traceparent = traceparent

    def request(self, who: Who) -> Sending:
        path = self.path(who, "finish")
        self.request_id = self.request_id or who.request_id()
        body = FinishRequest(
            engine=self.engine,
            incarnation=self.incarnation,
            locations=packed("Q", self.locations),
            generations=packed("I", self.generations),
            parts=self.parts,
            ok=None if self.ok is None else bytes(map(bool, self.ok)),
            checksums=None if self.checksums is None else packed("Q", self.checksums),
            sizes=self.sizes,
            request_id=self.request_id,
        )
        return post(path, body, self.traceparent)

    def answer(self, body: bytes, sent_ms: int) -> FinishResult:
        reply = decoded(_finish, body)
        status = codes(reply.status, len(self.locations), max(FinishStatus), "status")
        return FinishResult(
            status=status,
            published=between(reply.published, 0, status.count(_SERVING), "published"),
            open=between(reply.open, 0, _COUNT_MAX, "open"),
            request_id=self.request_id,
        )

    def failed(self, failure: str, detail: str) -> FinishResult:
        status = bytes([FinishStatus.pending]) * len(self.locations)
        return FinishResult(
            status=status, open=len(status), request_id=self.request_id, failure=failure, detail=detail
        )

    def after(self, result: FinishResult, keeps: Keeps) -> None:
        if not result.open:
            keeps.drop_session(self.session)


class RenewWrite(_OfSession, Call[RenewResult]):
    """`POST /v1/writes/{session}/renew`."""

    __slots__ = ("ttl_ms",)

    def __init__(self, write: WriteResult | str, ttl_ms: int) -> None:
        super().__init__(write)
        self.ttl_ms = ttl_ms

    def request(self, who: Who) -> Sending:
        path = self.path(who, "renew")
        body = RenewWriteRequest(engine=self.engine, incarnation=self.incarnation, ttl_ms=self.ttl_ms)
        return post(path, body)

    def answer(self, body: bytes, sent_ms: int) -> RenewResult:
        ttl_ms = between(decoded(_renew, body).ttl_ms, 1, _TTL_MS_MAX, "ttl_ms")
        return RenewResult(ttl_ms=ttl_ms, deadline_ms=sent_ms + ttl_ms)

    def failed(self, failure: str, detail: str) -> RenewResult:
        return RenewResult(failure=failure, detail=detail)


class Abort(_OfSession, Call[AbortResult]):
    """`POST /v1/writes/{session}/abort`."""

    __slots__ = ("request_id",)

    def __init__(self, write: WriteResult | str, request_id: str | None) -> None:
        super().__init__(write)
        self.request_id = request_id or ""

    def request(self, who: Who) -> Sending:
        path = self.path(who, "abort")
        self.request_id = self.request_id or who.request_id()
        body = AbortRequest(engine=self.engine, incarnation=self.incarnation, request_id=self.request_id)
        return post(path, body)

    def answer(self, body: bytes, sent_ms: int) -> AbortResult:
        freed = between(decoded(_abort, body).freed, 0, _COUNT_MAX, "freed")
        return AbortResult(freed=freed, request_id=self.request_id)

    def failed(self, failure: str, detail: str) -> AbortResult:
        return AbortResult(request_id=self.request_id, failure=failure, detail=detail)

    def after(self, result: AbortResult, keeps: Keeps) -> None:
        # Also when the call failed: nobody writes any more, so the session ends by itself.
        keeps.drop_session(self.session)


class Remove(Call[RemoveResult]):
    """`POST /v1/instances/{id}/remove`."""

    __slots__ = ("group", "instance", "keys", "lease", "request_id")

    writes = True

    def __init__(
        self, instance: str, keys: list[bytes], group: str | None, lease: str | None, request_id: str | None
    ) -> None:
        self.instance = instance
        self.keys = keys
        self.group = group
        self.lease = lease
        self.request_id = request_id or ""

    @property
    def route(self) -> Route:
        return self.instance

    def nothing(self) -> RemoveResult | None:
        return None if self.keys else RemoveResult()

    def request(self, who: Who) -> Sending:
        self.request_id = self.request_id or who.request_id()
        body = RemoveRequest(keys=self.keys, group=self.group, lease=self.lease)
        if who.kind == "engine":
            body.engine, body.incarnation = who.id, who.incarnation
        body.request_id = self.request_id
        return post(f"/v1/instances/{name(self.instance, 'instance')}/remove", body)

    def answer(self, body: bytes, sent_ms: int) -> RemoveResult:
        reply = decoded(_remove, body)
        outcomes = codes(reply.outcomes, len(self.keys), max(RemoveOutcome), "outcomes")
        removed = between(reply.removed, 0, len(outcomes), "removed")
        return RemoveResult(outcomes=outcomes, removed=removed, request_id=self.request_id)

    def failed(self, failure: str, detail: str) -> RemoveResult:
        return RemoveResult(request_id=self.request_id, failure=failure, detail=detail)
