"""A publisher process with a feeder in place of a replica, and consumers with real sockets."""

import asyncio
import random
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from metaservice.clock import lease_s
from metaservice.core.windows import CPU, EXTERNAL, Gone, Run, Window
from metaservice.publish import feed
from metaservice.publish.host import Publisher
from metaservice.publish.settings import PublishConfig
from metaservice.wire.tokens import pack_tokens

FIRST = 1 << 20
END = 2**64 - 1
BLOCK = 16
KEY_BYTES = 32
LEASE_S = 3600.0


def key_of(number: int) -> bytes:
    """A key whose event hash is `number` + 2**32."""
    return number.to_bytes(KEY_BYTES - 8, "big") + (number + 2**32).to_bytes(8, "big")


def hash_of(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def tokens_of(number: int) -> bytes:
    return pack_tokens([(number * 7 + at) % 30_000 for at in range(BLOCK)])


def run_of(
    numbers: Sequence[int],
    parent: int | None = None,
    *,
    instance: str = "i",
    node: str = "",
    medium: str = "",
) -> Run:
    """A chain of blocks; in the pool unless a node is named."""
    medium = medium or (CPU if node else EXTERNAL)
    keys = b"".join(map(key_of, numbers))
    tokens = [tokens_of(number) for number in numbers]
    above = None if parent is None else key_of(parent)
    return Run(instance, medium, node, "", "", above, KEY_BYTES, keys, tokens)


def gone_of(numbers: Sequence[int], *, instance: str = "i", node: str = "", medium: str = "") -> Gone:
    medium = medium or (CPU if node else EXTERNAL)
    return Gone(instance, medium, node, KEY_BYTES, b"".join(map(key_of, numbers)))


def instance_up(
    name: str = "i", *, shard: int = 0, tenant: str = "t", base: str = "", lora: str = ""
) -> feed.InstanceUp:
    return feed.InstanceUp(
        shard, name, tenant, "m", "m", lora, "tail64", BLOCK, KEY_BYTES, "sha256_cbor", "", "", base
    )  # fmt: skip


def engine_up(
    name: str = "e",
    *,
    shard: int = 0,
    instance: str = "i",
    rank: int = 0,
    node: str = "n",
    pool: int = 0,
    local: int = 1,
) -> feed.EngineUp:
    return feed.EngineUp(shard, name, "1", instance, rank, node, "", 0, "", "", "vllm", pool, local)


class Index:
    """What a router knows of one stream, by the strictest rules there are: a block that is stored twice, or
    whose parent is unknown, is a fault."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, str], tuple[int | None, tuple[int, ...]]] = {}
        self._names: Counter[int] = Counter()
        self.loras: Counter[str | None] = Counter()
        self.watermark = -1
        self.faults: list[str] = []

    def take(self, number: int, payload: bytes) -> bool:
        """Whether it was new. Numbers that are not the next one are for the caller to judge."""
        if number == END:
            self.watermark = -1
            return False
        if number <= self.watermark:
            return False
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            medium = event["medium"]
            if event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    if self.blocks.pop((name, medium), None) is not None:
                        self._names[name] -= 1
                continue
            parent = event["parent_block_hash"]
            size = event["block_size"]
            for row, name in enumerate(event["block_hashes"]):
                if (name, medium) in self.blocks:
                    self.faults.append(f"{name} is stored twice, the second time by {number}")
                if parent is not None and not self._names[parent]:
                    self.faults.append(f"{name} in {number} hangs on {parent}, which is unknown")
                ids = tuple(event["token_ids"][row * size : (row + 1) * size])
                self.blocks[name, medium] = parent, ids
                self._names[name] += 1
                self.loras[event["lora_name"]] += 1
                parent = name
        self.watermark = number
        return True

    @property
    def names(self) -> set[int]:
        """The blocks that it knows."""
        return {name for name, _ in self.blocks}


class Model:
    """What is announced, and the windows that lead there."""

    def __init__(self, seed: int, *, shard: int = 0, instance: str = "i", node: str = "") -> None:
        self.random = random.Random(seed)
        self.shard = shard
        self.instance = instance
        self.node = node
        self.number = FIRST - 1
        self.now_ms = 1_700_000_000_000
        self.blocks: dict[int, int | None] = {}
        self.fresh = 0
        self._chains: deque[list[int]] = deque()
        self._long: list[int] = []

    def window(
        self,
        stored: Iterable[Run] = (),
        removed: Iterable[Gone] = (),
        restated: Iterable[Run] = (),
        again: Iterable[Gone] = (),
    ) -> Window:
        self.number += 1
        self.now_ms += 10
        return Window(
            self.shard,
            self.number,
            self.number,
            self.now_ms,
            list(stored),
            list(restated),
            list(removed),
            list(again),
        )

    def grow(self, count: int, parent: int | None = None) -> Run:
        """A chain of new blocks."""
        numbers = range(self.fresh, self.fresh + count)
        self.fresh += count
        above = parent
        for number in numbers:
            self.blocks[number] = above
            above = number
        return run_of(numbers, parent, instance=self.instance, node=self.node)

    def churn(self) -> Window:
        """A chain comes, one that came a while ago goes, and a long one is told again, so that it is much to
        send."""
        if not self._chains:
            self._long = [*range(self.fresh, self.fresh + 64)]
            self._chains.append([])
            return self.window([self.grow(64)])
        self._chains.append([*range(self.fresh, self.fresh + 16)])
        stored = self.grow(16)
        old = self._chains.popleft() if len(self._chains) > 40 else []
        for number in old:
            del self.blocks[number]
        return self.window([stored], [gone_of(old)] if old else [], [run_of(self._long)])

    def prune(self, count: int) -> Gone:
        """Leaves that go."""
        gone: list[int] = []
        for _ in range(count):
            parents = set(self.blocks.values())
            leaves = [number for number in self.blocks if number not in parents]
            if not leaves:
                break
            leaf = self.random.choice(leaves)
            del self.blocks[leaf]
            gone.append(leaf)
        return gone_of(gone, instance=self.instance, node=self.node)

    def step(self) -> Window:
        """Some blocks come, some go, some are told again."""
        chance = self.random
        removed = [self.prune(chance.randint(1, 4))] if chance.random() < 0.3 else []
        parent = chance.choice(list(self.blocks)) if self.blocks and chance.random() < 0.6 else None
        stored = [self.grow(chance.randint(1, 8), parent)] if chance.random() < 0.7 else []
        return self.window(stored, removed)

    def runs(self) -> list[Run]:
        """All that stands, in an order in which children may come before their parents."""
        numbers = list(self.blocks)
        self.random.shuffle(numbers)
        return [
            run_of([number], self.blocks[number], instance=self.instance, node=self.node)
            for number in numbers
        ]

    def wanted(self) -> set[int]:
        return {hash_of(key_of(number)) for number in self.blocks}


class House:
    """A publisher with this replica's side of it."""

    def __init__(self, config: PublishConfig) -> None:
        self.config = config
        self.publisher = Publisher(config, lease_s)
        self.begun = asyncio.Event()
        self.restates: list[tuple[int, str, str]] = []
        self.beats: list[int] = []
        self.publisher.on_begin = self._begin
        self.publisher.on_restate = lambda *words: self.restates.append(words)
        self.publisher.on_beat = self._beat
        self.told: Callable[[], None] = lambda: None
        self.beat: Callable[[int], None] = lambda _: None

    def _begin(self) -> None:
        self.begun.set()
        self.told()

    def _beat(self, shard: int) -> None:
        self.beats.append(shard)
        self.beat(shard)

    def tell_standing(
        self,
        model: Model,
        *,
        leads: bool = True,
        epoch: int = 1,
        lease_for_s: float = LEASE_S,
        instances: Sequence[feed.InstanceUp] | None = None,
        engines: Sequence[feed.EngineUp] | None = None,
        tombstones: Sequence[Gone] = (),
    ) -> None:
        """From `Begin` to `Ready`, as it stands."""
        tell, shard = self.publisher.tell, model.shard
        tell(feed.Begin(shard, model.number))
        for instance in [instance_up(shard=shard)] if instances is None else instances:
            tell(instance)
        for engine in [engine_up(shard=shard)] if engines is None else engines:
            tell(engine)
        if leads:
            self.lead(shard, epoch, lease_for_s)
        if model.blocks:
            tell(feed.Standing(shard, model.runs()))
        tell(feed.Tombstones(shard, list(tombstones)))
        tell(feed.Ready(shard))

    def lead(self, shard: int = 0, epoch: int = 1, lease_for_s: float = LEASE_S) -> None:
        self.publisher.fence(shard, epoch, lease_s() + lease_for_s)
        self.publisher.tell(feed.Leads(shard, True, epoch))

    def resign(self, shard: int = 0, epoch: int = 1) -> None:
        self.publisher.fence(shard, epoch, 0.0)
        self.publisher.tell(feed.Leads(shard, False, epoch))

    async def status(self) -> Any:
        body = await self.publisher.ask("status", msgspec.msgpack.encode({}), 5_000)
        return msgspec.msgpack.decode(body)

    async def settled(self, timeout_s: float = 10.0) -> Any:
        """Once it has taken all that it was told: its answer comes after that."""
        async with asyncio.timeout(timeout_s):
            return await self.status()

    async def joined(self, channel: int = 0, count: int = 1) -> None:
        """Once so many subscribe to a stream."""
        streams: list[Any] = []
        try:
            async with asyncio.timeout(15):
                while True:
                    streams = (await self.status())["streams"]
                    if any(one["channel"] == channel and one["subscribers"] == count for one in streams):
                        return
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"not {count} subscribers of {channel}: {streams}") from None

    def endpoint(self, channel: int = 0) -> str:
        return f"tcp://127.0.0.1:{self.config.port(channel)}"

    def replay_endpoint(self, channel: int = 0) -> str:
        return f"tcp://127.0.0.1:{self.config.port(channel) + 1}"


PORTS = range(20_000, 32_000, 16)
"""Below those that the kernel gives to connections: a port that is free stays free until it is bound."""


def free_ports(count: int = 16) -> int:
    """The first of so many ports in a row, at most 16, that nobody listens on."""
    while True:
        base = random.choice(PORTS)
        try:
            for port in range(base, base + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return base


@asynccontextmanager
async def open_house(port_base: int = 0, **settings: Any) -> AsyncIterator[House]:
    config = PublishConfig(
        port_base=port_base or free_ports(), channels_max=settings.pop("channels_max", 8), **settings
    )
    house = House(config)
    await house.publisher.start()
    try:
        yield house
    finally:
        await house.publisher.close()


class Subscriber:
    """A SUB and a DEALER, as Dynamo has them."""

    def __init__(
        self, context: zmq.asyncio.Context, house: House, channel: int = 0, *, hwm: int = 100_000
    ) -> None:
        self.sub = context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.LINGER, 0)
        self.sub.setsockopt(zmq.RCVHWM, hwm)
        if hwm < 100:  # the kernel is not to keep for it what it does not
            self.sub.setsockopt(zmq.RCVBUF, 4_096)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.setsockopt(zmq.RECONNECT_IVL, 20)
        self.sub.connect(house.endpoint(channel))
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.setsockopt(zmq.RCVHWM, hwm)
        self.dealer.setsockopt(zmq.RECONNECT_IVL, 20)
        self.dealer.connect(house.replay_endpoint(channel))
        self.index = Index()
        self.gaps = 0
        self.replayed = 0
        self.ends = 0

    async def receive(self, timeout_s: float = 5.0) -> tuple[bytes, int, bytes]:
        async with asyncio.timeout(timeout_s):
            topic, number, payload = await self.sub.recv_multipart()
        return topic, int.from_bytes(number, "big"), payload

    async def replay(self, start: int, timeout_s: float = 20.0) -> list[tuple[int, bytes]]:
        """The batches up to END."""
        await self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        told: list[tuple[int, bytes]] = []
        async with asyncio.timeout(timeout_s):
            while True:
                empty, _, number, payload = await self.dealer.recv_multipart()
                assert empty == b""
                if number == b"\xff" * 8:
                    return told
                told.append((int.from_bytes(number, "big"), payload))

    async def follow(self, until: int, timeout_s: float = 20.0) -> None:
        """Take what comes, and replays of what is missing, until window `until` was taken."""
        async with asyncio.timeout(timeout_s):
            while self.index.watermark < until:
                _, number, payload = await self.receive(timeout_s)
                if number == END:
                    self.ends += 1
                elif number > self.index.watermark + 1:
                    self.gaps += 1
                    for replayed, told in await self.replay(self.index.watermark + 1):
                        self.replayed += self.index.take(replayed, told)
                self.index.take(number, payload)

    def close(self) -> None:
        self.sub.close()
        self.dealer.close()
