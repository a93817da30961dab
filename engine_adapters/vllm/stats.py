"""What both sides counted, on its way through vLLM to its log and its /metrics.

A plain mapping that survives vLLM's messages: name -> number, or a list of samples. Numbers add up over
ranks, sides and time; of names that end in `_max` the largest stays; samples are put together, up to
SAMPLES_MAX.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

SAMPLES_MAX = 4_096


@dataclass
class UcmStats(KVConnectorStats):
    """One interval's counts. The mapping given is copied: vLLM hands one to several readers."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = dict(self.data)

    def reset(self) -> None:
        """Begin a new interval."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "UcmStats":
        """Take the other's counts in."""
        for name, value in other.data.items():
            self.data[name] = _together(name, self.data[name], value) if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: the counts that are not 0, percentiles of samples, and `hit_rate`, the share of the
        blocks asked for that was really loaded (vLLM's own counters also count loads that failed)."""
        told: dict[str, int | float] = {}
        if self.data.get("asked_blocks"):
            told["hit_rate"] = round(hit_rate(self.data), 4)
        for name, value in sorted(self.data.items()):
            if isinstance(value, list):
                ordered = sorted(value)
                for percent in (50, 99) if ordered else ():
                    told[f"{name}_p{percent}"] = ordered[(len(ordered) - 1) * percent // 100]
            elif value:
                told[name] = value
        return told


def hit_rate(counts: Mapping[str, Any]) -> float:
    """Blocks loaded of blocks asked for; 0.0 when none was."""
    asked = counts.get("asked_blocks", 0)
    return counts.get("loaded_blocks", 0) / asked if asked else 0.0


def _together(name: str, one: Any, other: Any) -> Any:
    if isinstance(one, list):
        return (one + other)[:SAMPLES_MAX]
    return max(one, other) if name.endswith("_max") else one + other
