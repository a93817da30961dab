"""Metrics of the cache events: what the publisher process says of itself, under the names it says it by."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .instruments import OTHER

COUNTED = "_total"
"""A name that ends so is a counter's, any other a gauge's."""
_NAME = re.compile(r"([a-z][a-z0-9_]*)(?:\{(.*)\})?", re.DOTALL)
_LABEL = re.compile(r'([a-z_][a-z0-9_]*)="((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)

HELP = {
    "lag_seconds": "How long ago the newest batch was decided when it was sent",
    "batches_total": "Batches sent, empty ones too",
    "events_total": "Events sent",
    "blocks_total": "Blocks told as stored or removed",
    "bytes_total": "Bytes sent",
    "dropped_total": "Batches that a subscriber was too slow for",
    "invalid_total": "Blocks left out because a router would choke on them",
    "replays_total": "Replays asked for",
    "snapshots_total": "Replays that began further back than what is kept",
    "gaps_total": "Batches of engines that were missed",
    "restates_total": "Times that everything of an instance was told again, by why",
    "announced": "Blocks that are announced",
    "subscribers": "Subscribers of a stream",
    "attachment_reached": "1 while the consumer answers, or subscribes",
    "attachment_registered": "Engines whose streams the consumer has",
    "attachment_problems": "What the consumer refuses",
}


@lru_cache(maxsize=8_192)
def parsed(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Name and labels of `name` or `name{label="value"}`; name "" for what is neither."""
    match = _NAME.fullmatch(text)
    if match is None:
        return "", ()
    labels = tuple((name, _ESCAPED.sub(r"\1", value)) for name, value in _LABEL.findall(match[2] or ""))
    return match[1], labels


def families(stats: Mapping[str, float], prefix: str, values_max: int) -> Iterator[Metric]:
    """One family a name. Of a name only `values_max` label sets are told apart, those with the largest
    values; all others are summed up: every stream, engine and consumer ever named would be a time series."""
    names: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for text, value in stats.items():
        name, pairs = parsed(text)
        if name:
            names.setdefault(name, {})[pairs] = value
    for name, rows in sorted(names.items()):
        labels = sorted({label for named in rows for label, _ in named})
        help = HELP.get(name, name.removesuffix(COUNTED).replace("_", " "))
        kind = CounterMetricFamily if name.endswith(COUNTED) else GaugeMetricFamily
        family = kind(prefix + name, help, labels=labels)
        ordered = sorted(rows.items(), key=lambda row: row[1], reverse=True)
        for row, value in ordered[:values_max]:
            given = dict(row)
            family.add_metric([given.get(label, "") for label in labels], value)
        if rest := [value for _, value in ordered[values_max:]]:
            family.add_metric([OTHER] * len(labels), sum(rest))
        yield family
