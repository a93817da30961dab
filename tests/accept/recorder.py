"""What an engine's own instruments say, added up since its start."""

import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Self

from vllm.v1.metrics.loggers import StatLoggerBase

from tests.accept.messages import Counts

SCHEDULER_CALLS = (
    "build_connector_meta",
    "get_external_cache_hit_sources",
    "get_kv_connector_stats",
    "get_num_new_matched_tokens",
    "has_pending_block_frees",
    "has_pending_push_work",
    "on_new_request",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "update_connector_output",
    "update_state_after_alloc",
)
"""What vLLM's scheduler calls of a connector while it serves."""
LONG_MS = 0.1
"""A shorter call was hardly interrupted."""


class Recorder(StatLoggerBase):
    """vLLM tells it after each step; the connector's counters come that way too."""

    def __init__(self) -> None:
        self._counts = Counts()

    def bound(self, _config: Any, _index: int) -> Self:
        """As vLLM makes one for each engine: there is one engine."""
        return self

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """After a step."""
        counts = self._counts
        if iteration_stats is not None:
            counts.local_tokens += iteration_stats.prompt_token_stats.local_cache_hit
            counts.external_tokens += iteration_stats.prompt_token_stats.external_kv_transfer
            counts.preempted += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None and scheduler_stats.kv_connector_stats:
            for name, value in scheduler_stats.kv_connector_stats.items():
                if isinstance(value, int | float):
                    before = counts.connector.get(name, 0)
                    after = max(before, value) if name.endswith("_max") else before + value
                    counts.connector[name] = after

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def counts(self, *, steps: int) -> Counts:
        """A copy that stays as it is."""
        now = self._counts
        return Counts(
            local_tokens=now.local_tokens,
            external_tokens=now.external_tokens,
            preempted=now.preempted,
            steps=steps,
            connector=dict(now.connector),
        )


class CoreWaits:
    """How long this thread has waited for a core although it could run, as Linux tells; 0 where it tells
    nothing. Asking takes a few microseconds."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def total_ms(self) -> float:
        """Since the thread began. Only the thread that made this may ask."""
        if self._file < 0:
            return 0.0
        _, waited_ns, _ = os.pread(self._file, 128, 0).split()
        return int(waited_ns) / 1e6


class Stopwatch:
    """Measures from outside how long a connector holds up the scheduler's thread in each step.

    What counts is the time by the clock, whatever was waited for, less the time in which the thread could
    have run and no core was free: on a small machine a dozen processes share two of them, and that says
    nothing about the connector.

    Steps in which the model computed are kept apart from those in which the engine only looked whether
    somebody is ready: there are thousands of these, and among them no slow step would be seen.
    """

    def __init__(self, connector: Any) -> None:
        """`connector` None: nothing is measured."""
        self.steps = 0
        self._spent_ms = 0.0
        self._computes = False
        self._waits = CoreWaits()
        self._samples_ms: tuple[list[float], list[float]] = ([], [])
        self._watched = connector is not None
        for name in SCHEDULER_CALLS if self._watched else ():
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def step(self) -> None:
        """A step is over."""
        self.steps += 1
        if self._watched:
            self._samples_ms[self._computes].append(round(self._spent_ms, 4))
            self._spent_ms, self._computes = 0.0, False

    def taken(self) -> tuple[list[float], list[float]]:
        """Since the last time this was asked: what was added to steps that computed nothing, and to those
        that did."""
        taken, self._samples_ms = self._samples_ms, ([], [])
        return taken

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            waited_ms = self._waits.total_ms()
            began_s = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                took_ms = 1_000 * (time.perf_counter() - began_s)
                if took_ms > LONG_MS:
                    took_ms -= min(took_ms, self._waits.total_ms() - waited_ms)
                self._spent_ms += took_ms
                if name == "build_connector_meta" and arguments[0].total_num_scheduled_tokens:
                    self._computes = True

        return timed
