"""Hands the requests to the engines in their order, and kills on the way what the demo wants killed.

At most one request an engine is under way, and a session's next one waits for the answer to the one before,
as its user would. A request whose engine died is handed to the next free engine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass

from engine_adapters.replay.engine_handle import EngineDied, EngineHandle
from engine_adapters.replay.ledger import Ledger
from engine_adapters.replay.messages import Phase
from engine_adapters.replay.plan import Plan
from engine_adapters.replay.requests import Request

KILL_ATTEMPTS_MAX = 25
"""A kill that came too late, when the engine had already written all, is tried again so often."""
KILL_BLOCKS_MIN = 8
"""The engine is killed in a write of at least so many blocks, so that the signal arrives in the middle of
it..."""
KILL_PATIENCE_REQUESTS = 25
"""...unless so many requests went by without one."""
OUTAGE_REQUESTS = 1
"""Requests handed out at once while the service is down, besides those under way when it was killed. The
others wait at the door, as at a router: engines serve without the service, but what is measured here is the
cache, and engines without a model would hurry through all requests meanwhile."""

OnPhase = Callable[[EngineHandle, Phase], None]


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the dispatcher asks of the demo around it.

    `start_engine(name, on_phase)` gives a ready engine. `kill_service()` is SIGKILL at once, None when no
    part of the service is to be killed; `restored()` returns when engines reach it again. From the kill to
    the end of the run a request arrives each `arrival_s`, whether the service is there or not; when that is
    None, requests wait for the service. `on_answer` hears of each answer, `note` what happens, for people.
    """

    start_engine: Callable[[str, OnPhase], Awaitable[EngineHandle]]
    kill_service: Callable[[], Awaitable[None]] | None
    restored: Callable[[], Coroutine[None, None, None]]
    arrival_s: float | None
    on_answer: Callable[[], None]
    note: Callable[[str], None]


class Dispatcher:
    """One run over all requests of a plan."""

    def __init__(self, plan: Plan, ledger: Ledger, hooks: Hooks) -> None:
        self._plan = plan
        self._ledger = ledger
        self._hooks = hooks
        self._free: asyncio.Queue[EngineHandle] = asyncio.Queue()
        self._sessions: dict[str, asyncio.Task[None]] = {}
        self._handed_out = 0
        self._armed_at: int | None = None
        self._attempts = 0
        self._victim: EngineHandle | None = None
        self._victim_blocks = 0
        self._answered_before_kill = 0
        self._outage: asyncio.Task[None] | None = None
        self._outage_left = 0
        self._arrives_s = 0.0

    async def run(self, engines: Sequence[str]) -> None:
        """Serve all requests with engines of these names, then let the engines end.

        Raises an `ExceptionGroup` of `ChildFailed` when a process that is needed cannot run.
        """
        async with asyncio.TaskGroup() as group:
            for name in engines:
                group.create_task(self._bring_up(name))
            for request in self._plan:
                engine = await self._turn(request)
                task = group.create_task(self._serve(group, engine, request))
                if request.session:
                    self._sessions[request.session] = task
                if request.index == self._plan.service_kill_at and self._hooks.kill_service is not None:
                    await asyncio.sleep(0)  # the request is with its engine now
                    await self._hooks.kill_service()
                    self._ledger.service_killed_at = len(self._ledger.rows)
                    self._outage_left = OUTAGE_REQUESTS
                    self._outage = group.create_task(self._hooks.restored())
        for _ in engines:
            await (await self._free.get()).close()

    async def _turn(self, request: Request) -> EngineHandle:
        """Wait until it is the request's turn and an engine is free for it."""
        previous = self._sessions.get(request.session)
        if previous is not None:
            await asyncio.wait({previous})
        if self._hooks.arrival_s is not None:
            await self._arrival(self._hooks.arrival_s)
        elif self._outage is not None and not self._outage.done():
            if self._outage_left > 0:
                self._outage_left -= 1
            else:
                await asyncio.wait({self._outage})
        engine = await self._free.get()
        self._handed_out = request.index
        if request.index == self._plan.engine_kill_at:
            self._armed_at = request.index
        return engine

    async def _arrival(self, arrival_s: float) -> None:
        """Wait for the next arrival, once a part of the service was killed. An engine that is late does not
        make up for it in a rush."""
        if self._outage is None:
            return
        now_s = asyncio.get_running_loop().time()
        self._arrives_s = max(self._arrives_s + arrival_s, now_s)
        await asyncio.sleep(self._arrives_s - now_s)

    async def _serve(self, group: asyncio.TaskGroup, engine: EngineHandle, request: Request) -> None:
        while True:
            try:
                answer = await engine.serve(request)
                break
            except EngineDied:
                await self._bury(group, engine, request)
                engine = await self._free.get()
        self._ledger.add(engine.name, self._plan.ideal_hits[request.index], answer)
        self._hooks.on_answer()
        if engine is self._victim:
            await self._bury(group, engine, request)
        else:
            self._free.put_nowait(engine)

    # ------------------------------------------------------------------------------------------ the kill

    def _heard(self, engine: EngineHandle, phase: Phase) -> None:
        """Kill the engine at once if this is the write to kill it in. Whether the signal came in time shows
        when all that it had said is read."""
        if self._armed_at is None or phase.step != "writing":
            return
        if phase.blocks < KILL_BLOCKS_MIN and self._handed_out < self._armed_at + KILL_PATIENCE_REQUESTS:
            return
        engine.child.kill()
        self._victim, self._victim_blocks, self._armed_at = engine, phase.blocks, None
        self._answered_before_kill = len(self._ledger.rows)

    async def _bury(self, group: asyncio.TaskGroup, engine: EngineHandle, request: Request) -> None:
        """See how the engine ended, and start it anew under its name."""
        await engine.gone()
        if engine is not self._victim:
            raise engine.child.failure(f"ended in request {request.index}")
        self._victim = None
        self._attempts += 1
        if engine.job_index == request.index and engine.step == "writing":
            self._ledger.engine_killed_at = self._answered_before_kill
            self._hooks.note(
                f"{engine.name} was killed (SIGKILL) in request {request.index}, while it wrote"
                f" {self._victim_blocks} blocks; another engine answers it"
            )
        elif self._attempts < KILL_ATTEMPTS_MAX:
            self._armed_at = self._handed_out
        group.create_task(self._bring_up(engine.name))

    async def _bring_up(self, name: str) -> None:
        self._free.put_nowait(await self._hooks.start_engine(name, self._heard))
