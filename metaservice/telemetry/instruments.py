"""Counters and histograms that cost a few hundred nanoseconds: plain numbers, given names only when they are
scraped.

All are written from the one event loop that serves, and read in the same loop: no lock is needed.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

SECONDS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
"""Bounds of latency histograms."""
SIZES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of histograms of batch sizes."""
OTHER = "_other"
"""The label value that stands for all beyond a bound; no name may begin with an underscore."""


class Histogram:
    """Counts of observed values in fixed buckets, with their sum."""

    __slots__ = ("_bounds", "_buckets", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(map(float, bounds))
        self._buckets = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._buckets[bisect_left(self._bounds, value)] += 1
        self._total += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        """Write the cumulative buckets into a metric family."""
        running, rows = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._buckets, strict=True):
            running += count
            rows.append((bound, running))
        family.add_metric(labels, buckets=rows, sum_value=self._total)


class Counters:
    """A counter with labels.

    At most `values_max` label sets are kept apart; all others share one, named `_other`.
    """

    __slots__ = ("_counts", "_help", "_labels", "_name", "_values_max")

    def __init__(self, name: str, help: str, labels: Sequence[str], values_max: int = 64) -> None:
        self._name = name
        self._help = help
        self._labels = tuple(labels)
        self._values_max = values_max
        self._counts: dict[tuple[str, ...], int] = {}

    def add(self, labels: tuple[str, ...], amount: int = 1) -> None:
        """Raise the counter of these label values."""
        counts = self._counts
        if labels in counts:
            counts[labels] += amount
        elif len(counts) < self._values_max:
            counts[labels] = amount
        else:
            rest = (OTHER,) * len(self._labels)
            counts[rest] = counts.get(rest, 0) + amount

    def value(self, *labels: str) -> int:
        """The count of these label values; 0 when there was none yet."""
        return self._counts.get(labels, 0)

    def total(self) -> int:
        """The count over all label values."""
        return sum(self._counts.values())

    def family(self, prefix: str) -> CounterMetricFamily:
        """As a metric family."""
        family = CounterMetricFamily(prefix + self._name, self._help, labels=self._labels)
        if not self._labels and not self._counts:
            family.add_metric((), 0)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        return family


def largest(rows: Iterable[tuple[str, tuple[int, ...]]], count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The `count` rows with the largest first number; all others summed up as `_other`.

    Without the bound every tenant ever named would be a time series for ever.
    """
    ordered = sorted(rows, key=lambda row: row[1], reverse=True)
    yield from ordered[:count]
    if rest := ordered[count:]:
        yield OTHER, tuple(map(sum, zip(*(numbers for _, numbers in rest), strict=True)))
