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
    "windows_total": "Windows of announcements heard from the replica",
    "batches_total": "Batches sent, empty ones too",
    "blocks_total": "Blocks told as stored, restated or removed, over all streams",
    "bytes_total": "Bytes of batches sent",
    "dropped_total": "Batches not sent because the lease was not held any more",
    "gaps_total": "Windows that did not follow the one before",
    "lapses_total": "Times that streams were muted while leading, because the lease lapsed",
    "beats_total": "Windows asked for because somebody joined",
    "resets_total": "Times that consumers were told to forget how far they were",
    "bind_failures_total": "Ports that could not be bound",
    "malformed_total": "Messages of peers that are nothing",
    "floods_total": "Streams made anew because a peer subscribed without end",
    "failures_total": "Faults of a part of the publisher that did not stop the rest",
    "replays_total": "Replays asked for",
    "replay_batches_total": "Batches sent in replays",
    "replay_refused_total": "Requests answered with END at once because there were too many",
    "replay_stalled_total": "Requesters dropped because they read nothing, or left",
    "replays_under_way": "Replays that are being answered",
    "snapshots_total": "Replays that began further back than what is kept",
    "snapshots_made_total": "Snapshots spelled",
    "snapshots_cut_total": "Snapshots cut off because of their size",
    "snapshot_bytes": "Bytes of the snapshots that are held",
    "ring_windows": "Windows that can be replayed",
    "ring_bytes": "Bytes of the windows that can be replayed",
    "tombstones": "Removals that are remembered, to be told again",
    "tombstones_forgotten_total": "Removals that were forgotten before they were told twice more",
    "streams": "Streams there are",
    "streams_not_served": "Streams whose numbers are beyond events_channels_max",
    "leading": "Shards whose streams are led here",
    "lag_seconds": "How old the newest batch of the slowest stream is",
    "announced": "Blocks that are announced",
    "subscribers": "Subscribers of a stream",
    "invalid_total": "Blocks left out because a router would choke on them",
    "restates_total": "Times that all of an instance was asked to be told again",
    "unheard_total": "Messages to the replica that had no room",
    "admitted_total": "CURVE clients let in",
    "denied_total": "CURVE clients turned away",
    "holdings_engines": "Engines whose own caches are known",
    "holdings_entries": "Blocks in engines' own tiers that are known",
    "ingest_stored_total": "Blocks that engines said they stored",
    "ingest_removed_total": "Blocks that engines said they removed",
    "ingest_cleared_total": "Times that an engine cleared its caches",
    "ingest_reports_total": "Reports taken from engines",
    "ingest_reports_refused_total": "Reports of which nothing was taken",
    "ingest_reports_expired_total": "Engines whose reports ended and were dropped",
    "ingest_replays_total": "Replays asked of engines",
    "ingest_gaps_total": "Gaps in engines' streams",
    "ingest_gaps_lost_total": "Gaps that no replay filled: the engine's entries were dropped",
    "ingest_restarts_total": "Engines' streams that began anew",
    "ingest_duplicates_total": "Batches of engines that came twice",
    "ingest_late_total": "Batches of an engine's earlier life",
    "ingest_invalid_total": "Events of engines that were left out",
    "ingest_orphans": "Blocks that wait for a parent that was not told",
    "ingest_orphans_total": "Blocks that came before their parent",
    "ingest_orphans_dropped_total": "Waiting blocks that were given up",
    "ingest_refused_total": "Blocks left out because a bound is reached",
    "ingest_conflicts_total": "Blocks told again with other tokens",
    "ingest_unknown_removed_total": "Removals of blocks that were not there",
    "ingest_inbox_bytes": "Bytes of engines' batches that wait",
    "ingest_streams": "Engines' streams that are followed",
    "ingest_streams_connected": "Engines' streams that are connected",
    "ingest_streams_partial": "Engines' streams of which something since the engine's start is missing",
    "ingest_silent": "1: registered with a stream of its own and not heard of",
    "ingest_staleness_seconds": "Since when an engine was not heard of",
    "attachment_reached": "1 while the consumer answers, or subscribes",
    "attachment_engines": "Engines whose streams the consumer has",
    "attachment_problems": "What the consumer refuses",
    "attachment_registrations_total": "Registrations made at the consumer",
    "attachment_removals_total": "Registrations taken away there",
    "attachment_refused_total": "Registrations and removals that it refused",
    "attachment_failures_total": "Times that it did not answer",
    "attachment_restatements_total": "Times that all was told again because it joined, or was too slow",
    "attachment_sent_total": "Batches sent to it",
    "attachment_dropped_total": "Batches that it was too slow for",
    "attachment_dumps_total": "Dumps that it fetched",
    "attachment_dump_bytes_total": "Bytes of dumps",
    "attachment_invalid_total": "Blocks or events left out of what it is told",
    "attachment_batches_total": "Batches on a stream of its own",
    "attachment_clears_total": "Times that such a stream said that all is void",
    "attachment_overflows_total": "Times that such a stream was told anew because too much waited",
    "attachment_subscribers": "Subscribers of a stream of its own",
}
"""What each is. A name that is not here is told all the same."""


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
