"""What has to be said to Dynamo's indexer so that its registrations are what they should be.

Pure: from what is wanted and what `GET /workers` lists to calls, in order. Facts about the indexer that
decide here:

- our stream is registered for every worker under a spare rank, while its batches name the real rank, which
  overrides. So what we told is kept under the real rank, and outlives the spare one's registration as long
  as the worker has any other. A worker that is gone has its real rank cleared too: the indexer never expires
  anybody, and what a dead process had would be scored for ever;
- to unregister a rank drops what is kept under it. For a rank that nobody registered, it is registered with
  an endpoint where nobody is and unregistered at once;
- to unregister without naming the routing group takes away all ranks of a worker, whatever rank was named;
- a registration cannot be changed, only taken away and made anew. A new one begins with a replay from 0.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from metaservice.publish.attach.names import group_name, worker_number
from metaservice.publish.feed import EngineUp, InstanceUp

NOBODY = "tcp://127.0.0.1:9"
"""An endpoint where nobody is."""
TAKEN_MAX = 4_096
"""Streams of engines that are gone which would be registered again: the last so many."""


class Registration(NamedTuple):
    """One stream of one worker at the indexer."""

    worker: int
    rank: int
    endpoint: str
    replay: str
    model: str
    group: str
    block_size_tokens: int

    def body(self) -> dict[str, Any]:
        """Of `POST /register`."""
        body = {
            "instance_id": self.worker,
            "dp_rank": self.rank,
            "endpoint": self.endpoint,
            "model_name": self.model,
            "routing_group": self.group,
            "block_size": self.block_size_tokens,
        }
        return body | ({"replay_endpoint": self.replay} if self.replay else {})


class Removal(NamedTuple):
    """One rank of one worker that is to be unregistered."""

    worker: int
    rank: int
    model: str
    group: str

    def body(self) -> dict[str, Any]:
        """Of `POST /unregister`."""
        return {
            "instance_id": self.worker,
            "dp_rank": self.rank,
            "model_name": self.model,
            "routing_group": self.group,
        }


Call = Registration | Removal


class Listed(NamedTuple):
    """A worker as the indexer lists it."""

    model: str
    group: str
    block_size_tokens: int
    ranks: Mapping[int, str]
    """Endpoints by rank."""


class Wish(NamedTuple):
    """An engine as it should be known there."""

    worker: int
    rank: int
    """The engine's own."""
    incarnation: str
    own: Registration | None
    """Its own stream, when it told where that is."""
    ours: tuple[Registration, ...]
    """Our streams for it, under spare ranks."""


def listed_workers(body: Any) -> dict[int, Listed]:
    """What `GET /workers` answered. Raises KeyError, TypeError or ValueError for anything else."""
    return {
        int(row["instance_id"]): Listed(
            row["model_name"],
            row["routing_group"],
            int(row["block_size"]),
            {int(rank): str(endpoint) for rank, endpoint in row["endpoints"].items()},
        )
        for row in body
    }


def wish(
    engine: EngineUp,
    instance: InstanceUp,
    endpoints: Mapping[int, tuple[str, str]],
    spare_rank: int,
) -> Wish:
    """How an engine of an instance should be registered. `endpoints`: live and replay of its channels. Each
    channel has a spare rank of its own: several engines may share a worker's number (one a rank, one an
    adapter), and each rank is one source."""
    worker = worker_number(engine)

    def registration(rank: int, endpoint: str, replay: str) -> Registration:
        return Registration(
            worker,
            rank,
            endpoint,
            replay,
            instance.model,
            group_name(instance),
            instance.block_size_tokens,
        )

    ours = tuple(registration(spare_rank + channel, *both) for channel, both in endpoints.items())
    own = registration(engine.rank, engine.events, engine.replay) if engine.events else None
    return Wish(worker, engine.rank, engine.incarnation, own, ours)


class Books:
    """What is remembered between looks: which engines' own streams were taken away with their engine, and
    which incarnation was last registered."""

    def __init__(self) -> None:
        self.taken: dict[tuple[int, int], str] = {}
        """(worker, rank) -> the endpoint of the engine's own stream when it was unregistered."""
        self.incarnations: dict[tuple[int, int], str] = {}

    def prune(self, wished: Iterable[tuple[int, int]]) -> None:
        """Forget what came and will not come back: the engines' names may be new ones with every start."""
        alive = set(wished)
        self.incarnations = {key: life for key, life in self.incarnations.items() if key in alive}
        for key in list(self.taken)[: max(0, len(self.taken) - TAKEN_MAX)]:
            del self.taken[key]


class Judged(NamedTuple):
    """What one of our spare ranks that the indexer lists is about."""

    ranks: tuple[int, ...]
    """The real ranks that its stream's batches named."""
    lost: bool
    """What was told under it is of a history, or a stream, that is no more: nobody would ever take it back,
    so all that is kept under the real ranks is dropped and told again."""


Judge = Callable[[int, int, Listed], Judged | None]
"""Of a worker, a rank and how it is listed; None when it is not ours to judge."""


def plan(
    wishes: Iterable[Wish],
    listed: Mapping[int, Listed],
    judge: Judge,
    books: Books,
    *,
    engine_streams: bool,
) -> list[Call]:
    """The calls, in order. `engine_streams`: register the engines' own streams too."""
    wishes = list(wishes)
    wished = {(one.worker, one.rank): one for one in wishes}
    wanted = {(ours.worker, ours.rank): ours for one in wishes for ours in one.ours}
    now = {worker: dict(row.ranks) for worker, row in listed.items()}
    calls: list[Call] = []

    def take_away(worker: int, rank: int) -> None:
        row = listed[worker]
        del now[worker][rank]
        calls.append(Removal(worker, rank, row.model, row.group))

    def add(row: Registration) -> None:
        now.setdefault(row.worker, {})[row.rank] = row.endpoint
        calls.append(row)

    for worker, row in listed.items():
        gone: set[int] = set()
        lost: set[int] = set()
        for rank, endpoint in row.ranks.items():
            judged = judge(worker, rank, row)
            if judged is None:
                continue
            want = wanted.get((worker, rank))
            if want is None or judged.lost:
                take_away(worker, rank)
                (lost if judged.lost else gone).update(judged.ranks)
            elif (endpoint, row.model, row.group) != (want.endpoint, want.model, want.group):
                take_away(worker, rank)
        for real in sorted(lost | {real for real in gone if (worker, real) not in wished}):
            same = (one.ours for one in wishes if (one.worker, one.rank) == (worker, real))
            for ours in chain.from_iterable(same):  # what they told is kept there too, and goes with it
                if ours.rank in now[worker]:
                    take_away(worker, ours.rank)
            calls += _bury(worker, real, row, now[worker], books)
    for key, one in wished.items():
        calls_before = len(calls)
        _own(one, now, books, add, engine_streams=engine_streams)
        before = books.incarnations.get(key, one.incarnation)
        if before != one.incarnation and calls_before == len(calls):
            _renew(one, listed, now, take_away, add)
        books.incarnations[key] = one.incarnation
    for want in wanted.values():
        if want.rank not in now.get(want.worker, {}):
            add(want)
    books.prune(wished)
    return calls


def _bury(worker: int, real: int, row: Listed, left: dict[int, str], books: Books) -> list[Call]:
    """Drop what is kept of a rank whose engine is gone; with the last registration all of the worker goes."""
    if not left:
        return []
    removal = Removal(worker, real, row.model, row.group)
    if real in left:
        books.taken[worker, real] = left.pop(real)
        return [removal]
    # Nobody fed it but we: a registration to be taken away is what makes the indexer drop it.
    return [Registration(worker, real, NOBODY, "", row.model, row.group, row.block_size_tokens), removal]


def _own(
    one: Wish,
    now: Mapping[int, Mapping[int, str]],
    books: Books,
    add: Callable[[Registration], None],
    *,
    engine_streams: bool,
) -> None:
    """The engine's own stream: one that was taken away with the engine comes back with it."""
    if one.rank in now.get(one.worker, {}):
        return
    endpoint = books.taken.pop((one.worker, one.rank), "")
    if endpoint and one.own is not None:
        add(one.own._replace(endpoint=endpoint))
    elif endpoint and one.ours:
        add(one.ours[0]._replace(rank=one.rank, endpoint=endpoint, replay=""))
    elif engine_streams and one.own is not None:
        add(one.own)


def _renew(
    one: Wish,
    listed: Mapping[int, Listed],
    now: Mapping[int, Mapping[int, str]],
    take_away: Callable[[int, int], None],
    add: Callable[[Registration], None],
) -> None:
    """Another process came under the same number. Its stream begins at 0 again, which the indexer takes for
    stale until the old one's last number is passed; and what the old process had is still there."""
    endpoint = now.get(one.worker, {}).get(one.rank)
    if endpoint is None or one.own is None or one.worker not in listed:
        return
    take_away(one.worker, one.rank)
    add(one.own._replace(endpoint=endpoint))
    for ours in one.ours:  # what was told of the pool went with it: a replay from 0 brings it back
        if ours.rank in now.get(one.worker, {}) and ours.rank in listed[one.worker].ranks:
            take_away(one.worker, ours.rank)
