"""Our counts in vLLM's own /metrics: `vllm:ucm_*`, labelled like vLLM's own metrics.

The names are for dashboards: they stay. They begin as vLLM's do because it clears its own away before it
registers them again, when a process makes a second engine. `docs/engines/vllm-metrics.md` lists them.
"""

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

PREFIX = "vllm:ucm_"

COUNTERS: dict[str, tuple[str, str]] = {
    "requests": ("requests", "Requests that reached the connector"),
    "lookups": ("lookups", "Lookups sent to the service, one a request, and one more after a preemption"),
    "lookups_late": ("lookups_late", "Lookups not answered in time: the request went on as a miss"),
    "asked_blocks": ("asked_blocks", "Blocks that answered lookups asked for"),
    "found_blocks": ("found_blocks", "Blocks that the service named"),
    "loads": ("loads", "Loads that ended, whole or not"),
    "loaded_blocks": ("loaded_blocks", "Blocks in the engine's memory by a load, on every rank"),
    "loaded_tokens": ("loaded_tokens", "Tokens of these blocks"),
    "loaded_bytes": ("loaded_bytes", "Bytes loaded, of all ranks"),
    "load_us": ("load_seconds", "Seconds from a load's beginning to its end, added up"),
    "failed_blocks": ("failed_blocks", "Blocks that were to be loaded and were not"),
    "bad_blocks": ("bad_blocks", "Blocks whose bytes were refused for good"),
    "save_orders": ("save_orders", "Saves that the scheduler decided on"),
    "save_blocks": ("save_blocks", "Blocks of these saves"),
    "saves": ("saves", "Saves that ended"),
    "saved_blocks": ("saved_blocks", "Blocks stored by this engine that serve"),
    "saved_bytes": ("saved_bytes", "Bytes stored, of all ranks"),
    "present_blocks": ("present_blocks", "Blocks that were to be saved and had been stored by others"),
    "dropped_blocks": ("dropped_blocks", "Blocks that were to be saved and were not"),
    "preemptions": ("preemptions", "Preempted requests that the connector knew"),
}
"""What is counted -> name of the metric, without prefix and `_total`, and what it says."""

REASONS: dict[str, tuple[str, str]] = {
    "lookup_failures_": ("lookup_failures", "Lookups that failed, by reason"),
    "load_failures_": ("load_failures", "Loads that were not whole, by reason of the first missing block"),
    "save_drops_": ("save_drops", "Blocks that were not saved, by reason"),
    "write_failures_": ("write_failures", "Pages that a storage did not take, by outcome"),
    "refused_": ("refused_writes", "Blocks that the service did not let this engine write, by reason"),
}
"""How a count's name begins -> the metric, with what follows in the label `reason`."""

STEP_BUCKETS_S = (25e-6, 50e-6, 100e-6, 200e-6, 300e-6, 500e-6, 750e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3)
SCALES = {"_us": 1e-6, "_ms": 1e-3}
"""Durations are counted in whole units and told in seconds."""
LABELS_MAX = 64
"""More reasons of one metric than this are told as `other`."""


class UcmPromMetrics(KVConnectorPromMetrics):
    """One for all engines of a server; `observe` takes what one engine counted in an interval."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._counters = {
            count: counter(name=PREFIX + name, documentation=text, labelnames=labelnames)
            for count, (name, text) in COUNTERS.items()
        }
        self._by_reason = {
            prefix: counter(name=PREFIX + name, documentation=text, labelnames=[*labelnames, "reason"])
            for prefix, (name, text) in REASONS.items()
        }
        self._others = counter(
            name=PREFIX + "events",
            documentation="What else the connector counted, by name; durations in seconds",
            labelnames=[*labelnames, "event"],
        )
        self._steps = histogram(
            name=PREFIX + "step_seconds",
            documentation="What the connector adds to the scheduler's thread, each step",
            buckets=STEP_BUCKETS_S,
            labelnames=labelnames,
        )
        self._told: dict[str, set[str]] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take an interval's counts in. What is no number, or below 0, is left out: vLLM's output thread
        must not end for a count."""
        labels = self.per_engine_labelvalues.get(engine_idx)
        if labels is None:
            return
        for name, value in transfer_stats_data.items():
            if name == "step_us" and isinstance(value, list):
                steps = self._steps.labels(*labels)
                for sample in value:
                    steps.observe(sample * SCALES["_us"])
            elif isinstance(value, int | float) and value >= 0 and not name.endswith("_max"):
                self._add(name, value * SCALES.get(name[-3:], 1), labels)

    def _add(self, name: str, value: float, labels: list[object]) -> None:
        if name in self._counters:
            self._counters[name].labels(*labels).inc(value)
            return
        for prefix, counter in self._by_reason.items():
            if name.startswith(prefix):
                counter.labels(*labels, self._label(prefix, name.removeprefix(prefix))).inc(value)
                return
        self._others.labels(*labels, self._label("", name)).inc(value)

    def _label(self, metric: str, label: str) -> str:
        """The label, or `other` once a metric has enough of them."""
        told = self._told.setdefault(metric, set())
        if label not in told and len(told) >= LABELS_MAX:
            return "other"
        told.add(label)
        return label


def table() -> Mapping[str, str]:
    """Every metric with what it says, in the order of the documentation."""
    totals = [*COUNTERS.values(), *REASONS.values()]
    return {
        **{f"{PREFIX}{name}_total": text for name, text in totals},
        f"{PREFIX}events_total": "What else was counted, by `event`",
        f"{PREFIX}step_seconds": "Histogram: what the connector adds to the scheduler's thread, each step",
    }
