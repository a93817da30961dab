"""All metrics of the service, as histograms and numerator/denominator counters, under the prefix `ucm_meta_`.

The methods that count are called on hot paths: they touch plain numbers only and cannot fail on any input.
Names, labels and cumulative sums are made when somebody scrapes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from metaservice.core.outcomes import FinishStatus, LeaseOutcome, RefusedReason, RemoveOutcome, WriteOutcome

from . import events
from .instruments import SECONDS, SIZES, Counters, Histogram, largest

log = logging.getLogger("metaservice.telemetry")

PREFIX = "ucm_meta_"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
USAGE_LEVELS = {"tenant": "tenants", "group": "groups", "instance": "instances", "storage": "storages"}
EVENT_LABELS_MAX = 200
"""Streams, engines and consumers told apart in each metric of cache events."""
Usages = Callable[[str], Iterable[tuple[str, tuple[int, int, int, int]]]]


class RouteStats:
    """What one route answered: responses by status and their durations."""

    __slots__ = ("method", "seconds", "statuses", "template")

    def __init__(self, method: str, template: str) -> None:
        self.method = method
        self.template = template
        self.statuses: dict[int, int] = {}
        self.seconds = Histogram(SECONDS)


class Metrics(Collector):
    """Counts what happens; `expose` writes it down for Prometheus.

    `now` is a monotonic clock in seconds. `label_values_max`: how many tenants, groups, instances and
    storages are told apart; the rest is summed up. Also the observer that the replica tells of batches,
    expiry, eviction and loop lag.
    """

    def __init__(self, now: Callable[[], float], *, label_values_max: int = 20) -> None:
        self.now = now
        self._label_values_max = label_values_max
        self._usages: Usages | None = None
        self._gauges: Callable[[], Mapping[str, float]] = dict
        self._events: Callable[[], Mapping[str, float]] = dict
        self._routes: dict[tuple[str, str], RouteStats] = {}
        self.in_flight = 0
        self.connections = 0
        self.failures = 0
        """Scrapes or counts that met a fault of the telemetry itself."""
        self.refused = Counters("http_refused", "Requests refused by a guard before parsing", ["code"])
        self.forwarded = Counters(
            "forwarded", "Requests about shards that are led elsewhere, by what became of them", ["outcome"]
        )
        self.lookups = Counters("lookups", "Lookups by mode and by what cut them short", ["mode", "cut"])
        self.asked = Counters("lookup_blocks_asked", "Blocks asked for in lookups", ["mode"])
        self.hits = Counters("lookup_blocks_hit", "Blocks of lookups that were hits", ["mode"])
        self.lookup_keys = Histogram(SIZES)
        self.write_rows = Counters(
            "write_blocks", "Blocks of start-writes by outcome and reason", ["outcome", "reason"]
        )
        self.finish_rows = Counters("finish_locations", "Locations of finishes by status", ["status"])
        self.published = Counters("published_blocks", "Blocks that began to serve", [])
        self.finish_aborted = Counters(
            "finish_aborted_blocks", "Blocks freed because a part failed or the session was aborted", ["how"]
        )
        self.lease_rows = Counters("lease_operations", "Leases renewed or released, by outcome", ["outcome"])
        self.leases_granted = Counters("leases_granted", "Read leases granted", [])
        self.remove_rows = Counters("removed_blocks", "Blocks of removes by outcome", ["outcome"])
        self.expirations = Counters(
            "expired",
            "Sessions, leases, engines and workers ended by their deadline and not by their owner",
            ["kind"],
        )
        self.evicted_blocks = Counters("evicted_blocks", "Blocks evicted", ["reason"])
        self.evicted_bytes = Counters("evicted_bytes", "Bytes of blocks evicted", ["reason"])
        self.rebuilds = Counters(
            "rebuilds", "Rebuilds of the state from the journal, by cause", ["reason"], values_max=16
        )
        self.commands = Counters("commands", "Commands decided", [])
        self.events = Counters("journal_events", "Events appended to the journal", [])
        self.payload = Counters("journal_bytes", "Bytes appended to the journal", [])
        self.queued = 0
        self.batch_commands = Histogram(SIZES)
        self.append_seconds = Histogram(SECONDS)
        self.lag_seconds = Histogram(SECONDS)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(namespace=PREFIX.rstrip("_"), registry=self._registry)

    # ------------------------------------------------------------ told by the API

    def route(self, method: str, template: str) -> RouteStats:
        """The statistics of one route; templates only, never a concrete path."""
        key = (method, template)
        stats = self._routes.get(key)
        if stats is None:
            stats = self._routes[key] = RouteStats(method, template)
        return stats

    def answered(self, stats: RouteStats, status: int, started: float) -> None:
        """A request was answered; `started` is `now()` when it came."""
        stats.statuses[status] = stats.statuses.get(status, 0) + 1
        stats.seconds.observe(self.now() - started)

    def looked(self, mode: str, cut: str, asked: int, hits: int, leased: bool) -> None:
        """A lookup was answered."""
        self.lookups.add((mode, cut))
        self.asked.add((mode,), asked)
        self.hits.add((mode,), hits)
        self.lookup_keys.observe(asked)
        if leased:
            self.leases_granted.add(())

    def started(self, outcomes: bytes, reasons: bytes) -> None:
        """A start-write was answered."""
        for outcome in WriteOutcome:
            if outcome is not WriteOutcome.refused and (rows := outcomes.count(outcome)):
                self.write_rows.add((outcome.name, "none"), rows)
        if outcomes.count(WriteOutcome.refused):
            for reason in RefusedReason:
                if reason and (rows := reasons.count(reason)):
                    self.write_rows.add((WriteOutcome.refused.name, reason.name), rows)

    def finished(self, status: bytes, published: int) -> None:
        """A finish was answered."""
        for kind in FinishStatus:
            if rows := status.count(kind):
                self.finish_rows.add((kind.name,), rows)
        if published:
            self.published.add((), published)
        if freed := status.count(FinishStatus.freed):
            self.finish_aborted.add(("part_failed",), freed)

    def aborted(self, freed: int) -> None:
        """A write session was aborted."""
        self.finish_aborted.add(("abort",), freed)

    def leases(self, outcomes: bytes) -> None:
        """A renewal or release of leases was answered."""
        for outcome in LeaseOutcome:
            if rows := outcomes.count(outcome):
                self.lease_rows.add((outcome.name,), rows)

    def removed(self, outcomes: bytes) -> None:
        """A remove was answered."""
        for outcome in RemoveOutcome:
            if rows := outcomes.count(outcome):
                self.remove_rows.add((outcome.name,), rows)

    # ------------------------------------------------------------ told by the replica (its observer)

    def batch(self, *, commands: int, events: int, payload_bytes: int, append_ms: float, queued: int) -> None:
        """A batch became durable; `queued` commands wait behind it."""
        self.commands.add((), commands)
        self.events.add((), events)
        self.payload.add((), payload_bytes)
        self.batch_commands.observe(commands)
        self.append_seconds.observe(append_ms / 1000)
        self.queued = queued

    def expired(self, kind: str, count: int) -> None:
        """Deadlines passed: kind is session, lease, engine or worker."""
        self.expirations.add((kind,), count)

    def evicted(self, reason: str, blocks: int, size_bytes: int) -> None:
        """Blocks were evicted: reason is quota, watermark or retired."""
        self.evicted_blocks.add((reason,), blocks)
        self.evicted_bytes.add((reason,), size_bytes)

    def loop_lag(self, lag_ms: float) -> None:
        """How late the event loop came to a timer."""
        self.lag_seconds.observe(lag_ms / 1000)

    def rebuilt(self, reason: str) -> None:
        """The state was thrown away and read from the journal again."""
        self.rebuilds.add((reason,))

    # ------------------------------------------------------------ asked by Prometheus

    def watch_usage(self, usages: Usages) -> None:
        """Where usage comes from at a scrape: `usages(kind)` gives id and (bytes, blocks, deleting bytes,
        deleting blocks) of each registered thing.
        """
        self._usages = usages

    def watch_gauges(self, gauges: Callable[[], Mapping[str, float]]) -> None:
        """What else is told at a scrape: names without the prefix, and their values then."""
        self._gauges = gauges

    def watch_events(self, stats: Callable[[], Mapping[str, float]]) -> None:
        """What the publisher of cache events said last: names (`name` or `name{label="value"}`) without the
        prefix `ucm_meta_events_`, and their values; those that end in `_total` are counters."""
        self._events = stats

    def expose(self, accept: str) -> tuple[str, bytes]:
        """Content type and body for a scrape, in the text format or, when asked for, in OpenMetrics."""
        # Not the header itself: a version in it that is none would be a fault of the encoder.
        encode, content_type = choose_encoder(OPEN_METRICS if "openmetrics" in accept else "text/plain")
        return content_type, encode(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called at a scrape. A fault in one part hides that part only, and is counted."""
        for part in (self._http, self._counted, self._distributions, self._state, self._usage, self._routers):
            try:
                yield from list(part())
            except Exception:
                self.failures += 1
                log.exception("metrics: a part could not be collected")
        yield CounterMetricFamily(
            PREFIX + "telemetry_failures", "Faults of the telemetry", value=self.failures
        )

    def _http(self) -> Iterator[Metric]:
        labels = ["method", "route"]
        requests = CounterMetricFamily(
            PREFIX + "http_requests", "Requests answered", labels=[*labels, "status"]
        )
        seconds = HistogramMetricFamily(
            PREFIX + "http_request_seconds", "From the end of a request to its answer", labels=labels
        )
        for stats in self._routes.values():
            for status, count in stats.statuses.items():
                requests.add_metric([stats.method, stats.template, str(status)], count)
            if stats.statuses:
                stats.seconds.add_to(seconds, [stats.method, stats.template])
        yield requests
        yield seconds
        yield GaugeMetricFamily(PREFIX + "http_in_flight", "Requests being worked on", value=self.in_flight)
        yield GaugeMetricFamily(PREFIX + "http_connections", "Open connections", value=self.connections)
        yield GaugeMetricFamily(
            PREFIX + "sequencer_queue", "Commands waiting to be decided", value=self.queued
        )

    def _counted(self) -> Iterator[Metric]:
        for counter in vars(self).values():
            if isinstance(counter, Counters):
                yield counter.family(PREFIX)

    def _distributions(self) -> Iterator[Metric]:
        for name, help, histogram in (
            ("lookup_keys", "Blocks asked for per lookup", self.lookup_keys),
            ("batch_commands", "Commands per journal batch", self.batch_commands),
            ("journal_append_seconds", "Time to make a batch durable", self.append_seconds),
            ("loop_lag_seconds", "How late the event loop came to a timer", self.lag_seconds),
        ):
            family = HistogramMetricFamily(PREFIX + name, help)
            histogram.add_to(family)
            yield family

    def _state(self) -> Iterator[Metric]:
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(PREFIX + name, f"The shard's {name} now", value=value)

    def _routers(self) -> Iterator[Metric]:
        return events.families(self._events(), PREFIX + "events_", EVENT_LABELS_MAX)

    def _usage(self) -> Iterator[Metric]:
        if self._usages is None:
            return
        labels = ["level", "id"]
        families = [
            GaugeMetricFamily(PREFIX + "usage_bytes", "Bytes being written or serving", labels=labels),
            GaugeMetricFamily(PREFIX + "usage_blocks", "Blocks being written or serving", labels=labels),
            GaugeMetricFamily(PREFIX + "deleting_bytes", "Bytes waiting to be deleted", labels=labels),
            GaugeMetricFamily(PREFIX + "deleting_blocks", "Blocks waiting to be deleted", labels=labels),
        ]
        registered = GaugeMetricFamily(PREFIX + "registered", "Registered things", labels=["level"])
        for level, kind in USAGE_LEVELS.items():
            rows = list(self._usages(kind))
            registered.add_metric([level], len(rows))
            for id, numbers in largest(rows, self._label_values_max):
                for family, number in zip(families, numbers, strict=True):
                    family.add_metric([level, id], number)
        yield from families
        yield registered
