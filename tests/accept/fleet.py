"""Several engines, and one line of requests for all of them: each is handed to the engine that has least to
do, and again to another one when its engine was killed."""

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from tests.accept.documents import ANSWER_TOKENS, Ideal, Request
from tests.accept.handle import ANSWER_TIMEOUT_S, READY_TIMEOUT_S, EngineProcess
from tests.accept.messages import BLOCK_SIZE_TOKENS, Answer, Counts, EngineOptions, Job, Message

IN_FLIGHT = 2
LOADED = "loaded_blocks"
"""The connector's counter of blocks that were asked for and came."""
TICK_S = 0.001


class Row(Struct, frozen=True):
    """One answered request. `possible`: blocks that an infinite cache would have had; `local` and `loaded`:
    what its engine found in its own memory and loaded since its answer before (with requests side by side a
    row may count what was another's; sums are right)."""

    phase: str
    request: Request
    engine: str
    answer: Answer
    possible: int
    local: int
    loaded: int
    waited_s: float


class Flying(Struct):
    """A request that an engine has."""

    request: Request
    engine: str
    since_s: float


Tick = Callable[["Fleet"], None]


class Fleet:
    """The engines that run now. Everything happens in the caller's thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inbox: queue.Queue[tuple[EngineProcess, Message | None]] = queue.Queue()
        self._ideal = Ideal()
        self._possible: dict[str, int] = {}
        self._flying: dict[str, Flying] = {}
        self._again: deque[Request] = deque()
        self._spent: list[Counts] = []
        self.engines: dict[str, EngineProcess] = {}
        self.rows: list[Row] = []
        self.phase = ""

    def launch(self, name: str, options: EngineOptions) -> None:
        """Start an engine, which need not take jobs yet when this returns."""
        self.engines[name] = EngineProcess(name, options, self._folder, inbox=self._inbox)

    def await_ready(self, *names: str) -> None:
        """Returns when these engines take jobs. Raises EngineFailed."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while late := [name for name in names if not self.engines[name].ready]:
            if time.monotonic() > deadline_s:
                raise self.engines[late[0]].failure(f"was not ready after {READY_TIMEOUT_S:g} s")
            self._hear(0.1)

    def ready(self, name: str) -> bool:
        """Whether this engine takes jobs."""
        return name in self.engines and self.engines[name].ready

    def kill(self, name: str) -> None:
        """SIGKILL; what it had is asked again, of others."""
        engine = self.engines.pop(name)
        engine.kill()
        self._spent.append(engine.counts)
        for id, flying in list(self._flying.items()):
            if flying.engine == name:
                del self._flying[id]
                self._again.append(flying.request)

    def stop(self, *names: str) -> None:
        """End engines in order: all of them at once, or these."""
        for name in names:
            self.engines[name].send(Job(op="stop"))
        for name in names:
            engine = self.engines.pop(name)
            engine.stop()
            self._spent.append(engine.counts)

    def close(self) -> None:
        """Kill what still runs."""
        for engine in self.engines.values():
            engine.kill()

    def do(self, name: str, job: Job) -> Answer:
        """One job that is no request, for an engine that has nothing else to do. Raises EngineFailed."""
        self.engines[name].send(job)
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline_s:
            answer = self._hear(0.1)
            if answer is not None:
                return answer
        raise self.engines[name].failure("did not answer in time")

    def forget(self, *names: str) -> None:
        """Let engines forget their own prefix caches. Raises EngineFailed."""
        for name in names:
            if self.do(name, Job(op="reset")).finish != "reset":
                raise self.engines[name].failure("could not forget its prefix cache")

    def serve(
        self,
        phase: str,
        requests: Iterable[Request],
        *names: str,
        in_flight: int = IN_FLIGHT,
        every_s: float = 0.0,
        until_s: float = 0.0,
        tick: Tick | None = None,
        at_s: Mapping[float, Callable[[], None]] | None = None,
    ) -> list[Row]:
        """Have all requests answered, by these engines; by any when none is named, or all of them are gone.
        Returns the rows of this call.

        `every_s`: not faster than one so often. `until_s`: requests go out for so long, then no more.
        `tick` is called again and again meanwhile, `at_s` has what to do after so many seconds. Raises
        EngineFailed.
        """
        self.phase = phase
        first_row = len(self.rows)
        waiting = deque(requests)
        began_s = time.monotonic()
        events = deque(sorted((at_s or {}).items(), key=lambda event: event[0]))
        next_s = began_s
        heard_s = began_s
        while waiting or self._flying or self._again or events:
            now_s = time.monotonic()
            if until_s and now_s - began_s > until_s:
                waiting.clear()
            while events and now_s - began_s >= events[0][0]:
                events.popleft()[1]()
            if tick is not None:
                tick(self)
            free = self._free(names, in_flight)
            if free and self._again:
                self._hand_out(self._again.popleft(), free)
            elif free and waiting and now_s >= next_s:
                next_s = max(next_s + every_s, now_s)
                self._hand_out(waiting.popleft(), free)
            elif self._hear(TICK_S) is not None or not self._flying:
                heard_s = now_s
            elif now_s - heard_s > ANSWER_TIMEOUT_S:
                name = next(iter(self._flying.values())).engine
                raise self.engines[name].failure("did not answer in time")
        return self.rows[first_row:]

    def counts(self) -> dict[str, float]:
        """The connectors' counters over all engines and their starts, as far as they have told."""
        total: dict[str, float] = {}
        for counts in [*self._spent, *(engine.counts for engine in self.engines.values())]:
            for name, value in counts.connector.items():
                total[name] = (
                    max(total.get(name, 0), value) if name.endswith("_max") else total.get(name, 0) + value
                )
        return total

    def loaded(self, *names: str) -> float:
        """Blocks that these engines have loaded since they were started, asked of them now."""
        return sum(self.do(name, Job(op="counts")).counts.connector.get(LOADED, 0) for name in names)

    def _free(self, names: Sequence[str], in_flight: int) -> str:
        """The engine with least to do that can take a request; empty: none can."""
        wanted = [name for name in names if name in self.engines]
        busy = dict.fromkeys(wanted or self.engines, 0)
        for flying in self._flying.values():
            if flying.engine in busy:
                busy[flying.engine] += 1
        able = [
            (count, name) for name, count in busy.items() if self.engines[name].ready and count < in_flight
        ]
        return min(able)[1] if able else ""

    def _hand_out(self, request: Request, name: str) -> None:
        if request.id not in self._possible:
            self._possible[request.id] = self._ideal.possible_blocks(request.tokens)
        self._flying[request.id] = Flying(request, name, time.monotonic())
        self.engines[name].send(Job(op="ask", id=request.id, tokens=request.tokens, max_tokens=ANSWER_TOKENS))

    def _hear(self, timeout_s: float) -> Answer | None:
        """An answer that came within `timeout_s`. Raises EngineFailed when an engine has ended that was not
        to."""
        try:
            engine, message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if self.engines.get(engine.name) is not engine:
            return None  # one that was killed or stopped
        before = engine.counts
        answer = engine.heard(message)
        flying = self._flying.pop(answer.id, None) if answer is not None else None
        if answer is not None and flying is not None:
            after = answer.counts
            self.rows.append(
                Row(
                    self.phase,
                    flying.request,
                    engine.name,
                    answer,
                    self._possible[answer.id],
                    (after.local_tokens - before.local_tokens) // BLOCK_SIZE_TOKENS,
                    round(after.connector.get(LOADED, 0) - before.connector.get(LOADED, 0)),
                    time.monotonic() - flying.since_s,
                )
            )
        return answer
