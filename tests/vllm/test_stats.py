"""Counts on their way through vLLM's own classes to its log and its /metrics."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats

from engine_adapters.vllm import prom
from engine_adapters.vllm.prom import UcmPromMetrics
from engine_adapters.vllm.stats import SAMPLES_MAX, UcmStats, hit_rate

DOCS = Path(__file__).resolve().parent.parent.parent / "docs/engines/vllm-metrics.md"


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def metrics(engines: int = 1) -> UcmPromMetrics:
    return UcmPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Gauge: Gauge, Counter: Counter, Histogram: Histogram},
        ["model_name", "engine"],
        {engine: ["m", str(engine)] for engine in range(engines)},
    )


def sample(name: str, engine: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "m", "engine": str(engine), **labels})


def test_counts_of_ranks_and_sides_add_up_and_what_was_given_stays_as_it_was() -> None:
    given = {"loaded_bytes": 5, "step_us": [3], "wait_max": 7}
    stats = UcmStats(data=given)
    for other in ({"loaded_bytes": 6, "wait_max": 2}, {"step_us": [1, 2], "wait_max": 9, "saves": 1}):
        stats = stats.aggregate(UcmStats(data=other))
    assert stats.data == {"loaded_bytes": 11, "step_us": [3, 1, 2], "wait_max": 9, "saves": 1}
    assert given == {"loaded_bytes": 5, "step_us": [3], "wait_max": 7}


def test_samples_are_bounded_however_long_nobody_reads() -> None:
    stats = UcmStats()
    for _ in range(5):
        stats.aggregate(UcmStats(data={"step_us": list(range(1_000))}))
    assert len(stats.data["step_us"]) == SAMPLES_MAX


def test_an_interval_is_empty_until_something_is_counted_and_after_a_reset() -> None:
    stats = UcmStats()
    assert stats.is_empty() and stats.reduce() == {}
    stats.aggregate(UcmStats(data={"saves": 1}))
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_the_hit_rate_is_of_blocks_really_loaded() -> None:
    """Found is not loaded: of ten blocks asked for the service named eight, and two could not be read."""
    counts = {"asked_blocks": 10, "found_blocks": 8, "loaded_blocks": 6, "failed_blocks": 2}
    assert hit_rate(counts) == 0.6
    assert UcmStats(data=counts).reduce()["hit_rate"] == 0.6
    assert hit_rate({}) == 0.0 and "hit_rate" not in UcmStats(data={"saves": 1}).reduce()


def test_the_log_has_percentiles_of_samples_and_no_zeros() -> None:
    told = UcmStats(data={"step_us": list(range(100, 0, -1)), "saves": 0, "loads": 2}).reduce()
    assert told == {"loads": 2, "step_us_p50": 50, "step_us_p99": 99}
    assert UcmStats(data={"step_us": []}).reduce() == {}


def test_counts_survive_the_message_to_the_process_that_tells_them() -> None:
    counts = {"asked_blocks": 10, "step_us": [3, 4], "load_failures_corrupt": 1}
    sent = msgspec.msgpack.encode(SchedulerStats(kv_connector_stats=UcmStats(data=counts).to_dict()))
    assert msgspec.msgpack.decode(sent, type=SchedulerStats).kv_connector_stats == counts


def test_every_count_is_in_the_metrics_under_its_name_with_vllms_labels() -> None:
    told = metrics(engines=2)
    counts = [name for name in prom.COUNTERS if not name.endswith("_*")]
    told.observe(dict.fromkeys(counts, 2_000), 1)
    for name in counts:
        want = 0.002 if name.endswith("_us") else 2_000
        assert sample(f"{prom.metric(name)}_total", 1) == pytest.approx(want), name
        assert not sample(f"{prom.metric(name)}_total", 0)
    assert sample("vllm:ucm_loaded_blocks_total", 1) == 2_000
    assert sample("vllm:ucm_load_seconds_total", 1) == 0.002


def test_reasons_and_what_has_no_metric_of_its_own_are_labels() -> None:
    told = metrics()
    told.observe({"load_failures_corrupt": 2, "refused_no_storage": 3, "unheard": 4, "unheard_us": 2_500_000})
    told.observe({"load_failures_corrupt": 1})
    assert sample("vllm:ucm_load_failures_total", reason="corrupt") == 3
    assert sample("vllm:ucm_refused_total", reason="no_storage") == 3
    assert sample("vllm:ucm_events_total", event="unheard") == 4
    assert sample("vllm:ucm_events_total", event="unheard_us") == 2.5


def test_labels_are_bounded() -> None:
    told = metrics()
    for number in range(1_000):
        told.observe({f"save_drops_{number}": 1})
    lines = [x for x in generate_latest().decode().splitlines() if x.startswith("vllm:ucm_save_drops_total")]
    assert len(lines) == prom.LABELS_MAX + 1
    assert sample("vllm:ucm_save_drops_total", reason="other") == 1_000 - prom.LABELS_MAX


def test_step_times_are_a_histogram_that_shows_the_millisecond() -> None:
    told = metrics()
    told.observe({"step_us": [10, 90, 999, 40_000]})
    assert sample("vllm:ucm_step_seconds_bucket", le="0.001") == 3
    assert sample("vllm:ucm_step_seconds_count") == 4
    assert sample("vllm:ucm_step_seconds_sum") == pytest.approx(0.041099)


@pytest.mark.parametrize(
    "odd", [{"saves": -1}, {"saves": None}, {"saves": "x"}, {"step_us": 3.0}, {"x_max": 3}]
)
def test_odd_counts_end_nobody(odd: dict[str, Any]) -> None:
    told = metrics()
    told.observe({**odd, "loads": 1})
    told.observe({"loads": 1}, engine_idx=7)
    assert sample("vllm:ucm_loads_total") == 1


def test_a_second_engine_in_one_process_registers_again() -> None:
    metrics().observe({"loads": 1})
    unregister_vllm_metrics()  # as vLLM does before it makes its own
    metrics().observe({"loads": 1})
    assert sample("vllm:ucm_loads_total") == 1


def test_the_documentation_lists_the_metrics_that_exist() -> None:
    metrics()
    exist = {
        line.split()[2]
        for line in generate_latest().decode().splitlines()
        if line.startswith("# TYPE vllm:ucm_")
    }
    listed = [line.split("`")[1] for line in DOCS.read_text().splitlines() if line.startswith("| `vllm:ucm_")]
    assert listed == list(prom.table())
    assert exist - {name for name in exist if name.endswith("_created")} == set(listed)


def test_everything_that_is_counted_anywhere_has_a_metric() -> None:
    """Every literal name that a module of the connector counts under."""
    pattern = re.compile(r"(?:_count|counts\.add)\(\s*f?\"([a-z_]+)(\{)?")
    found = {
        name + "*" * bool(open_ended)
        for path in Path(prom.__file__).parent.glob("*.py")
        for name, open_ended in pattern.findall(path.read_text())
    }
    families = tuple(name[:-1] for name in prom.COUNTERS if name.endswith("_*"))
    assert len(found) > 30
    assert not {name for name in found - set(prom.COUNTERS) if not name.startswith(families)}
