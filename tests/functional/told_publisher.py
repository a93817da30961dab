"""Stands in for the publisher process: what it is asked is kept, what it answers is set by hand."""

import asyncio
from typing import Any

import msgspec
from msgspec import Struct

from metaservice.publish.errors import PublisherUnavailable
from metaservice.wire.schemas_events import EventsRequest, ReportAsk, RouteAsk

_ASKS: dict[str, type[Struct]] = {"route": RouteAsk, "report": ReportAsk, "status": EventsRequest}


class ToldPublisher:
    """`answers`: by what is asked, a reply or a failure. `asked` has every question, decoded."""

    def __init__(self, **answers: Struct | PublisherUnavailable) -> None:
        self.answers = answers
        self.asked: list[Any] = []
        self.delay_s = 0.0

    async def ask(self, what: str, body: bytes, timeout_ms: int) -> bytes:
        self.asked.append(msgspec.msgpack.decode(body, type=_ASKS[what]))
        await asyncio.sleep(self.delay_s)
        answer = self.answers[what]
        if isinstance(answer, PublisherUnavailable):
            raise answer
        return msgspec.msgpack.encode(answer)
