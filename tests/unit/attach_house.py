"""A publisher as attachments see it, in a test's hands."""

import struct
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import zmq
import zmq.asyncio
from msgspec import Raw

from metaservice.core.windows import EXTERNAL, Gone, Run, Window
from metaservice.publish.emitters.port import Stream
from metaservice.publish.emitters.vllm import VllmEmitter
from metaservice.publish.feed import EngineUp, InstanceUp
from metaservice.publish.settings import PublishConfig
from metaservice.wire.tokens import pack_tokens

FIRST = 2**20
BLOCK_SIZE = 4


def key(number: int) -> bytes:
    """The key of a test's block; its event hash is 2**40 + number."""
    return struct.pack(">QQ", 7, 2**40 + number)


def run(*numbers: int, instance: str = "i", parent: int | None = None, node: str = "") -> Run:
    """Blocks in a row; block n has the tokens 4n..4n+3."""
    tokens = [pack_tokens(range(BLOCK_SIZE * n, BLOCK_SIZE * (n + 1))) for n in numbers]
    keys = b"".join(map(key, numbers))
    medium = "CPU" if node else EXTERNAL
    return Run(instance, medium, node, "", "", None if parent is None else key(parent), 16, keys, tokens)


class House:
    """A `View`: one shard, what is announced, and who may send."""

    def __init__(self) -> None:
        self.config = PublishConfig(port_base=20_000)
        self.context = zmq.asyncio.Context()
        self.curve = None
        self.emitter = VllmEmitter()
        self.engines: dict[str, EngineUp] = {}
        self.instances: dict[str, InstanceUp] = {}
        self.streams: dict[int, Stream] = {}
        self.places: dict[int, tuple[str, str]] = {}
        self.announced: dict[int, list[Run]] = {}
        self.leading = True
        self.clock_s = 1_000.0
        self.numbers = FIRST
        self.epochs = 2
        self.restated: list[tuple[int, str, str]] = []
        self.said: list[str] = []

    def __enter__(self) -> "House":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.context.destroy(linger=0)

    def add_instance(
        self, id: str = "i", model: str = "m", channel: int = 0, node: str = "", rank: int = 0
    ) -> None:
        """An instance (or one more channel of it)."""
        self.instances[id] = InstanceUp(
            0, id, "t", model, "", "", "tail64", BLOCK_SIZE, 16, "sha256_cbor", "vllm-none-hash", ""
        )
        topic = f"kv@{node or 'pool'}@{model}".encode()
        self.streams[channel] = Stream(
            channel, id, model, node, rank, BLOCK_SIZE, 16, "tail64", "", topic
        )  # fmt: skip
        base = 20_000 + 2 * channel
        self.places[channel] = (f"tcp://127.0.0.1:{base}", f"tcp://127.0.0.1:{base + 1}")

    def add_engine(self, id: str, worker: int = 0, channel: int = 0, **more: Any) -> EngineUp:
        """A live engine of instance `i`."""
        values: dict[str, Any] = {
            "shard": 0, "engine": id, "incarnation": "1", "instance": "i", "rank": 0, "node": "",
            "address": "", "worker_id": worker, "events": "", "replay": "", "dialect": "vllm",
            "pool_channel": channel, "local_channel": -1,
        }  # fmt: skip
        self.engines[id] = EngineUp(**(values | more))
        return self.engines[id]

    def window(self, *stored: Run, restated: Sequence[Run] = (), removed: Sequence[Gone] = ()) -> Window:
        """The next window."""
        self.numbers += 1
        return Window(
            0, self.numbers, self.numbers, 1_000 * self.numbers, [*stored], [*restated], [*removed], []
        )

    # ------------------------------------------------------------ as a View

    def endpoints(self, channel: int) -> tuple[str, str]:
        return self.places[channel]

    def may_send(self, shard: int) -> bool:
        return self.leading

    def number(self, shard: int) -> int:
        return self.numbers

    def epoch(self, shard: int) -> int:
        return self.epochs

    def events(self, channel: int, window: Window) -> Sequence[Raw]:
        return self.emitter.events(self.streams[channel], window)

    def batch(self, channel: int, window: Window) -> bytes:
        return self.emitter.batch(self.streams[channel], window)

    def runs(self, channel: int) -> Iterator[Run]:
        yield from self.announced.get(channel, [])

    def gone(self, channel: int) -> Iterator[Gone]:
        yield from ()

    def snapshot(self, channel: int) -> Iterator[Sequence[Raw]]:
        yield from self.emitter.snapshot(self.streams[channel], self.runs(channel), ())

    def withdrawal(self, channel: int) -> Iterator[Sequence[Raw]]:
        gone = (Gone(one.instance, one.medium, one.node, 16, one.keys) for one in self.runs(channel))
        yield from self.emitter.snapshot(self.streams[channel], (), gone)

    def restate(self, shard: int, instance: str, why: str) -> None:
        self.restated.append((shard, instance, why))

    def beat(self, shard: int) -> None:
        pass

    def say(self, level: str, text: str) -> None:
        self.said.append(text)

    def now_s(self) -> float:
        return self.clock_s
