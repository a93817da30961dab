"""What the service knows of a real vLLM engine's cache is what that engine's block pool says of itself: after
frames were lost, after it was killed and began anew at 0, and nothing when it is dead."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from struct import pack
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from metaservice.cli.local.places import HOST, free_port
from metaservice.cli.local.process import launch_command
from metaservice.publish.feed import EngineDown, EngineUp, InstanceUp
from metaservice.publish.ingest.ingest import Ingest
from metaservice.publish.ingest.limits import IngestLimits
from metaservice.wire.schemas_events import RouteAnswer, RouteAsk
from tests.accept.handle import ENVIRONMENT
from tests.accept.messages import BLOCK_SIZE_TOKENS, Answer, EngineOptions, Job, Ready
from tests.vllm.engine_house import prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCKS = 9
POOL_BLOCKS = 64
"""So few that engines have to forget some all the time."""
ENGINE = "vllm-1"
START_TIMEOUT_S = 180.0
WAIT_S = 20.0
LIMITS = IngestLimits(probe_ms=1_000, replay_idle_ms=1_000)


class PoolEngineProcess:
    """A real engine in its own process, which publishes its events at fixed ports."""

    def __init__(self, model: Path, folder: Path, ports: Sequence[int]) -> None:
        arguments = {
            "max_model_len": 512,
            "num_gpu_blocks_override": POOL_BLOCKS,
            "prefix_caching_hash_algo": "sha256_cbor",
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{ports[0]}",
                "replay_endpoint": f"tcp://*:{ports[1]}",
                "topic": "kv-events",
            },
        }
        options = msgspec.json.encode(EngineOptions(model=str(model), arguments=arguments)).decode()
        with (folder / "engine.log").open("ab") as log:
            self._process = subprocess.Popen(
                launch_command([sys.executable, "-m", "tests.vllm.pool_engine", options]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, line)

    async def _next(self, timeout_s: float) -> Ready | Answer:
        line = await asyncio.wait_for(self._inbox.get(), timeout_s)
        return msgspec.json.decode(line, type=Ready | Answer)

    async def ready(self) -> None:
        assert isinstance(await self._next(START_TIMEOUT_S), Ready)

    async def do(self, *jobs: Job) -> list[Answer]:
        """All at once."""
        assert self._process.stdin is not None
        for job in jobs:
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()
        answers = [await self._next(WAIT_S) for _ in jobs]
        return [answer for answer in answers if isinstance(answer, Answer)]

    async def ask(self, *asked: Sequence[int], salt: str = "") -> list[Answer]:
        return await self.do(
            *(
                Job(op="ask", id=f"{row}", tokens=list(one), max_tokens=3, salt=salt)
                for row, one in enumerate(asked)
            )
        )

    async def pool(self) -> set[int]:
        """Its own truth: what its prefix cache has."""
        (answer,) = await self.do(Job(op="counts"))
        return {int(key, 16) for key in answer.keys}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class LossyWire:
    """Between the engine's publisher and whoever follows it: loses frames, by chance."""

    def __init__(self, context: zmq.asyncio.Context, port: int, seed: int) -> None:
        self._in = context.socket(zmq.SUB)
        self._in.connect(f"tcp://{HOST}:{port}")
        self._in.subscribe(b"")
        self._out = context.socket(zmq.PUB)
        self.port = self._out.bind_to_random_port(f"tcp://{HOST}")
        self._random = Random(seed)
        self.loss = 0.0
        self.lost = self.passed = 0
        self._task = asyncio.create_task(self._pass())

    async def _pass(self) -> None:
        while True:
            frames = await self._in.recv_multipart()
            if self._random.random() < self.loss:
                self.lost += 1
                continue
            self.passed += 1
            await self._out.send_multipart(frames)

    def close(self) -> None:
        self._task.cancel()
        self._in.close(linger=0)
        self._out.close(linger=0)


class Nothing:
    """Nothing is announced."""

    def find(self, instance: str, keys: Sequence[bytes]) -> list[Any]:
        return []


class Service:
    """The part of the service that follows engines."""

    def __init__(self) -> None:
        self.cleared: list[tuple[str, str]] = []
        now_s = asyncio.get_running_loop().time
        self.ingest = Ingest(Nothing(), lambda *who: self.cleared.append(who), lambda *_: None, now_s, LIMITS)
        self.ingest.instance_up(
            InstanceUp(
                0,
                "i0",
                "t0",
                "m",
                "m",
                "",
                "tail64",
                BLOCK_SIZE_TOKENS,
                32,
                "sha256_cbor",
                "vllm-none-hash",
                "",
            )
        )

    def follow(self, events: int, replay: int, incarnation: str = "one") -> None:
        self.ingest.engine_up(
            EngineUp(
                0, ENGINE, incarnation, "i0", 0, "n0", f"{HOST}:8000", 1,
                f"tcp://{HOST}:{events}", f"tcp://{HOST}:{replay}", "vllm", 0, -1,
            )
        )  # fmt: skip

    def held(self) -> set[int]:
        member = self.ingest.holdings.get(ENGINE)
        return set(member.own.hashes(0)) if member else set()

    async def equals(self, engine: PoolEngineProcess) -> set[int]:
        """Returns when the view is the engine's own, which nothing changes meanwhile."""
        truth = await engine.pool()
        await until(
            lambda: self.held() == truth, lambda: f"{len(self.held())} blocks, the engine has {len(truth)}"
        )
        return truth

    async def route(self, **given: Any) -> int:
        """How many blocks of a prompt the engine has, as a router is told."""
        ask = RouteAsk(
            **{"instance": "i0", "keys": [], "token_ids": b"", "lora": "", "salt": "", "top_k": 0, **given}
        )
        body = await self.ingest.route(msgspec.msgpack.encode(ask))
        answer = msgspec.msgpack.decode(body, type=RouteAnswer)
        return answer.engines[0].tiers.gpu if answer.engines else 0


async def until(done: Callable[[], bool], why: Callable[[], str] = str) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + WAIT_S
    while not done():
        assert loop.time() < end_s, why()
        await asyncio.sleep(0.05)


@asynccontextmanager
async def service() -> AsyncIterator[Service]:
    found = Service()
    await found.ingest.start()
    try:
        yield found
    finally:
        await found.ingest.close()


def u32(tokens: Sequence[int]) -> bytes:
    return pack(f"<{len(tokens)}I", *tokens)


async def test_the_view_is_the_engines_own_after_a_gap_a_restart_at_zero_and_its_death(
    models: Callable[[str], Path], tmp_path: Path, seed: int = 11
) -> None:
    print(f"seed {seed}")
    model = models("llama")
    asked = prompts(model, 12, BLOCKS)
    ports = [free_port(), free_port()]
    context = zmq.asyncio.Context()
    engine = PoolEngineProcess(model, tmp_path, ports)
    wire = LossyWire(context, ports[0], seed)
    try:
        async with service() as known:
            await engine.ready()
            await engine.ask(asked[0])  # before anybody listens
            known.follow(wire.port, ports[1])
            await known.equals(engine)

            wire.loss = 0.5
            for row in [*range(1, 12), *range(1, 12)]:
                await engine.ask(
                    asked[row], asked[row], asked[row - 1]
                )  # the same at once: blocks with copies
            wire.loss = 0.0
            answers = [*await engine.ask(asked[10]), *await engine.ask(asked[11], salt="acme")]
            truth = await known.equals(engine)
            stats = known.ingest.stats()
            assert wire.lost > 5
            assert stats["ingest_gaps_total"] > 0
            assert (stats["ingest_gaps_lost_total"], stats["ingest_restarts_total"]) == (0, 0)
            assert stats["ingest_removed_total"] > POOL_BLOCKS, "it had to forget"
            assert len(truth) > POOL_BLOCKS // 2
            keys = [bytes.fromhex(key) for key in answers[0].keys]
            assert await known.route(keys=keys) == await known.route(token_ids=u32(asked[10])) == BLOCKS
            assert await known.route(token_ids=u32(asked[11]), salt="acme") == BLOCKS
            assert await known.route(token_ids=u32(asked[11]), salt="zeta") == 0

            (reset,) = await engine.do(Job(op="reset"))
            assert reset.finish == "reset"
            await engine.ask(asked[0])
            assert len(await known.equals(engine)) == BLOCKS
            assert known.cleared == [("i0", ENGINE)]
            known.ingest.engine_down(EngineDown(0, ENGINE, "left"))

            known.follow(ports[0], ports[1], "two")
            await known.equals(engine)
            engine.kill()
            await asyncio.sleep(0.5)
            assert known.held(), "a process that is gone says nothing; that it is dead is said by its lease"
            engine = PoolEngineProcess(model, tmp_path, ports)
            await engine.ready()
            await engine.ask(*asked[4:6])
            truth = await known.equals(engine)
            assert len(truth) == 2 * BLOCKS
            assert known.ingest.stats()["ingest_restarts_total"] == 1

            engine.kill()
            known.ingest.engine_down(EngineDown(0, ENGINE, "expired"))
            assert known.held() == set()
            assert known.ingest.stats()["holdings_entries"] == 0
    finally:
        engine.kill()
        wire.close()
        context.destroy(linger=0)
