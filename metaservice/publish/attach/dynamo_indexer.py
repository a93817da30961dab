"""`dynamo-indexer`: our streams beside the engines' own ones at Dynamo's standalone indexer.

The indexer dials what is registered, so all there is to do is to keep the registrations right: every live
engine, with the endpoints of who leads now. What is listed is compared with what is wanted whenever something
changed and every `poll_ms`: an indexer that was started anew has forgotten all of it and says nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping

import httpx

from metaservice.core.windows import Window
from metaservice.publish.attach.indexer_plan import (
    Books,
    Call,
    Judged,
    Listed,
    Registration,
    Wish,
    listed_workers,
    plan,
    wish,
)
from metaservice.publish.attach.names import metric
from metaservice.publish.attach.rows import Row
from metaservice.publish.feed import EngineUp
from metaservice.publish.view import View
from metaservice.wire.schemas_events import AttachmentView, StreamView

PROBLEMS_MAX = 16
TEXT_MAX = 300
AGAIN_S = 0.05
"""Engines that come together are seen to together."""
DONE = (200, 201)
UNKNOWN_S = 2.0
"""What is not known for so long is no news that has not come yet."""
EPOCH_FIRST = 1
"""Of the first leader that a shard's history has."""


class DynamoIndexer:
    """Options: `url`; `model`, `instance` (only the engines of these); `spare_rank` (ours are this plus the
    channel; another range for each cluster that shares an indexer); `engine_streams` (register the engines'
    own streams as well); `poll_ms`, `timeout_ms`."""

    def __init__(self, row: Row, view: View) -> None:
        self._row = row
        self._view = view
        self._url = row.text("url").rstrip("/")
        self._spare_rank = row.number("spare_rank")
        self._poll_s = row.number("poll_ms") / 1000
        self._leads: set[int] = set()
        self._first: set[int] = set()
        """Shards that nobody led before us: what the indexer was told of them is of a history that was lost,
        and would never be taken back."""
        self._unknown_s: dict[tuple[int, int], float] = {}
        """(worker, rank) of streams that are not known here -> since when that was seen."""
        self._made: set[tuple[int, int]] = set()
        """(worker, rank) that were registered in this life."""
        self._books = Books()
        self._ranks: dict[int, tuple[int, int]] = {}
        """Channel -> (shard, rank of its batches): also of instances that are gone, whose engines have to be
        taken away there."""
        self._problems: list[str] = []
        self._registered = 0
        self._reached = False
        self._counts: Counter[str] = Counter(registrations=0, removals=0, refused=0, failures=0)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._http: httpx.AsyncClient | None = None

    @property
    def name(self) -> str:
        """Kind and address, and what it is limited to."""
        limits = [f"{name}={value}" for name in ("model", "instance") if (value := self._row.text(name))]
        return " ".join((self._row.kind, self._url, *limits))

    async def start(self) -> None:
        """Begin to look."""
        timeout_s = self._row.number("timeout_ms") / 1000
        self._http = httpx.AsyncClient(base_url=self._url, timeout=timeout_s, trust_env=False)
        self._task = asyncio.create_task(self._run(self._http), name=self.name)

    async def close(self) -> None:
        """End; the registrations stay, for the next leader."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._http is not None:
            await self._http.aclose()

    def window(self, shard: int, window: Window) -> None:
        """Nothing to do: the indexer reads the streams."""

    def leads(self, shard: int, leads: bool) -> None:
        """Registrations of a shard are its leader's."""
        (self._leads.add if leads else self._leads.discard)(shard)
        if leads and self._view.epoch(shard) == EPOCH_FIRST:
            self._first.add(shard)
        self._wake.set()

    def changed(self) -> None:
        """Look again."""
        self._wake.set()

    def status(self) -> AttachmentView:
        """`engines`: those whose streams are all there, as last seen."""
        problems = "; ".join(self._problems[:PROBLEMS_MAX])
        return AttachmentView(
            name=self.name,
            kind=self._row.kind,
            target=self._url,
            ok=not problems,
            detail=problems or ("" if self._leads else "another replica leads, and registers"),
            engines=self._registered,
        )

    def streams(self) -> list[StreamView]:
        """None: the indexer reads what everybody may read."""
        return []

    def stats(self) -> dict[str, float]:
        """Gauges and counters."""
        gauges = {
            "reached": self._reached,
            "engines": self._registered,
            "problems": len(self._problems),
        }
        counts = gauges | {f"{name}_total": count for name, count in self._counts.items()}
        return {
            metric(f"attachment_{name}", attachment=self.name): float(count) for name, count in counts.items()
        }

    async def _run(self, http: httpx.AsyncClient) -> None:
        while True:
            self._wake.clear()
            if self._leads:
                await self._look(http)
            try:
                await asyncio.wait_for(self._wake.wait(), self._poll_s)
            except TimeoutError:
                continue
            await asyncio.sleep(AGAIN_S)

    async def _look(self, http: httpx.AsyncClient) -> None:
        """Compare and repair. An indexer that does not answer is asked again at the next look."""
        problems: list[str] = []
        try:
            answer = await http.get("/workers")
            answer.raise_for_status()
            listed = listed_workers(answer.json())
            self._made &= {(worker, rank) for worker, row in listed.items() for rank in row.ranks}
            wishes = self._wishes()
            self._look_for_unknown(listed)
            own = self._row.switch("engine_streams")
            for call in plan(wishes, listed, self._judge, self._books, engine_streams=own):
                if not self._leads:
                    return  # somebody else does by now, and sees to it
                await self._make(http, call, problems)
            self._registered = _present(wishes, listed)
            if not self._reached:
                self._view.say("info", f"attachment {self.name}: reached")
            self._reached = True
        except (httpx.HTTPError, AttributeError, KeyError, TypeError, ValueError) as error:
            self._counts["failures"] += 1
            self._reached = False
            reason = str(error)[:TEXT_MAX] or type(error).__name__
            problems.append(f"it does not answer as Dynamo's indexer does: {reason}")
        for text in problems:
            if text not in self._problems:
                self._view.say("warning", f"attachment {self.name}: {text}")
        self._problems = problems

    def _wishes(self) -> list[Wish]:
        instances = self._view.instances
        for channel, stream in self._view.streams.items():
            if stream.instance in instances and self._minds(stream.instance, stream.model):
                self._ranks[channel] = (instances[stream.instance].shard, stream.rank)
        return [
            wish(engine, instance, self._endpoints(engine), self._spare_rank)
            for engine in self._view.engines.values()
            if engine.shard in self._leads
            and (instance := instances.get(engine.instance)) is not None
            and self._minds(engine.instance, instance.model)
        ]

    def _endpoints(self, engine: EngineUp) -> dict[int, tuple[str, str]]:
        channels = {engine.pool_channel, engine.local_channel} & self._view.streams.keys()
        return {channel: self._view.endpoints(channel) for channel in sorted(channels)}

    def _minds(self, instance: str, model: str) -> bool:
        return self._row.text("instance") in ("", instance) and self._row.text("model") in ("", model)

    def _look_for_unknown(self, listed: Mapping[int, Listed]) -> None:
        """Spare ranks of streams that there are not: they were registered in another life, or for engines
        that went while nobody led."""
        now_s = self._view.now_s()
        model = self._row.text("model")
        before, self._unknown_s = self._unknown_s, {}
        if self._row.text("instance"):
            return
        for worker, row in listed.items():
            for rank in row.ranks:
                channel = rank - self._spare_rank
                mine = 0 <= channel < self._view.config.channels_max and model in ("", row.model)
                if mine and channel not in self._ranks:
                    self._unknown_s[worker, rank] = before.get((worker, rank), now_s)

    def _judge(self, worker: int, rank: int, row: Listed) -> Judged | None:
        since_s = self._unknown_s.get((worker, rank))
        if since_s is not None and self._view.now_s() - since_s >= UNKNOWN_S:
            return Judged(tuple({0, *(real for real in row.ranks if real < self._spare_rank)}), True)
        shard, real = self._ranks.get(rank - self._spare_rank, (-1, 0))
        if shard not in self._leads:
            return None
        return Judged((real,), shard in self._first and (worker, rank) not in self._made)

    async def _make(self, http: httpx.AsyncClient, call: Call, problems: list[str]) -> None:
        registers = isinstance(call, Registration)
        answer = await http.post("/register" if registers else "/unregister", json=call.body())
        if answer.status_code in DONE:
            self._counts["registrations" if registers else "removals"] += 1
            if registers:
                self._made.add((call.worker, call.rank))
            self._wake.set()
            return
        text = answer.text[:TEXT_MAX]
        if _made_before(registers, answer.status_code, text):
            return
        self._counts["refused"] += 1
        problems.append(f"worker {call.worker} rank {call.rank}: {answer.status_code} {text}")


def _present(wishes: list[Wish], listed: Mapping[int, Listed]) -> int:
    """Of how many engines the indexer had all our streams."""
    return sum(
        all(
            ours.worker in listed and listed[ours.worker].ranks.get(ours.rank) == ours.endpoint
            for ours in one.ours
        )
        for one in wishes
    )


def _made_before(registers: bool, status: int, text: str) -> bool:
    """Whether somebody was faster: the rank is there, or gone, already. What it is now is seen at the next
    look. Other conflicts (the worker is registered for another model, or the model with another block size)
    do not mend themselves."""
    if not registers:
        return status == 404
    return status == 409 and "dp_rank" in text and text.rstrip('"} ').endswith("already registered")
