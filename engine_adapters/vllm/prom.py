"""Our counts in vLLM's own /metrics: `vllm:ucm_*`, labelled like vLLM's own metrics.

The names are for dashboards: they stay. They begin as vLLM's do because it clears its own away before it
registers them again, when a process makes a second engine. `docs/engines/vllm-metrics.md` lists them.
"""

from typing import Any

from prometheus_client import Counter, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from engine_adapters.vllm.worker import COUNTERS as WORKERS

PREFIX = "vllm:ucm_"

COUNTERS = {
    "requests": "requests that reached the connector",
    "lookups": "requests' lookups: one a request, and one more after a preemption or a load that failed",
    "lookups_late": "of these, those not answered in time: the request went on as a miss",
    "asked_blocks": "blocks that answered lookups asked for",
    "found_blocks": "blocks that the service named",
    "loads": "loads that ended, whole or not",
    "loaded_blocks": "blocks brought into the engine's memory, on every rank",
    "loaded_tokens": "tokens of these",
    "loaded_bytes": "bytes of these, of all ranks",
    "load_us": "time from a load's beginning to its end",
    "load_failures_*": "loads that were not whole, by reason of the first missing block",
    "failed_blocks": "blocks that were to be loaded and were not",
    "bad_blocks": "blocks whose bytes were refused for good",
    "save_orders": "saves that the scheduler decided on",
    "save_blocks": "blocks of these",
    "saves": "saves that ended",
    "saved_blocks": "blocks stored by this engine that serve",
    "saved_bytes": "bytes stored, of all ranks",
    "present_blocks": "blocks that were to be saved and had been stored by others",
    "dropped_blocks": "blocks that were to be saved and were not",
    "save_drops_*": "these, by reason",
    "preemptions": "preempted requests",
    "lookup_calls": "lookups sent to the service",
    "lookups_by_followers": "of these, those that a follower answered while nobody led, without a lease",
    "lookup_us": "time that they took",
    "lookup_failures_*": "lookups that failed, by reason",
    "late_answers": "answers that nobody waited for any more",
    "unreachable_blocks": "blocks named whose storage cannot be opened here",
    "leases": "read leases taken",
    "leases_released": "read leases given back",
    "leases_ran_out": "read leases that ended by their deadline",
    "removed_blocks": "blocks removed from the service because they could not be read",
    "removals_left": "blocks not removed, to keep to the limit of removals",
    "registrations": "registrations of this engine",
    "registrations_lost": "registrations that the service no longer knew",
    "switch_changes": "changes of the switch heard of",
    "pool_events": "events of the service's made ready for vLLM to publish (pool_events)",
    "pool_event_blocks": "blocks that they name",
    "pool_events_invalid": "events and batches that were not what they should be",
    "pool_event_gaps": "times that batches were missing",
    "pool_event_replays": "replays asked for",
    "pool_event_resyncs": "times that all that is announced was asked for",
    "pool_event_pauses": "times that following paused, for an engine that takes no steps",
    **{name: text for name, text in WORKERS.items() if not name.endswith("_max")},
}
"""What the scheduler's side, the broker and the workers count. Of a name that ends in `_*` the `*` is told as
the label `reason`; largest values (`_max`) are for the log only."""

STEPS = "what the connector adds to the scheduler's thread, each step"
STEP_BUCKETS_S = (25e-6, 50e-6, 100e-6, 200e-6, 300e-6, 500e-6, 750e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3)
US = 1e-6
"""Durations are counted in µs and told in seconds."""
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
        self._counters: dict[str, Any] = {}
        self._by_reason: dict[str, Any] = {}
        for name, text in COUNTERS.items():
            if name.endswith("_*"):
                self._by_reason[name[:-1]] = counter(
                    name=metric(name), documentation=text, labelnames=[*labelnames, "reason"]
                )
            else:
                self._counters[name] = counter(name=metric(name), documentation=text, labelnames=labelnames)
        self._others = counter(
            name=PREFIX + "events",
            documentation="what else was counted, by name",
            labelnames=[*labelnames, "event"],
        )
        self._steps = histogram(
            name=PREFIX + "step_seconds",
            documentation=STEPS,
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
                    steps.observe(sample * US)
            elif isinstance(value, int | float) and value >= 0 and not name.endswith("_max"):
                self._add(name, value * US if name.endswith("_us") else value, labels)

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


def metric(count: str) -> str:
    """The name of a count's metric, without the `_total` that Prometheus puts behind it."""
    name = count.removesuffix("_*")
    return PREFIX + (f"{name[:-3]}_seconds" if name.endswith("_us") else name)


def table() -> dict[str, str]:
    """Every metric with what it says, in the order of the documentation."""
    return {
        **{f"{metric(count)}_total": text for count, text in COUNTERS.items()},
        f"{PREFIX}events_total": "what else was counted, by `event`",
        f"{PREFIX}step_seconds": f"histogram: {STEPS}",
    }
