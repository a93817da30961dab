"""What the tests of the ingest share: an engine with caches of its own, as vLLM tells of them."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import msgspec

from metaservice.publish.feed import EngineUp, InstanceUp
from metaservice.publish.hashes import token_root
from metaservice.publish.holdings import Holdings, Member, Room
from metaservice.publish.ingest.dialect import DialectReader
from metaservice.publish.ingest.events import EngineEvents
from metaservice.publish.ingest.limits import IngestLimits
from metaservice.publish.packing import pack_windows, raw_ids

BLOCK = 4
"""Tokens of a block."""
LIMITS = IngestLimits()
MEDIA = ("GPU", "CPU", "STORAGE", "EXTERNAL")


def instance_up(**given: Any) -> InstanceUp:
    fields: dict[str, Any] = {
        "shard": 0,
        "instance": "i0",
        "tenant": "t0",
        "model": "m",
        "routing_group": "m",
        "lora": "",
        "hash_of": "tail64",
        "block_size_tokens": BLOCK,
        "key_length": 32,
        "hash_scheme": "other",
        "hash_seed": "",
        "canary": "",
    }
    return InstanceUp(**{**fields, **given})


def engine_up(engine: str = "e0", **given: Any) -> EngineUp:
    fields: dict[str, Any] = {
        "shard": 0,
        "engine": engine,
        "incarnation": "life-1",
        "instance": "i0",
        "rank": 0,
        "node": "n0",
        "address": "127.0.0.1:8000",
        "worker_id": 1,
        "events": "",
        "replay": "",
        "dialect": "vllm",
        "pool_channel": 0,
        "local_channel": -1,
    }
    return EngineUp(**{**fields, **given})


def batch(*events: Any, ts: float = 1.0, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


def stored(
    hashes: Sequence[int | bytes], tokens: Sequence[Any], parent: int | bytes | None = None, **given: Any
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **given,
    }


def removed(hashes: Sequence[int | bytes], medium: str | None = "GPU", **given: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, **given}


CLEARED = {"type": "AllBlocksCleared"}


def names(count: int, first: int = 0) -> list[int]:
    """Hashes as engines make them, of no meaning."""
    return [(2**40 + 7 * (first + row)) for row in range(count)]


def ids(count: int, first: int = 0) -> list[int]:
    """Token ids of so many blocks."""
    return list(range(first, first + count * BLOCK))


def packed(tokens: Sequence[int], block: int = BLOCK) -> list[bytes]:
    return pack_windows(raw_ids(tokens), block, block, len(tokens) // block)


ROOT = token_root()


class Desk:
    """One engine's events, taken in without any socket."""

    def __init__(
        self,
        dialect: str = "vllm",
        limits: IngestLimits = LIMITS,
        instance: InstanceUp | None = None,
        up: EngineUp | None = None,
    ) -> None:
        self.room = Room(limits.entries_max, limits.entries_per_engine_max, limits.orphans_per_engine_max)
        self.holdings = Holdings(self.room)
        self.instance = instance or instance_up()
        self.member: Member = self.holdings.add(up or engine_up(dialect=dialect), dialect == "vllm")
        self.tally: Counter[str] = Counter()
        self.bad: Counter[str] = Counter()
        self.told_cleared: list[tuple[str, str]] = []
        self.reader = DialectReader(dialect, self.bad)
        self.events = EngineEvents(
            self.member,
            self.instance,
            limits,
            self.tally,
            self.bad,
            lambda instance, engine: self.told_cleared.append((instance, engine)),
        )

    def take(self, payload: bytes) -> None:
        """One batch."""
        asyncio.run(self.taking(payload))

    async def taking(self, payload: bytes) -> None:
        found = self.reader.read(payload)
        if found is not None:
            await self.events.take(found)

    def held(self, tier: int = 0) -> set[int]:
        return set(self.member.own.hashes(tier))

    def everything(self) -> list[set[int]]:
        return [self.held(tier) for tier in range(4)]


class ToyEngine:
    """An engine as vLLM is one: it may hold a block several times, tells each copy that comes and goes,
    numbers its batches from 0 in each life, and keeps the last of them for replays."""

    def __init__(self, random: Random, retained: int = 10_000) -> None:
        self.random = random
        self.log: deque[tuple[int, bytes]] = deque(maxlen=retained)
        self.number = 0
        self.clock_s = 1_000.0
        self.copies: list[Counter[int]] = [Counter() for _ in MEDIA]
        self.chains: list[list[tuple[int, list[int]]]] = []

    def restart(self) -> None:
        """It begins anew, with nothing."""
        self.log.clear()
        self.number = 0
        self.clock_s += 1.0
        for copies in self.copies:
            copies.clear()
        self.chains.clear()

    def holds(self) -> list[set[int]]:
        """Its own truth, by tier."""
        return [set(+copies) for copies in self.copies]

    def step(self) -> tuple[int, bytes]:
        """It does something, and publishes it."""
        events = [self._event() for _ in range(self.random.randint(0, 3))]
        self.clock_s += 0.01
        told = self.number, batch(*events, ts=self.clock_s)
        self.log.append(told)
        self.number += 1
        return told

    def replay(self, start: int) -> Iterable[tuple[int, bytes]]:
        return [(number, payload) for number, payload in self.log if number >= start]

    def _event(self) -> dict[str, Any]:
        random = self.random
        dice = random.random()
        tier = random.choice((0, 0, 0, 1, 2, 3))
        held = sorted(+self.copies[tier])
        if dice < 0.03:
            for copies in self.copies:
                copies.clear()
            self.chains.clear()
            return CLEARED
        if dice < 0.35 and held:
            gone = random.sample(held, min(len(held), random.randint(1, 3)))
            self.copies[tier].subtract(gone)
            return removed(gone, MEDIA[tier])
        again = dice < 0.55 and self.chains
        run = random.choice(self.chains) if again else self._grow()  # another copy, perhaps in another tier
        self.copies[tier].update([block for block, _ in run])
        return stored(
            [block for block, _ in run], [one for _, tokens in run for one in tokens], medium=MEDIA[tier]
        )

    def _grow(self) -> list[tuple[int, list[int]]]:
        run = list(self.random.choice(self.chains)) if self.chains and self.random.random() < 0.5 else []
        for _ in range(self.random.randint(1, 4)):
            run.append(
                (self.random.getrandbits(63) | 2**33, [self.random.randrange(1000) for _ in range(BLOCK)])
            )
        self.chains.append(run)
        return run


def until(done: Callable[[], bool], timeout_s: float = 5.0) -> Any:
    """To be awaited: returns when it is so, fails when it never is."""

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while not done():
            assert loop.time() < end_s, "it never came"
            await asyncio.sleep(0.01)

    return wait()
