"""The calls about routers and cache events: who holds a prefix, what an engine holds, where streams are."""

from collections.abc import Sequence

import msgspec
from msgspec.msgpack import Decoder

from metaservice.wire.columns import packed
from metaservice.wire.schemas_events import (
    EngineRoute,
    EventsReply,
    RemovedItem,
    ReportReply,
    ReportRequest,
    RestateReply,
    RestateRequest,
    RouteReply,
    RouteRequest,
    StoredItem,
)

from .calls import Call, Sending, Who, decoded, name, post
from .checks import between, lying
from .endpoints import CATALOGUE, Route
from .http import JSON
from .router_results import EventsResult, ReportResult, RestateResult, RouteResult

_route = Decoder(RouteReply)
_report = Decoder(ReportReply)
_restate = Decoder(RestateReply)
_events = msgspec.json.Decoder(EventsReply)

_COUNT_MAX = 2**53 - 1
_VISIBLE_MS_MAX = 2**31
_WANTS = frozenset({"", "snapshot"})


class AskRoute(Call[RouteResult]):
    """`POST /v1/instances/{id}/route`."""

    __slots__ = ("instance", "keys", "lora", "salt", "staleness_ms_max", "token_ids", "top_k")

    def __init__(
        self,
        instance: str,
        keys: Sequence[bytes] | None,
        token_ids: Sequence[int] | None,
        lora: str,
        salt: str,
        top_k: int,
        staleness_ms_max: int | None,
    ) -> None:
        self.instance = instance
        self.keys = keys
        self.token_ids = token_ids
        self.lora = lora
        self.salt = salt
        self.top_k = top_k
        self.staleness_ms_max = staleness_ms_max

    @property
    def route(self) -> Route:
        # Any replica answers. Whoever did is asked again; no instance has this name.
        return f"?{self.instance}"

    def nothing(self) -> RouteResult | None:
        given = self.keys if self.token_ids is None else self.token_ids
        return None if given is None or len(given) else RouteResult()

    def request(self, who: Who) -> Sending:
        body = RouteRequest(
            keys=None if self.keys is None else list(self.keys),
            token_ids=None if self.token_ids is None else packed("I", self.token_ids),
            lora=self.lora,
            salt=self.salt,
            top_k=self.top_k,
            staleness_ms_max=self.staleness_ms_max,
        )
        return post(f"/v1/instances/{name(self.instance, 'instance')}/route", body)

    def answer(self, body: bytes, sent_ms: int) -> RouteResult:
        reply = decoded(_route, body)
        if self.keys is not None and reply.asked != len(self.keys):
            raise lying("route: the answer to another question")
        asked = between(reply.asked, 0, _COUNT_MAX, "asked")
        for row in reply.engines:
            self._check(row, asked)
        between(reply.pool.blocks, -1, asked, "pool.blocks")
        between(reply.pool.announced, 0, asked, "pool.announced")
        return RouteResult(
            asked=asked,
            block_size_tokens=between(reply.block_size_tokens, 1, _COUNT_MAX, "block_size_tokens"),
            engines=reply.engines,
            pool=reply.pool,
        )

    @staticmethod
    def _check(row: EngineRoute, asked: int) -> None:
        """Each tier has what the nearer ones have, and no prefix is longer than the prompt."""
        tiers = row.tiers
        if not 0 <= tiers.gpu <= tiers.cpu <= tiers.storage <= tiers.external <= row.blocks <= asked:
            raise lying(f"engines: {row.engine[:128]} holds more than there is")

    def failed(self, failure: str, detail: str) -> RouteResult:
        return RouteResult(failure=failure, detail=detail)


class Report(Call[ReportResult]):
    """`POST /v1/engines/{id}/cache`, to one replica: what it answers is about itself."""

    __slots__ = ("base", "cleared", "number", "removed", "stored")

    def __init__(
        self,
        number: int,
        base: int | None,
        stored: Sequence[StoredItem],
        removed: Sequence[RemovedItem],
        cleared: bool,
    ) -> None:
        self.number = number
        self.base = base
        self.stored = stored
        self.removed = removed
        self.cleared = cleared

    @property
    def route(self) -> Route:
        return "?cache"

    def request(self, who: Who) -> Sending:
        engine, incarnation = who.current("engine")
        body = ReportRequest(
            incarnation=incarnation,
            number=self.number,
            base=self.base,
            cleared=self.cleared,
            stored=list(self.stored),
            removed=list(self.removed),
        )
        return post(f"/v1/engines/{name(engine, 'engine')}/cache", body)

    def answer(self, body: bytes, sent_ms: int) -> ReportResult:
        reply = decoded(_report, body)
        if reply.want not in _WANTS:
            raise lying("report: it wants what there is not")
        left_out = reply.want or reply.number > self.number
        expected = (0, 0) if left_out else (len(self.stored), len(self.removed))
        if (len(reply.stored), len(reply.removed)) != expected:
            raise lying("report: the answer to another one")
        return ReportResult(
            stored=reply.stored,
            removed=reply.removed,
            want=reply.want,
            visible_ms=between(reply.visible_ms, 1, _VISIBLE_MS_MAX, "visible_ms"),
            number=between(reply.number, 0, _COUNT_MAX, "number"),
        )

    def failed(self, failure: str, detail: str) -> ReportResult:
        return ReportResult(failure=failure, detail=detail)


class Restate(Call[RestateResult]):
    """`POST /v1/instances/{id}/restate`."""

    __slots__ = ("instance",)

    writes = True

    def __init__(self, instance: str) -> None:
        self.instance = instance

    @property
    def route(self) -> Route:
        return self.instance

    def request(self, who: Who) -> Sending:
        return post(f"/v1/instances/{name(self.instance, 'instance')}/restate", RestateRequest())

    def answer(self, body: bytes, sent_ms: int) -> RestateResult:
        return RestateResult(blocks=between(decoded(_restate, body).blocks, 0, _COUNT_MAX, "blocks"))

    def failed(self, failure: str, detail: str) -> RestateResult:
        return RestateResult(failure=failure, detail=detail)


class Events(Call[EventsResult]):
    """`GET /v1/events`, which every replica answers for itself. Asked is the one that leads the instance, if
    it is known."""

    __slots__ = ("instance",)

    media = JSON

    def __init__(self, instance: str) -> None:
        self.instance = instance

    @property
    def route(self) -> Route:
        return self.instance or CATALOGUE

    def request(self, who: Who) -> Sending:
        query = f"?instance={name(self.instance, 'instance')}" if self.instance else ""
        return Sending("GET", f"/v1/events{query}", b"", JSON, JSON, straight=False)

    def answer(self, body: bytes, sent_ms: int) -> EventsResult:
        reply = decoded(_events, body)
        return EventsResult(
            replica=reply.replica,
            streams=reply.streams,
            engines=reply.engines,
            attachments=reply.attachments,
        )

    def failed(self, failure: str, detail: str) -> EventsResult:
        return EventsResult(failure=failure, detail=detail)
