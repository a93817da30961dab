"""OpenTelemetry spans of the hot routes, made by hand, behind a switch.

Off (the default), a request costs one look at `enabled`. On, spans go to an OTLP/HTTP endpoint from a thread
of the SDK with a bounded queue: when the exporter is down spans are dropped, and no request waits or fails.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import metaservice

log = logging.getLogger("metaservice.telemetry")

QUEUE_SPANS_MAX = 4096
EXPORT_DELAY_MS = 5_000
EXPORT_TIMEOUT_MS = 5_000
CLOSE_TIMEOUT_MS = 2_000

__all__ = ["Span", "Tracer", "open_tracer"]


class Tracer:
    """Starts and ends spans. `enabled` is looked at before anything else is paid for."""

    __slots__ = ("_propagator", "_provider", "_tracer", "enabled")

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self.enabled = provider is not None
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("metaservice")
        self._propagator = TraceContextTextMapPropagator()

    def start(self, name: str, traceparent: bytes = b"") -> Span | None:
        """A server span, child of the W3C `traceparent` when it is a valid one.

        None when tracing is off or broken.
        """
        if self._tracer is None:
            return None
        try:
            context = None
            if traceparent:
                context = self._propagator.extract({"traceparent": traceparent.decode("latin-1")})
            return self._tracer.start_span(f"ucm.{name}", context=context, kind=SpanKind.SERVER)
        except Exception:
            log.debug("a span could not be started", exc_info=True)
            return None

    def end(self, span: Span, attributes: Mapping[str, Any], status: int) -> None:
        """End a span with what is known by now; `status` is the HTTP status."""
        try:
            span.set_attributes({"http.response.status_code": status, **attributes})
            if status >= 500:
                span.set_status(StatusCode.ERROR)
            span.end()
        except Exception:
            log.debug("a span could not be ended", exc_info=True)

    def close(self) -> None:
        """Send what is left, for a bounded time: the SDK alone would wait for a dead collector, batch by
        batch.
        """
        if self._provider is None or not self.enabled:
            return
        self.enabled = False
        sending = threading.Thread(target=self._provider.shutdown, name="spans-last", daemon=True)
        sending.start()
        sending.join(CLOSE_TIMEOUT_MS / 1000)


def open_tracer(
    enabled: bool,
    *,
    endpoint: str = "",
    ratio: float = 1.0,
    instance: str = "",
    exporter: SpanExporter | None = None,
) -> Tracer:
    """The tracer of this process. `endpoint` is an OTLP/HTTP traces URL; `ratio` the share of root spans that
    are kept; `instance` (service.instance.id) tells this process, in this life, from every other one: the
    spans of two that share it are mixed up.

    Raises ValueError when tracing is switched on without an endpoint: spans would silently go nowhere.
    `exporter` replaces the OTLP one (a test's, or another transport's). Make it in the process that serves:
    its thread does not survive a fork.
    """
    if not enabled:
        return Tracer()
    if not endpoint and exporter is None:
        raise ValueError("tracing is switched on without an OTLP endpoint; name one or switch tracing off")
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"the sampling ratio is {ratio}; it has to be between 0 and 1")
    resource = Resource.create(
        {
            "service.name": "ucm-meta",
            "service.version": metaservice.__version__,
            "service.instance.id": instance,
        }
    )
    provider = TracerProvider(
        resource=resource, sampler=ParentBased(TraceIdRatioBased(ratio)), shutdown_on_exit=False
    )
    if exporter is None:
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_MS // 1000)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=QUEUE_SPANS_MAX,
            schedule_delay_millis=EXPORT_DELAY_MS,
            export_timeout_millis=EXPORT_TIMEOUT_MS,
        )
    )
    return Tracer(provider)
