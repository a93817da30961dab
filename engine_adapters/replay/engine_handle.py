"""The demo's end of an engine process: hand it a request, hear its steps, know when it died."""

import asyncio
from collections.abc import Callable

import msgspec

from engine_adapters.replay.children import Child
from engine_adapters.replay.messages import Done, EngineMessage, Job, Phase, Ready, Step
from engine_adapters.replay.requests import Request

READY_TIMEOUT_S = 60.0


class EngineDied(Exception):
    """The engine ended before it answered."""


class EngineHandle:
    """One running engine process. It has one request at a time."""

    def __init__(self, name: str, child: Child, on_phase: Callable[["EngineHandle", Phase], None]) -> None:
        self.name = name
        self.child = child
        self.step: Step | None = None
        """The last step that the engine told of its current request; kept when it died in it."""
        self.job_index: int | None = None
        self._on_phase = on_phase
        self._ready = asyncio.Event()
        self._answer: asyncio.Future[Done] | None = None
        self._dead = False
        self._reader = asyncio.create_task(self._read())

    async def ready(self) -> None:
        """Wait until it is registered. Raises `ChildFailed` when it ends, or takes too long."""
        waiting = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait(
                {waiting, self._reader}, timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if not self._ready.is_set():
            raise self.child.failure("ended before it was ready" if self._dead else "did not become ready")

    async def serve(self, request: Request) -> Done:
        """Hand it the request and wait for the answer. Raises `EngineDied`."""
        self.job_index = request.index
        self.step = None
        if self._dead:
            raise EngineDied(self.name)
        self._answer = asyncio.get_running_loop().create_future()
        job = Job(index=request.index, tokens=request.tokens, keys=list(request.keys))
        assert self.child.process.stdin is not None
        try:
            self.child.process.stdin.write(msgspec.json.encode(job) + b"\n")
            await self.child.process.stdin.drain()
        except ConnectionError:
            pass  # it died; the reader says so
        answer = await self._answer
        self.job_index = None
        self.step = None
        return answer

    async def gone(self) -> None:
        """Wait until the process has ended and all that it said was read."""
        await self._reader
        await self.child.process.wait()

    async def close(self) -> None:
        """Let it end by itself, as an engine that is shut down does."""
        if self.child.process.stdin is not None:
            self.child.process.stdin.close()
        try:
            await asyncio.wait_for(self.gone(), READY_TIMEOUT_S)
        except TimeoutError:
            await self.child.stop()
        if self.child.process.returncode:
            raise self.child.failure(f"ended with status {self.child.process.returncode}")

    async def _read(self) -> None:
        decoder = msgspec.json.Decoder(EngineMessage)
        assert self.child.process.stdout is not None
        try:
            while line := await self.child.process.stdout.readline():
                if not line.endswith(b"\n"):
                    break  # cut off in the middle by the end of the process
                self._heard(decoder.decode(line))
        finally:
            self._dead = True
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(EngineDied(self.name))

    def _heard(self, message: EngineMessage) -> None:
        if isinstance(message, Ready):
            self._ready.set()
        elif isinstance(message, Phase):
            self.step = message.step
            self._on_phase(self, message)
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(message)
